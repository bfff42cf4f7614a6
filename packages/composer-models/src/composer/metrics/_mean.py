"""A mean that is the same whatever the split into batches and processes."""

from __future__ import annotations

from abc import ABC

import torch
from torch import Tensor
from torchmetrics import Metric

__all__ = ["MeanMetricBase"]


class MeanMetricBase(Metric, ABC):
    """What metrics that are a mean share: a sum and a count, kept apart until the end.

    A mean of batch means would give the values of a small last batch, or of one with many ignored targets, too much
    weight. A subclass calls :meth:`add` in ``update`` and :meth:`mean` in ``compute``.

    Args:
        dist_sync_on_step: Gather over all processes at every ``forward`` of the metric, not only at ``compute``.
    """

    full_state_update = False

    loss_sum: Tensor
    loss_rest: Tensor
    count: Tensor

    def __init__(self, dist_sync_on_step: bool = False) -> None:
        super().__init__(dist_sync_on_step=dist_sync_on_step)
        self.add_state("loss_sum", torch.tensor(0.0), dist_reduce_fx="sum")
        self.add_state("loss_rest", torch.tensor(0.0), dist_reduce_fx="sum")
        self.add_state("count", torch.tensor(0), dist_reduce_fx="sum")

    def add(self, total: Tensor, count: Tensor | int) -> None:
        """Add the sum of ``count`` values."""
        self.loss_sum, lost = _add_exactly(self.loss_sum, total)
        self.loss_rest = self.loss_rest + lost
        self.count = self.count + count

    def mean(self) -> Tensor:
        """Return the mean of all values, a scalar; ``nan`` if there was none."""
        # Of an infinite loss nothing but nan remains in the rest.
        return (self.loss_sum + self.loss_rest.nan_to_num()) / self.count


def _add_exactly(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Return the rounded sum and what rounding took away (Knuth's two-sum).

    After a million batches a plain sum in single precision is off in the fifth digit, and not every device has double.
    """
    total = a + b
    b_seen = total - a
    return total, (a - (total - b_seen)) + (b - b_seen)
