"""Estimate the remaining time of a training."""

from __future__ import annotations

import math
import time
from typing import Literal

import attrs

from composer.callbacks.speed_monitor import SECONDS_OF_UNIT
from composer.core import Callback, Logger, State, TimeUnit, saved
from composer.core.checks import integer, one_of
from composer.core.saving.codec import Record
from composer.core.saving.components import reset_fields, transient


@attrs.define
class _Evaluations(Record):
    """The evaluations of one evaluator: their number, total time, and the batch before the last one."""

    count: int = 0
    seconds: float = 0.0
    last_batch: int = 0


@attrs.define(eq=False)
class RuntimeEstimator(Callback):
    """Log ``time/remaining_estimate`` at every batch: the time until the training ends, evaluations included.

    The remaining batches, whose number follows from the clock and ``max_duration``, are assumed to take the mean time
    of the batches so far, and evaluations to continue at the same interval. An evaluator counts from its first
    evaluation. The measurements are saved, so that a resumed run continues them.

    Args:
        skip_batches: Batches after each start that are not measured, because compilation and caches make them slow.
        time_unit: ``"seconds"``, ``"minutes"``, ``"hours"`` or ``"days"``.

    Raises:
        ValueError: An argument is out of range.

    Example:
        >>> RuntimeEstimator(skip_batches=5, time_unit="minutes")
        RuntimeEstimator(skip_batches=5, time_unit='minutes')
    """

    skip_batches: int = integer(1, 0, meaning="It counts batches.")
    time_unit: Literal["seconds", "minutes", "hours", "days"] = attrs.field(
        default="hours", validator=one_of(*SECONDS_OF_UNIT)
    )

    _batches: int = saved(default=0)
    _seconds: float = saved(default=0.0)
    _evaluations: dict[str, _Evaluations] = saved(factory=dict)
    _first_batch: int | None = saved(default=None)
    _to_skip: int = transient(default=0)
    _since: float = transient(default=0.0)
    _eval_since: float = transient(default=0.0)
    _is_fitting: bool = transient(default=False)
    _total_batches: float | None = transient(default=None)

    def init(self, state: State, logger: Logger) -> None:
        """Reset the state of an earlier run, and log the unit of the estimates."""
        reset_fields(self)
        logger.log_hyperparameters({"time/remaining_estimate_unit": self.time_unit})

    def fit_start(self, state: State, logger: Logger) -> None:
        """Start measuring."""
        now = state.timestamp.counts.batch
        if not now:
            reset_fields(self)
        if self._first_batch is None or now < self._first_batch:
            self._first_batch, self._evaluations = now, {}
        self._is_fitting, self._to_skip, self._total_batches = True, self.skip_batches, None
        self._since = time.perf_counter()

    def fit_end(self, state: State, logger: Logger) -> None:
        """Ignore evaluations after training."""
        self._is_fitting = False

    def batch_end(self, state: State, logger: Logger) -> None:
        """Measure the batch and log."""
        before, self._since = self._since, time.perf_counter()
        if self._to_skip:
            self._to_skip -= 1
        else:
            self._batches += 1
            self._seconds += self._since - before
        unit = None if state.max_duration is None else state.max_duration.unit
        # In these units the completed fraction grows only when an epoch or iteration ends.
        is_known_at_ends = unit is TimeUnit.ITERATION or (unit is TimeUnit.EPOCH and not state.dataloader_len)
        if not is_known_at_ends:
            self._estimate_total(state)
        if self._batches and logger.destinations:
            seconds = self._remaining(state)
            if seconds is not None:
                logger.log_metrics({"time/remaining_estimate": seconds / SECONDS_OF_UNIT[self.time_unit]})

    def epoch_end(self, state: State, logger: Logger) -> None:
        """Estimate the number of batches, if it can be computed only at the end of an epoch or iteration."""
        self._estimate_total(state)

    iteration_end = epoch_end

    def eval_start(self, state: State, logger: Logger) -> None:
        """Start measuring an evaluation."""
        self._eval_since = time.perf_counter()

    def eval_end(self, state: State, logger: Logger) -> None:
        """Measure the evaluation, and exclude its time from the next batch."""
        seconds = time.perf_counter() - self._eval_since
        self._since += seconds
        if self._is_fitting:
            one = self._evaluations.setdefault(str(state.dataloader_label), _Evaluations())
            one.count, one.seconds, one.last_batch = one.count + 1, one.seconds + seconds, state.timestamp.counts.batch

    def _remaining(self, state: State) -> float | None:
        """Return the seconds until the end; None if it cannot be estimated yet."""
        done, whole = state.timestamp.counts.batch, self._total_batches
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
                # Half a batch less, so that rounding does not count the evaluation at the end twice.
                seconds += max(0, math.ceil((whole - one.last_batch - 0.5) / distance)) * one.seconds / one.count
        return seconds

    def _estimate_total(self, state: State) -> None:
        """Estimate the batches of the complete training from the completed fraction."""
        elapsed = state.get_elapsed_duration()
        if elapsed is not None and elapsed.value:
            self._total_batches = state.timestamp.counts.batch / elapsed.value
