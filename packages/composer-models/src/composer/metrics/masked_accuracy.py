"""The accuracy over the targets that are not masked."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torchmetrics import Metric

from composer.metrics._logits import flat_logits_and_targets

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["MaskedAccuracy"]


class MaskedAccuracy(Metric):
    """The fraction of targets whose class has the highest score; masked targets do not count.

    Args:
        ignore_index: The class id of masked targets.
        dist_sync_on_step: Gather over all processes at every ``forward`` of the metric, not only at ``compute``.

    Example:
        >>> import torch
        >>> metric = MaskedAccuracy()
        >>> metric.update(torch.eye(4), torch.tensor([0, 1, 0, -100]))
        >>> metric.compute()
        tensor(0.6667)
    """

    is_differentiable = False
    higher_is_better = True
    full_state_update = False

    correct: Tensor
    total: Tensor

    def __init__(self, ignore_index: int = -100, dist_sync_on_step: bool = False) -> None:
        super().__init__(dist_sync_on_step=dist_sync_on_step)
        self.ignore_index = ignore_index
        self.add_state("correct", torch.tensor(0), dist_reduce_fx="sum")
        self.add_state("total", torch.tensor(0), dist_reduce_fx="sum")

    def update(self, preds: Tensor | Mapping[str, Any], target: Tensor) -> None:
        """Add a batch.

        Args:
            preds: Scores ``(..., C)``; or, if only this shape fits the targets, ``(N, C, ...)``; or a model's output
                with these ``"logits"``.
            target: Class ids ``(...)``.

        Raises:
            KeyError: ``preds`` is a mapping without logits.
            ValueError: The shapes do not match.
        """
        logits, ids = flat_logits_and_targets(preds, target)
        counts = ids != self.ignore_index
        self.correct = self.correct + ((logits.argmax(dim=1) == ids) & counts).sum()
        self.total = self.total + counts.sum()

    def compute(self) -> Tensor:
        """Return the accuracy, a scalar; ``nan`` if no target counts."""
        return self.correct / self.total
