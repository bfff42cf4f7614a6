"""The training loop. It follows the drawing in :class:`composer.core.Event` and calls the parts of a :class:`Run`.

Events are named by their values, which saves a dozen look-ups of an enum's members in every step.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING

from composer.core import Event
from composer.trainer.evaluation.metrics import update_train_metrics

if TYPE_CHECKING:
    from torch import Tensor

    from composer.trainer.run import Run

__all__ = ["train"]


def train(run: Run) -> None:
    """Train until the run is over: epochs of batches, each batch one step of every optimizer."""
    state, event = run.state, run.engine.run_event
    event("fit_start")
    run.begin()
    _end_iteration_if_done(run)  # resumed from a checkpoint of the end of an epoch
    while not run.is_over():
        if run.begins_iteration():
            event("iteration_start")
        if run.begins_epoch():
            event("epoch_start")
            run.begin_epoch()
        _train_batches(run)
        if not run.batches.epoch_is_over:
            break
        run.count_epoch()
        event("epoch_end")
        run.evaluate_if_due(Event.EPOCH_END)
        event("epoch_checkpoint")
        _end_iteration_if_done(run)
    run.log_train_metrics()
    run.evaluate_if_due(Event.FIT_END)
    event("fit_end")
    state.batch = state.outputs = state.loss = None


def _end_iteration_if_done(run: Run) -> None:
    if run.ends_iteration():
        run.count_iteration()
        run.engine.run_event("iteration_end")
        run.evaluate_if_due(Event.ITERATION_END)
        run.engine.run_event("iteration_checkpoint")


def _train_batches(run: Run) -> None:
    state, event, batches, gradients = run.state, run.engine.run_event, run.batches, run.gradients(_compute_gradients)
    while not batches.epoch_is_over:
        state.microbatch = -1
        event("before_dataloader")
        if not run.next_batch():
            break
        event("after_dataloader")
        event("batch_start")
        run.optimization.step(gradients)
        run.log_batch()
        run.count_batch()
        event("batch_end")
        run.evaluate_if_due(Event.BATCH_END)
        event("batch_checkpoint")
        if run.is_over():
            break


def _compute_gradients(run: Run) -> Tensor:
    """Compute the batch's gradients; an optimizer may call this several times in a step."""
    state, event = run.state, run.engine.run_event
    event("before_train_batch")
    run.begin_gradients()
    whole_batch = state.batch
    for state.microbatch, (state.batch, weight) in enumerate(run.microbatches()):
        # Free the last graph before the next one is built, so that its memory is reused while it is in the cache.
        state.outputs = state.loss = None
        # Training metrics use the targets before algorithms change them, and the first outputs of several in a step.
        original = copy.copy(state.batch) if state.train_metrics and run.losses.times_computed == 1 else None
        event("before_forward")
        try:
            state.outputs = run.forward(state.batch)
        except Exception as error:
            run.note_batch(error, Event.BEFORE_FORWARD)
            raise
        event("after_forward")
        event("before_loss")
        state.loss = run.loss(state.outputs, state.batch)
        event("after_loss")
        event("before_backward")
        run.optimization.backward(state.loss, weight)
        event("after_backward")
        run.losses.add(state.loss, weight)
        if original is not None and weight:  # a part of weight 0 only keeps the processes in step
            update_train_metrics(state, original)
    state.batch = whole_batch
    run.finish_gradients()
    event("after_train_batch")
    return run.losses.total
