"""A training in progress: what the loop calls for data, gradients, clock, losses, metrics and evaluations.

Each call of ``Trainer.fit`` creates a :class:`Run`, which lasts for it, and calls ``follow_clock``. Then
``composer.trainer.loop`` calls ``begin``; for each batch ``next_batch``, ``step.begin_batch``,
``optimization.step(gradients.compute)``, ``complete_batch``, ``log_batch`` if a logger listens, and ``count_batch``;
and ``count_epoch`` after each epoch. All that a resumed run needs is elsewhere: in the state, in ``Batches`` and in
``ResumeState``.
"""

from __future__ import annotations

import contextlib
import time
import warnings
from array import array
from collections.abc import Iterator, Mapping
from functools import cache
from typing import TYPE_CHECKING, Any

import attrs
import torch

from composer.core import Engine, Event, TimeUnit
from composer.core.evaluator import enter_training_mode
from composer.distributed.global_batch import STOP_CALLED, STOP_SIGNAL
from composer.distributed.samplers import NO_BATCH
from composer.trainer.evaluation.metrics import log_train_metrics
from composer.trainer.gradients import BatchGradients
from composer.trainer.stopping import Stopped, StopSignals, agree_on_stop, end_here

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor
    from torch.optim.lr_scheduler import LRScheduler

    from composer.distributed import BatchShare, Parallelism
    from composer.trainer.data.batches import Batches
    from composer.trainer.evaluation.evaluate import Evaluations
    from composer.trainer.optimization import Optimization
    from composer.trainer.resume.state import ResumeState
    from composer.trainer.schedules import SteppedSchedulers


