"""Masks, boxes and keypoints of a batch of images: their forms, and how they are clipped, dropped and returned."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias, TypeVar

import torch
from torch import Tensor, nn

from composer.functional.checks import check_choice, check_interval, described
from composer.functional.random import send

if TYPE_CHECKING:
    from kornia.geometry.boxes import Boxes

BoxFormat: TypeAlias = Literal["xyxy", "xywh", "cxcywh"]
Points: TypeAlias = "Tensor | Sequence[Tensor] | Boxes"
Visible: TypeAlias = Callable[[Tensor], tuple[Tensor, Tensor]]
"""Maps boxes (xyxy) to the boxes around their visible parts, and to the visible fractions of their areas."""

Batch = TypeVar("Batch", Tensor, "AugmentedBatch")
Target = TypeVar("Target", Tensor, None)

_FORMATS = ("xyxy", "xywh", "cxcywh")
# The shapes of one box, as edges or as kornia's four vertices, and of one keypoint.
_SIZES: dict[str, list[tuple[int, ...]]] = {"boxes": [(4,), (4, 2)], "keypoints": [(2,)]}
# torchvision measures coordinates from the edges of pixels, kornia from their centres.
PIXEL_CENTRE = 0.5
_NO_BOXES = (
    "labels needs a list of boxes, from which boxes are dropped; got labels without one. Class labels of images do not "
    "belong to boxes: pass them as target, or leave them out."
)
# Fractions are computed in float32: one that equals `min_visible` may be rounded to slightly less.
_ROUNDING = 1e-4


class AugmentedBatch(NamedTuple):
    """A batch of images and what belongs to it.

    :func:`augment_batch` returns one. :func:`mixup_batch`, :func:`cutmix_batch`, :func:`cutout_batch` and
    :func:`colout_batch` accept one in the place of images, and return another.

    Attributes:
        input: The images.
        masks, boxes, keypoints, labels: In the form in which they were passed; ``None`` if they were not. The forms are
            those of :func:`augment_batch`.

    Example:
        >>> from composer import functional as cf
        >>> batch = AugmentedBatch(torch.zeros(2, 1, 2, 2), masks=torch.tensor([[[1, 1], [1, 1]], [[2, 2], [2, 2]]]))
        >>> mixed, *_ = cf.cutmix_batch(batch, None, bbox=(0, 1, 2, 2), indices=torch.tensor([1, 0]))
        >>> mixed.masks[0], mixed.boxes
        (tensor([[1, 2],
                [1, 2]]), None)
    """

    input: Tensor
    masks: Tensor | None = None
    boxes: Points | None = None
    keypoints: Points | None = None
    labels: Sequence[Tensor] | None = None


class Ragged(NamedTuple):
    """Boxes or keypoints of a batch as one tensor, and the form in which they were passed."""

    padded: Tensor
    """Shape ``(N, B, 4)``, or ``(N, B, 4, 2)`` for vertices, or ``(N, K, 2)`` for keypoints, padded with zeros."""

    originals: Tensor | Sequence[Tensor]
    lengths: list[int] | None
    """The number of each image's boxes or keypoints; None if a tensor was passed."""

    format: BoxFormat | Literal["vertices"] | None
    """The format of torchvision's ``BoundingBoxes``, or kornia's vertices; None for other tensors."""

    wrapper: Boxes | None
    """kornia's ``Boxes`` if they were passed as such."""

    @classmethod
    def of(cls, given: Points, name: Literal["boxes", "keypoints"], count: int) -> Ragged:
        """Check and pad what was passed as ``name``."""
        sizes = _SIZES[name]
        size = ", ".join(map(str, sizes[0]))
        expected = (
            f"{name} must be a tensor of shape ({count}, any number, {size}) or a list of {count} tensors of shape "
            f"(any number, {size}), one for each image, got"
        )
        wrapper: Any = given if hasattr(given, "to_tensor") else None
        if wrapper is not None:
            # The inclusive form, in which kornia stores boxes: its corners are the outermost pixels of the box.
            given = wrapper.to_tensor("vertices_plus")
        if isinstance(given, Tensor):
            if given.is_nested:
                raise ValueError(f"{expected} a nested tensor. Convert it: list({name}.unbind()).")
            if given.ndim < 3 or given.shape[0] != count or given.shape[2:] not in sizes:
                raise ValueError(f"{expected} a tensor of shape {tuple(given.shape)}.")
            return cls(given, given, None, "vertices" if given.ndim == 4 else None, wrapper)
        if not isinstance(given, (list, tuple)) or not all(isinstance(one, Tensor) for one in given):
            raise TypeError(f"{expected} {described(given)}.")
        if len(given) != count:
            raise ValueError(f"{expected} a list of {len(given)}.")
        for one in given:
            if one.ndim < 2 or one.shape[1:] not in sizes or one.ndim != given[0].ndim:
                raise ValueError(f"{expected} one of shape {tuple(one.shape)} in the list.")
        named = {str(getattr(one, "value", one)).lower() for one in (getattr(each, "format", None) for each in given)}
        if named == {"none"}:  # plain tensors have no attribute `format`, unlike torchvision's BoundingBoxes
            named = {"vertices"} if given[0].ndim == 3 else set()
        elif len(named) != 1 or not named <= set(_FORMATS):
            got = ", ".join(sorted(named))
            raise ValueError(f"boxes must all have one format of {', '.join(_FORMATS)}, got {got}.")
        # In float64 only if one is: GPUs compute it at 1/64 the speed.
        dtype = functools.reduce(torch.promote_types, [one.dtype for one in given], torch.float32)
        padded = nn.utils.rnn.pad_sequence([one.as_subclass(Tensor).to(dtype) for one in given], batch_first=True)
        return cls(padded, given, [len(one) for one in given], named.pop() if named else None, wrapper)  # type: ignore[arg-type]

    def xyxy(self, box_format: BoxFormat) -> Tensor:
        """Return boxes as ``(N, B, 4)``, xyxy, float32, in pixels measured at the edges of pixels."""
        values = self.padded.as_subclass(Tensor).float()
        if self.format == "vertices":  # the centres of a box's pixels in the corners
            low, high = values.aminmax(dim=-2)
            return torch.cat([low, high + 1], dim=-1)
        if (self.format or box_format) == "xyxy":
            return values
        first, second = values[..., :2], values[..., 2:]
        first = first - second / 2 if (self.format or box_format) == "cxcywh" else first
        return torch.cat([first, first + second], dim=-1)

    def present(self) -> Tensor:
        """Return which entries are not padding, shape ``(N, B)``, on the CPU; for lists only."""
        assert self.lengths is not None
        return torch.arange(self.padded.shape[1], device="cpu") < torch.tensor(self.lengths, device="cpu")[:, None]

    def restore_boxes(
        self, xyxy: Tensor, keep: Tensor | None, box_format: BoxFormat, canvas_size: tuple[int, int]
    ) -> Points:
        """Return boxes (xyxy) in the form of the originals; a list loses the boxes for which ``keep`` is false."""
        if self.format == "vertices":
            return self.restore(_corners(xyxy[..., :2], xyxy[..., 2:] - 1), keep, canvas_size)
        if (self.format or box_format) != "xyxy":
            first, second = xyxy[..., :2], xyxy[..., 2:]
            start = first if (self.format or box_format) == "xywh" else (first + second) / 2
            xyxy = torch.cat([start, second - first], dim=-1)
        return self.restore(xyxy, keep, canvas_size)

    def restore_clipped(
        self,
        xyxy: Tensor,
        labels: Sequence[Tensor] | None,
        box_format: BoxFormat,
        size: tuple[int, int],
        min_visible: float = 0.0,
    ) -> tuple[Points, list[Tensor] | None]:
        """Return boxes (xyxy) clipped to images of a size, and labels; a list loses those that are not visible."""
        clipped, visible = clip(xyxy, 0, 0, size[1], size[0])
        keep = None if self.lengths is None else to_keep(visible, self.present(), min_visible)
        boxes = self.restore_boxes(clipped, keep, box_format, size)
        return boxes, None if labels is None or keep is None else select(labels, keep, self.present())

    def restore(self, changed: Tensor, keep: Tensor | None, canvas_size: tuple[int, int]) -> Points:
        """Return values in the form, dtype and device of the originals; a list loses those with a false ``keep``."""
        restored: Any
        if self.lengths is None:
            assert isinstance(self.originals, Tensor)
            restored = restore(changed, self.originals, scaled=False).to(self.originals.device)
        else:
            restored = []
            rows = None if keep is None else _by_image(keep.nonzero()[:, 1], keep, changed.device)
            for place, (original, length) in enumerate(zip(self.originals, self.lengths, strict=True)):
                values = changed[place, :length] if rows is None else changed[place].index_select(0, rows[place])
                plain = restore(values, original.as_subclass(Tensor), scaled=False).to(original.device)
                restored.append(_wrap_like(plain, original, canvas_size))
        return restored if self.wrapper is None else type(self.wrapper)(restored, False, self.wrapper.mode)

    def check_labels(self, labels: object) -> None:
        """Raise an error for labels that are not one for each box."""
        if self.lengths is None:
            raise ValueError(_NO_BOXES)
        if not isinstance(labels, (list, tuple, Tensor)) or not all(
            isinstance(one, Tensor) and one.ndim for one in labels
        ):
            got = f"a tensor of shape {tuple(labels.shape)}" if isinstance(labels, Tensor) else described(labels)
            raise TypeError(
                "labels must be a list of tensors, one for each image, with one entry for each of its boxes, got "
                f"{got}. Pass class labels of images as target."
            )
        lengths = [len(one) for one in labels]
        if lengths != self.lengths:
            raise ValueError(f"labels must have one entry for each box of each image, {self.lengths}, got {lengths}.")


