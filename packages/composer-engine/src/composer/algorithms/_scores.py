"""The scores in the outputs of a model that its targets are for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

__all__ = ["class_scores"]


def class_scores(outputs: Any, target: Tensor) -> tuple[Tensor, bool]:
    """Return the scores ``(N, C, ...)`` that a target is for, and whether the outputs have the classes last.

    Of a dictionary these are ``"logits"``, whose last dimension is the classes, as in Transformers. Otherwise they are
    the tensor of a shape that fits the target, ``(N, C, ...)``.

    Raises:
        KeyError: A dictionary has no such tensor, or several of different shapes.
    """
    if not isinstance(outputs, Mapping):
        return outputs, False
    if "logits" in outputs:
        logits: Tensor = outputs["logits"]
        return logits.movedim(-1, 1), logits.ndim > 2
    fitting = [scores for scores in outputs.values() if isinstance(scores, Tensor) and _fits(scores, target)]
    if len({scores.shape for scores in fitting}) != 1:
        shapes = {name: tuple(scores.shape) for name, scores in outputs.items() if isinstance(scores, Tensor)}
        raise KeyError(
            f"The model returns a dictionary without 'logits', and of its tensors {shapes} not exactly one has a "
            f"shape (N, C, ...) for targets of shape {tuple(target.shape)}. Let it return the scores as 'logits'."
        )
    return fitting[0], False


def _fits(scores: Tensor, target: Tensor) -> bool:
    is_probabilities = scores.shape == target.shape
    return scores.ndim > 1 and (is_probabilities or (scores.shape[0], *scores.shape[2:]) == tuple(target.shape))
