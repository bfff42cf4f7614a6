"""Evaluation: the model's metrics on one or several data sets."""

from __future__ import annotations

import contextlib
import copy
import datetime
import fnmatch
import itertools
import time
from typing import TYPE_CHECKING, Any

import torch

from composer.core import Engine, Evaluator, Event, State, Timestamp, get_precision_context
from composer.core.data_spec import move_batch
from composer.trainer.run import compute_metrics

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

__all__ = ["evaluate", "prepare_metrics"]


def prepare_metrics(state: State, evaluators: Sequence[Evaluator]) -> None:
    """Give every evaluator its own copy of the model's metrics that it asks for, on the state's device.

    Raises:
        ValueError: Two evaluators have one label, or one asks for a metric that the model does not have.
    """
    labels = [evaluator.label for evaluator in evaluators]
    if len(set(labels)) != len(labels):
        raise ValueError(f"Every Evaluator must have a label of its own, got {labels}.")
    offered = state.model.get_metrics(is_train=False)
    for evaluator in evaluators:
        names = _chosen(evaluator, list(offered))
        state.eval_metrics[evaluator.label] = {name: copy.deepcopy(offered[name]).to(state.device) for name in names}


def _chosen(evaluator: Evaluator, offered: list[str]) -> list[str]:
    if evaluator.metric_names is None:
        return offered
    for pattern in evaluator.metric_names:
        if not fnmatch.filter(offered, pattern):
            raise ValueError(
                f"Evaluator {evaluator.label!r} asks for the metric {pattern!r}, but the model has {offered}."
            )
    return [name for name in offered if any(fnmatch.fnmatch(name, pattern) for pattern in evaluator.metric_names)]


def evaluate(engine: Engine, evaluators: Sequence[Evaluator], default_subset: int = -1) -> dict[str, dict[str, Any]]:
    """Run the model over the evaluators' data and log their metrics.

    Returns:
        The metrics' values by evaluator and name, as tensors.
    """
    results = {}
    with _in_evaluation(engine):
        engine.run_event(Event.EVAL_BEFORE_ALL)
        for evaluator in evaluators:
            subset = default_subset if evaluator.subset_num_batches is None else evaluator.subset_num_batches
            results[evaluator.label] = _evaluate_one(engine, evaluator, subset)
        engine.run_event(Event.EVAL_AFTER_ALL)
    return results


@contextlib.contextmanager
def _in_evaluation(engine: Engine) -> Iterator[None]:
    """Without gradients and in the model's evaluation mode; afterwards the state is as it was, whatever happens."""
    state = engine.state
    data = state.dataloader, state.dataloader_label, state.dataloader_len
    step = state.batch, state.outputs
    was_training = state.model.training
    state.model.eval()
    # Loaders draw a seed each time they are iterated over; training shall draw what it would without the evaluation.
    devices = [state.device] if state.device.type == "cuda" else []
    try:
        with torch.random.fork_rng(devices), torch.no_grad():
            yield
    except BaseException:
        engine.restore()
        raise
    finally:
        state.model.train(was_training)
        state.batch, state.outputs = step
        state.set_dataloader(*data)


def _evaluate_one(engine: Engine, evaluator: Evaluator, subset: int) -> dict[str, Any]:
    state, metrics = engine.state, engine.state.eval_metrics[evaluator.label]
    length = evaluator.dataloader.length
    shortened = subset if length is None else min(subset, length)
    state.set_dataloader(evaluator.dataloader.dataloader, evaluator.label, length if subset == -1 else shortened)
    state.eval_timestamp = Timestamp()
    for metric in metrics.values():
        metric.reset()
    engine.run_event(Event.EVAL_START)
    for batch in itertools.islice(evaluator.dataloader.dataloader, None if subset == -1 else subset):
        _evaluate_batch(engine, evaluator, batch)
    if not int(state.eval_timestamp.batch):
        raise ValueError(f"There is nothing to evaluate on: the loader of {evaluator.label!r} gave no batch.")
    values = compute_metrics(metrics)
    state.eval_metric_values |= values
    engine.logger.log_metrics({f"metrics/{evaluator.label}/{name}": value for name, value in values.items()})
    engine.run_event(Event.EVAL_END)
    return values


def _evaluate_batch(engine: Engine, evaluator: Evaluator, batch: Any) -> None:
    state, spec, began = engine.state, evaluator.dataloader, time.perf_counter()
    batch = move_batch(batch, state.device)
    batch = batch if spec.batch_transforms is None else spec.batch_transforms(batch)
    num_samples, num_tokens = spec.get_num_samples_in_batch(batch), spec.get_num_tokens_in_batch(batch)
    state.batch = batch
    engine.run_event(Event.EVAL_BATCH_START)
    size = evaluator.device_eval_microbatch_size
    for part in [state.batch] if size is None else spec.split_batch(state.batch, size):
        state.batch = part if spec.microbatch_transforms is None else spec.microbatch_transforms(part)
        engine.run_event(Event.EVAL_BEFORE_FORWARD)
        with get_precision_context(state.precision, state.device.type):
            state.outputs = state.model.eval_forward(state.batch)
        engine.run_event(Event.EVAL_AFTER_FORWARD)
        for metric in state.eval_metrics[evaluator.label].values():
            state.model.update_metric(state.batch, state.outputs, metric)
    elapsed = datetime.timedelta(seconds=time.perf_counter() - began)
    state.eval_timestamp = state.eval_timestamp.to_next_batch(num_samples, num_tokens, elapsed)
    engine.run_event(Event.EVAL_BATCH_END)
