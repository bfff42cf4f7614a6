"""The mean intersection over union of a segmentation."""

from __future__ import annotations

import torch
from torch import Tensor

from composer.metrics.overlap import OverlapMetric, class_mean, count_overlap

__all__ = ["MIoU"]


class MIoU(OverlapMetric):
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
