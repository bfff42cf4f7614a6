"""Call a loss with targets of the type that it takes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.nn import functional

from composer.functional import soft_cross_entropy
from composer.loss.binary_cross_entropy import binary_cross_entropy_with_logits

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["call_loss", "takes_logits"]

_TAKE_FLOATS = (
    nn.BCELoss,
    nn.BCEWithLogitsLoss,
    nn.HuberLoss,
    nn.MSELoss,
    nn.MultiLabelSoftMarginLoss,
    nn.SoftMarginLoss,
)
_FUNCTIONS = (
    functional.binary_cross_entropy,
    functional.binary_cross_entropy_with_logits,
    functional.huber_loss,
    functional.mse_loss,
    functional.multilabel_soft_margin_loss,
    functional.soft_margin_loss,
)
_OF_LOGITS = nn.BCEWithLogitsLoss, nn.CrossEntropyLoss, nn.MultiLabelSoftMarginLoss, nn.SoftMarginLoss
_FUNCTIONS_OF_LOGITS = (
    binary_cross_entropy_with_logits,
    soft_cross_entropy,
    functional.binary_cross_entropy_with_logits,
    functional.cross_entropy,
    functional.multilabel_soft_margin_loss,
    functional.soft_margin_loss,
)


def takes_logits(loss_fn: Callable[..., Tensor]) -> bool:
    """Return whether a loss is known to take logits; another one may take probabilities."""
    return isinstance(loss_fn, _OF_LOGITS) or getattr(loss_fn, "func", loss_fn) in _FUNCTIONS_OF_LOGITS


def call_loss(loss_fn: Callable[..., Tensor], outputs: Any, target: Any, *args: Any, **kwargs: Any) -> Tensor:
    """Call a loss; torch's losses of floats get integer targets in the shape of the scores in the type of the scores.

    Metrics of several labels take integers. Every other loss gets the targets as they are and is called once: a second
    call would compute its terms, and draw its random numbers, twice in each step.
    """
    if not _has_label_for_each_score(outputs, target):
        return loss_fn(outputs, target, *args, **kwargs)
    if isinstance(loss_fn, _TAKE_FLOATS) or getattr(loss_fn, "func", loss_fn) in _FUNCTIONS:
        return loss_fn(outputs, target.to(outputs.dtype), *args, **kwargs)
    try:
        return loss_fn(outputs, target, *args, **kwargs)
    except RuntimeError as error:
        error.add_note(f"The loss received targets of {target.dtype}. If it needs floats, convert them in it.")
        raise


def _has_label_for_each_score(outputs: object, target: object) -> bool:
    if not isinstance(outputs, Tensor) or not isinstance(target, Tensor):
        return False
    return outputs.shape == target.shape and outputs.is_floating_point() and not target.is_floating_point()
