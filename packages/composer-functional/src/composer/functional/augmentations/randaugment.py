"""RandAugment: random operations with one severity (Cubuk et al. 2019, arXiv:1909.13719)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch
from torch import Tensor, nn

from composer.functional.augmentations.batch_operations import apply_steps, check_draws, map_samples
from composer.functional.augmentations.operations import (
    AugmentationSet,
    check_augmentation_set,
    check_image,
    check_images,
    check_named_set,
    check_severity,
    draw_operations,
)
from composer.functional.checks import check_whole

if TYPE_CHECKING:
    from PIL.Image import Image

_Image = TypeVar("_Image", bound="Image | Tensor")


@dataclass(frozen=True)
class RandAugmentDraws:
    """The operations of RandAugment for each sample, and their magnitudes; see :func:`draw_randaugment`.

    The operations are numbered: 0 identity, 1 autocontrast, 2 equalize, 3 posterize, 4 solarize, 5 color, 6 contrast,
    7 brightness, 8 sharpness, 9 rotate, 10 shear_x, 11 shear_y, 12 translate_x, 13 translate_y.

    Attributes:
        operations: Their indices, shape ``(depth, N)``, int64, on the CPU.
        magnitudes: The bits that posterize keeps, rounded up; the threshold of solarize as a fraction of 256; the
            factor of 5 to 8, where 1 is the identity; degrees counterclockwise; the slope of a shear; the translation
            to the right or down as a fraction of the side. Shape ``(depth, N)``, float32, on the CPU.

    Example:
        >>> quarter_turn = RandAugmentDraws(torch.tensor([[9]]), torch.tensor([[90.0]]))
        >>> randaugment_batch(torch.tensor([[[[0.0, 1.0], [0.5, 0.0]]]]), draws=quarter_turn)
        tensor([[[[1.0000, 0.0000],
                  [0.0000, 0.5000]]]])
    """

    operations: Tensor
    magnitudes: Tensor


def draw_randaugment(
    count: int,
    severity: float = 9,
    depth: int = 2,
    augmentation_set: AugmentationSet = "all",
    *,
    generator: torch.Generator | None = None,
) -> RandAugmentDraws:
    """Draw the operations for each sample, and for each operation a level from 0 to the severity.

    All operations of the set are equally likely. A level ``l`` has the following meaning:

    - autocontrast, equalize: none, they have no magnitude;
    - posterize: ``4 - floor(0.4 l)`` bits are kept; solarize: bytes from ``256 - 25.6 l`` on are inverted;
    - rotate: ``± 3 l`` degrees; shear: ``± 0.03 l``; translate: ``± l / 30`` of the side, in whole pixels;
    - color, contrast, brightness, sharpness: the factor is ``1 ± 0.09 l``; in the set ``"original"``, as in the
      paper, ``0.1 + 0.18 l``, which differs from 1 at level 0.

    Args:
        count: The number of samples, at least 1.
        severity: The largest level, in ``[0, 10]``. At 0 all operations except autocontrast, equalize and posterize,
            and in ``"original"`` the last four, are the identity.
        depth: The number of operations, applied one after the other; 0 is the identity.
        augmentation_set: ``"all"``; ``"safe"``, without color, contrast, brightness and sharpness, which overlap with
            the corruptions of ImageNet-C; or ``"original"``, all with other ranges. Or functions, for
            :func:`randaugment_image`, of which indices and levels are drawn.
        generator: The random generator, on the CPU; torch's default generator if ``None``.

    Returns:
        The draws, on the CPU.

    Raises:
        TypeError: ``count`` or ``depth`` is not an int, or ``augmentation_set`` is neither a name nor functions.
        ValueError: ``severity`` lies outside ``[0, 10]``, ``depth`` is negative, ``count`` is less than 1,
            ``augmentation_set`` is unknown, or ``generator`` is not on the CPU.

    Example:
        >>> draw_randaugment(4, generator=torch.Generator().manual_seed(17)).operations.shape
        torch.Size([2, 4])
    """
    check_whole("count", count, 1, "It is the number of samples.")
    _check_depth(depth)
    return RandAugmentDraws(*draw_operations((depth, count), severity, augmentation_set, generator))


def randaugment_batch(
    input: Tensor,
    severity: float = 9,
    depth: int = 2,
    augmentation_set: str = "all",
    *,
    draws: RandAugmentDraws | None = None,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Apply random operations to every image of a batch (arXiv:1909.13719).

    ``output[n] = operation[depth - 1, n](… operation[0, n](input[n]))``

    Geometric operations move pixels, without interpolation; the border is filled with black. Targets that
    depend on positions (segmentation masks, boxes, key points) are not moved: this is for classification.

    Nothing waits for a device: draws are made on the CPU and copied. Under ``torch.compile`` every operation is
    computed for every sample, so that one graph works for all draws; on a GPU, copying the draws synchronises there.

    Args:
        input: Images, shape ``(N, C, H, W)`` with 1 or 3 channels: uint8, or floating point from 0 to 1. Other
            values are not detected, which would wait for the device, and some operations clip them: normalise later.
        severity: The largest level, in ``[0, 10]``; see :func:`draw_randaugment`.
        depth: The number of operations, applied one after the other; 0 is the identity.
        augmentation_set: ``"all"``, ``"safe"`` or ``"original"``; see :func:`draw_randaugment`.
        draws: The result of :func:`draw_randaugment`, which replaces the previous arguments; drawn if ``None``.
        generator: The random generator, on the CPU; torch's default generator if ``None``.

    Returns:
        A new tensor with the shape, dtype and memory format of ``input``, from 0 to 1 or 255. uint8 values are rounded
        after each operation, as in torchvision.

    Raises:
        TypeError: ``input`` is neither uint8 nor floating point, ``depth`` is not an int, ``augmentation_set`` is not a
            name, or ``draws`` are of another type.
        ValueError: ``input`` has another shape or is empty, ``draws`` are for another number of samples or not on the
            CPU, or as :func:`draw_randaugment`.

    Example:
        >>> images = torch.rand(4, 3, 8, 8)
        >>> randaugment_batch(images, severity=5).shape
        torch.Size([4, 3, 8, 8])
        >>> torch.equal(randaugment_batch(images, depth=0), images)
        True
    """
    check_images(input)
    if draws is None:
        check_named_set(augmentation_set, "randaugment_image")
        draws = draw_randaugment(input.shape[0], severity, depth, augmentation_set, generator=generator)
    _check_draws(draws, input.shape[0])
    if not draws.operations.shape[0]:
        return input.clone()
    return map_samples(partial(apply_steps, interpolation="nearest"), input, draws.operations, draws.magnitudes)


