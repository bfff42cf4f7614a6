"""BlurPool: blur before every stride."""

from __future__ import annotations

import warnings
from typing import ClassVar

import attrs

from composer import functional as cf
from composer.core import Algorithm, Event, ExclusiveResource, Logger, NoEffectWarning, Stage, State
from composer.core.checks import true_or_false, whole_number_from

__all__ = ["BlurPool"]


@attrs.define(eq=False)
class BlurPool(Algorithm):
    """Blur what strided convolutions and max pools take samples of (arXiv:1904.11486).

    See :func:`composer.functional.apply_blurpool`.

    Args:
        replace_convs: Whether strided convolutions are blurred.
        replace_maxpools: Whether strided max pools are blurred.
        blur_first: Whether convolutions are blurred before they run (cheaper) or after.
        min_channels: Convolutions with fewer input channels are left alone.

    Raises:
        TypeError: ``min_channels`` is no whole number.
        ValueError: ``min_channels`` is less than 1, or nothing is to be replaced.

    Example:
        >>> BlurPool(min_channels=32)
        BlurPool(replace_convs=True, replace_maxpools=True, blur_first=True, min_channels=32)
    """

    replace_convs: bool = attrs.field(default=True, validator=true_or_false)
    replace_maxpools: bool = attrs.field(default=True, validator=true_or_false)
    blur_first: bool = attrs.field(default=True, validator=true_or_false)
    min_channels: int = attrs.field(
        default=16, validator=whole_number_from(1, meaning="Convolutions with fewer input channels are left alone.")
    )

    runs_at: ClassVar = {Event.INIT: Stage.ARCHITECTURE}
    reads: ClassVar = {"model", "optimizers"}
    writes: ClassVar = {"model", "optimizers"}
    owns: ClassVar = {
        ExclusiveResource(
            "the strided convolutions and pools",
            remedy="What is blurred is not blurred again: put the settings into one.",
        )
    }

    def __attrs_post_init__(self) -> None:
        if not (self.replace_convs or self.replace_maxpools):
            raise ValueError(
                "replace_convs and replace_maxpools are both False, so BlurPool has nothing to do; set one."
            )

    @staticmethod
    def required_on_load() -> bool:
        """Return True: blurred layers have other names in the saved weights."""
        return True

    def apply(self, event: Event, state: State, logger: Logger) -> None:
        """Replace the layers, and move the optimizers over to the new ones."""
        del event
        report = cf.apply_blurpool(
            state.model,
            replace_convs=self.replace_convs,
            replace_maxpools=self.replace_maxpools,
            blur_first=self.blur_first,
            min_channels=self.min_channels,
            optimizers=state.optimizers,
        )
        if not report:
            warnings.warn(
                f"{self!r} found nothing to blur: {type(state.model).__name__} has {self._what_is_missing()}.",
                NoEffectWarning,
                stacklevel=2,
            )
        logger.log_hyperparameters({"BlurPool/replaced_layers": len(report.replacements)})

    def _what_is_missing(self) -> str:
        conv = f"no strided convolution with at least {self.min_channels} input channels"
        pool = "no strided max pool"
        if not self.replace_convs:
            return f"{pool}. Remove it, or set replace_convs=True"
        missing = f"{conv} and {pool}" if self.replace_maxpools else conv
        return f"{missing}. Remove it, or lower min_channels"
