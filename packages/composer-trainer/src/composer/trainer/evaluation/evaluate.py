"""Evaluation of the model's metrics on one or several data sets, and prediction of its outputs.

The training calls :meth:`Evaluations.run_if_due`, and the Trainer's methods :func:`evaluate` and :func:`predict`. All
processes take part, and each sample counts once. Training continues as without: the weights, the modes of modules, the
random numbers and the batch are restored, also after an error. What a signal interrupts is evaluated again by the next
run.
"""

from __future__ import annotations

import contextlib
import copy
import datetime
import fnmatch
import itertools
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import attrs
import torch
from torch.utils.data import DataLoader, RandomSampler

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
from composer.core.checks import is_subset, own_arguments
from composer.core.data.batches import batch_get, move_batch, note_batch
from composer.core.evaluator import evaluation_mode, nearest_metric
from composer.core.saving.randomness import preserve_rng_state
from composer.distributed import (
    all_reduce_min,
    any_rank,
    broadcast_buffers,
    get_data_rank,
    get_world_size,
)
from composer.distributed.samplers import in_step, is_split_by_rank, split_data
from composer.functional.dtensors import is_sharded
from composer.functional.nested import join
from composer.trainer.data.batches import prepare_batch, warn_of_repeats
from composer.trainer.data.objects import load_objects, objects_to_evaluate, save_objects
from composer.trainer.data.order import DataOrder, make_order
from composer.trainer.evaluation.metrics import (
    SupportsMetrics,
    compute_metrics,
    log_values,
    metrics_of,
    reduce_over_data,
    reset_metrics,
)
from composer.trainer.stopping import Stopped, StopSignals, agree_on_stop

Loader: TypeAlias = Iterable[Any] | DataSpec
EvalData: TypeAlias = Loader | Evaluator | Sequence[Loader | Evaluator]
EvalInterval: TypeAlias = int | str | Time | Callable[[State, Event], bool]


def check_can_be_evaluated(model: object) -> None:
    """Raise a TypeError if a model lacks a method that evaluation requires."""
    if not isinstance(model, SupportsMetrics):
        missing = [name for name in ("eval_forward", "get_metrics", "update_metric") if not hasattr(model, name)]
        raise TypeError(
            f"To be evaluated, {type(model).__name__} needs {', '.join(missing)}. "
            "Derive it from composer.models.ComposerModel, or leave out eval_dataloader."
        )


@attrs.frozen
class Evaluations:
    """The data sets that a run is evaluated on, and how often.

    Args:
        eval_dataloader: The data sets; None for none.
        eval_interval: The interval of evaluators without one of their own.
        eval_subset_num_batches: The number of batches of evaluators without one of their own.

    Raises:
        ValueError: The interval or the number of batches is out of range.
    """

    data: EvalData | None = attrs.field(default=None, alias="eval_dataloader")
    interval: EvalInterval = attrs.field(default=1, alias="eval_interval")
    subset_num_batches: int = attrs.field(default=-1, alias="eval_subset_num_batches", validator=is_subset)
    evaluators: list[Evaluator] = attrs.field(init=False)

    @evaluators.default
    def _make_evaluators(self) -> list[Evaluator]:
        interval = self.interval
        default = interval if callable(interval) else evaluate_periodically(interval)
        return [
            evaluator if evaluator.eval_interval is not None else attrs.evolve(evaluator, eval_interval=default)
            for evaluator in ([] if self.data is None else to_evaluators(self.data))
        ]

    def with_changes(self, given: Mapping[str, Any]) -> Evaluations:
        """Return a copy with its arguments among those of ``fit`` that are not None, or this without any.

        Raises:
            ValueError: An interval is given without data to evaluate on.
        """
        new = own_arguments(Evaluations, given, without_none=True)
        if "eval_interval" in new and "eval_dataloader" not in new and self.data is None:
            raise ValueError("eval_interval is given without data to evaluate on: give eval_dataloader, too.")
        return attrs.evolve(self, **new) if new else self

    def labels(self) -> list[str]:
        """Return the labels of the evaluators."""
        return [evaluator.label for evaluator in self.evaluators]

    def install(self, state: State) -> None:
        """Set a state's evaluators, and give each its own metrics."""
        if self.evaluators:
            check_can_be_evaluated(state.model)
            evaluators = split_evaluators(self.evaluators)
            prepare_metrics(state, evaluators)  # raises for metrics that do not exist
            state.evaluators = evaluators

    def replace(self, former: Evaluations, state: State) -> None:
        """Set a state's evaluators in place of former ones, whose metrics nothing computes from now on."""
        if self is not former:
            self.install(state)
        state.eval_metrics = {label: own for label, own in state.eval_metrics.items() if label in self.labels()}

    def run_if_due(
        self, engine: Engine, event: Event, signals: StopSignals, interrupted: dict[Event, list[str]], end: Time | None
    ) -> None:
        """Evaluate with the evaluators that are due at an event.

        Args:
            engine: With the state that is trained.
            event: Where.
            signals: Those that stop the evaluation.
            interrupted: The labels of evaluators that have not run, by event; **changed in place**.
            end: The end of the training without a call of ``stop_training``, of which intervals in ``"dur"`` are parts.

        Raises:
            Stopped: A signal has stopped the evaluation, or the training before it.
        """
        planned, left = engine.state, interrupted.pop(event, None)
        if planned.stop_reason is not None:
            planned = copy.copy(planned)
            planned.max_duration = end
        due = [one for one in due_evaluators(planned, event) if left is None or one.label in left]
        if not due:
            return
        results: dict[str, Any] = {}
        try:
            signals.check()
            evaluate(engine, due, self.subset_num_batches, signals, results)
            agree_on_stop(engine.state)
        except Stopped:
            interrupted[event] = [one.label for one in due if one.label not in results]
            raise


