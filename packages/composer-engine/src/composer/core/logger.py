"""The logger, which passes metrics and other results to the destinations that store or show them."""

from __future__ import annotations

import operator
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs
from torch import Tensor

from composer.core.base import Callback
from composer.core.interval import Interval, to_interval
from composer.core.observable_list import ObservableList
from composer.core.saving.components import by_key
from composer.core.time import Timestamp, TimeUnit

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from composer.core.event import Event
    from composer.core.state import State

_IMMUTABLE = frozenset({int, float, str, bool, type(None)})  # nearly all; a look-up costs a third of a call


@attrs.frozen
class Trace:
    """A record of an algorithm at an event.

    Args:
        name: The algorithm's key.
        event: The event.
        exit_code: The value that ``apply`` returned.
        order: Its position at the event, from 0.
        run: Whether it ran, or its ``match`` returned False.

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
    """Stores or shows what a run logs: override the ``log_*`` methods that it supports.

    It is also a callback, so that it can open its files at ``INIT`` and finish them when the run is closed. Numbers may
    be tensors that are still being computed; read them (``float(value)``) only when they are printed or stored.

    If :attr:`every` is an interval, metrics are delivered once per interval: the latest value of each name, with its
    step. Everything else is passed on immediately.
    """

    every: Interval | None = None
    """How often metrics are delivered; immediately if None, and only at the end if it is an interval of 0."""

    def log_hyperparameters(self, hyperparameters: Mapping[str, Any]) -> None:
        """Store settings."""

    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        """Store numbers by name; ``step`` is their batch."""

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
            NotImplementedError: This destination stores no files.
        """
        raise NotImplementedError(f"{type(self).__name__} stores no files and cannot fetch {remote_file_name!r}.")


def check_state(state: object) -> None:
    """Raise a TypeError if ``state`` is no :class:`State`, whose module imports this one."""
    if not callable(getattr(state, "on_components_change", None)):
        raise TypeError(f"state must be a State, such as State(model=model), got {type(state).__name__}.")


def check_destination(destination: object) -> None:
    """Raise a TypeError if ``destination`` cannot be logged to."""
    if not isinstance(destination, LoggerDestination):
        raise TypeError(f"loggers must be LoggerDestination objects, got {destination!r}.")


@attrs.define(eq=False)
class _Waiting:
    """The metrics that are not yet delivered to a destination with an interval."""

    destination: LoggerDestination
    delivered_at: Timestamp
    checked_at: Timestamp
    newest: dict[str, tuple[int, Any]] = attrs.field(factory=dict)

    def is_due(self, state: State) -> bool:
        """Return whether a multiple of the interval has been passed since the last delivery."""
        # Each step makes a new timestamp, so the same object means that no time has passed.
        if state.timestamp is self.checked_at:
            return False
        self.checked_at = state.timestamp
        # In an evaluation the state has the length of another loader.
        length = state.dataloader_len if state.dataloader is state.train_dataloader else None
        every = to_interval(self.destination.every)
        if every is not None and not every.passed(self.delivered_at, state.timestamp, state.max_duration, length):
            return False
        self.delivered_at = state.timestamp
        return True

    def take(self) -> list[tuple[int, dict[str, Any]]]:
        """Return the metrics by step, in ascending order, and forget them."""
        by_step: dict[int, dict[str, Any]] = {}
        for name, (step, value) in self.newest.items():
            by_step.setdefault(step, {})[name] = value
        self.newest = {}
        return sorted(by_step.items(), key=operator.itemgetter(0))


