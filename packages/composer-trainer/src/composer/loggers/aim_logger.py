"""Log metrics, images and hyperparameters to Aim."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from torch import Tensor

from composer.core import Interval, State, Time
from composer.loggers.tracker_logger import Record, TrackerLogger


class AimLogger(TrackerLogger):
    """Log to Aim, which stores runs in a folder of this machine or on a server; ``aim up`` displays them.

    A resumed run continues the first run, found by its hash, if repository, experiment and name are the same.

    Args:
        repo: The repository: a folder, in which ``.aim`` is created, or a server's URL; the working folder if None.
        experiment: The experiment.
        name: The run's name in Aim; the run's own name if None.
        rank_zero_only: Whether only the process of rank 0 logs, or all processes, each to its own run.
        every: How often metrics are logged: a time, a string or a number of epochs; always if None.
        flush_interval: Batches between two flushes; values are also written every ten seconds, at the end of each epoch
            and after evaluations.
        aim_kwargs: Further arguments of ``aim.Run``, such as ``system_tracking_interval``.

    Raises:
        ModuleNotFoundError: aim is not installed.
        ValueError: ``flush_interval`` is less than 1, or ``every`` is not a length of time.

    Attributes:
        run: The Aim run; None before it starts.

    Example:
        >>> logger = AimLogger(experiment="digits")  # doctest: +SKIP
        >>> AimLogger.saved_as
        'run_hash'
    """

    product: ClassVar = ("aim", "aim")
    saved_as: ClassVar = "run_hash"

    def __init__(
        self,
        repo: str | Path | None = None,
        experiment: str = "default",
        name: str | None = None,
        *,
        rank_zero_only: bool = True,
        every: Interval | Time | str | int | None = None,
        flush_interval: int = 100,
        **aim_kwargs: Any,
    ) -> None:
        super().__init__(every=every, flush_interval=flush_interval, rank_zero_only=rank_zero_only)
        self.repo, self.experiment, self.name, self.aim_kwargs = repo, experiment, name, aim_kwargs
        self.run: Any = None

    def open_run(self, state: State) -> None:
        """Start or continue a run."""
        name = self.name_of_run(state, self.name)
        repo = self.module.Repo.from_path(str(self.repo or "."), init="://" not in str(self.repo))
        known = None
        if self._saved_id is not None and repo.run_exists(self._saved_id):
            stored = repo.request_props(self._saved_id, read_only=True)
            known = self._saved_id if (stored.experiment, stored.name) == (self.experiment, name) else None
        if known is None:
            self.report_new_run()
        settings = {"experiment": self.experiment, "force_resume": known is not None, "capture_terminal_logs": False}
        self.run = self.module.Run(known, repo=repo, **settings | self.aim_kwargs)
        self.run.name = name
        self.run_id = self.run.hash

    def write_metrics(self, records: Sequence[Record]) -> None:
        """Write numbers."""
        for record in records:
            for name, value in record.metrics.items():
                self.run.track(value, name=name, step=record.step)

    def write_hyperparameters(self, hyperparameters: Mapping[str, Any]) -> None:
        """Write hyperparameters to the run's parameters."""
        self.run["hparams"] = dict(hyperparameters)

    def write_images(self, images: Sequence[Tensor], name: str, step: int, details: Mapping[str, Any]) -> None:
        """Write images."""
        self.run.track([self.module.Image(image.numpy()) for image in images], name=name, step=step)

    def close_run(self) -> None:
        """End the run."""
        self.run.close()
