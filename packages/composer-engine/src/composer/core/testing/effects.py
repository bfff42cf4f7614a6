"""Observing an algorithm: the fields of the state that it reads and writes, where it runs, and what it draws."""

from __future__ import annotations

import functools
import operator
import random
import sys
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from typing import TYPE_CHECKING, Any, TypeAlias

import attrs
import torch
from torch import Tensor, nn

from composer.core.data.batches import batch_get, batch_set
from composer.core.declarations import ALWAYS_SERVED, FIELDS
from composer.core.engine import Engine
from composer.core.event import MODEL_EVENTS, Event
from composer.core.time import TimeUnit
from composer.functional.nested import rebuild

if TYPE_CHECKING:
    from composer.core.base import Algorithm
    from composer.core.logger import Logger
    from composer.core.plan import Entry
    from composer.core.state import State

_MEANINGS: Mapping[str, frozenset[str]] = {
    "compute_outputs": frozenset({"model"}),
    "eval_metric_values": frozenset({"eval_metrics"}),
    "eval_timestamp": frozenset({"timestamp"}),
    "get_elapsed_duration": frozenset({"timestamp", "max_duration", "dataloader_len"}),
    "predict_timestamp": frozenset({"timestamp"}),
    "previous_timestamp": frozenset({"timestamp"}),
    "has_reached": frozenset({"timestamp", "max_duration", "dataloader_len"}),
    "set_dataloader": frozenset(),
    "stop_training": frozenset({"timestamp"}),
    "total_loss": frozenset({"loss"}),
    "total_loss_dict": frozenset({"loss"}),
    "train_data_spec": frozenset({"train_dataloader"}),
    "train_metric_values": frozenset({"train_metrics"}),
}
_NAMES_OF_TARGETS = frozenset({"label", "labels", "target", "targets", "y"})
_MISSING = object()


@attrs.define
class Effects:
    """The fields that were read and written, as in ``Algorithm.reads`` and ``Algorithm.writes``.

    Args:
        reads: The fields that were read.
        writes: The fields that were changed.

    Example:
        >>> Effects({"loss"}) | Effects(writes={"loss"})
        Effects(reads={'loss'}, writes={'loss'})
    """

    reads: set[str] = attrs.field(factory=set)
    writes: set[str] = attrs.field(factory=set)

    def __or__(self, other: Effects) -> Effects:
        return Effects(self.reads | other.reads, self.writes | other.writes)


class RecordingState:
    """A view of a :class:`~composer.core.State` that records which fields are read.

    After ``inputs, targets = state.batch`` those tensors count as read with which anything is computed; an item from
    ``state.batch_get_item(0)`` counts as read. Writes are recorded by :func:`observe`, which compares the state before
    and after.

    Args:
        state: The state.
        algorithm: Its ``input_key`` and ``target_key`` are the input and the target of a batch. Without them the first
            item is the input and the second the target; in a dictionary ``"labels"`` and the like are the target, and
            the rest is input.

    Example:
        >>> from composer.core import State
        >>> view = RecordingState(State(model=None))
        >>> view.timestamp.epoch, view.get_elapsed_duration()
        (Time(0, TimeUnit.EPOCH), None)
        >>> sorted(view.effects.reads)
        ['dataloader_len', 'max_duration', 'timestamp']
    """

    effects: Effects
    generators: list[tuple[object, torch.Generator]]

    def __init__(self, state: State, algorithm: Algorithm | None = None) -> None:
        vars(self).update(effects=Effects(), generators=[], _state=state, _algorithm=algorithm)

    def __getattr__(self, name: str) -> Any:
        self.effects.reads |= {name} if name in FIELDS | ALWAYS_SERVED else _MEANINGS.get(name, set())
        return getattr(self._state, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._state, name, _unwrapped(value))

    @property
    def batch(self) -> Any:
        """The batch, with tensors that record when they are used."""
        batch = self._state.batch
        wrapped = _map_items(batch, self._wrapped, self._algorithm)
        if wrapped is _MISSING:
            self.effects.reads.update(_items(batch, self._algorithm))
            return batch
        return wrapped

    @batch.setter
    def batch(self, batch: Any) -> None:
        self._state.batch = _unwrapped(batch)

    def generator(self, owner: object, microbatch: int | None = None) -> torch.Generator:
        """Return the generator of an owner, and record the owner."""
        generator: torch.Generator = self._state.generator(owner, microbatch)
        self.generators.append((owner, generator))
        return generator

    def compute_loss(self, outputs: Any, batch: Any, **options: Any) -> Any:
        """Return the loss of the model's outputs, and record the model, or the loss of each sample, as read."""
        self.effects.reads |= {"model", "losses"} if options.get("reduction") == "none" else {"model"}
        return self._state.compute_loss(outputs, batch, **options)

    def batch_get_item(self, key: Any) -> Any:
        """Return an item of the batch, and record it as read."""
        item = self._state.batch_get_item(key)
        fields = [name for name, value in _items(self._state.batch, self._algorithm).items() if value is item]
        self.effects.reads.update(fields or [f"batch.{key}"])
        return item

    def batch_set_item(self, key: Any, value: Any) -> None:
        """Replace an item of the batch."""
        self._state.batch_set_item(key, _unwrapped(value))

    def _wrapped(self, name: str, item: Any) -> Any:
        if isinstance(item, Tensor):
            return _wrap(item, lambda: self.effects.reads.add(name))
        self.effects.reads.add(name)
        return item


