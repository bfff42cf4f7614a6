"""Checks of settings that say in a sentence which one is wrong, and what it is."""

from __future__ import annotations

import math
import numbers
import warnings
from typing import TYPE_CHECKING, Any

from composer.core import NoEffectWarning, Time, TimeUnit

if TYPE_CHECKING:
    from collections.abc import Callable

    import attrs

    from composer.core import Algorithm, State

__all__ = ["elapsed_duration", "number_between", "one_of", "to_time", "warn_if_idle", "whole_number_from"]


def number_between(
    low: float, high: float = math.inf, *, meaning: str, above: bool = False, below: bool = False
) -> Callable[[Any, attrs.Attribute[Any], Any], None]:
    """Return an attrs validator: a finite number from ``low`` (or ``above`` it) to ``high`` (or ``below`` it)."""
    unbounded = f"{'more than' if above else 'at least'} {low}"
    bounded = f"in {'(' if above else '['}{low}, {high}{')' if below else ']'}"
    wanted = unbounded if high == math.inf else bounded

    def check(_: Any, field: attrs.Attribute[Any], value: Any) -> None:
        if isinstance(value, bool) or not isinstance(value, numbers.Real):
            raise TypeError(f"{field.name} must be a number, got {value!r}. {meaning}")
        number = float(value)
        within = low <= number <= high and math.isfinite(number)
        if not within or (above and number == low) or (below and number == high):
            raise ValueError(f"{field.name} must be {wanted}, got {value}. {meaning}")

    return check


def whole_number_from(low: int, *, meaning: str) -> Callable[[Any, attrs.Attribute[Any], Any], None]:
    """Return an attrs validator: a whole number, ``low`` or more."""

    def check(_: Any, field: attrs.Attribute[Any], value: Any) -> None:
        if isinstance(value, bool) or not isinstance(value, numbers.Integral):
            raise TypeError(f"{field.name} must be a whole number, got {value!r}. {meaning}")
        if value < low:
            raise ValueError(f"{field.name} must be at least {low}, got {value}. {meaning}")

    return check


def one_of(*choices: str) -> Callable[[Any, attrs.Attribute[Any], Any], None]:
    """Return an attrs validator: one of some words."""

    def check(_: Any, field: attrs.Attribute[Any], value: Any) -> None:
        if value not in choices:
            raise ValueError(f"{field.name} must be one of {', '.join(map(repr, choices))}, got {value!r}.")

    return check


def warn_if_idle(algorithm: Algorithm, **idle: bool) -> None:
    """Warn at construction of the settings, by name, with which an algorithm changes nothing."""
    names = [name for name, is_idle in idle.items() if is_idle]
    if names:
        settings = " and ".join(f"{name}={getattr(algorithm, name)}" for name in names)
        warnings.warn(
            f"{type(algorithm).__name__} changes nothing with {settings}. Choose another value, or leave it out.",
            NoEffectWarning,
            stacklevel=4,
        )


def elapsed_duration(algorithm: Algorithm, state: State) -> float:
    """Return the fraction of the training that is done.

    Raises:
        ValueError: The training has no length.
    """
    elapsed = state.get_elapsed_duration()
    if elapsed is None:
        raise ValueError(
            f"{type(algorithm).__name__} counts in fractions of the training, whose length is not set: "
            "say State.max_duration, e.g. '10ep'."
        )
    return elapsed.value


def to_time(given: Time | str | int, name: str) -> Time:
    """Return a time; a whole number counts batches. An error names the setting."""
    return Time.from_input(given, TimeUnit.BATCH, name=name)
