"""MixUp: train on blends of two samples."""

from __future__ import annotations

from typing import Any

import attrs
import torch
from torch import Tensor

from composer import functional as cf
from composer.algorithms._annotations import BOX_FORMAT
from composer.algorithms._idle import warn_if_idle
from composer.algorithms._mixing import SampleMixing
from composer.core import BatchKey
from composer.core.checks import is_flag, number
from composer.core.saving.components import transient


@attrs.define(eq=False)
class MixUp(SampleMixing):
    """Blend every sample, and its label, with a partner from the same batch (arXiv:1710.09412).

    See :func:`composer.functional.mixup_batch`.

    Args:
        alpha: Both parameters of the Beta distribution of the partner's weight; 0 never mixes.
        interpolate_loss: Blend the losses for both labels instead of the labels, for losses that need class ids. This
            is exact for losses that are linear in the target, and calls the loss a second time, with the labels as
            other algorithms have smoothed or blended them.
        input_key: The key of the samples in a batch.
        target_key: The key of the labels in a batch.
        mask_key: The key of masks of probabilities. With it or ``boxes_key``, masks and boxes are mixed with the images
            after the batch is loaded, and ``target_key`` is not used.
        boxes_key: The key of lists of boxes.
        labels_key: The key of the labels of boxes, which are joined as the boxes are.
        box_format: The format of the boxes: ``"xyxy"``, ``"xywh"`` or ``"cxcywh"``.

    Raises:
        TypeError: ``alpha`` is not a number.
        ValueError: ``alpha`` is negative or not finite, there are labels without boxes, or masks or boxes with
            ``interpolate_loss``.

    Example:
        >>> MixUp(alpha=0.4).alpha
        0.4
    """

    alpha: float = number(0.2, 0, meaning="It is both parameters of the Beta distribution.")
    interpolate_loss: bool = attrs.field(default=False, validator=is_flag)
    input_key: BatchKey = 0
    target_key: BatchKey = 1
    mask_key: BatchKey | None = None
    boxes_key: BatchKey | None = None
    labels_key: BatchKey | None = None
    box_format: str = attrs.field(default="xyxy", validator=BOX_FORMAT)
    _partner_weight: float = transient(default=0.0)
    _partners: Tensor | None = transient(default=None)

    def __attrs_post_init__(self) -> None:
        warn_if_idle(self, alpha=self.alpha == 0)
        self.check_annotations()

    def mix(self, input: Any, target: Any, generator: torch.Generator) -> tuple[Any, Tensor, float]:
        """Blend every sample with its partner."""
        mixing = cf.draw_mixing(self.alpha, generator=generator)
        samples = input.input if isinstance(input, cf.AugmentedBatch) else input
        partners = cf.draw_permutation(samples, generator=generator)
        mixed, _, _ = cf.mixup_batch(
            input,
            target,
            mixing=mixing,
            indices=partners,
            box_format=self.box_format,  # type: ignore[arg-type]
        )
        return mixed, partners, mixing
