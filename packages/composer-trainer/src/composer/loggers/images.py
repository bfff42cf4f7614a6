"""Convert images of any kind to a form that all products can store."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def to_images(images: Any, *, channels_last: bool = False) -> list[Tensor]:
    """Return images as a list of ``(H, W, C)`` tensors of bytes on the CPU, with 1, 3 or 4 channels.

    Args:
        images: A tensor or array ``(H, W)``, ``(C, H, W)`` or ``(N, C, H, W)``, or a sequence of these. Bytes, or
            floats from 0 to 1; floats outside of this range are rescaled so that the minimum is black and the maximum
            white.
        channels_last: Whether the channels come last: ``(H, W, C)`` and ``(N, H, W, C)``.

    Raises:
        ValueError: A shape is none of these, or there are 2 channels or more than 4.

    Example:
        >>> [image.shape for image in to_images(torch.rand(2, 3, 8, 4))]
        [torch.Size([8, 4, 3]), torch.Size([8, 4, 3])]
    """
    if isinstance(images, (list, tuple)):
        return [one for each in images for one in to_images(each, channels_last=channels_last)]
    pixels = torch.as_tensor(images).detach()
    if pixels.ndim == 4:
        return [_to_image(one, channels_last) for one in pixels.cpu()]
    return [_to_image(pixels.cpu(), channels_last)]


def to_masks(masks: Any) -> list[Tensor]:
    """Return class ids of pixels, a tensor or array ``(H, W)`` or ``(N, H, W)``, as a list of tensors on the CPU.

    Example:
        >>> [mask.shape for mask in to_masks(torch.zeros(2, 8, 4))]
        [torch.Size([8, 4]), torch.Size([8, 4])]
    """
    classes = torch.as_tensor(masks).detach().cpu()
    return list(classes) if classes.ndim == 3 else [classes]


def _to_image(pixels: Tensor, channels_last: bool) -> Tensor:
    if pixels.ndim == 2:
        pixels = pixels.unsqueeze(-1)
    elif pixels.ndim == 3 and not channels_last:
        pixels = pixels.permute(1, 2, 0)
    if pixels.ndim != 3 or pixels.shape[-1] not in {1, 3, 4}:
        where = "(H, W, C)" if channels_last else "(C, H, W)"
        raise ValueError(
            f"images must be (H, W), {where} or several of them, with 1, 3 or 4 channels, "
            f"got one with {tuple(pixels.shape)} when channels are put last; see channels_last."
        )
    return _to_bytes(pixels).contiguous()


def _to_bytes(pixels: Tensor) -> Tensor:
    if pixels.dtype is torch.bool:
        return pixels.to(torch.uint8) * 255
    if not pixels.is_floating_point():
        return pixels.clamp(0, 255).to(torch.uint8)
    pixels = torch.nan_to_num(pixels.float())
    low, high = pixels.min(), pixels.max()
    if low < 0 or high > 1:
        pixels = (pixels - low) / (high - low).clamp_min(torch.finfo(pixels.dtype).tiny)
    return (pixels * 255).round().to(torch.uint8)
