"""Log metrics, images, tables and hyperparameters to Comet."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import attrs
from torch import Tensor

from composer.core import State
from composer.core.checks import is_flag, to_options
from composer.core.saving.components import transient
from composer.loggers.tracker_logger import Record, TrackerLogger
from composer.loggers.values import flat

_OF_START = {"api_key", "workspace", "project_name", "experiment_key", "mode", "online"}


def _to_exp_kwargs(given: Mapping[str, Any] | None) -> dict[str, Any]:
    return to_options("exp_kwargs", given)


@attrs.define(eq=False)
class CometMLLogger(TrackerLogger):
    """Log to Comet.

    Offline: ``exp_kwargs={"online": False, "offline_directory": "comet"}``; ``comet upload`` uploads the archive later.
    A resumed run continues the first run's experiment if name, workspace and project are the same; an
    ``experiment_key`` in ``exp_kwargs`` and ``COMET_EXPERIMENT_KEY`` take precedence over the checkpoint. Comet is
    imported when the experiment starts; it then patches libraries that it supports, unless ``exp_kwargs`` or Comet's
    settings disable that.

    Args:
        workspace: The workspace; the default one if None.
        project_name: The project.
        log_code: Whether Comet stores the program's code.
        log_graph: Whether Comet stores the model's graph.
        name: The experiment's name; the run's name if None.
        rank_zero_only: Whether only the process of rank 0 logs, or all processes, each to its own experiment.
        exp_kwargs: Further arguments of ``comet_ml.start`` and ``comet_ml.ExperimentConfig``.
        every: How often metrics are logged: a time, a string or a number of epochs; always if None.
        flush_interval: Batches between two flushes; values are also written every ten seconds, at the end of each epoch
            and after evaluations.

    Raises:
        ModuleNotFoundError: comet_ml is not installed.
        ValueError: ``flush_interval`` is less than 1, or ``every`` is not a length of time.

    Attributes:
        experiment: The Comet experiment; None before it starts.

    Example:
        >>> CometMLLogger(project_name="digits", exp_kwargs={"online": False}).experiment is None
        True
    """

    product: ClassVar = ("comet_ml", "comet")
    saved_as: ClassVar = "experiment_key"

    workspace: str | None = None
    project_name: str | None = None
    log_code: bool = attrs.field(default=False, validator=is_flag)
    log_graph: bool = attrs.field(default=False, validator=is_flag)
    name: str | None = None
    rank_zero_only: bool = attrs.field(default=True, validator=is_flag)
    exp_kwargs: dict[str, Any] = attrs.field(default=None, converter=_to_exp_kwargs, repr=False)

    experiment: Any = transient(default=None)

    def open_run(self, state: State) -> None:
        """Start or continue an experiment."""
        name = self.name_of_run(state, self.name)
        start = {"workspace": self.workspace, "project_name": self.project_name}
        if "experiment_key" not in self.exp_kwargs and "COMET_EXPERIMENT_KEY" not in os.environ:
            key = self.choose_run_id(self.workspace, self.project_name, name)
            start |= {"experiment_key": key, "mode": "get" if key == self._saved_id else "create"}
        config = {"log_code": self.log_code, "log_graph": self.log_graph, "name": name}
        for option, value in self.exp_kwargs.items():
            (start if option in _OF_START else config)[option] = value
        self.experiment = self.module.start(**start, experiment_config=self.module.ExperimentConfig(**config))
        self.run_id = self.experiment.get_key()

    def write_metrics(self, records: Sequence[Record]) -> None:
        """Write numbers."""
        for record in records:
            self.experiment.log_metrics(dict(record.metrics), step=record.step)

    def write_hyperparameters(self, hyperparameters: Mapping[str, Any]) -> None:
        """Write hyperparameters by flat names."""
        self.experiment.log_parameters(flat(hyperparameters))

    def write_table(self, columns: Sequence[str], rows: Sequence[Sequence[Any]], name: str, step: int) -> None:
        """Write a table as a file of comma-separated values."""
        self.experiment.log_table(f"{name}_{step}.csv", rows, headers=columns)

    def write_images(self, images: Sequence[Tensor], name: str, step: int, details: Mapping[str, Any]) -> None:
        """Write images."""
        for number, image in enumerate(images):
            self.experiment.log_image(image.numpy(), name if len(images) == 1 else f"{name}_{number}", step=step)

    def close_run(self) -> None:
        """End the experiment."""
        if sys.exception() is not None:
            self.experiment.add_tag("failed")
        self.experiment.end()
