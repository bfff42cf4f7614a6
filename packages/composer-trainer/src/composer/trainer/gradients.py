"""The gradients of a batch: computed in microbatches, with the weight of each loss.

A loss is the mean over *elements*, such as samples: :class:`~composer.core.data.elements.Elements` has the rules. The
step has to be that of the mean over the elements of all processes, however the batch is split. A microbatch has the
weight by which its loss is then multiplied:

- In one process it is the fraction of the batch's elements that it has: that of :func:`split_microbatches`, or of
  ``weighted_by`` if the model counts them. A batch that is not split has the weight 1, whatever its elements are.
- With several processes, it is the fraction of the elements of all, times their number, as they average gradients:
  ``BatchWeights.weigh``.
- Losses that are sums have the weight 1, and with several processes the number of those with other samples.

The methods of :class:`BatchGradients` are called in this order: ``prepare`` when the training and each epoch begin;
``set_batch`` by ``Run`` when a batch has been read; ``compute`` when the optimizers step, in which ``Step`` calls
``_split`` for the microbatches, ``_measure`` after each, and ``_complete`` after the last one. ``_split`` counts the
share of this process. If there are others, it sends it to them (``distributed/global_batch.py``), and waits for their
counts if the weights need them, or if all must have equally many microbatches.
"""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING

import attrs
import torch
from torch import Tensor

from composer.core import Event, TimeUnit
from composer.core.data.elements import Elements, weighted_by
from composer.core.data.packing import check_packed_model
from composer.core.optimizers import unwrapped, wants_closure
from composer.core.plan import Subscription
from composer.core.step import Step
from composer.distributed import BatchShare, BatchWeights, get_data_world_size, get_world_size
from composer.distributed.collectives import all_gather_object
from composer.distributed.global_batch import STOP_CALLED, STOP_SIGNAL
from composer.functional.training.batches import count_flattened, warn_of_padding
from composer.trainer.evaluation.metrics import update_train_metrics
from composer.trainer.microbatch_search import MicrobatchSearch, what_needs_whole_batch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from composer.core import Batch, DataSpec, Engine
    from composer.core.step import Microbatch
    from composer.distributed import Parallelism
    from composer.trainer.data.batches import Batches
    from composer.trainer.optimization import Optimization
    from composer.trainer.run import Stopwatch
    from composer.trainer.stopping import StopSignals

_AFTER_LOSS = (
    Event.BEFORE_BACKWARD, Event.AFTER_BACKWARD, Event.AFTER_TRAIN_BATCH, Event.BATCH_END, Event.BATCH_CHECKPOINT,
)  # fmt: skip
"""The events of a batch at which this library does not read its outputs, except for training metrics."""


