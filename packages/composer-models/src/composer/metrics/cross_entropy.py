"""The mean cross entropy over a data set."""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import cross_entropy

from composer.metrics._mean import MeanMetricBase

__all__ = ["CrossEntropy"]


class CrossEntropy(MeanMetricBase):
    """The cross entropy, averaged over all targets, whatever the split into batches.

    Sums and counts are accumulated separately until ``compute()``, in each process and across processes.

    Args:
        ignore_index: The class id of targets that do not count.
        dist_sync_on_step: Gather over all processes at every ``forward`` of the metric, not only at ``compute``.

    Example:
        >>> import torch
        >>> metric = CrossEntropy()
        >>> metric.update(torch.zeros(3, 2), torch.tensor([0, 1, -100]))
        >>> metric.compute()
        tensor(0.6931)
    """

    def update(self, preds: Tensor, targets: Tensor) -> None:
        """Add a batch.

        Args:
            preds: Logits, shape ``(N, C, ...)``.
            targets: Class ids ``(N, ...)``, any integer dtype; or class probabilities ``(N, C, ...)``, of which rows of
                zeros do not count.

        Raises:
            ValueError: The shapes do not match.
        """
        preds = preds.float()
        if targets.is_floating_point() or targets.shape == preds.shape:
            # A row of zeros is an ignored label, as smooth_labels encodes it.
            self.add(cross_entropy(preds, targets.float(), reduction="sum"), targets.sum(1).count_nonzero())
        else:
            batch_sum = cross_entropy(preds, targets.long(), ignore_index=self.ignore_index, reduction="sum")
            self.add(batch_sum, (targets != self.ignore_index).sum())
