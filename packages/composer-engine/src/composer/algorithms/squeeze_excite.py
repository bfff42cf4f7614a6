"""SqueezeExcite: let the image as a whole weigh the channels."""

from __future__ import annotations

from typing import ClassVar

import attrs

from composer import functional as cf
from composer.algorithms._surgery import report_surgery
from composer.core import Algorithm, Event, ExclusiveResource, Logger, Stage, State
from composer.core.checks import number_between, whole_number_from

__all__ = ["SqueezeExcite"]


@attrs.define(eq=False)
class SqueezeExcite(Algorithm):
    """Add a squeeze-and-excite block after convolutions (arXiv:1709.01507).

    See :func:`composer.functional.apply_squeeze_excite`.

    Args:
        latent_channels: Size of the block's hidden layer; below 1 as a fraction of the convolution's channels.
        min_channels: Convolutions with fewer input or output channels are left alone.

    Raises:
        TypeError: A value is no number.
        ValueError: ``latent_channels`` is not positive, or ``min_channels`` is less than 1.

    Example:
        >>> SqueezeExcite(latent_channels=32)
        SqueezeExcite(latent_channels=32, min_channels=128)
    """

    latent_channels: float = attrs.field(
        default=64, validator=number_between(0, above=True, meaning="It is the size of the block's hidden layer.")
    )
    min_channels: int = attrs.field(
        default=128, validator=whole_number_from(1, meaning="Convolutions with fewer channels are left alone.")
    )

    runs_at: ClassVar = {Event.INIT: Stage.ARCHITECTURE}
    reads: ClassVar = {"model", "optimizers"}
    writes: ClassVar = {"model", "optimizers"}
    owns: ClassVar = {
        ExclusiveResource(
            "the squeeze-and-excite blocks",
            remedy="A second one would add blocks behind blocks: choose one latent_channels.",
        )
    }

    @staticmethod
    def required_on_load() -> bool:
        """Return True: the blocks have weights of their own."""
        return True

    def apply(self, event: Event, state: State, logger: Logger) -> None:
        """Add the blocks, and give their parameters to the optimizers."""
        del event
        report = cf.apply_squeeze_excite(state.model, self.latent_channels, self.min_channels, state.optimizers)
        missing = (
            f"{type(state.model).__name__} has no convolution with at least {self.min_channels} channels. "
            "Remove it, or lower min_channels."
        )
        report_surgery(self, report, logger, missing=missing)
