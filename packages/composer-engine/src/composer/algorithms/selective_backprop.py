"""SelectiveBackprop: train on the samples with the highest losses."""

from __future__ import annotations

from typing import Any, ClassVar

import attrs
import torch
from torch import Tensor, nn

from composer import functional as cf
from composer.algorithms._idle import warn_at_end, warn_if_idle
from composer.algorithms._progress import FRACTION_OF_TRAINING, elapsed_duration
from composer.algorithms._sample_losses import check_processes, check_reduction
from composer.core import Algorithm, Event, FieldsByEvent, Logger, Stage, State, TimeUnit, get_precision_context
from composer.core.checks import integer, number, one_of
from composer.core.data.batches import Batch, BatchKey, batch_get, batch_set
from composer.core.declarations import owned
from composer.core.saving.components import transient
from composer.functional.training.selective_backprop import count_samples, highest_losses, sample_losses


@attrs.define(eq=False)
class SelectiveBackprop(Algorithm):
    """Skip the samples with the lowest losses during a part of the training (arXiv:1910.00762).

    See :func:`composer.functional.select_using_loss`. Everything in the batch with one entry per sample is selected by
    :func:`composer.functional.take_samples`. The model's ``loss`` is called with ``reduction="none"``, which
    :class:`composer.models.ComposerClassifier` accepts.

    Args:
        start: The fraction of the training after which selection starts, in ``[0, 1]``.
        end: The fraction after which it ends.
        keep: The fraction of the samples to keep, in ``(0, 1]``.
        scale_factor: The scale of images in the extra forward pass, in ``(0, 1]``.
        interrupt: The interval of batches without selection; 0 for none.
        input_key: The key of the samples in a batch.
        target_key: The key of the targets in a batch.
        scope: The samples among which those with the highest losses are selected: ``"local"`` for the batch of each
            process, ``"global"`` for the batches of all processes together. This selects the same samples as one
            process with the global batch, and requires a loop that weights processes by their numbers of samples,
            such as that of the Trainer.

    Raises:
        TypeError: A value is not a number.
        ValueError: A value is out of range, ``end`` comes before ``start``, or ``scope`` is unknown.

    Example:
        >>> SelectiveBackprop(start=0.4, keep=0.7).keep
        0.7
    """

    start: float = attrs.field(default=0.5, validator=FRACTION_OF_TRAINING)
    end: float = attrs.field(default=0.9, validator=FRACTION_OF_TRAINING)
    keep: float = number(0.5, 0, 1, above=True, meaning="It is the fraction of the samples to keep.")
    scale_factor: float = number(1.0, 0, 1, above=True, meaning="It is the scale of images.")
    interrupt: int = integer(2, 0, meaning="It is a number of batches.")
    input_key: BatchKey = 0
    target_key: BatchKey = 1
    scope: str = attrs.field(default="local", validator=one_of("local", "global"))

    _is_due: bool = transient(default=False)  # the fit started before ``start``

    runs_at: ClassVar = {Event.AFTER_DATALOADER: Stage.SELECT, Event.FIT_END: Stage.SELECT}
    reads: ClassVar = FieldsByEvent(
        {
            Event.AFTER_DATALOADER: {"batch", "losses", "model", "timestamp", "max_duration", "dataloader_len"},
            Event.FIT_END: {"max_duration"},
        }
    )
    writes: ClassVar = FieldsByEvent({Event.AFTER_DATALOADER: {"batch"}})
    owns: ClassVar = owned("the choice of samples", "A second one would select from the rest: choose one.")

    def __attrs_post_init__(self) -> None:
        if self.end < self.start:
            raise ValueError(f"end must not come before start, got {self.end} and {self.start}.")
        is_empty = self.start == self.end
        warn_if_idle(self, start=is_empty, end=is_empty, keep=self.keep == 1, interrupt=self.interrupt == 1)

    def match(self, event: Event, state: State) -> bool:
        """Return whether to select samples of this batch."""
        if event is not Event.AFTER_DATALOADER:
            return event is Event.FIT_END
        if self.scope == "global":
            check_processes("SelectiveBackprop(scope='global')", "use scope='local', or the Trainer", state)
        batch_idx = int(state.timestamp.count(TimeUnit.BATCH, in_epoch=True))
        elapsed = elapsed_duration(self, state)
        if elapsed < self.start:
            self._is_due = True
        return cf.should_selective_backprop(elapsed, batch_idx, self.start, self.end, self.interrupt)

    def apply(self, event: Event, state: State, logger: Logger) -> None:
        """Select samples by an extra forward pass; warn at the end of a fit without a selection."""
        if event is Event.FIT_END:
            self._warn_if_never_begun(state)
            return
        self._is_due = False
        check_reduction("SelectiveBackprop", state)
        batch, num_samples = state.batch, count_samples("input", state.batch_get_item(self.input_key))
        size = state.device_train_microbatch_size
        num_passes = -(-num_samples // size) if size else 1
        if size and state.gather is not None:  # equally many in all processes, which may communicate in each pass
            num_passes = max(state.gather(num_passes))
        parts = torch.arange(num_samples, device=state.device).tensor_split(num_passes)  # a copy there would wait
        with get_precision_context(state.precision, state.device.type):
            # For an empty part a sample, whose loss is left out.
            each = [self._losses(self._take(batch, part, num_samples), state)[: len(part)] for part in parts]
        losses = torch.cat(each)
        is_local = self.scope == "local" or state.gather is None
        chosen = highest_losses(losses, self.keep) if is_local else self._choose_globally(losses, state)
        if not len(chosen):
            state.batch_counts = False  # the batch stays as it is, since some layers require several samples
            return
        state.batch = self._take(batch, chosen, num_samples)

    def _take(self, batch: Batch, chosen: Tensor, num_samples: int) -> Batch:
        """Return the chosen samples of a batch, or the first one."""
        if len(chosen) == num_samples:
            return batch
        chosen = chosen if len(chosen) else chosen.new_zeros(1)
        taken = cf.take_samples(batch, chosen, num_samples)
        for key in (self.input_key, self.target_key):
            taken = batch_set(taken, key, cf.take_samples(batch_get(batch, key), chosen, num_samples))
        return taken

    def _losses(self, batch: Batch, state: State) -> Tensor:
        """Return the losses of the samples of a batch, without gradients."""
        target_key = self.target_key

        def compute_losses(outputs: Any, targets: dict[str, Any], reduction: str) -> Tensor:
            losses: Tensor = state.compute_loss(
                outputs, batch_set(batch, target_key, targets["target"]), reduction=reduction
            )
            return losses

        input = batch_get(batch, self.input_key)
        targets = {"target": batch_get(batch, target_key), "indices": torch.arange(count_samples("input", input))}
        return sample_losses(
            input, targets, _InputOnly(state, batch, self.input_key), compute_losses, self.scale_factor
        )

    def _choose_globally(self, losses: Tensor, state: State) -> Tensor:
        """Return the indices of this process's samples among the highest losses of all processes."""
        assert state.gather is not None
        gathered: list[list[float]] = state.gather(losses.tolist() if state.batch_counts else [])
        # The order of one process with the global batch, of which each process has every n-th sample.
        places = sorted((index, rank) for rank, part in enumerate(gathered) for index in range(len(part)))
        in_order = torch.tensor([gathered[rank][index] for index, rank in places], dtype=torch.float64)
        own_rank = state.rank if state.data_rank is None else state.data_rank
        chosen = (places[place] for place in highest_losses(in_order, self.keep).tolist())
        return torch.tensor([index for index, rank in chosen if rank == own_rank], dtype=torch.int64)

    def _warn_if_never_begun(self, state: State) -> None:
        if self._is_due:
            warn_at_end(
                state,
                f"{self!r} has chosen no samples: of the fit that ended at {state.max_duration}, no batch came between "
                "start and end. Start earlier, or train longer.",
            )
        self._is_due = False


class _InputOnly(nn.Module):
    """A model that takes only the samples; the rest of the batch is fixed."""

    def __init__(self, state: State, batch: Batch, input_key: BatchKey) -> None:
        super().__init__()
        self.model, self._compute_outputs = state.model, state.compute_outputs
        self._batch, self._input_key = batch, input_key

    def forward(self, input: Tensor) -> Any:
        return self._compute_outputs(batch_set(self._batch, self._input_key, input))
