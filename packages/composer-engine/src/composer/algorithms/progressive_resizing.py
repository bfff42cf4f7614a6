"""ProgressiveResizing: start with small images."""

from __future__ import annotations

from typing import ClassVar

import attrs

from composer import functional as cf
from composer.algorithms._idle import warn_if_idle
from composer.algorithms._progress import FRACTION_OF_TRAINING, elapsed_duration
from composer.core import Algorithm, BatchKey, Event, Logger, Stage, State
from composer.core.checks import integer, is_flag, number, one_of
from composer.core.declarations import owned


@attrs.define(eq=False)
class ProgressiveResizing(Algorithm):
    """Train on small images first, and increase them to their full size.

    See :func:`composer.functional.resize_batch`. Sides are multiples of ``size_increment``, so that a model is
    compiled for few sizes, see :meth:`sizes`.

    Args:
        mode: ``"resize"`` scales images; ``"crop"`` crops them at a random position.
        initial_scale: The first size, as a fraction of the images' side, in ``(0, 1]``.
        finetune_fraction: The fraction of the training, at its end, with the full size.
        delay_fraction: The fraction of the training, at its start, with the first size.
        size_increment: The sides of images are multiples of it.
        resize_targets: Whether targets are images, which are resized as well.
        input_key: The key of the images in a batch.
        target_key: The key of the targets in a batch.

    Raises:
        TypeError: A value is not a number.
        ValueError: A value is out of range, or ``delay_fraction`` and ``finetune_fraction`` add up to more than 1.

    Example:
        >>> ProgressiveResizing().sizes(32)
        [16, 20, 24, 28, 32]
    """

    mode: str = attrs.field(default="resize", validator=one_of("resize", "crop"))
    initial_scale: float = number(0.5, 0, 1, above=True, meaning="It is a fraction of the images' side.")
    finetune_fraction: float = attrs.field(default=0.2, validator=FRACTION_OF_TRAINING)
    delay_fraction: float = attrs.field(default=0.5, validator=FRACTION_OF_TRAINING)
    size_increment: int = integer(4, 1, meaning="It is a number of pixels.")
    resize_targets: bool = attrs.field(default=False, validator=is_flag)
    input_key: BatchKey = 0
    target_key: BatchKey = 1

    runs_at: ClassVar = {Event.AFTER_DATALOADER: Stage.RESHAPE}
    reads: ClassVar = {"batch.input", "batch.target", "timestamp", "max_duration", "dataloader_len"}
    writes: ClassVar = {"batch.input", "batch.target"}
    acted = 0
    idle_reason = "All images had their full size: start with a smaller initial_scale, or begin with the training."
    owns: ClassVar = owned("the size of images", "Two would multiply their scales: choose one initial_scale.")

    def __attrs_post_init__(self) -> None:
        if self.delay_fraction + self.finetune_fraction > 1:
            raise ValueError(
                "delay_fraction and finetune_fraction must be at most 1 together, got "
                f"{self.delay_fraction} and {self.finetune_fraction}."
            )
        warn_if_idle(self, initial_scale=self.initial_scale == 1, finetune_fraction=self.finetune_fraction == 1)

    def apply(self, event: Event, state: State, logger: Logger) -> None:
        """Resize the images of the batch to the current size."""
        input, target = state.batch_get_item(self.input_key), state.batch_get_item(self.target_key)
        if input.ndim != 4:
            raise ValueError(f"ProgressiveResizing needs images of shape (N, C, H, W), got shape {tuple(input.shape)}.")
        elapsed = elapsed_duration(self, state)
        scale = self.scale_at(elapsed, input.shape[-2]), self.scale_at(elapsed, input.shape[-1])
        if min(scale) < 1:
            self.acted += 1
            input, resized = cf.resize_batch(
                input, target, scale, self.mode, self.resize_targets, generator=state.generator(self)
            )
            state.batch_set_item(self.input_key, input)
            if resized is not target:
                state.batch_set_item(self.target_key, resized)
        logger.log_metrics(
            {
                "progressive_resizing/height": input.shape[-2],
                "progressive_resizing/width": input.shape[-1],
                "progressive_resizing/scale_factor": min(scale),
            }
        )

    def scale_at(self, elapsed: float, side: int) -> float:
        """Return the scale after a fraction ``elapsed`` of the training, for images with this side.

        Example:
            >>> ProgressiveResizing().scale_at(0.65, side=32)
            0.75
        """
        growing = 1 - self.delay_fraction - self.finetune_fraction
        if elapsed >= 1 - self.finetune_fraction:
            return 1.0
        grown = max(0.0, elapsed - self.delay_fraction) / growing if growing else 0.0
        target = side * (self.initial_scale + (1 - self.initial_scale) * grown)
        pixels = max(1, round(target / self.size_increment)) * self.size_increment
        return min(pixels, side) / side

    def sizes(self, side: int) -> list[int]:
        """Return the sides that images with this side have during the training."""
        scales = {self.scale_at(step / 1000, side) for step in range(1001)}
        return sorted(round(side * scale) for scale in scales)
