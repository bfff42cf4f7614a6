"""SqueezeExcite: scale channels by a function of their means."""

from __future__ import annotations

from typing import ClassVar

import attrs

from composer import functional as cf
from composer.algorithms._surgery import ModelSurgery
from composer.core import Event, ExclusiveResource, Stage, State
from composer.core.checks import by_name, number_between, whole_number_from
from composer.functional.layers.factorized import resolve_latent_size

__all__ = ["SqueezeExcite"]


@attrs.define(eq=False)
class SqueezeExcite(ModelSurgery):
    """Add a squeeze-and-excite block after convolutions (arXiv:1709.01507).

    See :func:`composer.functional.apply_squeeze_excite`.

    Args:
        latent_channels: Size of the block's hidden layer; below 1, a fraction of the convolution's channels.
        min_channels: Convolutions with fewer input or output channels are not changed.

    Raises:
        TypeError: A value is not a number.
        ValueError: ``latent_channels`` is neither a whole number of at least 1 nor a fraction, or ``min_channels`` is
            negative.

    Example:
        >>> SqueezeExcite(latent_channels=32)
        SqueezeExcite(latent_channels=32, min_channels=128)
    """

    latent_channels: float = attrs.field(
        default=64,
        validator=[
            number_between(0, above=True, meaning="It is the size of the block's hidden layer."),
            by_name(resolve_latent_size),
        ],
    )
    min_channels: int = attrs.field(
        default=128, validator=whole_number_from(0, meaning="Convolutions with fewer channels are not changed.")
    )

    former_names: ClassVar = {"squeeze_excite/num_squeeze_excite_layers": None}
    runs_at: ClassVar = {Event.INIT: Stage.ARCHITECTURE}
    owns: ClassVar = {
        ExclusiveResource(
            "the squeeze-and-excite blocks",
            remedy="A second one would add blocks after blocks: choose one latent_channels.",
        )
    }

    def replace(self, state: State) -> tuple[cf.SurgeryReport, str]:
        """Add the blocks, and add their parameters to the optimizers."""
        report = cf.apply_squeeze_excite(state.model, self.latent_channels, self.min_channels, state.optimizers)
        missing = f"{type(state.model).__name__} has no convolution with at least {self.min_channels} channels."
        return report, f"{missing} Remove it, or lower min_channels."
