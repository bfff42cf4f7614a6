"""The trainer: puts the parts together, and lets the loop run."""

from __future__ import annotations

import contextlib
import datetime
import os
import secrets
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Protocol, Self, TextIO, TypeVar, runtime_checkable

import attrs
import torch
from torch import nn
from torch.utils.data import DataLoader

from composer.core import (
    Algorithm,
    AlgorithmPass,
    Callback,
    DataSpec,
    Engine,
    Evaluator,
    Event,
    Logger,
    LoggerDestination,
    Precision,
    State,
    SupportsTraining,
    Time,
    Timestamp,
    TimeUnit,
    ensure_data_spec,
    ensure_evaluator,
    evaluate_periodically,
)
from composer.loggers.terminal import terminal_destinations
from composer.trainer.batches import Batches
from composer.trainer.device import choose_device, choose_precision
from composer.trainer.evaluation import evaluate, prepare_metrics
from composer.trainer.loop import train
from composer.trainer.optimization import Optimization, make_scaler
from composer.trainer.reproducibility import configure_deterministic_mode, get_random_seed, seed_all
from composer.trainer.run import Run
from composer.trainer.schedules import SchedulerLike, Schedules, check_schedulers

if TYPE_CHECKING:
    from types import TracebackType

    from torch.optim import Optimizer

__all__ = ["Trainer"]

Loader = Iterable[Any] | DataSpec
EvalData = Loader | Evaluator | Sequence[Evaluator]
T = TypeVar("T")
EvalInterval = int | str | Time | Callable[[State, Event], bool]


