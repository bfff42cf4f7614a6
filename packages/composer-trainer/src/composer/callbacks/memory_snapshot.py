"""What a GPU's memory holds during a few batches."""

from __future__ import annotations

import attrs

from composer.callbacks._memory_history import (
    check_names,
    is_recordable,
    start_history,
    stop_history,
    write_snapshot,
)
from composer.core import Callback, Interval, Logger, State, Time, Timestamp, TimeUnit
from composer.core.checks import true_or_false, whole_number_from

__all__ = ["MemorySnapshot"]


def _to_interval(given: Time | str | int) -> Time:
    interval = Interval.named("interval", given).every
    if not interval.value or interval.unit is TimeUnit.DURATION:
        raise ValueError(f"interval must be a length of time such as '3ba', more than 0, got {given!r}.")
    return interval


@attrs.define(eq=False)
class MemorySnapshot(Callback):
    """Record once in a fit, over a few batches, what is allocated on the GPU and by which lines of code.

    The file, ``<folder>/<filename>.pickle``, can be looked at in a browser: https://docs.pytorch.org/memory_viz. Names
    may have ``{run_name}``, ``{rank}`` and ``{batch}`` in them. On other devices than CUDA it says so and does nothing.

    Args:
        skip_batches: Batches of a fit to let pass before.
        interval: How long to record.
        max_entries: How many allocations and releases to keep, the last ones.
        folder: Where the file is written.
        filename: Its name, without the ending.
        remote_file_name: What loggers that keep files are to call it; None gives it to none.
        overwrite: Whether to write over a file that exists.

    Raises:
        ValueError: A value is out of range, or a name has something else in braces.

    Example:
        >>> MemorySnapshot(skip_batches=10, interval="2ba").interval
        Time(2, 'ba')
    """

    skip_batches: int = attrs.field(default=1, validator=whole_number_from(0, meaning="It counts batches."))
    interval: Time = attrs.field(default=Time(3, TimeUnit.BATCH), converter=_to_interval)
    max_entries: int = attrs.field(
        default=100000, validator=whole_number_from(1, meaning="It is the number of allocations to keep.")
    )
    folder: str = "{run_name}/torch_traces"
    filename: str = "rank{rank}.{batch}.memory_snapshot"
    remote_file_name: str | None = "{run_name}/torch_memory_traces"
    overwrite: bool = attrs.field(default=False, validator=true_or_false)

    _is_wanted: bool = attrs.field(default=False, init=False, repr=False)
    _skip_until: int = attrs.field(default=0, init=False, repr=False)
    _recorded_from: Timestamp | None = attrs.field(default=None, init=False, repr=False)

    def __attrs_post_init__(self) -> None:
        check_names(folder=self.folder, filename=self.filename, remote_file_name=self.remote_file_name)

    def fit_start(self, state: State, logger: Logger) -> None:
        """Count the batches to skip from here."""
        del logger
        self._is_wanted = is_recordable(state, "MemorySnapshot")
        self._skip_until = int(state.timestamp.count(TimeUnit.BATCH)) + self.skip_batches

    def batch_start(self, state: State, logger: Logger) -> None:
        """Begin to record, when it is time."""
        del logger
        if (
            self._is_wanted
            and self._recorded_from is None
            and state.timestamp.count(TimeUnit.BATCH) >= self._skip_until
        ):
            self._recorded_from = state.timestamp
            start_history(self.max_entries)

    def batch_end(self, state: State, logger: Logger) -> None:
        """Write the file, when it has been long enough."""
        if self._recorded_from is not None and has_lasted(self.interval, self._recorded_from, state.timestamp):
            self._finish(state, logger)

    def fit_end(self, state: State, logger: Logger) -> None:
        """Write what there is."""
        if self._recorded_from is not None:
            self._finish(state, logger)

    def close(self, state: State, logger: Logger) -> None:
        """Record nothing any more."""
        del state, logger
        if self._recorded_from is not None:
            self._recorded_from = None
            stop_history()

    def _finish(self, state: State, logger: Logger) -> None:
        self._recorded_from, self._is_wanted = None, False
        try:
            write_snapshot(self.folder, self.filename, self.remote_file_name, state, logger, overwrite=self.overwrite)
        finally:
            stop_history()


def has_lasted(interval: Time, since: Timestamp, now: Timestamp) -> bool:
    """Return whether an interval has gone by between two moments.

    Example:
        >>> has_lasted(Time(2, "ba"), Timestamp(batch=5), Timestamp(batch=7))
        True
    """
    return now.count(interval.unit) - since.count(interval.unit) >= interval.value
