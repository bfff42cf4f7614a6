"""The objects that were given to the Trainer: where each is saved, and a warning of changes that nothing saves.

``trainer/data/objects.py`` states what is saved of an object. Other attributes that are numbers, tensors or arrays and
have changed since the training began are named in a warning.
"""

from __future__ import annotations

import hashlib
import sys
import warnings
import weakref
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.modules.lazy import LazyModuleMixin

from composer.core import Serializable
from composer.core.saving.codec import at, is_number
from composer.core.saving.components import by_key, saved_fields
from composer.distributed import get_global_rank
from composer.trainer.data.objects import (
    attributes,
    create_generators,
    has_state,
    holders,
    is_of_package,
    load_objects,
    objects_to_evaluate,
    save_objects,
)
from composer.trainer.data.order import make_order

if TYPE_CHECKING:
    from composer.checkpoint.contents import SavedObjects
    from composer.core import Logger, State
    from composer.trainer.data.settings import TrainingData

_REMEDY = """Set them from the clock at FIT_START, which a resumed run reaches, too. An object that has both of these
methods is saved by them (a module saves its buffers):

    def state_dict(self):
        return {"count": self.count}

    def load_state_dict(self, state):
        self.count = state["count"]"""
# Attributes that each module has, such as ``training`` and the dictionaries of its parts.
_HIDDEN = frozenset(vars(nn.Module()))
_HASHED = 1 << 20
"""The largest array whose contents are compared, in bytes."""


class GivenObjects:
    """The objects that were given to the Trainer; of three kinds, by where their states are saved.

    - Components, such as the model and callbacks: with the state of the run. Only their generators are saved here, and
      so are those of streams to evaluate on.
    - What is replayed with the data, such as the sampler: by ``Batches``.
    - All others: here, and what algorithms have of each process.

    Args:
        state: The run.
        data: The training data.
        logger: Its destinations are components.
    """

    def __init__(self, state: State, data: TrainingData, logger: Logger) -> None:
        self._state, self._data, self._logger = state, data, logger
        self._changes: Changes | None = None
        self._reported = set[str]()
        # An algorithm that another one adds in training stands for a change to the model, and is saved.
        state.on_components_change(self.watch)

    def save(self) -> SavedObjects:
        """Return the states of the objects that are saved here."""
        return save_objects(self._others(), self._components())

    def load(self, saved: SavedObjects) -> None:
        """Restore what :meth:`save` returned, also generators that data to evaluate on creates for its first batch."""
        for evaluator in self._state.evaluators:
            objects, streams = objects_to_evaluate(evaluator.dataloader.dataloader)
            load = partial(next, make_order(evaluator.dataloader.dataloader, self._state.rank_zero_seed).begin(0), None)
            create_generators(saved.generators, _named(f"evaluators.{evaluator.label}", objects | streams), load)
        load_objects(saved, self._others(), self._components())

    def watch(self) -> None:
        """Compare attributes with their present values from now on."""
        self._changes = Changes({**self._components(), **self._others(), **self._of_training("replayed")})

    def report_changes(self) -> None:
        """Warn, once for each, about changed attributes that are not saved."""
        names = [] if self._changes is None or get_global_rank() else self._changes.names()
        if changed := [path for path in names if path not in self._reported]:
            self._reported.update(changed)
            warnings.warn(
                "A run that is resumed from this checkpoint may differ from one that is not interrupted, because these "
                f"attributes are not saved:\n{', '.join(changed)}: changed since training began. {_REMEDY}",
                stacklevel=2,
            )

    def _components(self) -> dict[str, Any]:
        state = self._state
        found: dict[str, Any] = {"model": state.model}
        for kind, held in (("algorithms", state.algorithms), ("callbacks", state.callbacks)):
            found |= {f"{kind}.{state.component_key(component)}": component for component in held}
        for evaluator in state.evaluators:
            found |= _named(f"evaluators.{evaluator.label}", objects_to_evaluate(evaluator.dataloader.dataloader)[1])
        return found | _named("loggers", by_key(self._logger.destinations))

    def _others(self) -> dict[str, Any]:
        loss = getattr(self._state.model, "loss_fn", None)
        found: dict[str, Any] = {} if loss is None or isinstance(loss, nn.Module) else {"loss_fn": loss}
        found |= self._of_training("loading") | self._of_training("transforms")
        for evaluator in self._state.evaluators:
            found |= _named(f"evaluators.{evaluator.label}", objects_to_evaluate(evaluator.dataloader.dataloader)[0])
        for one in self._state._algorithms:  # noqa: SLF001  (a property and a comprehension are calls in each save)
            if one.of_process is not None:
                found[f"algorithms.{type(one).__name__}"] = one.of_process
        return found

    def _of_training(self, kind: str) -> dict[str, Any]:
        """Return the objects of the training data that ``LoaderObjects`` names so; none without data."""
        batches = self._data.batches
        return {} if batches is None else batches.objects.by_path(kind)