def due_evaluators(state: State, event: Event) -> list[Evaluator]:
    """Return the evaluators that are due at an event."""
    return [one for one in state.evaluators if one.eval_interval and one.eval_interval(state, event)]


def split_evaluators(evaluators: Sequence[Evaluator]) -> list[Evaluator]:
    """Return evaluators with data of which each of several processes gets its own samples.

    Raises:
        ValueError: Processes would get the same samples.
    """
    specs = [split_data(one.dataloader, f"eval_dataloader ({one.label!r})") for one in evaluators]
    return [attrs.evolve(one, dataloader=spec) for one, spec in zip(evaluators, specs, strict=True)]


def to_evaluators(data: EvalData) -> list[Evaluator]:
    """Return the evaluators of one or several data sets; what is none is labelled ``"eval"``."""
    kinds = (Evaluator, DataSpec, DataLoader)
    if not isinstance(data, Sequence) or not any(isinstance(one, kinds) for one in data):
        return [ensure_evaluator(data)]
    return [ensure_evaluator(one) for one in data]


def check_labels(evaluators: Sequence[Evaluator], of_training: str | None) -> None:
    """Raise a ValueError if two evaluators have the same label, or one that of the training data."""
    labels = [evaluator.label for evaluator in evaluators]
    if len(set(labels)) != len(labels):
        raise ValueError(f"Evaluator(label='...', dataloader=...) must have a label of its own, got {labels}.")
    if of_training in labels:
        raise ValueError(
            f"An Evaluator must not have the label of the training data, got {of_training!r}: the metrics of both "
            "would have the same names. Choose another label, or another train_dataloader_label."
        )


