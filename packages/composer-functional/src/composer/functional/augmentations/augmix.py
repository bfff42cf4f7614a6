"""AugMix: blend an image with chains of operations on it (Hendrycks et al. 2019, arXiv:1912.02781)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar, cast

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
    mix_tensors,
)
from composer.functional.augmentations.randaugment import apply_to_image
from composer.functional.checks import check_whole
from composer.functional.random import check_alpha, send

if TYPE_CHECKING:
    from PIL.Image import Image

_Image = TypeVar("_Image", bound="Image | Tensor")


@dataclass(frozen=True)
class AugMixDraws:
    """The operations of AugMix in each chain of each sample, and the weights; see :func:`draw_augmix`.

    Attributes:
        operations: Indices as in :class:`RandAugmentDraws`, 0 after the end of a chain, shape ``(depth, width, N)``,
            int64, on the CPU.
        magnitudes: As in :class:`RandAugmentDraws`, shape ``(depth, width, N)``, float32, on the CPU.
        weights: The weights of the chains, which sum to 1, shape ``(width, N)``, float32, on the CPU.
        mixing: The total weight of the chains relative to the image itself, shape ``(N,)``, float32, on the CPU.

    Example:
        >>> one_chain = torch.ones(1, 1, 1)
        >>> half_moved = AugMixDraws(12 * one_chain.long(), 0.5 * one_chain, torch.ones(1, 1), torch.tensor([0.5]))
        >>> augmix_batch(torch.tensor([[[[0.2, 0.8]]]]), draws=half_moved)
        tensor([[[[0.1000, 0.5000]]]])
    """

    operations: Tensor
    magnitudes: Tensor
    weights: Tensor
    mixing: Tensor


def draw_augmix(
    count: int,
    severity: float = 3,
    depth: int = -1,
    width: int = 3,
    alpha: float = 1.0,
    augmentation_set: AugmentationSet = "all",
    *,
    generator: torch.Generator | None = None,
) -> AugMixDraws:
    """Draw chains of operations for each sample, and the weights of the blend.

    Operations and levels are drawn as by :func:`draw_randaugment`, the weights of the chains from a Dirichlet
    distribution, and the total weight of the chains from a Beta distribution.

    Args:
        count: The number of samples, at least 1.
        severity: The largest level, in ``[0, 10]``.
        depth: The number of operations in a chain; if negative, 1, 2 or 3 are drawn for each chain; 0 is the identity.
        width: The number of chains, at least 1.
        alpha: All parameters of both distributions, positive; larger values give more even weights.
        augmentation_set: ``"all"``, ``"safe"`` or ``"original"``, or functions; see :func:`draw_randaugment`.
        generator: The random generator, on the CPU; torch's default generator if ``None``.

    Returns:
        The draws, on the CPU.

    Raises:
        TypeError: ``count``, ``depth`` or ``width`` is not an int, or ``augmentation_set`` is neither a name nor
            functions.
        ValueError: ``severity`` lies outside ``[0, 10]``, ``width`` or ``count`` is less than 1, ``alpha`` is not
            positive and finite, ``augmentation_set`` is unknown, or ``generator`` is not on the CPU.

    Example:
        >>> draws = draw_augmix(4, generator=torch.Generator().manual_seed(17))
        >>> draws.operations.shape, draws.weights.sum(0)
        (torch.Size([3, 3, 4]), tensor([1., 1., 1., 1.]))
    """
    check_whole("count", count, 1, "It is the number of samples.")
    _check_mixture(depth, width, alpha)
    steps = depth if depth >= 0 else 3
    operations, magnitudes = draw_operations((steps, width, count), severity, augmentation_set, generator)
    if depth < 0:
        # As in the paper, each chain has 1, 2 or 3 operations. Shorter chains end with identities (-1 for functions).
        lengths = torch.randint(1, 4, (width, count), generator=generator, device="cpu")
        is_over = torch.arange(steps, device="cpu")[:, None, None] >= lengths
        operations = operations.masked_fill(is_over, 0 if isinstance(augmentation_set, str) else -1)
    weights = _draw_dirichlet(width, count, alpha, generator)
    # The first part of a symmetric Dirichlet distribution of two parts has the distribution Beta(alpha, alpha).
    mixing = _draw_dirichlet(2, count, alpha, generator)[0]
    return AugMixDraws(operations, magnitudes, weights, mixing)


def augmix_batch(
    input: Tensor,
    severity: float = 3,
    depth: int = -1,
    width: int = 3,
    alpha: float = 1.0,
    augmentation_set: str = "all",
    *,
    draws: AugMixDraws | None = None,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Blend every image of a batch with chains of random operations on it (arXiv:1912.02781).

    ``output[n] = (1 - mixing[n]) * input[n] + mixing[n] * (weights[0, n] * chain[0](input[n]) + …)``

    Geometric operations move pixels, with bilinear interpolation; the border is filled with black. Targets that
    depend on positions (segmentation masks, boxes, key points) are not moved: this is for classification.

    Nothing waits for a device: draws are made on the CPU and copied. Under ``torch.compile`` every operation is
    computed for every sample, so that one graph works for all draws; on a GPU, copying the draws synchronises there.

    Args:
        input: Images, shape ``(N, C, H, W)`` with 1 or 3 channels: uint8, or floating point from 0 to 1. Other
            values are not detected, which would wait for the device, and some operations clip them: normalise later.
        severity: The largest level, in ``[0, 10]``; see :func:`draw_randaugment`.
        depth: The number of operations in a chain; if negative, 1, 2 or 3 are drawn for each chain; 0 is the identity.
        width: The number of chains, at least 1.
        alpha: All parameters of the distributions of the weights, positive.
        augmentation_set: ``"all"``, ``"safe"`` or ``"original"``; see :func:`draw_randaugment`.
        draws: The result of :func:`draw_augmix`, which replaces the previous arguments; drawn if ``None``.
        generator: The random generator, on the CPU; torch's default generator if ``None``.

    Returns:
        A new tensor with the shape, dtype and memory format of ``input``, from 0 to 1 or 255. uint8 values are rounded
        after each operation and once after blending.

    Raises:
        TypeError: ``input`` is neither uint8 nor floating point, ``depth`` or ``width`` is not an int,
            ``augmentation_set`` is not a name, or ``draws`` are of another type.
        ValueError: ``input`` has another shape or is empty, ``draws`` are for another number of samples or not on the
            CPU, or as :func:`draw_augmix`.

    Example:
        >>> images = torch.rand(4, 3, 8, 8)
        >>> augmix_batch(images).shape
        torch.Size([4, 3, 8, 8])
        >>> torch.equal(augmix_batch(images, depth=0), images)
        True
    """
    check_images(input)
    if draws is None:
        check_named_set(augmentation_set, "augmix_image")
        draws = draw_augmix(input.shape[0], severity, depth, width, alpha, augmentation_set, generator=generator)
    _check_draws(draws, input.shape[0])
    if not draws.operations.shape[0]:
        return input.clone()
    width = draws.weights.shape[0]
    return map_samples(_mix, input, draws.operations, draws.magnitudes, draws.weights, draws.mixing, copies=width)


