"""Where metrics go: one logger that hands everything to the destinations that store or show it."""

from __future__ import annotations

import operator
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs

from composer.core.callback import Callback
from composer.core.components import Components
from composer.core.time import TimeUnit

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from composer.core.event import Event
    from composer.core.state import State

__all__ = ["Logger", "LoggerDestination", "Trace"]


@attrs.frozen
class Trace:
    """What became of an algorithm at an event.

    Args:
        name: The algorithm's class.
        event: Where.
        exit_code: What its ``apply`` returned.
        order: Its place among those that ran at the event, from 0.
        run: Whether it ran, or was asked and declined.

    Example:
        >>> from composer.core import Event
        >>> Trace("MixUp", Event.BEFORE_FORWARD, run=True).run
        True
    """

    name: str = ""
    event: Event | None = None
    exit_code: int | None = None
    order: int | None = None
    run: bool = False


class LoggerDestination(Callback):
    """Something that stores or shows what a run logs: override the ``log_*`` methods of what it can take.

    It is a callback too, so that it can open its files at ``INIT`` and finish them when the run is closed. Numbers may
    come as tensors that are still being computed; read them (``float(value)``) only when they are printed or stored.
    """

    def log_hyperparameters(self, hyperparameters: Mapping[str, Any]) -> None:
        """Store settings."""

    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        """Store numbers by name; ``step`` is the batch that they belong to."""

    def log_traces(self, traces: Mapping[str, Any]) -> None:
        """Store which algorithms ran."""

    def log_table(
        self, columns: Sequence[str], rows: Sequence[Sequence[Any]], name: str = "Table", step: int | None = None
    ) -> None:
        """Store a table."""

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
        """Store images."""

    def upload_file(self, state: State, remote_file_name: str, file_path: Path, *, overwrite: bool = False) -> None:
        """Store a file."""

    def can_upload_files(self) -> bool:
        """Return whether :meth:`upload_file` stores anything."""
        return False

    def download_file(
        self,
        remote_file_name: str,
        destination: str,
        overwrite: bool = False,
        progress_bar: bool = True,
    ) -> None:
        """Fetch a file that was stored.

        Raises:
            NotImplementedError: This destination keeps no files.
        """
        raise NotImplementedError(f"{type(self).__name__} keeps no files and cannot fetch {remote_file_name!r}.")


def check_destination(destination: object) -> None:
    """Raise a TypeError if ``destination`` cannot be logged to."""
    if not isinstance(destination, LoggerDestination):
        raise TypeError(f"loggers must be LoggerDestination objects, got {destination!r}.")


class Logger:
    """Hands what is logged to every destination. One that fails to store is reported once, and the run goes on.

    Args:
        state: Whose clock says the step of what is logged.
        destinations: Where to. The list ``logger.destinations`` can be changed later.

    Example:
        >>> from composer.core import State
        >>> logger = Logger(State(model=None), destinations=[])
        >>> logger.log_metrics({"loss/train/total": 0.5})
    """

    def __init__(
        self, state: State, destinations: LoggerDestination | Iterable[LoggerDestination] | None = None
    ) -> None:
        if isinstance(destinations, LoggerDestination):
            destinations = [destinations]
        self._state = state
        self._reported: set[tuple[int, str]] = set()
        self._destinations = Components(destinations or (), check_destination)

    @property
    def destinations(self) -> Components[LoggerDestination]:
        """Where to: a list that the engine watches."""
        return self._destinations

    @destinations.setter
    def destinations(self, destinations: Iterable[LoggerDestination]) -> None:
        self._destinations[:] = destinations

    def log_hyperparameters(self, hyperparameters: Mapping[str, Any]) -> None:
        """Log settings by name."""
        self._send("log_hyperparameters", hyperparameters)

    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        """Log numbers by name, for ``step`` or else for the batches finished so far. Tensors are not read here."""
        if self.destinations:
            self._send("log_metrics", metrics, self._step(step))

    def log_traces(self, traces: Mapping[str, Any]) -> None:
        """Log which algorithms ran."""
        self._send("log_traces", traces)

    def log_table(
        self, columns: Sequence[str], rows: Sequence[Sequence[Any]], name: str = "Table", step: int | None = None
    ) -> None:
        """Log a table."""
        self._send("log_table", columns, rows, name, self._step(step))

    def log_images(
        self, images: Any, name: str = "Images", channels_last: bool = False, step: int | None = None, **details: Any
    ) -> None:
        """Log images; ``details`` are the further arguments of :meth:`LoggerDestination.log_images`."""
        self._send("log_images", images, name, channels_last, self._step(step), **details)

    def upload_file(self, remote_file_name: str, file_path: Path | str, *, overwrite: bool = False) -> None:
        """Give a file to every destination that keeps files."""
        self._send("upload_file", self._state, remote_file_name, Path(file_path), overwrite=overwrite)

    def has_file_upload_destination(self) -> bool:
        """Return whether any destination keeps files."""
        return any(destination.can_upload_files() for destination in self.destinations)

    def _step(self, step: int | None) -> int:
        return int(self._state.timestamp.count(TimeUnit.BATCH)) if step is None else step

    def _send(self, method: str, *arguments: Any, **options: Any) -> None:
        for destination in self.destinations:
            try:
                getattr(destination, method)(*arguments, **options)
            except Exception as error:  # noqa: BLE001  (whatever it is: a full disk must not end the training)
                self._report(destination, method, error)

    def _report(self, destination: LoggerDestination, method: str, error: Exception) -> None:
        if (id(destination), method) in self._reported:
            return
        self._reported.add((id(destination), method))
        warnings.warn(
            f"{type(destination).__name__}.{method} failed and may have lost what was logged; training goes on. "
            f"The cause: {type(error).__name__}: {error}",
            RuntimeWarning,
            stacklevel=4,
        )


def format_metric_value(value: Any) -> str:
    """Return a number, or a tensor of one number, as short text; this waits for the tensor.

    Example:
        >>> format_metric_value(0.123456), format_metric_value(7)
        ('0.1235', '7')
    """
    number = operator.methodcaller("item")(value) if callable(getattr(value, "item", None)) else value
    return f"{number:.4g}" if isinstance(number, float) else str(number)
