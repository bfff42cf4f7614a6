"""LowPrecisionGroupNorm: compute group norms in the precision of the layers around them."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import attrs

from composer import functional as cf
from composer.algorithms._surgery import check_apply_at, report_surgery
from composer.core import Algorithm, Event, ExclusiveResource, Logger, Stage, State

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["LowPrecisionGroupNorm"]


@attrs.define(eq=False)
class LowPrecisionGroupNorm(Algorithm):
    """Compute group norms in the run's low precision, where autocast would take float32.

    See :func:`composer.functional.apply_low_precision_groupnorm`.

    Args:
        apply_at: When the norms are replaced: ``Event.INIT``, or ``Event.AFTER_LOAD``.

    Raises:
        ValueError: ``apply_at`` is another event.

    Example:
        >>> LowPrecisionGroupNorm().apply_at.value
        'after_load'
    """

    apply_at: Event = attrs.field(default=Event.AFTER_LOAD, converter=Event, validator=check_apply_at)

    runs_at: ClassVar = dict.fromkeys((Event.INIT, Event.AFTER_LOAD), Stage.PRECISION)
    reads: ClassVar = {"model", "optimizers", "precision"}
    writes: ClassVar = {"model", "optimizers"}
    owns: ClassVar = {
        ExclusiveResource("the group norms", remedy="A second one would find none that is left: one is enough.")
    }

    def runs_at_events(self) -> Mapping[Event, Stage]:
        """Return the one event at which it runs."""
        return {self.apply_at: Stage.PRECISION}

    @staticmethod
    def required_on_load() -> bool:
        """Return False: the weights are those of the norms that were replaced."""
        return False

    def apply(self, event: Event, state: State, logger: Logger) -> None:
        """Replace the norms."""
        del event
        report = cf.apply_low_precision_groupnorm(state.model, state.precision.value, state.optimizers)
        missing = f"{type(state.model).__name__} has no nn.GroupNorm, or the run's precision is fp32. Remove it."
        report_surgery(self, report, logger, missing=missing)
