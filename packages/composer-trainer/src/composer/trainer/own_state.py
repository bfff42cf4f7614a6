"""State that the user's objects keep in plain attributes: found once, saved where it has changed, and restored.

A component with a ``state_dict`` of its own is saved by that. Others (a dataset that counts, a loss with a generator, a
callback with a list of numbers) are walked through when training begins, and their attributes are compared with that
moment whenever a checkpoint is saved. Restoring looks up only what the same walk has found in the new process: a
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
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import attrs
import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from composer.core import NotSerializableError, Serializable
from composer.core.serialization import at, plain, saved_fields
from composer.distributed import get_world_size
from composer.trainer.attribute_values import (
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
from composer.trainer.generator_states import generator_state, is_generator, set_generator_state

__all__ = ["OwnState", "is_own_state", "warn_of_misfits", "without"]

_MAX_DEPTH = 8
_MAX_OBJECTS = 10_000
_MAX_ITEMS = 100
_MAX_NAMED = 10
_PARTS = ("attributes", "generators", "states", "trained")
_OF_MODULES = frozenset(vars(nn.Module())) | {"_compiled_call_impl"}
_NONE = mark_of(None)
_REMEDY = (
    "Keep such state in numbers and tensors that __init__ sets, or give the object state_dict() and load_state_dict(); "
    "the guide 'Stopping and going on' has a list of what is saved."
)


class OwnState:
    """What objects keep in attributes, compared with the moment at which they were first watched.

    Args:
        replayed: Whether the objects run again, from the saved state on, to where a run has stopped, as samplers do.

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
        """Look for all that the roots reach; what is found for the first time is compared with its state now.

        Args:
            roots: Objects by name. The parameters of the one named ``"model"`` are taken to be saved by others.
            leave_out: Objects that others save.
        """
        walk = _Walk(self._replayed, leave_out)
        walk.run(roots)
        known = {id(holder.object): holder for holder in self._holders.values()}
        kept = {id(one): mark for one, mark in self._keepers.values()}
        self._holders = {}
        for path, found in walk.holders.items():
            holder = known.get(id(found.object)) or found
            holder.of_modules = walk.of_modules
            if holder is found:
                found.remember()
            if holder.marks or holder.is_recorded:
                holder.path = path
                self._holders[path] = holder
        self._keepers = {
            path: (one, kept[id(one)] if id(one) in kept else _mark_of_state(one)) for path, one in walk.keepers.items()
        }
        model = roots.get("model")
        if isinstance(model, nn.Module):
            for name, parameter in model.named_parameters():
                known_before = self._trained.get(name)
                if known_before is None or known_before[0] is not parameter:
                    self._trained[name] = (parameter, parameter.requires_grad)

    def generators(self) -> list[str]:
        """Return the paths of all generators that were found."""
        return [
            holder.place(name)
            for holder in self._holders.values()
            for name, mark in holder.marks.items()
            if mark[0] == "generator"
        ]

    def to_data(self) -> dict[str, Any]:
        """Return what has changed, as plain data and tensors; :meth:`report` then names the rest."""
        data: dict[str, Any] = {name: {} for name in _PARTS}
        self._reasons = {}
        for path, holder in self._holders.items():
            changes = holder.changes(replayed=self._replayed)
            if changes.values:
                data["attributes"][path] = changes.values
            data["generators"] |= {holder.place(name): state for name, state in changes.generators.items()}
            self._reasons |= {holder.place(name): reason for name, reason in changes.reasons.items()}
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
        """Restore what :meth:`to_data` returned, into attributes that are there; return what does not fit, by path."""
        problems = []
        for path, values in data.get("attributes", {}).items():
            for name, saved in values.items():
                problems += _tried(at(path, name), lambda: self._load_attribute(path, name, saved, device))  # noqa: B023
        generators = {holder.place(name): (holder, name) for holder in self._holders.values() for name in holder.marks}
        for path, state in data.get("generators", {}).items():
            problems += _tried(path, lambda: _load_generator(generators.get(path), state))  # noqa: B023
        for path, state in data.get("states", {}).items():
            problems += _tried(path, lambda: self._load_state(path, state))  # noqa: B023
        for name, is_trained in data.get("trained", {}).items():
            problems += _tried(at("model", name), lambda: self._load_trained(name, is_trained))  # noqa: B023
        return problems

    def _load_trained(self, name: str, is_trained: bool) -> None:
        if name not in self._trained:
            raise UnsavedError("is not there")
        self._trained[name][0].requires_grad_(is_trained)

    def _load_attribute(self, path: str, name: str, saved: Mapping[str, Any], device: torch.device | None) -> None:
        holder = self._holders.get(path)
        if holder is None:
            raise UnsavedError("is not there")
        holder.load(name, saved["value"], device if saved["on_device"] else None)

    def _load_state(self, path: str, state: Any) -> None:
        if path not in self._keepers:
            raise UnsavedError("is not there")
        self._keepers[path][0].load_state_dict(state)

    def report(self, more: Mapping[str, str] | None = None) -> None:
        """Warn, once of each, of what has changed and could not be saved by the last :meth:`to_data`.

        Args:
            more: What else cannot be saved: reasons by path.
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
    """Warn of saved state that :meth:`OwnState.load` could not restore, if there is any."""
    if problems:
        shown = problems if len(problems) <= _MAX_NAMED else [*problems[:_MAX_NAMED], "and more"]
        warnings.warn(
            f"Saved state of this program's own objects does not fit and is not restored: {'; '.join(shown)}.",
            UserWarning,
            stacklevel=2,
        )


def is_own_state(value: Any) -> bool:
    """Return whether a value has the structure of what :meth:`OwnState.to_data` returns."""
    if not isinstance(value, Mapping) or not set(value) <= set(_PARTS):
        return False
    if not all(isinstance(part, Mapping) and all(isinstance(path, str) for path in part) for part in value.values()):
        return False
    return (
        all(
            isinstance(values, Mapping) and all(_is_attribute(name, one) for name, one in values.items())
            for values in value.get("attributes", {}).values()
        )
        and all(isinstance(state, Mapping) for state in value.get("generators", {}).values())
        and all(isinstance(state, Mapping) for state in value.get("states", {}).values())
        and all(isinstance(one, bool) for one in value.get("trained", {}).values())
    )


def without(data: Mapping[str, Any], ignored: Iterable[str]) -> dict[str, Any]:
    """Return what :meth:`OwnState.to_data` returned without some components.

    Args:
        data: It.
        ignored: The components' paths in a checkpoint, such as ``"callbacks/Mine"``, or whole kinds: ``"callbacks"``.

    Example:
        >>> without({"generators": {"model.generator": {}, "callbacks.Mine.generator": {}}}, ["callbacks/Mine"])
        {'generators': {'model.generator': {}}}
    """
    prefixes = tuple(f"{path.replace('/', '.')}." for path in ignored)
    return {
        part: {
            path: value
            for path, value in held.items()
            if not f"{'model.' if part == 'trained' else ''}{path}.".startswith(prefixes)
        }
        for part, held in data.items()
    }


def _is_attribute(name: Any, saved: Any) -> bool:
    return (
        isinstance(name, str)
        and isinstance(saved, Mapping)
        and saved.keys() == {"value", "on_device"}
        and isinstance(saved["on_device"], bool)
    )


def _tried(path: str, call: Any) -> list[str]:
    try:
        call()
    except UnsavedError as error:
        return [f"{path} {error}"]
    except Exception as error:  # noqa: BLE001  (of the user's own methods, which a run must not end by half-way)
        return [f"{path} refuses what was saved: {type(error).__name__}: {error}"]
    return []


def _load_generator(found: tuple[_Holder, str] | None, state: Any) -> None:
    generator = None if found is None else found[0].attributes().get(found[1])
    if not is_generator(generator):
        raise UnsavedError("is not there")
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
    """Return the state of an object that has its own way to be saved, which may never have been called before.

    Raises:
        UnsavedError: It cannot be saved, or is too large for each process to send to the others.
    """
    try:
        state = plain(one.state_dict(), path)
    except NotSerializableError as error:
        raise UnsavedError(f"has a state_dict() that cannot be saved: {error}") from None
    except Exception as error:  # noqa: BLE001  (of the user's own method)
        raise UnsavedError(f"has a state_dict() that fails: {type(error).__name__}: {error}") from None
    if (
        get_world_size() > 1
        and sum(leaf.nbytes for leaf in tree_leaves(state) if isinstance(leaf, torch.Tensor)) > MAX_BYTES
    ):
        raise UnsavedError(
            "has a state_dict() of more than 1 MiB, the most that is saved for each of several processes"
        )
    return state


@attrs.frozen
class _Changes:
    """What has changed of an object: values and generators' states by attribute, and reasons why not by attribute."""

    values: dict[str, Any] = attrs.field(factory=dict)
    generators: dict[str, Any] = attrs.field(factory=dict)
    reasons: dict[str, str] = attrs.field(factory=dict)


