"""Base class of loggers that buffer values: when they open their file or run, and when they write."""

from __future__ import annotations

import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import attrs

from composer.core import Interval, Logger, LoggerDestination, State, Timestamp, TimeUnit
from composer.core.checks import integer
from composer.core.interval import to_interval
from composer.core.saving.components import transient


@attrs.define(eq=False)
class GatheringLogger(LoggerDestination, ABC):
    """A logger that buffers values and writes them together. Subclasses define how to open and write.

    A subclass appends values to ``_records``. Its :meth:`open` sets ``_is_open`` and ends with a flush. It is called at
    ``AFTER_LOAD`` or, in a loop without this event, when training, an evaluation or a prediction starts. Values are
    written every ``flush_interval`` batches, and at the end of each epoch, of evaluations, of predictions and of
    training.

    Args:
        every: How often metrics are logged: a time, a string or a number of epochs; always if None.
        flush_interval: Batches between two flushes.

    Raises:
        ValueError: ``flush_interval`` is less than 1, or ``every`` is not a length of time.
    """

    every: Interval | None = attrs.field(default=None, converter=to_interval, kw_only=True)
    flush_interval: int = integer(100, 1, meaning="It counts batches.", kw_only=True)

    seconds_between_flushes: float = transient(default=math.inf)
    """Seconds after which the next end of a batch flushes as well."""
    _is_open: bool = transient(default=False)
    _records: list[Any] = transient(factory=list)
    _epoch_starts: set[int] = transient(factory=set)
    _batches: int = transient(default=0)
    _next_flush: float = transient(default=math.inf)  # by time.monotonic()
    _logger: Logger | None = transient(default=None)

    @property
    def is_resumed(self) -> bool:
        """Whether the run continues an earlier one, from a checkpoint or from its start."""
        return self._logger is not None and self._logger.is_resumed

    @abstractmethod
    def open(self, state: State) -> None:
        """Open the file or run, if it is not open."""

    @abstractmethod
    def write_records(self, records: Sequence[Any]) -> None:
        """Read buffered values, and write them."""

    def flush(self) -> None:
        """Write the buffered values, if the file or run is open."""
        self._batches, self._next_flush = 0, time.monotonic() + self.seconds_between_flushes
        if self._is_open and self._records:
            records, self._records = self._records, []
            self.report_failure_of("flush", lambda: self.write_records(records))

    def epoch_of(self, batch: int, now: Timestamp) -> int:
        """Return the epoch of a batch, which may be an earlier one: that of values that ``every`` has delayed."""
        reached = now.count(TimeUnit.BATCH)
        self._epoch_starts.add(int(reached - now.count(TimeUnit.BATCH, in_epoch=True)))
        starts = self._epoch_starts if batch < reached else ()
        return int(now.count(TimeUnit.EPOCH)) - sum(batch < one <= reached for one in starts)

    def raise_if_in_use(self, logger: Logger) -> None:
        """Raise a RuntimeError if the logger is used by another run that is not closed."""
        if self._logger is not None and self._logger is not logger:
            raise RuntimeError(
                f"{type(self).__name__} is used by another run that is not closed: call the close() of its Trainer "
                "first, or create a new logger."
            )

    def report_failure_of(self, method: str, call: Callable[[], object]) -> None:
        """Call a function, and report its error for a method of this logger; raise the error outside of a run."""
        try:
            call()
        except Exception as error:
            if self._logger is None:
                raise
            self._logger.report_failure(self, method, error)

    def after_load(self, state: State, logger: Logger) -> None:
        """Open the file or run, if it is not open; also when training, an evaluation or a prediction starts."""
        self.open(state)

    fit_start = eval_before_all = predict_start = after_load

    def batch_end(self, state: State, logger: Logger) -> None:
        """Write the buffered values, if a flush is due."""
        self._batches += 1
        if self._batches >= self.flush_interval or time.monotonic() >= self._next_flush:
            self.flush()

    def epoch_end(self, state: State, logger: Logger) -> None:
        """Write the buffered values."""
        self._epoch_starts.add(int(state.timestamp.count(TimeUnit.BATCH)))
        self.flush()

    def fit_end(self, state: State, logger: Logger) -> None:
        """Write the buffered values; also at the end of evaluations and predictions."""
        self.flush()

    eval_after_all = eval_standalone_end = predict_end = fit_end