class Trainer:
    """Trains a model with algorithms, callbacks and loggers, on one device.

    The constructor builds everything and runs ``INIT`` (where algorithms change the model), :meth:`fit` trains,
    :meth:`eval` evaluates, :meth:`close` finishes what loggers write; ``with Trainer(…) as trainer:`` closes by itself.
    ``print(trainer.engine.explain())`` shows what will run when.

    Args:
        model: A module with ``forward(batch)`` and ``loss(outputs, batch)``, such as a
            :class:`~composer.models.ComposerModel`; to be evaluated it also needs ``eval_forward``, ``get_metrics`` and
            ``update_metric``.
        train_dataloader: What to train on: an iterable of batches or a :class:`DataSpec`. May be given to :meth:`fit`.
        train_dataloader_label: Its name in logs.
        train_subset_num_batches: Batches in an epoch, if not all of them (-1).
        max_duration: How long to train: a time, a text (``"10ep"``, ``"500ba"``, ``"30sec"``) or a number of epochs.
        algorithms: One or several; the engine puts them in order.
        algorithm_passes: What changes that order further; see :mod:`composer.core.passes`.
        optimizers: One or several. SGD with a learning rate of 0.1, with a warning, if None.
        schedulers: torch's schedulers or functions ``f(state, ssr) -> multiplier``; one or several.
        scale_schedule_ratio: By how much the training and its schedule are stretched; 0.5 trains half as long.
        step_schedulers_every_batch: Whether schedulers step after each batch; if None, torch's own step after each
            epoch and functions after each batch.
        eval_dataloader: What to evaluate on: a loader, an :class:`Evaluator`, or several evaluators.
        eval_interval: How often; a whole number counts epochs, 0 is never.
        eval_subset_num_batches: Batches of an evaluation, if not all of them (-1).
        callbacks: One or several.
        loggers: Where metrics go, one or several.
        run_name: The run's name; one is made up from the time if None.
        progress_bar: Whether to draw a progress bar.
        log_to_console: Whether to print metrics as lines of text.
        console_stream: Where bar and lines go: ``"stderr"``, ``"stdout"`` or an open text file.
        console_log_interval: How often lines are printed.
        log_traces: Whether to log which algorithms ran at which event.
        device: ``"cpu"``, ``"gpu"``, ``"mps"`` or a :class:`torch.device`; the best there is if None.
        precision: ``"fp32"``, ``"amp_bf16"`` or ``"amp_fp16"``; if None, ``"amp_fp16"`` on a GPU and
            ``"fp32"`` elsewhere.
        device_train_microbatch_size: Samples that are put through the model at once; gradients of a batch's parts are
            added up. None puts whole batches through.
        seed: Seeds all global generators; one is made up if None. For equal weights, seed before making the model.
        deterministic_mode: Whether to allow only algorithms of torch that give the same bits each time.

    Raises:
        TypeError: An argument is of the wrong kind.
        ValueError: A value is out of range, two algorithms cannot work together, or the device does not exist.

    Example:
        >>> from composer.models import ComposerClassifier
        >>> images, labels = torch.rand(32, 4), torch.randint(2, (32,))
        >>> model = ComposerClassifier(nn.Linear(4, 2), num_classes=2)
        >>> trainer = Trainer(
        ...     model=model,
        ...     train_dataloader=[(images, labels)],
        ...     optimizers=torch.optim.SGD(model.parameters(), lr=0.1),
        ...     max_duration="3ep",
        ...     progress_bar=False,
        ... )
        >>> trainer.fit()
        >>> trainer.state.timestamp.batch
        Time(3, 'ba')
    """

    def __init__(
        self,
        *,
        model: nn.Module,
        train_dataloader: Loader | None = None,
        train_dataloader_label: str = "train",
        train_subset_num_batches: int = -1,
        max_duration: int | str | Time | None = None,
        algorithms: Algorithm | Sequence[Algorithm] | None = None,
        algorithm_passes: AlgorithmPass | Sequence[AlgorithmPass | tuple[AlgorithmPass, int]] | None = None,
        optimizers: Optimizer | Sequence[Optimizer] | None = None,
        schedulers: SchedulerLike | Sequence[SchedulerLike] | None = None,
        scale_schedule_ratio: float = 1.0,
        step_schedulers_every_batch: bool | None = None,
        eval_dataloader: EvalData | None = None,
        eval_interval: EvalInterval = 1,
        eval_subset_num_batches: int = -1,
        callbacks: Callback | Sequence[Callback] | None = None,
        loggers: LoggerDestination | Sequence[LoggerDestination] | None = None,
        run_name: str | None = None,
        progress_bar: bool = True,
        log_to_console: bool = False,
        console_stream: str | TextIO = "stderr",
        console_log_interval: int | str | Time = "1ba",
        log_traces: bool = False,
        device: str | torch.device | None = None,
        precision: str | Precision | None = None,
        device_train_microbatch_size: int | None = None,
        seed: int | None = None,
        deterministic_mode: bool = False,
    ) -> None:
        _refuse_several_processes()
        _check_model(model)
        _check_microbatch_size(device_train_microbatch_size)
        if deterministic_mode:
            configure_deterministic_mode()
        seed = get_random_seed() if seed is None else seed
        seed_all(seed)

        chosen_device = choose_device(device)
        model.to(chosen_device)
        chosen_precision = choose_precision(precision, chosen_device)
        self.state = State(
            model=model,
            rank_zero_seed=seed,
            run_name=run_name or _made_up_name(),
            device=chosen_device,
            device_train_microbatch_size=device_train_microbatch_size,
            precision=chosen_precision,
            scaler=make_scaler(chosen_precision, chosen_device),
        )
        self.state.optimizers = _default_optimizer(model) if optimizers is None else optimizers
        _check_optimizers(model, self.state.optimizers)
        self.state.algorithms = _as_list(algorithms)
        self.state.callbacks = _as_list(callbacks)
        shown = terminal_destinations(
            progress_bar=progress_bar,
            log_to_console=log_to_console,
            stream=console_stream,
            log_interval=console_log_interval,
            log_traces=log_traces,
        )
        self.logger = Logger(self.state, [*_as_list(loggers), *shown])
        self.engine = Engine(self.state, self.logger, algorithm_passes, log_traces=log_traces)

        self._batches: Batches | None = None
        self._schedules: Schedules | None = None
        check_schedulers(schedulers)
        self._given_schedulers = schedulers
        self._step_schedulers_every_batch = step_schedulers_every_batch
        self._scale_schedule_ratio = _check_ratio(scale_schedule_ratio)
        self._eval_subset_num_batches = _check_subset(eval_subset_num_batches)
        self._eval_interval = eval_interval
        self._eval_dataloader = eval_dataloader
        self._train_label = train_dataloader_label
        self._subset_num_batches = train_subset_num_batches
        if max_duration is not None:
            self.state.max_duration = _scaled(Time.from_input(max_duration, TimeUnit.EPOCH), scale_schedule_ratio)
        if train_dataloader is not None:
            self._set_train_data(ensure_data_spec(train_dataloader))
        if eval_dataloader is not None:
            self._set_evaluators()

        with self._closing_on_error():
            for event in (Event.INIT, Event.BEFORE_LOAD, Event.AFTER_LOAD):
                self.engine.run_event(event)
            self.logger.log_hyperparameters(self._hyperparameters())

    def fit(
        self,
        *,
        train_dataloader: Loader | None = None,
        train_dataloader_label: str | None = None,
        train_subset_num_batches: int | None = None,
        duration: int | str | Time | None = None,
        reset_time: bool = False,
        schedulers: SchedulerLike | Sequence[SchedulerLike] | None = None,
        scale_schedule_ratio: float = 1.0,
        step_schedulers_every_batch: bool | None = None,
        eval_dataloader: EvalData | None = None,
        eval_subset_num_batches: int | None = None,
        eval_interval: EvalInterval | None = None,
        device_train_microbatch_size: int | None = None,
        precision: str | Precision | None = None,
    ) -> None:
        """Train until ``max_duration``, or for ``duration`` more. Called again, it goes on where it stopped.

        What is not given stays as the constructor was told. With nothing left to do it returns at once. An error, also
        a Ctrl-C, closes the trainer, so that what loggers write is whole.

        Args:
            train_dataloader: What to train on.
            train_dataloader_label: Its name in logs.
            train_subset_num_batches: Batches in an epoch.
            duration: How long to train from here, instead of until ``max_duration``.
            reset_time: Whether the clock begins anew.
            schedulers: The learning rate schedulers.
            scale_schedule_ratio: By how much ``duration`` and ``schedulers`` are stretched.
            step_schedulers_every_batch: Whether schedulers step after each batch.
            eval_dataloader: What to evaluate on.
            eval_subset_num_batches: Batches of an evaluation.
            eval_interval: How often to evaluate.
            device_train_microbatch_size: Samples that are put through the model at once.
            precision: What the model computes in.

        Raises:
            ValueError: There is no data, or it is not said how long to train.
        """
        self._take_data(train_dataloader, train_dataloader_label, train_subset_num_batches)
        if eval_subset_num_batches is not None:
            self._eval_subset_num_batches = _check_subset(eval_subset_num_batches)
        if eval_dataloader is not None or eval_interval is not None:
            self._eval_dataloader = self._eval_dataloader if eval_dataloader is None else eval_dataloader
            self._eval_interval = self._eval_interval if eval_interval is None else eval_interval
            self._set_evaluators()
        check_schedulers(schedulers)
        if device_train_microbatch_size is not None:
            self.state.device_train_microbatch_size = _check_microbatch_size(device_train_microbatch_size)
        if precision is not None:
            self.state.precision = choose_precision(precision, self.state.device)
            self.state.scaler = make_scaler(self.state.precision, self.state.device)
        if reset_time:
            self.state.timestamp = self.state.previous_timestamp = Timestamp()
            if self._batches is not None:
                self._batches.rewind()
        self._take_duration(duration, scale_schedule_ratio)
        self._take_schedulers(schedulers, scale_schedule_ratio, step_schedulers_every_batch)

        assert self._batches is not None
        assert self._schedules is not None
        run = Run(
            self.engine,
            self._batches,
            Optimization(self.state),
            self._schedules,
            self._evaluate_if_due,
        )
        if run.is_over():
            return
        with self._closing_on_error():
            train(run)

    def eval(
        self, eval_dataloader: EvalData | None = None, subset_num_batches: int | None = None
    ) -> dict[str, dict[str, Any]]:
        """Evaluate now.

        Args:
            eval_dataloader: What on; the evaluators of the constructor if None.
            subset_num_batches: Only so many batches of each, -1 is all; as the constructor was told if None.

        Returns:
            The metrics' values by evaluator and name, as tensors: ``{"eval": {"MulticlassAccuracy": tensor(0.99)}}``.

        Raises:
            ValueError: There is nothing to evaluate on.
        """
        subset = self._eval_subset_num_batches if subset_num_batches is None else _check_subset(subset_num_batches)
        evaluators = self.state.evaluators if eval_dataloader is None else _to_evaluators(eval_dataloader)
        if not evaluators:
            raise ValueError("There is nothing to evaluate on: give eval_dataloader to eval() or to the Trainer.")
        if eval_dataloader is not None:
            _check_can_be_evaluated(self.state.model)
            prepare_metrics(self.state, evaluators)
        with self._closing_on_error():
            self.engine.run_event(Event.EVAL_STANDALONE_START)
            results = evaluate(self.engine, evaluators, subset)
            self.engine.run_event(Event.EVAL_STANDALONE_END)
        return results

    def close(self) -> None:
        """Close callbacks and loggers: their files are whole afterwards. The trainer cannot be used any more."""
        self.engine.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        with self._noting_further_errors(error):
            self.close()

    def _take_data(self, loader: Loader | None, label: str | None, subset: int | None) -> None:
        if label is not None:
            self._train_label = label
        if subset is not None:
            self._subset_num_batches = subset
        if loader is not None:
            self._set_train_data(ensure_data_spec(loader))
        elif subset is not None and self._batches is not None and subset != self._batches.subset_num_batches:
            self._set_train_data(self._batches.spec)
        if self._batches is None:
            raise ValueError("There is nothing to train on: give train_dataloader to the Trainer or to fit().")
        self.state.set_dataloader(self._batches.spec.dataloader, self._train_label, self._batches.length)

    def _set_train_data(self, spec: DataSpec) -> None:
        self._batches = Batches(spec, self._subset_num_batches, self.state.device)
        self.state.train_dataloader = spec
        self.state.set_dataloader(spec.dataloader, self._train_label, self._batches.length)
        model = self.state.model
        if isinstance(model, SupportsMetrics) and not self.state.train_metrics:
            metrics = model.get_metrics(is_train=True)
            self.state.train_metrics = {name: metric.to(self.state.device) for name, metric in metrics.items()}

    def _set_evaluators(self) -> None:
        interval, given = self._eval_interval, self._eval_dataloader
        if given is None:
            raise ValueError("eval_interval is given, but there is nothing to evaluate on: give eval_dataloader, too.")
        _check_can_be_evaluated(self.state.model)
        default = interval if callable(interval) else evaluate_periodically(interval)
        self.state.evaluators = [
            evaluator if evaluator.eval_interval is not None else attrs.evolve(evaluator, eval_interval=default)
            for evaluator in _to_evaluators(given)
        ]
        prepare_metrics(self.state, self.state.evaluators)

    def _take_duration(self, duration: int | str | Time | None, ratio: float) -> None:
        if duration is not None:
            more = _scaled(Time.from_input(duration, TimeUnit.EPOCH), _check_ratio(ratio))
            self.state.max_duration = self.state.timestamp.get(more.unit) + more
        if self.state.max_duration is None:
            raise ValueError("It is not said how long to train: give max_duration to the Trainer or duration to fit().")

    def _take_schedulers(
        self, schedulers: SchedulerLike | Sequence[SchedulerLike] | None, ratio: float, every_batch: bool | None
    ) -> None:
        nothing_new = schedulers is None and every_batch is None
        if nothing_new and self._schedules is not None:
            return
        if schedulers is None:
            schedulers, ratio = self._given_schedulers, self._scale_schedule_ratio
        if every_batch is None:
            every_batch = self._step_schedulers_every_batch
        self._given_schedulers, self._step_schedulers_every_batch = schedulers, every_batch
        self._schedules = Schedules.make(schedulers, self.state, ratio, every_batch)
        self.state.schedulers = (*self._schedules.every_batch, *self._schedules.every_epoch)

    def _evaluate_if_due(self, event: Event) -> None:
        due = [one for one in self.state.evaluators if one.eval_interval and one.eval_interval(self.state, event)]
        if due:
            evaluate(self.engine, due, self._eval_subset_num_batches)

    @contextlib.contextmanager
    def _closing_on_error(self) -> Iterator[None]:
        """Finish what loggers write when training ends by an error, and let the error go on."""
        try:
            yield
        except BaseException as error:
            with self._noting_further_errors(error):
                self.close()
            raise

    @contextlib.contextmanager
    def _noting_further_errors(self, first: BaseException | None) -> Iterator[None]:
        """Keep an error in closing from hiding the one that the user has to see."""
        try:
            yield
        except Exception as second:
            if first is None:
                raise
            first.add_note(f"Closing callbacks and loggers failed, too: {type(second).__name__}: {second}")

    def _hyperparameters(self) -> dict[str, Any]:
        state = self.state
        return {
            "run_name": state.run_name,
            "rank_zero_seed": state.rank_zero_seed,
            "device": str(state.device),
            "precision": state.precision.value,
            "max_duration": None if state.max_duration is None else str(state.max_duration),
            "algorithms": {
                state.component_key(one): {name: _plain(value) for name, value in one.settings().items()}
                for one in state.algorithms
            },
        }