def select(labels: Sequence[Tensor], keep: Tensor, present: Tensor) -> list[Tensor]:
    """Return the labels of the boxes that are kept, of padded boxes of which some are present."""
    rows = _by_image((present.cumsum(1) - 1)[keep], keep, labels[0].device)
    return [one.index_select(0, kept.to(one.device)) for one, kept in zip(labels, rows, strict=True)]


def _by_image(places: Tensor, keep: Tensor, device: torch.device) -> Sequence[Tensor]:
    """Return the places of what is kept on a device, for each image, sent in one copy."""
    return torch.split(send(places, device), keep.sum(dim=1).tolist())


def to_keep(visible: Tensor, present: Tensor, min_visible: float = 0.0) -> Tensor:
    """Return which boxes are not dropped, of those present, from the fractions of their areas that are visible.

    The result is on the CPU, because the sizes of what is returned depend on it. This waits for the device, once for
    all images.
    """
    return ((visible > 0) & (visible >= min_visible - _ROUNDING)).cpu() & present


def clip(xyxy: Tensor, x1: float, y1: float, x2: float, y2: float) -> tuple[Tensor, Tensor]:
    """Return boxes clipped to a rectangle, and the fractions of their areas that are left."""
    left, top, right, bottom = xyxy.unbind(-1)
    clipped = torch.stack([left.clamp(x1, x2), top.clamp(y1, y2), right.clamp(x1, x2), bottom.clamp(y1, y2)], dim=-1)
    # An empty box has the fraction 0, not 0 / 0.
    return clipped, _area(clipped) / _area(xyxy).clamp_min(torch.finfo(xyxy.dtype).tiny)


