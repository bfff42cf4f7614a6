"""Log metrics to a CSV file: a row for each step, a column for each metric."""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs

from composer.core import Logger, State, TimeUnit
from composer.core.checks import is_flag
from composer.core.files import check_template, fill_in_run
from composer.core.logger import detach_to_host
from composer.core.saving.components import transient
from composer.loggers.gathering import GatheringLogger
from composer.loggers.values import numbers_by_name

_CLOCK = ["epoch", "batch"]


def _to_filename(given: str) -> str:
    return check_template(given, "filename", ("run_name", "rank"))


@attrs.define(eq=False)
class CSVLogger(GatheringLogger):
    """Write numbers to a CSV file with the columns ``epoch``, ``batch`` and one for each metric.

    Values of one batch are in one row, unless they are written at different times; a cell without a value is empty.
    Training metrics of an epoch and the evaluation after it have the same ``epoch``, so that
    ``pandas.read_csv("metrics.csv").groupby("epoch").last()`` has the last value of each metric in each epoch.
    ``pandas.read_csv("metrics.csv").plot(x="batch", y="loss/train/total")`` plots a metric. A metric that is logged for
    the first time adds a column, for which the file is rewritten. A resumed run continues the file, without the rows
    of batches from the resumed one on; metrics that were logged at the checkpoint remain. The process of rank 0 writes.

    Args:
        filename: Path of the file; ``{run_name}`` and ``{rank}`` are filled in. Missing folders are created.
        overwrite: Whether to overwrite an existing file.
        every: How often metrics are logged: a time, a string or a number of epochs; always if None.
        flush_interval: Batches between two flushes.

    Raises:
        ValueError: ``filename`` contains another field in braces, or ``flush_interval`` is out of range.
        FileExistsError: When the run starts: the file exists, and the run is not resumed.

    Example:
        >>> CSVLogger("runs/{run_name}/metrics.csv", every="1ep").filename
        'runs/{run_name}/metrics.csv'
    """

    filename: str = attrs.field(default="{run_name}/metrics.csv", converter=_to_filename)
    overwrite: bool = attrs.field(default=False, validator=is_flag, kw_only=True)

    path: Path | None = transient(default=None)
    """The file; None before ``INIT`` and in processes that do not write."""
    _state: State | None = transient(default=None)
    _columns: list[str] = transient(factory=list)

    def state_dict(self) -> dict[str, Any]:
        """Write the buffered values, so that they are not in the row of the next batch; nothing is saved."""
        self.flush()
        return {}

    def init(self, state: State, logger: Logger) -> None:
        """Reset the state of an earlier run."""
        self.raise_if_in_use(logger)
        self._is_open, self._columns, self._epoch_starts = False, [], set()
        self._state, self._logger = state, logger
        self.path = None if state.rank else Path(fill_in_run(self.filename, state)).absolute()

    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        """Write numbers as a row, at the next flush."""
        if self.path is not None and self._state is not None:
            now = self._state.timestamp
            batch = int(now.count(TimeUnit.BATCH)) if step is None else step
            epoch = self.epoch_of(batch, now)
            if batch and batch in self._epoch_starts and any(name.startswith("metrics/") for name in metrics):
                epoch -= 1  # an evaluation between two epochs is that of the first one
            clock = epoch, batch
            self._records.append((clock, {name: detach_to_host(value) for name, value in metrics.items()}))

    def open(self, state: State) -> None:
        """Create or continue the file, if it is not open, and write earlier values."""
        if self._is_open or self.path is None:
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        rows: list[dict[str, Any]] = []
        if self.path.exists() and self.is_resumed:
            reached = int(state.timestamp.count(TimeUnit.BATCH))
            # Metrics of the epochs and evaluations before the checkpoint are in rows without a time of a batch.
            kept = [reached + (reached > 0), reached]
            rows = [one for one in self._read() if int(one["batch"]) < kept[bool(one.get("time/batch"))]]
        elif self.path.exists() and not self.overwrite:
            raise FileExistsError(
                f"filename names {str(self.path)!r}, which exists. Set overwrite=True, choose another name, or add "
                "{run_name} to it."
            )
        self._rewrite(rows)
        self._is_open = True
        self.flush()

    def close(self, state: State, logger: Logger) -> None:
        """Write the buffered values."""
        self.flush()
        self._records, self._logger = [], None

    def write_records(self, records: Sequence[tuple[tuple[int, int], Mapping[str, Any]]]) -> None:
        """Read the buffered values and write them to the file."""
        rows: dict[tuple[int, int], dict[str, Any]] = {}
        for (clock, _), numbers in zip(records, numbers_by_name([metrics for _, metrics in records]), strict=True):
            rows.setdefault(clock, dict(zip(_CLOCK, clock, strict=True))).update(numbers)
        if any(name not in self._columns for row in rows.values() for name in row):
            self._rewrite([*self._read(), *rows.values()])
        elif self.path is not None:
            with self.path.open("a", newline="") as file:
                csv.DictWriter(file, self._columns).writerows(rows.values())

    def _read(self) -> list[dict[str, Any]]:
        """Return the complete rows of the file."""
        if self.path is None:
            return []
        with self.path.open(newline="") as file:
            return [row for row in csv.DictReader(file) if None not in row.values()]

    def _rewrite(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Write a file with all columns beside the old one, and replace that."""
        if self.path is not None:
            self._columns = list(dict.fromkeys([*_CLOCK, *self._columns, *(name for row in rows for name in row)]))
            draft = self.path.with_name(f"{self.path.name}.draft")
            with draft.open("w", newline="") as file:
                writer = csv.DictWriter(file, self._columns)
                writer.writeheader()
                writer.writerows(rows)
            draft.replace(self.path)
