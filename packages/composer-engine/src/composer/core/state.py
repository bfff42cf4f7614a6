"""The state of a run, which algorithms and callbacks read and change.

:class:`State` converts what is assigned to it. Each field states its lifetime, and the functions below where that ends;
:mod:`composer.core.saving.saved_state` saves what is ``saved``. The loop of a trainer or a host creates a state,
advances its clock, and sets the fields of a step.
"""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, cast, runtime_checkable

import attrs
import torch
from torch.optim import Optimizer

from composer.core.base import Algorithm, Callback, rebuild_algorithm, run_surgery
from composer.core.checks import calling_function, check_run_name
from composer.core.data.batches import Batch, BatchKey, batch_get, batch_set
from composer.core.data.spec import DataSpec, ensure_data_spec, length_of
from composer.core.evaluator import Evaluator, MetricValues, ensure_evaluator
from composer.core.former import FormerState, to_batches, to_device, with_former
from composer.core.logger import Logger
from composer.core.observable_list import ObservableList
from composer.core.precision import Precision
from composer.core.saving import model_state, saved_state
from composer.core.saving.codec import to_data
from composer.core.saving.components import by_key, saved_fields
from composer.core.saving.randomness import derive_seed
from composer.core.time import Time, Timestamp, TimeUnit
from composer.functional.dtensors import rank_and_processes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from torch.optim.lr_scheduler import LRScheduler

    from composer.core.passes import AlgorithmPass, Passes
    from composer.core.saving.saved_state import LoadReport

STOPPED_BY_SIGNAL = "stopped by a signal"
"""The ``stop_reason`` of a training that is expected to be resumed, as opposed to one that is stopped for good."""

Got_co = TypeVar("Got_co", covariant=True)
Given_contra = TypeVar("Given_contra", contravariant=True)


@runtime_checkable
class SupportsTraining(Protocol):
    """The interface of a model: it is called with a batch, and ``loss`` computes the loss of its outputs."""

    def __call__(self, batch: Batch, /) -> Any:
        """Return the outputs for a batch."""

    def loss(self, outputs: Any, batch: Batch) -> Any:
        """Return the loss of the outputs."""


def _saved(*, kept: bool = False, **options: Any) -> Any:
    """A field that is saved in a checkpoint; if ``kept``, loading does not replace a value that the program has set."""
    return attrs.field(metadata={"lifetime": "saved", "kept": kept}, **options)


def _live(**options: Any) -> Any:
    """A field that lives as long as the process; the next process creates it again."""
    return attrs.field(metadata={"lifetime": "live"}, kw_only=options.pop("kw_only", True), **options)


def _step(**options: Any) -> Any:
    """A field of the last batch, or of the last change of a clock, which is not saved with the state."""
    return attrs.field(metadata={"lifetime": "step"}, init=False, **options)


def _cache() -> Any:
    """A field that is derived from others, and computed again when it is needed.

    ``_owners``, the keys of components by their ids, is discarded when a component is added, removed or replaced.
    ``_generators`` has a generator for each owner, and the batch and microbatch that it is seeded for; it is seeded
    again for another one, and after :meth:`State.restart_draws`, which a load calls.
    """
    return attrs.field(metadata={"lifetime": "cache"}, init=False, factory=dict)


def _instances_of(kind: type, parameter: str) -> Any:
    def check(item: object) -> None:
        if isinstance(item, type):
            raise TypeError(f"{parameter} must be objects, got the class {item.__name__}; write {item.__name__}().")
        if not isinstance(item, kind):
            raise TypeError(f"{parameter} must be {kind.__name__} objects, got {item!r}.")

    return lambda items: ObservableList(_as_sequence(items), check)


def _as_sequence(items: Any) -> tuple[Any, ...]:
    if items is None:
        return ()
    return tuple(items) if isinstance(items, (list, tuple)) else (items,)


def _to_optimizers(optimizers: Optimizer | Sequence[Optimizer] | None) -> tuple[Optimizer, ...]:
    checked: tuple[Optimizer, ...] = _as_sequence(optimizers)
    for optimizer in checked:
        if not isinstance(optimizer, Optimizer):
            raise TypeError(f"optimizers must be torch.optim.Optimizer objects, got {optimizer!r}.")
    return checked


def _to_metric_values(values: Mapping[str, Any]) -> MetricValues:
    return MetricValues(values)


class _Converted(Protocol[Got_co, Given_contra]):
    """A property that converts the values that it is set to."""

    def __get__(self, state: State, owner: type, /) -> Got_co: ...
    def __set__(self, state: State, value: Given_contra, /) -> None: ...


