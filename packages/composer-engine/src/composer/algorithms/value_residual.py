"""ValueResidual: mix the values of the first attention into those of later ones."""

from __future__ import annotations

from typing import ClassVar

import attrs

from composer import functional as cf
from composer.algorithms._surgery import ModelSurgery
from composer.core import Event, Stage
from composer.core.checks import number
from composer.core.declarations import owned


@attrs.define(eq=False)
class ValueResidual(ModelSurgery):
    """Mix the values of the first attention of a decoder into those of all later ones (arXiv:2410.17897).

    See :func:`composer.functional.apply_value_residual`.

    Args:
        initial_weight: The weight of the first values at the start; 0 begins with the unchanged model.
        layout: The layers of your own attention; None for those of Transformers.

    Raises:
        TypeError: ``initial_weight`` is not a number.
        ValueError: ``initial_weight`` is out of range; or, when the model is changed, no attention is found.

    Example:
        >>> ValueResidual(0.0)
        ValueResidual(initial_weight=0.0)
    """

    initial_weight: float = number(0.5, 0, 1, meaning="It is the weight of the first values.")
    layout: cf.AttentionLayout | None = attrs.field(default=None, repr=False, kw_only=True)

    _kernel: ClassVar = staticmethod(cf.apply_value_residual)
    runs_at: ClassVar = {Event.INIT: Stage.ARCHITECTURE}
    owns: ClassVar = owned("the values of attention", "Choose one initial weight.")
    found_nothing: ClassVar = "the values of {model} have been mixed before. Remove it."
