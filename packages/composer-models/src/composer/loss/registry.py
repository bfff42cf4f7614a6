"""The loss functions by name."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from composer.functional import soft_cross_entropy
from composer.loss.binary_cross_entropy import binary_cross_entropy_with_logits

__all__ = ["loss_registry"]

loss_registry: dict[str, Callable[..., Tensor]] = {
    "binary_cross_entropy_with_logits": binary_cross_entropy_with_logits,
    "soft_cross_entropy": soft_cross_entropy,
}
"""Loss functions ``f(input, target)`` by name, for programs whose settings are strings; add your own."""
