"""Metrics of segmentations: the overlap of predictions and targets, counted for each class over the data set."""

from __future__ import annotations

from abc import ABC

import torch
from torch import Tensor
from torchmetrics import Metric

from composer.functional.checks import check_sizes


class _OverlapMetric(Metric, ABC):
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


class MIoU(_OverlapMetric):
    """The intersection over union of prediction and target, averaged over the classes.

    Pixels are counted over the entire data set and divided at the end, so the value does not depend on the split
    into batches and processes. A class that is neither predicted nor a target anywhere is excluded from the mean. The
    value is in percent, between 0 and 100, as in MosaicML Composer. It is 100 times
    ``torchmetrics.classification.MulticlassJaccardIndex`` and, unlike it, does not wait for the device.

    Args:
        num_classes: The number of classes.
        ignore_index: Positions whose target has this id do not count; the class with this id is excluded.

    Raises:
        ValueError: ``num_classes`` is less than 1.

    Example:
        >>> metric = MIoU(num_classes=2)
        >>> logits = torch.tensor([[[4.0, 4.0, 0.0], [0.0, 0.0, 4.0]]])  # one image of three pixels: 0, 0, 1
        >>> metric.update(logits, torch.tensor([[0, 1, -1]]))
        >>> metric.compute()  # the mean of 50 and 0
        tensor(25.)
    """

    def __init__(self, num_classes: int, ignore_index: int = -1) -> None:
        super().__init__(num_classes)
        self.ignore_index = ignore_index

    def update(self, logits: Tensor, targets: Tensor) -> None:
        """Add a batch.

        Args:
            logits: Scores ``(N, C, H, W)``, or class ids ``(N, H, W)``.
            targets: Class ids ``(N, H, W)``.

        Raises:
            ValueError: The shapes do not match each other or the number of classes, or on a CPU, an id is out of range.
        """
        agreed, predicted, actual = count_overlap(logits, targets, self.num_classes, self.ignore_index)
        self.overlap = self.overlap + agreed
        self.whole = self.whole + (predicted + actual - agreed)

    def compute(self) -> Tensor:
        """Return the mean over the classes that occur, in percent, a scalar; ``nan`` if there are none."""
        counts = torch.arange(self.num_classes, device=self.whole.device) != self.ignore_index
        return 100 * class_mean(self.overlap, self.whole, counts)


class Dice(_OverlapMetric):
    """Twice the overlap of prediction and target, divided by the sum of both, averaged over the classes.

    ``dice = 2 |P & T| / (|P| + |T|)`` for each class

    Pixels are counted over the entire data set and divided at the end, so the value does not depend on the split
    into batches and processes. A class that is neither predicted nor a target anywhere is excluded from the mean. The
    value is between 0 and 1. It equals the macro average of ``torchmetrics.classification.MulticlassF1Score`` and,
    unlike it, raises a clear error for masks that do not fit.

    Args:
        num_classes: The number of classes, including the background.
        ignore_index: Positions whose target has this id do not count; None for none.

    Raises:
        ValueError: ``num_classes`` is less than 1.

    Example:
        >>> import torch
        >>> metric = Dice(num_classes=2)
        >>> logits = torch.tensor([[[4.0, 4.0, 0.0], [0.0, 0.0, 4.0]]])  # one image of three pixels: 0, 0, 1
        >>> metric.update(logits, torch.tensor([[0, 1, 1]]))
        >>> metric.compute()  # 2/3 for both
        tensor(0.6667)
    """

    def __init__(self, num_classes: int, ignore_index: int | None = None) -> None:
        super().__init__(num_classes)
        self.ignore_index = ignore_index

    def update(self, preds: Tensor, targets: Tensor) -> None:
        """Add a batch.

        Args:
            preds: Scores ``(N, C, H, W)``, or class ids ``(N, H, W)``.
            targets: Class ids ``(N, H, W)``.

        Raises:
            ValueError: The shapes do not match each other or the number of classes, or on a CPU, an id is out of range.
        """
        agreed, predicted, actual = count_overlap(preds, targets, self.num_classes, self.ignore_index)
        self.overlap = self.overlap + agreed
        self.whole = self.whole + (predicted + actual)

    def compute(self) -> Tensor:
        """Return the mean over the classes that occur, a scalar; ``nan`` if there are none."""
        return class_mean(2 * self.overlap, self.whole)

    @staticmethod
    def compute_stats(preds: Tensor, targets: Tensor) -> Tensor:
        """Return the Dice coefficient of each class in one batch.

        Args:
            preds: Scores ``(N, C, H, W)``.
            targets: Class ids ``(N, H, W)``.

        Returns:
            Shape ``(C,)``; ``nan`` for a class that is neither predicted nor a target.
        """
        agreed, predicted, actual = count_overlap(preds, targets, preds.shape[1])
        return 2 * agreed / (predicted + actual)


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
