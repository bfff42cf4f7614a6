"""AugMix: blend an image with several augmented versions of itself."""

from __future__ import annotations

from typing import Any

import attrs

from composer import functional as cf
from composer.algorithms._dataset import AUGMENTATION_SET, SEVERITY, ImageAugmentation
from composer.algorithms._idle import warn_if_idle
from composer.core import BatchKey, State
from composer.core.checks import integer, is_flag, number
from composer.core.saving.components import transient


@attrs.define(eq=False)
class AugMix(ImageAugmentation):
    """Blend every image with ``width`` chains of augmentations of itself (arXiv:1912.02781).

    See :func:`composer.functional.augmix_image` and :func:`composer.functional.augmix_batch`. The consistency
    loss of the paper is not included.

    Args:
        severity: The strength of the operations, from 0 to 10.
        depth: Operations in a chain; -1 draws one to three for each chain.
        width: The number of chains.
        alpha: The parameter of the Dirichlet and Beta distributions of the weights.
        augmentation_set: The operations to draw: ``"all"``, ``"safe"`` or ``"original"``.
        batch: Augment entire batches, on their device, after they are loaded; images must be floating point in
            ``[0, 1]`` or uint8. Otherwise the training dataset's ``transform`` augments each image, in the workers of
            the loader, and draws from torch's generator.
        input_key: The key of the images in a batch, for ``batch=True``.

    Raises:
        TypeError: A value is not a number.
        ValueError: A value is out of range, or ``augmentation_set`` is unknown.

    Example:
        >>> AugMix(width=2, batch=True).runs_at_events()
        {<Event.AFTER_DATALOADER: 'after_dataloader'>: <Stage.AUGMENT: 30>}
    """

    severity: float = attrs.field(default=3, validator=SEVERITY)
    depth: int = integer(-1, -1, meaning="It is the length of a chain.")
    width: int = integer(3, 1, meaning="It is the number of chains.")
    alpha: float = number(1.0, 0, above=True, meaning="It is the parameter of the weights' distributions.")
    augmentation_set: str = attrs.field(default="all", validator=AUGMENTATION_SET)
    batch: bool = attrs.field(default=False, validator=is_flag)
    input_key: BatchKey = 0
    _transform: Any = transient(default=None)

    def __attrs_post_init__(self) -> None:
        warn_if_idle(self, depth=self.depth == 0)

    def make_transform(self) -> Any:
        """Return AugMix for single images."""
        return cf.augmix(self.severity, self.depth, self.width, self.alpha, self.augmentation_set)

    def augment_batch(self, state: State) -> None:
        """Apply AugMix to the images of the batch."""
        settings = (self.severity, self.depth, self.width, self.alpha, self.augmentation_set)
        images = state.batch_get_item(self.input_key)
        state.batch_set_item(self.input_key, cf.augmix_batch(images, *settings, generator=state.generator(self)))
