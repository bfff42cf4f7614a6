"""Receive what a profiler records, and write it as torch's traces for chrome://tracing and Perfetto."""

from __future__ import annotations

import glob
import re
from collections.abc import Callable
from pathlib import Path

import attrs
from torch.profiler import profile

from composer.core import Logger, State, TimeUnit
from composer.core.checks import is_flag, whole_number_from
from composer.core.files import UNFINISHED, check_template, fill_in, fill_in_run, write_atomically
from composer.core.saving.components import transient

_number_of_traces = whole_number_from(-1, meaning="It is a number of traces; -1 keeps all.")
_FIELDS = ("run_name", "rank", "epoch", "batch")
_NAMES = ("folder", "filename", "remote_file_name")


class TraceHandler:
    """Receives what a :class:`Profiler` records.

    Example:
        >>> class Slowest(TraceHandler):
        ...     def save(self, profile, state, logger):
        ...         print(profile.key_averages().table(sort_by="cpu_time_total", row_limit=10))
    """

    def open(self, state: State, logger: Logger) -> None:
        """Prepare; called when training starts."""

    def save(self, profile: profile, state: State, logger: Logger) -> None:
        """Receive torch's profiler with the operations and ranges of a sequence of active batches.

        torch exports a trace only once, so that only one handler can write it.
        """


@attrs.define(eq=False)
class JSONTraceHandler(TraceHandler):
    """Write each sequence of active batches to a file, as ``export_chrome_trace`` of torch's profiler does.

    Open them at https://ui.perfetto.dev or ``chrome://tracing``. In the names ``{run_name}``, ``{rank}``, ``{epoch}``
    and ``{batch}`` are filled in, the latter two with the completed epochs and batches; a name that ends with ``.gz``
    compresses the file. Files are written atomically.

    Args:
        folder: Folder of the files; created if it does not exist.
        filename: Name of each file.
        remote_file_name: Name of each file at loggers that store files; None uploads nothing.
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
    overwrite: bool = attrs.field(default=False, validator=is_flag, kw_only=True)
    num_traces_to_keep: int = attrs.field(default=-1, validator=_number_of_traces, kw_only=True)
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

    def save(self, profile: profile, state: State, logger: Logger) -> None:
        """Write a file."""
        self.write(lambda path: profile.export_chrome_trace(str(path)), state, logger)

    def existing(self, state: State) -> list[Path]:
        """Return the files in the folder with names of this process."""
        pattern = glob.escape(self.filename)
        for field in ("epoch", "batch"):
            pattern = re.sub(rf"\{{{field}[^}}]*\}}", "*", pattern)
        pattern = fill_in(pattern, {"run_name": glob.escape(state.run_name), "rank": state.rank}, "filename")
        return sorted(path for path in self._folder_of(state).glob(pattern) if not path.name.startswith(UNFINISHED))

    def write(self, write: Callable[[Path], object], state: State, logger: Logger) -> None:
        """Write a file atomically by ``write(path)``, upload it to the loggers, and delete the oldest files."""
        path = self._folder_of(state) / fill_in_run(self.filename, state)
        write_atomically(write, path)
        if self.remote_file_name is not None and logger.has_file_upload_destination():
            logger.upload_file(fill_in_run(self.remote_file_name, state), path, overwrite=self.overwrite)
        self._paths = [*(each for each in self._paths if each != path), path]
        while 0 <= self.num_traces_to_keep < len(self._paths):
            self._paths.pop(0).unlink(missing_ok=True)

    def _folder_of(self, state: State) -> Path:
        return Path(fill_in_run(self.folder, state)).absolute()
