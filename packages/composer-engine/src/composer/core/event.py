"""When algorithms and callbacks are called: the events of a run, and the stages within an event."""

from __future__ import annotations

from enum import IntEnum, StrEnum


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

    place: str

    def __new__(cls, value: str, place: str = "") -> Event:
        """Return the member with a value and its place in a loop."""
        event = str.__new__(cls, value)
        event._value_, event.place = value, place
        return event

    INIT = "init", "once, when model and optimizers are made, before weights are loaded"
    BEFORE_LOAD = "before_load", "once, after init, before weights are loaded if there are any"
    AFTER_LOAD = "after_load", "once, when weights have been loaded, or after init if there are none"
    FIT_START = "fit_start", "once, right before the first epoch"

    ITERATION_START = "iteration_start", "when an iteration begins, before its first epoch_start"
    EPOCH_START = "epoch_start", "before an epoch's first batch"
    BEFORE_DATALOADER = "before_dataloader", "right before the next batch is taken from the loader"
    AFTER_DATALOADER = "after_dataloader", "when the batch is in state.batch"
    BATCH_START = "batch_start", "after after_dataloader, before anything is computed"
    BEFORE_TRAIN_BATCH = (
        "before_train_batch",
        "before the batch's first forward pass, within the closure if the optimizer takes one",
    )
    BEFORE_FORWARD = "before_forward", "right before the model is called, with the batch or microbatch in state.batch"
    AFTER_FORWARD = "after_forward", "right after the model was called, with what it returned in state.outputs"
    BEFORE_LOSS = "before_loss", "right before the loss is computed of state.outputs and state.batch"
    AFTER_LOSS = "after_loss", "right after the loss was computed, with it in state.loss"
    BEFORE_BACKWARD = "before_backward", "right before state.loss.backward()"
    AFTER_BACKWARD = "after_backward", "right after state.loss.backward()"
    AFTER_TRAIN_BATCH = (
        "after_train_batch",
        "after the batch's last backward pass, before optimizer.step(), with unscaled gradients",
    )
    BATCH_END = "batch_end", "after optimizer.step(), when state.timestamp has counted the batch"
    BATCH_CHECKPOINT = "batch_checkpoint", "after batch_end and the evaluation that may be due"
    EPOCH_END = "epoch_end", "after an epoch's last batch, when state.timestamp has counted the epoch"
    EPOCH_CHECKPOINT = "epoch_checkpoint", "after epoch_end and the evaluation that may be due"
    ITERATION_END = "iteration_end", "after an iteration's last epoch, when state.timestamp has counted the iteration"
    ITERATION_CHECKPOINT = "iteration_checkpoint", "after iteration_end and the evaluation that may be due"
    FIT_END = "fit_end", "once, after the last epoch"

    EVAL_BEFORE_ALL = "eval_before_all", "when an evaluation begins"
    EVAL_START = "eval_start", "before the first batch of a data set that is evaluated on"
    EVAL_BATCH_START = "eval_batch_start", "when a batch to evaluate on is in state.batch"
    EVAL_BEFORE_FORWARD = "eval_before_forward", "right before the model is called in an evaluation"
    EVAL_AFTER_FORWARD = "eval_after_forward", "right after that, with what it returned in state.outputs"
    EVAL_BATCH_END = "eval_batch_end", "after the metrics of a batch"
    EVAL_END = (
        "eval_end",
        "after the last batch of a data set that is evaluated on; after an error, engine.restore() instead",
    )
    EVAL_AFTER_ALL = "eval_after_all", "when an evaluation ends"
    EVAL_STANDALONE_START = "eval_standalone_start", "before an evaluation outside of training"
    EVAL_STANDALONE_END = "eval_standalone_end", "after an evaluation outside of training"

    PREDICT_START = "predict_start", "before the first batch to predict"
    PREDICT_BATCH_START = "predict_batch_start", "when a batch to predict is in state.batch"
    PREDICT_BEFORE_FORWARD = "predict_before_forward", "right before the model is called in a prediction"
    PREDICT_AFTER_FORWARD = "predict_after_forward", "right after that, with what it returned in state.outputs"
    PREDICT_BATCH_END = "predict_batch_end", "after a batch was predicted"
    PREDICT_END = "predict_end", "after the last batch to predict; after an error, engine.restore() instead"

    @classmethod
    def _missing_(cls, value: object) -> Event | None:
        return cls.__members__.get(str(value).upper())

    @property
    def is_before_event(self) -> bool:
        """Whether the event runs right before what its name states."""
        return "before_" in self.value

    @property
    def is_eval(self) -> bool:
        """Whether the event is of an evaluation."""
        return self.value.startswith("eval")

    @property
    def is_predict(self) -> bool:
        """Whether the event is of a prediction."""
        return self.value.startswith("predict")

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


class Stage(IntEnum):
    """A kind of work. Within an event lower stages run first; within a stage the order of the user's list applies.

    Attributes:
        part: What is changed: ``"batch"``, ``"loss"``, ``"model"`` or ``"weights"``.
        work: What an algorithm does there.

    Example:
        >>> Stage.AUGMENT < Stage.MIX, Stage.MIX.part, Stage.MIX.work
        (True, 'batch', 'blend samples with each other')
    """

    part: str
    work: str

    def __new__(cls, order: int, part: str = "", work: str = "") -> Stage:
        """Return the member with its place among the others."""
        stage = int.__new__(cls, order)
        stage._value_, stage.part, stage.work = order, part, work
        return stage

    SELECT = 10, "batch", "choose which samples to train on"
    RESHAPE = 20, "batch", "change the samples' size or length"
    AUGMENT = 30, "batch", "change each sample by itself"
    MIX = 40, "batch", "blend samples with each other"

    LABEL = 50, "loss", "change the targets"
    LOSS = 60, "loss", "change its value"

    ARCHITECTURE = 70, "model", "replace blocks"
    NORMALIZATION = 80, "model", "replace norms, or normalise weights"
    PRECISION = 90, "model", "fused and low-precision norms"
    LAYOUT = 100, "model", "memory format, and what is stored for the backward pass"

    GRADIENT = 110, "weights", "change gradients or the step"
    WEIGHTS = 120, "weights", "change, freeze or average them"

    UNDECLARED = 1000, "", "anything, by an algorithm without a declared stage, after all others"
