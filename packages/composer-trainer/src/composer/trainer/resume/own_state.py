"""State in plain attributes of the user's objects: find it once, save it where it has changed, and restore it.

A component with a ``state_dict`` of its own is saved by that. The attributes of others (a dataset that counts, a loss
with a generator, a callback with a list of numbers) are collected when training begins, and compared with their initial
values whenever a checkpoint is saved. Only objects that the same search finds in the new process are restored: a
checkpoint never decides which object is changed, and text is never restored.
"""

from __future__ import annotations

import collections
import enum
import functools
import io
import sys
import types
import warnings
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import attrs
import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from composer.core import NotSerializableError, Serializable
from composer.core.serializable import saved_fields
from composer.core.serialization import at, from_data, plain
from composer.distributed import get_world_size
from composer.functional.nested import leaves
from composer.trainer.resume.attribute_values import (
    MAX_BYTES,
    Mark,
    TextKeys,
    TransientError,
    UnsavedError,
    encoded,
    kind_of,
    mark_of,
    restored,
    text_keys,
)
from composer.trainer.resume.generators import generator_state, is_generator, set_generator_state

__all__ = ["OwnState", "check_own_state", "warn_of_misfits", "without"]

_MAX_DEPTH = 8
_MAX_OBJECTS = 10_000
_MAX_ITEMS = 100
_MAX_NAMED = 10
_PARTS = ("attributes", "generators", "states", "trained")
_OF_MODULES = frozenset(vars(nn.Module())) | {"_compiled_call_impl"}
_NONE = mark_of(None)
_REMEDY = (
    "Keep such state in numbers and tensors that __init__ sets, or give the object state_dict() and load_state_dict(); "
    "the guide 'Stopping and resuming' lists what is saved."
)


