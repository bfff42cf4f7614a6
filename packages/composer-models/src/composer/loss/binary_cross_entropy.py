"""The binary cross entropy of each class on its own, with class ids or class probabilities."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch.nn import functional

from composer.functional import ensure_targets_one_hot

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["binary_cross_entropy_with_logits"]


def binary_cross_entropy_with_logits(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    reduction: str = "sum",
    pos_weight: Tensor | None = None,
    scale_by_batch_size: bool = True,
) -> Tensor:
    """Ask of every class by itself whether it is there, and sum the binary cross entropies.

    ``loss = -sum(target * log(sigmoid(input)) + (1 - target) * log(1 - sigmoid(input))) / N``

    Args:
        input: Logits, shape ``(N, C, ...)``.
        target: Class ids ``(N, ...)``, of which a negative one says that no class is there; or a probability for each
            class, shape ``(N, C, ...)``, which need not sum to 1.
        weight: A factor for each element; any shape that broadcasts to ``input``.
        reduction: ``"none"``, ``"mean"`` or ``"sum"``.
        pos_weight: A factor for the elements that are there; broadcasts to ``input``.
        scale_by_batch_size: Whether to divide by ``N``. With the sum, the loss is then one sample's.

    Returns:
        The loss: a scalar, or one for each element, shape ``(N, C, ...)``, with ``"none"``.

    Raises:
        ValueError: ``target`` is neither class ids nor probabilities, ``reduction`` is none of the three, or there is
            no sample to divide by.

    Example:
        >>> import torch
        >>> binary_cross_entropy_with_logits(torch.zeros(2, 3), torch.tensor([0, 2]))  # 3 times log(2) a sample
        tensor(2.0794)
    """
    if reduction not in {"none", "mean", "sum"}:
        raise ValueError(f'reduction must be "none", "mean" or "sum", got {reduction!r}.')
    target = ensure_targets_one_hot(input, target)
    if scale_by_batch_size and not input.shape[0]:
        raise ValueError("scale_by_batch_size divides by the number of samples, but input has none.")
    loss = functional.binary_cross_entropy_with_logits(
        input, target.to(input.dtype), weight, reduction=reduction, pos_weight=pos_weight
    )
    return loss / input.shape[0] if scale_by_batch_size else loss
