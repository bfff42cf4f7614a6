"""The binary cross entropy of each class, with class ids or class probabilities."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional

from composer.functional import ensure_targets_one_hot
from composer.functional.checks import check_choice


def binary_cross_entropy_with_logits(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    reduction: str = "sum",
    pos_weight: Tensor | None = None,
    scale_by_batch_size: bool = True,
) -> Tensor:
    """Sum the binary cross entropies of all classes, each of which is predicted independently.

    ``loss = -sum(target * log(sigmoid(input)) + (1 - target) * log(1 - sigmoid(input))) / N``

    Args:
        input: Logits, shape ``(N, C, ...)``.
        target: Class ids ``(N, ...)``, where a negative id means no class; or a probability for each class, shape
            ``(N, C, ...)``, which need not sum to 1.
        weight: A factor for each element; any shape that broadcasts to ``input``.
        reduction: ``"none"``, ``"mean"`` or ``"sum"``.
        pos_weight: A factor for positive elements; broadcasts to ``input``.
        scale_by_batch_size: Whether to divide by ``N``. With the sum, the result is the mean loss per sample.

    Returns:
        The loss: a scalar, or one for each element, shape ``(N, C, ...)``, with ``"none"``.

    Raises:
        ValueError: ``target`` is neither class ids nor probabilities, ``reduction`` is none of the three, or the
            batch is empty.

    Example:
        >>> import torch
        >>> binary_cross_entropy_with_logits(torch.zeros(2, 3), torch.tensor([0, 2]))  # 3 times log(2) a sample
        tensor(2.0794)
    """
    check_choice("reduction", reduction, "none", "mean", "sum")
    target = ensure_targets_one_hot(input, target)
    if scale_by_batch_size and not input.shape[0]:
        raise ValueError("scale_by_batch_size divides by the number of samples, but input has none.")
    loss = functional.binary_cross_entropy_with_logits(
        input, target.to(input.dtype), weight, reduction=reduction, pos_weight=pos_weight
    )
    return loss / input.shape[0] if scale_by_batch_size else loss
