"""What makes PIL images and tensors alike to a data loader, without importing Pillow."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from composer.functional.augmentations.operations import AugmentationSet


def check_image(img: Any, augmentation_set: AugmentationSet) -> None:
    """Refuse what is neither a grey or colour PIL image nor a tensor that the operations can change."""
    pillow = sys.modules.get("PIL.Image")  # if nobody imported it so far, this is not an image of its
    if pillow is not None and isinstance(img, pillow.Image):
        if img.mode not in {"RGB", "L"}:
            raise ValueError(f'img must have the mode "RGB" or "L", got {img.mode!r}. Convert it: img.convert("RGB").')
        if 0 in img.size:
            raise ValueError(f"img must have at least one pixel, got size {img.size}.")
    elif not isinstance(img, Tensor):
        raise TypeError(f"img must be a PIL image or a tensor (C, H, W), got {type(img).__name__}.")
    elif img.ndim != 3:
        raise ValueError(f"img must be one image (C, H, W), got shape {tuple(img.shape)}.")
    elif isinstance(augmentation_set, str):  # one's own functions know what they take
        if img.dtype != torch.uint8 and not img.is_floating_point():
            raise TypeError(f"img must be uint8, or floating point from 0 to 1, got {img.dtype}. Convert it first.")
        if img.shape[0] not in {1, 3} or not img.numel():
            raise ValueError(
                "img must be one image (C, H, W) with 1 or 3 channels and at least one pixel, "
                f"got shape {tuple(img.shape)}."
            )


def apply_functions(
    img: Any, functions: Sequence[Callable[[Any, float], Any]], choices: list[int], levels: list[float]
) -> Any:
    """Apply one's own functions, given by their indices, one after the other; a negative index is none."""
    for choice, level in zip(choices, levels, strict=True):
        if choice >= 0:
            img = functions[choice](img, level)
    return img


def mix_tensors(img: Tensor, chains: Sequence[Tensor], weights: Sequence[float], mixing: float) -> Tensor:
    """Give ``(1 - mixing) * img + mixing * (sum of weights * chains)``, in float32 if they are bytes."""
    mixed = img * (1 - mixing)
    for chain, weight in zip(chains, weights, strict=True):
        mixed.add_(chain, alpha=mixing * weight)
    return mixed
