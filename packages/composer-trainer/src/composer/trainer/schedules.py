"""Which learning rate schedulers a run has, and when each of them steps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeAlias

import attrs
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from composer.optim import ComposerScheduler, compile_composer_scheduler

if TYPE_CHECKING:
    from composer.core import State

__all__ = ["SchedulerLike", "Schedules"]

SchedulerLike: TypeAlias = LRScheduler | ComposerScheduler


@attrs.frozen
class Schedules:
    """A run's schedulers, by when they step.

    Args:
        every_batch: Those that step after each batch.
        every_epoch: Those that step after each epoch.
    """

    every_batch: tuple[LRScheduler, ...] = ()
    every_epoch: tuple[LRScheduler, ...] = ()

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
            schedulers: torch's own, or functions ``f(state, ssr) -> multiplier``, which hold for every optimizer.
            state: With the optimizers and the length of the training.
            scale_schedule_ratio: By how much the schedule is stretched.
            step_every_batch: Whether all step after each batch; if None, torch's own step after each epoch and
                functions after each batch.

        Raises:
            TypeError: A scheduler is neither of these.
        """
        given = [] if schedulers is None else schedulers if isinstance(schedulers, Sequence) else [schedulers]
        every: dict[bool, list[LRScheduler]] = {True: [], False: []}
        for scheduler in given:
            if isinstance(scheduler, ReduceLROnPlateau):
                raise TypeError(
                    "schedulers cannot hold ReduceLROnPlateau, which needs a metric at each step; use it in a Callback."
                )
            if isinstance(scheduler, LRScheduler):
                every[bool(step_every_batch)].append(scheduler)
            elif callable(scheduler):
                every[step_every_batch is not False] += [
                    compile_composer_scheduler(scheduler, state, scale_schedule_ratio, optimizer)
                    for optimizer in state.optimizers
                ]
            else:
                raise TypeError(f"schedulers must be torch schedulers or functions f(state, ssr), got {scheduler!r}.")
        return cls(tuple(every[True]), tuple(every[False]))
