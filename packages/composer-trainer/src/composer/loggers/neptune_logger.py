"""Log metrics, images, tables, hyperparameters and files to Neptune."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from torch import Tensor

from composer.core import Interval, State, Time
from composer.functional.checks import check_flags
from composer.loggers.tracker_logger import Record, TrackerLogger


class NeptuneLogger(TrackerLogger):
    """Log to Neptune.

    Offline: ``mode="offline"``; ``neptune sync`` uploads the run later. A resumed run continues the first run, found by
    its custom id, if name and project are the same; a ``with_id`` or ``custom_run_id`` in ``neptune_kwargs`` takes
    precedence over the checkpoint. Metrics are series in ``<base_namespace>/metrics``, hyperparameters are in
    ``<base_namespace>/hyperparameters``.

    Args:
        project: The project, ``"<workspace>/<project>"``; ``NEPTUNE_PROJECT`` if None.
        api_token: The token; ``NEPTUNE_API_TOKEN`` if None.
        rank_zero_only: Whether only the process of rank 0 logs, or all processes, each to its own run.
        upload_checkpoints: Whether to upload the run's files, such as checkpoints.
        base_namespace: The folder in the run that contains all values.
        mode: How Neptune connects: ``"async"``, ``"sync"``, ``"offline"`` or ``"debug"``; ``NEPTUNE_MODE`` if None.
        every: How often metrics are logged: a time, a string or a number of epochs; always if None.
        flush_interval: Batches between two flushes; values are also written every ten seconds, at the end of each epoch
            and after evaluations.
        neptune_kwargs: Further arguments of ``neptune.init_run``.

    Raises:
        ModuleNotFoundError: neptune is not installed.
        ValueError: ``flush_interval`` is less than 1, or ``every`` is not a length of time.

    Attributes:
        run: The Neptune run; None before it starts.

    Example:
        >>> NeptuneLogger(mode="offline").base_namespace
        'training'
    """

    product: ClassVar = ("neptune", "neptune")
    saved_as: ClassVar = "custom_run_id"

    def __init__(
        self,
        *,
        project: str | None = None,
        api_token: str | None = None,
        rank_zero_only: bool = True,
        upload_checkpoints: bool = False,
        base_namespace: str = "training",
        mode: str | None = None,
        every: Interval | Time | str | int | None = None,
        flush_interval: int = 100,
        **neptune_kwargs: Any,
    ) -> None:
        super().__init__(every=every, flush_interval=flush_interval, rank_zero_only=rank_zero_only)
        check_flags(upload_checkpoints=upload_checkpoints)
        self.project, self.mode = project, mode
        self._api_token = api_token
        self.upload_checkpoints = upload_checkpoints
        self.base_namespace = base_namespace
        self.neptune_kwargs = neptune_kwargs
        self.run: Any = None

    def open_run(self, state: State) -> None:
        """Start or continue a run."""
        settings = {"project": self.project, "api_token": self._api_token, "mode": self.mode}
        settings |= {"name": self.name_of_run(state), **self.neptune_kwargs}
        if "with_id" not in settings:
            if not settings.get("custom_run_id"):
                settings["custom_run_id"] = self.choose_run_id(self.project, settings["name"])
            self.run_id = settings["custom_run_id"]
        self.run = self.module.init_run(**settings)

    def write_metrics(self, records: Sequence[Record]) -> None:
        """Write numbers."""
        for record in records:
            for name, number in record.metrics.items():
                self._place("metrics", name).append(number, step=record.step, timestamp=record.seconds)

    def write_hyperparameters(self, hyperparameters: Mapping[str, Any]) -> None:
        """Write hyperparameters."""
        plain = self.module.utils.stringify_unsupported(dict(hyperparameters))
        self.run[f"{self.base_namespace}/hyperparameters"] = plain

    def write_table(self, columns: Sequence[str], rows: Sequence[Sequence[Any]], name: str, step: int) -> None:
        """Write a table as a file of comma-separated values."""
        file = io.StringIO()
        csv.writer(file).writerows([columns, *rows])
        content = self.module.types.File.from_content(file.getvalue(), extension="csv")
        self._place("tables", f"{name}_{step}").upload(content)

    def write_image(self, image: Tensor, name: str, step: int) -> None:
        """Write an image, as the next one of a series."""
        self._place("images", name).append(self.module.types.File.as_image(image.numpy() / 255), step=step)

    def can_upload_files(self) -> bool:
        """Return whether files are uploaded."""
        return self.upload_checkpoints

    def write_file(self, remote_file_name: str, file_path: Path, *, overwrite: bool) -> None:
        """Upload a file, or each file of a folder; Neptune replaces a file of the same name."""
        if file_path.is_file():
            self._place("files", remote_file_name).upload(str(file_path))
            return
        for file in sorted(path for path in file_path.rglob("*") if path.is_file()):
            self._place("files", f"{remote_file_name}/{file.relative_to(file_path).as_posix()}").upload(str(file))

    def close_run(self) -> None:
        """End the run."""
        self.run.stop()

    def _place(self, kind: str, name: str) -> Any:
        return self.run[f"{self.base_namespace}/{kind}/{name}"]
