"""The Dice coefficient of a segmentation."""

from __future__ import annotations

import torch
from torch import Tensor
from torchmetrics import Metric

from composer.metrics.overlap import class_mean, count_overlap

__all__ = ["Dice"]


class Dice(Metric):
    """Twice the overlap of prediction and target, divided by the sum of both, averaged over the classes.

    ``dice = 2 |P & T| / (|P| + |T|)`` for each class

    Pixels are counted over the entire data set and divided at the end, so the value does not depend on the split
    into batches and processes. A class that is neither predicted nor a target anywhere is excluded from the mean. The
    value is between 0 and 1. It equals the macro average of ``torchmetrics.classification.MulticlassF1Score`` and,
    unlike it, raises a clear error for masks that do not fit.

    Args:
        num_classes: The number of classes, including the background.

    Raises:
        ValueError: ``num_classes`` is less than 1.

    Example:
        >>> metric = Dice(num_classes=2)
        >>> logits = torch.tensor([[[4.0, 4.0, 0.0], [0.0, 0.0, 4.0]]])  # one image of three pixels: 0, 0, 1
        >>> metric.update(logits, torch.tensor([[0, 1, 1]]))
        >>> metric.compute()  # 2/3 for both
        tensor(0.6667)
    """

    is_differentiable = False
    higher_is_better = True
    full_state_update = False

    agreed: Tensor
    total: Tensor

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        if num_classes < 1:
            raise ValueError(f"num_classes must be at least 1, got {num_classes}.")
        self.num_classes = num_classes
        self.add_state("agreed", torch.zeros(num_classes, dtype=torch.long), dist_reduce_fx="sum")
        self.add_state("total", torch.zeros(num_classes, dtype=torch.long), dist_reduce_fx="sum")

    def update(self, preds: Tensor, targets: Tensor) -> None:
        """Add a batch.

        Args:
            preds: Scores ``(N, C, H, W)``, or class ids ``(N, H, W)``.
            targets: Class ids ``(N, H, W)``.

        Raises:
            ValueError: The shapes do not match each other or the number of classes, or on a CPU, an id is out of range.
        """
        agreed, predicted, actual = count_overlap(preds, targets, self.num_classes)
        self.agreed = self.agreed + agreed
        self.total = self.total + (predicted + actual)

    def compute(self) -> Tensor:
        """Return the mean over the classes that occur, a scalar; ``nan`` if there are none."""
        return class_mean(2 * self.agreed, self.total)

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
