"""What loggers of experiment trackers have in common: they gather numbers, and read and write them together."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from functools import partial
from typing import TYPE_CHECKING, Any

import attrs

from composer.core.logger import keep
from composer.loggers.gathering import GatheringLogger
from composer.loggers.images import to_images
from composer.loggers.values import Number, numbers_by_name

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from torch import Tensor

    from composer.core import Interval, Logger, State, Time

__all__ = ["Record", "TrackerLogger"]


@attrs.frozen
class Record:
    """Numbers that were logged together.

    Args:
        step: The batch that they belong to.
        seconds: When, by the system's clock.
        metrics: The numbers by name.
    """

    step: int
    seconds: float
    metrics: Mapping[str, Number]


class TrackerLogger(GatheringLogger, ABC):
    """A logger that keeps a run in some experiment tracker. A subclass says how a run is opened, written to and closed.

    The run is opened at ``AFTER_LOAD``, when it is known whether it goes on with an earlier one (or, in a loop without
    this event, when training, an evaluation or a prediction begins); what is logged before is written then. Numbers are
    kept as they come, and are read together and written every ``flush_interval`` batches and every few seconds, at the
    end of each epoch, after evaluations and at the end.

    Args:
        every: How often metrics are logged: a time, a text or a number of epochs; each time if None.
        flush_interval: Batches between two writings.
        rank_zero_only: Whether the first process of a distributed run logs, or all do.
        seconds_between_flushes: Seconds after which the next batch's end writes, too.

    Raises:
        ValueError: ``flush_interval`` is less than 1, or ``every`` no length of time.
    """

    def __init__(
        self,
        *,
        every: Interval | Time | str | int | None = None,
        flush_interval: int = 100,
        rank_zero_only: bool = True,
        seconds_between_flushes: float = 10.0,
    ) -> None:
        super().__init__(every=every, flush_interval=flush_interval)
        self.rank_zero_only = rank_zero_only
        self.seconds_between_flushes = seconds_between_flushes
        self._logger: Logger | None = None
        self._is_silent = self._is_open = self._was_tried = False
        self._early: list[tuple[str, Callable[[], None]]] = []
        self._records: list[tuple[int, float, dict[str, Any]]] = []
        self._next_flush = 0.0

    @abstractmethod
    def open_run(self, state: State) -> None:
        """Begin a run, or go on with the one whose state was loaded."""

    @abstractmethod
    def write_metrics(self, records: Sequence[Record]) -> None:
        """Write numbers."""

    @abstractmethod
    def write_hyperparameters(self, hyperparameters: Mapping[str, Any]) -> None:
        """Write settings, a nested dictionary."""

    def write_table(self, columns: Sequence[str], rows: Sequence[Sequence[Any]], name: str, step: int) -> None:
        """Write a table; a tracker that has none leaves it out."""

    def write_images(self, images: Sequence[Tensor], name: str, step: int, details: Mapping[str, Any]) -> None:
        """Write images, each ``(H, W, C)`` and uint8 on the CPU; a tracker that has none leaves them out."""

    def write_file(self, remote_file_name: str, file_path: Path, *, overwrite: bool) -> None:
        """Write a file; a tracker that keeps none leaves it out."""

    @abstractmethod
    def close_run(self) -> None:
        """End the run."""

    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        """Write numbers, at the next flush."""
        if not self._is_silent:
            self._records.append((step or 0, time.time(), {name: keep(value) for name, value in metrics.items()}))

    def log_hyperparameters(self, hyperparameters: Mapping[str, Any]) -> None:
        """Write settings."""
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
                these; numbers are 0 to 255, or floats from 0 to 1.
            name: What they are called.
            channels_last: Whether the shapes are ``(H, W, C)`` and ``(N, H, W, C)``.
            step: The batch that they belong to.
            masks: Classes of pixels ``(N, H, W)`` by name, where the tracker can show them.
            mask_class_labels: What the classes are called.
            use_table: Whether they are rows of a table, where the tracker has such.
        """
        if self._is_silent:
            return
        details = {"masks": masks, "mask_class_labels": mask_class_labels, "use_table": use_table}
        shown = to_images(images, channels_last=channels_last)
        self._when_open("log_images", partial(self.write_images, shown, name, step or 0, details))

    def upload_file(self, state: State, remote_file_name: str, file_path: Path, *, overwrite: bool = False) -> None:
        """Keep a file in the run, if :meth:`can_upload_files`."""
        del state
        if self.can_upload_files():
            self._when_open("upload_file", partial(self.write_file, remote_file_name, file_path, overwrite=overwrite))

    def init(self, state: State, logger: Logger) -> None:
        """Learn which process this is."""
        self._logger = logger
        self._is_silent = self.rank_zero_only and state.rank != 0
        if self._is_silent:
            self._early, self._records = [], []

    def close(self, state: State, logger: Logger) -> None:
        """Write what was logged."""
        del logger
        if self._records or self._early:
            self.open(state)
        self.flush()

    def post_close(self) -> None:
        """End the run, which others may have written to while they were closed."""
        self.flush()
        if self._is_open:
            self._is_open = False
            self._try("close", self.close_run)

    def flush(self) -> None:
        """Read what was logged, waiting once for the device, and write it, if the run is open."""
        self._batches, self._next_flush = 0, time.monotonic() + self.seconds_between_flushes
        if self._is_open and self._records:
            records, self._records = self._records, []
            self._try("flush", lambda: self.write_metrics(_read(records)))

    def open(self, state: State) -> None:
        """Open the run, if it is not, and write what was logged before."""
        if self._is_open or self._is_silent or self._was_tried:
            return
        self._was_tried = True
        self.open_run(state)
        self._is_open = True
        self._next_flush = time.monotonic() + self.seconds_between_flushes
        early, self._early = self._early, []
        for method, call in early:
            self._try(method, call)

    def _when_open(self, method: str, call: Callable[[], None]) -> None:
        if self._is_open:
            call()
        elif not self._is_silent and not self._was_tried:
            self._early.append((method, call))

    def _try(self, method: str, call: Callable[[], None]) -> None:
        try:
            call()
        except Exception as error:
            if self._logger is None:
                raise
            self._logger.report_failure(self, method, error)


def _read(records: Sequence[tuple[int, float, dict[str, Any]]]) -> list[Record]:
    metrics = numbers_by_name([metrics for _, _, metrics in records])
    return [Record(step, seconds, one) for (step, seconds, _), one in zip(records, metrics, strict=True)]
