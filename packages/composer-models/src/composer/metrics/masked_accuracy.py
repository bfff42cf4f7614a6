"""The accuracy over the targets that are not masked."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from composer.metrics._logits import flat_logits_and_targets
from composer.metrics._mean import MeanMetricBase

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
