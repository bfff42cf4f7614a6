"""SelectiveBackprop: train on the samples that are hardest."""

from __future__ import annotations

import inspect
import warnings
from typing import Any, ClassVar

import attrs
import torch
from torch import Tensor, nn

from composer import functional as cf
from composer.algorithms._checks import elapsed_duration, warn_if_idle
from composer.core import (
    Algorithm,
    Batch,
    BatchKey,
    Event,
    ExclusiveResource,
    FieldsByEvent,
    Logger,
    NoEffectWarning,
    Stage,
    State,
    TimeUnit,
    batch_set,
    get_precision_context,
)
from composer.core.checks import number_between, whole_number_from

__all__ = ["SelectiveBackprop"]


@attrs.define(eq=False)
class SelectiveBackprop(Algorithm):
    """Leave out the samples with the lowest losses for a part of the training (arXiv:1910.00762).

    See :func:`composer.functional.select_using_loss`. Everything in the batch that has one entry for each sample is
    chosen alike, as by :func:`composer.functional.take_samples`. The model's ``loss`` is called with
    ``reduction="none"``, as :class:`composer.models.ComposerClassifier` takes it.

    Args:
        start: After which part of the training it begins, in ``[0, 1]``.
        end: After which part it ends.
        keep: The part of the samples that is kept, in ``(0, 1]``.
        scale_factor: Images are scaled by it for the extra forward pass, in ``(0, 1]``.
        interrupt: Every how many batches one is left whole; 0 for none.
        input_key: Where the samples lie in a batch.
        target_key: Where the targets lie in a batch.

    Raises:
        TypeError: A value is no number.
        ValueError: A value is out of range, or ``end`` comes before ``start``.

    Example:
        >>> SelectiveBackprop(start=0.4, keep=0.7).keep
        0.7
    """

    start: float = attrs.field(default=0.5, validator=number_between(0, 1, meaning="It is a fraction of the training."))
    end: float = attrs.field(default=0.9, validator=number_between(0, 1, meaning="It is a fraction of the training."))
    keep: float = attrs.field(
        default=0.5, validator=number_between(0, 1, above=True, meaning="It is the part of the samples that is kept.")
    )
    scale_factor: float = attrs.field(
        default=1.0, validator=number_between(0, 1, above=True, meaning="Images are scaled by it.")
    )
    interrupt: int = attrs.field(default=2, validator=whole_number_from(0, meaning="It is a number of batches."))
    input_key: BatchKey = 0
    target_key: BatchKey = 1

    _is_due: bool = attrs.field(default=False, init=False, repr=False)  # the fit has been before its start

    runs_at: ClassVar = {Event.AFTER_DATALOADER: Stage.SELECT, Event.FIT_END: Stage.SELECT}
    reads: ClassVar = FieldsByEvent(
        {
            Event.AFTER_DATALOADER: {"batch", "model", "timestamp", "max_duration", "dataloader_len"},
            Event.FIT_END: {"max_duration"},
        }
    )
    writes: ClassVar = FieldsByEvent({Event.AFTER_DATALOADER: {"batch"}})
    owns: ClassVar = {
        ExclusiveResource(
            "the choice of samples", remedy="A second one would choose among those that are left: choose one keep."
        )
    }

    def __attrs_post_init__(self) -> None:
        if self.end < self.start:
            raise ValueError(f"end must not come before start, got {self.end} and {self.start}.")
        is_empty = self.start == self.end
        warn_if_idle(self, start=is_empty, end=is_empty, keep=self.keep == 1, interrupt=self.interrupt == 1)

    def match(self, event: Event, state: State) -> bool:
        """Return whether samples are chosen by now, and this batch is not to be left whole."""
        if event is not Event.AFTER_DATALOADER:
            return event is Event.FIT_END
        batch_idx = int(state.timestamp.count(TimeUnit.BATCH, in_epoch=True))
        elapsed = min(1.0, elapsed_duration(self, state))
        if elapsed < self.start:
            self._is_due = True
        return cf.should_selective_backprop(elapsed, batch_idx, self.start, self.end, self.interrupt)

    def apply(self, event: Event, state: State, logger: Logger) -> None:
        """Choose samples by an extra forward pass; at the end of a fit in which none were chosen, warn."""
        del logger
        if event is Event.FIT_END:
            self._warn_if_never_begun(state)
            return
        self._is_due = False
        _check_loss(state.model)
        input, target = state.batch_get_item(self.input_key), state.batch_get_item(self.target_key)
        whole, target_key = state.batch, self.target_key

        def loss_of_each(outputs: Any, targets: dict[str, Any], reduction: str) -> Tensor:
            loss: Tensor = state.model.loss(outputs, batch_set(whole, target_key, targets["own"]), reduction=reduction)
            return loss

        num_samples = len(input)
        targets = {"own": target, "places": torch.arange(num_samples, device=input.device)}
        with get_precision_context(state.precision, state.device.type):
            input, targets = cf.select_using_loss(
                input, targets, _Called(state.model, whole, self.input_key), loss_of_each, self.keep, self.scale_factor
            )
        state.batch = cf.take_samples(whole, targets["places"], num_samples)
        state.batch_set_item(self.input_key, input)
        state.batch_set_item(self.target_key, targets["own"])

    def _warn_if_never_begun(self, state: State) -> None:
        if self._is_due:
            warnings.warn(
                f"{self!r} has chosen no samples: of the fit that ended at {state.max_duration}, no batch came between "
                "start and end. Let it begin earlier, or train longer.",
                NoEffectWarning,
                stacklevel=2,
            )
        self._is_due = False


class _Called(nn.Module):
    """A model that is called with the samples alone; the rest of the batch is known."""

    def __init__(self, model: nn.Module, batch: Batch, input_key: BatchKey) -> None:
        super().__init__()
        self.model = model
        self._batch, self._input_key = batch, input_key

    def forward(self, input: Tensor) -> Any:
        return self.model(batch_set(self._batch, self._input_key, input))


def _check_loss(model: Any) -> None:
    parameters = inspect.signature(model.loss).parameters.values()
    if not any(each.name == "reduction" or each.kind is each.VAR_KEYWORD for each in parameters):
        raise TypeError(
            f"SelectiveBackprop needs the loss of each sample, and {type(model).__name__}.loss cannot give it: let it "
            "take reduction='none', def loss(self, outputs, batch, reduction='mean')."
        )
