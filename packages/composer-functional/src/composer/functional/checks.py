"""Checks of what arguments are, in a sentence that names the parameter; ranges are checked where they are defined."""

from __future__ import annotations

import numbers

import torch
from torch import Tensor

__all__: list[str] = []


def is_whole(number: object) -> bool:
    """Return whether it is a whole number; booleans are none."""
    if type(number) is int:  # nearly always, at every step
        return True
    return isinstance(number, (numbers.Integral, torch.SymInt)) and not isinstance(number, bool)


def check_numbers(**given: object) -> None:
    """Raise a TypeError for what is not a number; texts, booleans and tensors are none."""
    for name, number in given.items():
        if type(number) is float or type(number) is int:  # nearly always, at every step
            continue
        if isinstance(number, bool) or not isinstance(number, (numbers.Real, torch.SymInt, torch.SymFloat)):
            raise TypeError(f"{name} must be a number, got {described(number)}. Convert it: float({name}).")


def check_whole_numbers(**given: object) -> None:
    """Raise a TypeError for what is not a whole number; booleans are none."""
    for name, number in given.items():
        if not is_whole(number):
            raise TypeError(f"{name} must be an int, got {described(number)}. Convert it: int({name}).")


def check_sizes(**given: object) -> None:
    """Raise an error for what is not a whole number of at least 1."""
    check_whole_numbers(**given)
    for name, size in given.items():
        if isinstance(size, int) and size < 1:
            raise ValueError(f"{name} must be at least 1, got {size}.")


def check_flags(**given: object) -> None:
    """Raise a TypeError for what is neither True nor False: every text counts as true."""
    for name, flag in given.items():
        if not isinstance(flag, bool):
            raise TypeError(f"{name} must be True or False, got {described(flag)}.")


def check_tensors(**given: object) -> None:
    """Raise a TypeError for what is not a tensor."""
    for name, tensor in given.items():
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{name} must be a tensor, got {described(tensor)}.")


def check_callables(**given: object) -> None:
    """Raise a TypeError for what cannot be called."""
    for name, function in given.items():
        if not callable(function):
            raise TypeError(f"{name} must be callable, got {described(function)}.")


def check_pairs(**given: object) -> None:
    """Raise a TypeError for what is not two whole numbers, such as a height and a width."""
    for name, pair in given.items():
        if not isinstance(pair, (tuple, list)) or len(pair) != 2 or not all(map(is_whole, pair)):
            raise TypeError(f"{name} must be two ints, along the height and the width, got {described(pair)}.")


def check_pixels(**given: object) -> None:
    """Raise a TypeError for what is neither a whole number nor two of them, such as a stride."""
    for name, pixels in given.items():
        (check_pairs if isinstance(pixels, (tuple, list)) else check_whole_numbers)(**{name: pixels})


def described(value: object) -> str:
    """Return a short value as it is written, and of anything else the class."""
    text = repr(value) if isinstance(value, (str, int, float, complex, list, tuple, type(None))) else ""
    return text if 0 < len(text) <= 40 else type(value).__name__