class Logger:
    """Passes everything that is logged to all destinations. A failure to store is reported once, and the run continues.

    Args:
        state: The state with the clock, which is the default for steps.
        destinations: One or several. The list ``logger.destinations`` can be changed later.

    Attributes:
        is_resumed: Whether this run continues an earlier one, from a checkpoint or from its beginning.
        is_heard: Whether there is any destination.

    Example:
        >>> from composer.core import State
        >>> logger = Logger(State(model=None), destinations=[])
        >>> logger.log_metrics({"loss/train/total": 0.5})
    """

    def __init__(
        self, state: State, destinations: LoggerDestination | Iterable[LoggerDestination] | None = None
    ) -> None:
        check_state(state)
        if isinstance(destinations, LoggerDestination) or not isinstance(destinations, Iterable):
            destinations = [] if destinations is None else [destinations]
        self._state = state
        self._reported: set[tuple[int, str]] = set()
        self.is_resumed = False
        self._waiting: dict[int, _Waiting] = {}
        self._destinations = ObservableList(destinations, check_destination)
        self._destinations.on_change.append(self._listen)
        self._listen()

    def _listen(self) -> None:
        # Used at every step: iterating over an ObservableList takes longer.
        self._current = tuple(self._destinations)
        self.is_heard = bool(self._current)

    @property
    def destinations(self) -> ObservableList[LoggerDestination]:
        """The destinations, as a list that the engine observes."""
        return self._destinations

    @destinations.setter
    def destinations(self, destinations: Iterable[LoggerDestination]) -> None:
        self._destinations[:] = destinations

    def log_hyperparameters(self, parameters: Mapping[str, Any]) -> None:
        """Log settings by name."""
        self._send("log_hyperparameters", parameters)

    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        """Log numbers by name, for ``step`` or for the number of finished batches. Tensors are not read here."""
        if step is None:
            step = self._step(step)
        for destination in self._current:
            if destination.every is not None:
                self._delay(destination, metrics, step)
                continue
            try:
                destination.log_metrics(metrics, step)
            except Exception as error:  # noqa: BLE001  (any error: a full disk must not end the training)
                self.report_failure(destination, "log_metrics", error, stacklevel=3)

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
        """Upload a file to every destination that stores files."""
        self._send("upload_file", self._state, remote_file_name, Path(file_path), overwrite=overwrite)

    def has_file_upload_destination(self) -> bool:
        """Return whether any destination stores files."""
        return any(destination.can_upload_files() for destination in self.destinations)

    def deliver(self) -> None:
        """Deliver all delayed metrics to destinations with an interval.

        The engine calls this at the end of a training or a standalone evaluation, and when it is closed.
        """
        for waiting in self._waiting.values():
            self._deliver_to(waiting)

    def report_failure(
        self, destination: LoggerDestination, method: str, error: Exception, *, stacklevel: int = 2
    ) -> None:
        """Warn that a destination failed to store something, once for each of its methods.

        Destinations that store later than they are called catch their errors and report them here.

        Args:
            destination: The destination.
            method: The method that failed, ``"flush"``.
            error: The error.
            stacklevel: The line that the warning names, as for :func:`warnings.warn`; 2 is the caller's.
        """
        if (id(destination), method) in self._reported:
            return
        self._reported.add((id(destination), method))
        warnings.warn(
            f"{type(destination).__name__}.{method} failed and may have lost what was logged; training continues. "
            f"The cause: {type(error).__name__}: {error}",
            RuntimeWarning,
            stacklevel=stacklevel,
        )

    def state_dict(self) -> dict[str, dict[str, Any]]:
        """Return the state that destinations need in a resumed run, such as an id, by the destination's key.

        The key is its class, numbered from the second of a class on. Destinations without state are left out.
        """
        return {key: saved for key, one in by_key(self._destinations).items() if (saved := one.state_dict())}

    def check_state_dict(self, state: Mapping[str, dict[str, Any]]) -> None:
        """Raise the errors of :meth:`load_state_dict` without changing anything.

        Raises:
            ValueError: A destination cannot load its saved state.
        """
        problems = []
        for key, destination in by_key(self._destinations).items():
            if key in state:
                try:
                    destination.check_state_dict(state[key])
                except (TypeError, ValueError) as error:
                    problems.append(f"{key}: {error}")
        if problems:
            raise ValueError(" ".join(problems))

    def load_state_dict(self, state: Mapping[str, dict[str, Any]]) -> None:
        """Load what :meth:`state_dict` returned into the destinations; keys without a destination are ignored.

        Called before ``AFTER_LOAD``, where destinations open their outputs; with an empty ``state`` if the run is
        resumed and nothing was saved for it. The saved state never decides where a destination writes.
        """
        self.is_resumed = True
        for key, destination in by_key(self._destinations).items():
            if key in state:
                destination.load_state_dict(state[key])

    def _step(self, step: int | None) -> int:
        return int(self._state.timestamp.count(TimeUnit.BATCH)) if step is None else step

    def _delay(self, destination: LoggerDestination, metrics: Mapping[str, Any], step: int) -> None:
        waiting = self._waiting.get(id(destination))
        if waiting is None:
            clock = self._state.timestamp
            waiting = self._waiting[id(destination)] = _Waiting(destination, clock, clock)
        elif waiting.is_due(self._state):
            self._deliver_to(waiting)
        newest = waiting.newest
        for name, value in metrics.items():
            newest[name] = (step, value if type(value) in _IMMUTABLE else detach_to_host(value))

    def _deliver_to(self, waiting: _Waiting) -> None:
        for step, metrics in waiting.take():
            try:
                waiting.destination.log_metrics(metrics, step)
            except Exception as error:  # noqa: BLE001  (see log_metrics)
                self.report_failure(waiting.destination, "log_metrics", error)

    def _send(self, method: str, *arguments: Any, **options: Any) -> None:
        for destination in self.destinations:
            try:
                getattr(destination, method)(*arguments, **options)
            except Exception as error:  # noqa: BLE001  (see log_metrics)
                self.report_failure(destination, method, error, stacklevel=4)


def detach_to_host(value: Any) -> Any:
    """Return a value that later changes of its tensor in place do not affect, without waiting for the device.

    A number on the CPU is read. Other tensors are cloned on their device; the host reads them later.

    Example:
        >>> import torch
        >>> detach_to_host(torch.tensor(0.5)), detach_to_host(3)
        (0.5, 3)
    """
    if not isinstance(value, Tensor):
        return value
    if value.is_cpu and value.numel() == 1:
        return value.item()
    return value.detach().clone()
