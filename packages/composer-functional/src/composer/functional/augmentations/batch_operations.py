"""Image operations on batches of tensors, with a separate magnitude for each sample.

The operations take images ``(n, C, H, W)`` from 0 to ``bound``, **which they may change in place**, and six numbers per
image: either the magnitude first, or the two rows of an affine matrix. With a ``bound`` of 255, pixels are integers and
are rounded as by torchvision's operations on uint8.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import grid_sample

from composer.functional.augmentations.operations import GEOMETRIC, OPERATIONS
from composer.functional.random import send

_BYTE = 255.0
_FIRST_GEOMETRIC = OPERATIONS.index(GEOMETRIC[0])
_WHOLE_PIXELS = ("translate_x", "translate_y")
_PIXELS_AT_ONCE = 2**21  # 32 images of 224 x 224 take half the time for AugMix, two thirds for RandAugment

_Operation = Callable[[Tensor, Tensor, float], Tensor]


def map_samples(function: Callable[..., Tensor], input: Tensor, *draws: Tensor, copies: int = 1) -> Tensor:
    """Call ``function(images, bound, *draws)`` with the images in float32 or float64, and convert the result back.

    On the CPU it is called for a few large samples at a time, so that they stay in the cache between operations.

    Args:
        function: Returns images of the same shape and dtype; it must not change its input.
        input: The images, uint8 or floating point.
        draws: Tensors with the samples in their last dimension.
        copies: The number of images that the function creates from each image.

    Returns:
        A new tensor with the shape, dtype and memory format of ``input``.
    """
    output = torch.empty_like(input)
    dtype = torch.promote_types(input.dtype, torch.float32)
    bound = 1.0 if input.is_floating_point() else _BYTE
    count = input.shape[0]
    is_split = input.device.type == "cpu" and not torch.compiler.is_compiling()
    at_once = max(_PIXELS_AT_ONCE // (copies * input[0].numel()), 1) if is_split else count
    for start in range(0, count, at_once):
        rows = slice(start, start + at_once)
        output[rows] = function(input[rows].to(dtype), bound, *(draw[..., rows] for draw in draws))
    return output


def check_draws(operations: Tensor, magnitudes: Tensor, dims: tuple[int, ...]) -> None:
    """Raise an error for draws for another number of samples, or on a device: reading them would wait for it."""
    if operations.shape != magnitudes.shape or operations.shape[1:] != dims:
        raise ValueError(
            f"draws must hold operations and magnitudes of shape (depth, {', '.join(map(str, dims))}), "
            f"got {tuple(operations.shape)} and {tuple(magnitudes.shape)}."
        )
    if operations.device.type != "cpu" or magnitudes.device.type != "cpu":
        raise ValueError(f"draws must be on the CPU, got {operations.device}. They are moved where they are needed.")


def apply_steps(images: Tensor, bound: float, operations: Tensor, magnitudes: Tensor, *, interpolation: str) -> Tensor:
    """Apply to each image its own operations, one after the other.

    Args:
        images: The images, shape ``(n, C, H, W)``, float32 or float64, from 0 to ``bound``.
        bound: 1, or 255 for integers.
        operations: Indices in ``OPERATIONS``, shape ``(steps, m)``, int64, on the CPU; at least one step. ``m`` may be
            a multiple of ``n``: the images are repeated.
        magnitudes: Their magnitudes, same shape, float32, on the CPU.
        interpolation: ``"nearest"`` or ``"bilinear"``, for geometric operations.

    Returns:
        The changed images, shape ``(m, C, H, W)``, same dtype.
    """
    numbers = _numbers(operations, magnitudes, *images.shape[-2:]).to(images.dtype)
    groups = torch.tensor(_GROUPS, device="cpu")[operations]
    # A translation by whole pixels needs no interpolation, which takes three times as long.
    warps: tuple[_Operation, ...] = (partial(_warp, mode=interpolation), partial(_warp, mode="nearest"))
    if torch.compiler.is_compiling():
        return _apply_everywhere(images, groups, numbers, (*_POINTWISE, *warps), bound)
    return _apply_to_groups(images, groups, numbers, (*_POINTWISE, *warps), bound)


def _apply_to_groups(
    images: Tensor, groups: Tensor, numbers: Tensor, functions: tuple[_Operation, ...], bound: float
) -> Tensor:
    """In each step, group the samples by operation; everything that depends on the draw is computed on the CPU."""
    order = groups.argsort(dim=1, stable=True)
    ranks = order.argsort(dim=1)
    # The position of each step's samples among those of the previous step, and their final positions.
    positions = torch.cat((order[:1] % len(images), ranks[:-1].gather(1, order[1:]), ranks[-1:]))
    positions = send(positions, images.device)
    numbers = send(numbers.gather(1, order[..., None].expand_as(numbers)), images.device)
    for step, row in enumerate(groups):
        sizes = torch.bincount(row, minlength=len(functions)).tolist()
        parts, start = [], 0
        for function, size in zip(functions, sizes, strict=True):
            if size:
                members = slice(start, start + size)
                chosen = images.index_select(0, positions[step, members])
                parts.append(function(chosen, numbers[step, members], bound))
                start += size
        images = torch.cat(parts)
    return images.index_select(0, positions[-1])


def _apply_everywhere(
    images: Tensor, groups: Tensor, numbers: Tensor, functions: tuple[_Operation, ...], bound: float
) -> Tensor:
    """Apply every operation to every sample and select, so that one compiled graph works for all draws."""
    images = images.repeat(groups.shape[1] // len(images), 1, 1, 1)
    for group, strengths in zip(groups.to(images.device), numbers.to(images.device), strict=True):
        chosen = images
        for index, function in enumerate(functions[1:], 1):
            is_member = (group == index)[:, None, None, None]
            # A copy, because operations may change their input in place.
            chosen = torch.where(is_member, function(images.clone(), strengths, bound), chosen)
        images = chosen
    return images


def _identity(images: Tensor, _: Tensor, __: float) -> Tensor:
    return images


def _autocontrast(images: Tensor, _: Tensor, bound: float) -> Tensor:
    low, high = images.amin((2, 3), keepdim=True), images.amax((2, 3), keepdim=True)
    # A channel with a single value does not change, as in Pillow, instead of being divided by zero.
    is_flat = low == high
    low, scale = low.masked_fill(is_flat, 0), ((high - low) / bound).masked_fill(is_flat, 1)
    return _whole(images.sub(low).div_(scale).clamp_(0, bound), bound)


def _equalize(images: Tensor, _: Tensor, bound: float) -> Tensor:
    pixels = _bytes(images, bound).flatten(2).long()
    one = torch.ones((), dtype=torch.int32, device=images.device)
    histogram = torch.zeros((*images.shape[:2], 256), dtype=torch.int32, device=images.device)
    histogram.scatter_add_(2, pixels, one.expand_as(pixels))
    up_to = histogram.cumsum(2)
    last = histogram.gather(2, up_to.argmax(2, keepdim=True))  # the brightest pixels do not count, as in PIL
    step = (pixels.shape[2] - last) // 255
    # ImageOps.equalize in closed form: (pixels darker than the value + step // 2) // step.
    table = ((up_to - histogram + step // 2) // step.clamp(min=1)).clamp(max=255)
    table = torch.where(step == 0, torch.arange(256, device=images.device), table)
    return (table.to(images.dtype) / (_BYTE / bound)).gather(2, pixels).view_as(images)


def _posterize(images: Tensor, numbers: Tensor, bound: float) -> Tensor:
    width = torch.exp2(8 - _first(numbers).ceil())
    return _bytes(images, bound).div_(width).floor_().div_(_BYTE / bound / width)


def _solarize(images: Tensor, numbers: Tensor, bound: float) -> Tensor:
    is_bright = images.detach().clone().ge_(_first(numbers) * (256 / _BYTE * bound))
    # |bound - x| inverts bright pixels, and |0 - x| keeps the others: no selection by a mask is needed.
    return is_bright.mul_(bound).sub_(images).abs_()


def _color(images: Tensor, numbers: Tensor, bound: float) -> Tensor:
    return images if images.shape[1] == 1 else _blend(_grey(images, bound), images, numbers, bound)


def _contrast(images: Tensor, numbers: Tensor, bound: float) -> Tensor:
    return _blend(_grey(images, bound).mean((1, 2, 3), keepdim=True), images, numbers, bound)


def _brightness(images: Tensor, numbers: Tensor, bound: float) -> Tensor:
    return _whole(images.mul_(_first(numbers)).clamp_(0, bound), bound)


def sharpen(images: Tensor, numbers: Tensor, bound: float, stride: int = 1) -> Tensor:
    """Blend inner pixels with a smoothing kernel (weights 1, centre 5); neighbours are ``stride`` columns apart."""
    # With slices, because a depthwise convolution takes 5 to 30 times as long on the CPU.
    columns = images[:, :, :-2] + images[:, :, 1:-1]
    columns += images[:, :, 2:]
    smooth = columns[..., : -2 * stride] + columns[..., stride:-stride]
    smooth += columns[..., 2 * stride :]
    inside = images[:, :, 1:-1, stride:-stride]
    # The sum of the nine pixels contains the centre once; with 4 more its weight is 5 of 13, as in Pillow's SMOOTH.
    smooth.add_(inside, alpha=4).div_(13)
    if bound == _BYTE:
        smooth.round_()
    inside.copy_(_blend(smooth, inside, numbers, bound))
    return images


def _warp(images: Tensor, numbers: Tensor, bound: float, mode: str) -> Tensor:
    height, width = images.shape[-2:]
    # The centres of the output's pixels in coordinates of grid_sample, where -1 and 1 are the edges of the image.
    x = torch.arange(1 - width, width, 2, dtype=images.dtype, device=images.device) / width
    y = torch.arange(1 - height, height, 2, dtype=images.dtype, device=images.device) / height
    xx, xy, x0, yx, yy, y0 = numbers[..., None].unbind(1)
    # On the CPU this takes a quarter of the time of torch.stack and a tenth of that of affine_grid.
    grid = torch.empty((len(images), height, width, 2), dtype=images.dtype, device=images.device)
    grid[..., 0] = (xx * x)[:, None, :] + (xy * y + x0)[:, :, None]
    grid[..., 1] = (yx * x)[:, None, :] + (yy * y + y0)[:, :, None]
    warped = grid_sample(images, grid, mode, "zeros", align_corners=False)
    return warped.round_() if bound == _BYTE else warped


_POINTWISE: tuple[_Operation, ...] = (
    _identity,
    _autocontrast,
    _equalize,
    _posterize,
    _solarize,
    _color,
    _contrast,
    _brightness,
    sharpen,
)
# The index of each operation's function; the operations that interpolate share one, as do the translations.
_GROUPS = [min(index, _FIRST_GEOMETRIC) + (name in _WHOLE_PIXELS) for index, name in enumerate(OPERATIONS)]


def _blend(start: Tensor, end: Tensor, numbers: Tensor, bound: float) -> Tensor:
    return _whole(torch.lerp(start, end, _first(numbers)).clamp_(0, bound), bound)


def _grey(images: Tensor, bound: float) -> Tensor:
    if images.shape[1] == 1:
        return images
    red, green, blue = images.chunk(3, dim=1)  # ITU-R BT.601 weights, with torchvision's digits
    return _whole(red.mul(0.2989).add_(green, alpha=0.587).add_(blue, alpha=0.114), bound)


def _bytes(images: Tensor, bound: float) -> Tensor:
    # Just below 256: k / 255 becomes k however it was rounded, and 1 becomes 255.
    return images if bound == _BYTE else images.mul_(255.999).clamp_(0, _BYTE).floor_()


def _whole(images: Tensor, bound: float) -> Tensor:
    return images.floor_() if bound == _BYTE else images


def _first(numbers: Tensor) -> Tensor:
    return numbers[:, :1, None, None]


def _numbers(operations: Tensor, magnitudes: Tensor, height: int, width: int) -> Tensor:
    """Return the magnitudes, or the affine matrices from output to input in coordinates from -1 to 1."""
    magnitudes = magnitudes.double()
    angle, shear_x, shear_y, move_x, move_y = (
        magnitudes.where(operations == OPERATIONS.index(name), 0) for name in GEOMETRIC
    )
    angle = angle.deg2rad()
    # In coordinates from -1 to 1, x and y have different units if the image is not square.
    ratio = height / width
    x0 = shear_x * ratio - (move_x * width).trunc() * (2 / width)
    y0 = shear_y / ratio - (move_y * height).trunc() * (2 / height)
    xy, yx = (shear_x - angle.sin()) * ratio, (shear_y + angle.sin()) / ratio
    matrix = torch.stack((angle.cos(), xy, x0, yx, angle.cos(), y0), -1)
    return torch.where((operations >= _FIRST_GEOMETRIC)[..., None], matrix, magnitudes[..., None])
