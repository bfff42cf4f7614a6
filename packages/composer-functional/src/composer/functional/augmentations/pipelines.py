"""kornia's augmentations on batches with their masks, boxes and keypoints, drawn from a generator."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn

from composer.functional.checks import check_numbers, described
from composer.functional.random import check_generator

__all__ = ["AugmentationDraws", "AugmentedBatch", "augment_batch", "draw_augmentation"]

BoxFormat: TypeAlias = Literal["xyxy", "xywh", "cxcywh"]
Points: TypeAlias = Tensor | Sequence[Tensor]

_FORMATS = ("xyxy", "xywh", "cxcywh")
_PIXEL_CENTRE = 0.5
_ROUNDING = 1e-4


class AugmentationDraws(NamedTuple):
    """What an augmentation drew for one batch; :func:`draw_augmentation` makes it.

    Attributes:
        seed: The seed of the draws. ``torch.manual_seed(seed)`` followed by kornia's own call gives the same result.
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


class AugmentedBatch(NamedTuple):
    """A batch of images and what belongs to it, after an augmentation.

    Attributes:
        input: The images.
        masks, boxes, keypoints, labels: In the form in which they were passed; ``None`` if they were not.

    Example:
        >>> import kornia.augmentation as K
        >>> images, masks = torch.rand(1, 3, 2, 2), torch.tensor([[[1, 2], [3, 4]]])
        >>> batch = augment_batch(images, K.RandomHorizontalFlip(p=1.0), masks=masks)
        >>> batch.masks, batch.boxes
        (tensor([[[2, 1],
                 [4, 3]]]), None)
    """

    input: Tensor
    masks: Tensor | None = None
    boxes: Points | None = None
    keypoints: Points | None = None
    labels: Sequence[Any] | Tensor | None = None


