"""Receive the traces of a profiler, and write them as files for chrome://tracing and Perfetto."""

from __future__ import annotations

import glob
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path

import attrs
from torch.profiler import profile

from composer.core import Logger, State, TimeUnit
from composer.core.checks import fill_in, is_flag, whole_number_from
from composer.core.components import transient
from composer.core.files import UNFINISHED, check_template, fill_in_run, write_atomically
from composer.profiler.traces import Trace, merged_traces, read_trace, write_trace

number_of_traces = whole_number_from(-1, meaning="It is a number of traces; -1 keeps all.")
_FIELDS = ("run_name", "rank", "epoch", "batch")
_NAMES = ("folder", "filename", "remote_file_name", "merged_trace_filename", "merged_trace_remote_file_name")


class TraceHandler:
    """Receives the traces that a :class:`Profiler` records.

    Example:
        >>> class Slowest(TraceHandler):
        ...     def save(self, trace, profile, state, logger):
        ...         print(profile.key_averages().table(sort_by="cpu_time_total", row_limit=10))
    """

    def open(self, state: State, logger: Logger) -> None:
        """Prepare; called once, when training starts."""

    def save(self, trace: Trace, profile: profile, state: State, logger: Logger) -> None:
        """Receive the trace of a sequence of active batches.

        Args:
            trace: The content of a file in Chrome's format, with the operations, ranges and counters in
                ``trace["traceEvents"]``.
            profile: torch's profiler, with the statistics of these batches. It cannot export its trace a second time.
            state: The run.
            logger: Its logger.
        """

    def close(self, state: State, logger: Logger) -> None:
        """Finish; called once, also after an error."""


@attrs.define(eq=False)
class JSONTraceHandler(TraceHandler):
    """Write each sequence of active batches to a file in Chrome's trace format, and all of them to another at the end.

    Open them at https://ui.perfetto.dev or ``chrome://tracing``. In the names ``{run_name}``, ``{rank}``, ``{epoch}``
    and ``{batch}`` are filled in, the latter two with the completed epochs and batches; a name that ends with ``.gz``
    compresses the file. Files are written atomically.

    Args:
        folder: Folder of the files; created if it does not exist.
        filename: Name of each file.
        remote_file_name: Name of each file at loggers that store files; None uploads nothing.
        merged_trace_filename: Name of the file with all traces of the folder, written by the process of rank 0 when the
            run is closed, including the traces of other ranks that exist by then. None writes none.
        merged_trace_remote_file_name: Name of that file at loggers that store files; None uploads nothing.
        overwrite: Whether a new training may overwrite existing traces.
        num_traces_to_keep: Number of files to keep, the newest; -1 keeps all.

    Raises:
        ValueError: A name contains another field in braces, or ``num_traces_to_keep`` is less than -1.
        FileExistsError: When training starts: traces exist, and ``overwrite`` is False.

    Example:
        >>> JSONTraceHandler("runs/{run_name}", "ep{epoch}-ba{batch}.json").filename
        'ep{epoch}-ba{batch}.json'
    """

    folder: str = "{run_name}/traces"
    filename: str = "ep{epoch}-ba{batch}-rank{rank}.json"
    remote_file_name: str | None = "{run_name}/traces/ep{epoch}-ba{batch}-rank{rank}.json"
    merged_trace_filename: str | None = "merged_trace.json"
    merged_trace_remote_file_name: str | None = "{run_name}/traces/merged_trace.json"
    overwrite: bool = attrs.field(default=False, validator=is_flag, kw_only=True)
    num_traces_to_keep: int = attrs.field(default=-1, validator=number_of_traces, kw_only=True)
    _paths: list[Path] = transient(factory=list)

    def __attrs_post_init__(self) -> None:
        for name in _NAMES:
            value = getattr(self, name)
            setattr(self, name, None if value is None else check_template(value, name, _FIELDS))

    def open(self, state: State, logger: Logger) -> None:
        """Reset the state of an earlier run, and raise an error if a new training finds traces of another."""
        self._paths = []
        if self.overwrite or state.timestamp.count(TimeUnit.BATCH):
            return
        existing = self.existing(state)
        if existing:
            raise FileExistsError(
                f"{str(existing[0].parent)!r} already contains traces, such as {existing[0].name!r}. "
                "Set overwrite=True to overwrite them, choose another folder, or add {run_name} to its name."
            )

    def save(self, trace: Trace, profile: profile, state: State, logger: Logger) -> None:
        """Write a file."""
        self.write(partial(write_trace, trace), state, logger)

    def close(self, state: State, logger: Logger) -> None:
        """Merge all files of the folder into one."""
        if self.merged_trace_filename is None or state.rank != 0 or not self._paths:
            return
        path = self._folder_of(state) / fill_in_run(self.merged_trace_filename, state)
        parts = [part for part in self.existing(state, of_all_ranks=True) if part != path]
        write_atomically(partial(write_trace, merged_traces(map(read_trace, parts))), path)
        self._upload(self.merged_trace_remote_file_name, path, state, logger)

    def existing(self, state: State, *, of_all_ranks: bool = False) -> list[Path]:
        """Return the files in the folder with names of this process, or of all processes."""
        pattern = glob.escape(self.filename)
        for field in ("epoch", "batch", "rank") if of_all_ranks else ("epoch", "batch"):
            pattern = re.sub(rf"\{{{field}[^}}]*\}}", "*", pattern)
        pattern = fill_in(pattern, {"run_name": glob.escape(state.run_name), "rank": state.rank}, "filename")
        return sorted(path for path in self._folder_of(state).glob(pattern) if not path.name.startswith(UNFINISHED))

    def write(self, write: Callable[[Path], object], state: State, logger: Logger) -> None:
        """Write a file atomically by ``write(path)``, upload it to the loggers, and delete the oldest files."""
        path = self._folder_of(state) / fill_in_run(self.filename, state)
        write_atomically(write, path)
        self._upload(self.remote_file_name, path, state, logger)
        self._paths = [*(each for each in self._paths if each != path), path]
        while 0 <= self.num_traces_to_keep < len(self._paths):
            self._paths.pop(0).unlink(missing_ok=True)

    def _folder_of(self, state: State) -> Path:
        return Path(fill_in_run(self.folder, state)).absolute()

    def _upload(self, name: str | None, path: Path, state: State, logger: Logger) -> None:
        if name is not None and logger.has_file_upload_destination():
            logger.upload_file(fill_in_run(name, state), path, overwrite=self.overwrite)