class _Noting(Tensor):
    """A tensor that records when anything is computed from it; the computation uses the original."""

    original: Tensor
    note: Callable[[], None]

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:

        def use(value: Any) -> Any:
            if isinstance(value, _Noting):
                vars(value)["note"]()
                return vars(value)["original"]
            return value

        return func(*_mapped(args, use), **_mapped(kwargs or {}, use))


def _wrap(tensor: Tensor, note: Callable[[], None]) -> Tensor:
    wrapped = tensor.detach().as_subclass(_Noting)
    vars(wrapped).update(original=tensor, note=note)
    return wrapped


def _unwrapped(value: Any) -> Any:
    return _mapped(value, lambda one: vars(one)["original"] if isinstance(one, _Noting) else one)


def _mapped(value: Any, change: Callable[[Any], Any]) -> Any:
    """Return a value with all items of its tuples, lists and dictionaries changed, or the value if none changes."""
    if not isinstance(value, (tuple, list, MutableMapping)):
        return change(value)
    items = [*(value.values() if isinstance(value, MutableMapping) else value)]
    changed = [_mapped(item, change) for item in items]
    return value if all(map(operator.is_, changed, items)) else rebuild(value, changed)


def observe(state: State, algorithm: Algorithm, act: Callable[[RecordingState], object]) -> Effects:
    """Return the fields of a state that a function reads and writes.

    Args:
        state: The state.
        algorithm: Its ``input_key`` and ``target_key`` are the input and the target of a batch.
        act: The function; it is called with a :class:`RecordingState`.

    Example:
        >>> from composer.core import State
        >>> state = State(model=None)
        >>> state.loss = torch.tensor(2.0)
        >>> def halve(state):
        ...     state.loss = state.loss / 2
        >>> observe(state, None, halve)
        Effects(reads={'loss'}, writes={'loss'})
    """
    before = dict(_content(state, algorithm))
    view = RecordingState(state, algorithm)
    act(view)
    after = dict(_content(state, algorithm))
    view.effects.writes = {
        field for field in {*before, *after} if before.get(field, _MISSING) != after.get(field, _MISSING)
    }
    return view.effects


def _items(batch: Any, algorithm: Algorithm | None) -> dict[str, Any]:
    """Return the items of a batch by field; a list of them if a field has several."""
    items: dict[str, list[Any]] = {}

    def collect(name: str, item: Any) -> Any:
        items.setdefault(name, []).append(item)
        return item

    if _map_items(batch, collect, algorithm) is _MISSING:
        for name, default in (("input", 0), ("target", 1)):
            key = getattr(algorithm, f"{name}_key", default)
            try:
                collect(f"batch.{name}", batch_get(batch, key))
            except KeyError:
                continue
    return {name: values[0] if len(values) == 1 else values for name, values in items.items()}


def _map_items(batch: Any, change: Callable[[str, Any], Any], algorithm: Algorithm | None) -> Any:
    """Return the batch with each item replaced by ``change(field, item)``; ``_MISSING`` if its items are unknown."""
    keys = {name: getattr(algorithm, f"{name}_key", None) for name in ("input", "target")}
    if any(isinstance(key, tuple) for key in keys.values()):
        return _MISSING
    if batch is None or isinstance(batch, Tensor):
        return batch if batch is None else change("batch.input", batch)
    if isinstance(batch, (tuple, list)):
        names = getattr(batch, "_fields", range(len(batch)))
        fields = {place: _field_of(name, place, len(batch), keys) for place, name in enumerate(names)}
    elif isinstance(batch, MutableMapping):
        fields = {key: _field_of(key, None, 0, keys) for key in batch}
    else:
        return _MISSING
    for key, field in fields.items():
        batch = batch_set(batch, key, _mapped(batch_get(batch, key), functools.partial(change, field)))
    return batch


