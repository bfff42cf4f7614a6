"""The training loop. It follows the drawing in :class:`composer.core.Event` and calls the parts of a :class:`Run`.

Events are named by their values, which saves a dozen look-ups of an enum's members in every step.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from composer.core import Event
from composer.core.state import STOPPED_BY_SIGNAL
from composer.trainer.evaluation.metrics import reset_metrics
from composer.trainer.stopping import Stopped, agree_on_stop

if TYPE_CHECKING:
    from composer.trainer.run import Run

_CHECKPOINTS = {
    Event.BATCH_END: "batch_checkpoint",
    Event.EPOCH_END: "epoch_checkpoint",
    Event.ITERATION_END: "iteration_checkpoint",
}
"""What follows an evaluation at an event."""


def train(run: Run) -> None:
    """Train until the run is over: epochs of batches, each batch one step of every optimizer."""
    state, event = run.state, run.engine.run_event
    event("fit_start")
    run.begin()
    try:
        _train_epochs(run)
        if state.stop_reason is None or run.end is None or state.has_reached(run.end):
            # Else state.stop_training has ended it before, and a resumed run continues without an evaluation here.
            run.evaluate_if_due(Event.FIT_END)
        run.log_train_metrics()  # of an epoch that is not complete
    except Stopped:  # a resumed run continues there
        state.stop_reason = STOPPED_BY_SIGNAL
    run.resume_state.end()
    event("fit_end")
    run.warn_of_nan()
    state.batch = state.outputs = state.loss = None


def _train_epochs(run: Run) -> None:
    event = run.engine.run_event
    # First the evaluations that a signal has interrupted, and the checkpoint that would have followed.
    for ended, checkpoint in _CHECKPOINTS.items():
        if ended in run.resume_state.interrupted:
            run.evaluate_if_due(ended)
            run.resume_state.interrupted.pop(ended, None)  # if there is nothing to evaluate on now
            event(checkpoint)
    _end_iteration_if_done(run)  # resumed from a checkpoint of the end of an epoch
    # The last batch of a training may also be that of an epoch, which is then still to be counted.
    while not run.training_is_over() or run.batches.position.epoch_is_over:
        if run.begins_epoch():
            if run.state.timestamp.epoch_in_iteration == 0:
                event("iteration_start")
            event("epoch_start")
            reset_metrics(run.state.train_metrics)  # until here, and after the training, they can be read
            run.gradients.prepare()
        _train_batches(run)
        if not run.batches.position.epoch_is_over:
            break  # the next call of fit continues this epoch
        run.count_epoch()
        event("epoch_end")
        run.warn_of_nan()
        run.evaluate_if_due(Event.EPOCH_END)
        event("epoch_checkpoint")
        _end_iteration_if_done(run)
        agree_on_stop(run.state)


def _end_iteration_if_done(run: Run) -> None:
    if run.state.timestamp.epoch_in_iteration >= run.state.iteration_length:
        run.count_iteration()
        run.engine.run_event("iteration_end")
        run.evaluate_if_due(Event.ITERATION_END)
        run.engine.run_event("iteration_checkpoint")


def _train_batches(run: Run) -> None:
    state, event, step = run.state, run.engine.run_event, run.step
    while not run.batches.position.epoch_is_over:
        state.microbatch = -1
        event("before_dataloader")
        if not run.next_batch():
            break  # the end of a stream shows only here
        step.begin_batch(state.batch)  # after_dataloader, batch_start
        run.optimization.step(run.gradients.compute)  # before_train_batch to after_train_batch
        run.complete_batch()
        if run.engine.logger.is_heard:
            run.log_batch()  # before it is counted, so that its losses have its own number
        run.count_batch()
        event("batch_end")
        run.evaluate_if_due(Event.BATCH_END)
        event("batch_checkpoint")
        if run.training_is_over():
            break
