"""What algorithms that change a model's layers say of it."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING

from composer.core import NoEffectWarning, Owned

if TYPE_CHECKING:
    from composer.core import Algorithm, Logger
    from composer.functional import SurgeryReport

__all__ = ["LAYER_NORMS", "tell"]

LAYER_NORMS = Owned(
    "the layer norms",
    remedy="A norm is either fused (FusedLayerNorm) or computed in low precision (LowPrecisionLayerNorm).",
)


def tell(algorithm: Algorithm, report: SurgeryReport, logger: Logger, *, missing: str) -> None:
    """Log how many layers were replaced; warn where it is none, with what the model would have to have."""
    if not report:
        warnings.warn(f"{algorithm!r} found nothing to change: {missing}", NoEffectWarning, stacklevel=3)
    logger.log_hyperparameters({f"{type(algorithm).__name__}/replaced_layers": len(report)})
