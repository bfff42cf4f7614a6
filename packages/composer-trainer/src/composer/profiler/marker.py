"""Parts of one's own program in a trace."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, ParamSpec, Self, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from types import TracebackType

    from composer.profiler.recording import OpenSpan, Recording

__all__ = ["Marker"]

P = ParamSpec("P")
R = TypeVar("R")


class Marker:
    """Records a part of a program as a span; made by :meth:`Profiler.marker`. It does nothing outside active batches.

    Use it as a context manager, in one thread at a time, or as a decorator of a function. :meth:`instant` and
    :meth:`counter` record a moment and numbers.

    Args:
        name: What the span is called.
        categories: Words to filter by.
        recording: Returns what records at the moment, or None.

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
        self._open: list[tuple[Recording, OpenSpan] | None] = []

    def __enter__(self) -> Self:
        recording = self._recording()
        self._open.append(None if recording is None else (recording, recording.begin(self.name, self.categories)))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        opened = self._open.pop()
        if opened is not None:
            recording, span = opened
            recording.end(span)

    def __call__(self, function: Callable[P, R]) -> Callable[P, R]:
        """Return a function of which each call is recorded."""

        @functools.wraps(function)
        def marked(*args: P.args, **kwargs: P.kwargs) -> R:
            with Marker(self.name, self.categories, self._recording):
                return function(*args, **kwargs)

        return marked

    def instant(self) -> None:
        """Record that something happens now."""
        recording = self._recording()
        if recording is not None:
            recording.add_instant(self.name, self.categories)

    def counter(self, values: Mapping[str, float]) -> None:
        """Record what some numbers are now, by name; a viewer draws them as curves."""
        recording = self._recording()
        if recording is not None:
            recording.add_counter(self.name, self.categories, values)
