"""RandAugment: a few random operations on every image."""

from __future__ import annotations

from typing import Any

import attrs

from composer import functional as cf
from composer.algorithms._dataset import AUGMENTATION_SET, SEVERITY, ImageAugmentation
from composer.algorithms._idle import warn_if_idle
from composer.core import BatchKey, State
from composer.core.checks import integer, is_flag
from composer.core.saving.components import transient


@attrs.define(eq=False)
class RandAugment(ImageAugmentation):
    """Apply ``depth`` random operations to each image, with one severity (arXiv:1909.13719).

    See :func:`composer.functional.randaugment_image` and :func:`composer.functional.randaugment_batch`.

    Args:
        severity: The strength of the operations, from 0 to 10.
        depth: The number of operations, applied one after the other.
        augmentation_set: The operations to draw: ``"all"``, ``"safe"`` or ``"original"``.
        batch: Augment entire batches, on their device, after they are loaded; images must be floating point in
            ``[0, 1]`` or uint8. Otherwise the training dataset's ``transform`` augments each image, in the workers of
            the loader, and draws from torch's generator.
        input_key: The key of the images in a batch, for ``batch=True``.

    Raises:
        TypeError: A value is not a number.
        ValueError: A value is out of range, or ``augmentation_set`` is unknown.

    Example:
        >>> RandAugment(severity=5, batch=True).runs_at_events()
        {<Event.AFTER_DATALOADER: 'after_dataloader'>: <Stage.AUGMENT: 30>}
    """

    severity: float = attrs.field(default=9, validator=SEVERITY)
    depth: int = integer(2, 0, meaning="It is the number of operations.")
    augmentation_set: str = attrs.field(default="all", validator=AUGMENTATION_SET)
    batch: bool = attrs.field(default=False, validator=is_flag)
    input_key: BatchKey = 0
    _transform: Any = transient(default=None)

    def __attrs_post_init__(self) -> None:
        warn_if_idle(self, depth=self.depth == 0)

    def make_transform(self) -> Any:
        """Return RandAugment for single images."""
        return cf.randaugment(self.severity, self.depth, self.augmentation_set)

    def augment_batch(self, state: State) -> None:
        """Apply RandAugment to the images of the batch."""
        settings = (self.severity, self.depth, self.augmentation_set)
        images = state.batch_get_item(self.input_key)
        state.batch_set_item(self.input_key, cf.randaugment_batch(images, *settings, generator=state.generator(self)))
