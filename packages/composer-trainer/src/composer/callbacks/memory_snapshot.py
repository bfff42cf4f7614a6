"""Record the allocations of a GPU, over a few batches or until it runs out of memory, in files for torch's viewer."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import attrs
import torch

from composer.core import Callback, Interval, Logger, State, Time, Timestamp, TimeUnit
from composer.core.checks import integer, is_flag, whole_number_from
from composer.core.files import check_template, fill_in_run, write_atomically
from composer.core.saving.components import transient
from composer.core.step import is_out_of_memory

_FIELDS = ("run_name", "rank", "batch")
# CUDA's allocator has one history in a process, which several callbacks may request: the numbers of entries for each.
_requested: list[int] = []
_MAX_ENTRIES = whole_number_from(1, meaning="It is the number of allocations to keep.")


def _to_interval(given: Time | str | int) -> Time:
    interval = Interval.named("interval", given).every
    if not interval.value or interval.unit is TimeUnit.DURATION:
        raise ValueError(f"interval must be a length of time such as '3ba', more than 0, got {given!r}.")
    return interval


def _check_template(_: object, field: attrs.Attribute[Any], template: str | None) -> None:
    if template is not None:
        check_template(template, field.name, _FIELDS)


@attrs.define(eq=False)
class MemorySnapshot(Callback):
    """Record once per fit, over a few batches, what is allocated on the GPU and by which lines of code.

    https://docs.pytorch.org/memory_viz shows the file, ``<folder>/<filename>.pickle``, in a browser. Names may contain
    ``{run_name}``, ``{rank}`` and ``{batch}``. On devices other than CUDA the callback warns and does nothing.

    Args:
        skip_batches: Batches of a fit to skip before recording.
        interval: How long to record.
        max_entries: Number of allocations and releases to keep, the last ones.
        folder: Folder of the file.
        filename: Name of the file, without the suffix.
        remote_file_name: Name of the file at loggers that store files; None uploads it to none.
        overwrite: Whether to overwrite an existing file.

    Raises:
        ValueError: A value is out of range, or a name contains another field in braces.

    Example:
        >>> MemorySnapshot(skip_batches=10, interval="2ba").interval
        Time(2, TimeUnit.BATCH)
    """

    skip_batches: int = integer(1, 0, meaning="It counts batches.")
    interval: Time = attrs.field(default=Time(3, TimeUnit.BATCH), converter=_to_interval)
    max_entries: int = attrs.field(default=100000, validator=_MAX_ENTRIES)
    folder: str = attrs.field(default="{run_name}/torch_traces", validator=_check_template)
    filename: str = attrs.field(default="rank{rank}.{batch}.memory_snapshot", validator=_check_template)
    remote_file_name: str | None = attrs.field(default="{run_name}/torch_memory_traces", validator=_check_template)
    overwrite: bool = attrs.field(default=False, validator=is_flag)

    _is_enabled: bool = transient(default=False)
    _skip_until: int = transient(default=0)
    _recorded_from: Timestamp | None = transient(default=None)
    _recording: ExitStack = transient(factory=ExitStack)

    def fit_start(self, state: State, logger: Logger) -> None:
        """Count the batches to skip from here."""
        self._is_enabled = is_recordable(state, "MemorySnapshot")
        self._skip_until = int(state.timestamp.count(TimeUnit.BATCH)) + self.skip_batches

    def batch_start(self, state: State, logger: Logger) -> None:
        """Start recording after the skipped batches."""
        is_skipped = state.timestamp.count(TimeUnit.BATCH) < self._skip_until
        if self._is_enabled and self._recorded_from is None and not is_skipped:
            self._recorded_from = state.timestamp
            self._recording.enter_context(recording(self.max_entries))

    def batch_end(self, state: State, logger: Logger) -> None:
        """Write the file if the interval has elapsed."""
        now, since, unit = state.timestamp, self._recorded_from, self.interval.unit
        if since is not None and now.count(unit) - since.count(unit) >= self.interval.value:
            self.fit_end(state, logger)

    def fit_end(self, state: State, logger: Logger) -> None:
        """Write the file if recording has started."""
        if self._recorded_from is not None:
            self._recorded_from, self._is_enabled = None, False
            with self._recording:
                write_snapshot(self, state, logger)

    def close(self, state: State, logger: Logger) -> None:
        """Stop recording."""
        self._recorded_from = None
        self._recording.close()


@attrs.define(eq=False)
class OOMObserver(Callback):
    """Write what is allocated on the GPU, and by which lines of code, when a run ends because it is out of memory.

    https://docs.pytorch.org/memory_viz shows the file, ``<folder>/<filename>.pickle``, in a browser. The file is
    written when a :class:`torch.OutOfMemoryError` ends the run, not when the error is caught, as during the search for
    a microbatch size. Recording costs a few microseconds per allocation. On devices other than CUDA the callback warns
    and does nothing.

    Args:
        max_entries: Number of allocations and releases to keep, the last ones.
        folder: Folder of the file; ``{run_name}``, ``{rank}`` and ``{batch}`` are filled in here and below.
        filename: Name of the file, without the suffix.
        remote_file_name: Name of the file at loggers that store files; None uploads it to none.
        overwrite: Whether to overwrite an existing file.

    Raises:
        ValueError: ``max_entries`` is less than 1, or a name contains another field in braces.

    Example:
        >>> OOMObserver(folder="traces").filename
        'rank{rank}_oom'
    """

    max_entries: int = attrs.field(default=100000, validator=_MAX_ENTRIES)
    folder: str = attrs.field(default="{run_name}/torch_traces", validator=_check_template)
    filename: str = attrs.field(default="rank{rank}_oom", validator=_check_template)
    remote_file_name: str | None = attrs.field(
        default="{run_name}/oom_traces/rank{rank}_oom", validator=_check_template
    )
    overwrite: bool = attrs.field(default=False, validator=is_flag)

    _recording: ExitStack = transient(factory=ExitStack)

    def init(self, state: State, logger: Logger) -> None:
        """Start recording."""
        if is_recordable(state, "OOMObserver"):
            self._recording.enter_context(recording(self.max_entries))
            self._recording.callback(self._write_if_out_of_memory, state, logger)

    def close(self, state: State, logger: Logger) -> None:
        """Write the file if the run ends because it is out of memory, and stop recording."""
        self._recording.close()

    def _write_if_out_of_memory(self, state: State, logger: Logger) -> None:
        if is_out_of_memory(sys.exception()):
            write_snapshot(self, state, logger)


def is_recordable(state: State, who: str) -> bool:
    """Return whether the run is on a CUDA device, and warn if it is not."""
    if state.device.type == "cuda":
        return True
    warnings.warn(
        f"{who} has nothing to record: it records the memory of CUDA devices, and the run is on {state.device}.",
        stacklevel=3,
    )
    return False


@contextmanager
def recording(max_entries: int) -> Iterator[None]:
    """Let torch's allocator record each allocation with the lines of code that requested it."""
    _requested.append(max_entries)
    _record()
    try:
        yield
    finally:
        _requested.remove(max_entries)
        _record()


