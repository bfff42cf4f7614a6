"""Convert images of any kind to a form that all products can store, and draw masks, boxes and matrices."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from composer.loggers.products import import_product


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


def with_masks(images: Sequence[Tensor], name: str, masks: Mapping[str, Any] | None) -> dict[str, Sequence[Tensor]]:
    """Return images ``(H, W, C)`` by their name, and with each of their masks drawn over them as ``name/mask``.

    Example:
        >>> [*with_masks(to_images(torch.rand(2, 3, 8, 4)), "shown", {"found": torch.ones(2, 8, 4)})]
        ['shown', 'shown/found']
    """
    drawn = {f"{name}/{title}": [*map(_draw_mask, images, to_masks(mask))] for title, mask in (masks or {}).items()}
    return {name: images, **drawn}


def draw_boxes(image: Tensor, found: Tensor, true: Tensor) -> Tensor:
    """Return an image ``(C, H, W)`` as ``(3, H, W)`` bytes with found boxes in red, and true ones in green, xyxy.

    Example:
        >>> draw_boxes(torch.zeros(1, 8, 8), torch.tensor([[1, 1, 5, 5]]), torch.zeros(0, 4)).shape
        torch.Size([3, 8, 8])
    """
    from torchvision.utils import draw_bounding_boxes  # type: ignore[import-untyped]  # noqa: PLC0415  (slow)

    pixels = to_images(image)[0][..., :3].permute(2, 0, 1).expand(3, -1, -1)
    for boxes, color in ((true, "lime"), (found, "red")):
        pixels = draw_bounding_boxes(pixels, boxes.detach().cpu(), colors=color) if len(boxes) else pixels
    return pixels


def draw_matrix(matrix: Tensor, names: Sequence[str] | None = None) -> Tensor:
    """Return a picture ``(H, W, 3)`` of a matrix, such as of confusion, with colors by the fractions of each row.

    Args:
        matrix: Shape ``(C, C)``. Up to 20 classes are labelled with their numbers.
        names: Names of the classes.

    Example:
        >>> draw_matrix(torch.eye(3)).shape[-1]
        3
    """
    values = matrix.detach().double().cpu()
    figure = import_product("matplotlib.figure", "plot").Figure(layout="constrained")
    canvas, axes = import_product("matplotlib.backends.backend_agg", "plot").FigureCanvasAgg(figure), figure.subplots()
    shares = values / values.sum(1, keepdim=True).clamp(min=1e-12)
    axes.imshow(shares.numpy(), cmap="Blues", vmin=0, vmax=1)
    axes.set(xlabel="predicted", ylabel="true")
    if names is not None:
        axes.set_xticks(range(len(names)), names, rotation=90)
        axes.set_yticks(range(len(names)), names)
    for row, column in values.nonzero().tolist() if len(values) <= 20 else ():
        color = "white" if shares[row, column] > 0.5 else "black"
        axes.text(column, row, f"{values[row, column].item():.4g}", ha="center", va="center", color=color, fontsize=7)
    canvas.draw()
    return torch.tensor(bytearray(canvas.buffer_rgba())).view(*canvas.get_width_height()[::-1], 4)[..., :3]


def _draw_mask(image: Tensor, mask: Tensor) -> Tensor:
    from torchvision.utils import draw_segmentation_masks  # noqa: PLC0415  (takes a second)

    classes = mask.long() == torch.arange(int(mask.max()) + 1)[:, None, None]
    pixels = image[..., :3].permute(2, 0, 1).expand(3, -1, -1)
    drawn: Tensor = draw_segmentation_masks(pixels, classes, 0.5)
    return drawn.permute(1, 2, 0)


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