class OwnState:
    """The attributes of objects, compared with their values when they were first watched.

    Args:
        replayed: Whether the objects run again from the saved state to the resume point, as samplers do.

    Example:
        >>> import random
        >>> generators, states = [random.Random(3), random.Random(3)], [OwnState(), OwnState()]
        >>> for generator, state in zip(generators, states):
        ...     state.watch({"collate_fn": functools.partial(print, generator)})
        >>> drawn = generators[0].random()
        >>> states[1].load(states[0].to_data())
        []
        >>> generators[0].random() == generators[1].random()
        True
    """

    def __init__(self, *, replayed: bool = False) -> None:
        self._replayed = replayed
        self._holders: dict[str, _Holder] = {}
        self._keepers: dict[str, tuple[Any, Mark | None]] = {}
        self._trained: dict[str, tuple[nn.Parameter, bool]] = {}
        self._reasons: dict[str, str] = {}
        self._reported: set[str] = set()

    def watch(self, roots: Mapping[str, Any], leave_out: Iterable[Any] = ()) -> None:
        """Find all state that the roots refer to. What is new is compared with its current value from now on.

        Args:
            roots: Objects by name. The parameters of the one named ``"model"`` are saved elsewhere.
            leave_out: Objects that are saved elsewhere.
        """
        walk = _Walk(self._replayed, leave_out)
        walk.run(roots)
        known = {id(holder.object): holder for holder in self._holders.values()}
        marks = {id(keeper): mark for keeper, mark in self._keepers.values()}
        self._holders = {}
        for path, found in walk.holders.items():
            holder = known.get(id(found.object), found)
            holder.of_modules = walk.of_modules
            if holder is found:
                found.remember()
            if holder.marks or holder.is_recorded:
                holder.path = path
                self._holders[path] = holder
        self._keepers = {
            path: (keeper, marks[id(keeper)] if id(keeper) in marks else _mark_of_state(keeper))
            for path, keeper in walk.keepers.items()
        }
        model = roots.get("model")
        for name, parameter in model.named_parameters() if isinstance(model, nn.Module) else ():
            if name not in self._trained or self._trained[name][0] is not parameter:
                self._trained[name] = (parameter, parameter.requires_grad)

    def generators(self) -> list[str]:
        """Return the paths of all generators that were found."""
        return [
            holder.place(name)
            for holder in self._holders.values()
            for name, mark in holder.marks.items()
            if mark[0] == "generator"
        ]

    def generator_states(self) -> list[tuple[Any, Any]]:
        """Return all generators that were found and have a state, each with its current one."""
        found = [one for holder in self._holders.values() for one in holder.attributes().values() if is_generator(one)]
        return [(one, state) for one in found if (state := generator_state(one)) is not None]

    def to_data(self) -> dict[str, Any]:
        """Return the changes as plain data and tensors; :meth:`report` names what cannot be saved."""
        data: dict[str, Any] = {name: {} for name in _PARTS}
        self._reasons = {}
        for path, holder in self._holders.items():
            values, generators, reasons = holder.changes(replayed=self._replayed)
            if values:
                data["attributes"][path] = values
            data["generators"] |= {holder.place(name): state for name, state in generators.items()}
            self._reasons |= {holder.place(name): reason for name, reason in reasons.items()}
        for path, (one, before) in self._keepers.items():
            try:
                state = _state_of(one, path)
            except UnsavedError as error:
                self._reasons[path] = str(error)
                continue
            if mark_of(state) != before:
                data["states"][path] = state
        data["trained"] = {
            name: parameter.requires_grad
            for name, (parameter, before) in self._trained.items()
            if parameter.requires_grad is not before
        }
        return {name: part for name, part in data.items() if part}

    def load(self, data: Mapping[str, Any], device: torch.device | None = None) -> list[str]:
        """Restore what :meth:`to_data` returned, into attributes that exist; return the problems with their paths."""
        problems = []
        for path, load in self._loaders(data, device):
            if load is None:
                problems.append(f"{path} is not there")
                continue
            try:
                load()
            except UnsavedError as error:
                problems.append(f"{path} {error}")
            except Exception as error:  # noqa: BLE001  (methods of the user's must not end the run half-way)
                problems.append(f"{path} refuses what was saved: {type(error).__name__}: {error}")
        return problems

    def _loaders(
        self, data: Mapping[str, Any], device: torch.device | None
    ) -> Iterator[tuple[str, Callable[[], Any] | None]]:
        """Yield the paths of saved state, each with the function that restores it; None if it is not there."""
        for path, values in data.get("attributes", {}).items():
            holder = self._holders.get(path)
            for name, saved in values.items():
                target = device if saved["on_device"] else None
                yield at(path, name), None if holder is None else partial(holder.load, name, saved["value"], target)
        holders = {holder.place(name): (holder, name) for holder in self._holders.values() for name in holder.marks}
        for path, state in data.get("generators", {}).items():
            generator = holders[path][0].attributes().get(holders[path][1]) if path in holders else None
            yield path, partial(_load_generator, generator, state) if is_generator(generator) else None
        for path, state in data.get("states", {}).items():
            keeper = self._keepers.get(path)
            yield path, keeper and partial(keeper[0].load_state_dict, state)
        for name, is_trained in data.get("trained", {}).items():
            trained = self._trained.get(name)
            yield at("model", name), trained and partial(trained[0].requires_grad_, is_trained)

    def report(self, more: Mapping[str, str] | None = None) -> None:
        """Warn once about each attribute that has changed and could not be saved by the last :meth:`to_data`.

        Args:
            more: Further reasons by path.
        """
        reasons = {**self._reasons, **(more or {})}
        new = [f"{path} {reason}" for path, reason in reasons.items() if path not in self._reported]
        self._reported.update(reasons)
        if new:
            shown = new if len(new) <= _MAX_NAMED else [*new[:_MAX_NAMED], f"and {len(new) - _MAX_NAMED} more"]
            warnings.warn(
                "A run that is resumed from this checkpoint may differ from one that is not interrupted, because some "
                f"state is not saved: {'; '.join(shown)}. {_REMEDY}",
                UserWarning,
                stacklevel=2,
            )


