"""Record events of a run: spans, instants and counters, and the handlers that receive them."""

from __future__ import annotations

import functools
import threading
import time
from abc import ABC, abstractmethod
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, ParamSpec, Self, TypeVar

import torch

from composer.core import Event

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from contextlib import AbstractContextManager
    from types import TracebackType

    from composer.core import Logger, State

__all__ = ["PHASES", "Marker", "Recording", "TraceEvent", "TraceHandler"]

P = ParamSpec("P")
R = TypeVar("R")

PHASES: Mapping[str, tuple[Event, Event]] = {
    "fit": (Event.FIT_START, Event.FIT_END),
    "iteration": (Event.ITERATION_START, Event.ITERATION_END),
    "epoch": (Event.EPOCH_START, Event.EPOCH_END),
    "dataloader": (Event.BEFORE_DATALOADER, Event.AFTER_DATALOADER),
    "batch": (Event.BATCH_START, Event.BATCH_END),
    "train_batch": (Event.BEFORE_TRAIN_BATCH, Event.AFTER_TRAIN_BATCH),
    "forward": (Event.BEFORE_FORWARD, Event.AFTER_FORWARD),
    "loss": (Event.BEFORE_LOSS, Event.AFTER_LOSS),
    "backward": (Event.BEFORE_BACKWARD, Event.AFTER_BACKWARD),
    "eval_all": (Event.EVAL_BEFORE_ALL, Event.EVAL_AFTER_ALL),
    "eval": (Event.EVAL_START, Event.EVAL_END),
    "eval_batch": (Event.EVAL_BATCH_START, Event.EVAL_BATCH_END),
    "eval_forward": (Event.EVAL_BEFORE_FORWARD, Event.EVAL_AFTER_FORWARD),
    "predict": (Event.PREDICT_START, Event.PREDICT_END),
    "predict_batch": (Event.PREDICT_BATCH_START, Event.PREDICT_BATCH_END),
    "predict_forward": (Event.PREDICT_BEFORE_FORWARD, Event.PREDICT_AFTER_FORWARD),
}
"""Phases of the loop by name, each from one event to another."""


class TraceEvent(NamedTuple):
    """A recorded event: a span of time, an instant, or values of counters.

    Args:
        kind: ``"span"``, ``"instant"`` or ``"counter"``.
        name: Name: ``"event/batch_end"``, ``"algorithm/MixUp"``, ``"forward"``, or a marker's name.
        categories: Words to filter by.
        begin: Start time, in nanoseconds since 1970.
        duration: Duration of a span, in nanoseconds.
        thread: Its thread, from :func:`threading.get_ident`.
        args: Values of a counter by name; otherwise the position of the training: ``{"epoch": 0, "batch": 7}``.

    Example:
        >>> TraceEvent("span", "my part", ("mine",), begin=1_000, duration=500, thread=1, args={}).duration
        500
    """

    kind: Literal["span", "instant", "counter"]
    name: str
    categories: tuple[str, ...]
    begin: int
    duration: int
    thread: int
    args: Mapping[str, Any]


class TraceHandler(ABC):
    """Receives the events that a :class:`Profiler` records.

    Example:
        >>> class Longest(TraceHandler):
        ...     def save(self, events, state, logger):
        ...         spans = [event for event in events if event.kind == "span"]
        ...         print(max(spans, key=lambda span: span.duration).name)
    """

    def open(self, state: State, logger: Logger) -> None:
        """Prepare; called once, when training starts."""
        del state, logger

    @abstractmethod
    def save(self, events: Sequence[TraceEvent], state: State, logger: Logger) -> None:
        """Receive the events of a sequence of active batches, sorted by their start."""

    def close(self, state: State, logger: Logger) -> None:
        """Finish; called once, also after an error."""
        del state, logger


