"""WeightStandardization: normalise each filter to zero mean and unit variance."""

from __future__ import annotations

from typing import ClassVar

import attrs

from composer import functional as cf
from composer.algorithms._surgery import ModelSurgery
from composer.core import Event, Stage
from composer.core.checks import integer
from composer.core.declarations import owned


@attrs.define(eq=False)
class WeightStandardization(ModelSurgery):
    """Standardize the weights of convolutions before each use (arXiv:1903.10520).

    See :func:`composer.functional.apply_weight_standardization`. Works best before group norms.

    Args:
        n_last_layers_ignore: How many convolutions at the end of the model are not changed.

    Raises:
        TypeError: ``n_last_layers_ignore`` is not a whole number.
        ValueError: ``n_last_layers_ignore`` is negative.

    Example:
        >>> WeightStandardization(n_last_layers_ignore=1)
        WeightStandardization(n_last_layers_ignore=1)
    """

    n_last_layers_ignore: int = integer(0, 0, meaning="It is how many convolutions at the end are not changed.")

    former_names: ClassVar = {"WeightStandardization/num_weights_standardized": None}
    _kernel: ClassVar = staticmethod(cf.apply_weight_standardization)
    runs_at: ClassVar = {Event.INIT: Stage.NORMALIZATION}
    reads: ClassVar = {"model"}
    writes: ClassVar = {"model"}
    owns: ClassVar = owned("the standardization of weights", "Standardized weights do not change again: one is enough.")
    found_nothing: ClassVar = (
        "{model} has no convolution except the last {self.n_last_layers_ignore}. "
        "Remove it, or lower n_last_layers_ignore."
    )