@attrs.define(eq=False)
class _Holder:
    """An object that has attributes, or holds generators.

    Args:
        path: Where it is.
        object: It.
        is_recorded: Whether all of its attributes count; else only generators, and buffers that are not saved.
        has_weights: Whether it is a module whose parameters and buffers nobody else saves.
    """

    path: str
    object: Any
    is_recorded: bool
    has_weights: bool = False
    marks: dict[str, Mark] = attrs.field(factory=dict, init=False)
    known: dict[str, TextKeys] = attrs.field(factory=dict, init=False)
    of_modules: Mapping[int, torch.Tensor] = attrs.field(factory=dict, init=False)
    """Tensors that modules hold, by id: where an attribute refers to one, it is no state of the object's own."""

    def place(self, name: str) -> str:
        """Return the path of an attribute or item."""
        return f"{self.path}{name}" if name.startswith("[") else at(self.path, name)

    def attributes(self) -> dict[str, Any]:
        """Return the attributes by name; a container's items in brackets."""
        return _attributes(self.object) | self._tensors()

    def _tensors(self) -> dict[str, Any]:
        one = self.object
        if not isinstance(one, nn.Module):
            return {}
        if self.has_weights:
            return {name: value for name, value in (one._buffers | one._parameters).items() if value is not None}  # noqa: SLF001
        buffers, unsaved = one._buffers, one._non_persistent_buffers_set  # noqa: SLF001
        return {name: buffers[name] for name in unsaved if buffers.get(name) is not None}

    def _mark(self, name: str, value: Any, tensors: Mapping[str, Any]) -> Mark:
        return mark_of(value, () if name in tensors else self.of_modules)

    def remember(self) -> None:
        """Take the present values as those that attributes have before training."""
        tensors = self._tensors()
        for name, value in self.attributes().items():
            if self.is_recorded or name in tensors or is_generator(value):
                self.marks[name] = self._mark(name, value, tensors)
                self.known[name] = text_keys(value)

    def changes(self, *, replayed: bool) -> _Changes:
        """Compare with what was remembered."""
        changes, tensors = _Changes(), self._tensors()
        made: list[str] = []
        for name, value in self.attributes().items():
            before = self.marks.get(name)
            if is_generator(value):
                self._compare_generator(name, value, before, changes)
            elif self.is_recorded or name in tensors:
                now = self._mark(name, value, tensors)
                self._compare(name, value, before, now, changes, made, replayed=replayed)
        # Attributes of one object may rely on each other, such as a number on the file it is the place in.
        if changes.reasons or made:
            cause = self.place(next(iter(changes.reasons), None) or made[0])
            for name in [name for name in changes.values if name not in tensors]:
                del changes.values[name]
                changes.reasons[name] = f"is not restored without {cause}"
        return changes

    def _compare_generator(self, name: str, value: Any, before: Mark | None, changes: _Changes) -> None:
        now = mark_of(value)
        if now[2] is None:
            changes.reasons[name] = "draws from the operating system"
        elif before is None or before[:2] != now[:2]:
            changes.reasons[name] = "is a generator that is made in training"
        elif before != now:
            changes.generators[name] = generator_state(value)

    def _compare(
        self,
        name: str,
        value: Any,
        before: Mark | None,
        now: Mark,
        changes: _Changes,
        made: list[str],
        *,
        replayed: bool,
    ) -> None:
        default = _class_default(self.object, name)
        if before is None and default is not _MISSING:
            before = mark_of(default)
        if before is None and name in ("epoch", "_epoch") and callable(getattr(self.object, "set_epoch", None)):
            return  # it is given the epoch again before it runs
        is_new, is_users = before is None or before == _NONE, _is_users(type(value))
        if isinstance(value, Iterator) and not isinstance(value, io.IOBase) and not is_users:
            if not (replayed and is_new):
                changes.reasons[name] = "is an iterator, whose place cannot be saved"
        elif now == before:
            return
        elif now[0] != "object":
            self._encode(name, value, before, changes)
        elif not is_new:
            changes.reasons[name] = "is another object than when training began"
        elif is_users:
            changes.reasons[name] = "is an object that is made in training"
        else:  # a file or connection that is opened when it is first needed
            made.append(name)

    def _encode(self, name: str, value: Any, before: Mark | None, changes: _Changes) -> None:
        kind = kind_of(value)
        try:
            data = encoded(value, self.known.get(name), () if name in self._tensors() else self.of_modules)
        except TransientError:
            return
        except UnsavedError as error:
            changes.reasons[name] = str(error)
            return
        if before is None:
            changes.reasons[name] = "is set for the first time in training"
        elif before[0] not in ("number", kind):
            changes.reasons[name] = f"was a {before[0]} and is a {kind}"
        else:
            changes.values[name] = {"value": data, "on_device": _is_on_device(value)}

    def load(self, name: str, data: Any, device: torch.device | None) -> None:
        """Set an attribute to saved data of its kind.

        Raises:
            UnsavedError: There is no such attribute, or it holds something else.
        """
        current = self.attributes().get(name, _MISSING)
        if current is _MISSING and isinstance(name, str):
            current = _class_default(self.object, name)
        if current is _MISSING or (name not in self.marks and not self.is_recorded):
            raise UnsavedError("is not there")
        value = restored(current, data, device)
        if value is not current:
            _set(self.object, name, value)


