"""Checks of arguments: every error names the parameter, what was expected and the value."""

from __future__ import annotations

import math
import numbers
from collections.abc import Sequence
from typing import TypeGuard, cast

import torch
from torch import Tensor, nn


def is_whole(number: object) -> bool:
    """Return whether a value is an integer; booleans do not count as integers."""
    if type(number) is int:  # fast path: nearly always taken, at every step
        return True
    return isinstance(number, (numbers.Integral, torch.SymInt)) and not isinstance(number, bool)


def check_number(name: str, number: object, meaning: str = "") -> None:
    """Raise a TypeError for a value that is not a number; strings, booleans and tensors are not numbers."""
    if type(number) is float or type(number) is int:  # fast path: nearly always taken, at every step
        return
    if isinstance(number, Tensor):
        raise TypeError(
            f"{name} must be a number, got a tensor. Read it once, outside the training step: float({name})."
        )
    if isinstance(number, bool) or not isinstance(number, (numbers.Real, torch.SymInt, torch.SymFloat)):
        raise TypeError(f"{name} must be a number, got {described(number)}. {meaning or f'Convert it: float({name}).'}")


def check_numbers(**values: object) -> None:
    """Raise a TypeError for every value that is not a number."""
    for name, number in values.items():
        check_number(name, number)


def check_interval(
    name: str, value: object, low: float, high: float, meaning: str, *, open_low: bool = False, open_high: bool = False
) -> None:
    """Raise an error for a value that is not a number between ``low`` and ``high``, both included unless open."""
    if type(value) is not float and type(value) is not int:
        check_number(name, value, meaning)
    number = cast("float", value)
    if not (low < number if open_low else low <= number) or not (number < high if open_high else number <= high):
        interval = f"lie in {'(' if open_low else '['}{low}, {high}{')' if open_high else ']'}"
        is_unbounded = high == math.inf and open_high
        wanted = f"be {'more than' if open_low else 'at least'} {low}" if is_unbounded else interval
        raise ValueError(f"{name} must {wanted}, got {value}. {meaning}")


def check_whole(name: str, number: object, least: int | None = None, meaning: str = "") -> None:
    """Raise an error for a value that is not an integer (booleans are not), or is less than ``least``."""
    if not is_whole(number):
        raise TypeError(f"{name} must be an int, got {described(number)}. {meaning or f'Convert it: int({name}).'}")
    if least is not None and number < least:  # type: ignore[operator]
        raise ValueError(f"{name} must be at least {least}, got {number}. {meaning}".rstrip())


def check_whole_numbers(**values: object) -> None:
    """Raise a TypeError for every value that is not an integer; booleans are not."""
    for name, number in values.items():
        check_whole(name, number)


def check_sizes(**values: object) -> None:
    """Raise an error for every value that is not an integer of at least 1."""
    for name, size in values.items():
        check_whole(name, size, 1)


def check_flag(name: str, flag: object) -> None:
    """Raise a TypeError for a value that is neither True nor False; a non-empty string would count as true."""
    if not isinstance(flag, bool):
        raise TypeError(f"{name} must be True or False, got {described(flag)}.")


def check_flags(**values: object) -> None:
    """Raise a TypeError for every value that is neither True nor False."""
    for name, flag in values.items():
        check_flag(name, flag)


def check_subset(name: str, subset: object) -> None:
    """Raise an error for a value that is not a number of batches; -1 are all of them."""
    if isinstance(subset, bool) or not isinstance(subset, int) or subset < -1 or not subset:
        kind = ValueError if type(subset) is int else TypeError
        raise kind(f"{name} must be a number of batches, or -1 for all, got {subset!r}.")


def check_string(name: str, value: object) -> None:
    """Raise an error for a value that is not a string of one character or more."""
    if not isinstance(value, str):
        raise TypeError(f"{name} must be a string, got {described(value)}.")
    if not value:
        raise ValueError(f"{name} must not be empty, got ''.")


def check_choice(name: str, value: object, *choices: object) -> None:
    """Raise a ValueError for a value that is none of the choices."""
    if value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, choices))}, got {value!r}.")


def check_tensors(**values: object) -> None:
    """Raise a TypeError for every value that is not a tensor."""
    for name, tensor in values.items():
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{name} must be a tensor, got {described(tensor)}.")


def check_float_tensors(**values: object) -> None:
    """Raise a TypeError for every value that is not a floating-point tensor."""
    for name, tensor in values.items():
        if not isinstance(tensor, Tensor) or not tensor.is_floating_point():
            kind = tensor.dtype if isinstance(tensor, Tensor) else type(tensor).__name__
            raise TypeError(f"{name} must be a floating point tensor, got {kind}.")


def is_module_class(value: object) -> TypeGuard[type[nn.Module]]:
    """Return whether a value is a class of modules."""
    return isinstance(value, type) and issubclass(value, nn.Module)


def check_modules(**values: object) -> None:
    """Raise a TypeError for every value that is not a module."""
    for name, module in values.items():
        if not isinstance(module, nn.Module):
            raise TypeError(f"{name} must be a torch.nn.Module, got {type(module).__name__}.")


def check_callables(**values: object) -> None:
    """Raise a TypeError for every value that is not callable."""
    for name, function in values.items():
        if not callable(function):
            raise TypeError(f"{name} must be callable, got {described(function)}.")


def check_pairs(**values: object) -> None:
    """Raise a TypeError for every value that is not two integers, such as a height and a width."""
    for name, pair in values.items():
        if not isinstance(pair, (tuple, list)) or len(pair) != 2 or not all(map(is_whole, pair)):
            raise TypeError(f"{name} must be two ints, along the height and the width, got {described(pair)}.")


def check_pixels(**values: object) -> None:
    """Raise a TypeError for every value that is neither an integer nor two of them, such as a stride."""
    for name, pixels in values.items():
        (check_pairs if isinstance(pixels, (tuple, list)) else check_whole_numbers)(**{name: pixels})


def few(names: Sequence[str]) -> str:
    """Return the first three names, and the number of the others, for errors."""
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "") or "none"


def described(value: object) -> str:
    """Return the ``repr`` of a short value, and the class name of anything else."""
    text = repr(value) if isinstance(value, (str, int, float, complex, list, tuple, type(None))) else ""
    return text if 0 < len(text) <= 40 else type(value).__name__