def draw_augmentation(
    augmentation: nn.Module, shape: Sequence[int], *, generator: torch.Generator | None = None
) -> AugmentationDraws:
    """Draw the parameters of an augmentation for a batch of a given shape.

    kornia draws from torch's global generator. That is seeded with a number drawn from ``generator``, and restored.

    Args:
        augmentation: An augmentation of kornia, a container of them, or any module.
        shape: The shape of the batch, ``(N, C, H, W)``; ``(N, T, C, H, W)`` for a ``VideoSequential``.
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
    seed = int(torch.randint(2**62, (), generator=generator, device="cpu"))
    with _preserved_rng(None):
        torch.default_generator.manual_seed(seed)
        draw = getattr(augmentation, "forward_parameters", None)
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
        input: Images, shape ``(N, C, H, W)``, or videos, ``(N, T, C, H, W)``. Floating point in ``[0, 1]``, or uint8
            in 0 to 255, which is augmented as float32 and rounded. float16 and bfloat16 are augmented in float32.
        augmentation: The augmentation. It must return as many samples as it gets.
        masks: A mask for each image, shape ``(N, H, W)`` or ``(N, K, H, W)``, any dtype. Values are not interpolated;
            whole numbers must be below 2**24.
        boxes: A tensor of shape ``(N, B, 4)``, or a list of ``N`` tensors of shape ``(B_i, 4)``, in pixels, measured at
            the edges of pixels as torchvision does: the first pixel covers 0 to 1.
        keypoints: A tensor of shape ``(N, K, 2)``, or a list of ``N`` tensors of shape ``(K_i, 2)``, x before y, in
            pixels, measured at their centres as torchvision and kornia do: the first pixel is 0.
        labels: For a list of boxes, the tensors with an entry for each box. Entries of dropped boxes are removed.
        box_format: ``"xyxy"``, ``"xywh"`` or ``"cxcywh"``; ignored for torchvision's ``BoundingBoxes``.
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

    Boxes of a list are dropped by a comparison that waits for the device they are on: keep them on the CPU, as data
    loaders return them, where that matters.

    Example:
        >>> import kornia.augmentation as K
        >>> images, boxes = torch.zeros(2, 3, 32, 32), [torch.tensor([[2.0, 4.0, 10.0, 8.0]]), torch.zeros(0, 4)]
        >>> augmented = augment_batch(images, K.RandomHorizontalFlip(p=1.0), boxes=boxes)
        >>> augmented.boxes[0]
        tensor([[22.,  4., 30.,  8.]])
    """
    _check_images(input)
    _check_options(box_format, min_visible, params)
    count = input.shape[0]
    drawn = draw_augmentation(augmentation, input.shape, generator=generator) if params is None else params
    has_more = not (masks is None and boxes is None and keypoints is None)
    if labels is not None and not isinstance(boxes, (list, tuple)):
        raise ValueError("labels needs a list of boxes, from which boxes are dropped; got labels without one.")
    if not has_more:
        (output,) = _apply(augmentation, drawn, {"input": _to_float(input)}).values()
        return _restore(_same_count(output, count, augmentation), input)

    has_points = not (boxes is None and keypoints is None)
    if has_points and input.ndim == 5:
        raise ValueError("boxes and keypoints cannot be moved with videos, got an input of five dimensions.")
    _check_movable(augmentation, points=has_points)
    items: dict[str, Tensor] = {"input": _to_float(input)}
    if masks is not None:
        _check_masks(masks, input)
        items["mask"] = _to_float(masks, scaled=False).reshape(count, -1, *masks.shape[-2:])
    all_boxes, all_points = None, None
    if boxes is not None:
        all_boxes = _Ragged.of(boxes, "boxes", 4, count)
        corners = _to_corners(all_boxes.padded, all_boxes.format or box_format).to(items["input"])
        items["keypoints"] = corners.flatten(1, 2)
    if keypoints is not None:
        all_points = _Ragged.of(keypoints, "keypoints", 2, count)
        given = all_points.padded.to(items["input"])
        items["keypoints"] = torch.cat([items["keypoints"], given], 1) if "keypoints" in items else given

    moved = _apply(augmentation, drawn, items)
    output = _restore(_same_count(moved["input"], count, augmentation), input)
    height, width = output.shape[-2:]
    result = AugmentedBatch(output)
    if masks is not None:
        kept = moved["mask"].reshape(*masks.shape[:-2], *moved["mask"].shape[-2:])
        result = result._replace(masks=_restore(kept, masks, scaled=False))
    points = moved.get("keypoints")
    if all_boxes is not None:
        assert points is not None
        num_corners = all_boxes.padded.shape[1] * 4
        corners, points = points[:, :num_corners].view(count, -1, 4, 2), points[:, num_corners:]
        clipped, visible = _clip(corners, (height, width))
        new_boxes = _from_xyxy(clipped, all_boxes.format or box_format)
        keep = (visible > 0) & (visible >= min_visible - _ROUNDING) if all_boxes.lengths is not None else None
        result = result._replace(
            boxes=all_boxes.restore(new_boxes, keep, canvas_size=(height, width)),
            labels=None if labels is None else all_boxes.select(labels, keep),
        )
    if all_points is not None:
        assert points is not None
        result = result._replace(keypoints=all_points.restore(points, None, canvas_size=(height, width)))
    return result


