"""A function that is called at an event until its subscription is removed."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable  # noqa: TC003  (attrs looks up what the annotations mean)
from typing import TYPE_CHECKING, Any

import attrs

from composer.core.event import Event  # noqa: TC001
from composer.core.time import Time  # noqa: TC001

if TYPE_CHECKING:
    from composer.core.components import ObservableList

__all__ = ["Subscription", "check_function"]


@attrs.frozen(eq=False)
class Subscription:
    """A function that the engine calls at an event, until ``remove()``; ``engine.on(…)`` returns one.

    Args:
        event: The event.
        function: The function ``f(state, logger)``.
        every: How often; None is each time.

    Example:
        >>> from composer.core import Engine, State
        >>> engine = Engine(State(model=None))
        >>> subscription = engine.on("fit_end", lambda state, logger: print("done"))
        >>> engine.run_event("fit_end")
        done
        >>> subscription.remove()
        >>> engine.run_event("fit_end")
    """

    event: Event
    function: Callable[..., object]
    every: Time | None
    _subscriptions: ObservableList[Subscription] = attrs.field(repr=False)

    @property
    def name(self) -> str:
        """The function's qualified name; the class's of an object that can be called."""
        function: Any = self.function
        while isinstance(function, functools.partial):
            function = function.func
        return str(getattr(function, "__qualname__", type(function).__qualname__))

    def remove(self) -> None:
        """Stop calling the function, from the next event on. A second call does nothing."""
        if self in self._subscriptions:
            self._subscriptions.remove(self)


def check_function(function: object) -> None:
    """Raise a TypeError if something cannot be called with a state and a logger.

    Example:
        >>> check_function(lambda state: None)
        Traceback (most recent call last):
        TypeError: function must take (state, logger), but <lambda> takes (state).
    """
    if not callable(function):
        raise TypeError(f"function must be a function f(state, logger), got {function!r}.")
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # some functions written in C have no signature
        return
    try:
        signature.bind(None, None)
    except TypeError:
        name = getattr(function, "__qualname__", repr(function))
        raise TypeError(f"function must take (state, logger), but {name} takes {signature}.") from None
