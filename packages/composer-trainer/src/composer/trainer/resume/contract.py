"""What a checkpoint contains of the objects that were given to the Trainer, and of the settings of the program.

- What has ``state_dict()`` and ``load_state_dict()`` is saved by them.
- Generators that are attributes of these objects are saved, also within what they consist of, such as a data set in a
  ``Subset``, a sampler in a ``BatchSampler``, a transform, a list, or what a function is bound to.
- Nothing else is saved. Other attributes that are numbers, tensors or arrays and have changed are named in a warning.

The model, algorithms, callbacks and loggers are saved with the state of the run; here only their generators.

Settings that the results depend on are saved by name (:func:`settings_of`), and a resumed run reports which differ.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import inspect
import logging
import sys
import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple

import attrs
import torch
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd
from torch.nn.modules.lazy import LazyModuleMixin
from torch.optim.lr_scheduler import LRScheduler
from torch.utils._pytree import tree_map_only
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler

from composer.checkpoint.contents import SavedObjects
from composer.core import Serializable
from composer.core.checks import bulleted, caller_level
from composer.core.saving.codec import at, is_number, plain
from composer.core.saving.components import saved_fields
from composer.core.saving.randomness import generator_state, generators_among, set_generator_state
from composer.distributed import get_data_world_size
from composer.loggers.hyperparameters import plain_settings
from composer.loggers.hyperparameters import settings_of as declared_settings
from composer.trainer.schedules import known_steps

if TYPE_CHECKING:
    from composer.core import DataSpec, State

_log = logging.getLogger(__name__)
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
_MOST_ITEMS = 100
"""The length of the longest list or dictionary that is searched for generators, as longer ones are data."""
_MOST_PARTS = 1000
"""The number of parts of an object that are searched."""


def has_state(value: Any) -> bool:
    """Return whether an object is saved by its own ``state_dict()``, without arguments, and ``load_state_dict()``.

    Example:
        >>> has_state(torch.nn.Linear(1, 1)), has_state([1, 2])
        (True, False)
    """
    save = getattr(value, "state_dict", None)
    if isinstance(value, type) or not callable(save) or not callable(getattr(value, "load_state_dict", None)):
        return False
    variable = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    parameters = _parameters(save).values()
    return all(parameter.default is not parameter.empty or parameter.kind in variable for parameter in parameters)


def takes_position(dataset: Any) -> bool:
    """Return whether a dataset begins at the epoch and sample of a state, as mosaicml-streaming's StreamingDataset.

    Its ``state_dict`` has to be called with the number of samples.

    Example:
        >>> takes_position([1, 2])
        False
    """
    save = getattr(dataset, "state_dict", None)
    return callable(save) and {"num_samples", "from_beginning"} <= _parameters(save).keys()


def _parameters(method: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    try:
        return inspect.signature(method).parameters
    except ValueError:  # some functions written in C have no signature
        return {}


def objects_of(loader: Any) -> dict[str, Any]:
    """Return the objects that a loader consists of, by name; none if it is a list, or saves itself.

    A dataset that takes its position has no other state.

    Example:
        >>> list(objects_of(DataLoader([1, 2, 3])))
        ['dataset', 'collate_fn', 'batch_sampler', 'sampler']
    """
    if has_state(loader) or isinstance(loader, (list, tuple, torch.Tensor)):
        return {}
    if not isinstance(loader, DataLoader):
        return {"loader": loader}
    names = ["collate_fn"] if takes_position(loader.dataset) else ["dataset", "collate_fn"]
    if not isinstance(loader.dataset, IterableDataset):
        names += ["batch_sampler", "sampler"]
    return {name: getattr(loader, name) for name in names if getattr(loader, name) is not None}


def objects_to_evaluate(loader: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the objects of a loader to evaluate on, by name, and separately those that are streams.

    The state of a stream, its position, is not saved, because each evaluation begins with the first sample. After an
    evaluation that position is the end of the stream, and Hugging Face's IterableDataset yields nothing once it is
    loaded.

    Example:
        >>> objects, streams = objects_to_evaluate(DataLoader([1, 2, 3]))
        >>> list(objects), list(streams)
        (['dataset', 'collate_fn', 'batch_sampler', 'sampler'], [])
    """
    objects = objects_of(loader)
    streams = {name: objects.pop(name) for name, value in [*objects.items()] if isinstance(value, IterableDataset)}
    return objects, streams