def prepare_metrics(state: State, evaluators: Sequence[Evaluator]) -> None:
    """Give every evaluator its own copy of those of the model's metrics that it names, on the state's device.

    Raises:
        ValueError: Two evaluators have the same label, or that of the training data, or one has no batches.
    """
    check_labels(evaluators, None if state.train_data_spec is None else state.dataloader_label)
    metrics = metrics_of(state.model, is_train=False)
    unmeasured = [] if metrics else [one.label for one in evaluators if one.metric_names is None]
    if unmeasured:
        warnings.warn(
            f"The data to evaluate on ({', '.join(unmeasured)}) are evaluated without a metric, as "
            f"{type(state.model).__name__}.get_metrics(is_train=False) returns none. Return some there; if only "
            "callbacks use the outputs, give Evaluator(metric_names=[]).",
            stacklevel=2,
        )
    own: dict[str, dict[str, Any]] = {}
    for evaluator in evaluators:
        interval, samples = getattr(evaluator.eval_interval, "interval", None), evaluator.dataloader.num_samples
        # With an interval of 0 it is evaluated only by a call, which raises an error.
        if evaluator.dataloader.length == 0 and (interval is None or interval.every.value):
            of_data = "has fewer samples than a batch, with drop_last=True" if samples else "is empty"
            cause = "it is empty or None" if samples is None else f"its data set {of_data}"
            raise ValueError(f"The loader of {evaluator.label!r} has no batches to evaluate on: {cause}.")
        chosen = set(metrics) if evaluator.metric_names is None else set()
        for pattern in evaluator.metric_names or ():
            matches = fnmatch.filter(metrics, pattern)
            if not matches:
                warnings.warn(
                    f"Evaluator {evaluator.label!r} names the metric {pattern!r}, which is not computed: the model has "
                    f"{list(metrics)}{nearest_metric(pattern, metrics)}",
                    stacklevel=2,
                )
            chosen.update(matches)
        # Copies, because each evaluator counts its own samples.
        own[evaluator.label] = {
            name: copy.deepcopy(metric).to(state.device) for name, metric in metrics.items() if name in chosen
        }
        reduce_over_data(own[evaluator.label].values())
    state.eval_metrics |= own


def evaluate(
    engine: Engine,
    evaluators: Sequence[Evaluator],
    default_subset: int,
    signals: StopSignals,
    results: dict[str, dict[str, Any]] | None = None,
) -> dict[str, dict[str, Any]]:
    """Run the model over the evaluators' data and log their metrics.

    Args:
        engine: With the model.
        evaluators: The data.
        default_subset: The number of batches of evaluators without one of their own.
        signals: Those that stop the evaluation after a batch.
        results: The dictionary to fill and to return; a new one if None.

    Returns:
        The metrics' values by evaluator and name, as tensors.

    Raises:
        Stopped: A signal has stopped the evaluation.
    """
    results = {} if results is None else results
    with in_evaluation(engine):
        engine.run_event(Event.EVAL_BEFORE_ALL)
        for as_trained, group in itertools.groupby(evaluators, lambda evaluator: evaluator.training_weights):
            with with_evaluation_weights(engine.state, as_trained=as_trained):
                for evaluator in group:
                    subset = default_subset if evaluator.subset_num_batches is None else evaluator.subset_num_batches
                    results[evaluator.label] = _evaluate_one(engine, evaluator, subset, signals)
        engine.run_event(Event.EVAL_AFTER_ALL)
    return results


@contextlib.contextmanager
def in_evaluation(engine: Engine) -> Iterator[None]:
    """Disable gradients and put the model into evaluation mode; restore the state at the end, also after an error."""
    state = engine.state
    data = state.dataloader, state.dataloader_label, state.dataloader_len
    # Events that follow an evaluation within training refer to its batch.
    step = state.batch, state.outputs
    try:
        # Training draws the same random numbers as without the evaluation.
        with evaluation_mode(state.model), preserve_rng_state(state.device), torch.no_grad():
            yield
    except BaseException:
        # Algorithms that have changed the model for the evaluation undo it at an event that is not reached now.
        engine.restore()
        raise
    finally:
        state.batch, state.outputs = step
        state.set_dataloader(*data)


@contextlib.contextmanager
def with_evaluation_weights(state: State, *, as_trained: bool = False) -> Iterator[None]:
    """Give the model its evaluation weights within the block, and the buffers of rank 0 in every process.

    If ``as_trained``, it keeps its training weights.
    """
    with contextlib.nullcontext() if as_trained else evaluation_weights(state):
        broadcast_buffers(state.model)
        yield