def _field_of(key: Any, place: int | None, size: int, keys: Mapping[str, Any]) -> str:
    """Return the field of the item with a key and, unless the batch is a dictionary, a place."""
    names = (key,) if place is None else (key, place, place - size)
    for name, own in keys.items():
        if own is not None and own in names:
            return f"batch.{name}"
    if keys["target"] is None and (key in _NAMES_OF_TARGETS if place is None else place == 1):
        return "batch.target"
    if keys["input"] is None and (place is None or place == 0):
        return "batch.input"
    return f"batch.{key}"


def _content(state: State, algorithm: Algorithm | None) -> Iterator[tuple[str, Any]]:
    """Yield the current content of a state by field."""
    for name, item in _items(state.batch, algorithm).items():
        yield name, _frozen(item)
    yield "outputs", _frozen(state.outputs)
    yield "loss", _frozen((state.loss, state.total_loss))
    yield "model", _frozen_model(state.model)
    yield "gradients", [_frozen(one.grad) for _, one in _parameters(state.model) if one.grad is not None]
    yield "optimizers", [_frozen_optimizer(optimizer) for optimizer in state.optimizers]
    yield "train_dataloader", _frozen_data(state.train_dataloader)
    for name in ("timestamp", "max_duration", "dataloader_len", "iteration_length"):
        yield name, getattr(state, name)
    for name in ("dataloader", "scaler"):
        yield name, _Identity(getattr(state, name))
    for name in ("schedulers", "evaluators", "algorithms", "callbacks"):
        yield name, [_Identity(one) for one in getattr(state, name)]


@attrs.frozen
class _Identity:
    """An object that equals only itself. The reference keeps its id from being reused."""

    thing: Any = attrs.field(eq=id)


@attrs.frozen(eq=False)
class _Values:
    """A copy of a tensor. A tensor that was written to in between is not equal, even if its values are."""

    tensor: Tensor
    version: int
    values: Tensor
    strides: tuple[int, ...]
    learns: bool

    __hash__ = None  # type: ignore[assignment]

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _Values) or (self.tensor is other.tensor and self.version != other.version):
            return False
        one, two = self.values, other.values
        return (
            (one.dtype, one.shape, one.device, self.strides, self.learns)
            == (two.dtype, two.shape, two.device, other.strides, other.learns)
        ) and torch.allclose(one, two, rtol=0, atol=0, equal_nan=one.is_floating_point() or one.is_complex())


def _frozen(value: Any) -> Any:
    if isinstance(value, Tensor):
        version = -1 if value.is_inference() else value._version  # noqa: SLF001  (torch's own way to see writes)
        return _Values(value, version, value.detach().clone(), value.stride(), value.requires_grad)
    if isinstance(value, (tuple, list)):
        return [_frozen(one) for one in value]
    if isinstance(value, Mapping):
        return {key: _frozen(one) for key, one in value.items()}
    return value if isinstance(value, (bool, int, float, str, type(None), _Identity)) else _Identity(value)


def _frozen_model(model: Any) -> Any:
    if not isinstance(model, nn.Module):
        return _Identity(model)
    modules = [(name, _Identity(module), type(module), _settings(module)) for name, module in model.named_modules()]
    tensors = [(name, _Identity(one), _frozen(one)) for name, one in [*_parameters(model), *model.named_buffers()]]
    return [modules, tensors]


def _settings(module: nn.Module) -> dict[str, Any]:
    """Return the attributes of a module besides tensors and modules; of dictionaries, such as hooks, the values."""
    own = {name: value for name, value in vars(module).items() if name not in {"_parameters", "_buffers", "_modules"}}
    return {
        name: [_Identity(one) for one in value.values()] if isinstance(value, dict) else _frozen(value)
        for name, value in own.items()
        if not isinstance(value, (list, Tensor))
    }


def _parameters(model: Any) -> list[tuple[str, nn.Parameter]]:
    return list(model.named_parameters()) if isinstance(model, nn.Module) else []


def _frozen_optimizer(optimizer: torch.optim.Optimizer) -> Any:
    groups = [{**group, "params": [*map(_Identity, group["params"])]} for group in optimizer.param_groups]
    held = {_Identity(parameter): state for parameter, state in optimizer.state.items()}
    return [_Identity(optimizer), _frozen(groups), _frozen(held)]


def _frozen_data(loader: Any) -> Any:
    """Return a loader and its nested data sets with their attributes; of composed transforms the parts."""
    layers: list[Any] = []
    while loader is not None and len(layers) < 10:
        own = getattr(loader, "__dict__", {})
        layers.append([_Identity(loader), {name: _parts(value) for name, value in own.items()}])
        loader = own.get("dataset")
    return layers