def clip_outside(
    xyxy: Tensor, x1: float, y1: float, x2: float, y2: float, *, size: tuple[int, int]
) -> tuple[Tensor, Tensor]:
    """Return the smallest boxes around what a rectangle leaves visible, and the fractions of their areas."""
    inside, fraction = clip(xyxy, 0, 0, size[1], size[0])
    covered = clip(inside, x1, y1, x2, y2)[0]
    left, top, right, bottom = inside.unbind(-1)
    # An edge moves only if the rectangle covers all of the box beside it.
    all_rows, all_columns = (top >= y1) & (bottom <= y2), (left >= x1) & (right <= x2)
    new_left = torch.where(all_rows & (left >= x1), left.clamp_min(x2), left)
    new_right = torch.where(all_rows & (right <= x2), right.clamp_max(x1), right).maximum(new_left)
    new_top = torch.where(all_columns & (top >= y1), top.clamp_min(y2), top)
    new_bottom = torch.where(all_columns & (bottom <= y2), bottom.clamp_max(y1), bottom).maximum(new_top)
    covered_fraction = _area(covered) / _area(xyxy).clamp_min(torch.finfo(xyxy.dtype).tiny)
    return torch.stack([new_left, new_top, new_right, new_bottom], dim=-1), fraction - covered_fraction


def images_of(input: Any) -> Any:
    """Return the images of an :class:`AugmentedBatch`, and any other value unchanged."""
    return input.input if isinstance(input, AugmentedBatch) else input


