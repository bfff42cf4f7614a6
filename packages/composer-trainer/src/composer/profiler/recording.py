"""What is recorded in a row of active batches."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from composer.core import Event
from composer.profiler.trace import TraceEvent

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

__all__ = ["PHASES", "OpenSpan", "Recording"]

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
"""Spans from one event to another, by name: what the loop does between them."""


class OpenSpan(NamedTuple):
    """A span that has begun.

    Args:
        name, categories: What it is.
        began: When, by :func:`time.perf_counter_ns`.
        args: Where the training stood.
        shown: The same span in torch's profiler, if that is to see it.
    """

    name: str
    categories: tuple[str, ...]
    began: int
    args: Mapping[str, Any]
    shown: torch.profiler.record_function | None


class Recording:
    """Collects spans, instants and counters; those of one thread lie within one another, or apart.

    Args:
        in_torch: Whether spans are shown to torch's profiler, too.

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
        self._phases: list[OpenSpan] = []

    def run(self, name: str, categories: tuple[str, ...], call: Callable[[], object]) -> None:
        """Make a call and record it as a span, also if it raises."""
        span = self.begin(name, categories)
        try:
            call()
        finally:
            self.end(span)

    def begin(self, name: str, categories: tuple[str, ...]) -> OpenSpan:
        """Return a span that begins now, for :meth:`end`."""
        shown = None
        if self._in_torch:
            shown = torch.profiler.record_function(name)
            shown.__enter__()  # type: ignore[no-untyped-call]
        return OpenSpan(name, categories, time.perf_counter_ns(), self.args, shown)

    def end(self, span: OpenSpan) -> None:
        """Record a span, which ends now."""
        duration = time.perf_counter_ns() - span.began
        self._add("span", span.name, span.categories, span.began, duration, span.args)
        if span.shown is not None:
            span.shown.__exit__(None, None, None)

    def add_instant(self, name: str, categories: tuple[str, ...]) -> None:
        """Record that something happened now."""
        self._add("instant", name, categories, time.perf_counter_ns(), 0, self.args)

    def add_counter(self, name: str, categories: tuple[str, ...], values: Mapping[str, float]) -> None:
        """Record what some numbers are now."""
        self._add("counter", name, categories, time.perf_counter_ns(), 0, dict(values))

    def begin_phase(self, name: str) -> None:
        """Begin a phase; one of this name that was never ended, and those within it, end here."""
        self.end_phase(name)
        self._phases.append(self.begin(name, ("phase",)))

    def end_phase(self, name: str) -> None:
        """End a phase and those within it; nothing happens if it did not begin while recording."""
        if any(phase.name == name for phase in self._phases):
            while self._end_last() != name:
                pass

    def finished(self) -> list[TraceEvent]:
        """Return all that was recorded, by when it began, what is around before what is within; phases end here."""
        while self._phases:
            self._end_last()
        return sorted(self._events, key=lambda event: (event.begin, -event.duration))

    def _end_last(self) -> str:
        phase = self._phases.pop()
        self.end(phase)
        return phase.name

    def _add(
        self, kind: Any, name: str, categories: tuple[str, ...], began: int, duration: int, args: Mapping[str, Any]
    ) -> None:
        thread = threading.get_ident()
        self._events.append(TraceEvent(kind, name, categories, began + self._since_1970, duration, thread, args))
