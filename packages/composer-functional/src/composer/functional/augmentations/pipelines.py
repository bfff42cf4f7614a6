"""kornia's augmentations on batches with their masks, boxes and keypoints, drawn from a generator."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from composer.functional.augmentations.annotations import (
    AugmentedBatch,
    BoxFormat,
    Points,
    Ragged,
    check_annotations,
    check_box_options,
    from_corners,
    restore,
    to_corners,
)
from composer.functional.checks import described
from composer.functional.random import check_generator

_PART_BYTES = 4 * 2**20
_SAMPLEWISE = """
    ColorJiggle ColorJitter Denormalize Normalize RandomAffine RandomBrightness RandomContrast RandomCrop RandomErasing
    RandomGrayscale RandomHorizontalFlip RandomHue RandomInvert RandomPerspective RandomPosterize RandomResizedCrop
    RandomRotation RandomRotation90 RandomSaturation RandomShear RandomSolarize RandomTranslate RandomVerticalFlip
    AugmentationSequential ImageSequential
""".split()  # noqa: SIM905  (a list would take a line for each name)
"""Classes of kornia that give the same bits for a part of a batch with its parameters as for the complete batch.

Others pair samples, draw while they are applied, have parameters for the batch, fail if only some images change their
size, or call functions of torch whose rounding may depend on the batch size.
"""


_IN_PLACE = ("kornia.augmentation.", "kornia.color.", "kornia.enhance.", "kornia.filters.")
"""Packages of kornia whose modules move masks and points with the images, or leave all of them in their place."""
_RESIZING = ("BlurPool2D", "EdgeAwareBlurPool2D", "MaxBlurPool2D", "RawToRgb2x2Downscaled")
"""Classes in these packages that shrink the images and leave masks and points as they are."""


class AugmentationDraws(NamedTuple):
    """What an augmentation drew for one batch; :func:`draw_augmentation` makes it.

    Attributes:
        seed: The seed of the draws. ``torch.manual_seed(seed)`` and then kornia's own call give the same result.
        params: The parameters that kornia drew; ``None`` for modules that draw only while they are applied.
        rng_state: The state of the CPU's generator after these draws, for those that are made while it is applied.

    Example:
        >>> import kornia.augmentation as K
        >>> flip, images = K.RandomHorizontalFlip(p=0.5), torch.rand(4, 3, 8, 8)
        >>> draws = draw_augmentation(flip, images.shape)
        >>> torch.equal(augment_batch(images, flip, params=draws), augment_batch(images, flip, params=draws))
        True
    """

    seed: int
    params: Any
    rng_state: Tensor


def draw_augmentation(
    augmentation: nn.Module, shape: Sequence[int], *, generator: torch.Generator | None = None
) -> AugmentationDraws:
    """Draw the parameters of an augmentation for a batch of a given shape.

    kornia draws from torch's global generator. That is seeded with a number drawn from ``generator``, and restored.

    Args:
        augmentation: An augmentation of kornia, a container of them, or any module.
        shape: The shape of the batch, ``(N, C, H, W)``; ``(N, T, C, H, W)`` for a ``VideoSequential``, and
            ``(N, C, D, H, W)`` for augmentations of volumes.
        generator: Source of randomness, a CPU generator; torch's default one if ``None``.

    Returns:
        The draws, for ``augment_batch(..., params=)``.

    Raises:
        TypeError: ``augmentation`` is not a module.
        ValueError: ``generator`` is not on the CPU.

    Example:
        >>> import kornia.augmentation as K
        >>> generator = torch.Generator().manual_seed(17)
        >>> draw_augmentation(K.RandomRotation(30.0), (4, 3, 32, 32), generator=generator).params["degrees"].shape
        torch.Size([4])
    """
    if not isinstance(augmentation, nn.Module):
        raise TypeError(
            f"augmentation must be a torch.nn.Module such as kornia.augmentation.RandomAffine(30.0), "
            f"got {described(augmentation)}."
        )
    check_generator(generator)
    draw = getattr(augmentation, "forward_parameters", None)
    seed = int(torch.randint(2**62, (), generator=generator, device="cpu"))
    with _preserved_rng(None):
        torch.default_generator.manual_seed(seed)
        params = draw(torch.Size(shape)) if callable(draw) else None
        return AugmentationDraws(seed, params, torch.default_generator.get_state())


def augment_batch(
    input: Tensor,
    augmentation: nn.Module,
    *,
    masks: Tensor | None = None,
    boxes: Points | None = None,
    keypoints: Points | None = None,
    labels: Sequence[Tensor] | None = None,
    box_format: BoxFormat = "xyxy",
    min_visible: float = 0.0,
    params: AugmentationDraws | None = None,
    generator: torch.Generator | None = None,
) -> Tensor | AugmentedBatch:
    """Apply an augmentation of kornia to a batch, and move masks, boxes and keypoints with the images.

    ``augmentation`` is any of ``kornia.augmentation``: a single one, an ``AugmentationSequential``, ``ImageSequential``
    or ``VideoSequential``, or a policy of ``kornia.augmentation.auto``. Any other module that maps images to images can
    be applied to images alone. All draws come from ``generator``; torch's global generators are left as they were.

    Args:
        input: Images, shape ``(N, C, H, W)``, videos, ``(N, T, C, H, W)``, or volumes, ``(N, C, D, H, W)``. Floating
            point in ``[0, 1]``, or uint8 in 0 to 255, which is augmented as float32 and rounded. float16 and bfloat16
            are augmented in float32.
        augmentation: The augmentation. It must return as many samples as it gets.
        masks: A mask for each image, shape ``(N, H, W)`` or ``(N, K, H, W)``, or for each frame of a video,
            ``(N, T, H, W)``, or with classes in the video's format, ``(N, T, K, H, W)`` or ``(N, K, T, H, W)``. Any
            dtype; values are not interpolated, and whole numbers must be below 2**24.
        boxes: A tensor of shape ``(N, B, 4)``, or a list of ``N`` tensors of shape ``(B_i, 4)``, in pixels, measured at
            the edges of pixels as torchvision does: the first pixel covers 0 to 1. Or kornia's vertices, shape
            ``(N, B, 4, 2)`` or a list of ``(B_i, 4, 2)``, the centres of the pixels in the corners, as for its data key
            ``"bbox"``; or kornia's ``Boxes``. They are returned in the same form, as the smallest upright boxes.
        keypoints: A tensor of shape ``(N, K, 2)``, or a list of ``N`` tensors of shape ``(K_i, 2)``, x before y, in
            pixels, measured at their centres as torchvision and kornia do: the first pixel is 0.
        labels: For a list of boxes, the tensors with an entry for each box. Entries of dropped boxes are removed.
        box_format: ``"xyxy"``, ``"xywh"`` or ``"cxcywh"``; ignored for torchvision's ``BoundingBoxes`` and vertices.
        min_visible: Boxes of a list are dropped if less than this fraction of their area, or nothing, is left in the
            image, in ``[0, 1]``. Boxes of a tensor are clipped, and never dropped.
        params: Draws of :func:`draw_augmentation` to use instead of new ones.
        generator: Source of randomness, a CPU generator; torch's default one if ``None``.

    Returns:
        The images, in the dtype and memory format of ``input``; an :class:`AugmentedBatch` if there is more than
        images.

    Raises:
        TypeError: ``input`` is not a batch of images, or ``augmentation`` is not a module.
        ValueError: Masks, boxes or keypoints do not fit the batch, the augmentation cannot move them, or it returns
            another number of samples.

    On a CPU, images of 8 MiB or more in float32 are augmented in parts, which is faster, with the same result, if all
    augmentations are of those that process each image alone. What kornia's modules record, such as
    ``transform_matrix``, is then that of the last part.

    Boxes and keypoints are returned on the device that they came from. If that is the CPU and the images are on a GPU,
    this waits for the GPU, and so does dropping boxes of a list on a GPU.

    Example:
        >>> import kornia.augmentation as K
        >>> images, boxes = torch.zeros(2, 3, 32, 32), [torch.tensor([[2.0, 4.0, 10.0, 8.0]]), torch.zeros(0, 4)]
        >>> augmented = augment_batch(images, K.RandomHorizontalFlip(p=1.0), boxes=boxes)
        >>> augmented.boxes[0]
        tensor([[22.,  4., 30.,  8.]])
    """
    _check_images(input)
    check_box_options(box_format, min_visible)
    if params is not None and not isinstance(params, AugmentationDraws):
        raise TypeError(f"params must be draws of draw_augmentation, or None, got {described(params)}.")
    check_annotations(AugmentedBatch(input, masks, boxes, keypoints, labels), keypoints=True)
    count = input.shape[0]
    drawn = draw_augmentation(augmentation, input.shape, generator=generator) if params is None else params
    if masks is None and boxes is None and keypoints is None:
        (output,) = _apply(augmentation, drawn, {"input": _to_float(input)}).values()
        return restore(_same_count(output, count, augmentation), input)

    has_points = not (boxes is None and keypoints is None)
    if has_points and input.ndim == 5:
        raise ValueError("boxes and keypoints cannot be moved with videos, got an input of five dimensions.")
    _check_movable(augmentation, points=has_points)
    items: dict[str, Tensor] = {"input": _to_float(input)}
    if masks is not None:
        given = _to_float(masks, scaled=False)
        items["mask"] = given if input.ndim == 5 else given.reshape(count, -1, *masks.shape[-2:])
    all_boxes, all_points = None, None
    if boxes is not None:
        all_boxes = Ragged.of(boxes, "boxes", count)
        if labels is not None:
            all_boxes.check_labels(labels)
        items["keypoints"] = to_corners(all_boxes.xyxy(box_format)).to(items["input"]).flatten(1, 2)
    if keypoints is not None:
        all_points = Ragged.of(keypoints, "keypoints", count)
        padded = all_points.padded.to(items["input"])
        items["keypoints"] = torch.cat([items["keypoints"], padded], 1) if "keypoints" in items else padded

    moved = _apply(augmentation, drawn, items)
    output = restore(_same_count(moved["input"], count, augmentation), input)
    height, width = output.shape[-2:]
    result = AugmentedBatch(output)
    if masks is not None:
        kept = moved["mask"].reshape(*masks.shape[:-2], *moved["mask"].shape[-2:])
        result = result._replace(masks=restore(kept, masks, scaled=False))
    points = moved.get("keypoints")
    if all_boxes is not None:
        assert points is not None
        num_corners = all_boxes.padded.shape[1] * 4
        corners, points = points[:, :num_corners].view(count, -1, 4, 2), points[:, num_corners:]
        xyxy = from_corners(corners).to(all_boxes.padded.device)
        boxes, labels = all_boxes.restore_clipped(xyxy, labels, box_format, (height, width), min_visible)
        result = result._replace(boxes=boxes, labels=labels)
    if all_points is not None:
        assert points is not None
        result = result._replace(keypoints=all_points.restore(points, None, (height, width)))
    return result


def _apply(augmentation: nn.Module, draws: AugmentationDraws, items: dict[str, Tensor]) -> dict[str, Tensor]:
    """Apply an augmentation with its draws to an input and, by kornia's names, to what belongs to it."""
    input = items["input"]
    with _preserved_rng(input.device), torch.autocast(input.device.type, enabled=False):
        torch.default_generator.set_state(draws.rng_state)
        if input.is_cuda:
            with torch.cuda.device(input.device):
                torch.cuda.manual_seed(draws.seed)
        parts = _split(augmentation, draws.params, items)
        if parts is None:
            return _call(augmentation, draws.params, items)
        outputs = [_call(augmentation, params, part) for params, part in parts]
        return {name: torch.cat([one[name] for one in outputs]) for name in items}