class LoaderObjects(NamedTuple):
    """The objects that a loader consists of, by when a resumed run needs their states.

    A resumed run draws the order of the epoch again from its start. It also loads the samples before the resume point
    again, unless an epoch can start in its middle (``skips``): only then, data set and ``collate_fn`` are ``loading``,
    and else ``replayed`` as the samplers.

    Attributes:
        replayed: Those that it needs as they were at the start of the epoch.
        loading: Those that it needs as they are at the resume point.
        transforms: The transforms of the spec, which it needs as they are at the resume point.
    """

    replayed: dict[str, Any]
    loading: dict[str, Any]
    transforms: dict[str, Any]

    @classmethod
    def of(cls, spec: DataSpec, *, skips: bool) -> LoaderObjects:
        """Return the objects of a loader; ``skips`` is whether an epoch can start in its middle without loading."""
        objects = objects_of(spec.dataloader)
        samplers = {name: value for name, value in objects.items() if name.endswith("sampler")}
        loading = {name: value for name, value in objects.items() if name not in samplers}
        names = ("batch_transforms", "microbatch_transforms")
        transforms = {name: value for name in names if (value := getattr(spec, name)) is not None}
        replayed, at_resume = (samplers, loading) if skips else (objects, {})
        return cls(replayed, at_resume, transforms)

    def by_path(self, kind: str) -> dict[str, Any]:
        """Return the objects of an attribute, such as ``"loading"``, by their paths in a checkpoint."""
        return {f"train_dataloader.{name}": value for name, value in getattr(self, kind).items()}


def save_objects(objects: Mapping[str, Any], components: Mapping[str, Any] | None = None) -> SavedObjects:
    """Return what the contract saves.

    Args:
        objects: The objects by name.
        components: Objects whose ``state_dict()`` is saved elsewhere.

    Raises:
        NotSerializableError: A ``state_dict()`` contains something that is neither data nor a tensor.

    Example:
        >>> sampler = torch.utils.data.RandomSampler([1, 2], generator=torch.Generator())
        >>> saved = save_objects({"sampler": sampler})
        >>> list(saved.states), list(saved.generators)
        ([], ['sampler.generator'])
    """
    stateful = {path: value for path, value in _with_inner_samplers(objects).items() if has_state(value)}
    states = {path: plain(value.state_dict(), path) for path, value in stateful.items()}
    states = tree_map_only(Tensor, lambda tensor: tensor.detach().clone(), states)  # the objects go on
    generators = generators_of(objects, components)
    return SavedObjects(states, {path: generator_state(generator) for path, generator in generators.items()})


def load_objects(saved: SavedObjects, objects: Mapping[str, Any], components: Mapping[str, Any] | None = None) -> None:
    """Load what :func:`save_objects` returned; warn of state whose object is missing.

    Raises:
        ValueError: An object rejects its state.
    """
    missing, stateful = [], _with_inner_samplers(objects)
    for path, state in saved.states.items():
        if not has_state(stateful.get(path)):
            missing.append(path)
            continue
        try:
            stateful[path].load_state_dict(state)
        # This is code of the user, which may raise anything.
        except Exception as error:
            raise ValueError(
                f"load_state_dict() of {path} rejected what was saved of it: is it the same object, of the same data? "
                f"{type(error).__name__}: {error}"
            ) from error
    # After the states, because load_state_dict() may create a generator again.
    generators = generators_of(objects, components)
    for path, state in saved.generators.items():
        if path not in generators:
            missing.append(path)
            continue
        try:
            set_generator_state(generators[path], state)
        except ValueError as error:
            raise ValueError(f"{path} {error}.") from error
    if missing:
        warnings.warn(f"This program has no {', no '.join(missing)}, whose saved state is not restored.", stacklevel=2)


def create_generators(paths: Iterable[str], objects: Mapping[str, Any], load: Callable[[], object]) -> None:
    """Load a batch, which is discarded, if objects create generators with saved states when they are first used.

    Args:
        paths: Those of the saved generators.
        objects: The objects that load batches; their states are not restored yet.
        load: Loads a batch with them.

    Example:
        >>> create_generators(["sampler.generator"], {"sampler": object()}, load=lambda: print("a batch"))
        a batch
    """
    present = generators_of(objects)
    if any(path not in present and path.startswith(tuple(f"{name}." for name in objects)) for path in paths):
        load()


