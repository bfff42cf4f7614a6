"""The Dice coefficient of a segmentation."""

from __future__ import annotations

from torch import Tensor

from composer.metrics.overlap import OverlapMetric, class_mean, count_overlap

__all__ = ["Dice"]


class Dice(OverlapMetric):
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
        >>> import torch
        >>> metric = Dice(num_classes=2)
        >>> logits = torch.tensor([[[4.0, 4.0, 0.0], [0.0, 0.0, 4.0]]])  # one image of three pixels: 0, 0, 1
        >>> metric.update(logits, torch.tensor([[0, 1, 1]]))
        >>> metric.compute()  # 2/3 for both
        tensor(0.6667)
    """

    def update(self, preds: Tensor, targets: Tensor) -> None:
        """Add a batch.

        Args:
            preds: Scores ``(N, C, H, W)``, or class ids ``(N, H, W)``.
            targets: Class ids ``(N, H, W)``.

        Raises:
            ValueError: The shapes do not match each other or the number of classes, or on a CPU, an id is out of range.
        """
        agreed, predicted, actual = count_overlap(preds, targets, self.num_classes)
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
