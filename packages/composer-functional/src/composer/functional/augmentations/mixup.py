"""MixUp: train on blends of two samples (Zhang et al. 2017, arXiv:1710.09412)."""

from __future__ import annotations

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
    images_of,
    mix_boxes,
)
from composer.functional.checks import check_float_tensors, check_interval, check_numbers, check_whole_numbers
from composer.functional.losses import encode_one_hot
from composer.functional.random import draw_beta, draw_permutation


class MixUpBatch(NamedTuple, Generic[Batch, Target]):
    """What :func:`mixup_batch` returns.

    Attributes:
        input: The blended samples.
        target: The partners' targets.
        mixing: The weight of the **partner**, while :class:`CutMixBatch` has the weight of the original sample.

    Example:
        >>> mixup_batch(torch.zeros(2, 1), torch.arange(2), mixing=0.25, indices=torch.tensor([1, 0]))
        MixUpBatch(input=tensor([[0.],
                [0.]]), target=tensor([1, 0]), mixing=0.25)
    """

    input: Batch
    target: Target
    mixing: float


def draw_mixing(alpha: float = 0.2, *, generator: torch.Generator | None = None) -> float:
    """Draw the weight of the partner: the smaller part of a Beta(alpha, alpha) split.

    Args:
        alpha: Both parameters of the Beta distribution; larger values give weights closer to 0.5. 0 never mixes.
        generator: The random generator, on the CPU; torch's default generator if ``None``.

    Returns:
        A number in ``[0, 0.5]``; 0, without a draw, if ``alpha`` is 0.

    Raises:
        ValueError: ``alpha`` is negative or not finite, or ``generator`` is not on the CPU.

    Example:
        >>> draw_mixing(0.2, generator=torch.Generator().manual_seed(17)) <= 0.5
        True
        >>> draw_mixing(0)
        0.0
    """
    part = draw_part(alpha, generator)
    # The distribution is symmetric: this only exchanges a sample with its partner.
    return min(part, 1 - part)


def draw_part(alpha: float, generator: torch.Generator | None) -> float:
    """Draw from the Beta distribution with both parameters ``alpha``; 0, without a draw, if ``alpha`` is 0."""
    check_numbers(alpha=alpha)
    if alpha == 0:
        return 0.0
    if not alpha > 0:
        raise ValueError(f"alpha must be at least 0, got {alpha}. It is both parameters of the Beta distribution.")
    return draw_beta(alpha, generator=generator)


def mixup_batch(
    input: Batch,
    target: Target,
    mixing: float | None = None,
    alpha: float = 0.2,
    indices: Tensor | None = None,
    *,
    box_format: BoxFormat = "xyxy",
    generator: torch.Generator | None = None,
) -> MixUpBatch[Batch, Target]:
    """Blend every sample with a partner of its batch, and return the **partner's** weight (arXiv:1710.09412).

    ``mixed = (1 - mixing) * input + mixing * input[indices]``

    In an :class:`AugmentedBatch`, masks of probabilities are blended in the same way, and each image gets its own boxes
    followed by those of its partner, with their labels, as in arXiv:1902.04103.

    Args:
        input: Samples, shape ``(N, ...)``, floating point; or an :class:`AugmentedBatch` of images, with masks in
            floating point and boxes as a list.
        target: Class ids ``(N,)``, class probabilities ``(N, C)``, or another tensor with the samples first. ``None``
            if an :class:`AugmentedBatch` has no other targets.
        mixing: The partner's weight, in ``[0, 1]``. Drawn by :func:`draw_mixing` if ``None``.
        alpha: Both parameters of the Beta distribution of ``mixing``; 0 never mixes.
        indices: The partners, a permutation of ``range(N)``, int64, on the input's device. Drawn if ``None``.
        box_format: The format of boxes, as in :func:`augment_batch`.
        generator: The random generator, on the CPU; torch's default generator if ``None``.

    Returns:
        ``(input, target, mixing)``, a named tuple: the blended samples, ``target[indices]``, and the partner's weight.
        The weights of the two losses, beside those of :func:`cutmix_batch`::

            mixup_batch:   (1 - mixing)    * loss(out, target) + mixing                * loss(out, target[indices])
            cutmix_batch:  adjusted_lambda * loss(out, target) + (1 - adjusted_lambda) * loss(out, target[indices])

        The samples are a new tensor with the shape, dtype and memory format of ``input``, or a new
        :class:`AugmentedBatch`. With weight 0, an image and its boxes are left out.

    Raises:
        TypeError: ``input``, ``target`` or ``indices`` is not a tensor, ``input`` or its masks are not floating point,
            ``indices`` are not int64, or ``mixing`` is a tensor.
        ValueError: ``mixing`` lies outside ``[0, 1]``, ``input`` is empty, ``input``, ``target`` and ``indices``
            differ in ``N``, boxes are not a list, or there are keypoints.

    Example:
        >>> mixed, partner_target, mixing = mixup_batch(torch.rand(4, 3, 8, 8), torch.arange(4), mixing=0.25)
        >>> mixed.shape, mixing
        (torch.Size([4, 3, 8, 8]), 0.25)
    """
    samples: Tensor = images_of(input)
    _check_batch(samples, target, optional_target=isinstance(input, AugmentedBatch))
    check_box_options(box_format)
    if isinstance(input, AugmentedBatch):
        _check_annotations(input)
    if mixing is None:
        mixing = draw_mixing(alpha, generator=generator)
    if indices is None:
        indices = draw_permutation(samples, generator=generator)
    check_interval("mixing", mixing, 0, 1, "It is the partner's weight.")
    check_indices(samples, indices)
    mixed: Any = _blend(samples, indices, mixing)
    if isinstance(input, AugmentedBatch):
        mixed = input._replace(input=mixed, masks=None if input.masks is None else _blend(input.masks, indices, mixing))
        if input.boxes is not None:
            own, partner = float(mixing < 1), float(mixing > 0)
            mixed = mix_boxes(
                mixed,
                indices,
                own=lambda xyxy: (xyxy, xyxy.new_full(xyxy.shape[:2], own)),
                partner=lambda xyxy: (xyxy, xyxy.new_full(xyxy.shape[:2], partner)),
                box_format=box_format,
            )
    return MixUpBatch(mixed, None if target is None else select(target, indices), mixing)