@attrs.define(eq=False, slots=False)
class BatchGradients:
    """Computes the gradients of each batch, and exchanges its counts with the other processes meanwhile.

    Args:
        engine: With the state that is trained.
        batches: The data.
        optimization: The precision, and the scale of the losses.
        parallel: Runs the model in all processes.
        stopwatch: Measures the time of a batch, which several processes exchange.
        signals: A received one is sent to the other processes.
        weighs_by_tokens: Whether tokens are counted; see :class:`~composer.core.data.elements.Elements`.

    Attributes:
        step: Runs the events of a batch, and computes the losses and the backward passes.
        compute: Computes the gradients of ``state.batch``, and returns its loss: the closure for the optimizers.
        num_samples: The number of samples that were read in the batch.
        share: What this process counts in the batch.
        weights: The weights of its losses among several processes, and the counts of all; None in a single one.
    """

    _engine: Engine
    _batches: Batches
    _optimization: Optimization
    _parallel: Parallelism
    _stopwatch: Stopwatch
    _signals: StopSignals
    _weighs_by_tokens: bool

    def __attrs_post_init__(self) -> None:
        self._state, self._spec = self._engine.state, self._batches.spec
        state, optimization, parallel = self._state, self._optimization, self._parallel
        loss = optimization.in_precision(state.compute_loss)
        # Looked up at each call: a reference would keep the wrapper of an earlier epoch while another one is created.
        forward = optimization.in_precision(lambda batch: parallel.forward(batch))  # noqa: PLW0108
        self.step = Step(state, self._engine.calls, forward, loss, split=self._split)
        self.compute = self.step.compute_gradients
        if state.auto_microbatching:
            search = MicrobatchSearch(state, parallel, self.step)
            self.compute = lambda: search.compute_gradients(self.num_samples)
        if any(wants_closure(unwrapped(one)) for one in state.optimizers) and get_world_size() > 1:
            compute = self.compute
            # All processes have to decide by the same loss, in a line search for example.
            self.compute = lambda: parallel.reduce_mean({"loss": compute()})["loss"]
        self._elements = Elements(state.model, self._spec, by_tokens=self._weighs_by_tokens)
        self._usual_elements = self._batches.usual_samples if self._elements.are_usual else None
        self._is_unchecked = True
        self.num_samples = self._counted_samples = 0
        self.share = BatchShare()
        self.weights: BatchWeights | None = None

    def prepare(self) -> None:
        """Wrap the model for several processes, again if algorithms may have changed which parameters are trained."""
        state, step = self._state, self.step
        self._parallel.prepare(state)
        # The gradients of one process without a scaler are complete after the backward pass.
        is_incomplete = self._parallel.is_connected or state.scaler is not None
        step.complete = self._complete if is_incomplete else None
        step.measure = self._measure if state.train_metrics else None
        step.frees_outputs = not state.train_metrics and not may_read_outputs(self._engine)

    def set_batch(self, batch: Batch) -> None:
        """Make this the batch of the state: the one that ``batches`` returned last."""
        self.num_samples = self._spec.get_num_samples_in_batch(batch)
        is_counted = self._batches.position.last_is_counted
        self._state.batch, self._state.batch_counts = batch, is_counted
        self._counted_samples = self.num_samples if is_counted else 0

    def _split(self) -> Iterable[Microbatch]:
        """Return the microbatches, each with its weight in the batch of all processes, after sending the counts."""
        batch, size, parallel = self._state.batch, self._state.device_train_microbatch_size, self._parallel
        is_whole = size is None and self._spec.microbatch_transforms is None
        parts = ((batch, 1.0),) if is_whole else split_microbatches(batch, self._spec, size, self._elements.count)
        if self._is_unchecked:
            self._check(parts[0][0], size)
        needs_weights = parallel.is_connected or len(parts) > 1  # else it has the weight 1
        numbers = self._elements_on_device(parts) if needs_weights else None
        if self.step.times_computed == 1:  # further computations of the batch have the same counts
            self._count(len(parts), on_device=numbers is not None)
        microbatches = self._weighted(parts, numbers) if needs_weights or self._elements.is_sum else parts
        if len(microbatches) > 1:
            return self._each(microbatches)
        if needs_weights:
            parallel.begin_microbatch(True)  # without a generator in each step
        return microbatches

    def _check(self, batch: Batch, size: int | None) -> None:
        """Check, in the first batch of a training, that the model supports the data and the size of microbatches."""
        self._is_unchecked = False
        is_packed, self._batches.checks_model = self._batches.checks_model, False
        # Once for a loader. A sharded model needs all processes, also those with one long document.
        documents = all_gather_object(count_flattened(batch)) if is_packed is None else []
        if is_packed or (all(documents) and max(documents, default=0) > 1):
            check_packed_model(self._state, batch, raises=bool(is_packed))
        if (duration := self._state.max_duration) is not None and duration.unit is TimeUnit.TOKEN:
            warn_of_padding(batch, self._spec.get_num_tokens_in_batch(batch))
        # The search reduces the size itself, and one that is larger than a batch is not a mistake of the user.
        if size is None or self._state.auto_microbatching:
            return
        if size > self.num_samples:
            warnings.warn(
                f"device_train_microbatch_size={size} is larger than the batch of {self.num_samples} samples, which is "
                "not split. Make the batches larger, or the microbatches smaller if memory has to be saved; a row of "
                "documents is split by DataSpec(split_batch=cf.split_documents, get_num_samples_in_batch=...).",
                stacklevel=2,
            )
        elif size < self.num_samples and (reason := what_needs_whole_batch(self._state.model, size)):
            warnings.warn(
                f"device_train_microbatch_size={size} does not give the step of the batch of {self.num_samples} "
                f"samples, as {reason}. composer.diagnostics.check_microbatches(trainer) measures the difference.",
                stacklevel=2,
            )

    def _elements_on_device(self, microbatches: Sequence[Microbatch]) -> list[Tensor] | None:
        """Return the number of elements of each microbatch that the model counts; None if it does not."""
        numbers = self._elements.on_device(microbatches)
        if numbers is None or self._state.batch_counts:
            return numbers
        # A process without a further batch computes with its last one, which does not count again.
        return [torch.zeros_like(number) for number in numbers]

    def _count(self, microbatches: int, *, on_device: bool) -> None:
        """Count what this process has in the batch and requests of all, and send it to the others."""
        state, parallel, samples = self._state, self._parallel, self._counted_samples
        # The samples that were read, whose number is the position in the data, also if algorithms have selected none of
        # them and cleared batch_counts; and the tokens that are trained on, as algorithms may have shortened sequences.
        tokens = self._spec.get_num_tokens_in_batch(state.batch) if samples else 0
        called = 0 if state.stop_reason is None else STOP_CALLED
        stop = called if self._signals.received is None else STOP_SIGNAL
        self.share = share = BatchShare(samples, tokens, samples, microbatches, stop=stop, on_device=on_device)
        if parallel.is_connected:
            share.elements = self._elements.count(state.batch) if state.batch_counts else 0
            if not parallel.is_trial:  # after the trials the batch begins once more
                share.seconds = self._stopwatch.elapsed() / 1e6
            self.weights = parallel.exchange_counts(share, usual_elements=self._usual_elements)

    def _weighted(self, microbatches: Sequence[Microbatch], elements: list[Tensor] | None) -> Sequence[Microbatch]:
        """Return the microbatches with their weights in the batch of all, equally many in each process if all must."""
        state, weights = self._state, self.weights
        if self._elements.is_sum:
            # All are added; gradients are averaged over the processes, and a batch that does not count adds nothing.
            weight = float(get_data_world_size() if state.batch_counts else 0)
            microbatches = [(batch, weight) for batch, _ in microbatches]
        elif weights is not None:
            microbatches = weights.weigh(microbatches, elements, state.device)
        elif elements is not None:
            microbatches = weighted_by(microbatches, elements)
        if weights is not None and state.device_train_microbatch_size is not None:
            # Sharded weights and SyncBatchNorm wait for all processes in a forward pass, so all need as many.
            microbatches = self._parallel.padded(microbatches, weights)
        return microbatches

    def _each(self, microbatches: Sequence[Microbatch]) -> Iterator[Microbatch]:
        """Yield the microbatches; the gradients of several processes are reduced with the last one."""
        for number, microbatch in enumerate(microbatches, start=1):
            self._parallel.begin_microbatch(number == len(microbatches))
            yield microbatch

    def _measure(self, batch: Batch) -> None:
        """Update the training metrics after a microbatch, with its targets before algorithms."""
        state, weight = self._state, self._state.microbatch_weight
        # Of several computations in a step, the metrics use the first outputs. A microbatch of weight 0 only keeps the
        # processes in step. The host does not wait for a weight on the device.
        if self.step.times_computed == 1 and state.batch_counts and (isinstance(weight, Tensor) or weight):
            update_train_metrics(state, batch)

    def _complete(self) -> None:
        """Correct gradients and losses if a process had an unusual batch, and unscale the gradients.

        The backward pass has reduced them over the processes.
        """
        # The weights assumed usual counts; the actual ones arrive while the gradients are computed.
        if self.weights is not None and (factor := self._parallel.complete_gradients(self.weights)) != 1:
            self.step.scale_losses(factor)
        self._optimization.unscale()