class Recording:
    """Collect spans, instants and counters; spans of one thread are nested or disjoint.

    Args:
        in_torch: Whether to record spans in torch's profiler as well.

    Example:
        >>> recording = Recording()
        >>> recording.run("outer", ("example",), lambda: recording.run("inner", ("example",), lambda: None))
        >>> [event.name for event in recording.finished()]
        ['outer', 'inner']
    """

    def __init__(self, *, in_torch: bool = False) -> None:
        self.args: Mapping[str, Any] = {}
        self._in_torch = in_torch
        self._since_1970 = time.time_ns() - time.perf_counter_ns()
        self._events: list[TraceEvent] = []
        self._phases: dict[str, AbstractContextManager[None]] = {}

    def run(self, name: str, categories: tuple[str, ...], call: Callable[[], object]) -> None:
        """Record a call as a span, also if it raises."""
        with self.span(name, categories):
            call()

    @contextmanager
    def span(self, name: str, categories: tuple[str, ...]) -> Iterator[None]:
        """Record what runs in this context as a span, also if it raises."""
        began, args = time.perf_counter_ns(), self.args
        try:
            with torch.profiler.record_function(name) if self._in_torch else nullcontext():
                yield
        finally:
            self._add("span", name, categories, began, time.perf_counter_ns() - began, args)

    def add_instant(self, name: str, categories: tuple[str, ...]) -> None:
        """Record an instant."""
        self._add("instant", name, categories, time.perf_counter_ns(), 0, self.args)

    def add_counter(self, name: str, categories: tuple[str, ...], values: Mapping[str, float]) -> None:
        """Record the current values of counters."""
        self._add("counter", name, categories, time.perf_counter_ns(), 0, dict(values))

    def begin_phase(self, name: str) -> None:
        """Start a phase; an open phase of this name, and the phases inside it, end here."""
        self.end_phase(name)
        phase = self.span(name, ("phase",))
        phase.__enter__()
        self._phases[name] = phase

    def end_phase(self, name: str | None = None) -> None:
        """End a phase and those inside it, if it started while recording; all phases if None."""
        while self._phases if name is None else name in self._phases:
            self._phases.popitem()[1].__exit__(None, None, None)

    def finished(self) -> list[TraceEvent]:
        """End open phases, and return all events sorted by their start, outer spans before inner ones."""
        self.end_phase()
        return sorted(self._events, key=lambda event: (event.begin, -event.duration))

    def _add(
        self, kind: Any, name: str, categories: tuple[str, ...], began: int, duration: int, args: Mapping[str, Any]
    ) -> None:
        thread = threading.get_ident()
        self._events.append(TraceEvent(kind, name, categories, began + self._since_1970, duration, thread, args))


class Marker:
    """Record a part of a program as a span, in active batches; created by :meth:`Profiler.marker`.

    Use it as a context manager, in one thread at a time, or as a decorator of a function. :meth:`instant` and
    :meth:`counter` record a moment and numbers.

    Args:
        name: Name of the span.
        categories: Words to filter by.
        recording: Function that returns the current recording, or None.

    Example:
        >>> from composer.profiler import Profiler, cyclic_schedule
        >>> profiler = Profiler(cyclic_schedule(), [], sys_prof_cpu=False)
        >>> with profiler.marker("my part"):
        ...     total = sum(range(10))
        >>> @profiler.marker("adding")
        ... def add(a, b):
        ...     return a + b
        >>> add(1, 2)
        3
    """

    def __init__(self, name: str, categories: tuple[str, ...], recording: Callable[[], Recording | None]) -> None:
        self.name, self.categories = name, categories
        self._recording = recording
        self._open: list[AbstractContextManager[None]] = []

    def __enter__(self) -> Self:
        recording = self._recording()
        span = nullcontext() if recording is None else recording.span(self.name, self.categories)
        span.__enter__()
        self._open.append(span)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._open.pop().__exit__(None, None, None)

    def __call__(self, function: Callable[P, R]) -> Callable[P, R]:
        """Return a function whose calls are recorded."""

        @functools.wraps(function)
        def marked(*args: P.args, **kwargs: P.kwargs) -> R:
            with Marker(self.name, self.categories, self._recording):
                return function(*args, **kwargs)

        return marked

    def instant(self) -> None:
        """Record an instant."""
        recording = self._recording()
        if recording is not None:
            recording.add_instant(self.name, self.categories)

    def counter(self, values: Mapping[str, float]) -> None:
        """Record the current values of numbers by name; a viewer draws them as curves."""
        recording = self._recording()
        if recording is not None:
            recording.add_counter(self.name, self.categories, values)
