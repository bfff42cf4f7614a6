"""Log metrics as JSON lines to a file."""

from __future__ import annotations

import errno
import hashlib
import json
import math
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
from torch import Tensor

from composer.core import Logger, State, TimeUnit
from composer.core.checks import integer, is_flag
from composer.core.files import check_template, fill_in_run
from composer.core.logger import detach_to_host
from composer.core.saving import records
from composer.core.saving.codec import Record
from composer.core.saving.components import transient
from composer.distributed import get_world_size
from composer.loggers.capture import CapturedStream
from composer.loggers.gathering import GatheringLogger
from composer.loggers.images import to_images, with_masks
from composer.loggers.values import read

_FIELDS = ("run_name", "rank")


@attrs.frozen
class _Place(Record):
    """The file of a run when a checkpoint was saved: its path, its size and the SHA-256 of its first line."""

    path: str
    size: int = attrs.field(validator=attrs.validators.ge(0))
    first_line: str

    def is_file_at(self, path: Path) -> bool:
        """Return whether the file at ``path`` is the one that was saved, and was not replaced by another run's."""
        return self.path == str(path) and self.first_line == _digest(path)


def _to_filename(given: str) -> str:
    return check_template(given, "filename", _FIELDS)


def _to_remote_file_name(given: str | None) -> str | None:
    return None if given is None else check_template(given, "remote_file_name", _FIELDS)


