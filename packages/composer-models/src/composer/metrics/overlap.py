"""How many predictions and targets each class has, and how many of them agree."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["class_mean", "count_overlap"]


def count_overlap(
    preds: Tensor, targets: Tensor, num_classes: int, ignore_index: int | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Count for each class where predictions and targets agree, where it is predicted and where it is the target.

    Args:
        preds: Scores ``(N, C, ...)``, of which the greatest counts, or class ids ``(N, ...)``.
        targets: Class ids ``(N, ...)``.
        num_classes: ``C``.
        ignore_index: Where the target has this id, nothing is counted.

    Returns:
        Three tensors of counts, int64 of shape ``(C,)``.

    Raises:
        ValueError: The shapes do not fit each other or ``num_classes``; on a CPU also, a class id is out of range.

    Example:
        >>> count_overlap(torch.tensor([0, 0, 1]), torch.tensor([0, 1, -1]), 2, ignore_index=-1)
        (tensor([1, 0]), tensor([2, 0]), tensor([1, 1]))
    """
    ids, truth = _predicted_ids(preds, targets, num_classes).long(), targets.long()
    # Counted without looking at the values, which would wait for the device: what does not count adds 0 to a class.
    counted = torch.ones_like(truth, dtype=torch.bool) if ignore_index is None else truth != ignore_index
    ids, truth = ids.where(counted, 0), truth.where(counted, 0)
    agreed = counted & (ids == truth)
    try:
        return (
            _count(truth, agreed, num_classes),
            _count(ids, counted, num_classes),
            _count(truth, counted, num_classes),
        )
    except RuntimeError as error:
        if "out of bounds" not in str(error):
            raise
        but = "" if ignore_index is None else f", and {ignore_index} is ignored"
        raise ValueError(
            f"Class ids must be from 0 to {num_classes - 1}{but}; predictions have {_span(ids[counted])} and targets "
            f"{_span(truth[counted])}."
        ) from error


def class_mean(part: Tensor, whole: Tensor, counts: Tensor | None = None) -> Tensor:
    """Return the mean over the classes of ``part / whole``, of those with a ``whole``; nan if none has.

    Args:
        part: Shape ``(C,)``.
        whole: Shape ``(C,)``.
        counts: Which classes count, booleans of shape ``(C,)``; all if None.

    Example:
        >>> class_mean(torch.tensor([1, 0, 0]), torch.tensor([2, 2, 0]))
        tensor(0.2500)
    """
    seen = whole > 0
    seen = seen if counts is None else seen & counts
    return (part / whole.clamp(min=1) * seen).sum() / seen.sum()


def _predicted_ids(preds: Tensor, targets: Tensor, num_classes: int) -> Tensor:
    if preds.shape == targets.shape and not preds.is_floating_point():
        return preds
    if preds.ndim >= 2 and (preds.shape[0], *preds.shape[2:]) == tuple(targets.shape):
        if preds.shape[1] == num_classes:
            return preds.argmax(dim=1)
        raise ValueError(
            f"The metric counts {num_classes} classes, but predictions of shape {tuple(preds.shape)} hold scores of "
            f"{preds.shape[1]}. Give the metric the model's number of classes."
        )
    raise ValueError(
        f"Predictions must be scores (N, {num_classes}, ...) or integer class ids (N, ...), and targets class ids "
        f"(N, ...), got shapes {tuple(preds.shape)} and {tuple(targets.shape)}."
    )


def _count(ids: Tensor, counted: Tensor, num_classes: int) -> Tensor:
    return ids.new_zeros(num_classes).scatter_add_(0, ids.flatten(), counted.flatten().long())


def _span(ids: Tensor) -> str:
    return f"{int(ids.min())} to {int(ids.max())}"
