"""Choose the batches to profile."""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum

import torch

from composer.core import State, TimeUnit
from composer.functional.checks import check_sizes, check_whole


class ProfilerAction(Enum):
    """The profiler's action in a batch; the value is the action of torch's profiler.

    Example:
        >>> ProfilerAction(torch.profiler.ProfilerAction.NONE).name
        'SKIP'
    """

    SKIP = torch.profiler.ProfilerAction.NONE
    """Do nothing."""
    WARMUP = torch.profiler.ProfilerAction.WARMUP
    """Warm up torch's profiler, whose first batches are slow, and discard the recording."""
    ACTIVE = torch.profiler.ProfilerAction.RECORD
    """Record."""
    ACTIVE_AND_SAVE = torch.profiler.ProfilerAction.RECORD_AND_SAVE
    """Record, and write the recording at the end of the batch."""


def cyclic_schedule(
    skip_first: int = 0, wait: int = 0, warmup: int = 1, active: int = 4, repeat: int = 1
) -> Callable[[State], ProfilerAction]:
    """Return a schedule that repeats waiting, warming up and recording after the first ``skip_first`` batches.

    It is :func:`torch.profiler.schedule` of the number of batches since the start of the training, so that it is the
    same in a resumed run.

    Args:
        skip_first: Batches before the first cycle.
        wait: Batches of a cycle that are skipped.
        warmup: Batches after that in which torch's profiler warms up. torch warns of 0, as the first recorded batch is
            then slow.
        active: Batches after that which are recorded; the recording is written after the last of them.
        repeat: Number of cycles; 0 repeats until the training ends.

    Raises:
        TypeError: A number is not an integer.
        ValueError: A number is negative, or ``active`` is 0.

    Example:
        >>> from composer.core import State, Timestamp
        >>> state, schedule = State(model=None), cyclic_schedule(wait=1, warmup=1, active=2)
        >>> for batch in range(4):
        ...     state.timestamp = Timestamp(batch=batch)
        ...     print(schedule(state).name)
        SKIP
        WARMUP
        ACTIVE
        ACTIVE_AND_SAVE
    """
    for name, number in {"skip_first": skip_first, "wait": wait, "warmup": warmup, "repeat": repeat}.items():
        check_whole(name, number, 0)
    check_sizes(active=active)
    of_torch = torch.profiler.schedule(skip_first=skip_first, wait=wait, warmup=warmup, active=active, repeat=repeat)
    return lambda state: ProfilerAction(of_torch(int(state.timestamp.count(TimeUnit.BATCH))))
