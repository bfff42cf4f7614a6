"""Wrong arguments, all told at once."""

from __future__ import annotations

import contextlib
import inspect
import logging
import math
import numbers
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

__all__ = [
    "ArgumentsError",
    "Problems",
    "as_list",
    "check_flags",
    "check_ratio",
    "check_subset",
    "check_text",
    "set_log_level",
]

T = TypeVar("T")


class ArgumentsError(ValueError, TypeError):
    """Several arguments are wrong.

    Args:
        problems: What is wrong, an error each; also the attribute ``problems``.

    Example:
        >>> print(ArgumentsError([ValueError("a must be 1, got 2."), TypeError("b must be a number.")]))
        2 arguments are wrong:
        - a must be 1, got 2.
        - b must be a number.
    """

    def __init__(self, problems: Sequence[Exception]) -> None:
        self.problems = tuple(problems)
        super().__init__("\n- ".join([f"{len(problems)} arguments are wrong:", *map(str, problems)]))


class Problems:
    """Remembers what is wrong with one argument while the next is looked at.

    Example:
        >>> problems = Problems()
        >>> with problems.noted():
        ...     raise ValueError("a must be 1, got 2.")
        >>> problems.check()
        Traceback (most recent call last):
        ValueError: a must be 1, got 2.
    """

    def __init__(self) -> None:
        self.found: list[Exception] = []

    @contextlib.contextmanager
    def noted(self) -> Iterator[None]:
        """Remember an error that says that an argument is wrong, once.

        A part may refuse again, as ``overwrite``, what was refused as ``save_overwrite``.
        """
        try:
            yield
        except (TypeError, ValueError, ImportError, NotImplementedError) as error:
            if not any(str(one).endswith(str(error)) for one in self.found):
                self.found.append(error)

    def check(self) -> None:
        """Raise what was found: one error as it is, several as an :class:`ArgumentsError`."""
        if len(self.found) == 1:
            raise self.found[0]
        if self.found:
            raise ArgumentsError(self.found)


def as_list(given: T | Iterable[T] | None) -> list[T]:
    """Return one or several as a list.

    Example:
        >>> as_list(None), as_list(1), as_list((1, 2))
        ([], [1], [1, 2])
    """
    if given is None:
        return []
    return list(given) if isinstance(given, Iterable) and not isinstance(given, str) else [given]


def check_flags(function: Callable[..., object], arguments: Mapping[str, Any]) -> None:
    """Raise a TypeError if an argument that a function's signature says is a ``bool`` is something else.

    Example:
        >>> def fit(*, reset_time: bool = False): ...
        >>> check_flags(fit, {"reset_time": "yes"})
        Traceback (most recent call last):
        TypeError: reset_time must be True or False, got 'yes'.
    """
    for name, parameter in inspect.signature(function).parameters.items():
        kind, value = str(parameter.annotation), arguments.get(name)
        allowed = {"bool": (True, False), "bool | None": (True, False, None), "<class 'bool'>": (True, False)}.get(kind)
        if allowed is not None and not any(value is one for one in allowed):
            raise TypeError(f"{name} must be {' or '.join(map(str, allowed))}, got {value!r}.")


def check_text(name: str, given: object, *, or_none: bool = False) -> None:
    """Raise a TypeError or ValueError if an argument is not a text, or an empty one."""
    if given is None and or_none:
        return
    if not isinstance(given, str):
        raise TypeError(f"{name} must be a text, got {given!r}.")
    if not given:
        raise ValueError(f"{name} must not be empty, got ''. Leave it out for the default.")


def check_subset(name: str, subset: int) -> int:
    """Return a number of batches.

    Raises:
        ValueError: It is 0 or less than -1.
    """
    if isinstance(subset, bool) or not isinstance(subset, int) or (subset != -1 and subset < 1):
        raise ValueError(f"{name} must be a number of batches, or -1 for all, got {subset!r}.")
    return subset


def check_ratio(ratio: Any) -> float:
    """Return a scale schedule ratio.

    Raises:
        TypeError: It is no number.
        ValueError: It is not finite and more than 0.
    """
    if isinstance(ratio, bool) or not isinstance(ratio, numbers.Real):
        raise TypeError(f"scale_schedule_ratio must be a number, more than 0, got {ratio!r}.")
    if not 0 < float(ratio) < math.inf:
        raise ValueError(f"scale_schedule_ratio must be more than 0 and finite, got {ratio}.")
    return float(ratio)


def set_log_level(level: str | None) -> None:
    """Show what the library tells of itself from a level of :mod:`logging` on; None changes nothing.

    Raises:
        ValueError: There is no such level.
    """
    if level is None:
        return
    levels = logging.getLevelNamesMapping()
    if not isinstance(level, str) or level.upper() not in levels:
        raise ValueError(f"python_log_level must be one of {', '.join(levels)}, got {level!r}.")
    log = logging.getLogger("composer")
    log.setLevel(level.upper())
    if not log.handlers and not logging.getLogger().handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(levelname)s %(name)s: %(message)s"))
        log.addHandler(handler)
