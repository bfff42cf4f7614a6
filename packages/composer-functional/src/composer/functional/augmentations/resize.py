"""Progressive resizing: train on small images first, as in fast.ai."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import interpolate

from composer.functional.augmentations.colout import scaled_size, select_rows_and_columns
from composer.functional.augmentations.cutout import check_images
from composer.functional.checks import check_choice, check_flags, check_interval, check_pairs
from composer.functional.random import check_generator


def draw_corner(
    size: tuple[int, int], crop_size: tuple[int, int], *, generator: torch.Generator | None = None
) -> tuple[int, int]:
    """Draw the position of a crop within an image, uniformly.

    Args:
        size: The image's height and width in pixels.
        crop_size: The crop's height and width in pixels, at most the image's.
        generator: The random generator, on the CPU; torch's default generator if ``None``.

    Returns:
        The crop's first row and first column.

    Raises:
        ValueError: The crop is larger than the image, or ``generator`` is not on the CPU.

    Example:
        >>> row, column = draw_corner((32, 32), (24, 32), generator=torch.Generator().manual_seed(17))
        >>> 0 <= row <= 8, column
        (True, 0)
    """
    check_pairs(size=size, crop_size=crop_size)
    if not (1 <= crop_size[0] <= size[0] and 1 <= crop_size[1] <= size[1]):
        raise ValueError(
            f"crop_size must be at least 1 and at most the image's height and width {tuple(size)}, "
            f"got {tuple(crop_size)}."
        )
    check_generator(generator)
    across, along = torch.rand(2, generator=generator, dtype=torch.float64, device="cpu").tolist()
    return int(across * (size[0] - crop_size[0] + 1)), int(along * (size[1] - crop_size[1] + 1))


def resize_batch(
    input: Tensor,
    target: Any,
    scale_factor: float | tuple[float, float],
    mode: str = "resize",
    resize_targets: bool = False,
    *,
    corner: tuple[int, int] | None = None,
    generator: torch.Generator | None = None,
) -> tuple[Tensor, Any]:
    """Reduce the size of the images of a batch, and of masks.

    The new height and width are ``scale_factor`` times the old, rounded down, at least 1.

    ``"resize"`` interpolates images and floating-point masks bilinearly between the centres of pixels; integer and
    boolean masks get the value of the nearest pixel. ``"crop"`` crops all images and masks at the same position, which
    is scaled and rounded for masks of another size.
    Coordinates, such as bounding boxes and key points, are not supported as targets to resize.

    Args:
        input: Images, shape ``(N, C, H, W)``; floating point for ``"resize"``, any dtype for ``"crop"``.
        target: Masks, shape ``(N, H', W')`` or ``(N, K, H', W')``, if ``resize_targets``; otherwise any object. Their
            size may be another one than that of the images, with its aspect ratio up to a pixel.
        scale_factor: The new height and width as a fraction of the old, in ``(0, 1]``, or one for each; 1 is the
            identity.
        mode: ``"resize"`` or ``"crop"``.
        resize_targets: Whether to resize the target as well; otherwise it is returned unchanged.
        corner: The crop's first row and column. Drawn by :func:`draw_corner` if ``None``; not used by ``"resize"``.
        generator: The random generator, on the CPU; torch's default generator if ``None``.

    Returns:
        ``(input, target)``: new tensors with the same dtype and memory format; or the arguments, if the size does not
        change.

    Raises:
        TypeError: ``input`` is not a tensor, or not floating point and to be interpolated; the target to be resized is
            not a tensor; ``scale_factor`` is a tensor; or ``corner`` is not two ints.
        ValueError: ``input`` has another shape or no pixels; ``scale_factor`` lies outside ``(0, 1]``; ``mode`` is
            neither of the two; the target to be resized has another shape; or the crop at ``corner``
            does not lie within the image.

    Example:
        >>> images, masks = torch.rand(8, 3, 32, 32), torch.zeros(8, 32, 32, dtype=torch.int64)
        >>> smaller, smaller_masks = resize_batch(images, masks, 0.75, resize_targets=True)
        >>> smaller.shape, smaller_masks.shape
        (torch.Size([8, 3, 24, 24]), torch.Size([8, 24, 24]))
        >>> resize_batch(images, None, 0.5, mode="crop", corner=(0, 16))[0].equal(images[..., :16, 16:])
        True
    """
    _check_settings(input, scale_factor, mode)
    check_flags(resize_targets=resize_targets)
    check_generator(generator)
    if corner is not None:
        check_pairs(corner=corner)
    if resize_targets:
        _check_target(target, input)
    old, size = (input.shape[2], input.shape[3]), _scaled(input, scale_factor)
    if size == old:
        return input, target
    if mode == "resize":
        return _interpolate(input, size), _resize_mask(target, scale_factor) if resize_targets else target
    if corner is None:
        corner = draw_corner(old, size, generator=generator)
    last = (old[0] - size[0], old[1] - size[1])
    if not (0 <= corner[0] <= last[0] and 0 <= corner[1] <= last[1]):
        raise ValueError(f"corner must lie between (0, 0) and {last} for the crop to lie within, got {tuple(corner)}.")
    return _crop(input, corner, size), _crop_mask(target, corner, old, scale_factor) if resize_targets else target


def _scaled(images: Tensor, scale: float | tuple[float, float]) -> tuple[int, int]:
    of_height, of_width = scale if isinstance(scale, tuple) else (scale, scale)
    return scaled_size(of_height, images.shape[-2]), scaled_size(of_width, images.shape[-1])


def _interpolate(images: Tensor, size: tuple[int, int]) -> Tensor:
    return interpolate(images, size=size, mode="bilinear", align_corners=False)


def _resize_mask(mask: Tensor, scale: float | tuple[float, float]) -> Tensor:
    size = _scaled(mask, scale)
    if mask.is_floating_point():
        return _interpolate(mask, size) if mask.ndim == 4 else _interpolate(mask.unsqueeze(1), size).squeeze(1)
    # torch's interpolate supports no integers other than uint8.
    rows, columns = (_nearest(old, new, mask.device) for old, new in zip(mask.shape[-2:], size, strict=True))
    return select_rows_and_columns(mask, rows, columns)


def _nearest(old: int, new: int, device: torch.device) -> Tensor:
    """Return the pixel that contains the centre of each new one: floor((i + 1/2) * old / new)."""
    return (2 * torch.arange(new, device=device) + 1) * old // (2 * new)


def _crop(images: Tensor, corner: tuple[int, int], size: tuple[int, int]) -> Tensor:
    (row, column), (height, width) = corner, size
    return images[..., row : row + height, column : column + width].clone()


def _crop_mask(
    mask: Tensor, corner: tuple[int, int], size: tuple[int, int], scale: float | tuple[float, float]
) -> Tensor:
    """Crop masks where images of ``size`` are cropped at ``corner``; masks may have another size than the images."""
    new = _scaled(mask, scale)
    row, column = (
        min(round(start * old / whole), old - crop)
        for start, whole, old, crop in zip(corner, size, mask.shape[-2:], new, strict=True)
    )
    return _crop(mask, (row, column), new)


def _check_settings(input: Tensor, scale_factor: float | tuple[float, float], mode: str) -> None:
    check_images(input, "(N, C, H, W)", (4,))
    for scale in scale_factor if isinstance(scale_factor, tuple) else (scale_factor,):
        check_interval("scale_factor", scale, 0, 1, "It is the new size as a fraction of the old.", open_low=True)
    check_choice("mode", mode, "resize", "crop")
    if mode == "resize" and not input.is_floating_point():
        raise TypeError(
            f"input must be floating point to be interpolated, got {input.dtype}. "
            'Convert it first, as by input.float(), or use mode="crop".'
        )


def _check_target(target: Any, input: Tensor) -> None:
    remedy = "Pass resize_targets=False to return it unchanged."
    if not isinstance(target, Tensor):
        raise TypeError(f"target must be a tensor of masks to be resized, got {type(target).__name__}. {remedy}")
    height, width = input.shape[2:]
    is_mask = target.ndim in {3, 4} and len(target) == len(input) and target.numel() > 0
    # Coordinates of boxes and the like should not pass for masks.
    if not is_mask or abs(target.shape[-2] * width - target.shape[-1] * height) >= max(height, width):
        raise ValueError(
            f"target must be masks of shape ({len(input)}, {height}, {width}) or with this aspect ratio, or also with "
            f"channels after the first dimension, to be resized, got shape {tuple(target.shape)}. {remedy}"
        )
