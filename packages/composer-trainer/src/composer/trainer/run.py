"""A training in progress: what the loop calls for data, optimization, clock, losses, metrics and evaluations.

Each call of ``Trainer.fit`` creates a ``Run``, which the loop (``composer.trainer.loop``) calls. It owns what lasts
for this call: the step, the signals, and the counts of the batch at hand. All that a resumed run needs is in the
state, the batches and ``ResumeState``. One process follows the same path as several, without what only serves the
others, as that takes time in each step.
"""

from __future__ import annotations

import warnings
from functools import cache
from typing import TYPE_CHECKING, Any

import attrs
import torch

from composer.core import Engine, Event, TimeUnit
from composer.core.data_spec import count_tokens, has_own_functions
from composer.core.evaluator import enter_training_mode
from composer.core.packing import check_packed_model
from composer.core.step import Step
from composer.distributed import BatchWeights, GlobalBatch
from composer.trainer.clock import Clock
from composer.trainer.data.batches import END
from composer.trainer.evaluation.metrics import log_train_metrics
from composer.trainer.microbatching import MicrobatchSearch, announced, measured, split_microbatches, warn_if_larger
from composer.trainer.stopping import Stopped, StopSignals

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from torch import Tensor
    from torch.optim.lr_scheduler import LRScheduler

    from composer.core.step import Microbatch
    from composer.distributed import Parallelism
    from composer.trainer.data.batches import Batches
    from composer.trainer.evaluation.evaluate import Evaluations
    from composer.trainer.optimization import Optimization
    from composer.trainer.resume.state import ResumeState
    from composer.trainer.schedules import Schedules

__all__ = ["Run"]


_UNKNOWN = BatchWeights(GlobalBatch(0))
_loss_name = cache("loss/train/{}".format)


@attrs.define
class _CurrentBatch:
    """What belongs to the batch at hand, from when it is loaded until the next one is.

    Attributes:
        num_samples: The number of samples that were read.
        is_counted: Whether this process counts them; False for a copy that only keeps it in step with others.
        weights: The weights of its losses, once it is split.
        totals: The counts of all processes, once its gradients are computed.
        has_local_losses: Whether the losses of the step are those of this process, and not yet the means over all.
    """

    num_samples: int
    is_counted: bool
    weights: BatchWeights = _UNKNOWN
    totals: GlobalBatch = _UNKNOWN.own
    has_local_losses: bool = False


