"""Metrics as JSON lines in a file."""

from __future__ import annotations

import errno
import json
import math
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs

from composer.core import Interval, Logger, State, Time, TimeUnit
from composer.core.checks import to_path
from composer.core.naming import fill_in
from composer.core.serialization import from_data
from composer.functional.checks import check_flags, check_whole_numbers
from composer.loggers.capture import CapturedStream
from composer.loggers.gathering import GatheringLogger
from composer.loggers.values import detach_to_host, read

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

__all__ = ["FileLogger"]


@attrs.frozen
class _Place:
    """Where a run's file ended when a checkpoint was saved."""

    path: str
    size: int | None = attrs.field(validator=attrs.validators.optional(attrs.validators.ge(0)))

    @classmethod
    def of(cls, state: Mapping[str, Any]) -> _Place:
        """Return what was saved; checkpoints of earlier releases have no size."""
        place: _Place = from_data({"size": None, **state}, cls, "FileLogger")
        return place


class FileLogger(GatheringLogger):
    """Write what is logged as JSON, one object a line, with the clock; and what the program prints.

    The first line names the run. The lines look like this::

        {"epoch": 0, "batch": 0, "seconds": 0.0, "run_name": "first"}
        {"epoch": 0, "batch": 0, "seconds": 0.0, "hyperparameters": {"seed": 17}}
        {"epoch": 0, "batch": 0, "seconds": 0.0, "metrics": {"loss/train/total": 2.31, "lr-SGD/group0": 0.1}}
        {"epoch": 0, "batch": 100, "seconds": 1.2, "table": "samples", "columns": ["id"], "rows": [[7]]}
        {"epoch": 0, "batch": 100, "seconds": 1.2, "stdout": "something that was printed"}

    ``seconds`` is the clock's wall time. Values are read and written every ``flush_interval`` batches, at the end of
    each epoch, after evaluations and at the end, each line whole and by itself: when the process is killed, only one
    that the system is writing in that microsecond can be cut off. Numbers that JSON cannot write are the texts
    ``"NaN"``, ``"Infinity"`` and ``"-Infinity"``, which ``float()`` reads. A file that cannot be written to, such as on
    a full disk, is reported once, and the run goes on.

    The file is made at ``AFTER_LOAD`` or, in a loop without this event, when training, an evaluation or a prediction
    begins. A run resumed from a checkpoint, or started again by ``autoresume`` before there is one, continues its own
    file: the one that ``filename`` names, if the checkpoint was saved with the same path or the file's first line has
    this run's name. A checkpoint never chooses the file. Lines written after the checkpoint are removed: those beyond
    the file's size at that time or, if the checkpoint does not have it, those from the resumed batch on.

    Args:
        filename: The file; ``{run_name}`` and ``{rank}`` are filled in. Missing folders are made.
        remote_file_name: What the file is called at the loggers that keep files, which are given it when the run is
            closed; ``{run_name}`` and ``{rank}`` are filled in. It stays on this machine if None.
        capture_stdout: Whether to write what is printed to ``sys.stdout``, from ``INIT`` until the run is closed. It is
            shown all the same.
        capture_stderr: The same of ``sys.stderr``. Of a progress bar the last drawing is written.
        buffer_size: Bytes that are gathered before the system is called, as :func:`open` has it; with 0 or 1 each line
            is handed over by itself.
        log_traces: Whether to write which algorithms ran, if the run logs that.
        flush_interval: Batches between two writings.
        overwrite: Whether to write over a file that exists.
        every: How often metrics are logged: a time, a text or a number of epochs; each time if None.

    Raises:
        ValueError: A name has something else in braces, or ``flush_interval`` or ``buffer_size`` is out of range. At
            ``INIT``: another FileLogger of the run writes to the file, or there is a ``remote_file_name`` and no
            logger keeps files.
        FileExistsError: When the file is made: it exists, is not continued, and ``overwrite`` is False.

    Example:
        >>> FileLogger("runs/{run_name}/metrics.jsonl", flush_interval=10).filename
        'runs/{run_name}/metrics.jsonl'
    """

    def __init__(
        self,
        filename: str = "{run_name}/logs-rank{rank}.txt",
        remote_file_name: str | None = None,
        *,
        capture_stdout: bool = True,
        capture_stderr: bool = True,
        buffer_size: int = 1,
        log_traces: bool = True,
        flush_interval: int = 100,
        overwrite: bool = False,
        every: Interval | Time | str | int | None = None,
    ) -> None:
        super().__init__(every=every, flush_interval=flush_interval)
        check_flags(
            capture_stdout=capture_stdout, capture_stderr=capture_stderr, log_traces=log_traces, overwrite=overwrite
        )
        check_whole_numbers(buffer_size=buffer_size)
        if buffer_size < 0:
            raise ValueError(f"buffer_size must be a number of bytes, 0 or more, got {buffer_size}.")
        self.filename = to_path("filename", filename)
        self.remote_file_name = None if remote_file_name is None else to_path("remote_file_name", remote_file_name)
        _filled_in(self.filename, "filename", run_name="run", rank=0)
        if self.remote_file_name is not None:
            _filled_in(self.remote_file_name, "remote_file_name", run_name="run", rank=0)
        self.capture_stdout, self.capture_stderr = capture_stdout, capture_stderr
        self.buffer_size = buffer_size
        self.should_log_traces = log_traces
        self.overwrite = overwrite
        self._path: Path | None = None
        self._is_made = False
        self._saved: _Place | None = None
        self._state: State | None = None
        self._captured: list[CapturedStream] = []
        self._records: list[dict[str, Any]] = []

    @property
    def path(self) -> Path | None:
        """The file; None before ``INIT``."""
        return self._path

    def state_dict(self) -> dict[str, Any]:
        """Write what was logged, and return the file and its size."""
        self.flush()
        if not self._is_made or self._path is None or not self._path.exists():
            return {}
        return {"path": str(self._path), "size": self._path.stat().st_size}

    def check_state_dict(self, state: dict[str, Any]) -> None:
        """Raise what :meth:`load_state_dict` would raise, and change nothing.

        Raises:
            ValueError: ``state`` is not what a FileLogger saves.
        """
        _Place.of(state)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue the file of :attr:`filename` where it was when ``state`` was saved, if it is the same file.

        Raises:
            ValueError: ``state`` is not what a FileLogger saves.
        """
        self._saved = _Place.of(state)

    def log_hyperparameters(self, hyperparameters: Mapping[str, Any]) -> None:
        """Write settings as a line."""
        self._add(None, hyperparameters=dict(hyperparameters))

    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        """Write numbers as a line, at the next flush."""
        self._add(step, metrics={name: detach_to_host(value) for name, value in metrics.items()})

    def log_traces(self, traces: Mapping[str, Any]) -> None:
        """Write which algorithms ran as a line, at the next flush."""
        if self.should_log_traces:
            self._add(None, traces={name: attrs.asdict(trace) for name, trace in traces.items()})

    def log_table(
        self, columns: Sequence[str], rows: Sequence[Sequence[Any]], name: str = "Table", step: int | None = None
    ) -> None:
        """Write a table as a line, at the next flush."""
        self._add(step, table=name, columns=list(columns), rows=[list(row) for row in rows])

    def init(self, state: State, logger: Logger) -> None:
        """Forget an earlier run, and begin to write down what is printed."""
        self.refuse_if_in_use(logger)
        self._is_made = False
        self._state, self._logger = state, logger
        path = Path(_filled_in(self.filename, "filename", run_name=state.run_name, rank=state.rank)).absolute()
        for other in logger.destinations:
            if other is not self and isinstance(other, FileLogger) and other.path == path:
                raise ValueError(
                    f"filename names {str(path)!r}, which another FileLogger of this run writes to: their lines would "
                    "get mixed up. Choose another name."
                )
        if self.remote_file_name is not None and not logger.has_file_upload_destination():
            raise ValueError(
                f"remote_file_name is {self.remote_file_name!r}, but no logger of this run keeps files. Leave it out, "
                "or add one that does, such as MLFlowLogger() or WandBLogger(log_artifacts=True)."
            )
        self._path = path
        if self.capture_stdout:
            self._captured.append(CapturedStream("stdout", partial(self._add_printed, "stdout")))
        if self.capture_stderr:
            self._captured.append(CapturedStream("stderr", partial(self._add_printed, "stderr")))
        for captured in self._captured:
            captured.install()

    def close(self, state: State, logger: Logger) -> None:
        """Write what has been logged, give the streams back, and give the file to the loggers that keep files."""
        for captured in reversed(self._captured):
            captured.remove()
        self._captured = []
        if self._records and self._path is not None and not self._path.exists():
            self.open(state)
        self.flush()
        if self.remote_file_name is not None and self._is_made:
            name = _filled_in(self.remote_file_name, "remote_file_name", run_name=state.run_name, rank=state.rank)
            logger.upload_file(name, str(self._path), overwrite=True)
        self._records, self._saved, self._logger = [], None, None

    def flush(self) -> None:
        """Read the values that have been logged and write them to the file, once there is one."""
        self._batches = 0
        if not self._is_made or self._path is None or not self._records:
            return
        records, self._records = self._records, []
        try:
            _append(self._path, map(_to_line, _with_numbers(records)), self.buffer_size)
        except Exception as error:
            if self._logger is None:
                raise
            self._logger.report_failure(self, "flush", error)

    def open(self, state: State) -> None:
        """Make the file, if it is not, and write what was logged before."""
        if self._is_made or self._path is None:
            return
        self._path.parent.mkdir(parents=True, exist_ok=True)
        saved = self._saved if self._saved is not None and self._saved.path == str(self._path) else None
        # Nothing is read from a pipe, which would wait for somebody who writes to it.
        if self._path.is_file() and (saved or (self.is_resumed and _is_of_run(self._path, state.run_name))):
            size = None if saved is None else saved.size
            _cut_off(self._path, size, int(state.timestamp.count(TimeUnit.BATCH)))
        else:
            try:
                self._path.open("wb" if self.overwrite else "xb").close()
            except FileExistsError:
                raise FileExistsError(
                    f"filename names {str(self._path)!r}, which exists. Say overwrite=True to write over it, choose "
                    "another name, or put {run_name} into it; with several processes put {rank} into it, too."
                ) from None
        if not self._path.stat().st_size:
            self._records.insert(0, {**self._clock(None), "run_name": state.run_name})
        self._is_made = True
        self.flush()

    def _add_printed(self, name: str, line: str) -> None:
        self._add(None, **{name: line})

    def _add(self, step: int | None, **content: Any) -> None:
        self._records.append({**self._clock(step), **content})

    def _clock(self, step: int | None) -> dict[str, int | float]:
        if self._state is None:
            return {"epoch": 0, "batch": step or 0, "seconds": 0.0}
        now = self._state.timestamp
        return {
            "epoch": now.count(TimeUnit.EPOCH),
            "batch": now.count(TimeUnit.BATCH) if step is None else step,
            "seconds": now.count(TimeUnit.SECOND),
        }


def _filled_in(name: str, parameter: str, *, run_name: str, rank: int) -> str:
    return fill_in(name, {"run_name": run_name, "rank": rank}, parameter)


def _is_of_run(path: Path, run_name: str) -> bool:
    """Return whether a file's first line names the run, or nothing has been written to it yet."""
    try:
        with path.open("rb") as file:
            first = file.readline()
        return not first or bool(json.loads(first)["run_name"] == run_name)
    except (OSError, ValueError, KeyError, TypeError):
        return False