def warn_of_misfits(problems: list[str]) -> None:
    """Warn about the problems that :meth:`OwnState.load` returned, if any."""
    if problems:
        shown = problems if len(problems) <= _MAX_NAMED else [*problems[:_MAX_NAMED], "and more"]
        warnings.warn(
            f"Saved state of this program's own objects does not fit and is not restored: {'; '.join(shown)}.",
            UserWarning,
            stacklevel=2,
        )


@attrs.frozen
class _SavedAttribute:
    value: Any
    on_device: bool


@attrs.frozen
class _Saved:
    """The data of :meth:`OwnState.to_data`, which leaves out empty fields."""

    attributes: dict[str, dict[str, _SavedAttribute]]
    generators: dict[str, dict[str, Any]]
    states: dict[str, dict[str, Any]]
    trained: dict[str, bool]


def check_own_state(data: Any, path: str) -> None:
    """Raise a ValueError that begins with ``path`` if data is not what :meth:`OwnState.to_data` returns."""
    from_data({part: {} for part in _PARTS} | data if isinstance(data, dict) else data, _Saved, path)


def without(data: Mapping[str, Any], ignored: Iterable[str]) -> dict[str, Any]:
    """Return what :meth:`OwnState.to_data` returned without some components.

    Args:
        data: The data.
        ignored: The components' paths in a checkpoint, such as ``"callbacks/Mine"``, or all of a kind: ``"callbacks"``.

    Example:
        >>> without({"generators": {"model.generator": {}, "callbacks.Mine.generator": {}}}, ["callbacks/Mine"])
        {'generators': {'model.generator': {}}}
    """
    prefixes = tuple(f"{path.replace('/', '.')}." for path in ignored)
    return {
        part: {
            path: value
            for path, value in values.items()
            if not f"{'model.' if part == 'trained' else ''}{path}.".startswith(prefixes)
        }
        for part, values in data.items()
    }


def _load_generator(generator: Any, state: Any) -> None:
    try:
        set_generator_state(generator, state)
    except ValueError as error:
        raise UnsavedError(str(error)) from None


def _mark_of_state(one: Any) -> Mark | None:
    try:
        return mark_of(_state_of(one))
    except UnsavedError:
        return None


def _state_of(one: Any, path: str = "") -> Any:
    """Return the ``state_dict()`` of an object as plain data.

    Raises:
        UnsavedError: The state cannot be saved, or is too large for each process to send to the others.
    """
    try:
        state = plain(one.state_dict(), path)
    except NotSerializableError as error:
        raise UnsavedError(f"has a state_dict() that cannot be saved: {error}") from None
    except Exception as error:  # noqa: BLE001  (of the user's own method)
        raise UnsavedError(f"has a state_dict() that fails: {type(error).__name__}: {error}") from None
    num_bytes = sum(leaf.nbytes for leaf in tree_leaves(state) if isinstance(leaf, torch.Tensor))
    if get_world_size() > 1 and num_bytes > MAX_BYTES:
        raise UnsavedError(
            "has a state_dict() of more than 1 MiB, the most that is saved for each of several processes"
        )
    return state


