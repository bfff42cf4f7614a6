"""The mean cross entropy over a data set."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from torchmetrics import Metric

__all__ = ["CrossEntropy"]


class CrossEntropy(Metric):
    """The cross entropy, averaged over all targets seen, however they were split into batches.

    Sums and counts are kept apart until :meth:`compute`, in each process and across processes. A mean of batch means
    would give the targets of a small last batch, or of one with many ignored targets, too much weight.

    Args:
        ignore_index: Targets with this class id do not count.
        dist_sync_on_step: Gather over all processes at every ``forward`` of the metric, not only at ``compute``.

    Example:
        >>> import torch
        >>> metric = CrossEntropy()
        >>> metric.update(torch.zeros(3, 2), torch.tensor([0, 1, -100]))
        >>> metric.compute()
        tensor(0.6931)
    """

    is_differentiable = False
    higher_is_better = False
    full_state_update = False

    loss_sum: Tensor
    loss_rest: Tensor
    count: Tensor

    def __init__(self, ignore_index: int = -100, dist_sync_on_step: bool = False) -> None:
        super().__init__(dist_sync_on_step=dist_sync_on_step)
        self.ignore_index = ignore_index
        self.add_state("loss_sum", torch.tensor(0.0), dist_reduce_fx="sum")
        self.add_state("loss_rest", torch.tensor(0.0), dist_reduce_fx="sum")
        self.add_state("count", torch.tensor(0), dist_reduce_fx="sum")

    def update(self, preds: Tensor, targets: Tensor) -> None:
        """Add a batch.

        Args:
            preds: Logits, shape ``(N, C, ...)``.
            targets: Class ids ``(N, ...)`` or class probabilities ``(N, C, ...)``.

        Raises:
            ValueError: The shapes do not fit each other.
        """
        preds = preds.float()
        if targets.is_floating_point():
            batch_sum = cross_entropy(preds, targets.float(), reduction="sum")
            self.count = self.count + targets.numel() // targets.shape[1]
        else:
            batch_sum = cross_entropy(preds, targets, ignore_index=self.ignore_index, reduction="sum")
            self.count = self.count + (targets != self.ignore_index).sum()
        self.loss_sum, lost = _add_exactly(self.loss_sum, batch_sum)
        self.loss_rest = self.loss_rest + lost

    def compute(self) -> Tensor:
        """Return the mean over all targets that count, a scalar; ``nan`` if there was none."""
        # Of an infinite loss nothing but nan remains in the rest.
        return (self.loss_sum + self.loss_rest.nan_to_num()) / self.count


def _add_exactly(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Return the rounded sum and what rounding took away (Knuth's two-sum).

    After a million batches a plain sum in single precision is off in the fifth digit, and not every device has double.
    """
    total = a + b
    b_seen = total - a
    return total, (a - (total - b_seen)) + (b - b_seen)
