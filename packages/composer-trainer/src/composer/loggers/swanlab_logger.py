"""Log metrics, images, tables and hyperparameters to SwanLab."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from torch import Tensor

from composer.core import Interval, State, Time
from composer.loggers.tracker_logger import Record, TrackerLogger


class SwanLabLogger(TrackerLogger):
    """Log to SwanLab.

    Offline: ``mode="offline"``; ``swanlab sync`` uploads the run later. A resumed run continues the first run, found by
    its id, if project, workspace and name are the same.

    Args:
        project: The project; the name of the working folder if None.
        name: The run's name in SwanLab; the run's own name if None.
        rank_zero_only: Whether only the process of rank 0 logs, or all processes, each to its own run.
        every: How often metrics are logged: a time, a string or a number of epochs; always if None.
        flush_interval: Batches between two flushes; values are also written every ten seconds, at the end of each epoch
            and after evaluations.
        swanlab_kwargs: Further arguments of ``swanlab.init``, such as ``workspace``, ``mode`` and ``log_dir``.

    Raises:
        ModuleNotFoundError: swanlab is not installed.
        ValueError: ``flush_interval`` is less than 1, or ``every`` is not a length of time.

    Attributes:
        run: The SwanLab run; None before it starts.

    Example:
        >>> logger = SwanLabLogger("digits", mode="offline")  # doctest: +SKIP
        >>> SwanLabLogger.saved_as
        'run_id'
    """

    product: ClassVar = ("swanlab", "swanlab")

    def __init__(
        self,
        project: str | None = None,
        name: str | None = None,
        *,
        rank_zero_only: bool = True,
        every: Interval | Time | str | int | None = None,
        flush_interval: int = 100,
        **swanlab_kwargs: Any,
    ) -> None:
        super().__init__(every=every, flush_interval=flush_interval, rank_zero_only=rank_zero_only)
        self.project, self.name, self.swanlab_kwargs = project, name, swanlab_kwargs
        self.run: Any = None

    def open_run(self, state: State) -> None:
        """Start or continue a run."""
        name = self.name_of_run(state, self.name)
        run_id = self.choose_run_id(self.project, self.swanlab_kwargs.get("workspace"), name)
        settings = {"project": self.project, "name": name, "id": run_id, "resume": "allow", **self.swanlab_kwargs}
        self.run = self.module.init(**settings)
        self.run_id = self.run.id

    def write_metrics(self, records: Sequence[Record]) -> None:
        """Write numbers."""
        for record in records:
            self.run.log(dict(record.metrics), step=record.step)

    def write_hyperparameters(self, hyperparameters: Mapping[str, Any]) -> None:
        """Write hyperparameters to the run's configuration."""
        self.run.config.update(dict(hyperparameters))

    def write_table(self, columns: Sequence[str], rows: Sequence[Sequence[Any]], name: str, step: int) -> None:
        """Write a table."""
        self.run.log({name: self.module.echarts.Table().add(columns, rows)}, step=step)

    def write_images(self, images: Sequence[Tensor], name: str, step: int, details: Mapping[str, Any]) -> None:
        """Write images."""
        self.run.log({name: [self.module.Image(image.numpy()) for image in images]}, step=step)

    def close_run(self) -> None:
        """End the run."""
        self.run.finish("success" if sys.exception() is None else "aborted")