def augmix_image(
    img: _Image,
    severity: float = 3,
    depth: int = -1,
    width: int = 3,
    alpha: float = 1.0,
    augmentation_set: AugmentationSet = "all",
    *,
    draws: AugMixDraws | None = None,
    generator: torch.Generator | None = None,
) -> _Image:
    """Blend one image with chains of operations on it, for a data loader (arXiv:1912.02781).

    Geometric operations move pixels. Targets that depend on positions (segmentation masks, boxes, key points) are not
    moved: this is for classification.

    Args:
        img: A PIL image, mode ``"RGB"`` or ``"L"``; or a tensor ``(C, H, W)`` or ``(N, C, H, W)`` as in
            :func:`augmix_batch`, which processes a batch.
        severity: The largest level, in ``[0, 10]``; see :func:`draw_randaugment`.
        depth: The number of operations in a chain; if negative, 1, 2 or 3 are drawn for each chain; 0 is the identity.
        width: The number of chains, at least 1.
        alpha: All parameters of the distributions of the weights, positive.
        augmentation_set: ``"all"``, ``"safe"`` or ``"original"``, see :func:`draw_randaugment`; or functions that take
            the image and a level, drawn from 0 to ``severity``, and return an image of the same size.
        draws: The result of :func:`draw_augmix` for one sample; drawn if ``None``. For functions: their indices, -1
            after the end of a chain, and levels.
        generator: The random generator, on the CPU; torch's default generator if ``None``, which a data loader seeds in
            each worker.

    Returns:
        An image of the same type, size, and mode or dtype. Pillow processes PIL images; the results differ from those
        of tensors by rounding and at the border of rotated images.

    Raises:
        TypeError: ``img`` is neither a PIL image nor a tensor, or of another dtype, ``depth`` or ``width`` is not an
            int, ``augmentation_set`` is neither a name nor functions, or ``draws`` are of another type.
        ValueError: ``img`` has another mode or shape, or as :func:`augmix_batch`.

    Example:
        >>> augmix_image(torch.zeros(3, 8, 8, dtype=torch.uint8)).shape
        torch.Size([3, 8, 8])
    """
    check_image(img, augmentation_set)
    if isinstance(img, Tensor) and isinstance(augmentation_set, str):
        batch = img if img.ndim == 4 else img[None]
        batch = augmix_batch(batch, severity, depth, width, alpha, augmentation_set, draws=draws, generator=generator)
        return cast("_Image", batch if img.ndim == 4 else batch[0])
    if isinstance(img, Tensor) and img.ndim == 4:  # functions of the user process single images
        settings = (severity, depth, width, alpha, augmentation_set)
        images = [augmix_image(one, *settings, draws=draws, generator=generator) for one in img]
        return cast("_Image", torch.stack(images))
    if draws is None:
        draws = draw_augmix(1, severity, depth, width, alpha, augmentation_set, generator=generator)
    _check_draws(draws, 1)
    return cast("_Image", _mix_chains(img, draws, augmentation_set))


