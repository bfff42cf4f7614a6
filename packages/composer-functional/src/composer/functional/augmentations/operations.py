"""The image operations of RandAugment and AugMix: their names, draws and magnitudes, and checks of images."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from composer.functional.augmentations.cutout import is_pil
from composer.functional.checks import check_interval
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
"""The names of the operations; draws contain their indices in this list."""

ENHANCEMENTS = ("color", "contrast", "brightness", "sharpness")
GEOMETRIC = ("rotate", "shear_x", "shear_y", "translate_x", "translate_y")

AugmentationSet = str | Sequence[Callable[[Any, float], Any]]
"""The name of a set, or functions that take an image and a level and return an image."""

_SETS = {
    "all": OPERATIONS[1:],
    # The operations of AugMix's paper, without those that overlap with the corruptions of ImageNet-C.
    "safe": tuple(name for name in OPERATIONS[1:] if name not in ENHANCEMENTS),
    "original": OPERATIONS[1:],
}

_Range = tuple[float, float, bool]
"""The magnitude at level 0, the change over ten levels, and whether its sign is random."""

# The ranges of AugMix's reference implementation, except for enhancements: there their factors are from 0.1 to 1.9, so
# that level 0 is not the identity (the set "original"); here they are 1 plus or minus up to 0.9.
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
    """Draw operations, int64, and their magnitudes, float32, both on the CPU; for functions, indices and levels."""
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
    """List each operation with both signs: its index, its magnitude at level 0, and the change per level."""
    ranges = _ORIGINAL_RANGES if augmentation_set == "original" else _RANGES
    rows = []
    for name in _SETS[augmentation_set]:
        start, slope, is_signed = ranges[name]
        # Operations without a sign are listed twice, too, so that all operations are equally likely.
        rows += [(OPERATIONS.index(name), start, sign * slope / 10) for sign in (1, -1 if is_signed else 1)]
    return rows


def check_severity(severity: float) -> None:
    """Raise an error for a severity that is not a level."""
    check_interval("severity", severity, 0, 10, "Levels are drawn from 0 to the severity.")


def check_augmentation_set(augmentation_set: AugmentationSet) -> None:
    """Raise an error for a value that is neither the name of a set nor a list of functions."""
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


def check_named_set(augmentation_set: object, image_function: str) -> None:
    """Raise an error for functions, which are not for batches."""
    if not isinstance(augmentation_set, str):
        raise TypeError(
            'augmentation_set must be "all", "safe" or "original" for a batch, '
            f"got {type(augmentation_set).__name__}. Functions are for {image_function}."
        )


def check_images(images: Tensor, name: str = "input", ndim: int = 4) -> None:
    """Raise an error for a value that is not a batch of grey or colour images, or with three dimensions one image."""
    kind = "a batch (N, C, H, W)" if ndim == 4 else "one image (C, H, W)"
    if not isinstance(images, Tensor):
        raise TypeError(f"{name} must be a tensor (N, C, H, W), got {type(images).__name__}.")
    if images.dtype != torch.uint8 and not images.is_floating_point():
        raise TypeError(f"{name} must be uint8, or floating point from 0 to 1, got {images.dtype}. Convert it first.")
    if images.ndim != ndim or images.shape[-3] not in {1, 3} or not images.numel():
        raise ValueError(
            f"{name} must be {kind} with 1 or 3 channels and at least one pixel, got shape {tuple(images.shape)}."
        )


def check_image(img: Any, augmentation_set: AugmentationSet) -> None:
    """Raise an error for a value that is neither a grey or colour PIL image nor a tensor that operations support."""
    if is_pil(img):
        if img.mode not in {"RGB", "L"}:
            raise ValueError(f'img must have the mode "RGB" or "L", got {img.mode!r}. Convert it: img.convert("RGB").')
        if 0 in img.size:
            raise ValueError(f"img must have at least one pixel, got size {img.size}.")
    elif not isinstance(img, Tensor):
        raise TypeError(f"img must be a PIL image or a tensor (C, H, W), got {type(img).__name__}.")
    elif img.ndim not in {3, 4}:
        raise ValueError(f"img must be one image (C, H, W) or a batch (N, C, H, W), got shape {tuple(img.shape)}.")
    elif isinstance(augmentation_set, str):  # functions of the user may support other tensors
        check_images(img, "img", img.ndim)


def mix_tensors(img: Tensor, chains: Sequence[Tensor], weights: Sequence[float], mixing: float) -> Tensor:
    """Return ``(1 - mixing) * img + mixing * (sum of weights * chains)``, in float32 for uint8."""
    mixed = img * (1 - mixing)
    for chain, weight in zip(chains, weights, strict=True):
        mixed.add_(chain, alpha=mixing * weight)
    return mixed