def randaugment_image(
    img: _Image,
    severity: float = 9,
    depth: int = 2,
    augmentation_set: AugmentationSet = "all",
    *,
    draws: RandAugmentDraws | None = None,
    generator: torch.Generator | None = None,
) -> _Image:
    """Apply random operations to one image, for a data loader (arXiv:1909.13719).

    Geometric operations move pixels. Targets that depend on positions (segmentation masks, boxes, key points) are not
    moved: this is for classification.

    Args:
        img: A PIL image, mode ``"RGB"`` or ``"L"``; or a tensor ``(C, H, W)`` or ``(N, C, H, W)`` as in
            :func:`randaugment_batch`, which processes a batch.
        severity: The largest level, in ``[0, 10]``; see :func:`draw_randaugment`.
        depth: The number of operations, applied one after the other; 0 is the identity.
        augmentation_set: ``"all"``, ``"safe"`` or ``"original"``, see :func:`draw_randaugment`; or functions that take
            the image and a level, drawn from 0 to ``severity``, and return an image.
        draws: The result of :func:`draw_randaugment` for one sample; drawn if ``None``. For functions: their indices
            and levels.
        generator: The random generator, on the CPU; torch's default generator if ``None``, which a data loader seeds in
            each worker.

    Returns:
        An image of the same type, size, and mode or dtype. Pillow processes PIL images; the results differ from those
        of tensors by rounding.

    Raises:
        TypeError: ``img`` is neither a PIL image nor a tensor, or of another dtype, ``depth`` is not an int,
            ``augmentation_set`` is neither a name nor functions, or ``draws`` are of another type.
        ValueError: ``img`` has another mode or shape, or as :func:`randaugment_batch`.

    Example:
        >>> randaugment_image(torch.zeros(3, 8, 8, dtype=torch.uint8), severity=5).shape
        torch.Size([3, 8, 8])
        >>> darken = lambda img, level: img * (1 - level / 10)
        >>> bool((randaugment_image(torch.ones(1, 2, 2), severity=5, augmentation_set=[darken]) >= 0.25).all())
        True
    """
    check_image(img, augmentation_set)
    if isinstance(img, Tensor) and isinstance(augmentation_set, str):
        batch = img if img.ndim == 4 else img[None]
        batch = randaugment_batch(batch, severity, depth, augmentation_set, draws=draws, generator=generator)
        return cast("_Image", batch if img.ndim == 4 else batch[0])
    if isinstance(img, Tensor) and img.ndim == 4:  # functions of the user process single images
        settings = (severity, depth, augmentation_set)
        images = [randaugment_image(one, *settings, draws=draws, generator=generator) for one in img]
        return cast("_Image", torch.stack(images))
    if draws is None:
        draws = draw_randaugment(1, severity, depth, augmentation_set, generator=generator)
    _check_draws(draws, 1)
    steps = draws.operations[:, 0].tolist(), draws.magnitudes[:, 0].tolist()
    return cast("_Image", apply_to_image(img, augmentation_set, *steps, "nearest"))


