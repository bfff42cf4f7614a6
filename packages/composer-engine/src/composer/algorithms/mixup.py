"""MixUp: train on blends of two samples."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import attrs
from torch import Tensor  # noqa: TC002  (attrs fields are looked up at run time)

from composer import functional as cf
from composer.algorithms._checks import warn_if_idle
from composer.algorithms._mixing import (
    MIX_LOSSES,
    MIX_READS,
    MIX_TARGETS,
    MIX_WRITES,
    blend_losses,
    blend_targets,
    generator_of,
)
from composer.core import Algorithm, BatchKey, Event, Logger, Stage, State
from composer.core.checks import number_between, true_or_false

if TYPE_CHECKING:
    from collections.abc import Mapping

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
    interpolate_loss: bool = attrs.field(default=False, validator=true_or_false)
    input_key: BatchKey = 0
    target_key: BatchKey = 1
    _mixing: float = attrs.field(default=0.0, init=False, repr=False)
    _partners: Tensor | None = attrs.field(default=None, init=False, repr=False)

    runs_at: ClassVar = {**MIX_TARGETS, Event.AFTER_LOSS: Stage.LOSS}
    reads: ClassVar = MIX_READS
    writes: ClassVar = MIX_WRITES

    def __attrs_post_init__(self) -> None:
        warn_if_idle(self, alpha=self.alpha == 0)

    def runs_at_events(self) -> Mapping[Event, Stage]:
        """Return where it runs: the blend of labels comes before the loss, the blend of losses after it."""
        return MIX_LOSSES if self.interpolate_loss else MIX_TARGETS

    def apply(self, event: Event, state: State, logger: Logger) -> None:
        """Blend the samples before the forward pass, and the labels or losses after it."""
        del logger
        if event is Event.BEFORE_FORWARD:
            self._mix_input(state)
            return
        assert self._partners is not None
        blend = blend_targets if event is Event.BEFORE_LOSS else blend_losses
        blend(state, self.target_key, self._partners, self._mixing)

    def _mix_input(self, state: State) -> None:
        input, target = state.batch_get_item(self.input_key), state.batch_get_item(self.target_key)
        generator = generator_of(state, self)
        self._mixing = cf.draw_mixing(self.alpha, generator=generator)
        self._partners = cf.draw_permutation(input, generator=generator)
        mixed, _, _ = cf.mixup_batch(input, target, mixing=self._mixing, indices=self._partners)
        state.batch_set_item(self.input_key, mixed)
