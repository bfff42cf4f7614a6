"""Cross entropy and perplexity of language models, per token."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch.nn.functional import cross_entropy

from composer.metrics._logits import flat_logits_and_targets
from composer.metrics._mean import MeanMetricBase

__all__ = ["LanguageCrossEntropy", "LanguagePerplexity"]


class _TokenMean(MeanMetricBase):
    """Base of metrics of the mean loss per token."""

    def __init__(
        self, dist_sync_on_step: bool = False, ignore_index: int = -100, *, vocab_size: int | None = None
    ) -> None:
        super().__init__(ignore_index, dist_sync_on_step)
        if vocab_size is not None:
            warnings.warn(
                f"vocab_size is ignored: {type(self).__name__} reads it from the logits. Omit it.",
                DeprecationWarning,
                stacklevel=2,
            )

    def update(self, output: Tensor | Mapping[str, Any], target: Tensor) -> None:
        """Add a batch.

        Args:
            output: Logits ``(..., V)``, for instance ``(N, L, V)``; or a model's output with these ``"logits"``.
            target: Token ids ``(...)``.

        Raises:
            KeyError: ``output`` is a mapping without logits.
            ValueError: The shapes do not match.
        """
        logits, ids = flat_logits_and_targets(output, target)
        batch_sum = cross_entropy(logits.float(), ids, ignore_index=self.ignore_index, reduction="sum")
        self.add(batch_sum, (ids != self.ignore_index).sum())


class LanguageCrossEntropy(_TokenMean):
    """The cross entropy in nats per token, averaged over all tokens, whatever the split into batches.

    Args:
        dist_sync_on_step: Gather over all processes at every ``forward`` of the metric, not only at ``compute``.
        ignore_index: The id of tokens that do not count, such as padding and tokens that are not masked.
        vocab_size: Ignored, with a ``DeprecationWarning``.

    Example:
        >>> import torch
        >>> metric = LanguageCrossEntropy()
        >>> metric.update(torch.zeros(2, 3, 10), torch.tensor([[1, 5, -100], [7, -100, -100]]))
        >>> metric.compute()
        tensor(2.3026)
    """


class LanguagePerplexity(_TokenMean):
    """The perplexity: ``exp`` of the mean cross entropy over all tokens, whatever the split into batches.

    Args:
        dist_sync_on_step: Gather over all processes at every ``forward`` of the metric, not only at ``compute``.
        ignore_index: The id of tokens that do not count, such as padding and tokens that are not masked.
        vocab_size: Ignored, with a ``DeprecationWarning``.

    Example:
        >>> import torch
        >>> metric = LanguagePerplexity()
        >>> metric.update(torch.zeros(2, 3, 10), torch.tensor([[1, 5, -100], [7, -100, -100]]))
        >>> round(metric.compute().item(), 3)
        10.0
    """

    def compute(self) -> Tensor:
        """Return the perplexity, a scalar; ``nan`` if no token counts."""
        return super().compute().exp()