def _converted(field: str, convert: Callable[[Given_contra], Got_co], doc: str) -> _Converted[Got_co, Given_contra]:
    accessor: Any = property(
        operator.attrgetter(field), lambda state, value: setattr(state, field, convert(value)), doc=doc
    )
    return cast("_Converted[Got_co, Given_contra]", accessor)


_to_algorithms = _instances_of(Algorithm, "algorithms")
_to_callbacks = _instances_of(Callback, "callbacks")
_to_data_spec = attrs.converters.optional(ensure_data_spec)


def _to_max_duration(given: Time | str | int | None) -> Time | None:
    if given is None:
        return None
    duration = Time.from_input(given, TimeUnit.EPOCH, name="max_duration")
    if duration.unit is TimeUnit.DURATION or duration.value < 0:
        raise ValueError(f"max_duration must be a length of time such as '10ep', 0 or more, got {given!r}.")
    return duration


def _to_iteration_length(given: Time | str | int) -> Time:
    length = Time.from_input(given, TimeUnit.EPOCH, name="iteration_length")
    if length.unit is not TimeUnit.EPOCH or length.value < 1:
        raise ValueError(f"iteration_length must be a number of epochs, at least 1, got {given!r}.")
    return length


def _to_evaluators(evaluators: Any) -> list[Evaluator]:
    return [ensure_evaluator(evaluator) for evaluator in _as_sequence(evaluators)]


