"""SAM: find weights in a flat region of the loss."""

from __future__ import annotations

from typing import Any, ClassVar

import attrs

from composer import functional as cf
from composer.algorithms._idle import warn_if_idle, warn_of_no_effect
from composer.core import Algorithm, Event, Logger, Stage, State
from composer.core.checks import integer, number
from composer.core.declarations import owned
from composer.core.saving.components import transient


@attrs.define(eq=False)
class SAM(Algorithm):
    """Step along the gradient at the point with the highest loss nearby (arXiv:2010.01412).

    Every optimizer is wrapped in :class:`composer.functional.SAMOptimizer`. Its step needs a closure that computes loss
    and gradients again: :class:`composer.Trainer` passes one; your own loop calls ``optimizer.step(closure)``.

    Args:
        rho: The radius of the neighbourhood, as the norm of the change of all weights.
        epsilon: Added to the norm of the gradients, by which they are divided.
        interval: The interval of SAM steps; the others are steps of the wrapped optimizer.

    Raises:
        TypeError: A value is not a number.
        ValueError: A value is out of range.

    Example:
        >>> SAM(rho=0.1, interval=10)
        SAM(rho=0.1, epsilon=1e-12, interval=10)
    """

    rho: float = number(0.05, 0, meaning="It is the neighbourhood's radius.")
    epsilon: float = number(1e-12, 0, above=True, meaning="It is added to a norm.")
    interval: int = integer(1, 1, meaning="It is a number of steps.")

    _handles: list[Any] = transient(factory=list)

    acted = 0
    idle_reason = (
        "The loop has stepped none of the optimizers that it wraps: take them from state.optimizers after the event "
        "'after_load'."
    )
    runs_at: ClassVar = {Event.AFTER_LOAD: Stage.GRADIENT}
    reads: ClassVar = {"optimizers"}
    writes: ClassVar = {"optimizers"}
    owns: ClassVar = owned("the optimizers' step", "Two SAM double the radius: choose one rho.")

    def __attrs_post_init__(self) -> None:
        warn_if_idle(self, rho=self.rho == 0)

    def apply(self, event: Event, state: State, logger: Logger) -> None:
        """Wrap the optimizers."""
        if not state.optimizers:
            warn_of_no_effect("SAM found no optimizer to wrap: set State.optimizers.")
        state.optimizers = tuple(
            optimizer
            if isinstance(optimizer, cf.SAMOptimizer)
            else cf.SAMOptimizer(optimizer, self.rho, self.epsilon, self.interval)
            for optimizer in state.optimizers
        )
        for handle in self._handles:  # a host may begin a second training with the same optimizer
            handle.remove()
        self._handles = [optimizer.register_step_post_hook(self._count) for optimizer in state.optimizers]

    def _count(self, *_: object) -> None:
        self.acted += 1