def mix_boxes(
    batch: AugmentedBatch,
    indices: Tensor,
    own: Visible,
    partner: Visible,
    *,
    box_format: BoxFormat = "xyxy",
    min_visible: float = 0.0,
) -> AugmentedBatch:
    """Join the boxes and labels of each image with those of its partner, as far as they are visible."""
    assert batch.boxes is not None
    boxes = Ragged.of(batch.boxes, "boxes", len(indices))
    if boxes.lengths is None:
        raise ValueError(
            "boxes must be a list of tensors, one for each image, because the number of boxes changes, got a tensor. "
            "Convert it: list(boxes)."
        )
    xyxy, present, labels = boxes.xyxy(box_format), boxes.present(), batch.labels
    partners, order = indices.to(xyxy.device), indices.cpu()
    (kept, own_visible), (pasted, partner_visible) = own(xyxy), partner(xyxy)
    # Each image's own boxes first, then those of its partner, and the labels in the same order.
    present = torch.cat([present, present[order]], dim=1)
    keep = to_keep(torch.cat([own_visible, partner_visible[partners]], dim=1), present, min_visible)
    if labels is not None:
        boxes.check_labels(labels)
        joined = [torch.cat([labels[place], labels[other]]) for place, other in enumerate(order.tolist())]
        labels = select(joined, keep, present)
    size = (batch.input.shape[-2], batch.input.shape[-1])
    union = torch.cat([kept, pasted[partners]], dim=1)
    return batch._replace(boxes=boxes.restore_boxes(union, keep, box_format, size), labels=labels)


def check_annotations(batch: AugmentedBatch, *, keypoints: bool = False) -> None:
    """Raise an error for masks or labels that do not fit the images, and for keypoints where they cannot be moved."""
    if batch.masks is not None:
        check_masks(batch.masks, batch.input)
    if batch.labels is not None and batch.boxes is None:
        raise ValueError(_NO_BOXES)
    if batch.keypoints is not None and not keypoints:
        raise ValueError("keypoints cannot be mixed with those of other images. Set keypoints of the batch to None.")


def check_masks(masks: Tensor, input: Tensor) -> None:
    """Raise an error for masks that do not fit the images."""
    allowed = (input.ndim - 1, input.ndim)
    is_dense = isinstance(masks, Tensor) and not masks.is_nested
    fits = is_dense and masks.ndim in allowed and masks.shape[-2:] == input.shape[-2:]
    if not fits or masks.shape[0] != input.shape[0]:
        got = (
            f"{tuple(masks.shape)}."
            if is_dense
            else f"{described(masks)}. Draw masks of instances into one of class ids."
        )
        raise ValueError(
            f"masks must be a tensor of shape (N, H, W) or (N, K, H, W) with the {input.shape[0]} samples, height and "
            f"width of input, {tuple(input.shape)}, got {got}"
        )


def check_box_options(box_format: str, min_visible: float = 0.0) -> None:
    """Raise an error for an unknown format, and for a ``min_visible`` outside ``[0, 1]``."""
    check_choice("box_format", box_format, *_FORMATS)
    check_interval("min_visible", min_visible, 0, 1, "It is a fraction of a box's area.")


def restore(values: Tensor, original: Tensor, *, scaled: bool = True) -> Tensor:
    """Return values in the dtype and the memory format of the original."""
    if not original.is_floating_point():
        values = (values * 255).clamp(0, 255) if scaled else values
        values = values.round()
    # A tensor with one channel or one pixel is contiguous in both formats; converting it would change its strides.
    is_last = original.ndim == 4 and original.is_contiguous(memory_format=torch.channels_last)
    if is_last and not original.is_contiguous():
        return values.to(original.dtype, memory_format=torch.channels_last)
    return values.to(original.dtype)


def to_corners(xyxy: Tensor) -> Tensor:
    """Return the corners of boxes, shape ``(N, B, 4, 2)``, in pixels measured at their centres, as in kornia."""
    return _corners(xyxy[..., :2], xyxy[..., 2:]) - PIXEL_CENTRE


def _corners(low: Tensor, high: Tensor) -> Tensor:
    """Return the corners ``(N, B, 4, 2)`` of boxes, clockwise from the upper left, which is ``low``."""
    (left, top), (right, bottom) = low.unbind(-1), high.unbind(-1)
    return torch.stack([left, top, right, top, right, bottom, left, bottom], dim=-1).view(*low.shape[:-1], 4, 2)


def from_corners(corners: Tensor) -> Tensor:
    """Return the smallest upright boxes, xyxy, around corners measured at the centres of pixels."""
    return torch.cat((corners + PIXEL_CENTRE).aminmax(dim=-2), dim=-1)


def _area(xyxy: Tensor) -> Tensor:
    return (xyxy[..., 2:] - xyxy[..., :2]).prod(-1)


def _wrap_like(plain: Tensor, original: Tensor, canvas_size: tuple[int, int]) -> Tensor:
    """Return a tensor as the original's class of ``torchvision.tv_tensors``, which is not imported here."""
    if not hasattr(original, "canvas_size"):
        return plain
    kept = {name: getattr(original, name) for name in ("format", "clamping_mode") if hasattr(original, name)}
    constructor: Any = type(original)
    wrapped: Tensor = constructor(plain, canvas_size=canvas_size, **kept)
    return wrapped
