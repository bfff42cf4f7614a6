"""Log metrics, images, tables, hyperparameters and files to MLflow."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import attrs
from torch import Tensor

from composer.core import State
from composer.core.checks import by_name, integer, is_flag, to_options, to_strings
from composer.core.saving.components import transient
from composer.functional.checks import check_number
from composer.loggers.products import import_product, require_product
from composer.loggers.tracker_logger import Record, TrackerLogger
from composer.loggers.values import Number, flat, matches

_MOST_METRICS, _MOST_PARAMETERS = 1000, 100  # limits of a server's request
_LONGEST_PARAMETER = 6000


def _to_experiment(given: str | None) -> str:
    return given or os.environ.get("MLFLOW_EXPERIMENT_NAME") or "my-mlflow-experiment"


def _to_uri(given: str | os.PathLike[str] | None) -> str | None:
    return None if given is None else str(given)


# One per argument: type checkers infer a converter's argument only from a named function.
def _to_tags(given: Mapping[str, Any] | None) -> dict[str, Any]:
    return to_options("tags", given)


def _to_names(given: Mapping[str, str] | None) -> dict[str, str]:
    return to_options("rename_metrics", given)


def _to_metrics(given: Sequence[str] | None) -> list[str]:
    return to_strings("ignore_metrics", given)


def _to_hyperparameters(given: Sequence[str] | None) -> list[str]:
    return to_strings("ignore_hyperparameters", given)


@attrs.define(eq=False)
class MLFlowLogger(TrackerLogger):
    """Log to MLflow: to a server, or to a local store (``tracking_uri="sqlite:///mlflow.db"``).

    A resumed run continues the first run, if that is in the experiment and has the same name. Hyperparameters are the
    run's parameters, by flat names (``algorithms/MixUp/alpha``); MLflow does not overwrite parameters, so that a
    resumed run only adds new ones.

    Args:
        experiment_name: The experiment; ``MLFLOW_EXPERIMENT_NAME`` or ``"my-mlflow-experiment"`` if None.
        run_name: The run's name in MLflow; the run's own name if None.
        tags: Tags of the run.
        tracking_uri: The server or store; MLflow's own setting if None.
        rank_zero_only: Whether only the process of rank 0 logs, or all processes, each to its own run.
        flush_interval: Batches between two flushes; values are also written every ``logging_buffer_seconds``, at the
            end of each epoch and after evaluations.
        model_registry_prefix: Prefix of the names of registered models, ``"<catalog>.<schema>"``.
        model_registry_uri: The model registry; the tracking server if None.
        synchronous: Whether to wait until MLflow has stored the values, instead of using its threads.
        log_system_metrics: Whether MLflow logs system metrics every ten seconds; requires psutil.
        rename_metrics: Names of metrics in MLflow, by their original name.
        ignore_metrics: Patterns of metrics to skip, ``"time/*"``.
        ignore_hyperparameters: Patterns of hyperparameters to skip.
        run_group: A tag that groups runs.
        resume: Whether to continue the latest run of the experiment with this run's name, if there is one.
        logging_buffer_seconds: Seconds between two flushes.
        log_duplicated_metric_every_n_steps: Steps between two writes of an unchanged metric.
        every: How often metrics are logged: a time, a string or a number of epochs; always if None.

    Raises:
        ModuleNotFoundError: MLflow is not installed.
        ValueError: A number is out of range, or ``every`` is not a length of time.

    Example:
        >>> MLFlowLogger("digits", tracking_uri="sqlite:///mlflow.db").can_upload_files()
        True
    """

    product: ClassVar = ("mlflow", "mlflow")

    experiment_name: str = attrs.field(default=None, converter=_to_experiment)
    run_name: str | None = None
    tags: dict[str, Any] = attrs.field(default=None, converter=_to_tags)
    tracking_uri: str | None = attrs.field(default=None, converter=_to_uri, repr=False)
    rank_zero_only: bool = attrs.field(default=True, validator=is_flag)
    flush_interval: int = integer(10, 1, meaning="It counts batches.")
    model_registry_prefix: str = ""
    model_registry_uri: str | None = attrs.field(default=None, repr=False)
    synchronous: bool = attrs.field(default=False, validator=is_flag)
    log_system_metrics: bool = attrs.field(default=True, validator=is_flag)
    rename_metrics: dict[str, str] = attrs.field(default=None, converter=_to_names)
    ignore_metrics: list[str] = attrs.field(default=None, converter=_to_metrics)
    ignore_hyperparameters: list[str] = attrs.field(default=None, converter=_to_hyperparameters)
    run_group: str | None = None
    resume: bool = attrs.field(default=False, validator=is_flag)
    logging_buffer_seconds: float = attrs.field(default=10, validator=by_name(check_number))
    log_duplicated_metric_every_n_steps: int = integer(100, 1, meaning="It counts steps.")

    _client: Any = transient(default=None)
    _monitor: Any = transient(default=None)
    _pending: list[Any] = transient(factory=list)
    _last: dict[str, tuple[int, Number]] = transient(factory=dict)

    def __attrs_post_init__(self) -> None:
        super().__attrs_post_init__()
        self.seconds_between_flushes = self.logging_buffer_seconds
        if self.log_system_metrics:
            require_product("psutil", "mlflow")

    def open_run(self, state: State) -> None:
        """Start or continue a run."""
        self._monitor, self._pending, self._last = None, [], {}
        self._client = self.module.MlflowClient(self.tracking_uri, self.model_registry_uri)
        name = self.name_of_run(state, self.run_name)
        existing = self._client.get_experiment_by_name(self.experiment_name)
        experiment = str(
            self._client.create_experiment(self.experiment_name) if existing is None else existing.experiment_id
        )
        own: list[str] = []
        if self.resume or self._saved_id is not None:
            named = f"tags.composer_run_name = '{name}'"
            runs = self._client.search_runs([experiment], named, order_by=["attributes.start_time DESC"])
            own = [run.info.run_id for run in runs]
        if self._saved_id in own:
            self.run_id = self._saved_id
        elif self.resume and own:
            self.run_id = own[0]
        if self.run_id is None:
            self.report_new_run()
            group = {} if self.run_group is None else {"run_group": self.run_group}
            tags = {"composer_run_name": name, **group, **self.tags}
            self.run_id = self._client.create_run(experiment, tags=tags, run_name=name).info.run_id
        else:
            self._client.update_run(self.run_id, status="RUNNING")
        if self.log_system_metrics:
            make = import_product("mlflow.system_metrics.system_metrics_monitor", "mlflow").SystemMetricsMonitor
            self._monitor = make(self.run_id, resume_logging=True, tracking_uri=self.tracking_uri)
            self._monitor.start()

    def write_metrics(self, records: Sequence[Record]) -> None:
        """Write numbers."""
        # MLflow counts milliseconds.
        metrics = [
            self.module.entities.Metric(
                _allowed(self.rename_metrics.get(name, name)), number, int(record.seconds * 1000), record.step
            )
            for record in records
            for name, number in record.metrics.items()
            if not matches(name, self.ignore_metrics) and self._is_new(name, number, record.step)
        ]
        for part in _parts(metrics, _MOST_METRICS):
            self._write_batch(metrics=part)

    def write_hyperparameters(self, hyperparameters: Mapping[str, Any]) -> None:
        """Write hyperparameters that the run does not have yet as parameters."""
        known = self._client.get_run(self.run_id).data.params
        parameters = [
            self.module.entities.Param(name, str(value)[:_LONGEST_PARAMETER])
            for name, value in ((_allowed(name), value) for name, value in flat(hyperparameters).items())
            if name not in known and not matches(name, self.ignore_hyperparameters)
        ]
        for part in _parts(parameters, _MOST_PARAMETERS):
            self._write_batch(params=part)

    def write_table(self, columns: Sequence[str], rows: Sequence[Sequence[Any]], name: str, step: int) -> None:
        """Write a table as a JSON file, which MLflow displays as a table."""
        cells = [[cell if isinstance(cell, (bool, int, float, str)) else str(cell) for cell in row] for row in rows]
        table = {"columns": columns, "data": cells}
        self._client.log_dict(self.run_id, table, f"{_allowed(name)}_{step}.json")

    def write_image(self, image: Tensor, name: str, step: int) -> None:
        """Write an image."""
        # MLflow distinguishes images of one key only by step and time.
        self._client.log_image(self.run_id, image.numpy(), key=_allowed(name), step=step, synchronous=True)

    def can_upload_files(self) -> bool:
        """Return True: MLflow stores files."""
        return True

    def write_file(self, remote_file_name: str, file_path: Path, *, overwrite: bool) -> None:
        """Upload a file or a folder to the run's artifacts."""
        folder, name = os.path.split(remote_file_name)
        if not overwrite and name in {Path(one.path).name for one in self._client.list_artifacts(self.run_id, folder)}:
            raise FileExistsError(f"The run already has {remote_file_name!r}; set overwrite=True to replace it.")
        if file_path.name == name:
            self._upload(file_path, folder)
            return
        # MLflow names an artifact after its file.
        with tempfile.TemporaryDirectory() as renamed:
            copy = shutil.copytree if file_path.is_dir() else shutil.copy
            self._upload(Path(copy(file_path, Path(renamed, name))), folder)

    def download_file(
        self, remote_file_name: str, destination: str, overwrite: bool = False, progress_bar: bool = True
    ) -> None:
        """Download a file or a folder of the run's artifacts.

        Raises:
            FileExistsError: ``destination`` exists, and ``overwrite`` is False.
            RuntimeError: There is no run yet.
        """
        if self.run_id is None:
            raise RuntimeError("MLFlowLogger can download files of its run only after the run has started.")
        if Path(destination).exists() and not overwrite:
            raise FileExistsError(f"destination {destination!r} exists; set overwrite=True to replace it.")
        with tempfile.TemporaryDirectory() as folder:
            fetched = Path(self._client.download_artifacts(self.run_id, remote_file_name, folder))
            if fetched.is_dir():
                shutil.copytree(fetched, destination, dirs_exist_ok=True)
            else:
                Path(destination).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(fetched, destination)

    def register_model(
        self, model_uri: str, name: str, await_registration_for: int = 300, tags: dict[str, Any] | None = None
    ) -> Any:
        """Register a model of the run's artifacts, and return the registered version.

        Args:
            model_uri: URI of the model, ``"runs:/<run id>/model"``.
            name: Its name in the registry, after ``model_registry_prefix``.
            await_registration_for: Seconds to wait until the registry has it.
            tags: Tags of the version.
        """
        full = f"{self.model_registry_prefix}.{name}" if self.model_registry_prefix else name
        if not any(one.name == full for one in self._client.search_registered_models()):
            self._client.create_registered_model(full)
        return self._client.create_model_version(
            full, model_uri, run_id=self.run_id, tags=tags, await_creation_for=await_registration_for
        )

    def close_run(self) -> None:
        """End the run; after an error it is marked as failed."""
        if self._monitor is not None:
            self._monitor.finish()
        error = sys.exception()
        status = "FINISHED" if error is None else "KILLED" if isinstance(error, KeyboardInterrupt) else "FAILED"
        try:
            for operation in self._pending:
                operation.wait()
        finally:
            self._client.set_terminated(self.run_id, status)

    def _is_new(self, name: str, number: Number, step: int) -> bool:
        before = self._last.get(name)
        if before is not None and before[1] == number and step - before[0] < self.log_duplicated_metric_every_n_steps:
            return False
        self._last[name] = step, number
        return True

    def _write_batch(self, **content: Any) -> None:
        operation = self._client.log_batch(self.run_id, synchronous=self.synchronous, **content)
        if operation is None:
            return
        # Waiting for completed operations raises their errors.
        self._pending.append(operation)
        done = [one for one in self._pending if all(future.done() for future in one._operation_futures)]  # noqa: SLF001
        self._pending = [one for one in self._pending if one not in done]
        for one in done:
            one.wait()

    def _upload(self, path: Path, folder: str) -> None:
        if path.is_dir():
            self._client.log_artifacts(self.run_id, str(path), f"{folder}/{path.name}" if folder else path.name)
        else:
            self._client.log_artifact(self.run_id, str(path), folder or None)


def _parts(items: Sequence[Any], length: int) -> list[Sequence[Any]]:
    return [items[start : start + length] for start in range(0, len(items), length)]


def _allowed(name: str) -> str:
    return "".join(letter if letter.isalnum() or letter in "-_./ :" else "_" for letter in name)
