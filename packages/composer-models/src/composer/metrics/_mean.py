"""A mean that does not depend on the split into batches and processes."""

from __future__ import annotations

from abc import ABC

import torch
from torch import Tensor
from torchmetrics import Metric

__all__ = ["MeanMetricBase"]


class MeanMetricBase(Metric, ABC):
    """Base of metrics that are a mean: a sum and a count, which are divided at the end.

    A mean of batch means would give too much weight to the values of a small last batch, or of a batch with many
    ignored targets. Subclasses call :meth:`add` in ``update``.

    Args:
        ignore_index: The class id of targets that do not count.
        dist_sync_on_step: Gather over all processes at every ``forward`` of the metric, not only at ``compute``.
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

    def add(self, total: Tensor, count: Tensor | int) -> None:
        """Add the sum of ``count`` values."""
        self.loss_sum, lost = _add_exactly(self.loss_sum, total)
        self.loss_rest = self.loss_rest + lost
        self.count = self.count + count

    def compute(self) -> Tensor:
        """Return the mean over all values that count, a scalar; ``nan`` if there are none."""
        # After an infinite loss the rest is nan.
        return (self.loss_sum + self.loss_rest.nan_to_num()) / self.count


def _add_exactly(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Return the rounded sum and the rounding error (Knuth's two-sum).

    After a million batches a plain sum in single precision is wrong in the fifth digit, and some devices have no double
    precision.
    """
    # The loss of each batch is much smaller than the sum: `lost` has the digits that the sum cannot represent.
    total = a + b
    b_seen = total - a
    return total, (a - (total - b_seen)) + (b - b_seen)
