"""CutOut: fill squares of every image with zeros."""

from __future__ import annotations

import math
from typing import ClassVar

import attrs

from composer import functional as cf
from composer.algorithms._annotations import annotated_images, set_annotated_images
from composer.core import Algorithm, BatchKey, Event, Logger, Stage, State
from composer.core.checks import integer, is_flag, number


@attrs.define(eq=False)
class CutOut(Algorithm):
    """Fill squares of the images with zeros (arXiv:1708.04552).

    See :func:`composer.functional.cutout_batch`.

    Args:
        num_holes: The number of squares.
        length: The side of a square, as a fraction of the image's shorter side, in ``(0, 1]``.
        uniform_sampling: Whether all pixels are equally likely to be covered; otherwise the centre of the square is
            drawn uniformly, and the square is clipped to the image.
        input_key: The key of the images in a batch.
        mask_key: The key of masks in which the squares are filled, too, with ``mask_value``.
        mask_value: What masks are filled with, such as the class id that the loss ignores.

    Raises:
        TypeError: A value is not a number.
        ValueError: A value is out of range, or only one of ``mask_key`` and ``mask_value`` is set.

    Example:
        >>> CutOut(num_holes=2, length=0.25).length
        0.25
    """

    num_holes: int = integer(1, 1, meaning="It is the number of squares.")
    length: float = number(0.5, 0, 1, above=True, meaning="It is a fraction of the image's side.")
    uniform_sampling: bool = attrs.field(default=False, validator=is_flag)
    input_key: BatchKey = 0
    mask_key: BatchKey | None = None
    mask_value: float | None = number(None, -math.inf, meaning="Masks are filled with it.")

    acted = 0
    idle_reason = "All squares had less than a pixel: choose a larger length."
    runs_at: ClassVar = {Event.AFTER_DATALOADER: Stage.AUGMENT}
    reads: ClassVar = {"batch"}
    writes: ClassVar = {"batch"}

    def __attrs_post_init__(self) -> None:
        if (self.mask_key is None) != (self.mask_value is None):
            raise ValueError(
                f"mask_key and mask_value must be set together, got {self.mask_key!r} and {self.mask_value!r}."
            )

    def apply(self, event: Event, state: State, logger: Logger) -> None:
        """Fill the squares with zeros."""
        images = annotated_images(self, state)
        height, width = (images.input if isinstance(images, cf.AugmentedBatch) else images).shape[-2:]
        settings, generator = (self.num_holes, self.length, self.uniform_sampling), state.generator(self)
        holes = cf.draw_holes((height, width), *settings, generator=generator)
        self.acted += any(left < right for left, _, right, _ in holes)
        set_annotated_images(self, state, cf.cutout_batch(images, boxes=holes, mask_value=self.mask_value))