@attrs.define(eq=False)
class _Holder:
    """An object that has attributes, or contains generators.

    Args:
        path: Its path.
        object: The object.
        is_recorded: Whether all of its attributes are saved; else only generators, and buffers that are not persistent.
        has_weights: Whether it is a module whose parameters and buffers are not saved elsewhere.
    """

    path: str
    object: Any
    is_recorded: bool
    has_weights: bool = False
    marks: dict[str, Mark] = attrs.field(factory=dict, init=False)
    known: dict[str, TextKeys] = attrs.field(factory=dict, init=False)
    of_modules: Mapping[int, torch.Tensor] = attrs.field(factory=dict, init=False)
    """Tensors that modules hold, by id. An attribute that refers to one is not a state of its own."""

    def place(self, name: str) -> str:
        """Return the path of an attribute or item."""
        return f"{self.path}{name}" if name.startswith("[") else at(self.path, name)

    def attributes(self) -> dict[str, Any]:
        """Return the attributes by name; a container's items in brackets."""
        return _attributes(self.object) | self._tensors()

    def _tensors(self) -> dict[str, Any]:
        module = self.object
        if not isinstance(module, nn.Module):
            return {}
        tensors: dict[str, Any] = module._buffers | module._parameters  # noqa: SLF001
        names = tensors if self.has_weights else module._non_persistent_buffers_set  # noqa: SLF001
        return {name: tensors[name] for name in names if tensors.get(name) is not None}

    def remember(self) -> None:
        """Remember the current values as those before training."""
        tensors = self._tensors()
        for name, value in self.attributes().items():
            if self.is_recorded or name in tensors or is_generator(value):
                self.marks[name] = mark_of(value, () if name in tensors else self.of_modules)
                self.known[name] = text_keys(value)

    def changes(self, *, replayed: bool) -> tuple[dict[str, Any], dict[str, Any], dict[str, str]]:
        """Return changed values and generators' states by attribute, and why others cannot be saved."""
        values: dict[str, Any] = {}
        generators: dict[str, Any] = {}
        reasons: dict[str, str] = {}
        opened, tensors = [], self._tensors()
        for name, value in self.attributes().items():
            try:
                if is_generator(value):
                    if self._generator_has_changed(value, self.marks.get(name)):
                        generators[name] = generator_state(value)
                elif self.is_recorded or name in tensors:
                    change = self._change(name, value, () if name in tensors else self.of_modules, replayed=replayed)
                    if change is not None:
                        values[name] = change
            except _OpenedError:
                opened.append(name)
            except TransientError:
                continue
            except UnsavedError as error:
                reasons[name] = str(error)
        # Attributes of one object may depend on each other, such as a position on an open file.
        if reasons or opened:
            cause = self.place(next(iter(reasons), None) or opened[0])
            reasons |= {name: f"is not restored without {cause}" for name in values if name not in tensors}
            values = {name: values[name] for name in values if name in tensors}
        return values, generators, reasons

    def _generator_has_changed(self, value: Any, before: Mark | None) -> bool:
        now = mark_of(value)
        if now[2] is None:
            raise UnsavedError("draws from the operating system")
        if before is None or before[:2] != now[:2]:
            raise UnsavedError("is a generator that is made in training")
        return before != now

    def _change(self, name: str, value: Any, of_modules: Container[int], *, replayed: bool) -> dict[str, Any] | None:
        """Return the value of an attribute as data, or None if it has not changed."""
        default, now = _class_default(self.object, name), mark_of(value, of_modules)
        before = self.marks.get(name, None if default is _MISSING else mark_of(default))
        if before is None and name in ("epoch", "_epoch") and callable(getattr(self.object, "set_epoch", None)):
            return None  # set_epoch is called again before it runs
        is_new, is_users = before is None or before == _NONE, _is_users(type(value))
        if isinstance(value, Iterator) and not isinstance(value, io.IOBase) and not is_users:
            if replayed and is_new:
                return None
            raise UnsavedError("is an iterator, whose place cannot be saved")
        if now == before:
            return None
        if now[0] == "object":
            if not is_new:
                raise UnsavedError("is another object than when training began")
            if is_users:
                raise UnsavedError("is an object that is made in training")
            raise _OpenedError
        data, kind = encoded(value, self.known.get(name), of_modules), kind_of(value)
        if before is None:
            raise UnsavedError("is set for the first time in training")
        if before[0] not in ("number", kind):
            raise UnsavedError(f"was a {before[0]} and is a {kind}")
        nested = list(value) if isinstance(value, (set, frozenset, collections.deque)) else value
        devices = {leaf.device.type for leaf in leaves(nested) if isinstance(leaf, torch.Tensor)}
        return {"value": data, "on_device": not devices <= {"cpu"}}

    def load(self, name: str, data: Any, device: torch.device | None) -> None:
        """Set an attribute to saved data of its kind.

        Raises:
            UnsavedError: There is no such attribute, or its value is of another kind.
        """
        current = self.attributes().get(name, _MISSING)
        if current is _MISSING:
            current = _class_default(self.object, name)
        if current is _MISSING or (name not in self.marks and not self.is_recorded):
            raise UnsavedError("is not there")
        value = restored(current, data, device)
        if value is not current:
            _set(self.object, name, value)