def _blend(samples: Tensor, indices: Tensor, mixing: float) -> Tensor:
    # In place in the partners, which are a copy already: the products need no memory of their own.
    return select(samples, indices).lerp_(samples, 1 - mixing)


def select(samples: Tensor, indices: Tensor) -> Tensor:
    """Return ``samples[indices]``."""
    # index_select takes a third to half the time of indexing (one thread: 128 images of 32 x 32: 29 against 100 us;
    # 32 of 224 x 224: 0.65 against 1.23 ms), but it does not preserve the memory format.
    return samples.index_select(0, indices) if samples.is_contiguous() else samples[indices]


def mixup(
    data: Tensor,
    target: Tensor,
    alpha: float = 0.2,
    num_classes: int | None = None,
    *,
    mixing: float | None = None,
    indices: Tensor | None = None,
    generator: torch.Generator | None = None,
) -> tuple[Tensor, Tensor]:
    """Blend samples and targets, for losses that accept class probabilities (arXiv:1710.09412).

    Args:
        data: Samples, shape ``(N, ...)``, floating point.
        target: Class ids ``(N,)`` or class probabilities ``(N, C)``.
        alpha: Both parameters of the Beta distribution of ``mixing``; 0 never mixes.
        num_classes: The number of classes ``C``; needed for class ids.
        mixing: The partner's weight, in ``[0, 1]``. Drawn by :func:`draw_mixing` if ``None``.
        indices: The partners, a permutation of ``range(N)``, int64, on the data's device. Drawn if ``None``.
        generator: The random generator, on the CPU; torch's default generator if ``None``.

    Returns:
        ``(mixed data, mixed class probabilities)``; the probabilities are ``(N, C)``, at least float32.

    Raises:
        TypeError: As :func:`mixup_batch`.
        ValueError: As :func:`mixup_batch`; or ``target`` holds integers of another shape than ``(N,)``, or class ids
            and ``num_classes`` is missing.

    Example:
        >>> swap = torch.tensor([1, 0])
        >>> _, target = mixup(torch.rand(2, 3, 8, 8), torch.tensor([0, 2]), num_classes=3, mixing=0.25, indices=swap)
        >>> target
        tensor([[0.7500, 0.0000, 0.2500],
                [0.2500, 0.0000, 0.7500]])
    """
    _check_batch(data, target, "data")
    if not target.is_floating_point():
        kinds = "class ids (N,), integers, or class probabilities (N, C), floating point"
        target = encode_ids(target, num_classes, data, kinds)
    mixed, partner, mixing = mixup_batch(data, target, mixing, alpha, indices, generator=generator)
    return mixed, partner.lerp_(target, 1 - mixing)


def encode_ids(target: Tensor, num_classes: int | None, data: Tensor, kinds: str) -> Tensor:
    """Convert class ids to class probabilities, at least float32; raise an error with ``kinds`` for other targets."""
    if target.is_floating_point() or target.ndim != 1:
        raise ValueError(f"target must be {kinds}, got {target.dtype} of shape {tuple(target.shape)}.")
    if num_classes is None:
        raise ValueError("num_classes must be given when target holds class ids, got None.")
    check_whole_numbers(num_classes=num_classes)
    return encode_one_hot(target, num_classes, torch.promote_types(data.dtype, torch.float32))


def check_target(input: Tensor, target: object) -> None:
    """Raise an error for targets that do not match the samples."""
    if not isinstance(target, Tensor):
        raise TypeError(f"target must be a tensor with one entry for each sample, got {type(target).__name__}.")
    if target.ndim == 0 or target.shape[0] != input.shape[0]:
        raise ValueError(
            f"target must have the input's {input.shape[0]} samples in its first dimension, "
            f"got shape {tuple(target.shape)}."
        )


def check_indices(input: Tensor, indices: Tensor) -> None:
    """Check dtype and shape of a permutation of the samples; its values are not read."""
    if not isinstance(indices, Tensor) or indices.dtype != torch.int64:
        kind = indices.dtype if isinstance(indices, Tensor) else type(indices).__name__
        raise TypeError(f"indices must be an int64 tensor, a permutation of the samples, got {kind}.")
    if indices.shape != input.shape[:1]:
        raise ValueError(
            f"indices must be a permutation of the {input.shape[0]} samples, shape ({input.shape[0]},), "
            f"got shape {tuple(indices.shape)}."
        )


def _check_batch(input: Tensor, target: Tensor | None, name: str = "input", *, optional_target: bool = False) -> None:
    check_float_tensors(**{name: input})
    if input.ndim == 0 or input.shape[0] == 0:
        raise ValueError(f"{name} must be a batch (N, ...) with at least one sample, got shape {tuple(input.shape)}.")
    if not (optional_target and target is None):
        check_target(input, target)


def _check_annotations(batch: AugmentedBatch) -> None:
    check_annotations(batch)
    if batch.masks is not None and not batch.masks.is_floating_point():
        raise TypeError(
            f"masks must be probabilities, floating point, to be blended, got {batch.masks.dtype}. Pass class ids as "
            "target, and blend the losses."
        )