class AugmentAndMixTransform(nn.Module):
    """:func:`augmix_image` as a transform for ``torchvision.transforms.Compose``, before normalisation.

    It can be pickled, and draws from torch's default generator, which a data loader seeds in each worker.

    Args:
        severity: The largest level, in ``[0, 10]``.
        depth: The number of operations in a chain; if negative, 1, 2 or 3 are drawn for each chain.
        width: The number of chains, at least 1.
        alpha: All parameters of the distributions of the weights, positive.
        augmentation_set: ``"all"``, ``"safe"``, ``"original"``, or functions ``(image, level) -> image``.

    Raises:
        TypeError: ``depth`` or ``width`` is not an int, or ``augmentation_set`` is neither a name nor functions.
        ValueError: ``severity`` lies outside ``[0, 10]``, ``width`` is less than 1, ``alpha`` is not positive and
            finite, or ``augmentation_set`` is unknown.

    Example:
        >>> AugmentAndMixTransform(severity=5)(torch.rand(3, 8, 8)).shape
        torch.Size([3, 8, 8])
    """

    def __init__(
        self,
        severity: float = 3,
        depth: int = -1,
        width: int = 3,
        alpha: float = 1.0,
        augmentation_set: AugmentationSet = "all",
    ) -> None:
        super().__init__()
        check_severity(severity)
        check_augmentation_set(augmentation_set)
        _check_mixture(depth, width, alpha)
        self.severity = severity
        self.depth = depth
        self.width = width
        self.alpha = alpha
        self.augmentation_set = augmentation_set

    def forward(self, img: _Image) -> _Image:
        """Blend one image with chains of operations on it."""
        return augmix_image(img, self.severity, self.depth, self.width, self.alpha, self.augmentation_set)

    def extra_repr(self) -> str:
        """Return the settings for ``repr``."""
        return (
            f"severity={self.severity}, depth={self.depth}, width={self.width}, alpha={self.alpha}, "
            f"augmentation_set={self.augmentation_set!r}"
        )