def _record() -> None:
    """Start recording for the callbacks that have requested it, or stop if there is none."""
    record: Any = torch.cuda.memory._record_memory_history  # noqa: SLF001  (documented, without a public name)
    if _requested:
        record(max_entries=max(_requested))
    else:
        record(enabled=None)


def write_snapshot(names: MemorySnapshot | OOMObserver, state: State, logger: Logger) -> Path:
    """Write the recorded allocations atomically to ``<folder>/<filename>.pickle``, and upload the file to the loggers.

    Raises:
        FileExistsError: The file exists, and ``overwrite`` is False.
    """
    path = Path(fill_in_run(names.folder, state)) / f"{fill_in_run(names.filename, state)}.pickle"
    if path.exists() and not names.overwrite:
        raise FileExistsError(
            f"{str(path)!r} exists. Set overwrite=True to overwrite it, or add {{run_name}} and {{batch}} to the name."
        )
    dump: Any = torch.cuda.memory._dump_snapshot  # noqa: SLF001  (see _record)
    write_atomically(lambda unfinished: dump(os.fspath(unfinished)), path)
    if names.remote_file_name is not None:
        remote = f"{fill_in_run(names.remote_file_name, state)}.pickle"
        logger.upload_file(remote, path, overwrite=names.overwrite)
    return path
