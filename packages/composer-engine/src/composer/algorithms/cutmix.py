"""CutMix: train on images with a box of another one pasted in."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import attrs
from torch import Tensor  # noqa: TC002  (attrs fields are looked up at run time)

from composer import functional as cf
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

__all__ = ["CutMix"]


@attrs.define(eq=False)
class CutMix(Algorithm):
    """Paste a box of another image into every image, and blend the labels by its area (arXiv:1905.04899).

    See :func:`composer.functional.cutmix_batch`.

    Args:
        alpha: Both parameters of the Beta distribution that the box's area is drawn from.
        interpolate_loss: Blend the losses for both labels instead of the labels. For losses that want class ids; it is
            right for losses that are linear in the target, and calls the loss a second time.
        uniform_sampling: Whether every pixel is as likely to be pasted over; otherwise the box's middle is drawn
            evenly, and what lies outside the image is cut off.
        input_key: Where the images lie in a batch.
        target_key: Where the labels lie in a batch.

    Raises:
        TypeError: ``alpha`` is no number.
        ValueError: ``alpha`` is not positive and finite.

    Example:
        >>> CutMix(alpha=0.5)
        CutMix(alpha=0.5, interpolate_loss=False, uniform_sampling=False, input_key=0, target_key=1)
    """

    alpha: float = attrs.field(
        default=1.0,
        validator=number_between(0, above=True, meaning="It is both parameters of the Beta distribution."),
    )
    interpolate_loss: bool = attrs.field(default=False, validator=true_or_false)
    uniform_sampling: bool = attrs.field(default=False, validator=true_or_false)
    input_key: BatchKey = 0
    target_key: BatchKey = 1
    _share: float = attrs.field(default=0.0, init=False, repr=False)
    _partners: Tensor | None = attrs.field(default=None, init=False, repr=False)

    runs_at: ClassVar = {**MIX_TARGETS, Event.AFTER_LOSS: Stage.LOSS}
    reads: ClassVar = MIX_READS
    writes: ClassVar = MIX_WRITES

    def runs_at_events(self) -> Mapping[Event, Stage]:
        """Return where it runs: the blend of labels comes before the loss, the blend of losses after it."""
        return MIX_LOSSES if self.interpolate_loss else MIX_TARGETS

    def apply(self, event: Event, state: State, logger: Logger) -> None:
        """Paste the boxes before the forward pass, and blend the labels or losses after it."""
        del logger
        if event is Event.BEFORE_FORWARD:
            self._mix_input(state)
            return
        assert self._partners is not None
        blend = blend_targets if event is Event.BEFORE_LOSS else blend_losses
        blend(state, self.target_key, self._partners, self._share)

    def _mix_input(self, state: State) -> None:
        input, target = state.batch_get_item(self.input_key), state.batch_get_item(self.target_key)
        generator = generator_of(state, self)
        self._partners = cf.draw_permutation(input, generator=generator)
        mixed, _, weight, _ = cf.cutmix_batch(
            input,
            target,
            alpha=self.alpha,
            indices=self._partners,
            uniform_sampling=self.uniform_sampling,
            generator=generator,
        )
        self._share = 1 - weight
        state.batch_set_item(self.input_key, mixed)