def _cut_off(path: Path, size: int | None, step: int) -> None:
    """Keep the complete lines within the first ``size`` bytes or, if it is None, those before a line of ``step``."""
    kept = 0
    with path.open("r+b") as file:
        for line in file:
            is_undone = kept + len(line) > size if size is not None else _step_of(line) >= step
            if is_undone or not line.endswith(b"\n"):
                break
            kept += len(line)
        file.truncate(kept)


def _step_of(line: bytes) -> float:
    try:
        return float(json.loads(line)["batch"])
    except (ValueError, KeyError, TypeError):
        return math.inf


def _append(path: Path, lines: Iterable[str], buffer_size: int) -> None:
    # Unbuffered and line by line: Linux may cut a long write off between two pages when the process is killed.
    with path.open("ab", buffering=0) as file:
        for content in _gathered(lines, buffer_size):
            whole = file.tell()
            if file.write(content) != len(content):
                file.truncate(whole)
                raise OSError(errno.ENOSPC, "there was no room for a whole line")


def _gathered(lines: Iterable[str], size: int) -> Iterable[bytes]:
    """Yield lines as bytes, several at once until they are ``size`` bytes."""
    gathered = b""
    for line in lines:
        gathered += line.encode()
        if len(gathered) >= size:
            yield gathered
            gathered = b""
    if gathered:
        yield gathered


def _with_numbers(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the records with their metrics read, all at once."""
    numbers = iter(read([value for record in records for value in record.get("metrics", {}).values()]))
    return [
        record | {"metrics": dict(zip(record["metrics"], numbers, strict=False))} if "metrics" in record else record
        for record in records
    ]


def _to_line(record: dict[str, Any]) -> str:
    return json.dumps(_plain(record), ensure_ascii=False, allow_nan=False) + "\n"


def _plain(value: Any) -> Any:
    """Return a value as JSON can write it; what it does not know becomes text."""
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else f"{'-' if value < 0 else ''}Infinity"
    if value is None or isinstance(value, (bool, int, float)):
        return value
    if isinstance(value, Mapping):
        return {str(name): _plain(item) for name, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [_plain(item) for item in value]
    return _plain(value.tolist()) if hasattr(value, "tolist") else str(value)
