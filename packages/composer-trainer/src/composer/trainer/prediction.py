"""Prediction: a model's outputs for data without a loss."""

from __future__ import annotations

import datetime
import itertools
import time
from typing import TYPE_CHECKING, Any

import torch

from composer.core import Event, Timestamp, get_precision_context
from composer.core.batch import note_batch
from composer.core.data_spec import move_batch
from composer.trainer.batches import none_given
from composer.trainer.data_order import make_order
from composer.trainer.evaluation import in_evaluation, with_evaluation_weights

if TYPE_CHECKING:
    from composer.core import DataSpec, Engine

__all__ = ["predict"]

_CPU = torch.device("cpu")


def predict(engine: Engine, spec: DataSpec, subset: int, *, return_outputs: bool) -> list[Any]:
    """Run the model over the data; algorithms and callbacks see the ``PREDICT_*`` events.

    Returns:
        The outputs of each batch, on the CPU; an empty list unless ``return_outputs``.
    """
    state, collected = engine.state, []
    forward = getattr(state.model, "eval_forward", state.model)
    with in_evaluation(engine), with_evaluation_weights(state):
        lengths = [length for length in (spec.length, subset) if length is not None and length != -1]
        state.set_dataloader(spec.dataloader, "predict", min(lengths, default=None))
        state.predict_timestamp = Timestamp()
        engine.run_event(Event.PREDICT_START)
        batches = make_order(spec.dataloader, state.rank_zero_seed).begin(0)
        for given in itertools.islice(batches, None if subset == -1 else subset):
            began = time.perf_counter()
            if given is None:
                raise none_given("dataloader", int(state.predict_timestamp.batch))
            batch = move_batch(given, state.device)
            state.batch = batch if spec.batch_transforms is None else spec.batch_transforms(batch)
            if state.batch is None:
                raise none_given("batch_transforms of dataloader", int(state.predict_timestamp.batch))
            engine.run_event(Event.PREDICT_BATCH_START)
            if spec.microbatch_transforms is not None:  # the batch is its only part
                state.batch = spec.microbatch_transforms(state.batch)
            engine.run_event(Event.PREDICT_BEFORE_FORWARD)
            try:
                with get_precision_context(state.precision, state.device.type):
                    state.outputs = forward(state.batch)
            except Exception as error:
                note_batch(error, Event.PREDICT_BEFORE_FORWARD, type(state.model).__name__, state.batch)
                raise
            engine.run_event(Event.PREDICT_AFTER_FORWARD)
            if return_outputs:
                collected.append(move_batch(state.outputs, _CPU))
            num_samples = spec.get_num_samples_in_batch(state.batch)
            num_tokens = spec.get_num_tokens_in_batch(state.batch)
            elapsed = datetime.timedelta(seconds=time.perf_counter() - began)
            state.predict_timestamp = state.predict_timestamp.to_next_batch(num_samples, num_tokens, elapsed)
            engine.run_event(Event.PREDICT_BATCH_END)
        engine.run_event(Event.PREDICT_END)
    return collected
