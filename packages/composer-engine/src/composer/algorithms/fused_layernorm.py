"""FusedLayerNorm: replace norms written in Python by fused kernels."""

from __future__ import annotations

from typing import ClassVar

import attrs

from composer import functional as cf
from composer.algorithms._surgery import LAYER_NORMS, ModelSurgery
from composer.core import Event, Stage, State

__all__ = ["FusedLayerNorm"]


@attrs.define(eq=False)
class FusedLayerNorm(ModelSurgery):
    """Replace norms that consist of several operations by torch's fused norms.

    See :func:`composer.functional.apply_fused_layernorm`.

    Example:
        >>> FusedLayerNorm()
        FusedLayerNorm()
    """

    runs_at: ClassVar = {Event.INIT: Stage.PRECISION}
    owns: ClassVar = {LAYER_NORMS}

    @staticmethod
    def required_on_load() -> bool:
        """Return False: the weights are those of the replaced norms."""
        return False

    def replace(self, state: State) -> tuple[cf.SurgeryReport, str]:
        """Replace the norms."""
        report = cf.apply_fused_layernorm(state.model, state.optimizers)
        return report, f"{type(state.model).__name__} has no norm that is written in Python. Remove it."