def may_read_outputs(engine: Engine) -> bool:
    """Return whether a component that is not of this library, and may read the outputs, runs after a batch's loss."""
    entries = engine.explain().entries
    late = [one.component for event in _AFTER_LOSS for one in entries.get(event, ())]
    # The function of a subscription may be of anybody.
    return any(isinstance(one, Subscription) or not type(one).__module__.startswith("composer.") for one in late)


def split_microbatches(
    batch: Batch, spec: DataSpec, microbatch_size: int | None, count: Callable[[Batch], int] | None = None
) -> Sequence[tuple[Batch, float]]:
    """Return the microbatches, each with its weight: its fraction of the batch.

    The mean over the batch equals the sum of the microbatches' means times these weights, whatever their sizes. Samples
    are counted, or what ``count`` returns for a batch, unless that is 0 for all of them. The ``microbatch_transforms``
    of ``spec`` are applied to each.

    Example:
        >>> import torch
        >>> from composer.core import DataSpec
        >>> spec = DataSpec([])
        >>> [(len(one), weight) for one, weight in split_microbatches(torch.zeros(5, 2), spec, 2)]
        [(2, 0.4), (2, 0.4), (1, 0.2)]
    """
    microbatches, weights = [batch], [1.0]
    if microbatch_size is not None and spec.get_num_samples_in_batch(batch) > microbatch_size:
        microbatches = list(spec.split_batch(batch, microbatch_size))
        counts = list(map(count or spec.get_num_samples_in_batch, microbatches))
        if not any(counts):
            # In several processes this share has the weight 0, as unsplit, and if all have none, all raise an error.
            if get_world_size() == 1 and not spec.get_num_tokens_in_batch(batch):
                raise ValueError(
                    "accumulate_train_batch_on_tokens=True, but a batch has no token. Tokens are counted in "
                    "batch['input_ids']; for other batches give DataSpec(loader, get_num_tokens_in_batch=...)."
                )
            counts = list(map(spec.get_num_samples_in_batch, microbatches))
        total = sum(counts)
        weights = [number / total for number in counts]
    if spec.microbatch_transforms is not None:
        microbatches = list(map(spec.microbatch_transforms, microbatches))
    return list(zip(microbatches, weights, strict=True))
