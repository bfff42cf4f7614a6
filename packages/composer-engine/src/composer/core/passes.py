"""Passes: functions that put the algorithms of an event in order.

A pass takes the algorithms that run at an event, in the current order, and returns them in a new one. The engine
applies the default passes first, then those that the user registers. :func:`order_by_stage` and the order of the list
decide nearly everything; user passes are for the rest.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeAlias, TypeVar

from composer.core.event import CLOSING_EVENTS, MODEL_EVENTS, Event, Stage

__all__ = [
    "AlgorithmPass", "set_filo_order", "sort_fused_layernorm_last", "sort_low_precision_layernorm_last",
    "sort_selective_backprop_first", "sort_to_back", "sort_to_front", "warn_if_multiple_loss_interpolation",
]  # fmt: skip

T = TypeVar("T")

Algorithms: TypeAlias = Sequence[Any]
"""Algorithms; of these a pass needs only what they declare, so that this module does not depend on their class."""

AlgorithmPass: TypeAlias = Callable[[Algorithms, Event], Algorithms]
"""``f(algorithms, event) -> algorithms``."""

PassAt: TypeAlias = tuple[AlgorithmPass, int]  # and its index among the passes
Passes: TypeAlias = AlgorithmPass | PassAt | Sequence[AlgorithmPass | PassAt] | None  # as the user passes them


def sort_to_front(list_to_sort: Sequence[T], cls: type[Any]) -> Sequence[T]:
    """Return the items, those of a class first, otherwise in the same order.

    Example:
        >>> sort_to_front([1, "b", 3], str)
        ['b', 1, 3]
    """
    return sorted(list_to_sort, key=lambda item: not isinstance(item, cls))


def sort_to_back(list_to_sort: Sequence[T], cls: type[Any]) -> Sequence[T]:
    """Return the items, those of a class last, otherwise in the same order.

    Example:
        >>> sort_to_back([1, "b", 3], str)
        [1, 3, 'b']
    """
    return sorted(list_to_sort, key=lambda item: isinstance(item, cls))


def stage_of(algorithm: Any, event: Event) -> Stage:
    """Return an algorithm's stage at an event.

    An algorithm without a stage there runs after all others; at the events that change the model it counts as
    ``ARCHITECTURE``, so that norms and layout still come after it.
    """
    undeclared = Stage.ARCHITECTURE if event in MODEL_EVENTS else Stage.UNDECLARED
    stage: Stage = algorithm.runs_at_events().get(event, undeclared)
    return stage


def set_filo_order(algorithms: Algorithms, event: Event) -> Algorithms:
    """Reverse the order on ``AFTER_*`` events, so that the first in is the last out.

    Example:
        >>> set_filo_order(["A", "B"], Event.BEFORE_LOSS), set_filo_order(["A", "B"], Event.AFTER_LOSS)
        (['A', 'B'], ['B', 'A'])
    """
    return algorithms[::-1] if event.is_after_event else algorithms


def order_by_stage(algorithms: Algorithms, event: Event) -> Algorithms:
    """Put lower stages first, or last where the event undoes what its ``BEFORE_*`` did; keep the order within each."""
    sign = -1 if event in CLOSING_EVENTS else 1
    return sorted(algorithms, key=lambda algorithm: sign * stage_of(algorithm, event))


# What these passes of Composer did is stated by the stages SELECT and PRECISION.
sort_selective_backprop_first = sort_fused_layernorm_last = sort_low_precision_layernorm_last = order_by_stage


def warn_if_multiple_loss_interpolation(algorithms: Algorithms, event: Event) -> Algorithms:
    """Warn if several algorithms blend losses: each blends a loss that is already blended."""
    # Sorted, so that the warning is the same, and shown once, at events with the reverse order.
    names = sorted(type(algorithm).__name__ for algorithm in algorithms if algorithm.interpolate_loss)
    if len(names) > 1:
        warnings.warn(
            f"{' and '.join(names)} all interpolate the loss, so each blends a loss that the other has blended "
            "already. Use interpolate_loss=False for all but one of them.",
            stacklevel=2,
        )
    return algorithms


def default_passes() -> list[AlgorithmPass]:
    """Return the passes that every engine starts with, in their order."""
    return [set_filo_order, order_by_stage, warn_if_multiple_loss_interpolation]


def all_passes(given: Passes) -> list[AlgorithmPass]:
    """Return the default passes with those of the user among them, or after them.

    Raises:
        TypeError: A pass is not a function, or its place is not a number.

    Example:
        >>> all_passes((sort_to_back, 0))[0] is sort_to_back
        True
    """
    is_one = callable(given) or (isinstance(given, tuple) and len(given) == 2 and isinstance(given[1], int))
    passes = default_passes()
    if not is_one and not isinstance(given, Iterable | None):
        raise TypeError(
            f"algorithm_passes must be functions f(algorithms, event), or pairs of one and its place, got {given!r}."
        )
    listed: Any = [given] if is_one else given or ()
    for one in listed:
        each_pass, index = one if isinstance(one, tuple) else (one, -1)
        check_pass(each_pass)
        passes.insert(len(passes) if index == -1 else index, each_pass)
    return passes


def check_pass(algorithm_pass: object) -> None:
    """Raise a TypeError if something is no function, as passes are."""
    if not callable(algorithm_pass):
        raise TypeError(f"algorithm_pass must be a function (algorithms, event) -> algorithms, got {algorithm_pass!r}.")


def apply_passes(algorithms: Algorithms, event: Event, passes: Sequence[AlgorithmPass]) -> tuple[list[Any], list[str]]:
    """Return the algorithms of an event in the order of the passes, and the names of the user's that changed it.

    Raises:
        TypeError: A pass returns no list or tuple.
        ValueError: A pass returns other algorithms than it was given.
    """
    order, changed_by = list(algorithms), list[str]()
    for each_pass in passes if order else ():
        name = getattr(each_pass, "__name__", None) or repr(each_pass)
        before, order = order, _checked(each_pass(list(order), event), order, event, name)
        if each_pass not in default_passes() and [*map(id, before)] != [*map(id, order)]:
            changed_by.append(name)
    return order, changed_by


def _checked(returned: object, given: Algorithms, event: Event, name: str) -> list[Any]:
    if not isinstance(returned, (list, tuple)):
        what = "nothing" if returned is None else f"a {type(returned).__name__}"
        raise TypeError(
            f"The pass {name} returned {what} at {event.value!r}; it must return the algorithms, as a list or tuple."
        )
    if sorted(map(id, returned)) != sorted(map(id, given)):
        raise ValueError(
            f"The pass {name} returned other algorithms at {event.value!r} than it was given, {list(returned)}; "
            "it may only change their order."
        )
    return list(returned)