# No field has an on_setattr of its own: with one, attrs sets every field of every step by a Python function.
@attrs.define(eq=False, repr=False, on_setattr=attrs.setters.NO_OP)
class State(FormerState):
    """The state of a run. The metadata of each field states its lifetime: ``saved``, ``live``, ``step`` or ``cache``.

    Args:
        model: The model to train; it is called with a batch, and its ``loss`` with the outputs and the batch.
        rank_zero_seed: The seed of the run.
        run_name: The name of the run, which is filled into the names of folders; it cannot lead out of them.
        device: The device of the model.
        max_duration: The duration of the training: a time, a string (``"10ep"``) or a number of epochs.
        device_train_microbatch_size: Samples in a microbatch; None does not split batches.
        auto_microbatching: Whether that size is determined automatically.
        train_dataloader, evaluators: The data for training, a loader or a :class:`DataSpec`, and for evaluation.
        dataloader, dataloader_len: The loader in use, and the batches in an epoch of it; its length if None.
        optimizers, schedulers: One or several; stored as tuples.
        precision, scaler: The precision in which the model computes, and what scales the loss for 16-bit floats.
        algorithms, callbacks: One or several; stored as lists whose changes the engine observes.
        iteration_length: The length of an iteration, in epochs.
        forward: ``f(batch) -> outputs``, for a model that is not called with a batch; the model itself if None.
        loss_function: ``f(outputs, batch) -> loss``, for a model without ``loss``; ``model.loss`` if None.
        data_rank: The rank in the seeds of :meth:`generator`, if processes with different ranks train on the same
            samples, as with tensor parallelism; ``rank`` if None.
        gather: ``f(value)`` returns the values of all processes with different samples, by their rank among those. Only
            a loop sets it that weights each process's loss by its number of samples in ``batch``, and by 0 if
            ``batch_counts`` is False; None in other loops.

    Attributes:
        timestamp: The clock, which the loop advances after each batch: ``timestamp.to_next_batch(samples=32)``.
        previous_timestamp: The clock before it was advanced last, from which :meth:`Interval.is_due` decides.
        microbatch: The index of the microbatch, -1 before the batch is split, -2 between batches. The loop sets it; the
            seeds of :meth:`generator` depend on it and on the clock.
        batch_counts: False if this process has no sample to train on, and only takes part in the step of others.
        loss_share: What a mean over this batch is multiplied by in ``loss``: the labels of the batch / those of all
            batches that a host divides the loss by; otherwise 1.
        microbatch_weight: The weight of the loss of the microbatch in the gradients.
        outputs: What the model returned for the batch: at the events up to ``AFTER_LOSS``, and up to the next forward
            pass if there are training metrics, or a component that is not of this library runs at a later event of
            the batch. Otherwise it is None from the backward pass on, whose memory it would take.
        train_metrics: The training metrics by name, which contain the last epoch until the next one begins.
        total_loss: The loss of the last batch. In several processes it is the mean over all from ``BATCH_END`` on, as
            in logs, and before this the part of it that this process adds.
        total_loss_dict: The losses of the last batch by their names in logs, means over all processes.
        metric_outputs: The last return value of ``update_metric``, or ``{}``.
        stop_reason: Why :meth:`stop_training` was called last; None in a training that it has not ended.

    Raises:
        TypeError: An optimizer, algorithm or callback is of another type, or a class instead of an object.
        ValueError: A time or precision is invalid, or ``max_duration`` is negative or a fraction.

    Example:
        >>> state = State(model=torch.nn.Linear(2, 2), max_duration="10ep", rank_zero_seed=17)
        >>> state.max_duration, state.timestamp.epoch, state.seed
        (Time(10, TimeUnit.EPOCH), Time(0, TimeUnit.EPOCH), 17)
    """

    model: Any = _live(kw_only=False)
    rank_zero_seed: int = _saved(default=0)
    run_name: str = _saved(default="run", kept=True, validator=lambda _, __, name: check_run_name(name))
    device: torch.device = _live(default="cpu", kw_only=False, converter=to_device)
    _max_duration: Time | None = _saved(default=None, kept=True, kw_only=True, converter=_to_max_duration)
    device_train_microbatch_size: int | None = _live(default=None)
    auto_microbatching: bool = _live(default=False)
    _train_data_spec: DataSpec | None = _live(default=None, converter=_to_data_spec, alias="train_dataloader")
    _evaluators: list[Evaluator] = _live(default=None, converter=_to_evaluators)
    dataloader: Iterable[Batch] | None = _live(default=None)
    dataloader_label: str | None = _live(default=None)
    _dataloader_len: int | None = _live(default=None, converter=to_batches)
    _precision: Precision = _live(default=Precision.FP32, converter=Precision)
    _optimizers: tuple[Optimizer, ...] = _live(default=None, converter=_to_optimizers)
    _schedulers: tuple[LRScheduler, ...] = _live(default=None, converter=_as_sequence)
    scaler: torch.amp.GradScaler | None = _live(default=None)
    _algorithms: ObservableList[Algorithm] = _live(default=None, converter=_to_algorithms)
    _callbacks: ObservableList[Callback] = _live(default=None, converter=_to_callbacks)
    _iteration_length: Time = _live(default="1ep", converter=_to_iteration_length)
    rank: int = _live(factory=lambda: rank_and_processes()[0])
    forward: Callable[[Batch], Any] | None = _live(default=None)
    loss_function: Callable[..., Any] | None = _live(default=None)
    data_rank: int | None = _live(default=None)
    gather: Callable[[Any], list[Any]] | None = _live(default=None)

    timestamp: Timestamp = _saved(factory=Timestamp, init=False)
    train_metrics: dict[str, Any] = _live(factory=dict, init=False)
    eval_metrics: dict[str, dict[str, Any]] = _live(factory=dict, init=False)
    train_metric_values: dict[str, Any] = _saved(factory=dict, init=False)
    _eval_metric_values: dict[str, Any] = _saved(factory=MetricValues, init=False, converter=MetricValues)
    profiler: Any = _live(default=None, init=False)
    stop_reason: str | None = _live(default=None, init=False)

    batch: Batch = _step(default=None)
    batch_counts: bool = _step(default=True)
    loss_share: float | torch.Tensor = _step(default=1.0)
    outputs: Any = _step(default=None)
    metric_outputs: Any = _step(factory=dict)
    loss: Any = _step(default=None)
    total_loss: Any = _step(default=None)
    total_loss_dict: Mapping[str, float] = _step(factory=dict)
    microbatch: int = _step(default=-1)
    microbatch_weight: float | torch.Tensor = _step(default=1.0)
    previous_timestamp: Timestamp = _step(factory=Timestamp)
    eval_timestamp: Timestamp = _step(factory=Timestamp)
    predict_timestamp: Timestamp = _step(factory=Timestamp)

    _listeners: list[Callable[[], None]] = _live(factory=list, init=False)
    _owners: dict[int, str] = _cache()
    _generators: dict[str, tuple[int, int, torch.Generator]] = _cache()

    def __attrs_post_init__(self) -> None:
        for components in (self._algorithms, self._callbacks):
            components.on_change.append(self._components_changed)
        if self._dataloader_len is None or self._dataloader_len == -1:
            self.dataloader_len = length_of(self.dataloader)

    def _components_changed(self) -> None:
        # Keys are numbered within a class, so that one change may renumber others.
        self._owners.clear()
        for call in self._listeners:
            call()

    def on_components_change(self, call: Callable[[], None]) -> None:
        """Call ``call()`` whenever an algorithm or callback is added, removed or replaced."""
        self._listeners.append(call)

    @property
    def algorithms(self) -> ObservableList[Algorithm]:
        """The algorithms, in the order in which they were passed."""
        return self._algorithms

    @algorithms.setter
    def algorithms(self, algorithms: Algorithm | Iterable[Algorithm] | None) -> None:
        self._algorithms[:] = _to_algorithms(algorithms)

    @property
    def callbacks(self) -> ObservableList[Callback]:
        """The callbacks, in the order in which they were passed."""
        return self._callbacks

    @callbacks.setter
    def callbacks(self, callbacks: Callback | Iterable[Callback] | None) -> None:
        self._callbacks[:] = _to_callbacks(callbacks)

    optimizers = _converted("_optimizers", _to_optimizers, "The optimizers.")
    dataloader_len = _converted("_dataloader_len", to_batches, "The number of batches in an epoch; None if unknown.")
    schedulers = _converted("_schedulers", _as_sequence, "The learning rate schedulers.")
    max_duration = _converted("_max_duration", _to_max_duration, "The duration of the training.")
    iteration_length = _converted("_iteration_length", _to_iteration_length, "The length of an iteration, in epochs.")

    @property
    def train_dataloader(self) -> Iterable[Batch] | None:
        """The loader of the training data."""
        return None if self._train_data_spec is None else self._train_data_spec.dataloader

    @train_dataloader.setter
    def train_dataloader(self, dataloader: DataSpec | Iterable[Batch] | None) -> None:
        self._train_data_spec = _to_data_spec(dataloader)

    @property
    def train_data_spec(self) -> DataSpec | None:
        """The loader of the training data, with functions that count and split its batches."""
        return self._train_data_spec

    evaluators = _converted("_evaluators", _to_evaluators, "The evaluators.")
    eval_metric_values = _converted(
        "_eval_metric_values", _to_metric_values, "The latest values of the evaluators' metrics, by label and name."
    )
    precision = _converted("_precision", Precision, "The precision in which the model computes.")

    @property
    def seed(self) -> int:
        """The seed of this process: that of the run plus the rank among those with different samples."""
        return self.rank_zero_seed + (self.rank if self.data_rank is None else self.data_rank)

    def set_dataloader(
        self,
        dataloader: Iterable[Batch] | None = None,
        dataloader_label: str | None = None,
        dataloader_len: int | None = -1,
    ) -> None:
        """Set the loader in use.

        Args:
            dataloader: The loader.
            dataloader_label: Its name.
            dataloader_len: The number of batches in an epoch; None if it is unknown, -1 for the length of the loader.
        """
        self.dataloader, self.dataloader_label = dataloader, dataloader_label
        self.dataloader_len = length_of(dataloader) if dataloader_len == -1 else dataloader_len

    def get_elapsed_duration(self) -> Time | None:
        """Return the completed fraction of the training, ``Time(0.25, "dur")``; None if ``max_duration`` is not set.

        The completed part of the current epoch counts if ``dataloader_len`` is known.
        """
        whole = self._max_duration
        if whole is None:
            return None
        done: float = self.timestamp.count(whole.unit)
        if whole.unit is TimeUnit.EPOCH and self.dataloader_len:
            # A loader may return more batches than its length.
            done += min(1.0, self.timestamp.count(TimeUnit.BATCH, in_epoch=True) / self.dataloader_len)
        return Time(done / whole.value if whole.value else 1.0, TimeUnit.DURATION)

    def has_reached(self, moment: Time) -> bool:
        """Return whether the training has reached ``moment``, which may be a duration (``Time(0.7, "dur")``).

        Raises:
            ValueError: ``moment`` is a duration, and ``max_duration`` is not set.
        """
        if moment.unit is not TimeUnit.DURATION:
            return self.timestamp.count(moment.unit) >= moment.value
        elapsed = self.get_elapsed_duration()
        if elapsed is None:
            raise ValueError(
                f"{moment} is a fraction of State.max_duration, which is not set; set e.g. max_duration='10ep'."
            )
        return elapsed.value >= moment.value

    def stop_training(self, reason: str | None = None) -> None:
        """End the training after this batch, or when all processes have agreed; None as reason names the caller."""
        self.stop_reason = reason or f"state.stop_training() called by {calling_function()}"
        if self.gather is None:  # a duration that is reached already, in a unit that every loop counts
            self._max_duration = self.timestamp.batch

    def compute_outputs(self, batch: Batch) -> Any:
        """Return the model's outputs for a batch."""
        return self.model(batch) if self.forward is None else self.forward(batch)

    def compute_loss(self, outputs: Any, batch: Batch, **options: Any) -> Any:
        """Return the loss of the model's outputs; ``options`` are further arguments of the loss."""
        loss = self.model.loss if self.loss_function is None else self.loss_function
        return loss(outputs, batch, **options)

    def batch_get_item(self, key: BatchKey) -> Any:
        """Return an item of the batch; see :func:`batch_get`."""
        return batch_get(self.batch, key)

    def batch_set_item(self, key: BatchKey, value: Any) -> None:
        """Replace an item of the batch; see :func:`batch_set`."""
        self.batch = batch_set(self.batch, key, value)

    def generator(self, owner: object, microbatch: int | None = None) -> torch.Generator:
        """Return the owner's random generator for this batch.

        It is seeded from the run's seed, the rank, the owner, the batch and the microbatch. It continues within a
        microbatch and restarts with the next one, so that no draw depends on earlier ones and nothing has to be saved.

        Args:
            owner: An algorithm or callback, or any name. One that does not belong to this state, such as an algorithm
                whose ``apply`` is called by the loop itself, draws as the only one of its class would; several such of
                one class share a generator.
            microbatch: The number of the microbatch, if it is not that in ``state.microbatch``.

        Returns:
            A generator on the CPU.

        Example:
            >>> state = State(model=None)
            >>> torch.rand(1, generator=state.generator("me")) == torch.rand(1, generator=state.generator("me"))
            tensor([False])
        """
        key = owner if isinstance(owner, str) else self._owners.get(id(owner)) or self._drawing_key(owner)
        batch, microbatch = self.timestamp.counts.batch, self.microbatch if microbatch is None else microbatch
        known = self._generators.get(key)
        if known is not None and known[0] == batch and known[1] == microbatch:
            return known[2]
        generator = torch.Generator() if known is None else known[2]
        # Formatted here, as derive_seed would do it: this takes half the time.
        rank = self.rank if self.data_rank is None else self.data_rank
        generator.manual_seed(derive_seed(f"{self.rank_zero_seed}/{rank}/{key}/{batch}/{microbatch}"))
        self._generators[key] = (batch, microbatch, generator)
        return generator

    def state_dict(self) -> dict[str, Any]:
        """Return what a later run needs to continue, as plain data and tensors; containers are copied, tensors are not.

        - ``version``: of this schema.
        - The fields that are ``saved``: ``timestamp``, ``rank_zero_seed``, ``run_name``, ``max_duration`` (``"10ep"``),
          ``train_metric_values``, ``eval_metric_values``.
        - ``algorithms`` and ``callbacks``: for each its ``key`` (see :meth:`component_key`), ``name`` (of its class),
          ``settings`` and ``state``; for an algorithm also whether it is ``required_on_load``.
        - ``schedulers`` and ``scaler``: their state.
        - ``model`` and ``optimizers``, if there is a model: see :meth:`get_model_state_dict` and
          :meth:`get_optim_state_dict`. :meth:`load_state_dict` loads what is left of them.
        - ``metadata``: the versions, the device, the precision and the numbers of processes and samples, which are not
          loaded.

        Raises:
            NotSerializableError: The state contains something that is neither data nor a tensor. A *setting* that is no
                data, such as a function, is only described, and a later run must be passed it again.

        Example:
            >>> state = State(model=None, max_duration="10ep")
            >>> state.state_dict()["max_duration"], state.state_dict()["timestamp"]["epoch"]
            ({'$time': '10ep'}, 0)
        """
        return with_former(to_data(saved_state.state_to_save(self)), self)

    @property
    def serialized_attributes(self) -> tuple[str, ...]:
        """The names of what a checkpoint contains of a run, read-only; see ``save_ignore_keys`` of the trainer."""
        return ("model", "optimizers", *saved_fields(type(self)), "algorithms", "callbacks", "schedulers", "scaler")

    def check_state_dict(self, state: Mapping[str, Any], strict: bool = False) -> LoadReport:
        """Return the report of :meth:`load_state_dict`, and change nothing.

        Algorithms that the saved weights need and this run lacks are not constructed: the saved weights are compared
        with the present model.

        Raises:
            StateMismatchError: As raised by :meth:`load_state_dict`.
        """
        return saved_state.compare(self, saved_state.decode_state(state), strict=strict)

    def load_state_dict(
        self,
        state: Mapping[str, Any],
        logger: Logger | None = None,
        strict: bool = False,
        exclude_algorithms: Sequence[str] | None = None,
        algorithm_passes: Passes = None,
    ) -> LoadReport:
        """Load what :meth:`state_dict` returned; everything is checked before anything is loaded.

        Components are matched by their keys. The run keeps its ``run_name`` and, if it is set, its ``max_duration``;
        the seed is that of the saved run, so that its random draws continue.

        Args:
            state: The saved state; ``model`` and ``optimizers`` in it, as of :meth:`get_model_state_dict` and
                :meth:`get_optim_state_dict`, are loaded, too.
            logger: The logger of algorithms that are constructed again.
            strict: Whether missing or unexpected components and weights, and settings that differ, raise an error;
                otherwise one warning lists them.
            exclude_algorithms: Names or keys of algorithms not to construct for the model's weights.
            algorithm_passes: Passes that order the constructed ones; as for :class:`Engine`.

        Returns:
            What was restored, and what differs.

        Raises:
            StateMismatchError: The state does not fit. The error lists all reasons, and nothing has been loaded.

        Example:
            >>> saved = State(model=None, rank_zero_seed=17).state_dict()
            >>> later = State(model=None)
            >>> report = later.load_state_dict(saved)
            >>> later.rank_zero_seed, report.differences
            (17, ())
        """
        options: dict[str, Any] = {"excluded": exclude_algorithms or (), "passes": algorithm_passes, "logger": logger}
        return saved_state.load(self, saved_state.decode_state(state), strict=strict, **options)

    def get_model_state_dict(self) -> dict[str, Any]:
        """Return the model's weights by their names in the unwrapped model; they are not copied."""
        return model_state.weights(self.model)

    def get_optim_state_dict(self) -> dict[str, Any]:
        """Return each optimizer's state, with the names of parameters in place of their indices; it is not copied.

        The keys are the classes of the optimizers, numbered from the second of a class on (``"SGD"``, ``"SGD.1"``).
        Optimizers that an algorithm wraps around them, such as SAM's, are ignored.

        Raises:
            NotSerializableError: An optimizer contains something that is neither data nor a tensor.
        """
        return model_state.optimizer_states(self.model, self.optimizers)

    def rebuild_algorithm(self, name: str, settings: Mapping[str, Any]) -> Algorithm:
        """Return :func:`composer.core.rebuild_algorithm` of a saved name and settings; loading calls it."""
        return rebuild_algorithm({"name": name, "settings": settings})

    def after_surgery(
        self, algorithms: Sequence[Algorithm], passes: Sequence[AlgorithmPass], logger: Logger | None = None
    ) -> State:
        """Return this state with these algorithms only, after they have changed its model; loading calls it."""
        only: dict[str, Any] = {"algorithms": algorithms, "callbacks": ()}  # converted, as by the constructor
        changed = attrs.evolve(self, **only)
        run_surgery(changed, Logger(changed) if logger is None else logger, passes)
        return changed

    def restart_draws(self) -> None:
        """Seed every generator again before its next draw, as when a batch is computed a second time in one step."""
        for key, (_, _, generator) in self._generators.items():
            self._generators[key] = (-1, -1, generator)

    def component_key(self, component: Algorithm | Callback) -> str:
        """Return the key of a component: its class, with a number for the second of a class (``"CutOut.1"``).

        Raises:
            ValueError: The component does not belong to this state.
        """
        key = self._keys().get(id(component))
        if key is None:
            raise ValueError(f"{component!r} is neither among the algorithms nor the callbacks of this state. Add it.")
        return key

    def _drawing_key(self, owner: object) -> str:
        keys, name = self._keys(), type(owner).__name__
        # Not stored: another object may have the same id once this one is deleted.
        return keys.get(id(owner), f"{name} of no state" if name in keys.values() else name)

    def _keys(self) -> dict[int, str]:
        if not self._owners:
            components = by_key((*self._algorithms, *self._callbacks))
            self._owners.update({id(component): key for key, component in components.items()})
        return self._owners

    def __repr__(self) -> str:
        return (
            f"State(run_name={self.run_name!r}, model={type(self.model).__name__}, device={str(self.device)!r}, "
            f"epoch={self.timestamp.count(TimeUnit.EPOCH)}, batch={self.timestamp.count(TimeUnit.BATCH)}, "
            f"max_duration={self._max_duration}, algorithms={self._algorithms!r})"
        )
