"""CutOut: fill squares of the images with zeros (DeVries and Taylor 2017, arXiv:1708.04552)."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from composer.functional.augmentations.annotations import AugmentedBatch, check_annotations, images_of
from composer.functional.checks import check_flags, check_interval, check_numbers, check_pairs, check_whole, described
from composer.functional.random import check_generator

if TYPE_CHECKING:
    from PIL.Image import Image

Images = TypeVar("Images", Tensor, AugmentedBatch, "Image")
Box = tuple[int, int, int, int]
"""``(x1, y1, x2, y2)``: rows from x1 to x2 - 1, columns from y1 to y2 - 1."""


def draw_box(
    size: tuple[int, int],
    sides: tuple[int, int],
    uniform_sampling: bool = False,
    *,
    generator: torch.Generator | None = None,
) -> Box:
    """Draw the position of a box, and clip the box to the image.

    By default the centre of the box is uniformly distributed over the pixels; pixels at the border are then covered
    less often. With ``uniform_sampling`` the position is uniformly distributed over all positions with at least
    one row and one column inside the image: each pixel is covered with the same probability,
    ``side / (size + side - 1)`` along each dimension.

    Args:
        size: The image's height and width in pixels.
        sides: The box's height and width in pixels.
        uniform_sampling: Whether all pixels are equally likely to be covered.
        generator: The random generator, on the CPU; torch's default generator if ``None``.

    Returns:
        ``(x1, y1, x2, y2)``, x along the height and y along the width: rows ``x1`` to ``x2 - 1``, columns ``y1`` to
        ``y2 - 1``.

    Raises:
        ValueError: A number of ``size`` is less than 1, one of ``sides`` is negative, or ``generator`` is not on the
            CPU.

    Example:
        >>> x1, y1, x2, y2 = draw_box((32, 32), (16, 16), generator=torch.Generator().manual_seed(17))
        >>> 8 <= x2 - x1 <= 16, 8 <= y2 - y1 <= 16
        (True, True)
    """
    (box,) = _draw_boxes(1, size, sides, uniform_sampling, generator)
    return box


def draw_holes(
    size: tuple[int, int],
    num_holes: int = 1,
    length: float = 0.5,
    uniform_sampling: bool = False,
    *,
    generator: torch.Generator | None = None,
) -> list[Box]:
    """Draw the positions of square holes, each as by :func:`draw_box`.

    Args:
        size: The image's height and width in pixels.
        num_holes: The number of holes; they may overlap.
        length: The side of a hole as a fraction of the image's shorter side, in ``[0, 1]``, rounded as by ``round``.
        uniform_sampling: Whether all pixels are equally likely to be covered.
        generator: The random generator, on the CPU; torch's default generator if ``None``.

    Returns:
        ``num_holes`` boxes ``(x1, y1, x2, y2)``, x along the height and y along the width.

    Raises:
        TypeError: ``num_holes`` is not an int, or ``length`` is a tensor.
        ValueError: A number of ``size`` is less than 1, ``num_holes`` is negative, ``length`` lies outside ``[0, 1]``,
            or ``generator`` is not on the CPU.

    Example:
        >>> len(draw_holes((32, 32), num_holes=3, length=0.25))
        3
    """
    check_whole("num_holes", num_holes, 0, "It is the number of squares.")
    check_length(length)
    check_pairs(size=size)
    side = round(length * min(size))
    return _draw_boxes(num_holes, size, (side, side), uniform_sampling, generator)


def cutout_batch(
    input: Images,
    num_holes: int = 1,
    length: float = 0.5,
    uniform_sampling: bool = False,
    *,
    boxes: Sequence[Box] | None = None,
    mask_value: float | None = None,
    generator: torch.Generator | None = None,
) -> Images:
    """Fill square holes with zeros, the same ones in every image of the batch (arXiv:1708.04552).

    ``output[..., x1:x2, y1:y2] = 0`` for each box ``(x1, y1, x2, y2)``

    Zero is the mean colour only of normalised images. Labels, bounding boxes and keypoints do not change, and still
    include what a hole covers, which the model has to infer from the rest. Masks do not change either, unless
    ``mask_value`` is set.

    Args:
        input: Images, shape ``(N, C, H, W)``, or one, shape ``(C, H, W)``, of any dtype; a PIL image of any mode; or an
            :class:`AugmentedBatch` of images.
        num_holes: The number of holes, which may overlap; 0 is the identity.
        length: The side of a hole as a fraction of the image's shorter side, in ``[0, 1]``, rounded as by ``round``.
        uniform_sampling: Whether all pixels are equally likely to be covered; otherwise all are equally likely to be
            the centre of a hole, as in the paper. Holes are clipped to the image.
        boxes: The holes, each ``(x1, y1, x2, y2)`` in pixels, x along the height and y along the width, instead of
            these three settings. Drawn by :func:`draw_holes` if ``None``.
        mask_value: The value of holes in the masks of an :class:`AugmentedBatch`, such as the class id that the loss
            ignores. Masks do not change if ``None``.
        generator: The random generator, on the CPU; torch's default generator if ``None``.

    Returns:
        A new tensor with the shape, dtype and memory format of ``input``, a new PIL image with its mode, or a new
        :class:`AugmentedBatch`.

    Raises:
        TypeError: ``input`` is neither a tensor nor a PIL image, ``num_holes`` or an edge of a box is not an int, or
            ``length`` is a tensor.
        ValueError: ``input`` has another shape or no pixels, a box does not lie within it, ``num_holes`` is negative,
            ``length`` lies outside ``[0, 1]``, masks do not fit, or there is a ``mask_value`` without masks.

    Example:
        >>> cutout_batch(torch.ones(1, 1, 4, 4), boxes=[(0, 1, 2, 4)])[0, 0]
        tensor([[1., 0., 0., 0.],
                [1., 0., 0., 0.],
                [1., 1., 1., 1.],
                [1., 1., 1., 1.]])
    """
    images: Any = images_of(input)
    if isinstance(input, AugmentedBatch):
        check_images(images, "(N, C, H, W)", (4,))
        check_annotations(input, keypoints=True)
    elif not is_pil(images):
        check_images(images, "(N, C, H, W) or (C, H, W)", (3, 4))
    masks = input.masks if isinstance(input, AugmentedBatch) else None
    if mask_value is not None:
        check_numbers(mask_value=mask_value)
        if masks is None:
            raise ValueError(f"mask_value={mask_value} needs masks: pass an AugmentedBatch with masks as input.")
    size = (images.shape[-2], images.shape[-1]) if isinstance(images, Tensor) else (images.height, images.width)
    if boxes is None:
        boxes = draw_holes(size, num_holes, length, uniform_sampling, generator=generator)
    elif not isinstance(boxes, Sequence):
        raise TypeError(f"boxes must be a list of boxes (x1, y1, x2, y2), got {described(boxes)}.")
    else:
        for box in boxes:
            check_box("each of boxes", box, size)
    output: Any = _fill(images, boxes, 0)
    if isinstance(input, AugmentedBatch):
        output = input._replace(input=output)
        if masks is not None and mask_value is not None:
            output = output._replace(masks=_fill(masks, boxes, mask_value))
    return output  # type: ignore[no-any-return]


def _fill(images: Any, boxes: Sequence[Box], value: float) -> Any:
    filled = images.clone() if isinstance(images, Tensor) else images.copy()
    for x1, y1, x2, y2 in boxes:
        if isinstance(filled, Tensor):
            filled[..., x1:x2, y1:y2] = value
        else:
            filled.paste(value, (y1, x1, y2, x2))
    return filled


def is_pil(image: object) -> bool:
    """Return whether a value is a PIL image, whose module is then imported."""
    pil = sys.modules.get("PIL.Image")
    return pil is not None and isinstance(image, pil.Image)


def check_images(input: Tensor, shape: str, dims: tuple[int, ...], name: str = "input") -> None:
    """Raise an error for a value that is not a tensor of images."""
    if not isinstance(input, Tensor):
        raise TypeError(f"{name} must be a tensor of shape {shape}, got {type(input).__name__}.")
    if input.ndim not in dims or 0 in input.shape:
        raise ValueError(f"{name} must have shape {shape} with at least one pixel, got shape {tuple(input.shape)}.")


def check_length(length: float) -> None:
    """Raise an error for a relative length that is not a number in ``[0, 1]``."""
    check_interval("length", length, 0, 1, "It is the side of the box as a fraction of the image's.")


def check_box(name: str, box: Box, size: tuple[int, int]) -> None:
    """Raise an error for a box that does not lie within an image."""
    if not isinstance(box, (tuple, list)) or len(box) != 4 or not all(isinstance(edge, int) for edge in box):
        raise TypeError(f"{name} must be four ints (x1, y1, x2, y2), got {described(box)}.")
    x1, y1, x2, y2 = box
    if not (0 <= x1 <= x2 <= size[0] and 0 <= y1 <= y2 <= size[1]):
        raise ValueError(
            f"{name} must be (x1, y1, x2, y2) with 0 <= x1 <= x2 <= {size[0]} (the height) and "
            f"0 <= y1 <= y2 <= {size[1]} (the width), got {tuple(box)}."
        )


def _draw_boxes(
    count: int,
    size: tuple[int, int],
    sides: tuple[int, int],
    uniform_sampling: bool,
    generator: torch.Generator | None,
) -> list[Box]:
    """Draw all boxes with one call: with a small batch, the draw takes a tenth of the time of CutOut."""
    check_pairs(size=size, sides=sides)
    check_flags(uniform_sampling=uniform_sampling)
    (height, width), (rows, columns) = size, sides
    if height < 1 or width < 1 or rows < 0 or columns < 0:
        raise ValueError(
            f"size must be at least 1 and sides at least 0, got {tuple(size)} and {tuple(sides)}. "
            "They are height and width of the image and of the box, in pixels."
        )
    check_generator(generator)
    boxes = []
    for across, along in torch.rand((count, 2), generator=generator, dtype=torch.float64, device="cpu").tolist():
        x1, x2 = _interval(across, height, rows, uniform_sampling)
        y1, y2 = _interval(along, width, columns, uniform_sampling)
        boxes.append((x1, y1, x2, y2))
    return boxes


def _interval(fraction: float, total: int, side: int, uniform_sampling: bool) -> tuple[int, int]:
    """Return the clipped interval at the position of a number in [0, 1)."""
    if uniform_sampling:
        # From the position with one row inside at the start of the image to that at its end.
        first = min(1 - side, 0)
        start = first + int(fraction * (total - first))
    else:
        start = int(fraction * total) - side // 2
    end = start + side
    # Conditions are twice as fast as min and max.
    return start if start > 0 else 0, end if end < total else total