@runtime_checkable
class SupportsMetrics(Protocol):
    """What the trainer needs of a model that is to be measured."""

    def eval_forward(self, batch: Any, outputs: Any = None) -> Any:
        """Return the outputs for the metrics; ``outputs`` if they are known already."""

    def get_metrics(self, is_train: bool) -> dict[str, Any]:
        """Return the metrics by name."""

    def update_metric(self, batch: Any, outputs: Any, metric: Any) -> None:
        """Add a batch to a metric."""


def _check_model(model: object) -> None:
    if isinstance(model, type):
        raise TypeError(f"model must be an object, got the class {model.__name__}; write {model.__name__}().")
    if not isinstance(model, nn.Module) or not isinstance(model, SupportsTraining):
        raise TypeError(
            "model must be a torch.nn.Module with forward(batch) and loss(outputs, batch), "
            f"got {type(model).__name__}. "
            "Wrap a classifier in composer.models.ComposerClassifier, or derive the model from ComposerModel."
        )


def _check_can_be_evaluated(model: nn.Module) -> None:
    if not isinstance(model, SupportsMetrics):
        missing = [name for name in ("eval_forward", "get_metrics", "update_metric") if not hasattr(model, name)]
        raise TypeError(
            f"To be evaluated, {type(model).__name__} needs {', '.join(missing)}. "
            "Derive it from composer.models.ComposerModel, or leave out eval_dataloader."
        )