def _parts(value: Any) -> Any:
    inner = getattr(value, "transforms", None)
    return [_Identity(value), *([_Identity(one) for one in inner] if isinstance(inner, (list, tuple)) else [])]


_Moment: TypeAlias = tuple[int, Event]
"""The number of the batch, and the event."""


@attrs.define
class Watch:
    """A record of what an algorithm does in a training, by the engine of ``make_engine``.

    Args:
        algorithm: The algorithm.
        effects: The fields that it read and wrote, by event.
        ran: The batches and events at which it ran.
        draws: For each of these the seed of its generator, and the generator's state after the draws.
        strangers: The generators that it drew from besides its own: those of other owners, and global ones.

    Example:
        >>> from composer.core import Algorithm, Stage, State
        >>> class Halve(Algorithm):
        ...     runs_at = {Event.AFTER_LOSS: Stage.LOSS}
        ...     def apply(self, event, state, logger):
        ...         state.loss = state.loss / 2
        >>> watch, state = Watch(Halve()), State(model=None)
        >>> state.loss = torch.tensor(4.0)
        >>> watch.make_engine(state, algorithms=[watch.algorithm]).run_event("after_loss")
        >>> watch.effects[Event.AFTER_LOSS]
        Effects(reads={'loss'}, writes={'loss'})
    """

    algorithm: Algorithm
    effects: dict[Event, Effects] = attrs.field(factory=dict, init=False)
    ran: list[_Moment] = attrs.field(factory=list, init=False)
    draws: dict[_Moment, list[tuple[int, tuple[int, ...]]]] = attrs.field(factory=dict, init=False)
    strangers: list[str] = attrs.field(factory=list, init=False)

    def make_engine(self, state: State, **options: Any) -> Engine:
        """Return an engine that calls the algorithm with a view of the state."""
        return _WatchingEngine(self, state, **options)

    def total(self) -> Effects:
        """Return the fields that it read and wrote at all events."""
        return functools.reduce(operator.or_, self.effects.values(), Effects())

    def run(self, event: Event, asked: bool, state: State, logger: Logger) -> None:
        """Run the algorithm at an event, and record what it does."""
        moment = (int(state.timestamp.count(TimeUnit.BATCH)), event)

        def act(view: RecordingState) -> None:
            seen: Any = view
            if asked and not self.algorithm.match(event, seen):
                return
            self.ran.append(moment)
            returned: object = self.algorithm.apply(event, seen, logger)
            assert returned is None or isinstance(returned, int), (
                f"{type(self.algorithm).__name__}.apply returned {returned!r} at {event.value!r}; "
                "it may return None, or a whole number for traces."
            )
            self._take_draws(moment, view)

        before = _global_generators()
        self.effects[event] = self.effects.get(event, Effects()) | observe(state, self.algorithm, act)
        # New layers draw their initial weights from torch's global generator, as all layers of torch do.
        if event not in MODEL_EVENTS:
            self.strangers += [name for name, one in _global_generators().items() if one != before[name]]

    def _take_draws(self, moment: _Moment, view: RecordingState) -> None:
        taken = []
        for owner, generator in view.generators:
            if owner is not self.algorithm:
                self.strangers.append(f"state.generator({owner!r})")
            taken.append((generator.initial_seed(), _numbers(generator.get_state())))
        if taken:
            self.draws.setdefault(moment, []).extend(taken)


class _WatchingEngine(Engine):
    """An engine that runs one algorithm by its watch."""

    def __init__(self, watch: Watch, state: State, **options: Any) -> None:
        self._watch = watch
        super().__init__(state, **options)

    def _warn_of_idle(self) -> None:
        """Do nothing, as its calls are counted in ``Watch.ran``."""

    def _call(self, event: Event, order: int, entry: Entry) -> Callable[[], object]:
        if entry.component is self._watch.algorithm:
            return lambda: self._watch.run(event, entry.asked, self.state, self.logger)
        return super()._call(event, order, entry)


def _global_generators() -> dict[str, Any]:
    """Return the states of the global generators by library."""
    numpy = sys.modules.get("numpy")
    states: dict[str, Any] = {"torch": _numbers(torch.get_rng_state()), "random": random.getstate()}
    if numpy:
        kind, keys, place, *rest = numpy.random.get_state()
        states["numpy.random"] = (kind, keys.tobytes(), place, *rest)
    return states


def _numbers(state: torch.Tensor) -> tuple[int, ...]:
    # Comparable without NumPy; eight bytes in one number, as each number is read by itself.
    return tuple(state.view(torch.int64).tolist())
