"""WeightStandardization: give each filter zero mean and unit variance."""

from __future__ import annotations

from typing import ClassVar

import attrs

from composer import functional as cf
from composer.algorithms._surgery import report_surgery
from composer.core import Algorithm, Event, ExclusiveResource, Logger, Stage, State
from composer.core.checks import whole_number_from

__all__ = ["WeightStandardization"]


@attrs.define(eq=False)
class WeightStandardization(Algorithm):
    """Standardize the weights of convolutions before each use (arXiv:1903.10520).

    See :func:`composer.functional.apply_weight_standardization`. Works best before group norms.

    Args:
        n_last_layers_ignore: How many convolutions at the model's end are left alone.

    Raises:
        TypeError: ``n_last_layers_ignore`` is no whole number.
        ValueError: ``n_last_layers_ignore`` is negative.

    Example:
        >>> WeightStandardization(n_last_layers_ignore=1)
        WeightStandardization(n_last_layers_ignore=1)
    """

    n_last_layers_ignore: int = attrs.field(
        default=0, validator=whole_number_from(0, meaning="It is how many convolutions at the end are left alone.")
    )

    runs_at: ClassVar = {Event.INIT: Stage.NORMALIZATION}
    reads: ClassVar = {"model"}
    writes: ClassVar = {"model"}
    owns: ClassVar = {
        ExclusiveResource(
            "the standardization of weights",
            remedy="Weights that are standardized already do not change: one is enough.",
        )
    }

    @staticmethod
    def required_on_load() -> bool:
        """Return True: standardized weights have other names."""
        return True

    def apply(self, event: Event, state: State, logger: Logger) -> None:
        """Put the standardization before the weights."""
        del event
        report = cf.apply_weight_standardization(state.model, self.n_last_layers_ignore)
        missing = (
            f"{type(state.model).__name__} has no convolution but for the last {self.n_last_layers_ignore}. "
            "Remove it, or lower n_last_layers_ignore."
        )
        report_surgery(self, report, logger, missing=missing)