def generators_of(objects: Mapping[str, Any], components: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return the generators that are attributes, by path.

    Args:
        objects: The objects by name. Generators are also found in what they consist of.
        components: Modules, and further objects that may refer to all of a run: only their own attributes are searched.

    Example:
        >>> sampler = torch.utils.data.RandomSampler([1, 2], generator=torch.Generator())
        >>> list(generators_of({"sampler": sampler}))
        ['sampler.generator']
    """
    return {
        at(path, name): value
        for path, holder in _holders({**_parts(objects), **(components or {})})
        for name, value in generators_among(_inner(holder)).items()
    }


def _parts(objects: Mapping[str, Any]) -> dict[str, Any]:
    """Return objects and what they consist of, by path, each once."""
    found, seen = dict(objects), {id(value) for value in objects.values()}
    for root, first in objects.items():
        waiting = [(root, first)]
        for path, one in waiting:  # which grows
            for name, part in ({} if _is_closed(one) else _inner(one)).items():
                # The data of a sampler are those of the loader, whose states are needed at another place.
                is_data = root.endswith("sampler") and hasattr(part, "__getitem__") and not _is_container(part)
                if id(part) not in seen and _inner(part) and not is_data and len(waiting) < _MOST_PARTS:
                    seen.add(id(part))
                    waiting.append((at(path, name), part))
        found |= dict(waiting)
    return found


def _inner(one: Any) -> dict[Any, Any]:
    """Return the attributes of an object, the items of a container, or what a function is bound to."""
    if _is_container(one):
        return {} if len(one) > _MOST_ITEMS else one if isinstance(one, dict) else dict(enumerate(one))
    if isinstance(one, functools.partial):
        return {"func": one.func, "args": one.args, "keywords": one.keywords}
    if inspect.ismethod(one):
        return {"__self__": one.__self__}
    if inspect.isfunction(one):
        with contextlib.suppress(ValueError):  # a variable has no value yet
            return {**vars(one), **inspect.getclosurevars(one).nonlocals}
    return {} if isinstance(one, (type, ModuleType, Tensor)) else _attributes(one)


def _is_closed(one: Any) -> bool:
    """Return whether only the own attributes of an object are searched; a stream of a package copies its generators."""
    return isinstance(one, nn.Module) or (isinstance(one, IterableDataset) and _is_of_package(type(one).__module__))


def _is_container(one: Any) -> bool:
    return isinstance(one, (list, tuple, dict))


def _with_inner_samplers(objects: Mapping[str, Any]) -> dict[str, Any]:
    """Return objects, and the map-style data sets and samplers that they consist of, which may have states, too."""
    inner = {path: part for path, part in _parts(objects).items() if isinstance(part, (Dataset, Sampler))}
    return {path: part for path, part in inner.items() if not isinstance(part, IterableDataset)} | dict(objects)


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


def warn_of_changes(changed: list[str]) -> None:
    """Warn of changed attributes that are not saved."""
    if changed:
        warnings.warn(
            "A run that is resumed from this checkpoint may differ from one that is not interrupted, because these "
            f"attributes are not saved:\n{', '.join(changed)}: changed since training began. {_REMEDY}",
            stacklevel=2,
        )


def _holders(objects: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Return what has attributes: of a module all its modules, and any other object itself; with their paths."""
    for path, value in objects.items():
        if isinstance(value, nn.Module):
            yield from ((at(path, name) if name else path, module) for name, module in value.named_modules())
        else:
            yield path, value


def _attributes(holder: Any) -> dict[str, Any]:
    """Return the attributes of an object, also those in the slots of an attrs class that are not transient."""
    fields = attrs.fields(type(holder)) if attrs.has(type(holder)) else ()
    names = [field.name for field in fields if field.metadata.get("lifetime") != "transient"]
    return {name: getattr(holder, name, None) for name in names} | getattr(holder, "__dict__", {})


def _marks(objects: Mapping[str, Any]) -> dict[str, tuple[Any, str]]:
    models = [value for value in objects.values() if isinstance(value, nn.Module)]
    # An attribute that refers to a weight is saved with the model.
    weights = {id(tensor) for model in models for tensor in (*model.parameters(), *model.buffers())}
    marks: dict[str, tuple[Any, str]] = {}
    for path, holder in _holders(objects):
        if _is_of_package(type(holder).__module__) or _saves_attributes(holder):
            continue
        compared = {name: value for name, value in _attributes(holder).items() if id(value) not in weights}
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
    for path, holder in _holders(objects):
        if not isinstance(holder, nn.Module) or isinstance(holder, LazyModuleMixin):  # which changes in its first pass
            continue
        kind = type(holder)
        found[path] = kind.__qualname__
        if (
            _is_of_package(kind.__module__)
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


@functools.cache
def _is_of_package(module: str) -> bool:
    """Return whether a module is of an installed package, so that it is up to this what its attributes mean."""
    root = module.partition(".")[0]
    if root in {"composer", "torch"} or root in sys.stdlib_module_names:
        return True
    file = getattr(sys.modules.get(module), "__file__", None)
    return file is not None and bool({"site-packages", "dist-packages"}.intersection(Path(file).parts))


def _saves_attributes(holder: Any) -> bool:
    """Return whether the class of an object defines what is saved of it; those of torch and of this library do not."""
    kind = type(holder)
    if isinstance(holder, nn.Module):
        is_metric = hasattr(holder, "_update_count")  # torchmetrics; the trainer saves its states
        return is_metric or (kind.state_dict, kind.get_extra_state) != (nn.Module.state_dict, nn.Module.get_extra_state)
    if isinstance(holder, Serializable):
        return kind.state_dict is not Serializable.state_dict or bool(saved_fields(kind))
    return has_state(holder)


def settings_of(
    state: State, loader: Any, sizes: Mapping[str, int], subset_num_batches: int, *, seed: int, frozen: int
) -> dict[str, Any]:
    """Return the settings of a run by name.

    Args:
        state: The run.
        loader: Its training data; None if there is none yet.
        sizes: The known sizes of the data.
        subset_num_batches: The number of batches in an epoch; -1 for all.
        seed: The seed that the program gives, or else that of the run.
        frozen: The number of parameters that the program does not train.
    """
    settings = {
        "seed": seed,
        "precision": str(state.precision),
        "device_train_microbatch_size": "auto" if state.auto_microbatching else state.device_train_microbatch_size,
        "the number of parameters without requires_grad": frozen,
    }
    if loader is None:
        return settings
    found: dict[str, Any] = {"class": type(loader).__name__, **sizes, "subset_num_batches": subset_num_batches}
    if "samples a batch" in sizes:
        found["samples a batch"] = sizes["samples a batch"] * get_data_world_size()  # the same for fewer processes
    if isinstance(loader, DataLoader):
        found["drop_last"] = loader.drop_last
        found["seed of its generator"] = loader.generator and loader.generator.initial_seed()
        found |= {name: type(getattr(loader, name)).__name__ for name in ("dataset", "sampler", "batch_sampler")}
    return settings | {f"train_dataloader.{name}": value for name, value in found.items()}


def settings_of_program(model: Any, schedulers: Iterable[Any]) -> dict[str, Any]:
    """Return what a program sets of the loss, dropout and schedules, by name, before a checkpoint is loaded.

    Args:
        model: The model.
        schedulers: The arguments of the Trainer.
    """
    modules = model.modules() if isinstance(model, nn.Module) else ()
    dropout = Counter(str(module.p) for module in modules if isinstance(module, _DropoutNd))
    return {
        "loss_fn": _described(getattr(model, "loss_fn", None)),
        "dropout": ", ".join(f"{count} of {rate}" for rate, count in sorted(dropout.items())) or "none",
        "schedulers": ", ".join(map(_described, schedulers)) or "none",
    }


def _described(one: Any) -> str:
    """Return the name of a class or function with its declared settings."""
    if one is None or inspect.isroutine(one):
        return str(getattr(one, "__qualname__", None))
    settings = {name: value for name, value in plain_settings(declared_settings(one)).items() if value is not None}
    if isinstance(one, functools.partial):
        settings, one = plain_settings(one.keywords), one.func
    if isinstance(one, LRScheduler) and (steps := known_steps(one)):
        settings["steps"] = steps
    arguments = ", ".join(f"{name}={value}" for name, value in settings.items())
    return f"{getattr(one, '__qualname__', type(one).__qualname__)}({arguments})"


def report_settings(saved: Mapping[str, Any], now: Mapping[str, Any], path: str) -> None:
    """Report which settings have changed since a checkpoint was saved, which are the same, and which are not known.

    It is a warning if any have changed, and else a message of the log.
    """
    known = [name for name in now if name in saved]
    changed = [name for name in known if saved[name] != now[name]]
    unknown = [name for name in {**now, **saved} if name not in known]
    rows = [f"{name}: {saved[name]} was saved, {now[name]} is set." for name in changed]
    rows += [f"the same: {', '.join(name for name in known if name not in changed)}."]
    unknown += ["the samples, what a sampler of another library draws, and the code of the program"]
    rows += [f"not comparable: {', '.join(unknown)}."]
    if changed:
        title = (
            f"The run resumes from {path} with other settings, so that its results are not those of an uninterrupted "
            "run. The seed is the saved one (load_ignore_keys='rank_zero_seed' keeps the new one), and so are "
            "requires_grad (until set after the Trainer is constructed) and the numbers of torch's schedulers; all "
            "else is as the program sets it:"
        )
        warnings.warn(bulleted(title, rows), stacklevel=caller_level())
    else:
        _log.info("%s", bulleted(f"The settings of this run and of {path}:", rows))
