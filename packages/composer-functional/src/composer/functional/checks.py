"""Checks of arguments: every error names the parameter, what was expected and the value."""

from __future__ import annotations

import numbers

import torch
from torch import Tensor, nn

__all__: list[str] = []


def is_whole(number: object) -> bool:
    """Return whether a value is an integer; booleans do not count as integers."""
    if type(number) is int:  # fast path: nearly always taken, at every step
        return True
    return isinstance(number, (numbers.Integral, torch.SymInt)) and not isinstance(number, bool)


def check_numbers(**values: object) -> None:
    """Raise a TypeError for every value that is not a number; strings, booleans and tensors are not numbers."""
    for name, number in values.items():
        if type(number) is float or type(number) is int:  # fast path: nearly always taken, at every step
            continue
        if isinstance(number, Tensor):
            raise TypeError(
                f"{name} must be a number, got a tensor. Read it once, outside the training step: float({name})."
            )
        if isinstance(number, bool) or not isinstance(number, (numbers.Real, torch.SymInt, torch.SymFloat)):
            raise TypeError(f"{name} must be a number, got {described(number)}. Convert it: float({name}).")


def check_interval(
    name: str, value: float, low: float, high: float, meaning: str, *, open_low: bool = False, open_high: bool = False
) -> None:
    """Raise an error for a value that is not a number between ``low`` and ``high``, both included unless open."""
    if type(value) is not float and type(value) is not int:
        check_numbers(**{name: value})
    is_inside = (low < value if open_low else low <= value) and (value < high if open_high else value <= high)
    if not is_inside:
        interval = f"{'(' if open_low else '['}{low}, {high}{')' if open_high else ']'}"
        raise ValueError(f"{name} must lie in {interval}, got {value}. {meaning}")


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


def check_flags(**values: object) -> None:
    """Raise a TypeError for every value that is neither True nor False; a non-empty string would count as true."""
    for name, flag in values.items():
        if not isinstance(flag, bool):
            raise TypeError(f"{name} must be True or False, got {described(flag)}.")


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


def described(value: object) -> str:
    """Return the ``repr`` of a short value, and the class name of anything else."""
    text = repr(value) if isinstance(value, (str, int, float, complex, list, tuple, type(None))) else ""
    return text if 0 < len(text) <= 40 else type(value).__name__
