"""What algorithms that change a model's layers say of it."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING

from composer.core import Event, ExclusiveResource, NoEffectWarning

if TYPE_CHECKING:
    from composer.core import Algorithm, Logger
    from composer.functional import SurgeryReport

__all__ = ["LAYER_NORMS", "check_apply_at", "report_surgery"]

LAYER_NORMS = ExclusiveResource(
    "the layer norms",
    remedy="A norm is either fused (FusedLayerNorm) or computed in low precision (LowPrecisionLayerNorm).",
)


def report_surgery(algorithm: Algorithm, report: SurgeryReport, logger: Logger, *, missing: str) -> None:
    """Log how many layers were replaced; warn where it is none, with what the model would have to have."""
    if not report:
        warnings.warn(f"{algorithm!r} found nothing to change: {missing}", NoEffectWarning, stacklevel=3)
    logger.log_hyperparameters({f"{type(algorithm).__name__}/replaced_layers": len(report)})


def check_apply_at(_: object, __: object, apply_at: Event) -> None:
    """Refuse events at which norms are not replaced; an attrs validator."""
    if apply_at not in {Event.INIT, Event.AFTER_LOAD}:
        raise ValueError(f"apply_at must be Event.INIT or Event.AFTER_LOAD, got {apply_at.value!r}.")
