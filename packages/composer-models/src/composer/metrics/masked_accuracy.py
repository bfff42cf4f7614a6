"""The accuracy over the targets that are not masked."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from composer.metrics._logits import flat_logits_and_targets
from composer.metrics._mean import MeanMetricBase

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

__all__ = ["MaskedAccuracy"]


class MaskedAccuracy(MeanMetricBase):
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

    higher_is_better = True

    def __init__(self, ignore_index: int = -100, dist_sync_on_step: bool = False) -> None:
        super().__init__(dist_sync_on_step=dist_sync_on_step)
        self.ignore_index = ignore_index

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
        self.add(((logits.argmax(dim=1) == ids) & counts).sum(), counts.sum())
