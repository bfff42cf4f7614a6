"""When algorithms and callbacks are called: the events of a run, and the stages within an event."""

from __future__ import annotations

from enum import IntEnum, StrEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["CLOSING_EVENTS", "MODEL_EVENTS", "PLACES", "STEP_EVENTS", "Event", "Stage"]


class Event(StrEnum):
    """A moment of a run. A member equals its value: ``Event.FIT_START == "fit_start"``.

    The loop of :class:`composer.Trainer`, and a pattern for other loops; a test compares this drawing with a recorded
    run::

        <INIT>
        <BEFORE_LOAD>
        load the checkpoint, if there is one
        <AFTER_LOAD>
        <FIT_START>
        while training is not over:
            <ITERATION_START>, when an iteration begins
            <EPOCH_START>
            while the epoch has batches:
                <BEFORE_DATALOADER>
                state.batch = next(dataloader)
                <AFTER_DATALOADER>
                <BATCH_START>
                <BEFORE_TRAIN_BATCH>
                for state.batch in microbatches:
                    <BEFORE_FORWARD>
                    state.outputs = model(state.batch)
                    <AFTER_FORWARD>
                    <BEFORE_LOSS>
                    state.loss = model.loss(state.outputs, state.batch)
                    <AFTER_LOSS>
                    <BEFORE_BACKWARD>
                    state.loss.backward()
                    <AFTER_BACKWARD>
                <AFTER_TRAIN_BATCH>
                optimizer.step()
                count the batch
                <BATCH_END>
                evaluate, when it is due
                <BATCH_CHECKPOINT>
            count the epoch
            <EPOCH_END>
            evaluate, when it is due
            <EPOCH_CHECKPOINT>
            <ITERATION_END>, when an iteration ends
            evaluate, when it is due
            <ITERATION_CHECKPOINT>, when an iteration ends
        evaluate, when it is due
        <FIT_END>

    An evaluation, during training or by itself::

        <EVAL_STANDALONE_START>, outside of fit
        <EVAL_BEFORE_ALL>
        for evaluator in evaluators:
            <EVAL_START>
            for state.batch in evaluator.dataloader:
                <EVAL_BATCH_START>
                <EVAL_BEFORE_FORWARD>
                state.outputs = model.eval_forward(state.batch)
                <EVAL_AFTER_FORWARD>
                update the metrics
                <EVAL_BATCH_END>
            <EVAL_END>
        <EVAL_AFTER_ALL>
        <EVAL_STANDALONE_END>, outside of fit

    A prediction::

        <PREDICT_START>
        for state.batch in dataloader:
            <PREDICT_BATCH_START>
            <PREDICT_BEFORE_FORWARD>
            state.outputs = model.eval_forward(state.batch)
            <PREDICT_AFTER_FORWARD>
            <PREDICT_BATCH_END>
        <PREDICT_END>

    Example:
        >>> Event("batch_end") is Event.BATCH_END
        True
    """

    INIT = "init"
    BEFORE_LOAD = "before_load"
    AFTER_LOAD = "after_load"
    FIT_START = "fit_start"

    ITERATION_START = "iteration_start"
    EPOCH_START = "epoch_start"
    BEFORE_DATALOADER = "before_dataloader"
    AFTER_DATALOADER = "after_dataloader"
    BATCH_START = "batch_start"
    BEFORE_TRAIN_BATCH = "before_train_batch"
    BEFORE_FORWARD = "before_forward"
    AFTER_FORWARD = "after_forward"
    BEFORE_LOSS = "before_loss"
    AFTER_LOSS = "after_loss"
    BEFORE_BACKWARD = "before_backward"
    AFTER_BACKWARD = "after_backward"
    AFTER_TRAIN_BATCH = "after_train_batch"
    BATCH_END = "batch_end"
    BATCH_CHECKPOINT = "batch_checkpoint"
    EPOCH_END = "epoch_end"
    EPOCH_CHECKPOINT = "epoch_checkpoint"
    ITERATION_END = "iteration_end"
    ITERATION_CHECKPOINT = "iteration_checkpoint"
    FIT_END = "fit_end"

    EVAL_BEFORE_ALL = "eval_before_all"
    EVAL_START = "eval_start"
    EVAL_BATCH_START = "eval_batch_start"
    EVAL_BEFORE_FORWARD = "eval_before_forward"
    EVAL_AFTER_FORWARD = "eval_after_forward"
    EVAL_BATCH_END = "eval_batch_end"
    EVAL_END = "eval_end"
    EVAL_AFTER_ALL = "eval_after_all"
    EVAL_STANDALONE_START = "eval_standalone_start"
    EVAL_STANDALONE_END = "eval_standalone_end"

    PREDICT_START = "predict_start"
    PREDICT_BATCH_START = "predict_batch_start"
    PREDICT_BEFORE_FORWARD = "predict_before_forward"
    PREDICT_AFTER_FORWARD = "predict_after_forward"
    PREDICT_BATCH_END = "predict_batch_end"
    PREDICT_END = "predict_end"

    @property
    def is_before_event(self) -> bool:
        """Whether the event runs right before what its name states."""
        return "before_" in self.value

    @property
    def is_after_event(self) -> bool:
        """Whether the event runs right after what its name states."""
        return "after_" in self.value


