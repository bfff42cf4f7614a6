"""Image operations on one PIL image; imported only if there is one, because it imports Pillow."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from PIL import Image, ImageEnhance, ImageOps
from PIL.Image import Resampling, Transform
from torch import Tensor

from composer.functional.augmentations.batch_operations import sharpen
from composer.functional.augmentations.operations import OPERATIONS, mix_tensors


def apply_to_pil(img: Image.Image, operations: list[int], magnitudes: list[float], interpolation: str) -> Image.Image:
    """Apply operations, by their indices in ``OPERATIONS``, one after the other."""
    resampling = Resampling[interpolation.upper()]
    for index, magnitude in zip(operations, magnitudes, strict=True):
        img = _FUNCTIONS[OPERATIONS[index]](img, magnitude, resampling)
    return img


def mix_pil(img: Image.Image, chains: Sequence[Image.Image], weights: Sequence[float], mixing: float) -> Image.Image:
    """Return ``(1 - mixing) * img + mixing * (sum of weights * chains)``, rounded once."""
    mixed = mix_tensors(_unpack(img), [_unpack(chain) for chain in chains], weights, mixing)
    return _pack(mixed.round_(), img)


def _sharpness(img: Image.Image, factor: float, _: Resampling) -> Image.Image:
    # As ImageEnhance.Sharpness, in a third of the time: the bytes of one channel are `stride` bytes apart.
    stride = len(img.getbands())
    pixels = _unpack(img).float().view(1, 1, img.height, img.width * stride)
    return _pack(sharpen(pixels, torch.tensor([[factor]], device="cpu"), 255.0, stride), img)


def _translate(img: Image.Image, right: int, down: int) -> Image.Image:
    return img.crop((-right, -down, img.width - right, img.height - down))


def _transform(img: Image.Image, matrix: tuple[float, ...], resampling: Resampling) -> Image.Image:
    return img.transform(img.size, Transform.AFFINE, matrix, resampling)


_FUNCTIONS: dict[str, Callable[[Image.Image, float, Resampling], Image.Image]] = {
    "identity": lambda img, _, __: img,
    "autocontrast": lambda img, _, __: ImageOps.autocontrast(img),
    "equalize": lambda img, _, __: ImageOps.equalize(img),
    "posterize": lambda img, bits, _: ImageOps.posterize(img, math.ceil(bits)),
    "solarize": lambda img, threshold, _: ImageOps.solarize(img, math.ceil(threshold * 256)),
    "color": lambda img, factor, _: ImageEnhance.Color(img).enhance(factor),
    "contrast": lambda img, factor, _: ImageEnhance.Contrast(img).enhance(factor),
    "brightness": lambda img, factor, _: ImageEnhance.Brightness(img).enhance(factor),
    "sharpness": _sharpness,
    "rotate": lambda img, degrees, resampling: img.rotate(degrees, resampling),
    "shear_x": lambda img, slope, resampling: _transform(img, (1, slope, 0, 0, 1, 0), resampling),
    "shear_y": lambda img, slope, resampling: _transform(img, (1, 0, 0, slope, 1, 0), resampling),
    "translate_x": lambda img, fraction, _: _translate(img, int(fraction * img.width), 0),
    "translate_y": lambda img, fraction, _: _translate(img, 0, int(fraction * img.height)),
}


def _unpack(img: Image.Image) -> Tensor:
    return torch.frombuffer(bytearray(img.tobytes()), dtype=torch.uint8)


def _pack(pixels: Tensor, like: Image.Image) -> Image.Image:
    data = bytearray(pixels.numel())  # shared with torch; NumPy would not be faster
    torch.frombuffer(data, dtype=torch.uint8).copy_(pixels.flatten())
    return Image.frombytes(like.mode, like.size, bytes(data))
