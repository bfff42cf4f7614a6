"""The learning rates of MosaicML Composer, which are those of the batch before, and its check of units."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch.optim.lr_scheduler import LRScheduler

from composer.core import State, Time, Timestamp, TimeUnit

if TYPE_CHECKING:
    from composer.optim import ComposerScheduler


def lag_schedules(
    schedulers: LRScheduler | ComposerScheduler | Sequence[LRScheduler | ComposerScheduler],
    *,
    step_schedulers_every_batch: bool = True,
) -> list[LRScheduler | ComposerScheduler]:
    """Return schedules with the learning rates of MosaicML Composer, to compare a run with one of its.

    Composer computes the rate of a batch before its clock has counted the batch before: batch ``k``, counted from 0, is
    trained with ``f(max(0, k - 1))`` instead of ``f(k)``. Schedulers of torch count their own steps, are equal in both,
    and are returned as they are.

    After the end of an epoch, the samples and tokens of its last batch are those of a mean batch.

    Args:
        schedulers: One or several, as the Trainer takes them.
        step_schedulers_every_batch: What the Trainer is given. If False, a function reads the epoch before the one that
            it sets the rate of; the schedules of :mod:`composer.optim` count batches, and are equal in both.

    Example:
        >>> from composer.optim import LinearScheduler
        >>> [schedule] = lag_schedules(LinearScheduler(alpha_f=0.0))
        >>> state = State(model=None, max_duration="4ba")
        >>> for batch in range(4):
        ...     state.timestamp = Timestamp(batch=batch, batch_in_epoch=batch)
        ...     print(schedule(state))
        1.0
        1.0
        0.75
        0.5
    """
    given = schedulers if isinstance(schedulers, Sequence) else [schedulers]
    every_batch = step_schedulers_every_batch
    return [one if isinstance(one, LRScheduler) else _lagged(one, every_batch=every_batch) for one in given]


def _lagged(schedule: ComposerScheduler, *, every_batch: bool) -> ComposerScheduler:
    takes_ratio = "ssr" in inspect.signature(schedule).parameters

    @functools.wraps(schedule, updated=())  # the Trainer looks for ssr in its signature
    def lagged(state: State, ssr: float = 1.0) -> float:
        now = state.timestamp
        state.timestamp = _clock_before(state, in_batches=every_batch)
        try:
            return schedule(state, ssr) if takes_ratio else schedule(state)
        finally:
            state.timestamp = now

    return lagged


def _clock_before(state: State, *, in_batches: bool) -> Timestamp:
    """Return the clock at the start of the last batch, or before the last epoch was counted."""
    now, before = state.timestamp.counts, state.previous_timestamp
    if not now.batch:
        return state.timestamp
    if in_batches and before.counts.batch == now.batch - 1:
        return before
    is_counted = not now.batch_in_epoch  # the epoch of the last batch
    in_epoch = now.batch_in_epoch or state.dataloader_len or 1
    part = 1 - in_batches / now.batch
    return Timestamp(
        epoch=now.epoch - is_counted,
        batch=now.batch - in_batches,
        sample=round(now.sample * part),
        token=round(now.token * part),
        batch_in_epoch=in_epoch - in_batches,
    )


def check_same_unit(t_warmup: Time, t_max: Time) -> None:
    """Raise an error if the lengths of a warm-up and of a schedule have different units, or are in epochs.

    Raises:
        ValueError: They have. It is also an AssertionError, as in Composer.

    Example:
        >>> check_same_unit(Time(1, "ba"), Time(5, "ba"))
    """
    if t_warmup.unit is not t_max.unit or t_max.unit is TimeUnit.EPOCH:
        raise _UnitsError(f"t_warmup and t_max must have the same unit, not epochs, got {t_warmup} and {t_max}.")


class _UnitsError(ValueError, AssertionError):
    """Times of a schedule have different units."""
