"""CutMix: paste a box of another image into each image (Yun et al. 2019, arXiv:1905.04899)."""

from __future__ import annotations

import math
from typing import Any, Generic, NamedTuple

import torch
from torch import Tensor

from composer.functional.augmentations.annotations import (
    AugmentedBatch,
    Batch,
    BoxFormat,
    Target,
    check_annotations,
    check_box_options,
    clip,
    clip_outside,
    images_of,
    mix_boxes,
)
from composer.functional.augmentations.cutout import Box, check_box, check_images, check_length, draw_box
from composer.functional.augmentations.mixup import check_indices, check_target, draw_part, encode_ids, select
from composer.functional.checks import check_pairs
from composer.functional.random import draw_permutation


class CutMixBatch(NamedTuple, Generic[Batch, Target]):
    """What :func:`cutmix_batch` returns.

    Attributes:
        input: The images with the pasted boxes.
        target: The partners' targets.
        adjusted_lambda: The weight of the **original** sample: 1 minus the fraction of the box's area.
            :class:`MixUpBatch` has the weight of the partner instead.
        bbox: The box ``(x1, y1, x2, y2)`` in pixels, x along the height and y along the width.

    Example:
        >>> cutmix_batch(torch.rand(2, 3, 2, 4), torch.arange(2), bbox=(0, 1, 2, 4)).adjusted_lambda
        0.25
    """

    input: Batch
    target: Target
    adjusted_lambda: float
    bbox: Box


def draw_cutmix_box(
    size: tuple[int, int],
    length: float | None = None,
    alpha: float = 1.0,
    uniform_sampling: bool = False,
    *,
    generator: torch.Generator | None = None,
) -> Box:
    """Draw a box with the proportions of the image: its size, unless ``length`` is set, and its position.

    Args:
        size: The image's height and width in pixels.
        length: The sides of the box as a fraction of those of the image, in ``[0, 1]``, rounded as by ``round``. If
            ``None``, the area of the box is a fraction ``1 - x`` of the image, for a draw ``x`` from the Beta
            distribution, before rounding and clipping to the image.
        alpha: Both parameters of the Beta distribution; 0 never mixes.
        uniform_sampling: Whether all pixels are equally likely to be covered; otherwise all are equally likely to be
            the centre of the box, as in the paper.
        generator: The random generator, on the CPU; torch's default generator if ``None``.

    Returns:
        ``(x1, y1, x2, y2)``, x along the height and y along the width: rows ``x1`` to ``x2 - 1``, columns ``y1`` to
        ``y2 - 1``. Empty if ``alpha`` or ``length`` is 0.

    Raises:
        TypeError: ``length`` is a tensor.
        ValueError: ``length`` lies outside ``[0, 1]``, ``alpha`` is negative or not finite, or ``generator`` is not on
            the CPU.

    Example:
        >>> x1, y1, x2, y2 = draw_cutmix_box((32, 64), length=0.25, generator=torch.Generator().manual_seed(17))
        >>> x2 - x1 <= 8, y2 - y1 <= 16
        (True, True)
    """
    check_pairs(size=size)
    if length is None:
        part = draw_part(alpha, generator)
        # Equation 2 of the paper: both sides are scaled by the root, so that the area of the box is 1 - part.
        length = math.sqrt(1 - part) if alpha else 0.0
    check_length(length)
    sides = (round(length * size[0]), round(length * size[1]))
    return draw_box(size, sides, uniform_sampling, generator=generator)


