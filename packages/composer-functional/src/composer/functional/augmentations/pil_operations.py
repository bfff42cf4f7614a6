"""Image operations on one PIL image, by Pillow; to be imported only where there is one."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from PIL import Image, ImageEnhance, ImageOps
from PIL.Image import Resampling, Transform
from torch import Tensor

from composer.functional.augmentations.batch_operations import sharpen
from composer.functional.augmentations.image_operations import mix_tensors

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

_Matrix = tuple[float, float, float, float, float, float]


def apply_to_pil(img: Image.Image, operations: list[int], magnitudes: list[float], interpolation: str) -> Image.Image:
    """Apply operations, given by their places in the list of names, one after the other."""
    resampling = Resampling[interpolation.upper()]
    for place, magnitude in zip(operations, magnitudes, strict=True):
        img = _FUNCTIONS[place](img, magnitude, resampling)
    return img


def mix_pil(img: Image.Image, chains: Sequence[Image.Image], weights: Sequence[float], mixing: float) -> Image.Image:
    """Give ``(1 - mixing) * img + mixing * (sum of weights * chains)``, rounded once."""
    mixed = mix_tensors(_unpack(img), [_unpack(chain) for chain in chains], weights, mixing)
    return _pack(mixed.round_(), img)


def _identity(img: Image.Image, _: float, __: Resampling) -> Image.Image:
    return img


def _autocontrast(img: Image.Image, _: float, __: Resampling) -> Image.Image:
    return ImageOps.autocontrast(img)


def _equalize(img: Image.Image, _: float, __: Resampling) -> Image.Image:
    return ImageOps.equalize(img)


def _posterize(img: Image.Image, bits: float, _: Resampling) -> Image.Image:
    return ImageOps.posterize(img, math.ceil(bits))


def _solarize(img: Image.Image, share: float, _: Resampling) -> Image.Image:
    return ImageOps.solarize(img, math.ceil(share * 256))


def _color(img: Image.Image, factor: float, _: Resampling) -> Image.Image:
    return ImageEnhance.Color(img).enhance(factor)


def _contrast(img: Image.Image, factor: float, _: Resampling) -> Image.Image:
    return ImageEnhance.Contrast(img).enhance(factor)


def _brightness(img: Image.Image, factor: float, _: Resampling) -> Image.Image:
    return ImageEnhance.Brightness(img).enhance(factor)


def _sharpness(img: Image.Image, factor: float, _: Resampling) -> Image.Image:
    # As ImageEnhance.Sharpness, in a third of the time: pixels lie side by side, three bytes from one to the next.
    stride = len(img.getbands())
    pixels = _unpack(img).float().view(1, 1, img.height, img.width * stride)
    return _pack(sharpen(pixels, torch.tensor([[factor]], device="cpu"), 255.0, stride), img)


def _rotate(img: Image.Image, degrees: float, resampling: Resampling) -> Image.Image:
    return img.rotate(degrees, resampling)


def _shear_x(img: Image.Image, slope: float, resampling: Resampling) -> Image.Image:
    return _transform(img, (1, slope, 0, 0, 1, 0), resampling)


def _shear_y(img: Image.Image, slope: float, resampling: Resampling) -> Image.Image:
    return _transform(img, (1, 0, 0, slope, 1, 0), resampling)


def _transform(img: Image.Image, matrix: _Matrix, resampling: Resampling) -> Image.Image:
    return img.transform(img.size, Transform.AFFINE, matrix, resampling)


def _translate_x(img: Image.Image, share: float, _: Resampling) -> Image.Image:
    pixels = int(share * img.width)
    return img.crop((-pixels, 0, img.width - pixels, img.height))


def _translate_y(img: Image.Image, share: float, _: Resampling) -> Image.Image:
    pixels = int(share * img.height)
    return img.crop((0, -pixels, img.width, img.height - pixels))


_FUNCTIONS: tuple[Callable[[Image.Image, float, Resampling], Image.Image], ...] = (
    _identity,
    _autocontrast,
    _equalize,
    _posterize,
    _solarize,
    _color,
    _contrast,
    _brightness,
    _sharpness,
    _rotate,
    _shear_x,
    _shear_y,
    _translate_x,
    _translate_y,
)


def _unpack(img: Image.Image) -> Tensor:
    return torch.frombuffer(bytearray(img.tobytes()), dtype=torch.uint8)


def _pack(pixels: Tensor, like: Image.Image) -> Image.Image:
    data = bytearray(pixels.numel())  # shared with torch; by NumPy it would be no faster
    torch.frombuffer(data, dtype=torch.uint8).copy_(pixels.flatten())
    return Image.frombytes(like.mode, like.size, bytes(data))