_MISSING = object()


def _class_default(one: Any, name: str) -> Any:
    """Return the number, or None, that one of the user's classes has for an attribute that is not set yet."""
    for kind in type(one).__mro__:
        if name in vars(kind):
            return vars(kind)[name] if _is_users(kind) and kind_of(vars(kind)[name]) == "number" else _MISSING
    return _MISSING


def _is_on_device(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return value.device.type != "cpu"
    if isinstance(value, (list, tuple, set, frozenset, collections.deque)):
        return any(map(_is_on_device, value))
    return isinstance(value, dict) and any(map(_is_on_device, value.values()))


def _attributes(one: Any) -> dict[str, Any]:
    if type(one) in (list, tuple):
        return {f"[{place}]": item for place, item in enumerate(one)}
    if type(one) is dict:
        # Other keys may print as pages of text, or as numbers that have to be fetched from a device.
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
    """Return the attributes that torch's optimizers have; schedulers set the last two."""
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
    """Return whether an object has a way of its own to be saved, which somebody calls."""
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
    """Finds what holds state, from some objects on, to a limited depth; each object once, by its shortest path."""

    def __init__(self, replayed: bool, leave_out: Iterable[Any]) -> None:
        self._uses_state_dicts = not replayed
        self._seen = {id(one) for one in leave_out}
        self._roots: set[int] = set()
        self._queue: collections.deque[tuple[str, Any, int, bool]] = collections.deque()
        self.holders: dict[str, _Holder] = {}
        self.keepers: dict[str, Any] = {}
        self.of_modules: dict[int, torch.Tensor] = {}

    def run(self, roots: Mapping[str, Any]) -> None:
        """Walk through all that the roots reach, root after root."""
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
        self.of_modules |= {id(tensor): tensor for tensor in _tensors_of(one)}
        kind = one if isinstance(one, types.FunctionType) else type(one)
        is_module = isinstance(one, nn.Module)
        is_component = not depth and isinstance(one, (Optimizer, Serializable))
        if not is_module and not is_component:
            if kind.__module__.startswith("composer."):
                return
            if self._uses_state_dicts and _has_state_dict(one):
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


def _tensors_of(one: Any) -> list[torch.Tensor]:
    """Return the tensors that an object holds itself if it is a module."""
    held = (one._parameters | one._buffers).values() if isinstance(one, nn.Module) else ()  # noqa: SLF001
    return [tensor for tensor in held if tensor is not None]


def _has_state_dict(one: Any) -> bool:
    kind = type(one)
    has_both = callable(getattr(kind, "state_dict", None)) and callable(getattr(kind, "load_state_dict", None))
    return has_both and (not isinstance(one, Serializable) or _saves_itself(one))


_LEAVES = (str, bytes, bytearray, int, float, complex, torch.Tensor, type, types.ModuleType, enum.Enum, io.IOBase)


def _may_hold(value: Any, depth: int = 0, budget: list[int] | None = None) -> bool:
    """Return whether state may be found in a value; of large nested containers, in the first items."""
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