def augmix(
    severity: float = 3,
    depth: int = -1,
    width: int = 3,
    alpha: float = 1.0,
    augmentation_set: AugmentationSet = "all",
) -> AugmentAndMixTransform:
    """Return a transform for a dataset: :class:`AugmentAndMixTransform`, with the same arguments.

    Args:
        severity: The largest level, in ``[0, 10]``.
        depth: The number of operations in a chain; if negative, 1, 2 or 3 are drawn for each chain.
        width: The number of chains, at least 1.
        alpha: All parameters of the distributions of the weights, positive.
        augmentation_set: ``"all"``, ``"safe"``, ``"original"``, or functions ``(image, level) -> image``.

    Returns:
        The transform.

    Raises:
        TypeError: As :class:`AugmentAndMixTransform`.
        ValueError: As :class:`AugmentAndMixTransform`.

    Example:
        >>> augmix()
        AugmentAndMixTransform(severity=3, depth=-1, width=3, alpha=1.0, augmentation_set='all')
    """
    return AugmentAndMixTransform(severity, depth, width, alpha, augmentation_set)


def _mix_chains(img: Image | Tensor, draws: AugMixDraws, augmentation_set: AugmentationSet) -> Image | Tensor:
    """Blend one image, of PIL or for functions of the user, with its chains."""
    steps = zip(draws.operations[..., 0].T.tolist(), draws.magnitudes[..., 0].T.tolist(), strict=True)
    chains = [apply_to_image(img, augmentation_set, *step, "bilinear") for step in steps]
    weights, mixing = draws.weights[:, 0].tolist(), draws.mixing.item()
    if isinstance(img, Tensor):
        mixed = mix_tensors(img, chains, weights, mixing)
        return mixed if img.is_floating_point() else mixed.round_().to(img.dtype)
    from composer.functional.augmentations.pil_operations import mix_pil  # noqa: PLC0415 (imports Pillow)

    return mix_pil(img, chains, weights, mixing)


def _mix(
    images: Tensor, bound: float, operations: Tensor, magnitudes: Tensor, weights: Tensor, mixing: Tensor
) -> Tensor:
    # One copy to the device for all weights: those of the chains and, last, that of the image itself.
    weights = torch.cat((weights * mixing, 1 - mixing[None])).to(images.dtype)
    weights = send(weights, images.device)[..., None, None, None]
    chains = apply_steps(images, bound, operations.flatten(1), magnitudes.flatten(1), interpolation="bilinear")
    mixed = images * weights[-1]
    for chain, weight in zip(chains.view(-1, *images.shape), weights[:-1], strict=True):
        mixed.addcmul_(chain, weight)
    return mixed.round_() if bound != 1 else mixed


def _draw_dirichlet(parts: int, count: int, alpha: float, generator: torch.Generator | None) -> Tensor:
    parameters = torch.full((count, parts), alpha, dtype=torch.float64, device="cpu")
    return torch._sample_dirichlet(parameters, generator).T.float()  # noqa: SLF001 (Dirichlet takes no generator)


def _check_mixture(depth: int, width: int, alpha: float) -> None:
    check_whole("depth", depth, meaning="It is the number of operations in a chain.")
    check_whole("width", width, 1, "It is the number of chains.")
    check_alpha(alpha)


def _check_draws(draws: AugMixDraws, count: int) -> None:
    if not isinstance(draws, AugMixDraws):
        raise TypeError(f"draws must be AugMixDraws, as by draw_augmix, got {type(draws).__name__}.")
    check_draws(draws.operations, draws.magnitudes, (draws.weights.shape[0], count))
    if draws.weights.shape[1:] != (count,) or draws.mixing.shape != (count,):
        raise ValueError(
            f"draws must hold weights of shape (width, {count}) and mixing of shape ({count},), "
            f"got {tuple(draws.weights.shape)} and {tuple(draws.mixing.shape)}."
        )
