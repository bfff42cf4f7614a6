"""Base classes of algorithms that replace layers of the model."""

from __future__ import annotations

import warnings
from abc import abstractmethod

# At run time, too, as attrs looks up what the annotations of a subclass and of its bases mean.
from collections.abc import Mapping  # noqa: TC003
from typing import TYPE_CHECKING, ClassVar

from composer.core import Algorithm, Event, ExclusiveResource, NoEffectWarning, Stage

if TYPE_CHECKING:
    from composer.core import Logger, State
    from composer.functional import SurgeryReport

__all__ = ["LAYER_NORMS", "LowPrecisionNorm", "ModelSurgery", "report_surgery", "to_apply_at"]

LAYER_NORMS = ExclusiveResource(
    "the layer norms",
    remedy="A norm is either fused (FusedLayerNorm) or computed in low precision (LowPrecisionLayerNorm).",
)


def report_surgery(algorithm: Algorithm, report: SurgeryReport, logger: Logger, *, missing: str) -> None:
    """Store the report in the algorithm, log the number of replaced layers, and warn if there are none.

    It is logged by :attr:`ModelSurgery.former_names`, too.

    Args:
        algorithm: The algorithm.
        report: What it replaced.
        logger: The logger.
        missing: What the model lacks if nothing was replaced.
    """
    algorithm.surgery_report = report
    if not report:
        warnings.warn(f"{algorithm!r} found nothing to change: {missing}", NoEffectWarning, stacklevel=3)
    counts = {f"{type(algorithm).__name__}/replaced_layers": len(report)}
    former_names: Mapping[str, str | None] = getattr(algorithm, "former_names", {})
    for name, kind in former_names.items():
        counts[name] = sum(kind in {None, replacement.new} for replacement in report)
    logger.log_hyperparameters(counts)


class ModelSurgery(Algorithm):
    """Base of algorithms whose only effect is to replace layers of the model at one event.

    Attributes:
        former_names: The names under which MosaicML Composer logs the number of new layers, with the class of these
            layers; None for all. They will not be logged any more after one release.
    """

    reads: ClassVar = {"model", "optimizers"}
    writes: ClassVar = {"model", "optimizers"}
    former_names: ClassVar[Mapping[str, str | None]] = {}

    @abstractmethod
    def replace(self, state: State) -> tuple[SurgeryReport, str]:
        """Replace the layers; return the report, and what the model lacks if the report is empty."""

    @staticmethod
    def required_on_load() -> bool:
        """Return True: the replaced layers have other weights, or other names in the saved weights."""
        return True

    def apply(self, event: Event, state: State, logger: Logger) -> None:
        """Replace the layers, update the optimizers and log the number of replaced layers."""
        report, missing = self.replace(state)
        report_surgery(self, report, logger, missing=missing)


class LowPrecisionNorm(ModelSurgery):
    """Base of algorithms that replace norms by norms in low precision, at the event ``apply_at``."""

    apply_at: Event

    runs_at: ClassVar = dict.fromkeys((Event.INIT, Event.AFTER_LOAD), Stage.PRECISION)
    reads: ClassVar = {"model", "optimizers", "precision"}

    def runs_at_events(self) -> Mapping[Event, Stage]:
        """Return the one event at which it runs."""
        return {self.apply_at: Stage.PRECISION}

    @staticmethod
    def required_on_load() -> bool:
        """Return False: the weights are those of the replaced norms."""
        return False


def to_apply_at(apply_at: Event | str) -> Event:
    """Return the event at which norms are replaced, as a converter of attrs.

    Raises:
        ValueError: Norms cannot be replaced at ``apply_at``.
    """
    if apply_at not in (Event.INIT, Event.AFTER_LOAD):
        got = apply_at.value if isinstance(apply_at, Event) else apply_at
        raise ValueError(f"apply_at must be Event.INIT or Event.AFTER_LOAD, got {got!r}.")
    return Event(apply_at)