def _check_microbatch_size(size: int | None) -> int | None:
    if size is not None and (not isinstance(size, int) or isinstance(size, bool) or size < 1):
        raise ValueError(f"device_train_microbatch_size must be None or a number of samples, at least 1, got {size!r}.")
    return size


def _check_subset(subset: int) -> int:
    if subset != -1 and subset < 1:
        raise ValueError(f"eval_subset_num_batches must be a number of batches, or -1 for all, got {subset}.")
    return subset


def _check_optimizers(model: nn.Module, optimizers: Sequence[Optimizer]) -> None:
    if not optimizers:
        raise ValueError("optimizers is empty, so nothing would be trained: give one, or None for the default.")
    owned = {id(parameter) for parameter in model.parameters()}
    for optimizer in optimizers:
        held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        strangers = sum(id(parameter) not in owned for parameter in held)
        if strangers:
            raise ValueError(
                f"{type(optimizer).__name__} holds {strangers} parameters of {len(held)} that are not the model's, "
                "so they would be trained in vain: was the model changed after the optimizer was made? "
                "Make it anew from model.parameters()."
            )


def _check_ratio(ratio: float) -> float:
    if not ratio > 0:
        raise ValueError(f"scale_schedule_ratio must be more than 0, got {ratio}.")
    return ratio


