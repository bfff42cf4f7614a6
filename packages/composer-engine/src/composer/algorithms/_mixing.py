"""The base of MixUp and CutMix: mix samples before the forward pass, and targets or losses after it."""

from __future__ import annotations

from abc import abstractmethod

# At run time, too, as attrs looks up what the annotations of a subclass and of its bases mean.
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from composer import functional as cf
from composer.algorithms._annotations import annotated_images, check_keys, set_annotated_images
from composer.algorithms._scores import class_scores, is_one_score
from composer.core import Algorithm, BatchKey, Event, FieldsByEvent, Logger, Stage, State, get_precision_context
from composer.functional.augmentations.mixup import select
from composer.functional.nested import rebuild


class SampleMixing(Algorithm):
    """Base of algorithms that mix the samples within a batch; subclasses have the fields that are annotated here.

    With ``interpolate_loss`` they blend losses instead of targets. They come last before the forward pass, so that
    samples are mixed after those of all algorithms that blend targets. After the loss they come before other algorithms
    restore the targets, so that the loss of the partners' targets includes those changes, too.

    With masks or boxes these are the targets. They are mixed together with the images, once, after the batch is loaded.
    """

    input_key: BatchKey
    target_key: BatchKey
    mask_key: BatchKey | None
    boxes_key: BatchKey | None
    labels_key: BatchKey | None
    _partners: Tensor | None
    _partner_weight: float

    idle_reason = (
        "No batch or microbatch had a second sample to mix with, or each had the weight 0: use larger ones, or alpha."
    )
    runs_at: ClassVar = {
        Event.AFTER_DATALOADER: Stage.MIX,
        Event.BEFORE_FORWARD: Stage.MIX,
        Event.BEFORE_LOSS: Stage.MIX,
        Event.AFTER_LOSS: Stage.LOSS,
    }
    reads: ClassVar = FieldsByEvent(
        {
            Event.AFTER_DATALOADER: {"batch"},
            Event.BEFORE_FORWARD: {"batch.input", "batch.target"},
            Event.BEFORE_LOSS: {"batch.target", "model", "outputs"},
            Event.AFTER_LOSS: {"batch.input", "batch.target", "outputs", "loss", "model"},
        }
    )
    # The batch holds the partners' targets while their loss is computed.
    writes: ClassVar = FieldsByEvent(
        {
            Event.AFTER_DATALOADER: {"batch"},
            Event.BEFORE_FORWARD: {"batch.input"},
            Event.BEFORE_LOSS: {"batch.target"},
            Event.AFTER_LOSS: {"batch.target", "loss"},
        }
    )

    def runs_at_events(self) -> Mapping[Event, Stage]:
        """Return the events at which it runs: targets are blended before the loss, losses after it."""
        if self._has_annotations():
            return {Event.AFTER_DATALOADER: Stage.MIX}
        if self.interpolate_loss:
            return {Event.BEFORE_FORWARD: Stage.LOSS, Event.AFTER_LOSS: Stage.LOSS}
        return {Event.BEFORE_FORWARD: Stage.MIX, Event.BEFORE_LOSS: Stage.MIX}

    @abstractmethod
    def mix(self, input: Any, target: Any, generator: torch.Generator) -> tuple[Any, Tensor, float]:
        """Return the mixed samples, the index of each sample's partner, and the weight of the partners."""

    def check_annotations(self) -> None:
        """Raise an error for keys that do not belong together."""
        check_keys(self)
        if self._has_annotations() and self.interpolate_loss:
            raise ValueError(
                "interpolate_loss must be False with mask_key or boxes_key, got True: masks and boxes are mixed, "
                "and not their losses."
            )

    def _has_annotations(self) -> bool:
        return self.mask_key is not None or self.boxes_key is not None

    def apply(self, event: Event, state: State, logger: Logger) -> None:
        """Mix the samples before the forward pass, and the targets or losses after it."""
        if event is Event.AFTER_DATALOADER:
            mixed, _, _ = self.mix(annotated_images(self, state), None, state.generator(self))
            set_annotated_images(self, state, mixed)
            return
        if event is Event.BEFORE_FORWARD:
            input, target = state.batch_get_item(self.input_key), state.batch_get_item(self.target_key)
            # A loop that does not split batches may leave the microbatch at -1; it draws as for a single microbatch.
            generator = state.generator(self, microbatch=max(state.microbatch, 0))
            mixed, self._partners, self._partner_weight = self.mix(input, target, generator)
            self.acted = (self.acted or 0) + (self._partners.shape[0] > 1 and self._partner_weight > 0)
            state.batch_set_item(self.input_key, mixed)
            return
        if self._partners is None:
            raise RuntimeError(
                f"{type(self).__name__} mixes the samples at before_forward, which has not run: call "
                'engine.run_event("before_forward") before the forward pass.'
            )
        target = state.batch_get_item(self.target_key)
        if event is Event.BEFORE_LOSS:
            # Only here, and not when the samples are mixed, because the scores have the number of classes.
            state.batch_set_item(self.target_key, self._blended(state, target))
            return
        state.batch_set_item(self.target_key, select(target, self._partners))
        with get_precision_context(state.precision, state.device.type):
            partner_loss = state.compute_loss(state.outputs, state.batch)
        state.batch_set_item(self.target_key, target)
        state.loss = _blend(state.loss, partner_loss, self._partner_weight)

    def _blended(self, state: State, target: Tensor) -> Tensor:
        """Return the targets blended with those of the partners, class ids as probabilities."""
        terms, axis = None, 1
        assert self._partners is not None
        if not target.is_floating_point():
            count = getattr(state.model, "count_loss_terms", None)
            terms = None if count is None else count(state.batch)
            target, axis = self._probabilities(state, target)
        blended = torch.lerp(target, select(target, self._partners), self._partner_weight)
        if terms is None or getattr(state.model, "shift_labels", False):  # whose first labels have no score
            return blended
        # The loss of ids is a mean over the weights of their classes, without ignored ids; that of probabilities over
        # rows that are not zeros. As a cross entropy is linear in its targets, this factor makes it a mean over the
        # blend of what is counted for ids and partners, which is the count of the ids, as the partners are the same ids
        # in another order. So it equals the blend of the losses, and has the weight that its microbatch was given.
        rows = blended.sum(axis).count_nonzero().to(blended.dtype)
        blended *= (rows / terms).nan_to_num()  # without any label, both are 0
        return blended

    def _probabilities(self, state: State, ids: Tensor) -> tuple[Tensor, int]:
        """Return class ids as probabilities in the shape of the scores, and their dimension of classes."""
        scores: Any = None
        try:
            scores, is_last = class_scores(state.outputs, ids)
            ignored = getattr(state.model, "loss_ignore_index", -100)
            ids = ids if ignored < 0 else ids.where(ids != ignored, -100)
            probabilities = cf.ensure_targets_one_hot(scores, ids)
        except (TypeError, ValueError) as error:
            remedy = "For other targets set interpolate_loss=True, or convert those of a regression to float."
            if is_one_score(scores):
                remedy = (
                    "With one score per sample set interpolate_loss=True, pass targets in floating point (values of a "
                    "regression, or probabilities of class 1), or return two scores, as nn.Linear(..., 2) does."
                )
            raise type(error)(
                f"{type(self).__name__} blends class ids as probabilities, for which the outputs must be scores: "
                f"{error} {remedy}"
            ) from error
        return (probabilities.movedim(1, -1), -1) if is_last else (probabilities, 1)


def _blend(loss: Any, partner_loss: Any, weight: float) -> Any:
    """Return ``(1 - weight) * loss + weight * partner_loss``, for each loss in a dictionary or list."""
    if isinstance(loss, Mapping):
        return {name: _blend(value, partner_loss[name], weight) for name, value in loss.items()}
    if isinstance(loss, (list, tuple)):
        return rebuild(loss, [_blend(*pair, weight) for pair in zip(loss, partner_loss, strict=True)])
    return (1 - weight) * loss + weight * partner_loss
