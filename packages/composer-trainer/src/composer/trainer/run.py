"""What the loop calls: the clock, the data, the losses and the evaluations of a running training."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache, partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from composer.core import Batch, Engine, Event, TimeUnit
from composer.core.batch import note_batch
from composer.core.randomness import global_rng_states
from composer.trainer.batches import END
from composer.trainer.microbatch_search import MicrobatchSearch
from composer.trainer.microbatching import scaled_losses, split_microbatches
from composer.trainer.stopping import StopSignals

if TYPE_CHECKING:
    from torch.optim.lr_scheduler import LRScheduler

    from composer.distributed import Parallelism
    from composer.trainer.batches import Batches
    from composer.trainer.optimization import Optimization
    from composer.trainer.schedules import Schedules

__all__ = ["Run"]


_loss_name = cache("loss/train/{}".format)


class Run:
    """A training under way: asked by the loop what is next, and told what has been done.

    Args:
        engine: With the state that is trained.
        batches: The data.
        optimization: How gradients are computed and used.
        schedules: The learning rates.
        evaluate: ``f(event)``, called where an evaluation may be due.
        parallel: How the model is run in all processes.
        weigh_by_tokens: Whether a part of a batch counts by its tokens, not by its samples.
        resume: Called once when everything is ready to go on: what must happen last before the first batch.
    """

    def __init__(
        self,
        engine: Engine,
        batches: Batches,
        optimization: Optimization,
        schedules: Schedules,
        evaluate: Callable[[Event], None],
        *,
        parallel: Parallelism,
        weigh_by_tokens: bool = False,
        resume: Callable[[], None] | None = None,
    ) -> None:
        self.engine, self.state, self.model = engine, engine.state, engine.state.model
        self.batches, self.optimization, self.schedules = batches, optimization, schedules
        schedules.follow_clock()
        self._length = self.state.max_duration
        self.signals = StopSignals()
        self._resume = resume
        self.parallel, self._runs_alone, self._is_stopped_by_agreement = parallel, True, False
        self._search = MicrobatchSearch(self.state, parallel) if self.state.auto_microbatching else None
        self._count_samples = batches.spec.get_num_samples_in_batch
        self._count_tokens = batches.spec.get_num_tokens_in_batch
        self._weigh = self._count_tokens if weigh_by_tokens else self._count_samples
        self._evaluate = evaluate
        self._losses: dict[str, Tensor] = {}
        self.total_loss: Tensor
        """The batch's loss, without its graph."""
        self._logged: dict[str, Tensor] = {}
        self._drawn_from: list[tuple[Callable[[Any], object], Any]] = []
        self._num_samples = self._num_tokens = self._times_computed = 0
        self._seconds = 0.0
        self._since = time.perf_counter()

    def is_over(self) -> bool:
        """Return whether the training has reached its length, or was told by a signal to stop."""
        # What a step asks a state for is read as it is stored: a property is a call, of which a step has few.
        duration = self.state._max_duration  # noqa: SLF001
        assert duration is not None
        if self.state.timestamp.count(duration.unit) >= duration.value:
            return True
        return self.signals.received is not None if self._runs_alone else self._is_stopped_by_agreement

    @property
    def is_stopped(self) -> bool:
        """Whether a signal came to this process; or, of several, to any of them before the batch began."""
        return self.signals.received is not None if self._runs_alone else self._is_stopped_by_agreement

    def begin(self) -> None:
        """Put model and optimizers into the mode to train in, and go on where a saved run stopped."""
        self._prepare()
        self.model.train()
        self.optimization.train_mode()
        if self._resume is not None:
            self._resume()
        self._since = time.perf_counter()  # what comes before is no training

    def begin_epoch(self) -> None:
        """Wrap the model anew for other processes if algorithms have changed what is trained of it."""
        if not self._runs_alone:
            self._prepare()

    def _prepare(self) -> None:
        self.parallel.prepare(self.state)
        self.forward = self.optimization.in_precision(self.parallel.forward)
        self.loss = self.optimization.in_precision(self._compute_loss)
        self._runs_alone = not self.parallel.is_connected

    def _compute_loss(self, outputs: Any, batch: Batch) -> Any:
        try:
            return self.model.loss(outputs, batch)  # looked up each time: a callback may have put another in its place
        except Exception as error:
            self.note_batch(error, Event.BEFORE_LOSS, ".loss")
            raise

    def note_batch(self, error: Exception, event: Event, method: str = "") -> None:
        """Add to an error of the model what the model was called with."""
        note_batch(error, event, f"{type(self.model).__name__}{method}", self.state.batch)

    def gradients(self, compute: Callable[[Run], Tensor]) -> Callable[[], Tensor]:
        """Return what an optimizer calls for the gradients; parts are made smaller until they fit, if asked to."""
        once = partial(compute, self)
        return once if self._search is None else partial(self._search_and_compute, self._search, once)

    def _search_and_compute(self, search: MicrobatchSearch, once: Callable[[], Tensor]) -> Tensor:
        before = self._times_computed

        def forget() -> None:
            self._times_computed = before

        return search.compute(once, self._num_samples, forget)

    def begins_epoch(self) -> bool:
        """Return whether no batch of the epoch is done."""
        return self.state.timestamp.count(TimeUnit.BATCH, in_epoch=True) == 0

    def begins_iteration(self) -> bool:
        """Return whether no batch and no epoch of the iteration is done."""
        return self.begins_epoch() and self.state.timestamp.epoch_in_iteration == 0

    def ends_iteration(self) -> bool:
        """Return whether the iteration's epochs are done."""
        return self.state.timestamp.epoch_in_iteration >= self.state.iteration_length

    def next_batch(self) -> bool:
        """Put the next batch into the state; return False if the epoch has none left."""
        batch = self.batches.next()
        if batch is END:
            return False
        self._num_samples = self._count_samples(batch)
        self._num_tokens = self._count_tokens(batch)
        self.batches.num_samples += self._num_samples
        self.state.batch = batch
        self._times_computed = 0
        if not self._runs_alone:
            self._seconds = self._elapsed() / 1e6
        return True

    def begin_gradients(self) -> None:
        """Forget the last gradients; a batch that is computed again in one step draws the same again."""
        self.optimization.zero_grad()
        if self._times_computed and self.optimization.computes_again:
            self.state.restart_draws()
            for set_state, before in self._drawn_from:
                set_state(before)
        elif self.optimization.computes_again:
            self._drawn_from = global_rng_states(self.state.device)
        self._times_computed += 1

    def microbatches(self) -> Iterable[tuple[Batch, float]]:
        """Return the batch in parts, each with its weight: its fraction of all processes' samples or tokens."""
        size, spec = self.state.device_train_microbatch_size, self.batches.spec
        if size is None and spec.microbatch_transforms is None and self._runs_alone:
            return ((self.state.batch, 1.0),)
        parts = split_microbatches(self.state.batch, spec, size, self._weigh)
        if spec.microbatch_transforms is not None:
            parts = [(spec.microbatch_transforms(part), weight) for part, weight in parts]
        return parts if self._runs_alone else self._agreed_on(parts)

    def _agreed_on(self, parts: Sequence[tuple[Batch, float]]) -> Iterable[tuple[Batch, float]]:
        parallel, counts = self.parallel, self.batches.counts
        parallel.begin_batch(
            self._num_samples if counts else 0,
            self._num_tokens if counts else 0,
            counted=self._weigh(self.state.batch) if counts else 0,
            microbatches=len(parts),
            seconds=self._seconds,
            stop=self.signals.received is not None,
        )
        rank_weight = parallel.totals().weight
        padded = parallel.padded([(part, weight * rank_weight) for part, weight in parts])
        return _announced(padded, parallel.begin_microbatch)

    def remember_for_metrics(self, batch: Batch) -> Batch | None:
        """Return the batch as it is before algorithms change its targets; None if there are no training metrics."""
        return copy.copy(batch) if self.state.train_metrics else None

    def accumulate_loss(self, loss: Any, weight: float, batch: Batch | None) -> None:
        """Add a microbatch's loss to the batch's, and its outputs to the training metrics."""
        state = self.state
        is_whole = weight == 1 and isinstance(loss, Tensor)  # nearly always
        parts = {"total": loss.detach()} if is_whole else scaled_losses(loss, weight)
        if state.microbatch > 0:
            parts = {name: self._losses[name] + part for name, part in parts.items()}
        self._losses = parts
        self.total_loss = parts["total"]
        if self._times_computed == 1:  # later ones are at other weights, where the optimizer only looks
            self._logged = parts
        state.total_loss = self._logged["total"]
        # A part of weight 0 only keeps this process in step with the others.
        if state.train_metrics and self._times_computed == 1 and weight:
            with torch.no_grad():
                outputs = self.model.eval_forward(batch, state.outputs)
                for metric in state.train_metrics.values():
                    self.model.update_metric(batch, outputs, metric)

    def finish_gradients(self) -> None:
        """Add up the processes' gradients, if that is not done yet, and give them their true size."""
        if not self._runs_alone:
            self.parallel.end_batch()
        if self.state.scaler is not None:
            self.optimization.unscale()

    def log_batch(self) -> None:
        """Log the batch's loss, by the number that the batch has."""
        if not self._runs_alone:
            self._logged = self.parallel.reduce_mean(self._logged)
        if not self.engine.logger.is_heard:
            return
        now, state = self.state.timestamp.counts, self.state
        metrics: dict[str, Any] = {
            "time/batch": now.batch,
            "time/sample": now.sample,
            "time/batch_in_epoch": now.batch_in_epoch,
            "time/sample_in_epoch": now.sample_in_epoch,
        }
        if self._num_tokens:
            metrics |= {"time/token": now.token, "time/token_in_epoch": now.token_in_epoch}
        for name, loss in self._logged.items():
            metrics[_loss_name(name)] = loss
        if state.scaler is not None:
            metrics |= self.optimization.figures()
        # Where in the epoch a batch is says what is logged, and not what was: a resumed run has to log the same.
        if not now.batch_in_epoch:
            metrics |= {"time/iteration": now.iteration, "time/epoch": now.epoch}
        if not now.batch_in_epoch or state.auto_microbatching:
            metrics["trainer/device_train_microbatch_size"] = state.device_train_microbatch_size or self._num_samples
        self.engine.logger.log_metrics(metrics, now.batch)

    def count_batch(self) -> None:
        """Move the clock and the learning rates on by a batch."""
        state, samples, tokens = self.state, self._num_samples, self._num_tokens
        if self._runs_alone:
            elapsed = self._elapsed()
        else:
            totals = self.parallel.totals()
            samples, tokens, elapsed = totals.samples, totals.tokens, round(totals.seconds * 1e6)
            self._is_stopped_by_agreement = totals.stop
        state.microbatch = -2
        state.previous_timestamp = state.timestamp
        state.timestamp = state.timestamp.to_next_batch(samples, tokens, elapsed)
        if self.schedules.every_batch:
            self._step(self.schedules.every_batch)

    def count_epoch(self) -> None:
        """Move the clock and the learning rates on by an epoch, and log what its training metrics came to."""
        self.log_train_metrics()
        self.state.previous_timestamp = self.state.timestamp
        self.state.timestamp = self.state.timestamp.to_next_epoch(self._since_batch())
        self.batches.rewind()
        self._step(self.schedules.every_epoch)
        self._step(self.schedules.by_clock)
        self._check_tokens()

    def count_iteration(self) -> None:
        """Move the clock on by an iteration."""
        self.state.previous_timestamp = self.state.timestamp
        self.state.timestamp = self.state.timestamp.to_next_iteration(self._since_batch())
        self._step(self.schedules.by_clock)

    def _step(self, schedulers: Sequence[LRScheduler]) -> None:
        # A training that a callback has ended is shorter than its schedule may be made for, and needs no further rate.
        was_ended = self.state.max_duration is not self._length and self.is_over()
        for scheduler in schedulers:
            if not was_ended or scheduler not in self.schedules.by_clock:
                scheduler.step()

    def _check_tokens(self) -> None:
        duration, clock = self.state.max_duration, self.state.timestamp
        if duration is not None and duration.unit is TimeUnit.TOKEN and not clock.count(TimeUnit.TOKEN):
            raise ValueError(
                f"max_duration={str(duration)!r} would never be reached: a whole epoch had no token. Tokens are "
                "counted in batch['input_ids']; for other batches give DataSpec(loader, get_num_tokens_in_batch=...)."
            )

    def evaluate_if_due(self, event: Event) -> None:
        """Evaluate where it is time to; this time does not count as training time."""
        if self.state._evaluators and not self.is_stopped:  # noqa: SLF001  (see is_over)
            before = time.perf_counter()
            self._evaluate(event)
            self._since += time.perf_counter() - before

    def log_train_metrics(self) -> None:
        """Log and reset the metrics of the epoch's training so far, if there are any."""
        metrics = self.state.train_metrics
        if not metrics or self.begins_epoch():
            return
        values = compute_metrics(metrics)
        self.state.train_metric_values = values
        self.engine.logger.log_metrics(
            {f"metrics/{self.state.dataloader_label}/{name}": value for name, value in values.items()}
        )
        for metric in metrics.values():
            metric.reset()

    def _since_batch(self) -> int:
        # Of several processes the clocks agree: this time is counted with the next batch.
        return self._elapsed() if self._runs_alone else 0

    def _elapsed(self) -> int:
        """Return the microseconds since it was last asked."""
        before, self._since = self._since, time.perf_counter()
        return int((self._since - before) * 1e6 + 0.5)


def _announced(parts: Sequence[tuple[Batch, float]], announce: Callable[[bool], None]) -> Iterator[tuple[Batch, float]]:
    """Yield parts, and say before each whether it is the last."""
    for number, part in enumerate(parts, start=1):
        announce(number == len(parts))
        yield part


def compute_metrics(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the metrics came to, by name; of one that gives several numbers, each by its own name."""
    values: dict[str, Any] = {}
    for name, metric in metrics.items():
        value = metric.compute()
        values |= (
            {f"{name}/{part}": one for part, one in value.items()} if isinstance(value, Mapping) else {name: value}
        )
    return values
