"""Factorize: replace a large layer by two small ones."""

from __future__ import annotations

from typing import ClassVar

import attrs

from composer import functional as cf
from composer.algorithms._surgery import ModelSurgery
from composer.core import Event, Stage
from composer.core.checks import by_name, integer, is_flag
from composer.core.declarations import owned
from composer.functional.layers.factorized import resolve_latent_size


@attrs.define(eq=False)
class Factorize(ModelSurgery):
    """Replace large convolutions and linear layers by two smaller ones in a row (arXiv:1405.3866).

    See :func:`composer.functional.apply_factorization`.

    Args:
        factorize_convs: Whether convolutions are factorized.
        factorize_linears: Whether linear layers are factorized.
        min_channels: Convolutions with fewer input or output channels are not replaced.
        latent_channels: Channels between the two convolutions; below 1, a fraction of the smaller side.
        min_features: Linear layers with fewer input or output features are not replaced.
        latent_features: Features between the two linear layers; below 1, a fraction of the smaller side.

    Raises:
        TypeError: A value is not a number.
        ValueError: A value is out of range, or both kinds of layers are excluded.

    Example:
        >>> Factorize(factorize_convs=False, latent_features=64).latent_features
        64
    """

    factorize_convs: bool = attrs.field(default=True, validator=is_flag)
    factorize_linears: bool = attrs.field(default=True, validator=is_flag)
    min_channels: int = integer(256, 0, meaning="Convolutions with fewer channels are not replaced.")
    latent_channels: float = attrs.field(default=0.25, validator=by_name(resolve_latent_size))
    min_features: int = integer(256, 0, meaning="Linear layers with fewer features are not replaced.")
    latent_features: float = attrs.field(default=128, validator=by_name(resolve_latent_size))

    former_names: ClassVar = {
        "factorize/num_conv2d_replacements": "FactorizedConv2d",
        "factorize/num_linear_replacements": "FactorizedLinear",
    }
    _kernel: ClassVar = staticmethod(cf.apply_factorization)
    runs_at: ClassVar = {Event.INIT: Stage.ARCHITECTURE}
    owns: ClassVar = owned(
        "the factorized layers", "A second one would factorize the factors: lower the latent sizes of one instead."
    )

    def __attrs_post_init__(self) -> None:
        if not (self.factorize_convs or self.factorize_linears):
            raise ValueError(
                "factorize_convs and factorize_linears are both False, so Factorize has nothing to do; set one."
            )

    def explain_nothing(self, model: str) -> str:
        """Return what the model lacks, and the remedy."""
        wanted = [f"Conv2d with at least {self.min_channels} channels"] * self.factorize_convs
        wanted += [f"Linear with at least {self.min_features} features"] * self.factorize_linears
        return (
            f"{model} has no {' and no '.join(wanted)} that two smaller ones could replace. "
            "Remove it, or lower min_channels, min_features or the latent sizes."
        )
