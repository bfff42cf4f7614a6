"""Checks of settings that say in a sentence which one is wrong, and what it is."""

from __future__ import annotations

import math
import numbers
from typing import TYPE_CHECKING, Any

from composer.core import Time, TimeUnit

if TYPE_CHECKING:
    from collections.abc import Callable

    import attrs

__all__ = ["number_between", "to_time", "whole_number_from"]


def number_between(
    low: float, high: float = math.inf, *, meaning: str, below: bool = False
) -> Callable[[Any, attrs.Attribute[Any], Any], None]:
    """Return an attrs validator: a finite number from ``low`` to ``high``, or ``below`` it."""
    wanted = f"at least {low}" if high == math.inf else f"in [{low}, {high}{')' if below else ']'}"

    def check(_: Any, field: attrs.Attribute[Any], value: Any) -> None:
        if isinstance(value, bool) or not isinstance(value, numbers.Real):
            raise TypeError(f"{field.name} must be a number, got {value!r}. {meaning}")
        number = float(value)
        if not (low <= number <= high and math.isfinite(number)) or (below and number == high):
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


def to_time(given: Time | str | int, name: str) -> Time:
    """Return a time; a whole number counts batches. An error names the setting."""
    try:
        return Time.from_input(given, TimeUnit.BATCH)
    except (TypeError, ValueError) as error:
        raise type(error)(f"{name} is no length of time. {error}") from None
