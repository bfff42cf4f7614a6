"""CutOut: fill squares of every image with zeros."""

from __future__ import annotations

from typing import ClassVar

import attrs

from composer import functional as cf
from composer.core import Algorithm, BatchKey, Event, Logger, Stage, State
from composer.core.checks import number_between, true_or_false, whole_number_from

__all__ = ["CutOut"]


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

    Raises:
        TypeError: A value is not a number.
        ValueError: A value is out of range.

    Example:
        >>> CutOut(num_holes=2, length=0.25)
        CutOut(num_holes=2, length=0.25, uniform_sampling=False, input_key=0)
    """

    num_holes: int = attrs.field(default=1, validator=whole_number_from(1, meaning="It is the number of squares."))
    length: float = attrs.field(
        default=0.5, validator=number_between(0, 1, above=True, meaning="It is a fraction of the image's side.")
    )
    uniform_sampling: bool = attrs.field(default=False, validator=true_or_false)
    input_key: BatchKey = 0

    runs_at: ClassVar = {Event.AFTER_DATALOADER: Stage.AUGMENT}
    reads: ClassVar = {"batch.input"}
    writes: ClassVar = {"batch.input"}

    def apply(self, event: Event, state: State, logger: Logger) -> None:
        """Fill the squares with zeros."""
        images = state.batch_get_item(self.input_key)
        holed = cf.cutout_batch(
            images, self.num_holes, self.length, self.uniform_sampling, generator=state.generator(self)
        )
        state.batch_set_item(self.input_key, holed)