class _Ragged(NamedTuple):
    """Boxes or keypoints of a batch as one tensor, and the form in which they were passed."""

    padded: Tensor
    """Shape ``(N, B, size)``, padded with zeros."""

    originals: Tensor | Sequence[Tensor]
    lengths: list[int] | None
    """The number of each image's boxes or keypoints; None if a tensor was passed."""

    format: BoxFormat | None
    """The format of torchvision's ``BoundingBoxes``; None for plain tensors."""

    @classmethod
    def of(cls, given: Points, name: str, size: int, count: int) -> _Ragged:
        """Check and pad what was passed as ``name``."""
        expected = (
            f"{name} must be a tensor of shape ({count}, any number, {size}) or a list of {count} tensors of shape "
            f"(any number, {size}), one for each image, got"
        )
        if isinstance(given, Tensor):
            if given.ndim != 3 or given.shape[0] != count or given.shape[2] != size:
                raise ValueError(f"{expected} a tensor of shape {tuple(given.shape)}.")
            return cls(given, given, None, None)
        if not isinstance(given, (list, tuple)) or not all(isinstance(one, Tensor) for one in given):
            raise TypeError(f"{expected} {described(given)}.")
        if len(given) != count:
            raise ValueError(f"{expected} a list of {len(given)}.")
        for one in given:
            if one.ndim != 2 or one.shape[1] != size:
                raise ValueError(f"{expected} one of shape {tuple(one.shape)} in the list.")
        formats = {getattr(one, "format", None) for one in given}
        named = None if formats == {None} else {str(getattr(one, "value", one)).lower() for one in formats}
        if named is not None and (len(named) != 1 or not named <= set(_FORMATS)):
            got = ", ".join(sorted(named))
            raise ValueError(f"boxes must all have one format of {', '.join(_FORMATS)}, got {got}.")
        plain = [one.as_subclass(Tensor).to(torch.float64) for one in given]
        padded = nn.utils.rnn.pad_sequence(plain, batch_first=True) if plain else torch.zeros(0, 0, size)
        return cls(padded, given, [len(one) for one in given], None if named is None else named.pop())  # type: ignore[arg-type]

    def restore(self, moved: Tensor, keep: Tensor | None, canvas_size: tuple[int, int]) -> Points:
        """Return the moved values in the form, dtype and device of the originals, without those not to keep."""
        if self.lengths is None:
            assert isinstance(self.originals, Tensor)
            return _restore(moved, self.originals, scaled=False).to(self.originals.device)
        restored = []
        for place, (original, length) in enumerate(zip(self.originals, self.lengths, strict=True)):
            values = moved[place, :length] if keep is None else moved[place, :length][keep[place, :length]]
            plain = _restore(values, original.as_subclass(Tensor), scaled=False).to(original.device)
            restored.append(_wrap_like(plain, original, canvas_size))
        return restored

    def select(self, labels: Sequence[Tensor], keep: Tensor | None) -> list[Tensor]:
        """Return the labels of the boxes that are kept."""
        assert keep is not None
        assert self.lengths is not None
        lengths = [len(one) for one in labels]
        if lengths != self.lengths:
            raise ValueError(f"labels must have one entry for each box of each image, {self.lengths}, got {lengths}.")
        pairs = zip(labels, self.lengths, strict=True)
        return [one[keep[place, :length].to(one.device)] for place, (one, length) in enumerate(pairs)]


def _wrap_like(plain: Tensor, original: Tensor, canvas_size: tuple[int, int]) -> Tensor:
    """Return a tensor as the original's class of ``torchvision.tv_tensors``, which is not imported here."""
    if not hasattr(original, "canvas_size"):
        return plain
    kept = {name: getattr(original, name) for name in ("format", "clamping_mode") if hasattr(original, name)}
    constructor: Any = type(original)
    wrapped: Tensor = constructor(plain, canvas_size=canvas_size, **kept)
    return wrapped


def _apply(augmentation: nn.Module, draws: AugmentationDraws, items: dict[str, Tensor]) -> dict[str, Tensor]:
    """Apply an augmentation with its draws to an input and, by kornia's names, to what belongs to it."""
    input = items["input"]
    with _preserved_rng(input.device), torch.autocast(input.device.type, enabled=False):
        torch.default_generator.set_state(draws.rng_state)
        if input.is_cuda:
            with torch.cuda.device(input.device):
                torch.cuda.manual_seed(draws.seed)
        if len(items) == 1:
            output = augmentation(input) if draws.params is None else augmentation(input, params=draws.params)
            return {"input": output}
        from kornia.augmentation import AugmentationSequential  # noqa: PLC0415  (importing kornia takes seconds)
        from kornia.augmentation.container.params import ParamItem  # noqa: PLC0415

        container, params = augmentation, draws.params
        if not isinstance(augmentation, AugmentationSequential):
            container = AugmentationSequential(augmentation)  # type: ignore[arg-type]
            ((name, _),) = container.named_children()
            params = [ParamItem(name, params)]
        outputs = container(*items.values(), params=params, data_keys=list(items))
        return dict(zip(items, outputs, strict=True))


@contextmanager
def _preserved_rng(device: torch.device | None) -> Iterator[None]:
    """Restore torch's global generators of the CPU and of the device, or of the current one if None."""
    cpu = torch.default_generator.get_state()
    is_cuda = torch.cuda.is_initialized() if device is None else device.type == "cuda"  # type: ignore[no-untyped-call]
    cuda = torch.cuda.get_rng_state("cuda" if device is None else device) if is_cuda else None
    try:
        yield
    finally:
        torch.default_generator.set_state(cpu)
        if cuda is not None:
            torch.cuda.set_rng_state(cuda, "cuda" if device is None else device)


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


