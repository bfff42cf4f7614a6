"""Log the inputs and predictions of a model as images."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import attrs
import torch
from torch import Tensor

from composer.core import BatchKey, Callback, Event, Logger, State, Time, TimeUnit
from composer.core.checks import integer, is_flag, one_of
from composer.core.interval import interval_time
from composer.core.saving.components import reset_fields, transient
from composer.loggers.images import draw_boxes

_LEAST_SCORE = 0.5


@attrs.define(eq=False)
class ImageVisualizer(Callback):
    """Log the first input images of a batch, after all algorithms, every ``interval``.

    Their name is ``Images/Train``, and ``Images/Eval`` for the first batch of each evaluation. Images with values
    outside of ``[0, 1]``, such as normalized ones, are rescaled to their own minimum and maximum.

    With ``mode="segmentation"``, masks ``(N, H, W)`` of class ids are logged as well: ``prediction``, the argmax of the
    outputs ``(N, C, H, W)`` or the sign of one score, and ``ground truth``; a negative id, which losses ignore, is
    shown as ``C``.

    With ``mode="detection"``, the images of a batch of ``ComposerDetector`` are logged at evaluation, with the true
    boxes in green and the predicted ones with a score of 0.5 or more in red.

    Args:
        interval: How often, in batches, epochs (in their first batch) or as a fraction of the training.
        mode: ``"input"``, ``"segmentation"`` or ``"detection"``.
        num_images: Maximum number of images.
        channels_last: Whether images are ``(N, H, W, C)`` instead of ``(N, C, H, W)``.
        input_key: Key of the images in the batch.
        target_key: Key of the masks in the batch.

    Raises:
        ValueError: A value is out of range.

    Example:
        >>> ImageVisualizer("50ba", mode="segmentation").interval
        Time(50, TimeUnit.BATCH)
    """

    interval: Time = attrs.field(default=Time(100, TimeUnit.BATCH), converter=interval_time)
    mode: Literal["input", "segmentation", "detection"] = attrs.field(
        default="input", validator=one_of("input", "segmentation", "detection")
    )
    num_images: int = integer(8, 1, meaning="It is the number of images to log.")
    channels_last: bool = attrs.field(default=False, validator=is_flag)
    input_key: BatchKey = 0
    target_key: BatchKey = 1

    _images: Any = transient(default=None)
    _last_batch: int = transient(default=-1)
    _is_new_evaluation: bool = transient(default=False)

    def intervals(self) -> Mapping[Event | str, Time | str | int]:
        """Log a batch every ``interval``."""
        return {Event.BEFORE_FORWARD: self.interval, Event.AFTER_FORWARD: self.interval}

    def fit_start(self, state: State, logger: Logger) -> None:
        """Reset the state of an earlier training."""
        reset_fields(self)

    def before_forward(self, state: State, logger: Logger) -> None:
        """Store the images, before an in-place layer can change them."""
        batch = int(state.timestamp.count(TimeUnit.BATCH))
        if batch != self._last_batch and logger.destinations and self.mode != "detection":  # only the first microbatch
            self._last_batch = batch
            self._images = self._shown_images(state)

    def after_forward(self, state: State, logger: Logger) -> None:
        """Log the images."""
        self._log("Images/Train", state, logger)

    def eval_start(self, state: State, logger: Logger) -> None:
        """Select the next batch."""
        self._is_new_evaluation = True

    def eval_before_forward(self, state: State, logger: Logger) -> None:
        """Store the images of an evaluation's first batch."""
        if self._is_new_evaluation and logger.destinations:
            self._images = self._shown_images(state)
        self._is_new_evaluation = False

    def eval_after_forward(self, state: State, logger: Logger) -> None:
        """Log the images."""
        self._log("Images/Eval", state, logger)

    def _shown_images(self, state: State) -> Any:
        images = state.batch_get_item(self.input_key)
        if self.mode == "detection":
            return [_shown(one[None])[0] for one in images[: self.num_images]]
        if not isinstance(images, Tensor) or images.ndim != 4:
            what = f"a tensor of shape {tuple(images.shape)}" if isinstance(images, Tensor) else type(images).__name__
            raise ValueError(
                f"ImageVisualizer requires images with 4 dimensions, and input_key={self.input_key!r} is {what}. "
                "Set input_key to their key in the batch, or mode='detection' for lists of images with boxes."
            )
        return _shown(images[: self.num_images])

    def _log(self, name: str, state: State, logger: Logger) -> None:
        images, self._images = self._images, None
        if images is None:
            return
        masks: dict[str, Any] = {}
        if self.mode == "detection":
            targets = state.batch_get_item(self.target_key)
            found = [one["boxes"][one["scores"] >= _LEAST_SCORE] for one in state.outputs[: len(images)]]
            images = [draw_boxes(*each) for each in zip(images, found, (one["boxes"] for one in targets), strict=False)]
        if self.mode == "segmentation":
            outputs = state.outputs
            if not isinstance(outputs, Tensor):  # such as those of two heads; the model selects one
                outputs = state.model.eval_forward(state.batch, outputs)
            outputs, target = outputs[: len(images)], state.batch_get_item(self.target_key)[: len(images)]
            if outputs.ndim == 3 or outputs.shape[1] == 1:  # one score, that of class 1
                score = outputs.reshape(len(outputs), 1, *outputs.shape[-2:])
                outputs, target = torch.cat([torch.zeros_like(score), score], 1), target.reshape(score.shape).squeeze(1)
            masks["masks"] = {
                "prediction": outputs.detach().argmax(dim=1),
                "ground truth": _class_ids(target, outputs.shape[1]),
            }
        logger.log_images(images, name, self.channels_last, **masks)


def _shown(images: Tensor) -> Tensor:
    """Return images ``(N, …)`` with values in ``[0, 1]``; an image with such values is unchanged."""
    if not images.is_floating_point():
        return images.to(torch.float32) / 255
    images = images.detach().to(torch.float32)
    flat = images.flatten(1)
    low, high = (one.reshape(-1, *[1] * (images.ndim - 1)) for one in (flat.amin(dim=1), flat.amax(dim=1)))
    stretched = (images - low) / (high - low).clamp_min(torch.finfo(images.dtype).tiny)
    # A selection on the device: a condition for each image would wait for it.
    return torch.where((low >= 0) & (high <= 1), images, stretched)


def _class_ids(target: Tensor, num_classes: int) -> Tensor:
    """Return targets, which may be probabilities ``(N, C, H, W)``, as class ids ``(N, H, W)``; a negative one is C."""
    ids = target.argmax(dim=1) if target.ndim == 4 else target
    return torch.where(ids < 0, num_classes, ids)
