"""Validation of arguments, which reports all invalid arguments in one error."""

from __future__ import annotations

import contextlib
import inspect
import logging
import math
import numbers
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar, cast

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

__all__ = [
    "ArgumentsError",
    "Problems",
    "check_flags",
    "check_ratio",
    "check_text",
    "set_log_level",
]

P = ParamSpec("P")
T = TypeVar("T")


class ArgumentsError(ValueError, TypeError):
    """Several arguments are invalid.

    Args:
        problems: The errors; also the attribute ``problems``.

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
    """Collects the errors of invalid arguments, so that all are reported.

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
        """Record an error about an argument that is raised within the block, once.

        A part may raise an error for ``overwrite`` after one was recorded for ``save_overwrite``.
        """
        try:
            yield
        except (TypeError, ValueError, ImportError, NotImplementedError) as error:
            if not any(str(one).endswith(str(error)) for one in self.found):
                self.found.append(error)

    def collect(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Call a function and return its result; if it raises an error about an argument, record it.

        The result is then None, and :meth:`check` raises before it is used.
        """
        result: Any = None
        with self.noted():
            result = function(*args, **kwargs)
        return cast("T", result)

    def check(self) -> None:
        """Raise the recorded errors: a single one as it is, several as an :class:`ArgumentsError`."""
        if len(self.found) == 1:
            raise self.found[0]
        if self.found:
            raise ArgumentsError(self.found)


def check_flags(function: Callable[..., object], arguments: Mapping[str, Any]) -> None:
    """Raise a TypeError if an argument is not a ``bool`` where the function's signature declares one.

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
    """Raise a TypeError or ValueError if an argument is not a string, or empty."""
    if given is None and or_none:
        return
    if not isinstance(given, str):
        raise TypeError(f"{name} must be a text, got {given!r}.")
    if not given:
        raise ValueError(f"{name} must not be empty, got ''. Leave it out for the default.")


def check_ratio(ratio: Any) -> float:
    """Return a scale schedule ratio.

    Raises:
        TypeError: The ratio is not a number.
        ValueError: The ratio is not finite and greater than 0.
    """
    if isinstance(ratio, bool) or not isinstance(ratio, numbers.Real):
        raise TypeError(f"scale_schedule_ratio must be a number, more than 0, got {ratio!r}.")
    if not 0 < float(ratio) < math.inf:
        raise ValueError(f"scale_schedule_ratio must be more than 0 and finite, got {ratio}.")
    return float(ratio)


def set_log_level(level: str | None) -> None:
    """Show the library's log records from a level of :mod:`logging` on; None changes nothing.

    Raises:
        ValueError: The level is unknown.
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
