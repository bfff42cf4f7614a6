"""What a trace consists of, and what takes it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from composer.core import Logger, State

__all__ = ["TraceEvent", "TraceHandler"]


class TraceEvent(NamedTuple):
    """Something that was recorded: a span of time, an instant, or counters' values.

    Args:
        kind: ``"span"``, ``"instant"`` or ``"counter"``.
        name: What it is: ``"event/batch_end"``, ``"algorithm/MixUp"``, ``"forward"``, or a marker's name.
        categories: Words to filter by.
        begin: When, in nanoseconds since 1970.
        duration: How long a span took, in nanoseconds.
        thread: The thread it was in, by :func:`threading.get_ident`.
        args: A counter's values by name; else where the training stood: ``{"epoch": 0, "batch": 7}``.

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
    """Something that takes what a :class:`Profiler` has recorded.

    Example:
        >>> class Longest(TraceHandler):
        ...     def save(self, events, state, logger):
        ...         spans = [event for event in events if event.kind == "span"]
        ...         print(max(spans, key=lambda span: span.duration).name)
    """

    def open(self, state: State, logger: Logger) -> None:
        """Get ready; called once, when training begins."""
        del state, logger

    @abstractmethod
    def save(self, events: Sequence[TraceEvent], state: State, logger: Logger) -> None:
        """Take what was recorded in a row of active batches, in the order in which it began."""

    def close(self, state: State, logger: Logger) -> None:
        """Finish; called once, also after an error."""
        del state, logger
