"""What MixUp and CutMix share: targets, or losses, blended as the samples were."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from composer import functional as cf
from composer.core import Event, FieldsByEvent, Stage, get_precision_context

if TYPE_CHECKING:
    from torch import Tensor

    from composer.core import Algorithm, BatchKey, State

__all__ = ["MIX_LOSSES", "MIX_READS", "MIX_TARGETS", "MIX_WRITES", "blend_losses", "blend_targets", "generator_of"]

MIX_TARGETS: Mapping[Event, Stage] = {Event.BEFORE_FORWARD: Stage.MIX, Event.BEFORE_LOSS: Stage.MIX}
"""Where an algorithm runs that blends samples before the forward pass and their targets before the loss."""

MIX_LOSSES: Mapping[Event, Stage] = {Event.BEFORE_FORWARD: Stage.LOSS, Event.AFTER_LOSS: Stage.LOSS}
"""Where an algorithm runs that blends samples and then the losses for both targets.

A blend of losses is the outermost, so its samples are blended after those of all who blend targets; and it comes before
others take back what they did to the targets, so that the partner's loss sees that, too.
"""

MIX_READS = FieldsByEvent(
    {
        Event.BEFORE_FORWARD: {"batch.input", "batch.target"},
        Event.BEFORE_LOSS: {"batch.target", "outputs"},
        Event.AFTER_LOSS: {"batch.input", "batch.target", "outputs", "loss", "model"},
    }
)
MIX_WRITES = FieldsByEvent(
    {
        Event.BEFORE_FORWARD: {"batch.input"},
        Event.BEFORE_LOSS: {"batch.target"},
        Event.AFTER_LOSS: {"batch.target", "loss"},
    }
)
"""The fields that both read and write; the partners' targets are in the batch while their loss is computed."""


def generator_of(state: State, algorithm: Algorithm) -> torch.Generator:
    """Return what an algorithm that mixes within a microbatch draws from.

    A loop that does not split batches may leave :attr:`State.microbatch` at -1, and draws as with a single microbatch.
    """
    return state.generator(algorithm, microbatch=max(state.microbatch, 0))


def blend_targets(state: State, target_key: BatchKey, partners: Tensor, share: float) -> None:
    """Blend the targets, as they are by now, with the partners', which count by ``share``."""
    scores = state.outputs["logits"] if isinstance(state.outputs, Mapping) else state.outputs
    target = cf.ensure_targets_one_hot(scores, state.batch_get_item(target_key))
    state.batch_set_item(target_key, torch.lerp(target, target[partners], share))


def blend_losses(state: State, target_key: BatchKey, partners: Tensor, share: float) -> None:
    """Compute the loss with the partners' targets, and blend it in by ``share``."""
    target = state.batch_get_item(target_key)
    state.batch_set_item(target_key, target[partners])
    with get_precision_context(state.precision, state.device.type):
        partner_loss = state.model.loss(state.outputs, state.batch)
    state.batch_set_item(target_key, target)
    state.loss = _blend(state.loss, partner_loss, share)


def _blend(loss: Any, partner_loss: Any, share: float) -> Any:
    """Return ``(1 - share) * loss + share * partner_loss``; of losses in a dictionary or list, each by itself."""
    if isinstance(loss, Mapping):
        return {name: _blend(value, partner_loss[name], share) for name, value in loss.items()}
    if isinstance(loss, (list, tuple)):
        blended = [_blend(one, other, share) for one, other in zip(loss, partner_loss, strict=True)]
        return type(loss)(*blended) if hasattr(loss, "_fields") else type(loss)(blended)
    return (1 - share) * loss + share * partner_loss