class _OpenedError(UnsavedError):
    """A value is a file or connection that was opened when it was first needed."""


_MISSING = object()


def _class_default(one: Any, name: str) -> Any:
    """Return the default, a number or None, of an attribute that is not set yet in one of the user's classes."""
    for kind in type(one).__mro__:
        if name in vars(kind):
            return vars(kind)[name] if _is_users(kind) and kind_of(vars(kind)[name]) == "number" else _MISSING
    return _MISSING


def _attributes(one: Any) -> dict[str, Any]:
    if type(one) in (list, tuple):
        return {f"[{place}]": item for place, item in enumerate(one)}
    if type(one) is dict:
        # The repr of other keys may be very long, or wait for a device.
        names = [repr(key) if type(key) in (str, int) else f"item {place}" for place, key in enumerate(one)]
        return {f"[{name}]": item for name, item in zip(names, one.values(), strict=True)}
    if isinstance(one, types.FunctionType):
        return {**_cells(one), **vars(one), **_globals(one)}
    if isinstance(one, functools.partial):
        return {"func": one.func, "args": one.args, "keywords": one.keywords}
    if isinstance(one, (types.MethodType, types.BuiltinMethodType)):
        return {"__self__": one.__self__}
    hidden = _OF_MODULES if isinstance(one, nn.Module) else _of_optimizers() if isinstance(one, Optimizer) else ()
    held = {name: value for name, value in getattr(one, "__dict__", {}).items() if name not in hidden}
    for kind in type(one).__mro__:
        slots = vars(kind).get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if name not in ("__dict__", "__weakref__") and hasattr(one, name):
                held[name] = getattr(one, name)
    return held


@functools.cache
def _of_optimizers() -> frozenset[str]:
    """Return the attributes of all torch optimizers; schedulers set the last two."""
    return frozenset(vars(torch.optim.SGD([nn.Parameter(torch.zeros(1))], 0.1))) | {"_opt_called", "step"}


def _cells(function: types.FunctionType) -> dict[str, Any]:
    held = {}
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            held[name] = cell.cell_contents
        except ValueError:  # it is not set yet
            continue
    return held


def _globals(function: types.FunctionType) -> dict[str, Any]:
    held = {name: function.__globals__.get(name) for name in function.__code__.co_names}
    held |= {f"default {place}": value for place, value in enumerate(function.__defaults__ or ())}
    held |= function.__kwdefaults__ or {}
    return {name: value for name, value in held.items() if is_generator(value)}


def _set(one: Any, name: str, value: Any) -> None:
    if isinstance(one, types.FunctionType) and name in one.__code__.co_freevars:
        assert one.__closure__ is not None
        one.__closure__[one.__code__.co_freevars.index(name)].cell_contents = value
        return
    try:
        setattr(one, name, value)
    except (AttributeError, TypeError) as error:
        raise UnsavedError(f"cannot be set: {error}") from None


@functools.cache
def _is_users_module(name: str) -> bool:
    root = name.partition(".")[0]
    if root in {"composer", "torch"} or root in sys.stdlib_module_names:
        return False
    file = getattr(sys.modules.get(name), "__file__", None)
    return file is None or not {"site-packages", "dist-packages"}.intersection(Path(file).parts)


def _is_users(kind: Any) -> bool:
    """Return whether a class or function is from the user's own code, not from an installed package."""
    return _is_users_module(getattr(kind, "__module__", None) or "builtins")


def _saves_itself(one: Any) -> bool:
    """Return whether the state of an object is saved by a method of its own."""
    kind = type(one)
    if isinstance(one, nn.Module):
        is_metric = hasattr(one, "_update_count")
        return is_metric or (kind.state_dict, kind.get_extra_state) != (nn.Module.state_dict, nn.Module.get_extra_state)
    if isinstance(one, Optimizer):
        return kind.state_dict is not Optimizer.state_dict
    if isinstance(one, Serializable):
        return kind.state_dict is not Serializable.state_dict or bool(saved_fields(kind))
    return False


