"""FusedLayerNorm: one kernel for a norm written out by hand."""

from __future__ import annotations

from typing import ClassVar

import attrs

from composer import functional as cf
from composer.algorithms._surgery import LAYER_NORMS, report_surgery
from composer.core import Algorithm, Event, Logger, Stage, State

__all__ = ["FusedLayerNorm"]


@attrs.define(eq=False)
class FusedLayerNorm(Algorithm):
    """Replace norms that are written out in several operations by torch's fused ones.

    See :func:`composer.functional.apply_fused_layernorm`.

    Example:
        >>> FusedLayerNorm()
        FusedLayerNorm()
    """

    runs_at: ClassVar = {Event.INIT: Stage.PRECISION}
    reads: ClassVar = {"model", "optimizers"}
    writes: ClassVar = {"model", "optimizers"}
    owns: ClassVar = {LAYER_NORMS}

    def apply(self, event: Event, state: State, logger: Logger) -> None:
        """Replace the norms."""
        del event
        report = cf.apply_fused_layernorm(state.model, state.optimizers)
        missing = f"{type(state.model).__name__} has no norm that is written out by hand. Remove it."
        report_surgery(self, report, logger, missing=missing)
