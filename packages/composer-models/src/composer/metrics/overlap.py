"""Counts of predictions, targets and their agreement for each class."""

from __future__ import annotations

from abc import ABC

import torch
from torch import Tensor
from torchmetrics import Metric

from composer.functional.checks import check_sizes

__all__ = ["OverlapMetric", "class_mean", "count_overlap"]


class OverlapMetric(Metric, ABC):
    """Base of metrics that add up an overlap of predictions and targets, and what it is a part of, for each class."""

    is_differentiable = False
    higher_is_better = True
    full_state_update = False

    overlap: Tensor
    whole: Tensor

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        check_sizes(num_classes=num_classes)
        self.num_classes = num_classes
        for name in ("overlap", "whole"):
            self.add_state(name, torch.zeros(num_classes, dtype=torch.long), dist_reduce_fx="sum")


def count_overlap(
    preds: Tensor, targets: Tensor, num_classes: int, ignore_index: int | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Count for each class how often predictions and targets agree, it is predicted, and it is the target.

    Args:
        preds: Scores ``(N, C, ...)``, of which the highest is the prediction, or class ids ``(N, ...)``.
        targets: Class ids ``(N, ...)``.
        num_classes: ``C``.
        ignore_index: Positions whose target has this id do not count.

    Returns:
        Three tensors of counts, int64 of shape ``(C,)``.

    Raises:
        ValueError: The shapes do not match each other or ``num_classes``, or on a CPU, a class id is out of range.

    Example:
        >>> count_overlap(torch.tensor([0, 0, 1]), torch.tensor([0, 1, -1]), 2, ignore_index=-1)
        (tensor([1, 0]), tensor([2, 0]), tensor([1, 1]))
    """
    ids, truth = _predicted_ids(preds, targets, num_classes).long(), targets.long()
    # Reading the values would wait for the device; positions that do not count add 0 to class 0.
    counted = torch.ones_like(truth, dtype=torch.bool) if ignore_index is None else truth != ignore_index
    ids, truth = ids.where(counted, 0), truth.where(counted, 0)
    agreed = counted & (ids == truth)

    def count(classes: Tensor, weights: Tensor) -> Tensor:
        return classes.new_zeros(num_classes).scatter_add_(0, classes.flatten(), weights.flatten().long())

    try:
        return count(truth, agreed), count(ids, counted), count(truth, counted)
    except RuntimeError as error:
        if "out of bounds" not in str(error):
            raise
        but = "" if ignore_index is None else f", and {ignore_index} is ignored"
        raise ValueError(
            f"Class ids must be from 0 to {num_classes - 1}{but}; predictions have {_span(ids[counted])} and targets "
            f"{_span(truth[counted])}."
        ) from error


def class_mean(part: Tensor, whole: Tensor, counts: Tensor | None = None) -> Tensor:
    """Return the mean of ``part / whole`` over the classes with a positive ``whole``; nan if there are none.

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
    # Products instead of a selection, whose size would have to be read from the device.
    return (part / whole.clamp(min=1) * seen).sum() / seen.sum()


def _predicted_ids(preds: Tensor, targets: Tensor, num_classes: int) -> Tensor:
    if preds.shape == targets.shape and not preds.is_floating_point():
        return preds
    if preds.ndim >= 2 and (preds.shape[0], *preds.shape[2:]) == tuple(targets.shape):
        if preds.shape[1] == num_classes:
            return preds.argmax(dim=1)
        raise ValueError(
            f"The metric counts {num_classes} classes, but predictions of shape {tuple(preds.shape)} hold scores of "
            f"{preds.shape[1]}. Create the metric with the number of classes of the model."
        )
    raise ValueError(
        f"Predictions must be scores (N, {num_classes}, ...) or integer class ids (N, ...), and targets class ids "
        f"(N, ...), got shapes {tuple(preds.shape)} and {tuple(targets.shape)}."
    )


def _span(ids: Tensor) -> str:
    return f"{int(ids.min())} to {int(ids.max())}"
