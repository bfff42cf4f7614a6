"""GhostBatchNorm: normalise small parts of a batch by themselves."""

from __future__ import annotations

from typing import ClassVar

import attrs

from composer import functional as cf
from composer.algorithms._surgery import report_surgery
from composer.core import Algorithm, Event, ExclusiveResource, Logger, Stage, State
from composer.core.checks import whole_number_from

__all__ = ["GhostBatchNorm"]


@attrs.define(eq=False)
class GhostBatchNorm(Algorithm):
    """Let batch norms see small "ghost" batches, for the noise that regularises (arXiv:1705.08741).

    See :func:`composer.functional.apply_ghost_batchnorm`.

    Args:
        ghost_batch_size: Samples that are normalised together.

    Raises:
        TypeError: ``ghost_batch_size`` is no whole number.
        ValueError: ``ghost_batch_size`` is less than 1.

    Example:
        >>> GhostBatchNorm(ghost_batch_size=16)
        GhostBatchNorm(ghost_batch_size=16)
    """

    ghost_batch_size: int = attrs.field(
        default=32, validator=whole_number_from(1, meaning="It is the number of samples that are normalised together.")
    )

    runs_at: ClassVar = {Event.INIT: Stage.NORMALIZATION}
    reads: ClassVar = {"model", "optimizers"}
    writes: ClassVar = {"model", "optimizers"}
    owns: ClassVar = {
        ExclusiveResource(
            "the batch norms", remedy="A second one would find none that is left: choose one ghost_batch_size."
        )
    }

    @staticmethod
    def required_on_load() -> bool:
        """Return True: the running statistics are those of ghost batches."""
        return True

    def apply(self, event: Event, state: State, logger: Logger) -> None:
        """Replace the batch norms."""
        del event
        report = cf.apply_ghost_batchnorm(state.model, self.ghost_batch_size, state.optimizers)
        report_surgery(self, report, logger, missing=f"{type(state.model).__name__} has no BatchNorm layer. Remove it.")