def _evaluate_one(engine: Engine, evaluator: Evaluator, subset: int, signals: StopSignals) -> dict[str, Any]:
    state, metrics = engine.state, engine.state.eval_metrics[evaluator.label]
    length = evaluator.dataloader.length
    shortened = subset if length is None else min(subset, length)
    state.set_dataloader(evaluator.dataloader.dataloader, evaluator.label, length if subset == -1 else shortened)
    state.eval_timestamp = Timestamp()
    reset_metrics(metrics)
    engine.run_event(Event.EVAL_START)
    if evaluator.training_weights:
        engine.restore()  # at this event, averages have been moved into the model
    loader = evaluator.dataloader.dataloader
    order = evaluator.order or make_order(loader, state.rank_zero_seed)
    evaluator.order = order if getattr(loader, "persistent_workers", False) else None
    with _restoring_parts(loader):
        for batch, counts in signals.until_stopped(_first_batches(state, loader, order, subset)):
            _evaluate_batch(engine, evaluator, batch, counts)
    found, announced = int(state.eval_timestamp.batch), state.dataloader_len
    if any_rank(not found):  # in all processes, or the others would wait for this one
        lacking = f"the loader of {evaluator.label!r} returned no batch{' in another process' if found else ''}"
        raise ValueError(f"There is nothing to evaluate on: {lacking}.")
    if length is not None and found < (announced or 0) and not is_split_by_rank(loader):
        warnings.warn(
            f"The loader of {evaluator.label!r} has a length of {length} batches and returned only {found}, which are "
            "evaluated. Correct its __len__; its data set may also have raised StopIteration.",
            stacklevel=2,
        )
    values = compute_metrics(metrics)
    state.eval_metric_values.record(evaluator.label, values)
    log_values(engine.logger, evaluator.label, values)
    engine.run_event(Event.EVAL_END)
    return values


@contextlib.contextmanager
def _restoring_parts(loader: Iterable[Any]) -> Iterator[None]:
    """Restore a loader's objects if a signal stops the evaluation, which is repeated from its start after a resume."""
    objects, streams = objects_to_evaluate(loader)
    before = save_objects(objects, streams)
    try:
        yield
    except Stopped:
        load_objects(before, objects, streams)
        raise


def _first_batches(state: State, loader: Iterable[Any], order: DataOrder, subset: int) -> Iterator[tuple[Any, bool]]:
    """Yield the first ``subset`` batches, all if -1, each with whether it counts.

    A sample that several processes have, so that all have equally many batches, counts in one of them. Processes with a
    sharded model compute equally many batches.
    """
    batches = itertools.islice(order.begin(0), None if subset == -1 else subset)
    if order.global_batch_size is not None:
        end, places = order.end(0) or 0, itertools.count(get_data_rank(), order.place_distance)
        return zip(batches, (place < end for place in places), strict=False)
    if get_world_size() > 1:
        warn_of_repeats(loader, "evaluated")
    may_end_apart = _computes_in_step(state) and not is_split_by_rank(loader)
    return in_step(batches) if may_end_apart else zip(batches, itertools.repeat(True))


def _computes_in_step(state: State) -> bool:
    """Return whether each forward pass needs one in every other process, as it gathers weights from all of them."""
    return get_world_size() > 1 and is_sharded(state.model)


def _microbatches(state: State, evaluator: Evaluator, counts: bool) -> list[tuple[Any, bool]]:
    """Return the batch's microbatches, each with whether it counts.

    Processes with a sharded model compute equally many microbatches.
    """
    size, spec = evaluator.device_eval_microbatch_size, evaluator.dataloader
    split = [(one, counts) for one in ([state.batch] if size is None else spec.split_batch(state.batch, size))]
    if size is not None and _computes_in_step(state):
        maximum = -all_reduce_min(-len(split))
        # Copies, as transforms and models may change a microbatch in place.
        spare = split[-1][0] if split else state.batch
        split += [(copy.deepcopy(spare), False) for _ in range(maximum - len(split))]
    return split


def _evaluate_batch(engine: Engine, evaluator: Evaluator, batch: Any, counts: bool) -> None:
    """Run the model on a batch, and update the metrics if it counts."""
    state, spec, began = engine.state, evaluator.dataloader, time.perf_counter()
    name, number = f"eval_dataloader {evaluator.label!r}", int(state.eval_timestamp.batch)
    state.batch = prepare_batch(batch, spec, state.device, name, number)
    num_samples, num_tokens = spec.get_num_samples_in_batch(state.batch), spec.get_num_tokens_in_batch(state.batch)
    engine.run_event(Event.EVAL_BATCH_START)
    for microbatch, is_counted in _microbatches(state, evaluator, counts):
        _forward(engine, spec, microbatch, Event.EVAL_BEFORE_FORWARD, Event.EVAL_AFTER_FORWARD)
        for metric in state.eval_metrics[evaluator.label].values() if is_counted else ():
            returned = state.model.update_metric(state.batch, state.outputs, metric)
            state.metric_outputs = {} if returned is None else returned
    elapsed = datetime.timedelta(seconds=time.perf_counter() - began)
    state.eval_timestamp = state.eval_timestamp.to_next_batch(num_samples, num_tokens, elapsed)
    engine.run_event(Event.EVAL_BATCH_END)


