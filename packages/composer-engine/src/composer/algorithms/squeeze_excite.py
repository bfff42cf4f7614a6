"""SqueezeExcite: scale channels by a function of their means."""

from __future__ import annotations

from typing import ClassVar

import attrs

from composer import functional as cf
from composer.algorithms._surgery import ModelSurgery
from composer.core import Event, Stage
from composer.core.checks import by_name, integer
from composer.core.declarations import owned
from composer.functional.layers.factorized import resolve_latent_size


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

    latent_channels: float = attrs.field(default=64, validator=by_name(resolve_latent_size))
    min_channels: int = integer(128, 0, meaning="Convolutions with fewer channels are not changed.")

    former_names: ClassVar = {"squeeze_excite/num_squeeze_excite_layers": None}
    _kernel: ClassVar = staticmethod(cf.apply_squeeze_excite)
    runs_at: ClassVar = {Event.INIT: Stage.ARCHITECTURE}
    owns: ClassVar = owned(
        "the squeeze-and-excite blocks", "A second one would add blocks after blocks: choose one latent_channels."
    )
    found_nothing: ClassVar = (
        "{model} has no Conv2d with at least {self.min_channels} channels. Remove it, or lower min_channels."
    )
