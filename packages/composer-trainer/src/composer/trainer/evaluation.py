"""Evaluation: the model's metrics on one or several data sets."""

from __future__ import annotations

import contextlib
import copy
import datetime
import fnmatch
import itertools
import time
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, runtime_checkable

import attrs
import torch
from torch.utils.data import DataLoader

from composer.core import (
    DataSpec,
    Engine,
    Evaluator,
    Event,
    State,
    Time,
    Timestamp,
    ensure_evaluator,
    evaluate_periodically,
    evaluation_weights,
    get_precision_context,
)
from composer.core.batch import note_batch
from composer.core.data_spec import move_batch
from composer.core.evaluator import evaluation_mode
from composer.core.randomness import preserve_rng_state
from composer.distributed import broadcast_buffers, check_sampler, num_real_samples_in_loader, real_parts
from composer.trainer.arguments import check_subset
from composer.trainer.batches import none_given
from composer.trainer.data_order import make_order
from composer.trainer.metrics import compute_metrics

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = [
    "Evaluations",
    "SupportsMetrics",
    "evaluate",
    "in_evaluation",
    "prepare_metrics",
    "to_evaluators",
    "with_evaluation_weights",
]

Loader: TypeAlias = Iterable[Any] | DataSpec
EvalData: TypeAlias = Loader | Evaluator | Sequence[Evaluator]
EvalInterval: TypeAlias = int | str | Time | Callable[[State, Event], bool]


@runtime_checkable
class SupportsMetrics(Protocol):
    """What the trainer needs of a model that is to be measured."""

    def eval_forward(self, batch: Any, outputs: Any = None) -> Any:
        """Return the outputs for the metrics; ``outputs`` if they are known already."""

    def get_metrics(self, is_train: bool) -> dict[str, Any]:
        """Return the metrics by name."""

    def update_metric(self, batch: Any, outputs: Any, metric: Any) -> None:
        """Add a batch to a metric."""


def check_can_be_evaluated(model: object) -> None:
    """Raise a TypeError if a model has no metrics."""
    if not isinstance(model, SupportsMetrics):
        missing = [name for name in ("eval_forward", "get_metrics", "update_metric") if not hasattr(model, name)]
        raise TypeError(
            f"To be evaluated, {type(model).__name__} needs {', '.join(missing)}. "
            "Derive it from composer.models.ComposerModel, or leave out eval_dataloader."
        )


@attrs.frozen
class Evaluations:
    """What a run is evaluated on, and how often.

    Args:
        given: The data; None for none.
        interval: How often, where an evaluator does not say so itself.
        subset_num_batches: Only so many batches, where an evaluator does not say so itself.

    Raises:
        TypeError: Several data sets are given that are not all evaluators.
        ValueError: The interval or the number of batches is out of range.
    """

    given: EvalData | None = None
    interval: EvalInterval = 1
    subset_num_batches: int = attrs.field(default=-1)
    evaluators: list[Evaluator] = attrs.field(init=False)

    @subset_num_batches.validator
    def _check_subset(self, _: object, subset: int) -> None:
        check_subset("eval_subset_num_batches", subset)

    @evaluators.default
    def _make_evaluators(self) -> list[Evaluator]:
        interval = self.interval
        default = interval if callable(interval) else evaluate_periodically(interval)
        return [
            evaluator if evaluator.eval_interval is not None else attrs.evolve(evaluator, eval_interval=default)
            for evaluator in ([] if self.given is None else to_evaluators(self.given))
        ]

    def with_changes(self, given: EvalData | None, interval: EvalInterval | None, subset: int | None) -> Evaluations:
        """Return what holds when some of it is given anew.

        Raises:
            ValueError: An interval is given, and nothing to evaluate on.
        """
        if given is None and interval is not None and self.given is None:
            raise ValueError("eval_interval is given, but there is nothing to evaluate on: give eval_dataloader, too.")
        return Evaluations(
            self.given if given is None else given,
            self.interval if interval is None else interval,
            self.subset_num_batches if subset is None else subset,
        )

    def install(self, state: State) -> None:
        """Let a state have the evaluators, with metrics of their own."""
        if self.evaluators:
            check_can_be_evaluated(state.model)
            for evaluator in self.evaluators:
                check_sampler(evaluator.dataloader.dataloader, f"eval_dataloader ({evaluator.label!r})")
            state.evaluators = self.evaluators
            prepare_metrics(state, state.evaluators)

    def run_if_due(self, engine: Engine, event: Event) -> None:
        """Evaluate on what is due at an event."""
        state = engine.state
        due = [one for one in state.evaluators if one.eval_interval and one.eval_interval(state, event)]
        if due:
            evaluate(engine, due, self.subset_num_batches)


def to_evaluators(given: EvalData) -> list[Evaluator]:
    """Return evaluators from one, from several, or from a data loader.

    Raises:
        TypeError: Several data sets are given that are not all evaluators.
    """
    if not isinstance(given, (list, tuple)) or not any(
        isinstance(one, (Evaluator, DataSpec, DataLoader)) for one in given
    ):
        return [ensure_evaluator(given)]
    for one in given:
        if not isinstance(one, Evaluator):
            raise TypeError(
                f"Several data sets to evaluate on must each be an Evaluator, got {type(one).__name__} among them. "
                "Give each a name: Evaluator(label='...', dataloader=...)."
            )
    return list(given)


