"""The scores in the outputs of a model that its targets are for, and the labels that belong to them."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from composer.functional.transformers_loss import predicts_next_token


def class_scores(outputs: Any, target: Tensor, *, detaches: bool = True) -> tuple[Tensor, bool]:
    """Return the scores ``(N, C, ...)`` that a target is for, and whether the outputs have the classes last.

    Of a dictionary these are ``"logits"``. The classes of three dimensions are the last one, as in Transformers, and
    those of more the second if the target fits, as in ``(N, C, H, W)``. Without ``"logits"`` they are the tensor of a
    shape that fits the target, ``(N, C, ...)``. With ``detaches`` the scores of ``"logits"`` have no gradients, for
    callers that use only their shape, dtype and device.

    Raises:
        KeyError: A dictionary has no such tensor, or several of different shapes.
    """
    if not isinstance(outputs, Mapping):
        return outputs, False
    if "logits" in outputs:
        logits: Tensor = outputs["logits"]
        is_per_token = logits.ndim == 3 and target.shape in {logits.shape, logits.shape[:-1]}
        is_last = is_per_token or (logits.ndim > 2 and not _fits(logits, target))
        scores = logits.detach() if detaches else logits
        return scores.movedim(-1, 1) if is_last else scores, is_last
    fitting = [scores for scores in outputs.values() if isinstance(scores, Tensor) and _fits(scores, target)]
    if len({scores.shape for scores in fitting}) != 1:
        shapes = {name: tuple(scores.shape) for name, scores in outputs.items() if isinstance(scores, Tensor)}
        raise KeyError(
            f"The model returns a dictionary without 'logits', and of its tensors {shapes} not exactly one has a "
            f"shape (N, C, ...) for targets of shape {tuple(target.shape)}. Let it return the scores as 'logits'."
        )
    return fitting[0], False


def is_one_score(scores: object) -> bool:
    """Return whether scores are one per sample, ``(N,)`` or ``(N, 1, ...)``, which distinguishes two classes."""
    return isinstance(scores, Tensor) and (scores.ndim == 1 or (scores.ndim > 1 and scores.shape[1] == 1))


def shifts_labels(model: nn.Module) -> bool:
    """Return whether the label of a position belongs to the scores of the previous one."""
    if hasattr(model, "shift_labels"):
        return bool(model.shift_labels)
    transformers: Any = sys.modules.get("transformers")
    inner = () if transformers is None else model.modules()
    return any(isinstance(one, transformers.PreTrainedModel) and predicts_next_token(one) for one in inner)


def _fits(scores: Tensor, target: Tensor) -> bool:
    is_probabilities = scores.shape == target.shape
    return scores.ndim > 1 and (is_probabilities or (scores.shape[0], *scores.shape[2:]) == tuple(target.shape))
