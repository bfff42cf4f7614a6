"""Suggestions for arguments that have another name in other trainers."""

from __future__ import annotations

import functools
import inspect
import tomllib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from composer.core.checks import nearest

P = ParamSpec("P")
R = TypeVar("R")


@functools.cache
def names_elsewhere() -> dict[str, str]:
    """Return what to use here, by its names in other libraries."""
    table = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
    return {name: ours for ours, names in table.items() for name in names}


def suggests_names(function: Callable[P, R]) -> Callable[P, R]:
    """Make a method of the trainer raise errors for unknown arguments that suggest the right ones.

    An error of a connection to other processes gets a note that all of them must call the method. The signature does
    not change for :mod:`inspect` and type checkers.

    Example:
        >>> class Trainer:
        ...     @suggests_names
        ...     def __init__(self, *, optimizers=None): ...
        >>> Trainer(optimizer=3)
        Traceback (most recent call last):
        TypeError: Trainer has no argument 'optimizer': use optimizers.
    """
    parameters = inspect.signature(function).parameters
    most = sum(one.kind is not inspect.Parameter.KEYWORD_ONLY for one in parameters.values())

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        # Before the call, because the TypeError of Python names only the first unknown argument.
        if not kwargs.keys() <= parameters.keys() or len(args) > most:
            _raise_call_error(function.__name__, args, kwargs, list(parameters)[1:], most)
        try:
            return function(*args, **kwargs)
        except RuntimeError as error:
            if "gloo/" in str(error) or "NCCL" in str(error):
                error.add_note(
                    f"Another process did not answer: it has failed, or it has not called {function.__name__}(), which "
                    "all processes must call, not only that of rank 0."
                )
            raise

    return call


def missing_attribute(trainer: object, name: str) -> AttributeError:
    """Return the error for an attribute that does not exist; it suggests a method.

    Example:
        >>> missing_attribute(3, "train")
        AttributeError("'int' object has no attribute 'train'; use fit().")
    """
    ours = names_elsewhere().get(name)
    methods = [method for method in dir(type(trainer)) if not method.startswith("_")]
    hint = nearest(name, methods) if ours is None else f"; use {ours}."
    return AttributeError(f"{type(trainer).__name__!r} object has no attribute {name!r}{hint}", name=name, obj=trainer)


def _raise_call_error(name: str, args: tuple[Any, ...], kwargs: Iterable[str], own: list[str], most: int) -> None:
    trainer = type(args[0])
    called = trainer.__name__ if name == "__init__" else f"{name}()"
    if len(args) > most:
        raise TypeError(
            f"{called} takes its arguments by name, such as {own[most - 1]}=..., got {len(args) - most} without a name."
        )
    of_trainer = [] if name == "__init__" else list(inspect.signature(trainer).parameters)
    see = f"see help({trainer.__name__ if name == '__init__' else f'{trainer.__name__}.{name}'})."
    unknown = [f"{one!r}: {_hint(one, own, of_trainer) or see}" for one in kwargs if one not in own]
    raise TypeError(f"{called} has no argument {' It has no argument '.join(unknown)}")


def _hint(unknown: str, own: list[str], of_trainer: list[str]) -> str:
    ours, close = names_elsewhere().get(unknown), nearest(unknown, own, "", similarity=0.7)
    if ours is not None and ours.startswith("nothing"):
        return f"it is replaced by {ours}."
    if unknown in of_trainer:
        return f"give it to the Trainer{close or '.'}"
    if ours is not None and (not close or ours.startswith("the model") or ours.split(",")[0] in own):
        return f"use {ours}."
    return close.removeprefix("; ")