@attrs.define(eq=False)
class FileLogger(GatheringLogger):
    """Write logged values, with the clock, and printed lines to a file, as one JSON object per line.

    The first line contains the run's name. Example::

        {"epoch": 0, "batch": 0, "seconds": 0.0, "run_name": "first"}
        {"epoch": 0, "batch": 0, "seconds": 0.0, "hyperparameters": {"seed": 17}}
        {"epoch": 0, "batch": 0, "seconds": 0.0, "metrics": {"loss/train/total": 2.31, "lr-SGD/group0": 0.1}}
        {"epoch": 0, "batch": 100, "seconds": 1.2, "table": "samples", "columns": ["id"], "rows": [[7]]}
        {"epoch": 0, "batch": 100, "seconds": 1.2, "stdout": "something that was printed"}

    Images are PNG files in the folder ``images`` beside the file, with their name and batch, and in several processes
    their rank.

    ``seconds`` is the clock's wall time; values that ``every`` has delayed have none. Values are read and written every
    ``flush_interval`` batches, at the end of each epoch, after evaluations and at the end, line by line: if the process
    is killed, only the line that is being written can be truncated. Numbers that JSON does not support are the strings
    ``"NaN"``, ``"Infinity"`` and ``"-Infinity"``, which ``float()`` parses. A write error, such as a full disk, is
    reported once, and the run continues.

    The file is created at ``AFTER_LOAD`` or, in a loop without this event, when training, an evaluation or a prediction
    starts. A run that is resumed from a checkpoint, or restarted by ``autoresume`` before the first checkpoint,
    continues the file ``filename`` if it is the file of this run: if the checkpoint was saved with the same path and
    first line, or if the first line contains this run's name. A checkpoint never selects the file. Lines written after
    the checkpoint are removed: those beyond the file's size at that time or, without a checkpoint, those from the
    resumed batch on.

    Args:
        filename: Path of the file; ``{run_name}`` and ``{rank}`` are filled in. Missing folders are created.
        remote_file_name: Name of the file at loggers that store files, to which it is uploaded when the run is closed;
            ``{run_name}`` and ``{rank}`` are filled in. Not uploaded if None, nor, with a warning,
            without such a logger.
        capture_stdout: Whether to write the lines printed to ``sys.stdout``, from ``INIT`` until the run is closed.
            They are still printed.
        capture_stderr: The same for ``sys.stderr``. Progress bars are not written, only the lines above them.
        buffer_size: Bytes to buffer before a system call, as in :func:`open`; with 0 or 1 each line is written
            separately.
        log_traces: Whether to write which algorithms ran, if the run logs it.
        flush_interval: Batches between two flushes.
        overwrite: Whether to overwrite an existing file; otherwise lines are appended to it, with a warning.
        every: How often metrics are logged: a time, a string or a number of epochs; always if None.

    Raises:
        ValueError: A name contains another field in braces, or ``flush_interval`` or ``buffer_size`` is out of range.
            At ``INIT``: another FileLogger of the run writes to the file.
        FileExistsError: When the file is created: it is a link.

    Example:
        >>> FileLogger("runs/{run_name}/metrics.jsonl", flush_interval=10).filename
        'runs/{run_name}/metrics.jsonl'
    """

    filename: str = attrs.field(default="{run_name}/logs-rank{rank}.txt", converter=_to_filename)
    remote_file_name: str | None = attrs.field(default=None, converter=_to_remote_file_name)
    capture_stdout: bool = attrs.field(default=True, validator=is_flag, kw_only=True)
    capture_stderr: bool = attrs.field(default=True, validator=is_flag, kw_only=True)
    buffer_size: int = integer(1, 0, meaning="It counts bytes.", kw_only=True)
    should_log_traces: bool = attrs.field(default=True, validator=is_flag, kw_only=True, alias="log_traces")
    overwrite: bool = attrs.field(default=False, validator=is_flag, kw_only=True)

    path: Path | None = transient(default=None)
    """The file; None before ``INIT``."""
    _saved: _Place | None = transient(default=None)
    _state: State | None = transient(default=None)
    _captured: list[CapturedStream] = transient(factory=list)

    def state_dict(self) -> dict[str, Any]:
        """Flush, and return the file's path, size and digest of the first line."""
        self.flush()
        if not self._is_open or self.path is None or not self.path.exists():
            return {}
        return {"path": str(self.path), "size": self.path.stat().st_size, "first_line": _digest(self.path)}

    def check_state_dict(self, state: dict[str, Any]) -> None:
        """Raise the errors of :meth:`load_state_dict` without changing anything.

        Raises:
            ValueError: ``state`` is not the state of a FileLogger.
        """
        records.read(state, _Place, "FileLogger")

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue the file of ``filename`` at its size when ``state`` was saved, if it is the same file.

        Raises:
            ValueError: ``state`` is not the state of a FileLogger.
        """
        self._saved = records.read(state, _Place, "FileLogger")

    def log_hyperparameters(self, hyperparameters: Mapping[str, Any]) -> None:
        """Write hyperparameters as a line."""
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

    def log_images(
        self,
        images: Any,
        name: str = "Images",
        channels_last: bool = False,
        step: int | None = None,
        *,
        masks: Mapping[str, Any] | None = None,
        mask_class_labels: Mapping[int, str] | None = None,
        use_table: bool = True,
    ) -> None:
        """Write images, and those with masks drawn over them, as PNG files, and their paths as a line."""
        if self.path is None:
            return
        shown = with_masks(to_images(images, channels_last=channels_last), name, masks)
        rank = f"-rank{self._state.rank}" if self._state is not None and get_world_size() > 1 else ""
        places = {
            self.path.parent / f"images/{title}-ba{self._clock(step)['batch']}-{number}{rank}.png": image
            for title, each in shown.items()
            for number, image in enumerate(each)
        }
        self.report_failure_of("log_images", lambda: _save(places))
        self._add(step, images=name, files=[str(place.relative_to(self.path.parent)) for place in places])

    def init(self, state: State, logger: Logger) -> None:
        """Reset the state of an earlier run, and start capturing printed lines."""
        self.raise_if_in_use(logger)
        self._is_open, self._epoch_starts = False, set()
        self._state, self._logger = state, logger
        path = Path(fill_in_run(self.filename, state)).absolute()
        for other in logger.destinations:
            if other is not self and isinstance(other, FileLogger) and other.path == path:
                raise ValueError(
                    f"filename names {str(path)!r}, which another FileLogger of this run writes to: their lines would "
                    "be mixed. Choose another name."
                )
        if self.remote_file_name is not None and not logger.has_file_upload_destination():
            warnings.warn(
                f"remote_file_name is {self.remote_file_name!r}, but no logger of this run stores files: there will be "
                "no copy. Omit it, or add a logger that does, as MLFlowLogger() or WandBLogger(log_artifacts=True).",
                stacklevel=2,
            )
        self.path = path
        if self.capture_stdout:
            self._captured.append(CapturedStream("stdout", lambda line: self._add(None, stdout=line)))
        if self.capture_stderr:
            self._captured.append(CapturedStream("stderr", lambda line: self._add(None, stderr=line)))
        for captured in self._captured:
            captured.install()

    def close(self, state: State, logger: Logger) -> None:
        """Flush, restore the streams, and upload the file to the loggers that store files."""
        for captured in reversed(self._captured):
            captured.remove()
        self._captured = []
        if self._records and self.path is not None and not self.path.exists():
            self.open(state)
        self.flush()
        if self.remote_file_name is not None and self._is_open:
            logger.upload_file(fill_in_run(self.remote_file_name, state), str(self.path), overwrite=True)
        self._records, self._saved, self._logger = [], None, None

    def write_records(self, records: Sequence[dict[str, Any]]) -> None:
        """Read the buffered values and write them to the file."""
        if self.path is not None:
            _append(self.path, _to_lines(records), self.buffer_size)

    def open(self, state: State) -> None:
        """Create or continue the file, if it is not open, and write earlier values."""
        if self._is_open or self.path is None:
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        saved = self._saved
        # A pipe is not read, which would block until another process writes to it.
        is_file = self.path.is_file()
        if is_file and self.path.is_symlink():  # which may lead to a file of somebody else
            raise FileExistsError(f"filename must not be a link to a file, got {str(self.path)!r}: remove it.")
        is_saved_file = is_file and saved is not None and saved.is_file_at(self.path)
        is_continued = is_saved_file or (is_file and self.is_resumed and _is_of_run(self.path, state.run_name))
        if is_continued:
            size = saved.size if saved is not None and is_saved_file else None
            _cut_off(self.path, size, int(state.timestamp.count(TimeUnit.BATCH)))
        else:
            earlier = self.path.read_bytes() if is_file and not self.overwrite else b""
            if earlier:
                warnings.warn(
                    f"filename names {str(self.path)!r}, which exists: lines are appended to it. Set overwrite=True to "
                    "overwrite it, choose another name, or add {run_name} to it; with several processes also add "
                    "{rank}.",
                    stacklevel=2,
                )
            with self.path.open("wb" if self.overwrite else "ab") as file:
                file.write(b"" if earlier[-1:] in {b"", b"\n"} else b"\n")
        if not is_continued or not self.path.stat().st_size:
            self._records.insert(0, {**self._clock(None), "run_name": state.run_name})
        self._is_open = True
        self.flush()

    def _add(self, step: int | None, **content: Any) -> None:
        self._records.append({**self._clock(step), **content})

    def _clock(self, step: int | None) -> dict[str, int | float]:
        if self._state is None:
            return {"epoch": 0, "batch": step or 0, "seconds": 0.0}
        now = self._state.timestamp
        batch = int(now.count(TimeUnit.BATCH)) if step is None else step
        clock: dict[str, int | float] = {"epoch": self.epoch_of(batch, now), "batch": batch}
        is_now = batch == now.count(TimeUnit.BATCH)
        return clock | {"seconds": now.count(TimeUnit.SECOND)} if is_now else clock


def _save(images: Mapping[Path, Tensor]) -> None:
    from PIL import Image  # noqa: PLC0415  (needed for images alone)

    for path, image in images.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(image.squeeze(-1).numpy()).save(path)


def _first_line(path: Path) -> bytes:
    with path.open("rb") as file:
        return file.readline()


def _digest(path: Path) -> str:
    return hashlib.sha256(_first_line(path)).hexdigest()


def _is_of_run(path: Path, run_name: str) -> bool:
    """Return whether a file's first line contains the run's name, or the file is empty."""
    try:
        first = _first_line(path)
        return not first or bool(json.loads(first)["run_name"] == run_name)
    except (OSError, ValueError, KeyError, TypeError):
        return False


def _cut_off(path: Path, size: int | None, step: int) -> None:
    """Keep the complete lines within the first ``size`` bytes or, if it is None, those before a line of ``step``."""
    # A process that was killed may have left an incomplete last line, to which the next one would be appended.
    end = 0
    with path.open("r+b") as file:
        for line in file:
            is_undone = end + len(line) > size if size is not None else _step_of(line) >= step
            if is_undone or not line.endswith(b"\n"):
                break
            end += len(line)
        file.truncate(end)


def _step_of(line: bytes) -> float:
    try:
        return float(json.loads(line)["batch"])
    except (ValueError, KeyError, TypeError):
        return math.inf


def _append(path: Path, lines: Iterable[str], buffer_size: int) -> None:
    # Unbuffered and line by line: Linux may truncate a long write between two pages when the process is killed.
    with path.open("ab", buffering=0) as file:
        for content in _buffered(lines, buffer_size):
            end = file.tell()
            if file.write(content) != len(content):
                file.truncate(end)
                raise OSError(errno.ENOSPC, "no space left for a complete line")


def _buffered(lines: Iterable[str], size: int) -> Iterable[bytes]:
    """Yield lines as bytes, several at once up to about ``size`` bytes."""
    buffer = b""
    for line in lines:
        buffer += line.encode()
        if len(buffer) >= size:
            yield buffer
            buffer = b""
    if buffer:
        yield buffer


def _to_lines(records: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Yield the records as lines, with the values of their metrics, read together."""
    numbers = iter(read([value for record in records for value in record.get("metrics", {}).values()]))
    for record in records:
        if "metrics" in record:
            record["metrics"] = dict(zip(record["metrics"], numbers, strict=False))
        yield json.dumps(_to_json(record), ensure_ascii=False, allow_nan=False) + "\n"


def _to_json(value: Any) -> Any:
    """Return a value that JSON supports; other types are converted to strings."""
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else f"{'-' if value < 0 else ''}Infinity"
    if value is None or isinstance(value, (bool, int, float)):
        return value
    if isinstance(value, Mapping):
        return {str(name): _to_json(item) for name, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [_to_json(item) for item in value]
    return _to_json(value.tolist()) if hasattr(value, "tolist") else str(value)
