"""The gradients of a batch: computed in microbatches, with the weight of each loss.

A loss is the mean over *elements*, and the step has to be that of the mean over the elements of all processes, however
the batch is split. A model with ``count_loss_terms()`` counts its elements itself. With
``accumulate_train_batch_on_tokens``, a function of the user that counts tokens is used instead, and without either the
elements are tokens with a target. In all other cases they are samples. Losses that are sums (``loss_is_sum`` of the model) are added.

There are two factors: :func:`split_microbatches` returns the fraction of this process's share, and
``BatchWeights.weigh`` multiplies it by that of the share in the batch of all processes, or replaces it by the fraction
of what the model counts. The complete batch of a single process has the weight 1, whatever its elements are.

``Run`` creates :class:`BatchGradients` for a call of ``fit``. A batch begins with :meth:`BatchGradients.begin`. To
compute its gradients, ``Step`` calls ``_split`` for the microbatches, which begins the exchange of the counts, and
``_complete`` after the last one. Counts and weights stay until the next batch begins. The exchange and the weights are
in ``distributed/global_batch.py``, behind ``Parallelism.begin_batch`` and ``end_batch``.
"""

from __future__ import annotations

import copy
import warnings
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from composer.core import Event
from composer.core.data.batches import count_tokens
from composer.core.data.packing import check_packed_model
from composer.core.plan import Subscription
from composer.core.step import Step
from composer.distributed import BatchShare, BatchWeights, get_data_world_size, get_world_size
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
"""The events of a batch after which its outputs are of no use to this library, except for training metrics."""