def cutmix_batch(
    input: Batch,
    target: Target,
    length: float | None = None,
    alpha: float = 1.0,
    bbox: Box | None = None,
    indices: Tensor | None = None,
    uniform_sampling: bool = False,
    *,
    box_format: BoxFormat = "xyxy",
    min_visible: float = 0.0,
    generator: torch.Generator | None = None,
) -> CutMixBatch[Batch, Target]:
    """Paste a box of a partner into every image, and return the **original's** weight (arXiv:1905.04899).

    ``mixed = input`` but for ``mixed[:, :, x1:x2, y1:y2] = input[indices, :, x1:x2, y1:y2]``

    The box is the same in all images. Two labels and a weight describe the entire image, not its pixels: a segmentation
    mask as ``target`` raises an error. Pass an :class:`AugmentedBatch` to mix masks and bounding boxes. The box is
    pasted into masks as into images. Each image gets its own bounding boxes, made smaller to what the pasted box leaves
    visible of them, followed by those of its partner, clipped to the pasted box, all with their labels.

    Args:
        input: Images, shape ``(N, C, H, W)``, any dtype; or an :class:`AugmentedBatch` of them, with boxes as a list.
        target: Class ids ``(N,)``, class probabilities ``(N, C)``, or another tensor with the samples first,
            except a mask. ``None`` if an :class:`AugmentedBatch` has no other targets.
        length: The sides of the box as a fraction of those of the image, in ``[0, 1]``, rounded as by ``round``; 0 is
            the identity. If ``None``, the area of the box is drawn.
        alpha: Both parameters of the Beta distribution of the original sample's fraction of the area; 0 never mixes.
        bbox: The box ``(x1, y1, x2, y2)`` in pixels, x along dimension 2 and y along dimension 3, instead of
            ``length``, ``alpha`` and ``uniform_sampling``. Drawn by :func:`draw_cutmix_box` if ``None``.
        indices: The partners, a permutation of ``range(N)``, int64, on the input's device. Drawn if ``None``.
        uniform_sampling: Whether all pixels are equally likely to be covered; otherwise all are equally likely to be
            the centre of the box, as in the paper. The box is clipped to the image.
        box_format: The format of bounding boxes, as in :func:`augment_batch`.
        min_visible: Bounding boxes are dropped, with their labels, if less than this fraction of their area, or
            nothing, is visible, in ``[0, 1]``.
        generator: The random generator, on the CPU; torch's default generator if ``None``.

    Returns:
        ``(input, target, adjusted_lambda, bbox)``, a named tuple: the mixed images, ``target[indices]``, the weight of
        the original sample, which is 1 minus the fraction of the box's area, and the box. The weights of the two
        losses, beside those of :func:`mixup_batch`::

            cutmix_batch:  adjusted_lambda * loss(out, target) + (1 - adjusted_lambda) * loss(out, target[indices])
            mixup_batch:   (1 - mixing)    * loss(out, target) + mixing                * loss(out, target[indices])

        The images are a new tensor with the shape, dtype and memory format of ``input``, or a new
        :class:`AugmentedBatch`.

    Raises:
        TypeError: ``input``, ``target`` or ``indices`` is not a tensor, ``indices`` are not int64, ``length`` is a
            tensor, or ``bbox`` is not four ints.
        ValueError: ``input`` has another shape or no pixels, ``target`` is a mask, ``input``, ``target`` and
            ``indices`` differ in ``N``, ``bbox`` does not lie within the image, ``length`` lies outside ``[0, 1]``,
            ``alpha`` is negative or not finite, masks or labels do not fit, boxes are not a list, or there are
            keypoints.

    Example:
        >>> swap = torch.tensor([1, 0])
        >>> images = torch.stack([torch.zeros(1, 2, 4), torch.ones(1, 2, 4)])
        >>> mixed, partner_target, adjusted_lambda, _ = cutmix_batch(
        ...     images, torch.arange(2), bbox=(0, 1, 2, 4), indices=swap
        ... )
        >>> mixed[0, 0], adjusted_lambda
        (tensor([[0., 1., 1., 1.],
                [0., 1., 1., 1.]]), 0.25)
    """
    images: Tensor = images_of(input)
    check_images(images, "(N, C, H, W)", (4,))
    check_box_options(box_format, min_visible)
    if isinstance(input, AugmentedBatch):
        check_annotations(input)
    if target is not None or not isinstance(input, AugmentedBatch):
        check_target(images, target)
    if target is not None and _is_mask(target, images):
        raise ValueError(
            f"target must be one label for each image, got a mask of shape {tuple(target.shape)}. "
            "To paste the box into masks as well, use cutmix, an AugmentedBatch with masks, or the algorithm CutMix "
            "with mask_key."
        )
    height, width = images.shape[2:]
    if bbox is None:
        bbox = draw_cutmix_box((height, width), length, alpha, uniform_sampling, generator=generator)
    if indices is None:
        indices = draw_permutation(images, generator=generator)
    check_box("bbox", bbox, (height, width))
    check_indices(images, indices)
    x1, y1, x2, y2 = bbox
    # From the box after rounding and clipping, not from the draw: labels are mixed by what is visible.
    adjusted_lambda = 1 - (x2 - x1) * (y2 - y1) / (height * width)
    mixed: Any = _paste(images, indices, bbox)
    if isinstance(input, AugmentedBatch):
        masks = None if input.masks is None else _paste(input.masks, indices, bbox)
        mixed = input._replace(input=mixed, masks=masks)
        if input.boxes is not None:
            # x is along the height in bbox and along the width in boxes.
            mixed = mix_boxes(
                mixed,
                indices,
                own=lambda xyxy: clip_outside(xyxy, y1, x1, y2, x2, size=(height, width)),
                partner=lambda xyxy: clip(xyxy, y1, x1, y2, x2),
                box_format=box_format,
                min_visible=min_visible,
            )
    return CutMixBatch(mixed, None if target is None else select(target, indices), adjusted_lambda, bbox)


