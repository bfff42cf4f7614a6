"""The F1 score of two classes, from logits."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torchmetrics.classification import BinaryF1Score as TorchBinaryF1Score

from composer.metrics._logits import logits_of

__all__ = ["BinaryF1Score"]


class BinaryF1Score(TorchBinaryF1Score):
    """torchmetrics' F1 score of class 1 for models that return logits, two or one per sample.

    torchmetrics infers from the values whether they are probabilities or logits. Here they are logits: with two, the
    class of the higher one is predicted; with one, class 1 is predicted where it is positive.

    Args:
        dist_sync_on_step: Gather over all processes at every ``forward`` of the metric, not only at ``compute``.

    Example:
        >>> import torch
        >>> metric = BinaryF1Score()
        >>> metric.update(torch.tensor([[2.0, 1.0], [0.0, 1.0], [0.0, 3.0]]), torch.tensor([1, 1, 0]))
        >>> metric.compute()
        tensor(0.5000)
    """

    def __init__(self, dist_sync_on_step: bool = False) -> None:
        # Validating values would synchronise with the device at every batch.
        super().__init__(ignore_index=-100, validate_args=False, dist_sync_on_step=dist_sync_on_step)

    def update(self, output: Tensor | Mapping[str, Any], target: Tensor) -> None:
        """Add a batch.

        Args:
            output: Logits ``(N, 2)``, ``(N, 1)`` or ``(N,)``; or a model's output with these ``"logits"``.
            target: Classes ``(N,)``: 0 or 1; -100 does not count.

        Raises:
            KeyError: ``output`` is a mapping without logits.
            ValueError: The shapes do not match.
        """
        logits = logits_of(output)
        if target.ndim != 1 or tuple(logits.shape) not in {(len(target), 2), (len(target), 1), (len(target),)}:
            raise ValueError(
                "BinaryF1Score takes logits (N, 2), (N, 1) or (N,) with targets (N,), "
                f"got {tuple(logits.shape)} with {tuple(target.shape)}."
            )
        is_pair = logits.ndim == 2 and logits.shape[1] == 2
        guesses = logits.argmax(dim=1) if is_pair else logits.reshape(len(target)) > 0
        super().update(guesses.long(), target)