class BatchGradients:
    """Computes the gradients of each batch, and exchanges its counts with the other processes meanwhile.

    Args:
        engine: With the state that is trained.
        batches: The data.
        optimization: The precision, and the scale of the losses.
        parallel: Runs the model in all processes.
        stopwatch: Measures the time of a batch, which several processes exchange.
        signals: A received one is sent to the other processes.
        by_tokens: Whether the elements of a loss are tokens.

    Attributes:
        step: Runs the events of a batch, and computes the losses and the backward passes.
        compute: Computes the gradients of ``state.batch``, and returns its loss: the closure for the optimizers.
        num_samples: The number of samples that were read in the batch.
        weights: The weights of its losses, and the counts of all processes.
    """

    def __init__(
        self,
        engine: Engine,
        batches: Batches,
        optimization: Optimization,
        parallel: Parallelism,
        stopwatch: Stopwatch,
        signals: StopSignals,
        *,
        by_tokens: bool,
    ) -> None:
        self._engine, self._state, self._batches, self._spec = engine, engine.state, batches, batches.spec
        self._optimization, self._parallel, self._stopwatch, self._signals = optimization, parallel, stopwatch, signals
        state, spec = engine.state, batches.spec
        loss = optimization.in_precision(state.compute_loss)
        # Looked up at each call: a reference would keep the wrapper of an earlier epoch while another one is created.
        forward = optimization.in_precision(lambda batch: parallel.forward(batch))  # noqa: PLW0108
        self.step = Step(state, engine.run_event, forward, loss, split=self._split)
        self.compute = self.step.compute_gradients
        if state.auto_microbatching:
            search = MicrobatchSearch(state, parallel, self.step)
            self.compute = lambda: search.compute_gradients(self.num_samples)
        self._count_elements = spec.get_num_loss_tokens_in_batch if by_tokens else spec.get_num_samples_in_batch
        # A function of the user that counts tokens has the last word.
        self._asks_model = not by_tokens or spec._get_num_tokens_in_batch is count_tokens  # noqa: SLF001
        self._is_sum = bool(getattr(state.model, "loss_is_sum", False))
        # Batches have equal numbers of samples but not of tokens, so that these cannot be known in advance.
        self._usual = None if by_tokens or self._is_sum else batches.usual
        # The search reduces the size itself, and one that is larger than a batch is not a mistake of the user.
        self._may_warn_of_size = not state.auto_microbatching
        self.num_samples = 0
        self.weights = BatchWeights(BatchShare(0))

    def prepare(self) -> None:
        """Wrap the model for several processes, again if algorithms may have changed which parameters are trained."""
        state = self._state
        self._parallel.prepare(state)
        # The gradients of one process without a scaler are complete after the backward pass.
        is_incomplete = self._parallel.is_connected or state.scaler is not None
        self.step.complete = self._complete if is_incomplete else None
        self.step.frees_outputs = not state.train_metrics and not may_read_outputs(self._engine)

    def begin(self, batch: Batch) -> None:
        """Make this the batch of the state: the one that ``batches`` returned last."""
        self.num_samples = self._spec.get_num_samples_in_batch(batch)
        self._state.batch, self._state.batch_counts = batch, self._batches.position.last_batch_counts

    def _split(self) -> Iterable[Microbatch]:
        """Return the microbatches, each with its weight in the batch of all processes."""
        microbatches = self._microbatches()
        is_part = len(microbatches) > 1 or self._parallel.is_connected
        terms = self._terms_of(microbatches) if is_part else None
        is_first = self.step.times_computed == 1
        if is_first:  # further computations of the batch have the same counts
            share = self._own_share(len(microbatches), has_terms=terms is not None)
            self.weights = self._parallel.begin_batch(share, usual=self._usual)
        if is_part or self._is_sum:
            microbatches = self._weighted(microbatches, terms)
        # Of several computations in a step, the metrics use the first outputs.
        measures = is_first and bool(self._state.train_metrics)
        if measures or len(microbatches) > 1:
            return self._each(microbatches, measures=measures)
        self._parallel.begin_microbatch(True)  # without a generator in each step
        return microbatches

    def _microbatches(self) -> Sequence[Microbatch]:
        """Return the microbatches, each with its fraction of this process's share."""
        batch, size = self._state.batch, self._state.device_train_microbatch_size
        microbatches: Sequence[Microbatch] = ((batch, 1.0),)
        if size is not None or self._spec.microbatch_transforms is not None:
            microbatches = split_microbatches(batch, self._spec, size, self._count_elements)
            self._warn_of_size(size)
        if self._batches.checks_model:  # once for the data, and not again in a further call of fit
            self._batches.checks_model = False
            check_packed_model(self._state, microbatches[0][0])
        return microbatches

    def _weighted(self, microbatches: Sequence[Microbatch], terms: list[Tensor] | None) -> Sequence[Microbatch]:
        """Return the microbatches with their weights in the batch of all processes, in each process equally many."""
        state, weights = self._state, self.weights
        if self._is_sum:
            # All are added; gradients are averaged over the processes, and a batch that does not count adds nothing.
            weight = float(get_data_world_size() if state.batch_counts else 0)
            microbatches = [(batch, weight) for batch, _ in microbatches]
        else:
            microbatches = weights.weigh(microbatches, terms, state.device)
        if state.device_train_microbatch_size is not None:
            # A forward pass of a sharded model gathers weights from all processes, so all need as many.
            microbatches = self._parallel.padded(microbatches, weights)
        return microbatches

    def _each(self, microbatches: Sequence[Microbatch], *, measures: bool) -> Iterator[Microbatch]:
        """Yield the microbatches, and update the training metrics after each, with its targets before algorithms."""
        state = self._state
        for number, (batch, weight) in enumerate(microbatches, start=1):
            self._parallel.begin_microbatch(number == len(microbatches))
            original = copy.copy(batch) if measures else None
            yield batch, weight
            # One of weight 0 only keeps the processes in step. The host does not wait for a weight on the device.
            if measures and state.batch_counts and (isinstance(weight, Tensor) or weight):
                update_train_metrics(state, original)

    def _warn_of_size(self, size: int | None) -> None:
        """Warn, once, of microbatches that are larger than a batch, or do not give its step."""
        if size is None or not self._may_warn_of_size:
            return
        self._may_warn_of_size = False
        if size > self.num_samples:
            warnings.warn(
                f"device_train_microbatch_size={size} is larger than the batch of {self.num_samples} samples, which is "
                "not split. Make the batches larger, or the microbatches smaller if memory has to be saved.",
                stacklevel=2,
            )
        elif size < self.num_samples and (reason := what_needs_whole_batch(self._state.model, size)):
            warnings.warn(
                f"device_train_microbatch_size={size} does not give the step of the batch of {self.num_samples} "
                f"samples, as {reason}. composer.diagnostics.check_microbatches(trainer) measures the difference.",
                stacklevel=2,
            )

    def _terms_of(self, microbatches: Sequence[Microbatch]) -> list[Tensor] | None:
        """Return the number of elements of each microbatch's loss that the model counts; None if it does not."""
        terms = None if self._is_sum or not self._asks_model else loss_terms(self._state.model, microbatches)
        if terms is None:
            return None
        # A process without a further batch computes with its last one, which does not count again.
        return terms if self._state.batch_counts else [torch.zeros_like(number) for number in terms]

    def _own_share(self, microbatches: int, *, has_terms: bool) -> BatchShare:
        """Return what this process counts in the batch, and requests of all processes."""
        state, parallel = self._state, self._parallel
        # The samples that were read, whose number is the position in the data, also if algorithms have selected none of
        # them and cleared batch_counts; and the tokens that are trained on, as algorithms may have shortened sequences.
        samples = self.num_samples if self._batches.position.last_batch_counts else 0
        tokens = self._spec.get_num_tokens_in_batch(state.batch) if samples else 0
        stop = 2 if self._signals.received is not None else int(state.stop_reason is not None)
        share = BatchShare(samples, tokens, samples, microbatches, stop=stop, has_terms=has_terms)
        if parallel.is_connected:  # a single process has weight 1, even if algorithms removed samples
            share.counted = self._count_elements(state.batch) if state.batch_counts else 0
            if not parallel.is_trial:  # after the trials the batch begins once more
                share.seconds = self._stopwatch.elapsed() / 1e6
        return share

    def _complete(self) -> None:
        """Sum the gradients of all processes, if that is not done yet, and unscale them."""
        # The weights assumed usual counts; the actual ones arrive while the gradients are computed.
        if (factor := self._parallel.end_batch(self.weights)) != 1:
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


def loss_terms(model: Any, microbatches: Sequence[Microbatch]) -> list[Tensor] | None:
    """Return the number of elements of each microbatch's loss that a model counts; None if it does not."""
    count = getattr(model, "count_loss_terms", None)
    if count is None:
        return None
    terms = [count(batch) for batch, _ in microbatches]
    return None if any(number is None for number in terms) else terms
