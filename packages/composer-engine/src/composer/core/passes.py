"""Passes: functions that put the algorithms of an event in order.

A pass takes the algorithms that run at an event, in the order so far, and returns them in its own. The engine applies
the default ones first, then those that the user registers. :func:`order_by_stage` and the list's order settle nearly
everything; a pass of one's own is for what they cannot know.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias, TypeVar

from composer.core.algorithm import Algorithm
from composer.core.event import CLOSING_EVENTS, MODEL_EVENTS, Event
from composer.core.stage import Stage

__all__ = [
    "AlgorithmPass",
    "default_passes",
    "order_by_stage",
    "set_filo_order",
    "sort_fused_layernorm_last",
    "sort_low_precision_layernorm_last",
    "sort_selective_backprop_first",
    "sort_to_back",
    "sort_to_front",
    "stage_of",
    "warn_if_multiple_loss_interpolation",
]

T = TypeVar("T")

AlgorithmPass: TypeAlias = Callable[[Sequence[Algorithm], Event], Sequence[Algorithm]]
"""``f(algorithms, event) -> algorithms``."""


def sort_to_front(list_to_sort: Sequence[T], cls: type[Any]) -> Sequence[T]:
    """Return the items with those of a class first; otherwise the order stays.

    Example:
        >>> sort_to_front([1, "b", 3], str)
        ['b', 1, 3]
    """
    return sorted(list_to_sort, key=lambda item: not isinstance(item, cls))


def sort_to_back(list_to_sort: Sequence[T], cls: type[Any]) -> Sequence[T]:
    """Return the items with those of a class last; otherwise the order stays.

    Example:
        >>> sort_to_back([1, "b", 3], str)
        [1, 3, 'b']
    """
    return sorted(list_to_sort, key=lambda item: isinstance(item, cls))


def stage_of(algorithm: Algorithm, event: Event) -> Stage:
    """Return an algorithm's stage at an event.

    One that declares none there runs after all others; at the events that change the model it counts as
    ``ARCHITECTURE``, so that norms and layout still come after it.
    """
    undeclared = Stage.ARCHITECTURE if event in MODEL_EVENTS else Stage.UNDECLARED
    return algorithm.runs_at_events().get(event, undeclared)


def set_filo_order(algorithms: Sequence[Algorithm], event: Event) -> Sequence[Algorithm]:
    """Reverse the order on ``AFTER_*`` events, so that the first in is the last out and each undoes its own change.

    Example:
        >>> set_filo_order(["A", "B"], Event.BEFORE_LOSS), set_filo_order(["A", "B"], Event.AFTER_LOSS)
        (['A', 'B'], ['B', 'A'])
    """
    return algorithms[::-1] if event.is_after_event else algorithms


def order_by_stage(algorithms: Sequence[Algorithm], event: Event) -> Sequence[Algorithm]:
    """Put lower stages first, or last where the event undoes what its ``BEFORE_*`` did; keep the order within each."""
    sign = -1 if event in CLOSING_EVENTS else 1
    return sorted(algorithms, key=lambda algorithm: sign * stage_of(algorithm, event))


def sort_selective_backprop_first(algorithms: Sequence[Algorithm], event: Event) -> Sequence[Algorithm]:
    """Put what chooses samples (stage ``SELECT``) first: it needs the loss of the samples as they came."""
    if event in CLOSING_EVENTS:
        return algorithms
    return sorted(algorithms, key=lambda algorithm: stage_of(algorithm, event) is not Stage.SELECT)


def sort_fused_layernorm_last(algorithms: Sequence[Algorithm], event: Event) -> Sequence[Algorithm]:
    """Put fused and low-precision norms (stage ``PRECISION``) behind all surgery that may add norms.

    Only the memory format, which concerns the finished model, and what uses the finished model come later.
    """
    late = {Stage.PRECISION: 1, Stage.LAYOUT: 2, Stage.GRADIENT: 3, Stage.WEIGHTS: 3}
    if event not in MODEL_EVENTS:
        return algorithms
    return sorted(algorithms, key=lambda algorithm: late.get(stage_of(algorithm, event), 0))


sort_low_precision_layernorm_last = sort_fused_layernorm_last


def warn_if_multiple_loss_interpolation(algorithms: Sequence[Algorithm], event: Event) -> Sequence[Algorithm]:
    """Warn when several algorithms blend losses: each blends what the other already has blended."""
    del event
    # In an order of their own, so that at events with the reverse order it is the same warning, and told once.
    names = sorted(type(algorithm).__name__ for algorithm in algorithms if algorithm.interpolate_loss)
    if len(names) > 1:
        warnings.warn(
            f"{' and '.join(names)} all interpolate the loss, so each blends a loss that the other has blended "
            "already. Use interpolate_loss=False for all but one of them.",
            UserWarning,
            stacklevel=2,
        )
    return algorithms


def default_passes() -> list[AlgorithmPass]:
    """Return the passes that every engine begins with, in their order."""
    return [
        set_filo_order,
        order_by_stage,
        sort_selective_backprop_first,
        sort_fused_layernorm_last,
        warn_if_multiple_loss_interpolation,
    ]
