"""ChannelsLast: use the ``channels_last`` memory format."""

from __future__ import annotations

from typing import ClassVar

import attrs

from composer import functional as cf
from composer.algorithms._idle import warn_of_no_effect
from composer.core import Algorithm, Event, Logger, Stage, State
from composer.core.declarations import owned


@attrs.define(eq=False)
class ChannelsLast(Algorithm):
    """Convert the weights of convolutions, and thereby activations, to the ``channels_last`` memory format.

    See :func:`composer.functional.apply_channels_last`. Values do not change; on most hardware convolutions are faster.

    Example:
        >>> ChannelsLast()
        ChannelsLast()
    """

    runs_at: ClassVar = {Event.INIT: Stage.LAYOUT}
    reads: ClassVar = {"model"}
    writes: ClassVar = {"model"}
    owns: ClassVar = owned("the model's memory format", "There is one memory format for all weights: one is enough.")

    def apply(self, event: Event, state: State, logger: Logger) -> None:
        """Change the memory format of the model's weights."""
        self.surgery_report = cf.apply_channels_last(state.model)
        if not self.surgery_report:
            warn_of_no_effect(
                f"ChannelsLast found nothing to change: {type(state.model).__name__} has no tensor with four "
                "dimensions, or all of them are in this format already. Remove it."
            )
