"""The image operations of RandAugment and AugMix by name: how they are chosen, and how strong they are."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from composer.functional.checks import check_numbers, described, is_whole
from composer.functional.random import check_generator

OPERATIONS = (
    "identity",
    "autocontrast",
    "equalize",
    "posterize",
    "solarize",
    "color",
    "contrast",
    "brightness",
    "sharpness",
    "rotate",
    "shear_x",
    "shear_y",
    "translate_x",
    "translate_y",
)
"""The names of the operations; a draw holds their places in this list."""

ENHANCEMENTS = ("color", "contrast", "brightness", "sharpness")
GEOMETRIC = ("rotate", "shear_x", "shear_y", "translate_x", "translate_y")

AugmentationSet = str | Sequence[Callable[[Any, float], Any]]
"""The name of a set, or functions that take an image and a level and return an image."""

_SETS = {
    "all": OPERATIONS[1:],
    "safe": tuple(name for name in OPERATIONS[1:] if name not in ENHANCEMENTS),
    "original": OPERATIONS[1:],
}

_Range = tuple[float, float, bool]
"""The magnitude at level 0, what ten levels add, and whether they take it away as often."""

_RANGES: dict[str, _Range] = {
    "autocontrast": (0.0, 0.0, False),
    "equalize": (0.0, 0.0, False),
    "posterize": (4.0, -4.0, False),
    "solarize": (1.0, -1.0, False),
    **dict.fromkeys(ENHANCEMENTS, (1.0, 0.9, True)),
    "rotate": (0.0, 30.0, True),
    **dict.fromkeys(("shear_x", "shear_y"), (0.0, 0.3, True)),
    **dict.fromkeys(("translate_x", "translate_y"), (0.0, 1 / 3, True)),
}
_ORIGINAL_RANGES = _RANGES | dict.fromkeys(ENHANCEMENTS, (0.1, 1.8, False))


def draw_operations(
    shape: tuple[int, ...], severity: float, augmentation_set: AugmentationSet, generator: torch.Generator | None
) -> tuple[Tensor, Tensor]:
    """Draw operations, int64, and their magnitudes, float32, both on the CPU; of functions, indices and levels."""
    check_severity(severity)
    check_generator(generator)
    check_augmentation_set(augmentation_set)
    rows = _rows(augmentation_set) if isinstance(augmentation_set, str) else None
    count = len(augmentation_set if rows is None else rows)
    choices = torch.randint(count, shape, generator=generator, device="cpu")
    levels = torch.rand(shape, generator=generator, device="cpu").mul_(severity)
    if rows is None:
        return choices, levels
    operations, starts, slopes = torch.tensor(rows, device="cpu")[choices].unbind(-1)
    return operations.long(), torch.addcmul(starts, slopes, levels)


def _rows(augmentation_set: str) -> list[tuple[int, float, float]]:
    """List each operation with either sign: its place, its magnitude at level 0, and what a level adds."""
    ranges = _ORIGINAL_RANGES if augmentation_set == "original" else _RANGES
    rows = []
    for name in _SETS[augmentation_set]:
        start, slope, is_signed = ranges[name]
        rows += [(OPERATIONS.index(name), start, sign * slope / 10) for sign in (1, -1 if is_signed else 1)]
    return rows


def check_whole(name: str, number: int, meaning: str, least: int = 0) -> None:
    """Refuse what is not a whole number, or less than the least."""
    if not is_whole(number):
        raise TypeError(f"{name} must be an int, got {described(number)}. It is {meaning}.")
    if number < least:
        raise ValueError(f"{name} must be at least {least}, got {number}. It is {meaning}.")


def check_severity(severity: float) -> None:
    """Refuse what is not a level."""
    check_numbers(severity=severity)
    if not 0 <= severity <= 10:
        raise ValueError(f"severity must lie in [0, 10], got {severity}. Levels are drawn from 0 up to it.")


def check_augmentation_set(augmentation_set: AugmentationSet) -> None:
    """Refuse what is neither the name of a set nor a list of functions."""
    if isinstance(augmentation_set, str):
        if augmentation_set not in _SETS:
            raise ValueError(f'augmentation_set must be "all", "safe" or "original", got {augmentation_set!r}.')
        return
    if not isinstance(augmentation_set, Sequence) or not all(map(callable, augmentation_set)):
        raise TypeError(
            'augmentation_set must be "all", "safe", "original" or a list of functions (image, level) -> image, '
            f"got {augmentation_set!r}."
        )
    if not augmentation_set:
        raise ValueError("augmentation_set must hold at least one function, got none.")
