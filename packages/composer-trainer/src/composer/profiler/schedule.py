"""Choose the batches to profile."""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum
from typing import TYPE_CHECKING, TypeAlias

from composer.core import TimeUnit

if TYPE_CHECKING:
    from composer.core import State

__all__ = ["ProfilerAction", "Schedule", "cyclic_schedule"]


class ProfilerAction(StrEnum):
    """The profiler's action in a batch.

    Example:
        >>> ProfilerAction("active") is ProfilerAction.ACTIVE
        True
    """

    SKIP = "skip"
    """Do nothing."""
    WARMUP = "warmup"
    """Warm up torch's profiler, whose first batches are slow, and discard the recording."""
    ACTIVE = "active"
    """Record."""
    ACTIVE_AND_SAVE = "active_and_save"
    """Record, and write the recording at the end of the batch."""


Schedule: TypeAlias = Callable[["State"], ProfilerAction]
"""``f(state) -> action``, called before each batch, when ``state.timestamp.batch`` batches are complete."""


def cyclic_schedule(
    skip_first: int = 0, wait: int = 0, warmup: int = 1, active: int = 4, repeat: int = 1
) -> Callable[[State], ProfilerAction]:
    """Return a schedule that repeats waiting, warming up and recording after the first ``skip_first`` batches.

    It depends only on the number of batches since the start of the training, as :func:`torch.profiler.schedule` does,
    so that it is the same in a resumed run.

    Args:
        skip_first: Batches before the first cycle.
        wait: Batches of a cycle that are skipped.
        warmup: Batches after that in which torch's profiler warms up.
        active: Batches after that which are recorded; the recording is written after the last of them.
        repeat: Number of cycles; 0 repeats until the training ends.

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
        least, counted = (1 if name == "active" else 0), ("cycles" if name == "repeat" else "batches")
        if not isinstance(number, int) or isinstance(number, bool) or number < least:
            raise ValueError(f"{name} must be a number of {counted}, {least} or more, got {number!r}.")
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