class RandAugmentTransform(nn.Module):
    """:func:`randaugment_image` as a transform for ``torchvision.transforms.Compose``, before normalisation.

    It can be pickled, and draws from torch's default generator, which a data loader seeds in each worker.

    Args:
        severity: The largest level, in ``[0, 10]``.
        depth: The number of operations, applied one after the other.
        augmentation_set: ``"all"``, ``"safe"``, ``"original"``, or functions ``(image, level) -> image``.

    Raises:
        TypeError: ``depth`` is not an int, or ``augmentation_set`` is neither a name nor functions.
        ValueError: ``severity`` lies outside ``[0, 10]``, ``depth`` is negative, or ``augmentation_set`` is unknown.

    Example:
        >>> RandAugmentTransform(severity=5)(torch.rand(3, 8, 8)).shape
        torch.Size([3, 8, 8])
    """

    def __init__(self, severity: float = 9, depth: int = 2, augmentation_set: AugmentationSet = "all") -> None:
        super().__init__()
        check_severity(severity)
        check_augmentation_set(augmentation_set)
        _check_depth(depth)
        self.severity = severity
        self.depth = depth
        self.augmentation_set = augmentation_set

    def forward(self, img: _Image) -> _Image:
        """Apply random operations to one image."""
        return randaugment_image(img, self.severity, self.depth, self.augmentation_set)

    def extra_repr(self) -> str:
        """Return the settings for ``repr``."""
        return f"severity={self.severity}, depth={self.depth}, augmentation_set={self.augmentation_set!r}"


def randaugment(severity: float = 9, depth: int = 2, augmentation_set: AugmentationSet = "all") -> RandAugmentTransform:
    """Return a transform for a dataset: :class:`RandAugmentTransform`, with the same arguments.

    Args:
        severity: The largest level, in ``[0, 10]``.
        depth: The number of operations, applied one after the other.
        augmentation_set: ``"all"``, ``"safe"``, ``"original"``, or functions ``(image, level) -> image``.

    Returns:
        The transform.

    Raises:
        TypeError: As :class:`RandAugmentTransform`.
        ValueError: As :class:`RandAugmentTransform`.

    Example:
        >>> randaugment()
        RandAugmentTransform(severity=9, depth=2, augmentation_set='all')
    """
    return RandAugmentTransform(severity, depth, augmentation_set)


def apply_to_image(
    img: Any, augmentation_set: AugmentationSet, choices: list[int], magnitudes: list[float], interpolation: str
) -> Any:
    """Apply operations to a PIL image, or the user's functions, by their indices; negative ones are skipped."""
    if isinstance(augmentation_set, str):
        from composer.functional.augmentations.pil_operations import apply_to_pil  # noqa: PLC0415 (imports Pillow)

        return apply_to_pil(img, choices, magnitudes, interpolation)
    for choice, level in zip(choices, magnitudes, strict=True):
        if choice >= 0:
            img = augmentation_set[choice](img, level)
    return img


def _check_depth(depth: int) -> None:
    check_whole("depth", depth, 0, "It is the number of operations, applied one after the other.")


def _check_draws(draws: RandAugmentDraws, count: int) -> None:
    if not isinstance(draws, RandAugmentDraws):
        raise TypeError(f"draws must be RandAugmentDraws, as by draw_randaugment, got {type(draws).__name__}.")
    check_draws(draws.operations, draws.magnitudes, (count,))
