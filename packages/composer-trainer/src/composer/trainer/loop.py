"""The training loop. It reads like the drawing in :class:`composer.core.Event`; all else is a part that it calls."""

from __future__ import annotations

from typing import TYPE_CHECKING

from composer.core import Event

if TYPE_CHECKING:
    from torch import Tensor

    from composer.trainer.run import Run

__all__ = ["train"]


def train(run: Run) -> None:
    """Train until the run is over: epochs of batches, each batch one step of every optimizer."""
    state, event = run.state, run.engine.run_event
    event(Event.FIT_START)
    run.model.train()
    while not run.is_over():
        if run.begins_iteration():
            event(Event.ITERATION_START)
        if run.begins_epoch():
            event(Event.EPOCH_START)
        _train_batches(run)
        if not run.batches.epoch_is_over:
            break
        run.count_epoch()
        event(Event.EPOCH_END)
        run.evaluate_if_due(Event.EPOCH_END)
        event(Event.EPOCH_CHECKPOINT)
        if run.ends_iteration():
            run.count_iteration()
            event(Event.ITERATION_END)
            event(Event.ITERATION_CHECKPOINT)
    run.log_train_metrics()
    run.evaluate_if_due(Event.FIT_END)
    event(Event.FIT_END)
    state.batch = state.outputs = state.loss = None


def _train_batches(run: Run) -> None:
    state, event = run.state, run.engine.run_event
    while not run.batches.epoch_is_over:
        state.microbatch = 0
        event(Event.BEFORE_DATALOADER)
        if not run.next_batch():
            break
        event(Event.AFTER_DATALOADER)
        event(Event.BATCH_START)
        _step(run)
        run.log_batch()
        run.count_batch()
        event(Event.BATCH_END)
        run.evaluate_if_due(Event.BATCH_END)
        event(Event.BATCH_CHECKPOINT)
        if run.is_over():
            break


def _step(run: Run) -> None:
    """Compute the gradients and let the optimizers step; one that wants to do so itself gets them as a closure."""

    def closure() -> Tensor:
        return _compute_gradients(run)

    run.optimization.step(closure)


def _compute_gradients(run: Run) -> Tensor:
    state, event, model, precision = run.state, run.engine.run_event, run.model, run.optimization.precision
    event(Event.BEFORE_TRAIN_BATCH)
    run.optimization.zero_grad()
    whole_batch = state.batch
    for state.microbatch, (state.batch, share) in enumerate(run.microbatches()):
        # The last graph goes before the next one is built: its memory is used again while it is still in the cache.
        state.outputs = state.loss = None
        original = run.remember_for_metrics(state.batch)
        event(Event.BEFORE_FORWARD)
        with precision:
            state.outputs = model(state.batch)
        event(Event.AFTER_FORWARD)
        event(Event.BEFORE_LOSS)
        with precision:
            state.loss = model.loss(state.outputs, state.batch)
        event(Event.AFTER_LOSS)
        event(Event.BEFORE_BACKWARD)
        run.optimization.backward(state.loss, share)
        event(Event.AFTER_BACKWARD)
        run.add_up(state.loss, share, original)
    state.batch = whole_batch
    run.optimization.unscale()
    event(Event.AFTER_TRAIN_BATCH)
    return run.total_loss