def cutmix(
    data: Tensor,
    target: Tensor,
    alpha: float = 1.0,
    num_classes: int | None = None,
    *,
    length: float | None = None,
    bbox: Box | None = None,
    indices: Tensor | None = None,
    uniform_sampling: bool = False,
    generator: torch.Generator | None = None,
) -> tuple[Tensor, Tensor]:
    """Paste boxes into images and mix the targets, for losses that accept class probabilities or masks.

    Labels are weighted by area. In a segmentation mask, recognised by the height and width of the images, the partner's
    mask is pasted into the same box. Bounding boxes raise an error: see :func:`cutmix_batch`. The source is
    arXiv:1905.04899.

    Args:
        data: Images, shape ``(N, C, H, W)``, any dtype.
        target: Class ids ``(N,)``, class probabilities ``(N, C)``, or masks ``(N, H, W)`` or ``(N, K, H, W)``.
        alpha: Both parameters of the Beta distribution of the original sample's fraction of the area; 0 never mixes.
        num_classes: The number of classes ``C``; needed for class ids, otherwise not used.
        length: The sides of the box as a fraction of those of the image, in ``[0, 1]``, rounded as by ``round``. If
            ``None``, the area of the box is drawn.
        bbox: The box, as in :func:`cutmix_batch`. Drawn if ``None``.
        indices: The partners, a permutation of ``range(N)``, int64, on the data's device. Drawn if ``None``.
        uniform_sampling: Whether all pixels are equally likely to be covered.
        generator: The random generator, on the CPU; torch's default generator if ``None``.

    Returns:
        ``(mixed data, mixed target)``: class probabilities ``(N, C)``, at least float32 if they were ids; or masks with
        the shape of ``target``.

    Raises:
        TypeError: As :func:`cutmix_batch`.
        ValueError: As :func:`cutmix_batch`; or ``target`` is none of the above, or holds class ids and ``num_classes``
            is missing.

    Example:
        >>> swap, box = torch.tensor([1, 0]), (0, 0, 4, 8)
        >>> _, target = cutmix(torch.rand(2, 3, 8, 8), torch.tensor([0, 2]), num_classes=3, bbox=box, indices=swap)
        >>> target
        tensor([[0.5000, 0.0000, 0.5000],
                [0.5000, 0.0000, 0.5000]])
    """
    check_images(data, "(N, C, H, W)", (4,), "data")
    check_target(data, target)
    if _is_mask(target, data):
        # The samples' indices as targets: those that are returned are the partners.
        samples = torch.arange(data.shape[0], device=data.device)
        mixed, partners, _, bbox = cutmix_batch(
            data, samples, length, alpha, bbox, indices, uniform_sampling, generator=generator
        )
        return mixed, _paste(target, partners, bbox)
    if not (target.is_floating_point() and target.ndim == 2):
        kinds = (
            "class ids (N,), integers, class probabilities (N, C), floating point, or masks of the images' height and "
            "width"
        )
        target = encode_ids(target, num_classes, data, kinds)
    mixed, partner, adjusted_lambda, _ = cutmix_batch(
        data, target, length, alpha, bbox, indices, uniform_sampling, generator=generator
    )
    return mixed, partner.lerp_(target, adjusted_lambda)


def _paste(images: Tensor, indices: Tensor, bbox: Box) -> Tensor:
    x1, y1, x2, y2 = bbox
    box = images[..., x1:x2, y1:y2]
    mixed = images.clone()
    # For 128 images of 32 x 32, one thread, index_select takes 0.6 of the time of indexing with contiguous images, and
    # 1.5 times as long in the channels_last format.
    mixed[..., x1:x2, y1:y2] = box.index_select(0, indices) if images.is_contiguous() else box[indices]
    return mixed


def _is_mask(target: Tensor, images: Tensor) -> bool:
    return target.ndim in {3, 4} and target.shape[-2:] == images.shape[-2:]
