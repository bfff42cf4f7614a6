"""How long a training will still take."""

from __future__ import annotations

import math
import time
from typing import Literal

import attrs

from composer.core import Callback, Logger, State, TimeUnit, saved
from composer.core.checks import one_of, whole_number_from
from composer.core.serialization import reset_fields

__all__ = ["RuntimeEstimator"]

_SECONDS = {"seconds": 1, "minutes": 60, "hours": 3600, "days": 86400}


@attrs.define
class _Evaluations:
    """Those of one evaluator: how many, how long altogether, and after which batch the last was."""

    count: int = 0
    seconds: float = 0.0
    last_batch: int = 0


@attrs.define(eq=False)
class RuntimeEstimator(Callback):
    """Log ``time/remaining_estimate`` at every batch: how long until the training ends, evaluations included.

    The batches still to come, of which the clock and ``max_duration`` tell how many, are taken to be as long as those
    so far on average; evaluations to come at the same distance as so far. Before an evaluator's first, its time is not
    known and left out. What was measured is saved, so a resumed run goes on estimating.

    Args:
        skip_batches: So many batches from each start are not measured: compilation and caches make them slow.
        time_unit: ``"seconds"``, ``"minutes"``, ``"hours"`` or ``"days"``.

    Raises:
        ValueError: One of them is out of range.

    Example:
        >>> RuntimeEstimator(skip_batches=5, time_unit="minutes")
        RuntimeEstimator(skip_batches=5, time_unit='minutes')
    """

    skip_batches: int = attrs.field(default=1, validator=whole_number_from(0, meaning="It counts batches."))
    time_unit: Literal["seconds", "minutes", "hours", "days"] = attrs.field(
        default="hours", validator=one_of(*_SECONDS)
    )

    _batches: int = saved(default=0)
    _seconds: float = saved(default=0.0)
    _evaluations: dict[str, _Evaluations] = saved(factory=dict)
    _first_batch: int | None = saved(default=None)
    _to_skip: int = attrs.field(default=0, init=False, repr=False)
    _since: float = attrs.field(default=0.0, init=False, repr=False)
    _eval_since: float = attrs.field(default=0.0, init=False, repr=False)
    _is_fitting: bool = attrs.field(default=False, init=False, repr=False)
    _whole: float | None = attrs.field(default=None, init=False, repr=False)

    def init(self, state: State, logger: Logger) -> None:
        """Forget an earlier run."""
        del state, logger
        reset_fields(self)

    def fit_start(self, state: State, logger: Logger) -> None:
        """Begin to measure."""
        del logger
        now = _batches_done(state)
        if not now:
            reset_fields(self)
        if self._first_batch is None or now < self._first_batch:
            self._first_batch, self._evaluations = now, {}
        self._is_fitting, self._to_skip, self._whole = True, self.skip_batches, None
        self._since = time.perf_counter()

    def fit_end(self, state: State, logger: Logger) -> None:
        """Leave alone what is evaluated after training."""
        del state, logger
        self._is_fitting = False

    def batch_end(self, state: State, logger: Logger) -> None:
        """Measure the batch and log."""
        before, self._since = self._since, time.perf_counter()
        if self._to_skip:
            self._to_skip -= 1
        else:
            self._batches += 1
            self._seconds += self._since - before
        if not _counts_ends(state):
            self._count_whole(state)
        if self._batches and logger.destinations:
            seconds = self._remaining(state)
            if seconds is not None:
                logger.log_metrics({"time/remaining_estimate": seconds / _SECONDS[self.time_unit]})

    def epoch_end(self, state: State, logger: Logger) -> None:
        """Find out how many batches there are, where only the end of an epoch tells."""
        del logger
        self._count_whole(state)

    def iteration_end(self, state: State, logger: Logger) -> None:
        """Find out how many batches there are, where only the end of an iteration tells."""
        del logger
        self._count_whole(state)

    def eval_start(self, state: State, logger: Logger) -> None:
        """Begin to measure an evaluation."""
        del state, logger
        self._eval_since = time.perf_counter()

    def eval_end(self, state: State, logger: Logger) -> None:
        """Measure the evaluation, whose time is none of the next batch's."""
        del logger
        seconds = time.perf_counter() - self._eval_since
        self._since += seconds
        if self._is_fitting:
            one = self._evaluations.setdefault(str(state.dataloader_label), _Evaluations())
            one.count, one.seconds, one.last_batch = one.count + 1, one.seconds + seconds, _batches_done(state)

    def _remaining(self, state: State) -> float | None:
        """Return the seconds until the end; None where it cannot be told yet."""
        done, whole = _batches_done(state), self._whole
        if whole is None:
            return None
        duration = state.max_duration
        if duration is not None and duration.unit is TimeUnit.SECOND:
            seconds = max(0.0, duration.value - state.timestamp.count(TimeUnit.SECOND))
        else:
            seconds = max(0.0, whole - done) * self._seconds / self._batches
        for one in self._evaluations.values():
            distance = (one.last_batch - (self._first_batch or 0)) / one.count
            if distance > 0:
                # One more at the end, where it is between two; half a batch keeps rounding from making it two.
                seconds += max(0, math.ceil((whole - one.last_batch - 0.5) / distance)) * one.seconds / one.count
        return seconds

    def _count_whole(self, state: State) -> None:
        """Note how many batches the whole training has, as far as can be told from what is done of it."""
        elapsed = state.get_elapsed_duration()
        if elapsed is not None and elapsed.value:
            self._whole = _batches_done(state) / elapsed.value


def _counts_ends(state: State) -> bool:
    """Return whether the clock tells only at the ends of epochs or iterations how much of the training is done."""
    unit = None if state.max_duration is None else state.max_duration.unit
    return unit is TimeUnit.ITERATION or (unit is TimeUnit.EPOCH and not state.dataloader_len)


def _batches_done(state: State) -> int:
    return int(state.timestamp.count(TimeUnit.BATCH))