class Changes:
    """The attributes that differ from their values at construction, and that no checkpoint contains.

    Of modules of installed packages, such as torch's, public numbers are compared (``dropout.p``), and of other objects
    all attributes, unless their class is from an installed package; of all modules also the type. Nothing waits for a
    device.

    Args:
        objects: The objects by name.
    """

    def __init__(self, objects: Mapping[str, Any]) -> None:
        self._objects = objects
        self._before, self._numbers = _marks(objects), _numbers(objects)

    def names(self) -> list[str]:
        """Return the paths of the attributes."""
        before, after, unset = self._before, _marks(self._objects), (None, "")
        pairs = {path: (before.get(path, unset), after.get(path, unset)) for path in {**before, **after}}
        # weakref.ref() returns the same reference as long as the object lives, and == would compare the tensors.
        changed = [path for path, (old, new) in pairs.items() if old[0] is not new[0] or old[1] != new[1]]
        # A new one, such as a cached length, has no value at construction to compare with.
        numbers = _numbers(self._objects)
        return changed + [path for path, before in self._numbers.items() if numbers.get(path) != before]


def _marks(objects: Mapping[str, Any]) -> dict[str, tuple[Any, str]]:
    models = [value for value in objects.values() if isinstance(value, nn.Module)]
    # An attribute that refers to a weight is saved with the model.
    weights = {id(tensor) for model in models for tensor in (*model.parameters(), *model.buffers())}
    marks: dict[str, tuple[Any, str]] = {}
    for path, holder in holders(objects):
        if is_of_package(type(holder).__module__) or _saves_attributes(holder):
            continue
        compared = {name: value for name, value in attributes(holder).items() if id(value) not in weights}
        if isinstance(holder, nn.Module):
            compared = {name: value for name, value in compared.items() if name not in _HIDDEN}
            compared |= {name: holder._buffers[name] for name in holder._non_persistent_buffers_set}  # noqa: SLF001
        if callable(getattr(holder, "set_epoch", None)):  # it is called again in a resumed run
            compared = {name: value for name, value in compared.items() if name not in ("epoch", "_epoch")}
        marks |= {at(path, name): _mark(value) for name, value in compared.items()}
    return marks


def _numbers(objects: Mapping[str, Any]) -> dict[str, str]:
    """Return the types of modules, and public numbers of those of installed packages; this library restores its own."""
    found: dict[str, str] = {}
    for path, holder in holders(objects):
        if not isinstance(holder, nn.Module) or isinstance(holder, LazyModuleMixin):  # which changes in its first pass
            continue
        kind = type(holder)
        found[path] = kind.__qualname__
        if (
            is_of_package(kind.__module__)
            and not kind.__module__.startswith("composer.")
            and not _saves_attributes(holder)
        ):
            public = {name: value for name, value in vars(holder).items() if name not in _HIDDEN and name[0] != "_"}
            found |= {at(path, name): repr(value) for name, value in public.items() if is_number(value)}
    return found


def _mark(value: Any) -> tuple[Any, str]:
    """Return what identifies a number, tensor or array and its contents, without waiting for a device."""
    numpy = sys.modules.get("numpy")
    if is_number(value):
        return None, repr(value)
    if isinstance(value, torch.Tensor) and value.grad_fn is None:  # otherwise it is a part of a step's graph
        # A reference rather than the id: another tensor may get the address of a deleted one.
        return weakref.ref(value), "" if value.is_inference() else str(value._version)  # noqa: SLF001
    if numpy is not None and isinstance(value, numpy.ndarray):
        if value.nbytes > _HASHED or value.dtype.hasobject:
            return weakref.ref(value), ""
        return None, f"{value.dtype} {value.shape} {hashlib.blake2b(value.tobytes()).hexdigest()}"
    return None, ""


def _saves_attributes(holder: Any) -> bool:
    """Return whether the class of an object defines what is saved of it; those of torch and of this library do not."""
    kind = type(holder)
    if isinstance(holder, nn.Module):
        is_metric = hasattr(holder, "_update_count")  # torchmetrics; the trainer saves its states
        return is_metric or (kind.state_dict, kind.get_extra_state) != (nn.Module.state_dict, nn.Module.get_extra_state)
    if isinstance(holder, Serializable):
        return kind.state_dict is not Serializable.state_dict or bool(saved_fields(kind))
    return has_state(holder)


def _named(path: str, objects: Mapping[str, Any]) -> dict[str, Any]:
    return {f"{path}.{name}": value for name, value in objects.items()}
