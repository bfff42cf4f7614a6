"""Base class of loggers for experiment trackers, which buffer numbers and read and write them together."""

from __future__ import annotations

import hashlib
import inspect
import logging
import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import attrs
from torch import Tensor

from composer.core import Logger, State
from composer.core.checks import is_flag, shortened
from composer.core.logger import detach_to_host
from composer.core.saving.components import transient
from composer.loggers.gathering import GatheringLogger
from composer.loggers.images import to_images, with_masks
from composer.loggers.products import import_product, require_product
from composer.loggers.values import Number, numbers_by_name

_log = logging.getLogger(__name__)


@attrs.frozen
class Record:
    """Numbers logged together.

    Args:
        step: Their batch.
        seconds: Their time, by the system's clock.
        metrics: The numbers by name.
    """

    step: int
    seconds: float
    metrics: Mapping[str, Number]


@attrs.define(eq=False)
class TrackerLogger(GatheringLogger, ABC):
    """A logger for an experiment tracker. Subclasses define how to open, write and close a run.

    The run is opened at ``AFTER_LOAD``, when it is known whether it continues an earlier one (or, in a loop without
    this event, when training, an evaluation or a prediction starts); earlier values are written then. Numbers are
    buffered, and read and written together every ``flush_interval`` batches and every few seconds, at the end of each
    epoch, after evaluations and at the end.

    A checkpoint contains the run's id. :meth:`choose_run_id` uses it only if it belongs to a run with this logger's
    settings, so that a checkpoint cannot select another run to write to.

    Args:
        every: How often metrics are logged: a time, a string or a number of epochs; always if None.
        flush_interval: Batches between two flushes.
        rank_zero_only: Whether only the process of rank 0 logs, or all processes.

    Raises:
        ModuleNotFoundError: The product is not installed.
        ValueError: ``flush_interval`` is less than 1, or ``every`` is not a length of time.

    Attributes:
        run_id: The run's id in the tracker; None before the run is open.
    """

    product: ClassVar[tuple[str, str]]
    """The module of the product, and the extra of composer-trainer that installs it."""

    shows_masks: ClassVar[bool] = False
    """Whether the tracker stores masks beside images; otherwise they are drawn."""

    saved_as: ClassVar[str] = "run_id"
    """The name of ``run_id`` in a checkpoint."""

    rank_zero_only: bool = attrs.field(default=True, validator=is_flag, kw_only=True)

    run_id: str | None = transient(default=None)
    seconds_between_flushes: float = transient(default=10.0)
    _is_silent: bool = transient(default=False)
    _was_tried: bool = transient(default=False)
    _early: list[tuple[str, Callable[[], None]]] = transient(factory=list)
    _saved_id: str | None = transient(default=None)

    def __attrs_post_init__(self) -> None:
        require_product(*self.product)

    @property
    def module(self) -> Any:
        """The product, imported at first use."""
        return import_product(*self.product)

    def settings(self) -> dict[str, Any]:
        """Return the constructor's arguments that are attributes; some subclasses have a constructor of their own."""
        return {name: getattr(self, name) for name in inspect.signature(type(self)).parameters if name in dir(self)}

    @abstractmethod
    def open_run(self, state: State) -> None:
        """Start a run, or continue the loaded one, and set :attr:`run_id`."""

    @abstractmethod
    def write_metrics(self, records: Sequence[Record]) -> None:
        """Write numbers."""

    @abstractmethod
    def write_hyperparameters(self, hyperparameters: Mapping[str, Any]) -> None:
        """Write hyperparameters, a nested dictionary."""

    def write_table(self, columns: Sequence[str], rows: Sequence[Sequence[Any]], name: str, step: int) -> None:
        """Write a table; ignored by trackers without tables."""

    def write_images(self, images: Sequence[Tensor], name: str, step: int, details: Mapping[str, Any]) -> None:
        """Write images, each ``(H, W, C)`` and uint8 on the CPU, one by one or as a subclass stores several."""
        for number, image in enumerate(images):
            self.write_image(image, name if len(images) == 1 else f"{name}/{number}", step)

    def write_image(self, image: Tensor, name: str, step: int) -> None:
        """Write an image; ignored by trackers without images."""

    def write_file(self, remote_file_name: str, file_path: Path, *, overwrite: bool) -> None:
        """Write a file; ignored by trackers that store no files."""

    @abstractmethod
    def close_run(self) -> None:
        """End the run."""

    def state_dict(self) -> dict[str, Any]:
        """Flush, so that a kill after the checkpoint loses nothing, and return the run's id."""
        self.flush()
        return {} if self.run_id is None else {self.saved_as: self.run_id}

    def check_state_dict(self, state: dict[str, Any]) -> None:
        """Raise the errors of :meth:`load_state_dict` without changing anything.

        Raises:
            ValueError: ``state`` is not the id of a run.
        """
        if type(self).load_state_dict is not TrackerLogger.load_state_dict:
            return
        if state.keys() != {self.saved_as} or not isinstance(state[self.saved_as], str):
            raise ValueError(
                f"{type(self).__name__} saves {self.saved_as!r}, a string, and cannot load {shortened(state)}."
            )

    @property
    def is_resumed(self) -> bool:
        """Whether the run continues an earlier one."""
        return self._saved_id is not None or super().is_resumed

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Store the id of the earlier run, to continue that run if it belongs to this logger.

        Raises:
            ValueError: ``state`` is not the id of a run.
        """
        self.check_state_dict(state)
        self._saved_id = state[self.saved_as]

    def name_of_run(self, state: State, name: str | None = None) -> str:
        """Return ``name`` or else the run's own name, with the rank if every process has a run."""
        return (name or state.run_name) + ("" if self.rank_zero_only else f"-rank{state.rank}")

    def choose_run_id(self, *own: str | None) -> str:
        """Return the saved id if it was created for the same ``own`` settings, else a new one of 32 letters and digits.

        An id starts with a digest of these settings, so that a checkpoint cannot name another run to write to.

        Args:
            own: Settings that identify the run: the project, the run's name and so on.
        """
        digest = hashlib.sha256(repr(own).encode()).hexdigest()[:16]
        saved = self._saved_id
        if saved is not None and saved.startswith(digest) and len(saved) == 32 and saved.isalnum():
            return saved
        self.report_new_run()
        return digest + secrets.token_hex(8)

    def report_new_run(self) -> None:
        """Warn that the run in the checkpoint is not continued, if there is one."""
        if self._saved_id is not None:
            _log.warning(
                "%s: the checkpoint was saved by a run with another name or other settings, so a new run starts.",
                type(self).__name__,
            )

    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        """Buffer numbers until the next flush."""
        if not self._is_silent:
            values = {name: detach_to_host(value) for name, value in metrics.items()}
            self._records.append(Record(step or 0, time.time(), values))

    def log_hyperparameters(self, hyperparameters: Mapping[str, Any]) -> None:
        """Write hyperparameters."""
        self._when_open("log_hyperparameters", partial(self.write_hyperparameters, dict(hyperparameters)))

    def log_table(
        self, columns: Sequence[str], rows: Sequence[Sequence[Any]], name: str = "Table", step: int | None = None
    ) -> None:
        """Write a table."""
        copied = [list(row) for row in rows]
        self._when_open("log_table", partial(self.write_table, list(columns), copied, name, step or 0))

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
        """Write images.

        Args:
            images: One or several, as a tensor or array ``(C, H, W)``, ``(H, W)`` or ``(N, C, H, W)``, or a list of
                these, with integers from 0 to 255 or floats from 0 to 1.
            name: Name of the images.
            channels_last: Whether the shapes are ``(H, W, C)`` and ``(N, H, W, C)``.
            step: Their batch.
            masks: Class ids of pixels ``(N, H, W)`` by name. A tracker without masks gets images ``name/mask``.
            mask_class_labels: Names of the classes.
            use_table: Whether to log them as rows of a table, if the tracker supports it.
        """
        if self._is_silent:
            return
        details = {"masks": masks, "mask_class_labels": mask_class_labels, "use_table": use_table}
        shown = to_images(images, channels_last=channels_last)
        for title, each in with_masks(shown, name, None if self.shows_masks else masks).items():
            self._when_open("log_images", partial(self.write_images, each, title, step or 0, details))

    def upload_file(self, state: State, remote_file_name: str, file_path: Path, *, overwrite: bool = False) -> None:
        """Upload a file to the run, if :meth:`can_upload_files`."""
        if self.can_upload_files():
            self._when_open("upload_file", partial(self.write_file, remote_file_name, file_path, overwrite=overwrite))

    def init(self, state: State, logger: Logger) -> None:
        """Reset the state of an earlier run."""
        self.raise_if_in_use(logger)
        if self._was_tried:
            self._was_tried, self.run_id, self._early, self._records = False, None, [], []
        self._logger = logger
        self._is_silent = self.rank_zero_only and state.rank != 0
        if self._is_silent:
            self._early, self._records = [], []

    def close(self, state: State, logger: Logger) -> None:
        """Flush."""
        if self._records or self._early:
            self.open(state)
        self.flush()

    def post_close(self) -> None:
        """End the run, after other components may have logged while they were closed."""
        self.flush()
        if self._is_open:
            self._is_open = False
            self.report_failure_of("close", self.close_run)
        self._saved_id = self._logger = None

    def write_records(self, records: Sequence[Record]) -> None:
        """Read the buffered values with one synchronization, and write them."""
        numbers = numbers_by_name([record.metrics for record in records])
        self.write_metrics([attrs.evolve(record, metrics=one) for record, one in zip(records, numbers, strict=True)])

    def open(self, state: State) -> None:
        """Open the run, if it is not open, and write earlier values."""
        if self._is_open or self._is_silent or self._was_tried:
            return
        # Before opening, so that a tracker that cannot be reached is not tried again at each later event.
        self._was_tried = True
        self.open_run(state)
        self._is_open = True
        early, self._early = self._early, []
        for method, call in early:
            self.report_failure_of(method, call)
        self.flush()

    def _when_open(self, method: str, call: Callable[[], None]) -> None:
        if self._is_open:
            call()
        elif not self._is_silent and not self._was_tried:
            self._early.append((method, call))