@attrs.define(eq=False, slots=False)
class Run:
    """A training in progress, as the loop sees it.

    Args:
        engine: With the state that is trained.
        batches: The data.
        optimization: Steps the optimizers, and computes in the precision of the state.
        schedules: The learning rates.
        evaluations: What is evaluated, and how often.
        resume_state: Restores a saved run as the last preparation before the first batch.
        parallel: Runs the model in all processes.
        weighs_by_tokens: Whether microbatches are weighted by their tokens instead of their samples; a model that
            counts the elements of its loss is asked first, unless the tokens are counted by a function of the user.

    Attributes:
        engine, state, batches, optimization, schedules, resume_state, parallel: As given; ``state`` is the engine's.
        gradients: Computes the gradients of each batch.
        step: Runs the events of a batch; that of ``gradients``.
        signals: Those that stop the training.
        stopwatch: Measures the training time of a batch.
        end: The end that the call of ``fit`` has set; an algorithm or a callback may end the training before.
        losses: The losses of the last batch, their means over all processes.
        past_losses: The totals of all batches, up to the end of the last epoch, and at the end of the run.
    """

    engine: Engine
    batches: Batches
    optimization: Optimization
    schedules: SteppedSchedulers
    _evaluations: Evaluations
    resume_state: ResumeState
    parallel: Parallelism
    _weighs_by_tokens: bool = False

    def __attrs_post_init__(self) -> None:
        self.state, self.end = self.engine.state, self.engine.state.max_duration
        elapsed = self.state.get_elapsed_duration()
        # A resumed run may have trained longer than this call would, and then only completes evaluations.
        self._begins_after_end = elapsed is not None and elapsed.value > 1
        self.stopwatch, self.signals = Stopwatch(), StopSignals()
        self.gradients = BatchGradients(
            self.engine, self.batches, self.optimization, self.parallel,
            stopwatch=self.stopwatch, signals=self.signals, weighs_by_tokens=self._weighs_by_tokens,
        )  # fmt: skip
        self.step = self.gradients.step
        self._totals: BatchShare = self.gradients.share  # of the last batch
        self.losses: Mapping[str, Tensor] = {}
        self._new_losses: list[Tensor] = []  # the totals of the batches since the last end of an epoch
        self.past_losses, self._warns_of_nan = array("f"), True

    def follow_clock(self) -> None:
        """Forget why an earlier call has stopped, and set the learning rates of now, as the end may be another."""
        self.state.stop_reason = None
        if not self._begins_after_end:
            self.schedules.follow_clock(self.state)

    @property
    def has_ended_early(self) -> bool:
        """Whether an algorithm or a callback has set another end than the call of ``fit``, also an equal one."""
        return self.state.max_duration is not self.end

    def training_is_over(self) -> bool:
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
        self.gradients.prepare()
        enter_training_mode(self.state.model)
        self.optimization.train_mode()
        # Last, because wrapping the model and the callbacks at FIT_START may draw random numbers.
        self.resume_state.begin()
        self.state.dataloader_len = self.batches.position.length
        self.stopwatch.elapsed()  # the time before is not training time
        agree_on_stop(self.state)

    def begins_epoch(self) -> bool:
        """Return whether the epoch has no finished batch."""
        return self.state.timestamp.count(TimeUnit.BATCH, in_epoch=True) == 0

    def next_batch(self) -> bool:
        """Set the state's next batch; return False at the end of the epoch."""
        batch = self.batches.next()
        if batch is NO_BATCH:
            return False
        position = self.batches.position
        if self.state.dataloader_len != position.length:  # the epoch has more batches than announced
            self.state.dataloader_len = position.length
        self.gradients.set_batch(batch)
        return True

    def complete_batch(self) -> None:
        """Receive the counts of a batch, which several processes exchange, and set its losses: the means of theirs."""
        state, losses, share, weights = self.state, self.step.losses, self.gradients.share, self.gradients.weights
        self._totals = share if weights is None else weights.totals()
        if self.parallel.is_connected and losses:
            losses = self.parallel.reduce_mean(losses)
            state.total_loss = losses["total"]
        self.losses, state.total_loss_dict = losses, LoggedLosses(losses)
        if "total" in losses:
            self._new_losses.append(losses["total"])
            if len(self._new_losses) == _MOST_LOSSES:  # a tensor for each batch of a long epoch would take memory
                self._new_losses = [torch.hstack(self._new_losses)]

    def log_batch(self) -> None:
        """Log the batch's losses and, as its number, how many were counted before it."""
        now, state = self.state.timestamp.counts, self.state
        metrics: dict[str, Any] = {
            "time/batch": now.batch,
            "time/sample": now.sample,
            "time/batch_in_epoch": now.batch_in_epoch,
            "time/sample_in_epoch": now.sample_in_epoch,
        }
        if self._totals.tokens:
            metrics |= {"time/token": now.token, "time/token_in_epoch": now.token_in_epoch}
        for name, loss in self.losses.items():
            metrics[_loss_name(name)] = loss
        if state.scaler is not None:
            metrics |= self.optimization.figures()
        # What is logged depends only on the place in the epoch, so that a resumed run logs the same.
        if not now.batch_in_epoch:
            metrics |= {"time/iteration": now.iteration, "time/epoch": now.epoch}
        if not now.batch_in_epoch or state.auto_microbatching:
            size = state.device_train_microbatch_size or self.gradients.num_samples
            metrics["trainer/device_train_microbatch_size"] = size
        self.engine.logger.log_metrics(metrics, now.batch)

    def count_batch(self) -> None:
        """Advance the clock and the learning rates by a batch."""
        state, totals = self.state, self._totals
        state.microbatch = -2
        if totals.stop == STOP_SIGNAL:
            self.signals.is_agreed = True
        # Clocks of several processes must agree: the time of a batch is counted with the next one.
        microseconds = round(totals.seconds * 1e6) if self.parallel.is_connected else self.stopwatch.elapsed()
        state.previous_timestamp = state.timestamp
        state.timestamp = state.timestamp.to_next_batch(totals.samples, totals.tokens, microseconds)
        if self.schedules.every_batch:
            self._step_schedulers(self.schedules.every_batch)
        if totals.stop == STOP_CALLED and self.parallel.is_connected:
            end_here(state)

    def count_epoch(self) -> None:
        """Advance the clock and the learning rates by an epoch, and log its training metrics."""
        self.log_train_metrics()
        self.state.previous_timestamp = self.state.timestamp
        self.state.timestamp = self.state.timestamp.to_next_epoch()  # what follows its last batch is counted later
        self.batches.rewind()
        self._step_schedulers(self.schedules.every_epoch)
        # Schedulers of every batch step here, too: their rates depend on the clock, which the epoch has changed.
        self._step_schedulers(self.schedules.by_clock)
        duration = self.state.max_duration
        if duration is not None and duration.unit is TimeUnit.TOKEN and not self.state.timestamp.count(TimeUnit.TOKEN):
            raise ValueError(
                f"max_duration={str(duration)!r} would never be reached: an epoch had no token. Tokens are "
                "counted in batch['input_ids']; for other batches give DataSpec(loader, get_num_tokens_in_batch=...)."
            )

    def count_iteration(self) -> None:
        """Advance the clock by an iteration."""
        self.state.previous_timestamp = self.state.timestamp
        self.state.timestamp = self.state.timestamp.to_next_iteration()
        self._step_schedulers(self.schedules.by_clock)

    def _step_schedulers(self, schedulers: Sequence[LRScheduler]) -> None:
        # At the end of a training that is shorter than planned, a function of the clock may not be defined.
        duration = self.state.max_duration
        is_shorter = self._begins_after_end or self.has_ended_early
        is_undefined = is_shorter and duration is not None and self.state.has_reached(duration)
        for scheduler in schedulers:
            if not is_undefined or scheduler not in self.schedules.by_clock:
                scheduler.step()

    def evaluate_if_due(self, event: Event) -> None:
        """Evaluate if it is due; this does not count as training time.

        Raises:
            Stopped: A signal has stopped the evaluation, or the training before it.
        """
        if self.state._evaluators:  # noqa: SLF001  (see training_is_over)
            with self.stopwatch.paused():
                interrupted = self.resume_state.interrupted
                self._evaluations.run_if_due(self.engine, event, self.signals, interrupted, self.end)

    def log_train_metrics(self) -> None:
        """Log the training metrics of the epoch so far, if any."""
        if self.state.train_metrics and not self.begins_epoch():
            log_train_metrics(self.state, self.engine.logger)

    def warn_of_nan(self) -> None:
        """Read the losses, after epochs, as it waits; warn once if the last one is not a number or no label counts."""
        losses, self._new_losses = torch.hstack(self._new_losses or [torch.empty(0)]), []
        self.past_losses.extend(losses.tolist())
        if not (len(losses) and self._warns_of_nan):
            return
        count = getattr(self.state.model, "count_loss_terms", None)
        terms = count(self.state.batch) if callable(count) and not losses.any() else None
        is_nan, is_empty = bool(losses[-1].isnan()), terms is not None and not terms
        self._warns_of_nan = not (is_nan or is_empty)
        if is_empty:
            warnings.warn(
                "The training loss is 0 in all batches, because no label counts: all are ignored (ignore_index).",
                stacklevel=2,
            )
        if is_nan:
            others = (~losses.isnan()).nonzero()
            since = int(self.state.timestamp.batch) - len(losses) + (int(others[-1]) + 1 if len(others) else 0)
            warnings.warn(
                f"The training loss is not a number (NaN) since batch {since}, counted from 0. Check the data, the "
                "labels, the weights of classes and the learning rate. "
                "Trainer(callbacks=[NaNMonitor()]) ends a training at the first such batch.",
                stacklevel=2,
            )


