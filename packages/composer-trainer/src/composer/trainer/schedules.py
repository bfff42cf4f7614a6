"""Which learning rate schedulers a run has, and when each of them steps."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

import attrs
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from composer.optim import ComposerScheduler, compile_composer_scheduler

if TYPE_CHECKING:
    from collections.abc import Sequence

    from composer.core import State

__all__ = ["SchedulerLike", "Schedules", "check_schedulers"]

SchedulerLike: TypeAlias = LRScheduler | ComposerScheduler


@attrs.frozen
class Schedules:
    """A run's schedulers, by when they step.

    Args:
        every_batch: Those that step after each batch.
        every_epoch: Those that step after each epoch.
        by_clock: Those of them that know nothing but the run's clock.
    """

    every_batch: tuple[LRScheduler, ...] = ()
    every_epoch: tuple[LRScheduler, ...] = ()
    by_clock: tuple[LRScheduler, ...] = ()

    @classmethod
    def make(
        cls,
        schedulers: SchedulerLike | Sequence[SchedulerLike] | None,
        state: State,
        scale_schedule_ratio: float,
        step_every_batch: bool | None,
    ) -> Schedules:
        """Return the schedules of a run.

        Args:
            schedulers: torch's own, or a function ``f(state, ssr) -> multiplier``, which holds for every optimizer.
            state: With the optimizers and the length of the training.
            scale_schedule_ratio: By how much the schedule is stretched.
            step_every_batch: Whether all step after each batch; if None, torch's own step after each epoch and
                functions after each batch.

        Raises:
            TypeError: A scheduler is neither of these.
            ValueError: There are several functions.
        """
        given = check_schedulers(schedulers)
        ready = [scheduler for scheduler in given if isinstance(scheduler, LRScheduler)]
        by_clock = [
            compile_composer_scheduler(scheduler, state, scale_schedule_ratio, optimizer)
            for scheduler in given
            if not isinstance(scheduler, LRScheduler)
            for optimizer in state.optimizers
        ]
        every_batch = [*(ready if step_every_batch else []), *([] if step_every_batch is False else by_clock)]
        every_epoch = [scheduler for scheduler in [*ready, *by_clock] if scheduler not in every_batch]
        return cls(tuple(every_batch), tuple(every_epoch), tuple(by_clock))

    def follow_clock(self) -> None:
        """Set the learning rates that follow the clock anew: the training may have got another length."""
        for scheduler in self.by_clock:
            scheduler.step()


def check_schedulers(schedulers: SchedulerLike | Sequence[SchedulerLike] | None) -> list[SchedulerLike]:
    """Return the schedulers as a list.

    Raises:
        TypeError: One is neither a torch scheduler nor a function.
        ValueError: There are several functions.
    """
    given: list[SchedulerLike] = [] if schedulers is None else [schedulers]  # type: ignore[list-item]  # see next line
    if isinstance(schedulers, (list, tuple)):
        given = list(schedulers)
    for scheduler in given:
        if isinstance(scheduler, ReduceLROnPlateau):
            raise TypeError(
                "schedulers cannot hold ReduceLROnPlateau, which needs a metric at each step; use it in a Callback."
            )
        if not isinstance(scheduler, LRScheduler) and not callable(scheduler):
            raise TypeError(f"schedulers must be torch schedulers or functions f(state, ssr), got {scheduler!r}.")
    functions = [scheduler for scheduler in given if not isinstance(scheduler, LRScheduler)]
    if len(functions) > 1:
        raise ValueError(
            f"schedulers holds {len(functions)} functions, each of which would set every learning rate: "
            "give one function that returns the product."
        )
    return given