def _call(augmentation: nn.Module, params: Any, items: dict[str, Tensor]) -> dict[str, Tensor]:
    if len(items) == 1:
        input = items["input"]
        return {"input": augmentation(input) if params is None else augmentation(input, params=params)}
    from kornia.augmentation import AugmentationSequential  # noqa: PLC0415  (kornia is imported at first use)
    from kornia.augmentation.container.params import ParamItem  # noqa: PLC0415

    container = augmentation
    if not isinstance(augmentation, AugmentationSequential):
        container = AugmentationSequential(augmentation)  # type: ignore[arg-type]
        ((name, _),) = container.named_children()
        params = [ParamItem(name, params)]
    outputs = container(*items.values(), params=params, data_keys=list(items))
    return dict(zip(items, outputs, strict=True))


def _split(
    augmentation: nn.Module, params: Any, items: dict[str, Tensor]
) -> list[tuple[Any, dict[str, Tensor]]] | None:
    """Split a large batch on a CPU, with its parameters, into parts of two or more, if results are the same.

    Temporary tensors of a large batch miss the caches, and their memory is mapped again for each operation.
    """
    input = items["input"]
    count = input.shape[0]
    num_parts = min(input.nbytes // _PART_BYTES, count // 2)
    if num_parts < 2 or input.device.type != "cpu" or input.requires_grad or not _is_samplewise(augmentation):
        return None
    bounds = [count * index // num_parts for index in range(num_parts + 1)]
    return [
        (_select(params, start, stop, count), {name: item[start:stop] for name, item in items.items()})
        for start, stop in pairwise(bounds)
    ]


def _is_samplewise(augmentation: nn.Module) -> bool:
    kind = type(augmentation)
    if kind.__name__ not in _SAMPLEWISE or not kind.__module__.startswith("kornia.augmentation."):
        return False
    if getattr(augmentation, "_compile_kwargs", None) is not None:  # each size of a batch would be compiled
        return False
    return not isinstance(augmentation, nn.Sequential) or all(map(_is_samplewise, augmentation.children()))


def _select(params: Any, start: int, stop: int, count: int) -> Any:
    """Return kornia's parameters for some of the samples."""
    if isinstance(params, list):
        return [item._replace(data=_select(item.data, start, stop, count)) for item in params]
    per_sample = params.keys() - {"forward_input_shape", "order"}
    selected = {name: params[name][start:stop] for name in per_sample if len(params[name]) == count}
    shape = params["forward_input_shape"].clone()
    shape[0] = stop - start
    return params | selected | {"forward_input_shape": shape}


def _preserved_rng(device: torch.device | None) -> AbstractContextManager[None]:
    """Restore torch's global generators of the CPU and of the device, or of the current one if None."""
    is_cuda = torch.cuda.is_initialized() if device is None else device.type == "cuda"  # type: ignore[no-untyped-call]
    return torch.random.fork_rng([device or torch.cuda.current_device()] if is_cuda else [])


def _check_images(input: Tensor) -> None:
    if not isinstance(input, Tensor) or not (input.is_floating_point() or input.dtype is torch.uint8):
        raise TypeError(
            f"input must be a batch of images, floating point or uint8, got {described(input)}. Convert it to a tensor."
        )
    if input.ndim not in (4, 5) or not input.numel():
        raise ValueError(
            "input must have shape (N, C, H, W), or (N, T, C, H, W) for videos, without empty dimensions, "
            f"got {tuple(input.shape)}. Add the dimension of the batch to a single image: input[None]."
        )


def _check_movable(augmentation: nn.Module, *, points: bool) -> None:
    """Reject modules that would change the images and leave what belongs to them where it was."""
    from kornia import augmentation as ka  # noqa: PLC0415  (kornia is imported at first use)
    from kornia.augmentation.base import _AugmentationBase  # noqa: PLC0415
    from kornia.augmentation.container.base import SequentialBase  # noqa: PLC0415

    no_points = (ka.RandomElasticTransform, ka.RandomThinPlateSpline, ka.RandomFisheye)
    no_masks = (ka.RandomThinPlateSpline, ka.RandomFisheye, ka.MixAugmentationBaseV2, ka.AugmentationBase3D)
    for module in augmentation.modules():
        if isinstance(module, no_masks) or (points and isinstance(module, no_points)):
            raise ValueError(
                f"{type(module).__name__} cannot move {'boxes and keypoints' if points else 'masks'} with the images. "
                "Leave it out, or apply it to images alone."
            )
    containers = [module for module in augmentation.modules() if isinstance(module, SequentialBase)]
    inner = [child for container in containers for child in container.children() if type(child) is not nn.Identity]
    for module in (augmentation, *inner):
        kind = type(module)
        known = isinstance(module, (_AugmentationBase, SequentialBase)) or (
            module is not augmentation and kind.__module__.startswith(_IN_PLACE) and kind.__name__ not in _RESIZING
        )
        if not known:
            raise TypeError(
                "augmentation must be one of kornia's to move masks, boxes or keypoints, "
                f"got {type(module).__name__}, which can be applied to images alone."
            )


def _same_count(output: Tensor, count: int, augmentation: nn.Module) -> Tensor:
    if not isinstance(output, Tensor) or output.shape[0] != count:
        got = f"{output.shape[0]}" if isinstance(output, Tensor) else described(output)
        raise ValueError(f"{type(augmentation).__name__} must return as many images as it gets, {count}, got {got}.")
    return output


def _to_float(values: Tensor, *, scaled: bool = True) -> Tensor:
    if values.dtype in (torch.float32, torch.float64):
        return values.as_subclass(Tensor)
    return values.as_subclass(Tensor).float() / (255 if values.dtype is torch.uint8 and scaled else 1)