CLOSING_EVENTS = frozenset({Event.AFTER_FORWARD, Event.AFTER_LOSS, Event.AFTER_BACKWARD})
"""The events at which algorithms undo their changes of the ``BEFORE_*`` event of the same name."""

MODEL_EVENTS = frozenset({Event.INIT, Event.BEFORE_LOAD, Event.AFTER_LOAD, Event.FIT_START})
"""The events at which algorithms change the model, before the first step."""

_ALL = tuple(Event)
STEP_EVENTS = _ALL[_ALL.index(Event.BEFORE_DATALOADER) : _ALL.index(Event.BATCH_CHECKPOINT) + 1]
"""The events of each batch, in a loop that runs every event."""

PLACES: Mapping[Event, str] = {
    Event.INIT: "once, when model and optimizers are made, before weights are loaded",
    Event.BEFORE_LOAD: "once, after init, before weights are loaded if there are any",
    Event.AFTER_LOAD: "once, when weights have been loaded, or after init if there are none",
    Event.FIT_START: "once, right before the first epoch",
    Event.ITERATION_START: "when an iteration begins, before its first epoch_start",
    Event.EPOCH_START: "before an epoch's first batch",
    Event.BEFORE_DATALOADER: "right before the next batch is taken from the loader",
    Event.AFTER_DATALOADER: "when the batch is in state.batch",
    Event.BATCH_START: "after after_dataloader, before anything is computed",
    Event.BEFORE_TRAIN_BATCH: "before the batch's first forward pass, within the closure if the optimizer takes one",
    Event.BEFORE_FORWARD: "right before the model is called, with the batch or microbatch in state.batch",
    Event.AFTER_FORWARD: "right after the model was called, with what it returned in state.outputs",
    Event.BEFORE_LOSS: "right before the loss is computed of state.outputs and state.batch",
    Event.AFTER_LOSS: "right after the loss was computed, with it in state.loss",
    Event.BEFORE_BACKWARD: "right before state.loss.backward()",
    Event.AFTER_BACKWARD: "right after state.loss.backward()",
    Event.AFTER_TRAIN_BATCH: "after the batch's last backward pass, before optimizer.step(), with unscaled gradients",
    Event.BATCH_END: "after optimizer.step(), when state.timestamp has counted the batch",
    Event.BATCH_CHECKPOINT: "after batch_end and the evaluation that may be due",
    Event.EPOCH_END: "after an epoch's last batch, when state.timestamp has counted the epoch",
    Event.EPOCH_CHECKPOINT: "after epoch_end and the evaluation that may be due",
    Event.ITERATION_END: "after an iteration's last epoch, when state.timestamp has counted the iteration",
    Event.ITERATION_CHECKPOINT: "after iteration_end and the evaluation that may be due",
    Event.FIT_END: "once, after the last epoch",
    Event.EVAL_BEFORE_ALL: "when an evaluation begins",
    Event.EVAL_START: "before the first batch of a data set that is evaluated on",
    Event.EVAL_BATCH_START: "when a batch to evaluate on is in state.batch",
    Event.EVAL_BEFORE_FORWARD: "right before the model is called in an evaluation",
    Event.EVAL_AFTER_FORWARD: "right after that, with what it returned in state.outputs",
    Event.EVAL_BATCH_END: "after the metrics of a batch",
    Event.EVAL_END: "after the last batch of a data set that is evaluated on; after an error, engine.restore() instead",
    Event.EVAL_AFTER_ALL: "when an evaluation ends",
    Event.EVAL_STANDALONE_START: "before an evaluation outside of training",
    Event.EVAL_STANDALONE_END: "after an evaluation outside of training",
    Event.PREDICT_START: "before the first batch to predict",
    Event.PREDICT_BATCH_START: "when a batch to predict is in state.batch",
    Event.PREDICT_BEFORE_FORWARD: "right before the model is called in a prediction",
    Event.PREDICT_AFTER_FORWARD: "right after that, with what it returned in state.outputs",
    Event.PREDICT_BATCH_END: "after a batch was predicted",
    Event.PREDICT_END: "after the last batch to predict; after an error, engine.restore() instead",
}
"""The place of each event in a loop."""


class Stage(IntEnum):
    """A kind of work. Within an event lower stages run first; within a stage the order of the user's list applies.

    Example:
        >>> Stage.AUGMENT < Stage.MIX
        True
    """

    SELECT = 10
    """On the batch: choose which samples to train on."""
    RESHAPE = 20
    """On the batch: change the samples' size or length."""
    AUGMENT = 30
    """On the batch: change each sample by itself."""
    MIX = 40
    """On the batch: blend samples with each other."""

    LABEL = 50
    """On the loss: change the targets."""
    LOSS = 60
    """On the loss: change its value."""

    ARCHITECTURE = 70
    """On the model: replace blocks."""
    NORMALIZATION = 80
    """On the model: replace norms, or normalise weights."""
    PRECISION = 90
    """On the model: fused and low-precision norms."""
    LAYOUT = 100
    """On the model: memory format."""

    GRADIENT = 110
    """On the weights: change gradients or the step."""
    WEIGHTS = 120
    """On the weights: change, freeze or average them."""

    UNDECLARED = 1000
    """An algorithm without a declared stage: after all others."""
