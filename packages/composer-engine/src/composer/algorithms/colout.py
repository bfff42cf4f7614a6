"""ColOut: drop rows and columns of the images."""

from __future__ import annotations

from typing import Any, ClassVar

import attrs

from composer import functional as cf
from composer.algorithms._annotations import BOX_FORMAT, annotated_images, check_keys, set_annotated_images
from composer.algorithms._dataset import ImageAugmentation
from composer.algorithms._idle import warn_if_idle
from composer.core import BatchKey, Event, FieldsByEvent, Stage, State
from composer.core.checks import by_name, is_flag, number
from composer.core.saving.components import transient
from composer.functional.augmentations.colout import check_resize_target

_PART = "It is the fraction to drop."


@attrs.define(eq=False)
class ColOut(ImageAugmentation):
    """Drop random rows and columns, which makes images smaller and training faster.

    See :func:`composer.functional.colout_batch`.

    Args:
        p_row: The fraction of rows to drop, in ``[0, 1)``.
        p_col: The fraction of columns to drop, in ``[0, 1)``.
        batch: Drop the same rows and columns in the entire batch, after it is loaded. Otherwise the training dataset's
            ``transform`` drops other ones in each image, in the workers of the loader.
        resize_target: Whether targets lose the same rows and columns; with ``"auto"``, targets of the images' size do.
        input_key: The key of the images in a batch, for ``batch=True``.
        target_key: The key of the targets in a batch, for ``batch=True``.
        mask_key: The key of masks that lose the same rows and columns, for ``batch=True``.
        boxes_key: The key of boxes that move with the pixels, for ``batch=True``.
        keypoints_key: The key of keypoints that move with the pixels, for ``batch=True``.
        labels_key: The key of the labels of boxes. Those of boxes of which nothing remains are removed.
        box_format: The format of the boxes: ``"xyxy"``, ``"xywh"`` or ``"cxcywh"``.

    Raises:
        TypeError: A fraction is not a number.
        ValueError: A fraction is out of range, ``resize_target`` is none of the three, there are labels without boxes,
            or there are keys of masks, boxes or keypoints with ``batch=False``.

    Example:
        >>> ColOut(p_row=0.1, p_col=0.1).batch
        True
    """

    p_row: float = number(0.15, 0, 1, below=True, meaning=_PART)
    p_col: float = number(0.15, 0, 1, below=True, meaning=_PART)
    batch: bool = attrs.field(default=True, validator=is_flag)
    resize_target: bool | str = attrs.field(default="auto", validator=by_name(check_resize_target))
    input_key: BatchKey = 0
    target_key: BatchKey = 1
    mask_key: BatchKey | None = None
    boxes_key: BatchKey | None = None
    keypoints_key: BatchKey | None = None
    labels_key: BatchKey | None = None
    box_format: str = attrs.field(default="xyxy", validator=BOX_FORMAT)
    _transform: Any = transient(default=None)

    runs_at: ClassVar = dict.fromkeys(ImageAugmentation.runs_at, Stage.RESHAPE)
    reads: ClassVar = FieldsByEvent({**ImageAugmentation.reads.by_event, Event.AFTER_DATALOADER: {"batch"}})
    writes: ClassVar = FieldsByEvent({**ImageAugmentation.writes.by_event, Event.AFTER_DATALOADER: {"batch"}})

    def __attrs_post_init__(self) -> None:
        is_idle = self.p_row == self.p_col == 0
        warn_if_idle(self, p_row=is_idle, p_col=is_idle)
        check_keys(self)
        keys = (self.mask_key, self.boxes_key, self.keypoints_key)
        if not self.batch and any(key is not None for key in keys):
            raise ValueError(
                "batch must be True to move masks, boxes and keypoints, got False: a dataset's transform has images "
                "alone."
            )

    def make_transform(self) -> Any:
        """Return ColOut for single images."""
        return cf.colout(self.p_row, self.p_col, self.resize_target)

    def augment_batch(self, state: State) -> None:
        """Drop rows and columns of the batch."""
        sample = (annotated_images(self, state), state.batch_get_item(self.target_key))
        images, target = cf.colout_batch(
            sample,
            self.p_row,
            self.p_col,
            self.resize_target,
            box_format=self.box_format,  # type: ignore[arg-type]
            generator=state.generator(self),
        )
        set_annotated_images(self, state, images)
        if target is not sample[1]:
            state.batch_set_item(self.target_key, target)
