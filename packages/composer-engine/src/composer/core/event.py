"""The moments of a training run at which algorithms and callbacks are called."""

from __future__ import annotations

from enum import StrEnum

__all__ = ["CLOSING_EVENTS", "MODEL_EVENTS", "Event"]


class Event(StrEnum):
    """A moment of a run. A member equals its value: ``Event.FIT_START == "fit_start"``.

    The loop, as :class:`composer.Trainer` runs it and as a loop of one's own may do it; a test compares this drawing
    with a recorded run::

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
        """Whether the event comes right before what it is named after."""
        return "before_" in self.value

    @property
    def is_after_event(self) -> bool:
        """Whether the event comes right after what it is named after."""
        return "after_" in self.value


CLOSING_EVENTS = frozenset({Event.AFTER_FORWARD, Event.AFTER_LOSS, Event.AFTER_BACKWARD})
"""Where algorithms undo what they did at the ``BEFORE_*`` event of the same name."""

MODEL_EVENTS = frozenset({Event.INIT, Event.BEFORE_LOAD, Event.AFTER_LOAD, Event.FIT_START})
"""Where the model is changed, before the first step."""