@attrs.frozen
class Predictions:
    """The outputs of each batch, or pairs of outputs and targets, on the CPU; and the number of samples of each."""

    outputs: list[Any] = attrs.field(factory=list)
    counts: list[int] = attrs.field(factory=list)

    def joined(self) -> Any:
        """Return the outputs of all batches as one; an empty list for none."""
        return join(self.outputs, self.counts) if self.outputs else []


def predict(
    engine: Engine, spec: DataSpec, subset: int, signals: StopSignals, *, collect: bool, targets: bool
) -> Predictions:
    """Run the model over the data; algorithms and callbacks see the ``PREDICT_*`` events.

    Returns:
        What was computed, with the targets if ``targets``; nothing unless ``collect``.

    Raises:
        Stopped: A signal has stopped the prediction.
    """
    state, collected, sampler = engine.state, Predictions(), getattr(spec.dataloader, "sampler", None)
    if collect and not targets and (isinstance(sampler, RandomSampler) or getattr(sampler, "shuffle", False) is True):
        warnings.warn(
            "The outputs are those of a loader that shuffles, in an order that is not returned: predict from a loader "
            "with shuffle=False, or give with_targets=True.",
            stacklevel=4,
        )
    with in_evaluation(engine), with_evaluation_weights(state):
        lengths = [length for length in (spec.length, subset) if length is not None and length != -1]
        state.set_dataloader(spec.dataloader, "predict", min(lengths, default=None))
        state.predict_timestamp = Timestamp()
        engine.run_event(Event.PREDICT_START)
        order = make_order(spec.dataloader, state.rank_zero_seed)
        for batch, counts in signals.until_stopped(_first_batches(state, spec.dataloader, order, subset)):
            began = time.perf_counter()
            number = int(state.predict_timestamp.batch)
            state.batch = prepare_batch(batch, spec, state.device, "dataloader", number)
            engine.run_event(Event.PREDICT_BATCH_START)
            # The batch is its only microbatch.
            _forward(engine, spec, state.batch, Event.PREDICT_BEFORE_FORWARD, Event.PREDICT_AFTER_FORWARD)
            num_samples = spec.get_num_samples_in_batch(state.batch)
            if collect and counts:
                result = (state.outputs, _targets_of(state.batch)) if targets else state.outputs
                collected.outputs.append(move_batch(result, torch.device("cpu")))
                collected.counts.append(num_samples)
            num_tokens = spec.get_num_tokens_in_batch(state.batch)
            elapsed = datetime.timedelta(seconds=time.perf_counter() - began)
            state.predict_timestamp = state.predict_timestamp.to_next_batch(num_samples, num_tokens, elapsed)
            engine.run_event(Event.PREDICT_BATCH_END)
        engine.run_event(Event.PREDICT_END)
    return collected


def _targets_of(batch: Any) -> Any:
    if isinstance(batch, torch.Tensor):
        raise TypeError("with_targets=True needs batches (input, target) or dictionaries with targets, got a tensor.")
    return batch_get(batch, 1)


def _forward(engine: Engine, spec: DataSpec, microbatch: Any, before: Event, after: Event) -> None:
    """Compute the state's outputs for a microbatch, in its precision, between two events."""
    state = engine.state
    state.batch = microbatch if spec.microbatch_transforms is None else spec.microbatch_transforms(microbatch)
    state.outputs = None  # free those of the batch before
    engine.run_event(before)
    name = "eval_forward" if hasattr(state.model, "eval_forward") else "forward"
    forward = state.model.eval_forward if name == "eval_forward" else state.model
    try:
        with get_precision_context(state.precision, state.device.type):
            state.outputs = forward(state.batch)
    except Exception as error:
        note_batch(error, before, state.model, f".{name}", state.batch)
        raise
    engine.run_event(after)
