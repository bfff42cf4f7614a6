"""Which batches are profiled."""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum
from typing import TYPE_CHECKING, TypeAlias

from composer.core import TimeUnit

if TYPE_CHECKING:
    from composer.core import State

__all__ = ["ProfilerAction", "Schedule", "cyclic_schedule"]


class ProfilerAction(StrEnum):
    """What the profiler does in a batch.

    Example:
        >>> ProfilerAction("active") is ProfilerAction.ACTIVE
        True
    """

    SKIP = "skip"
    """Nothing."""
    WARMUP = "warmup"
    """Let torch's profiler get ready, whose first batches are slow; nothing of it is kept."""
    ACTIVE = "active"
    """Record."""
    ACTIVE_AND_SAVE = "active_and_save"
    """Record, and write down at the batch's end what has been recorded since the last time."""


Schedule: TypeAlias = Callable[["State"], ProfilerAction]
"""``f(state) -> action``, asked before each batch: ``state.timestamp.batch`` batches are done."""


def cyclic_schedule(
    skip_first: int = 0, wait: int = 0, warmup: int = 1, active: int = 4, repeat: int = 1
) -> Callable[[State], ProfilerAction]:
    """Return a schedule: after ``skip_first`` batches again and again wait, warm up and record.

    It counts the batches of the whole training, as :func:`torch.profiler.schedule` does, and looks at nothing else, so
    it is the same for a run that was resumed.

    Args:
        skip_first: Batches before the first cycle.
        wait: Batches of a cycle that are left out.
        warmup: Batches after that in which torch's profiler gets ready.
        active: Batches after that which are recorded, and written down after the last of them.
        repeat: Cycles; 0 goes on until the training ends.

    Raises:
        ValueError: A number is negative, or ``active`` is 0.

    Example:
        >>> from composer.core import State, Timestamp
        >>> state, schedule = State(model=None), cyclic_schedule(wait=1, warmup=1, active=2)
        >>> for batch in range(4):
        ...     state.timestamp = Timestamp(batch=batch)
        ...     print(schedule(state).value)
        skip
        warmup
        active
        active_and_save
    """
    numbers = {"skip_first": skip_first, "wait": wait, "warmup": warmup, "active": active, "repeat": repeat}
    for name, number in numbers.items():
        least = 1 if name == "active" else 0
        if not isinstance(number, int) or isinstance(number, bool) or number < least:
            raise ValueError(f"{name} must be a number of {_COUNTED[name]}, {least} or more, got {number!r}.")
    cycle = wait + warmup + active

    def schedule(state: State) -> ProfilerAction:
        batch = int(state.timestamp.count(TimeUnit.BATCH)) - skip_first
        if batch < 0 or (repeat and batch >= cycle * repeat):
            return ProfilerAction.SKIP
        place = batch % cycle
        if place < wait:
            return ProfilerAction.SKIP
        if place < wait + warmup:
            return ProfilerAction.WARMUP
        return ProfilerAction.ACTIVE if place < cycle - 1 else ProfilerAction.ACTIVE_AND_SAVE

    return schedule


_COUNTED = {"skip_first": "batches", "wait": "batches", "warmup": "batches", "active": "batches", "repeat": "cycles"}