def _check_masks(masks: Tensor, input: Tensor) -> None:
    allowed = (input.ndim - 1, input.ndim)
    fits = isinstance(masks, Tensor) and masks.ndim in allowed and masks.shape[-2:] == input.shape[-2:]
    if not fits or masks.shape[0] != input.shape[0]:
        got = tuple(masks.shape) if isinstance(masks, Tensor) else described(masks)
        raise ValueError(
            f"masks must be a tensor of shape (N, H, W) or (N, K, H, W) with the {input.shape[0]} samples, height and "
            f"width of input, {tuple(input.shape)}, got {got}."
        )


def _check_options(box_format: str, min_visible: float, params: AugmentationDraws | None) -> None:
    check_numbers(min_visible=min_visible)
    if params is not None and not isinstance(params, AugmentationDraws):
        raise TypeError(f"params must be draws of draw_augmentation, or None, got {described(params)}.")
    if box_format not in _FORMATS:
        raise ValueError(f"box_format must be one of {', '.join(map(repr, _FORMATS))}, got {box_format!r}.")
    if not 0 <= min_visible <= 1:
        raise ValueError(f"min_visible must be in [0, 1], got {min_visible}. It is a fraction of a box's area.")


def _check_movable(augmentation: nn.Module, *, points: bool) -> None:
    """Refuse modules that would change the images and leave what belongs to them where it was."""
    from kornia import augmentation as ka  # noqa: PLC0415  (importing kornia takes seconds)
    from kornia.augmentation.base import _AugmentationBase  # noqa: PLC0415
    from kornia.augmentation.container.base import SequentialBase  # noqa: PLC0415

    if not isinstance(augmentation, (_AugmentationBase, SequentialBase)):
        raise TypeError(
            "augmentation must be one of kornia's to move masks, boxes or keypoints, "
            f"got {type(augmentation).__name__}, which can be applied to images alone."
        )
    no_points = (ka.RandomElasticTransform, ka.RandomThinPlateSpline, ka.RandomFisheye)
    no_masks = (ka.RandomThinPlateSpline, ka.RandomFisheye, ka.MixAugmentationBaseV2)
    for module in augmentation.modules():
        if isinstance(module, no_masks) or (points and isinstance(module, no_points)):
            raise ValueError(
                f"{type(module).__name__} cannot move {'boxes and keypoints' if points else 'masks'} with the images. "
                "Leave it out, or apply it to images alone."
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


def _restore(values: Tensor, original: Tensor, *, scaled: bool = True) -> Tensor:
    """Return values in the dtype and the memory format of the original."""
    if not original.is_floating_point():
        values = (values * 255).clamp(0, 255) if scaled else values
        values = values.round()
    is_last = original.ndim == 4 and original.is_contiguous(memory_format=torch.channels_last)
    if is_last and not original.is_contiguous():
        return values.to(original.dtype, memory_format=torch.channels_last)
    return values.to(original.dtype)


def _to_corners(boxes: Tensor, box_format: BoxFormat) -> Tensor:
    """Return the corners of boxes, shape ``(N, B, 4, 2)``, in pixels of the centres, as kornia has them."""
    boxes = boxes.float()
    first, second = boxes[..., :2], boxes[..., 2:]
    if box_format == "cxcywh":
        first = first - second / 2
    if box_format != "xyxy":
        second = first + second
    (left, top), (right, bottom) = first.unbind(-1), second.unbind(-1)
    corners = [left, top, right, top, right, bottom, left, bottom]
    return torch.stack(corners, dim=-1).view(*boxes.shape[:-1], 4, 2) - _PIXEL_CENTRE


def _clip(corners: Tensor, size: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """Return the smallest upright boxes around corners, clipped to the image, and the fractions of area left."""
    low, high = (corners + _PIXEL_CENTRE).aminmax(dim=-2)
    limit = torch.tensor([size[1], size[0]], device="cpu").to(corners, non_blocking=True)
    clipped = torch.cat([low.clamp_min(0).minimum(limit), high.clamp_min(0).minimum(limit)], dim=-1)
    area, left = (high - low).prod(-1), (clipped[..., 2:] - clipped[..., :2]).prod(-1)
    return clipped, left / area.clamp_min(torch.finfo(area.dtype).tiny)


def _from_xyxy(boxes: Tensor, box_format: BoxFormat) -> Tensor:
    if box_format == "xyxy":
        return boxes
    first, second = boxes[..., :2], boxes[..., 2:]
    return torch.cat([first if box_format == "xywh" else (first + second) / 2, second - first], dim=-1)
