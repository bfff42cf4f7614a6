"""Metrics as JSON lines in a file."""

from __future__ import annotations

import errno
import json
import math
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs

from composer.core import Logger, LoggerDestination, State, TimeUnit
from composer.loggers.values import keep, read

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

__all__ = ["FileLogger"]


class FileLogger(LoggerDestination):
    """Write what is logged as JSON, one object a line, with the clock.

    The lines look so::

        {"epoch": 0, "batch": 0, "seconds": 0.0, "hyperparameters": {"seed": 17}}
        {"epoch": 0, "batch": 0, "seconds": 0.0, "metrics": {"loss/train/total": 2.31, "lr-SGD/group0": 0.1}}
        {"epoch": 0, "batch": 100, "seconds": 1.2, "table": "samples", "columns": ["id"], "rows": [[7]]}

    ``seconds`` is the clock's wall time. Values are read and written every ``flush_interval`` batches, at the end of
    each epoch, after evaluations and at the end, each line whole and by itself: when the process is killed, only one
    that the system is writing in that microsecond can be cut off. Numbers that JSON cannot write are the texts
    ``"NaN"``, ``"Infinity"`` and ``"-Infinity"``, which ``float()`` reads. A file that cannot be written to, such as on
    a full disk, is reported once, and the run goes on.

    Args:
        filename: The file; ``{run_name}`` and ``{rank}`` are filled in. Missing folders are made.
        flush_interval: Batches between two writings.
        log_traces: Whether to write which algorithms ran, if the run logs that.
        overwrite: Whether to write over a file that exists.

    Raises:
        ValueError: ``filename`` has another name in braces, or ``flush_interval`` is less than 1.
        FileExistsError: At ``INIT``: the file exists, and ``overwrite`` is False.

    Example:
        >>> FileLogger("runs/{run_name}/metrics.jsonl", flush_interval=10).filename
        'runs/{run_name}/metrics.jsonl'
    """

    def __init__(
        self,
        filename: str = "{run_name}/logs-rank{rank}.txt",
        *,
        flush_interval: int = 100,
        log_traces: bool = True,
        overwrite: bool = False,
    ) -> None:
        if flush_interval < 1:
            raise ValueError(f"flush_interval must be at least 1 batch, got {flush_interval}.")
        self.filename = str(filename)
        _filled_in(self.filename, run_name="run", rank=0)
        self.flush_interval = flush_interval
        self.should_log_traces = log_traces
        self.overwrite = overwrite
        self._path: Path | None = None
        self._state: State | None = None
        self._records: list[dict[str, Any]] = []
        self._batches = 0
        self._has_failed = False

    @property
    def path(self) -> Path | None:
        """The file; None before it was made."""
        return self._path

    def log_hyperparameters(self, hyperparameters: Mapping[str, Any]) -> None:
        """Write settings as a line."""
        self._add(None, hyperparameters=dict(hyperparameters))

    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        """Write numbers as a line, at the next flush."""
        self._add(step, metrics={name: keep(value) for name, value in metrics.items()})

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
        """Make the file."""
        del logger
        self._state = state
        path = Path(_filled_in(self.filename, run_name=state.run_name, rank=state.rank)).absolute()
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            path.open("wb" if self.overwrite else "xb").close()
        except FileExistsError:
            raise FileExistsError(
                f"filename names {str(path)!r}, which exists. Say overwrite=True to write over it, choose another "
                "name, or put {run_name} into it; with several processes put {rank} into it, too."
            ) from None
        self._path = path
        self.flush()

    def batch_end(self, state: State, logger: Logger) -> None:
        """Write what has been logged, every ``flush_interval`` batches."""
        del state, logger
        self._batches += 1
        if self._batches >= self.flush_interval:
            self.flush()

    def epoch_end(self, state: State, logger: Logger) -> None:
        """Write what has been logged."""
        del state, logger
        self.flush()

    def fit_end(self, state: State, logger: Logger) -> None:
        """Write what has been logged."""
        del state, logger
        self.flush()

    def eval_after_all(self, state: State, logger: Logger) -> None:
        """Write what has been logged."""
        del state, logger
        self.flush()

    def predict_end(self, state: State, logger: Logger) -> None:
        """Write what has been logged."""
        del state, logger
        self.flush()

    def close(self, state: State, logger: Logger) -> None:
        """Write what has been logged."""
        del state, logger
        self.flush()

    def flush(self) -> None:
        """Read the values that have been logged and write them to the file, once there is one."""
        self._batches = 0
        if self._path is None or not self._records:
            return
        records, self._records = self._records, []
        try:
            _append(self._path, map(_to_line, _with_numbers(records)))
        except Exception as error:  # noqa: BLE001  (a full disk must not end the training)
            self._report(error)

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

    def _report(self, error: Exception) -> None:
        if not self._has_failed:
            self._has_failed = True
            warnings.warn(
                f"FileLogger could not write to {str(self._path)!r} and lost what was to be written; training goes on. "
                f"The cause: {type(error).__name__}: {error}",
                RuntimeWarning,
                stacklevel=2,
            )


def _filled_in(filename: str, *, run_name: str, rank: int) -> str:
    try:
        return filename.format(run_name=run_name, rank=rank)
    except (KeyError, IndexError, ValueError):
        raise ValueError(
            f"filename may have {{run_name}} and {{rank}} in it, nothing else in braces, got {filename!r}."
        ) from None


def _append(path: Path, lines: Iterable[str]) -> None:
    # Unbuffered and line by line: Linux may cut a long write off between two pages when the process is killed.
    with path.open("ab", buffering=0) as file:
        for line in lines:
            content, whole = line.encode(), file.tell()
            if file.write(content) != len(content):
                file.truncate(whole)
                raise OSError(errno.ENOSPC, "there was no room for a whole line")


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