def prepare_metrics(state: State, evaluators: Sequence[Evaluator]) -> None:
    """Give every evaluator its own copy of the model's metrics that it asks for, on the state's device.

    Raises:
        ValueError: Two evaluators have one label, one has that of the training data, or one asks for a metric that the
            model does not have.
    """
    labels = [evaluator.label for evaluator in evaluators]
    if len(set(labels)) != len(labels):
        raise ValueError(f"Every Evaluator must have a label of its own, got {labels}.")
    if state.train_data_spec is not None and state.dataloader_label in labels:
        raise ValueError(
            f"An Evaluator must not have the label of the training data, got {state.dataloader_label!r}: the metrics "
            "of both would have the same names. Choose another label, or another train_dataloader_label."
        )
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
    with in_evaluation(engine):
        engine.run_event(Event.EVAL_BEFORE_ALL)
        with with_evaluation_weights(engine.state):
            for evaluator in evaluators:
                subset = default_subset if evaluator.subset_num_batches is None else evaluator.subset_num_batches
                results[evaluator.label] = _evaluate_one(engine, evaluator, subset)
        engine.run_event(Event.EVAL_AFTER_ALL)
    return results


@contextlib.contextmanager
def in_evaluation(engine: Engine) -> Iterator[None]:
    """Without gradients and in the model's evaluation mode; afterwards the state is as it was, whatever happens."""
    state = engine.state
    data = state.dataloader, state.dataloader_label, state.dataloader_len
    step = state.batch, state.outputs
    try:
        # Training shall draw what it would without the evaluation.
        with evaluation_mode(state.model), preserve_rng_state(state.device), torch.no_grad():
            yield
    except BaseException:
        engine.restore()
        raise
    finally:
        state.batch, state.outputs = step
        state.set_dataloader(*data)


@contextlib.contextmanager
def with_evaluation_weights(state: State) -> Iterator[None]:
    """Within the block the model has the weights that it is evaluated with, and rank 0's buffers in every process."""
    with evaluation_weights(state):
        broadcast_buffers(state.model)
        yield


def _evaluate_one(engine: Engine, evaluator: Evaluator, subset: int) -> dict[str, Any]:
    state, metrics = engine.state, engine.state.eval_metrics[evaluator.label]
    length = evaluator.dataloader.length
    shortened = subset if length is None else min(subset, length)
    state.set_dataloader(evaluator.dataloader.dataloader, evaluator.label, length if subset == -1 else shortened)
    state.eval_timestamp = Timestamp()
    for metric in metrics.values():
        metric.reset()
    engine.run_event(Event.EVAL_START)
    loader = evaluator.dataloader.dataloader
    # Of samples that were dealt to two processes, so that all have equally many, one does not count.
    num_real = num_real_samples_in_loader(loader)
    for batch in itertools.islice(make_order(loader, state.rank_zero_seed).begin(0), None if subset == -1 else subset):
        num_samples = _evaluate_batch(engine, evaluator, batch, num_real)
        num_real = None if num_real is None else max(0, num_real - num_samples)
    if not int(state.eval_timestamp.batch):
        raise ValueError(f"There is nothing to evaluate on: the loader of {evaluator.label!r} gave no batch.")
    values = compute_metrics(metrics)
    state.eval_metric_values.record(evaluator.label, values)
    engine.logger.log_metrics({f"metrics/{evaluator.label}/{name}": value for name, value in values.items()})
    engine.run_event(Event.EVAL_END)
    return values


def _evaluate_batch(engine: Engine, evaluator: Evaluator, batch: Any, num_real: int | None) -> int:
    """Count a batch, of whose samples the first ``num_real`` are this process's own; return how many there are."""
    state, spec, began = engine.state, evaluator.dataloader, time.perf_counter()
    if batch is None:
        raise none_given(f"The loader of {evaluator.label!r}", int(state.eval_timestamp.batch))
    batch = move_batch(batch, state.device)
    batch = batch if spec.batch_transforms is None else spec.batch_transforms(batch)
    if batch is None:
        raise none_given(f"batch_transforms of the loader of {evaluator.label!r}", int(state.eval_timestamp.batch))
    num_samples, num_tokens = spec.get_num_samples_in_batch(batch), spec.get_num_tokens_in_batch(batch)
    state.batch = batch
    engine.run_event(Event.EVAL_BATCH_START)
    size = evaluator.device_eval_microbatch_size
    parts = [state.batch] if size is None else spec.split_batch(state.batch, size)
    for part, counts in real_parts(parts, num_real, spec):
        state.batch = part if spec.microbatch_transforms is None else spec.microbatch_transforms(part)
        engine.run_event(Event.EVAL_BEFORE_FORWARD)
        try:
            with get_precision_context(state.precision, state.device.type):
                state.outputs = state.model.eval_forward(state.batch)
        except Exception as error:
            note_batch(error, Event.EVAL_BEFORE_FORWARD, f"{type(state.model).__name__}.eval_forward", state.batch)
            raise
        engine.run_event(Event.EVAL_AFTER_FORWARD)
        for metric in state.eval_metrics[evaluator.label].values() if counts else ():
            state.model.update_metric(state.batch, state.outputs, metric)
    elapsed = datetime.timedelta(seconds=time.perf_counter() - began)
    state.eval_timestamp = state.eval_timestamp.to_next_batch(num_samples, num_tokens, elapsed)
    engine.run_event(Event.EVAL_BATCH_END)
    return num_samples
