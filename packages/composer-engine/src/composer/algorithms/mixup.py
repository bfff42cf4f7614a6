"""MixUp: train on blends of two samples."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import attrs
import torch
from torch import Tensor

from composer import functional as cf
from composer.algorithms._checks import number_between
from composer.core import Algorithm, BatchKey, Event, Logger, Stage, State, get_precision_context

__all__ = ["MixUp"]


@attrs.define(eq=False)
class MixUp(Algorithm):
    """Blend every sample, and its label, with a partner from the same batch (arXiv:1710.09412).

    See :func:`composer.functional.mixup_batch`.

    Args:
        alpha: Both parameters of the Beta distribution that the blend is drawn from; 0 never mixes.
        interpolate_loss: Blend the losses for both labels instead of the labels. For losses that want class ids; it is
            right for losses that are linear in the target, and calls the loss a second time. It sees the labels as the
            loss does, smoothed or blended by others.
        input_key: Where the samples lie in a batch.
        target_key: Where the labels lie in a batch.

    Raises:
        TypeError: ``alpha`` is no number.
        ValueError: ``alpha`` is negative or not finite.

    Example:
        >>> MixUp(alpha=0.4)
        MixUp(alpha=0.4, interpolate_loss=False, input_key=0, target_key=1)
    """

    alpha: float = attrs.field(
        default=0.2, validator=number_between(0, meaning="It is both parameters of the Beta distribution.")
    )
    interpolate_loss: bool = False
    input_key: BatchKey = 0
    target_key: BatchKey = 1
    _mixing: float = attrs.field(default=0.0, init=False, repr=False)
    _partners: Tensor | None = attrs.field(default=None, init=False, repr=False)

    runs_at: ClassVar = {
        Event.BEFORE_FORWARD: Stage.MIX,
        Event.BEFORE_LOSS: Stage.MIX,
        Event.AFTER_LOSS: Stage.LOSS,
    }
    reads: ClassVar = {"batch.input", "batch.target", "outputs", "loss", "model"}
    writes: ClassVar = {"batch.input", "batch.target", "loss"}

    def places(self) -> Mapping[Event, Stage]:
        """Return where it runs: the blend of labels comes before the loss, the blend of losses after it.

        A blend of losses is the outermost, so its samples are blended after those of all who blend labels; and it comes
        before others take back what they did to the labels, so that the partner's loss sees that, too.
        """
        if self.interpolate_loss:
            return {Event.BEFORE_FORWARD: Stage.LOSS, Event.AFTER_LOSS: Stage.LOSS}
        return {Event.BEFORE_FORWARD: Stage.MIX, Event.BEFORE_LOSS: Stage.MIX}

    def apply(self, event: Event, state: State, logger: Logger) -> None:
        """Blend the samples before the forward pass, and the labels or losses after it."""
        del logger
        if event is Event.BEFORE_FORWARD:
            self._mix_input(state)
        elif event is Event.BEFORE_LOSS:
            self._mix_target(state)
        else:
            self._mix_loss(state)

    def _mix_input(self, state: State) -> None:
        input, target = state.batch_get_item(self.input_key), state.batch_get_item(self.target_key)
        generator = state.generator(self)
        self._mixing = cf.draw_mixing(self.alpha, generator=generator)
        self._partners = cf.draw_permutation(input, generator=generator)
        mixed, _, _ = cf.mixup_batch(input, target, mixing=self._mixing, indices=self._partners)
        state.batch_set_item(self.input_key, mixed)

    def _mix_target(self, state: State) -> None:
        # The partners' targets are looked up only now, so that what another algorithm did to the targets is in them.
        target = cf.ensure_targets_one_hot(state.outputs, state.batch_get_item(self.target_key))
        state.batch_set_item(self.target_key, torch.lerp(target, target[self._partners], self._mixing))

    def _mix_loss(self, state: State) -> None:
        target = state.batch_get_item(self.target_key)
        state.batch_set_item(self.target_key, target[self._partners])
        with get_precision_context(state.precision, state.device.type):
            partner_loss = state.model.loss(state.outputs, state.batch)
        state.batch_set_item(self.target_key, target)
        state.loss = _blend(state.loss, partner_loss, self._mixing)


def _blend(loss: Any, partner_loss: Any, mixing: float) -> Any:
    """Return ``(1 - mixing) * loss + mixing * partner_loss``; of losses in a dictionary or list, each by itself."""
    if isinstance(loss, Mapping):
        return {name: _blend(value, partner_loss[name], mixing) for name, value in loss.items()}
    if isinstance(loss, (list, tuple)):
        blended = [_blend(one, other, mixing) for one, other in zip(loss, partner_loss, strict=True)]
        return type(loss)(*blended) if hasattr(loss, "_fields") else type(loss)(blended)
    return (1 - mixing) * loss + mixing * partner_loss
