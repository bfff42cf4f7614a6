"""Log metrics, images, tables and hyperparameters to Trackio."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from torch import Tensor

from composer.core import Interval, State, Time
from composer.loggers.tracker_logger import Record, TrackerLogger


class TrackioLogger(TrackerLogger):
    """Log to Trackio, which stores runs on this machine or in a Space of Hugging Face; ``trackio show`` displays them.

    A resumed run continues the first run, which Trackio finds by project and name.

    Args:
        project: The project.
        name: The run's name in Trackio; the run's own name if None.
        rank_zero_only: Whether only the process of rank 0 logs, or all processes, each to its own run.
        every: How often metrics are logged: a time, a string or a number of epochs; always if None.
        flush_interval: Batches between two flushes; values are also written every ten seconds, at the end of each epoch
            and after evaluations.
        trackio_kwargs: Further arguments of ``trackio.init``, such as ``space_id``.

    Raises:
        ModuleNotFoundError: trackio is not installed.
        ValueError: ``flush_interval`` is less than 1, or ``every`` is not a length of time.

    Attributes:
        run: The Trackio run; None before it starts.

    Example:
        >>> logger = TrackioLogger("digits", space_id="me/digits")  # doctest: +SKIP
        >>> TrackioLogger.saved_as
        'run_id'
    """

    product: ClassVar = ("trackio", "trackio")

    def __init__(
        self,
        project: str,
        name: str | None = None,
        *,
        rank_zero_only: bool = True,
        every: Interval | Time | str | int | None = None,
        flush_interval: int = 100,
        **trackio_kwargs: Any,
    ) -> None:
        super().__init__(every=every, flush_interval=flush_interval, rank_zero_only=rank_zero_only)
        self.project, self.name, self.trackio_kwargs = project, name, trackio_kwargs
        self.run: Any = None

    def open_run(self, state: State) -> None:
        """Start or continue a run."""
        self.run_id = self.name_of_run(state, self.name)
        if self._saved_id not in {None, self.run_id}:
            self.report_new_run()
        resume = "allow" if self.is_resumed and self._saved_id in {None, self.run_id} else "never"
        settings = {"name": self.run_id, "resume": resume, "embed": False, **self.trackio_kwargs}
        self.run = self.module.init(self.project, **settings)

    def write_metrics(self, records: Sequence[Record]) -> None:
        """Write numbers."""
        for record in records:
            self.run.log(dict(record.metrics), step=record.step)

    def write_hyperparameters(self, hyperparameters: Mapping[str, Any]) -> None:
        """Write hyperparameters with the next numbers."""
        self.run.config.update(hyperparameters)

    def write_table(self, columns: Sequence[str], rows: Sequence[Sequence[Any]], name: str, step: int) -> None:
        """Write a table."""
        self.run.log({name: self.module.Table(columns=columns, data=rows)}, step=step)

    def write_image(self, image: Tensor, name: str, step: int) -> None:
        """Write an image."""
        self.run.log({name: self.module.Image(image.numpy())}, step=step)

    def close_run(self) -> None:
        """End the run."""
        self.run.finish()
