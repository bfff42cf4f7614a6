"""What a callback has of its own: the hooks that are called, how often, and what it wraps."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING

from composer.core.callback import Callback
from composer.core.event import Event
from composer.core.frequency import checked_interval

if TYPE_CHECKING:
    from composer.core.time import Time

__all__ = ["hook_of", "intervals_of", "overrides"]

_EVENTS = frozenset(Event)


def overrides(component: object, base: type, method: str) -> bool:
    """Return whether a component has a method of its own in place of that of ``base``.

    Example:
        >>> class Watch(Callback):
        ...     def fit_end(self, state, logger):
        ...         print("done")
        >>> overrides(Watch(), Callback, "fit_end"), overrides(Watch(), Callback, "fit_start")
        (True, False)
    """
    # What would be called is asked, not the class: a method may also have been put on the object.
    return getattr(getattr(component, method), "__func__", None) is not getattr(base, method)


def hook_of(callback: Callback, event: Event) -> Callable[..., object] | None:
    """Return what a callback does at an event, as ``f(state, logger)``; None if it does nothing."""
    if overrides(callback, Callback, "run_event"):
        return partial(callback.run_event, event)
    if overrides(callback, Callback, event.value):
        hook: Callable[..., object] = getattr(callback, event.value)
        return hook
    return None


def intervals_of(callback: Callback) -> Mapping[Event, Time]:
    """Return how often a callback wants to be called at which event.

    Raises:
        TypeError: ``callback.intervals()`` returns no mapping, or an interval is no length of time.
        ValueError: It names an event that does not exist, or an interval that could never be due there.
    """
    who = type(callback).__name__
    given = callback.intervals()
    if not isinstance(given, Mapping):
        raise TypeError(f'{who}.intervals() must map events to times, {{Event.BATCH_END: "10ba"}}, got {given!r}.')
    intervals = {}
    for event, every in given.items():
        if event not in _EVENTS:
            raise ValueError(
                f"{who}.intervals() names {event!r}, which is no event; the events are {', '.join(Event)}."
            )
        intervals[Event(event)] = checked_interval(every, Event(event), who)
    return intervals
