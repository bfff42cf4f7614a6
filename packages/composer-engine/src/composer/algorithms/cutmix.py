"""CutMix: paste a box of another image into each image."""

from __future__ import annotations

from typing import Any

import attrs
import torch
from torch import Tensor

from composer import functional as cf
from composer.algorithms._annotations import BOX_FORMAT, VISIBLE_FRACTION
from composer.algorithms._mixing import SampleMixing
from composer.core import BatchKey
from composer.core.checks import is_flag, number
from composer.core.saving.components import transient


@attrs.define(eq=False)
class CutMix(SampleMixing):
    """Paste a box of another image into every image, and blend the labels by its area (arXiv:1905.04899).

    See :func:`composer.functional.cutmix_batch`.

    Args:
        alpha: Both parameters of the Beta distribution of the box's area.
        interpolate_loss: Blend the losses for both labels instead of the labels, for losses that need class ids. This
            is exact for losses that are linear in the target, and calls the loss a second time.
        uniform_sampling: Whether all pixels are equally likely to be covered; otherwise the centre of the box is drawn
            uniformly, and the box is clipped to the image.
        input_key: The key of the images in a batch.
        target_key: The key of the labels in a batch.
        mask_key: The key of masks. With it or ``boxes_key``, masks and boxes are mixed with the images after the batch
            is loaded, and ``target_key`` is not used.
        boxes_key: The key of lists of boxes.
        labels_key: The key of the labels of boxes, which are joined as the boxes are.
        box_format: The format of the boxes: ``"xyxy"``, ``"xywh"`` or ``"cxcywh"``.
        min_visible: Boxes of which a smaller fraction is visible are dropped with their labels, in ``[0, 1]``.

    Raises:
        TypeError: ``alpha`` is not a number.
        ValueError: ``alpha`` is not positive and finite, there are labels without boxes, or masks or boxes with
            ``interpolate_loss``.

    Example:
        >>> CutMix(alpha=0.5).alpha
        0.5
    """

    alpha: float = number(1.0, 0, above=True, meaning="It is both parameters of the Beta distribution.")
    interpolate_loss: bool = attrs.field(default=False, validator=is_flag)
    uniform_sampling: bool = attrs.field(default=False, validator=is_flag)
    input_key: BatchKey = 0
    target_key: BatchKey = 1
    mask_key: BatchKey | None = None
    boxes_key: BatchKey | None = None
    labels_key: BatchKey | None = None
    box_format: str = attrs.field(default="xyxy", validator=BOX_FORMAT)
    min_visible: float = attrs.field(default=0.0, validator=VISIBLE_FRACTION)
    _partner_weight: float = transient(default=0.0)
    _partners: Tensor | None = transient(default=None)

    def __attrs_post_init__(self) -> None:
        self.check_annotations()

    def mix(self, input: Any, target: Any, generator: torch.Generator) -> tuple[Any, Tensor, float]:
        """Paste a box of its partner into every image."""
        images = input.input if isinstance(input, cf.AugmentedBatch) else input
        partners = cf.draw_permutation(images, generator=generator)
        mixed, _, adjusted_lambda, _ = cf.cutmix_batch(
            input,
            target,
            alpha=self.alpha,
            indices=partners,
            uniform_sampling=self.uniform_sampling,
            box_format=self.box_format,  # type: ignore[arg-type]
            min_visible=self.min_visible,
            generator=generator,
        )
        return mixed, partners, 1 - adjusted_lambda
