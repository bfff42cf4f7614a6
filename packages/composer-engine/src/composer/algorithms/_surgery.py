"""Base classes of algorithms that replace layers of the model."""

from __future__ import annotations

import inspect

# At run time, too, as attrs looks up what the annotations of a subclass and of its bases mean.
from collections.abc import Callable, Mapping
from collections.abc import Set as AbstractSet
from typing import Any, ClassVar

import attrs

from composer.algorithms._idle import warn_of_no_effect
from composer.core import Algorithm, Event, ExclusiveResource, Logger, Stage, State
from composer.functional import SurgeryReport

FORWARD_PASSES = ExclusiveResource(
    "the forward passes of the layers",
    remedy="ActivationCheckpointing adds one in the backward pass, where GyroDropout would take other masks. Pass "
    "several kinds of blocks to one ActivationCheckpointing, modules=[...].",
)
LAYER_NORMS = ExclusiveResource(
    "the layer norms",
    remedy="A norm is either fused (FusedLayerNorm) or computed in low precision (LowPrecisionLayerNorm).",
)


class ModelSurgery(Algorithm):
    """Base of algorithms that replace layers of the model by a kernel.

    Attributes:
        _kernel: The function that changes the model. It is called with those of the algorithm's fields that it has as
            parameters, and with the state's ``optimizers`` and ``precision`` if it has these parameters.
        former_names: The names under which MosaicML Composer logs the number of new layers, with the class of these
            layers; None for all. They will not be logged any more after one release.
        changes_weights: Whether the replaced layers have other weights, or other names in the saved weights.
        found_nothing: What the class ``{model}`` lacks if nothing was replaced, and the remedy.
    """

    _kernel: ClassVar[Callable[..., SurgeryReport]]
    reads: ClassVar[AbstractSet[str]] = {"model", "optimizers"}
    writes: ClassVar[AbstractSet[str]] = {"model", "optimizers"}
    former_names: ClassVar[Mapping[str, str | None]] = {}
    changes_weights: ClassVar[bool] = True
    found_nothing: ClassVar[str]

    def explain_nothing(self, model: str) -> str:
        """Return what a model of this class lacks if nothing was replaced, and the remedy."""
        return self.found_nothing.format(model=model, self=self)

    @classmethod
    def required_on_load(cls) -> bool:
        """Return whether saved weights only fit a model that it has changed."""
        return cls.changes_weights

    def apply(self, event: Event, state: State, logger: Logger) -> None:
        """Replace the layers, update the optimizers and log the number of replaced layers."""
        self.replace(state, logger)

    def replace(self, state: State, logger: Logger, **arguments: Any) -> SurgeryReport:
        """Call the kernel, with further arguments; store the report, log its length, and warn if it is empty."""
        kind: Any = type(self)
        parameters = inspect.signature(self._kernel).parameters
        arguments |= {name: getattr(self, name) for name in attrs.fields_dict(kind) if name in parameters}
        if "optimizers" in parameters:
            arguments["optimizers"] = state.optimizers
        if "precision" in parameters:
            arguments["precision"] = state.precision.value
        report = self.surgery_report = self._kernel(state.model, **arguments)
        if not report:
            missing = self.explain_nothing(type(state.model).__name__)
            warn_of_no_effect(f"{self!r} found nothing to change: {missing}")
        counts = {f"{kind.__name__}/replaced_layers": len(report)}
        for name, layer in self.former_names.items():
            counts[name] = sum(layer in {None, replacement.new} for replacement in report)
        logger.log_hyperparameters(counts)
        return report


class LowPrecisionNorm(ModelSurgery):
    """Base of algorithms that replace norms by norms in low precision, at the event ``apply_at``."""

    apply_at: Event

    runs_at: ClassVar = dict.fromkeys((Event.INIT, Event.AFTER_LOAD), Stage.PRECISION)
    reads: ClassVar = {"model", "optimizers", "precision"}
    changes_weights: ClassVar = False

    def runs_at_events(self) -> Mapping[Event, Stage]:
        """Return the one event at which it runs."""
        return {self.apply_at: Stage.PRECISION}


def to_apply_at(apply_at: Event | str) -> Event:
    """Return the event at which norms are replaced, as a converter of attrs.

    Raises:
        ValueError: Norms cannot be replaced at ``apply_at``.
    """
    if apply_at not in (Event.INIT, Event.AFTER_LOAD):
        got = apply_at.value if isinstance(apply_at, Event) else apply_at
        raise ValueError(f"apply_at must be Event.INIT or Event.AFTER_LOAD, got {got!r}.")
    return Event(apply_at)