class _Walk:
    """Finds the objects that have state, breadth first, to a limited depth; each object once, by its shortest path."""

    def __init__(self, replayed: bool, leave_out: Iterable[Any]) -> None:
        self._uses_state_dicts = not replayed
        self._seen = {id(one) for one in leave_out}
        self._roots: set[int] = set()
        self._queue: collections.deque[tuple[str, Any, int, bool]] = collections.deque()
        self.holders: dict[str, _Holder] = {}
        self.keepers: dict[str, Any] = {}
        self.of_modules: dict[int, torch.Tensor] = {}

    def run(self, roots: Mapping[str, Any]) -> None:
        """Visit everything that the roots refer to, root after root."""
        self._roots = {id(root) for root in roots.values()}
        for path, root in roots.items():
            self._queue.append((path, root, 0, path != "model"))
            while self._queue and len(self._seen) < _MAX_OBJECTS:
                self._visit(*self._queue.popleft())
            self._queue.clear()

    def _visit(self, path: str, one: Any, depth: int, has_weights: bool) -> None:
        if id(one) in self._seen or not _may_hold(one) or (depth and id(one) in self._roots):
            return
        self._seen.add(id(one))
        kind = one if isinstance(one, types.FunctionType) else type(one)
        is_module = isinstance(one, nn.Module)
        tensors = (one._parameters | one._buffers).values() if is_module else ()  # noqa: SLF001
        self.of_modules |= {id(tensor): tensor for tensor in tensors if tensor is not None}
        is_component = not depth and isinstance(one, (Optimizer, Serializable))
        if not is_module and not is_component:
            if kind.__module__.startswith("composer."):
                return
            has_both = all(callable(getattr(type(one), name, None)) for name in ("state_dict", "load_state_dict"))
            if self._uses_state_dicts and has_both and (not isinstance(one, Serializable) or _saves_itself(one)):
                self.keepers[path] = one
                return
        if isinstance(one, Serializable) and _saves_itself(one):
            return
        is_container = type(one) in (list, tuple, dict)
        is_recorded = not is_container and _is_users(kind) and not _saves_itself(one)
        if isinstance(one, types.FunctionType) and not is_recorded:
            return
        self.holders[path] = _Holder(path, one, is_recorded, has_weights=has_weights)
        if is_module:
            for name, module in one._modules.items():  # noqa: SLF001
                if module is not None:
                    self._queue.append((at(path, name), module, 0, has_weights))
        if depth < _MAX_DEPTH:
            for name, value in _attributes(one).items():
                if not is_generator(value) and _may_hold(value):
                    inner = f"{path}{name}" if is_container else at(path, name)
                    self._queue.append((inner, value, depth + 1, has_weights))


_LEAVES = (str, bytes, bytearray, int, float, complex, torch.Tensor, type, types.ModuleType, enum.Enum, io.IOBase)


def _may_hold(value: Any, depth: int = 0, budget: list[int] | None = None) -> bool:
    """Return whether a value may contain state; large containers are skipped."""
    if value is None or isinstance(value, _LEAVES):
        return False
    if type(value) in (list, tuple, dict):
        held = value.values() if isinstance(value, dict) else value
        budget = [_MAX_OBJECTS] if budget is None else budget
        budget[0] -= len(value)
        if len(value) > _MAX_ITEMS or depth > _MAX_DEPTH or budget[0] < 0:
            return False
        return any(is_generator(item) or _may_hold(item, depth + 1, budget) for item in held)
    if isinstance(value, (functools.partial, types.MethodType, types.FunctionType)):
        return True
    if isinstance(value, types.BuiltinMethodType):
        return value.__self__ is not None and not isinstance(value.__self__, types.ModuleType)
    root = type(value).__module__.partition(".")[0]
    return root in ("types", "random") or root not in sys.stdlib_module_names