def _scaled(duration: Time, ratio: float) -> Time:
    if duration.unit is TimeUnit.DURATION:
        raise ValueError(f"max_duration cannot be a fraction of itself, got {duration}; say e.g. '10ep'.")
    scaled = duration * _check_ratio(ratio)
    if scaled.value <= 0:
        raise ValueError(f"max_duration must be more than 0, got {duration} times scale_schedule_ratio={ratio}.")
    return scaled


def _refuse_several_processes() -> None:
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise NotImplementedError(
            "Trainer does not train over several processes yet, and WORLD_SIZE is "
            f"{os.environ['WORLD_SIZE']}. Start one process."
        )


def _default_optimizer(model: nn.Module) -> Optimizer:
    warnings.warn(
        "optimizers was not given: training with torch.optim.SGD(model.parameters(), lr=0.1). "
        "Give the optimizer that suits the model.",
        UserWarning,
        stacklevel=3,
    )
    return torch.optim.SGD(model.parameters(), lr=0.1)


def _to_evaluators(given: EvalData) -> list[Evaluator]:
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


def _as_list(given: T | Iterable[T] | None) -> list[T]:
    if given is None:
        return []
    return list(given) if isinstance(given, Iterable) and not isinstance(given, str) else [given]


def _made_up_name() -> str:
    return f"{datetime.datetime.now(tz=datetime.UTC):%Y%m%d-%H%M%S}-{secrets.token_hex(3)}"


def _plain(value: Any) -> Any:
    return value if isinstance(value, (bool, int, float, str, type(None))) else str(value)