_MOST_LOSSES = 100
_loss_name = cache("loss/train/{}".format)


class LoggedLosses(Mapping[str, float]):
    """The losses of a batch by the names under which they are logged, read from the device where they are used.

    In several processes these are the means over the samples of all.

    Example:
        >>> import torch
        >>> dict(LoggedLosses({"total": torch.tensor(0.5)}))
        {'loss/train/total': 0.5}
    """

    def __init__(self, losses: Mapping[str, Tensor]) -> None:
        self._losses = losses  # a step creates this object, and nothing else for it

    def __getitem__(self, name: str) -> float:
        """Return a loss."""
        return float({_loss_name(one): loss for one, loss in self._losses.items()}[name])

    def __iter__(self) -> Iterator[str]:
        """Iterate over the names."""
        return map(_loss_name, self._losses)

    def __len__(self) -> int:
        """Return the number of losses."""
        return len(self._losses)


class Stopwatch:
    """Measures the time between two calls of :meth:`elapsed`."""

    def __init__(self) -> None:
        self._since = time.perf_counter()

    def elapsed(self) -> int:
        """Return the microseconds since the last call."""
        before, self._since = self._since, time.perf_counter()
        return int((self._since - before) * 1e6 + 0.5)

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Do not count the time within the block as training time."""
        before = time.perf_counter()
        yield
        self._since += time.perf_counter() - before