class Run:
    """A training in progress, as the loop sees it.

    Args:
        engine: With the state that is trained.
        batches: The data.
        optimization: Computes and applies the gradients.
        schedules: The learning rates.
        evaluations: What is evaluated, and how often.
        progress: Restores a saved run as the last preparation before the first batch.
        parallel: Runs the model in all processes.
        weigh_by_tokens: Whether microbatches are weighted by their tokens instead of their samples; a model that counts
            the elements of its loss is asked first, unless the tokens are counted by a function of the user.
    """

    def __init__(
        self,
        engine: Engine,
        batches: Batches,
        optimization: Optimization,
        schedules: Schedules,
        evaluations: Evaluations,
        progress: ResumeState,
        *,
        parallel: Parallelism,
        weigh_by_tokens: bool = False,
    ) -> None:
        self.engine, self.state = engine, engine.state
        self.batches, self.optimization, self.schedules, self.parallel = batches, optimization, schedules, parallel
        # The length that the schedules are for: None if it is shorter than what a resumed run has trained.
        elapsed = self.state.get_elapsed_duration()
        self._length = None if elapsed is None or elapsed.value > 1 else self.state.max_duration
        if self._length is not None:
            schedules.follow_clock(self.state.timestamp)
        self.clock = Clock(self.state)
        loss = optimization.in_precision(self.state.compute_loss)
        self.step = Step(self.state, engine.run_event, parallel.forward, loss, split=self._split)
        self.compute_gradients = self.step.compute_gradients
        self._is_in_batch = False
        # StopSignals compares the numbers of batches to see whether one has ended. It sets no limit between batches, in
        # an evaluation or while a checkpoint is written.
        self.signals = StopSignals(lambda: int(self.state.timestamp.batch) if self._is_in_batch else None)
        self._evaluations, self.progress = evaluations, progress
        self._is_regular = False
        if self.state.auto_microbatching:
            search = MicrobatchSearch(self.state, parallel, self.step)
            self.compute_gradients = lambda: search.compute_gradients(self._batch.num_samples)
        spec = batches.spec
        # What the loss of a batch is the mean of, unless the model counts it. Batches have equal numbers of samples but
        # not of tokens, so that these cannot be known in advance.
        self._weigh = spec.get_num_loss_tokens_in_batch if weigh_by_tokens else spec.get_num_samples_in_batch
        self._usual = None if weigh_by_tokens else batches.usual_samples
        self._asks_model = not weigh_by_tokens or spec._get_num_tokens_in_batch is count_tokens  # noqa: SLF001
        self._batch = _CurrentBatch(0, is_counted=False)
        # The search reduces the size itself, and one that is larger than a batch is not a mistake of the user.
        self._is_first_split = not self.state.auto_microbatching
        self._may_warn_of_nan = True

    def is_over(self) -> bool:
        """Return whether the training has reached its length.

        Raises:
            Stopped: A signal has stopped it before.
        """
        # A step reads the stored fields of the state, because each property would be a further call.
        duration = self.state._max_duration  # noqa: SLF001
        assert duration is not None
        if self.state.timestamp.count(duration.unit) >= duration.value:
            return True
        if self.signals.is_agreed:
            raise Stopped
        return False

    def begin(self) -> None:
        """Prepare the model and the optimizers for training, and restore a saved run."""
        self.wrap_model()
        enter_training_mode(self.state.model)
        self.optimization.train_mode()
        # Last, because wrapping the model and the callbacks at FIT_START may draw random numbers.
        self.progress.begin()
        self.state.dataloader_len = self.batches.position.length
        # The training may be longer than when it was stopped at its end.
        if self._length is not None and not self.state.has_reached(self._length):
            self.progress.interrupted.pop(Event.FIT_END, None)
        self.clock.elapsed()  # the time before is not training time

    def wrap_model(self) -> None:
        """Wrap the model for several processes again, as algorithms may have changed which parameters are trained."""
        self.parallel.prepare(self.state)
        self.step.forward = self.optimization.in_precision(self.parallel.forward)
        # The gradients of one process without a scaler are complete after the backward pass.
        is_incomplete = self.parallel.is_connected or self.state.scaler is not None
        self.step.complete = self._complete_gradients if is_incomplete else None
        changes_samples = any(algorithm.selects_samples for algorithm in self.state.algorithms)
        may_differ = has_own_functions(self.batches.spec) or self.state.auto_microbatching or changes_samples
        self._is_regular = self._usual is not None and not may_differ

    def begins_epoch(self) -> bool:
        """Return whether the epoch has no finished batch."""
        return self.state.timestamp.count(TimeUnit.BATCH, in_epoch=True) == 0

    def ends_iteration(self) -> bool:
        """Return whether all epochs of the iteration are finished."""
        return self.state.timestamp.epoch_in_iteration >= self.state.iteration_length

    def next_batch(self) -> bool:
        """Set the state's next batch; return False at the end of the epoch."""
        self._is_in_batch = True
        batch = self.batches.next()
        if batch is END:
            self._is_in_batch = False
            return False
        position = self.batches.position
        if self.state.dataloader_len != position.length:  # the epoch has more batches than announced
            self.state.dataloader_len = position.length
        self._batch = _CurrentBatch(self.batches.spec.get_num_samples_in_batch(batch), position.last_batch_counts)
        self.state.batch, self.state.batch_counts = batch, self._batch.is_counted
        return True

    def _split(self) -> Iterable[Microbatch]:
        """Return the microbatches, each with its weight: its fraction of the elements that the loss is the mean of."""
        size, spec = self.state.device_train_microbatch_size, self.batches.spec
        microbatches: Sequence[Microbatch] = ((self.state.batch, 1.0),)
        if size is not None and self._is_first_split:
            self._is_first_split = False
            warn_if_larger(size, self._batch.num_samples)
        if size is not None or spec.microbatch_transforms is not None:
            microbatches = split_microbatches(self.state.batch, spec, size, self._weigh)
        if self.batches.checks_model:
            self.batches.checks_model = False
            check_packed_model(self.state, microbatches[0][0])
        # The complete batch of a single process has weight 1, whatever its loss is the mean of.
        is_part = len(microbatches) > 1 or self.parallel.is_connected
        terms = self._loss_terms(microbatches) if is_part else None
        is_first = self.step.times_computed == 1
        if is_first:  # further computations of the batch have the same counts
            self._begin_global_batch(len(microbatches), has_terms=terms is not None)
        if is_part:
            microbatches = self._batch.weights.weigh(microbatches, terms, self.state.device)
        if size is not None:
            # A forward pass of a sharded model gathers weights from all processes, so all need as many.
            microbatches = self.parallel.padded(microbatches, self._batch.weights)
        each: Iterable[Microbatch] = microbatches
        if len(microbatches) == 1:  # without a generator in each step
            self.parallel.begin_microbatch(True)
        else:
            each = announced(microbatches, self.parallel.begin_microbatch)
        # Of several computations in a step, the metrics use the first outputs.
        return measured(each, self.state) if self.state.train_metrics and is_first else each

    def _loss_terms(self, microbatches: Sequence[Microbatch]) -> list[Tensor] | None:
        """Return how many elements the loss of each is the mean of, if the model counts them."""
        count = getattr(self.state.model, "count_loss_terms", None)
        if count is None or not self._asks_model:
            return None
        counts = [count(batch) for batch, _ in microbatches]
        if any(number is None for number in counts):
            return None
        # A process without a further batch computes with its last one, which does not count again.
        return counts if self.state.batch_counts else [torch.zeros_like(number) for number in counts]

    def _begin_global_batch(self, microbatches: int, *, has_terms: bool) -> None:
        state, parallel, batch = self.state, self.parallel, self._batch
        # The samples that were read, whose number is the position in the data, and the tokens that are trained on, as
        # algorithms may have shortened sequences.
        samples = batch.num_samples if batch.is_counted else 0
        tokens = self.batches.spec.get_num_tokens_in_batch(state.batch) if batch.is_counted else 0
        has_signal, logs = self.signals.received is not None, self.engine.logger.is_heard
        own = GlobalBatch(samples, tokens, samples, microbatches, stop=has_signal, logs=logs, has_terms=has_terms)
        if parallel.is_connected:  # a single process has weight 1, even if algorithms removed samples
            own.counted = self._weigh(state.batch) if state.batch_counts else 0
            if not parallel.is_trial:  # after the trials the batch begins once more
                own.seconds = self.clock.elapsed() / 1e6
        is_regular = self._is_regular and self.batches.position.last_batch_is_full
        batch.weights = parallel.begin_batch(own, usual=self._usual, is_regular=is_regular)

    def _complete_gradients(self) -> None:
        """Sum the gradients of all processes, if that is not done yet, and unscale them."""
        # The weights assumed usual counts; the actual ones arrive while the gradients are computed.
        factor = self.parallel.end_batch(self._batch.weights)
        if factor != 1:
            self.step.scale_losses(factor)
        self.optimization.unscale()

    def mean_losses(self) -> dict[str, Tensor]:
        """Return the losses of the last batch, their means over all processes; all of them must call it."""
        if self._batch.has_local_losses:
            self._batch.has_local_losses = False
            self.step.losses = self.parallel.reduce_mean(self.step.losses)
        return self.step.losses

    def log_batch(self) -> None:
        """Log the batch's losses, once in a batch and before it is counted, as this completes the counts of all."""
        batch = self._batch
        batch.totals, batch.has_local_losses = batch.weights.totals(), True
        if not batch.totals.logs:
            return
        self.mean_losses()  # all processes, also those without a logger
        if not self.engine.logger.is_heard:
            return
        now, state = self.state.timestamp.counts, self.state
        metrics: dict[str, Any] = {
            "time/batch": now.batch,
            "time/sample": now.sample,
            "time/batch_in_epoch": now.batch_in_epoch,
            "time/sample_in_epoch": now.sample_in_epoch,
        }
        if batch.totals.tokens:
            metrics |= {"time/token": now.token, "time/token_in_epoch": now.token_in_epoch}
        for name, loss in self.step.losses.items():
            metrics[_loss_name(name)] = loss
        if state.scaler is not None:
            metrics |= self.optimization.figures()
        # What is logged depends only on the place in the epoch, so that a resumed run logs the same.
        if not now.batch_in_epoch:
            metrics |= {"time/iteration": now.iteration, "time/epoch": now.epoch}
        if not now.batch_in_epoch or state.auto_microbatching:
            metrics["trainer/device_train_microbatch_size"] = state.device_train_microbatch_size or batch.num_samples
        self.engine.logger.log_metrics(metrics, now.batch)

    def count_batch(self) -> None:
        """Advance the clock and the learning rates by a batch."""
        totals, self.state.microbatch = self._batch.totals, -2
        self._is_in_batch = False
        if totals.stop:
            self.signals.is_agreed = True
        # Clocks of several processes must agree: the time of a batch is counted with the next one.
        microseconds = round(totals.seconds * 1e6) if self.parallel.is_connected else self.clock.elapsed()
        self.clock.count_batch(totals.samples, totals.tokens, microseconds)
        if self.schedules.every_batch:
            self._step_schedulers(self.schedules.every_batch)

    def count_epoch(self) -> None:
        """Advance the clock and the learning rates by an epoch, and log its training metrics."""
        self.log_train_metrics()
        for metric in self.state.train_metrics.values():
            metric.reset()
        self.clock.count_epoch()
        self.batches.rewind()
        self._step_schedulers(self.schedules.every_epoch)
        # Schedulers of every batch step here, too: their rates depend on the clock, which the epoch has changed.
        self._step_schedulers(self.schedules.by_clock)
        duration = self.state.max_duration
        is_in_tokens = duration is not None and duration.unit is TimeUnit.TOKEN
        if is_in_tokens and not self.state.timestamp.count(TimeUnit.TOKEN):
            raise ValueError(
                f"max_duration={str(duration)!r} would never be reached: an epoch had no token. Tokens are "
                "counted in batch['input_ids']; for other batches give DataSpec(loader, get_num_tokens_in_batch=...)."
            )

    def count_iteration(self) -> None:
        """Advance the clock by an iteration."""
        self.clock.count_iteration()
        self._step_schedulers(self.schedules.by_clock)

    def _step_schedulers(self, schedulers: Sequence[LRScheduler]) -> None:
        # A schedule may not be defined for a duration that is shorter than planned, as after a callback has ended it.
        duration = self.state.max_duration
        was_ended = duration is not None and duration is not self._length and self.state.has_reached(duration)
        for scheduler in schedulers:
            if not was_ended or scheduler not in self.schedules.by_clock:
                scheduler.step()

    def evaluate_if_due(self, event: Event) -> None:
        """Evaluate if it is due; this does not count as training time.

        Raises:
            Stopped: A signal has stopped the evaluation, or the training before it.
        """
        if self.state._evaluators:  # noqa: SLF001  (see is_over)
            with self.clock.paused():
                self._evaluations.run_if_due(self.engine, event, self.signals, self.progress.interrupted)

    def log_train_metrics(self) -> None:
        """Log the training metrics of the epoch so far, if any."""
        if self.state.train_metrics and not self.begins_epoch():
            log_train_metrics(self.state, self.engine.logger)

    def warn_of_nan(self) -> None:
        """Warn once if the last loss is not a number; called after epochs only, as it waits for the device."""
        if self._may_warn_of_nan and "total" in self.step.losses and bool(self.step.losses["total"].isnan()):
            self._may_warn_of_nan = False
            warnings.warn(
                f"The loss of batch {int(self.state.timestamp.batch) - 1} is not a number (NaN). Check the data, the "
                "labels (a mean over ignored labels only is NaN), the weights of classes and the learning rate. "
                "Trainer(callbacks=[NaNMonitor()]) ends a training at the first such batch.",
                UserWarning,
                stacklevel=2,
            )
