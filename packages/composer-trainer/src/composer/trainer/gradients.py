"""The gradients of a batch: computed in microbatches, with the weight of each loss.

A loss is the mean over *elements*, and the step has to be that of the mean over the elements of all processes, however
the batch is split. What the elements are is decided once in a run: the tokens with a target for
``accumulate_train_batch_on_tokens``; otherwise those that the model counts (``count_loss_terms()``), or else the
samples. A microbatch's loss is then weighed in two steps: ``split_microbatches`` by its fraction of this process's
share, and ``BatchWeights.weigh`` by the fraction of the share in the batch of all processes. The complete batch of a
single process has the weight 1, whatever its elements are. Losses of a model that are sums (``loss_is_sum``) are added,
without a count.

``Run`` creates :class:`BatchGradients` for a call of ``fit``. A batch begins with :meth:`BatchGradients.begin`. To
compute its gradients, ``Step`` calls ``_split`` for the microbatches, which begins the exchange of the counts, and
``_complete`` after the last one. Counts and weights stay until the next batch begins.

Several processes exchange fewer counts where batches are *regular*: each process certainly has the usual number of
samples. ``Batches`` states this of the loader, ``EpochPosition`` of a batch, and :meth:`~BatchGradients.prepare` checks
that nothing in this run changes a number. ``distributed/count_exchange.py`` makes use of it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from composer.core.data_spec import count_tokens, has_own_functions
from composer.core.packing import check_packed_model
from composer.core.step import Step
from composer.distributed import BatchShare, BatchWeights, get_data_world_size
from composer.trainer.microbatching import MicrobatchSearch, announced, measured, split_microbatches, warn_if_larger

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from torch import Tensor

    from composer.core import Batch, Engine
    from composer.core.step import Microbatch
    from composer.distributed import Parallelism
    from composer.trainer.data.batches import Batches
    from composer.trainer.optimization import Optimization
    from composer.trainer.run import Clock
    from composer.trainer.stopping import StopSignals

__all__ = ["BatchGradients"]


class BatchGradients:
    """Computes the gradients of each batch, and exchanges its counts with the other processes meanwhile.

    Args:
        engine: With the state that is trained.
        batches: The data.
        optimization: The precision, and the scale of the losses.
        parallel: Runs the model in all processes.
        clock: Measures the time of a batch, which several processes exchange.
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
        clock: Clock,
        signals: StopSignals,
        *,
        by_tokens: bool,
    ) -> None:
        self._state, self._logger, self._batches, self._spec = engine.state, engine.logger, batches, batches.spec
        self._optimization, self._parallel, self._clock, self._signals = optimization, parallel, clock, signals
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
        self._usual = None if by_tokens or self._is_sum else batches.usual_samples
        self._full_is_regular = False
        # The search reduces the size itself, and one that is larger than a batch is not a mistake of the user.
        self._may_warn_of_size = not state.auto_microbatching
        self.num_samples = self._num_counted = 0
        self.weights = BatchWeights(BatchShare(0))

    def prepare(self) -> None:
        """Wrap the model for several processes, again if algorithms may have changed which parameters are trained."""
        state, spec = self._state, self._spec
        self._parallel.prepare(state)
        # The gradients of one process without a scaler are complete after the backward pass.
        is_incomplete = self._parallel.is_connected or state.scaler is not None
        self.step.complete = self._complete if is_incomplete else None
        selects = any(algorithm.selects_samples for algorithm in state.algorithms)
        changes_number = has_own_functions(spec) or state.auto_microbatching or selects
        self._full_is_regular = self._usual is not None and self._batches.is_exact and not changes_number

    def begin(self, batch: Batch) -> None:
        """Make this the batch of the state: the one that ``batches`` returned last."""
        counts = self._batches.position.last_batch_counts
        self.num_samples = self._spec.get_num_samples_in_batch(batch)
        self._num_counted = self.num_samples if counts else 0
        self._state.batch, self._state.batch_counts = batch, counts

    def _split(self) -> Iterable[Microbatch]:
        """Return the microbatches, each with its weight in the batch of all processes."""
        state, spec, parallel = self._state, self._spec, self._parallel
        size = state.device_train_microbatch_size
        microbatches: Sequence[Microbatch] = ((state.batch, 1.0),)
        if size is not None and self._may_warn_of_size:
            self._may_warn_of_size = False
            warn_if_larger(size, self.num_samples)
        if size is not None or spec.microbatch_transforms is not None:
            microbatches = split_microbatches(state.batch, spec, size, self._count_elements)
        if self._batches.checks_model:
            self._batches.checks_model = False
            check_packed_model(state, microbatches[0][0])
        is_part = len(microbatches) > 1 or parallel.is_connected
        terms = self._terms_of(microbatches) if is_part else None
        is_first = self.step.times_computed == 1
        if is_first:  # further computations of the batch have the same counts
            self._exchange_counts(len(microbatches), has_terms=terms is not None)
        if self._is_sum:
            # All are added; gradients are averaged over the processes, and a batch that does not count adds nothing.
            weight = float(get_data_world_size() if state.batch_counts else 0)
            microbatches = [(batch, weight) for batch, _ in microbatches]
        elif is_part:
            microbatches = self.weights.weigh(microbatches, terms, state.device)
        if size is not None:
            # A forward pass of a sharded model gathers weights from all processes, so all need as many.
            microbatches = parallel.padded(microbatches, self.weights)
        each: Iterable[Microbatch] = microbatches
        if len(microbatches) == 1:  # without a generator in each step
            parallel.begin_microbatch(True)
        else:
            each = announced(microbatches, parallel.begin_microbatch)
        # Of several computations in a step, the metrics use the first outputs.
        return measured(each, state) if state.train_metrics and is_first else each

    def _terms_of(self, microbatches: Sequence[Microbatch]) -> list[Tensor] | None:
        """Return the number of elements of each microbatch's loss that the model counts; None if it does not."""
        count = getattr(self._state.model, "count_loss_terms", None)
        if count is None or self._is_sum or not self._asks_model:
            return None
        terms = [count(batch) for batch, _ in microbatches]
        if any(number is None for number in terms):
            return None
        # A process without a further batch computes with its last one, which does not count again.
        return terms if self._state.batch_counts else [torch.zeros_like(number) for number in terms]

    def _exchange_counts(self, microbatches: int, *, has_terms: bool) -> None:
        """Begin to exchange the counts of this process's share, which determines the weights."""
        state, parallel = self._state, self._parallel
        # The samples that were read, whose number is the position in the data, and the tokens that are trained on, as
        # algorithms may have shortened sequences.
        samples = self._num_counted
        tokens = self._spec.get_num_tokens_in_batch(state.batch) if samples else 0
        stop, logs = self._signals.received is not None, self._logger.is_heard
        own = BatchShare(samples, tokens, samples, microbatches, stop=stop, logs=logs, has_terms=has_terms)
        if parallel.is_connected:  # a single process has weight 1, even if algorithms removed samples
            own.counted = self._count_elements(state.batch) if state.batch_counts else 0
            if not parallel.is_trial:  # after the trials the batch begins once more
                own.seconds = self._clock.elapsed() / 1e6
        is_regular = self._full_is_regular and self._batches.position.last_batch_is_full
        self.weights = parallel.begin_batch(own, usual=self._usual, is_regular=is_regular)

    def _complete(self) -> None:
        """Sum the gradients of all processes, if that is not done yet, and unscale them."""
        # The weights assumed usual counts; the actual ones arrive while the gradients are computed.
        factor = self._parallel.end_batch(self.weights)
        if factor != 1:
            self.step.scale_losses(factor)
        self._optimization.unscale()
