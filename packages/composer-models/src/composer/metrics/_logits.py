"""Logits and targets of models, converted to the shape that metrics expect."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

__all__ = ["flat_logits_and_targets", "logits_of"]


def logits_of(output: Any) -> Tensor:
    """Return the logits of a model's output, a mapping with ``"logits"`` or the logits themselves.

    Raises:
        KeyError: The output is a mapping without logits.
    """
    if not isinstance(output, Mapping):
        return output  # type: ignore[no-any-return]
    if "logits" not in output:
        raise KeyError(f"A model's output must have 'logits' for this metric, got {sorted(map(str, output))}.")
    return output["logits"]  # type: ignore[no-any-return]


def flat_logits_and_targets(output: Any, target: Tensor) -> tuple[Tensor, Tensor]:
    """Return logits ``(M, C)`` and class ids ``(M,)`` of a model's output for ``M`` targets.

    The classes are the last dimension, as in language models, or else the second, as in models of images.

    Raises:
        ValueError: The shapes do not match.
    """
    logits = logits_of(output)
    if logits.ndim == target.ndim + 1 and logits.ndim >= 2:
        if logits.shape[:-1] == target.shape:
            return logits.reshape(-1, logits.shape[-1]), target.reshape(-1)
        if (logits.shape[0], *logits.shape[2:]) == target.shape:
            return logits.movedim(1, -1).reshape(-1, logits.shape[1]), target.reshape(-1)
    raise ValueError(
        "The logits must have one dimension more than the targets, that of the classes: (..., C) for targets (...), "
        f"got {tuple(logits.shape)} for {tuple(target.shape)}."
    )
