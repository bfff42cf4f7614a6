"""What a checkpoint contains of the objects that load the data, and of other objects that were given to the Trainer.

- What has ``state_dict()`` and ``load_state_dict()`` is saved by them.
- Generators that are attributes of these objects are saved, also within what they consist of, such as a data set in a
  ``Subset``, a sampler in a ``BatchSampler``, a transform, a list, or what a function is bound to.
- Nothing else is saved; see ``trainer/resume/given_objects.py``.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple

import attrs
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler

from composer.checkpoint.contents import SavedObjects
from composer.core.saving.codec import at, plain
from composer.core.saving.randomness import generator_state, generators_among, set_generator_state

if TYPE_CHECKING:
    from composer.core import DataSpec

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
    """Return what a checkpoint has of the objects of the data: their states, and generators within them.

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
        for path, holder in holders({**_parts(objects), **(components or {})})
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
    return {} if isinstance(one, (type, ModuleType, Tensor)) else attributes(one)


def _is_closed(one: Any) -> bool:
    """Return whether only the own attributes of an object are searched; a stream of a package copies its generators."""
    return isinstance(one, nn.Module) or (isinstance(one, IterableDataset) and is_of_package(type(one).__module__))


def _is_container(one: Any) -> bool:
    return isinstance(one, (list, tuple, dict))


def _with_inner_samplers(objects: Mapping[str, Any]) -> dict[str, Any]:
    """Return objects, and the map-style data sets and samplers that they consist of, which may have states, too."""
    inner = {path: part for path, part in _parts(objects).items() if isinstance(part, (Dataset, Sampler))}
    return {path: part for path, part in inner.items() if not isinstance(part, IterableDataset)} | dict(objects)


def holders(objects: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Return what has attributes: of a module all its modules, and any other object itself; with their paths."""
    for path, value in objects.items():
        if isinstance(value, nn.Module):
            yield from ((at(path, name) if name else path, module) for name, module in value.named_modules())
        else:
            yield path, value


def attributes(holder: Any) -> dict[str, Any]:
    """Return the attributes of an object, also those in the slots of an attrs class that are not transient."""
    fields = attrs.fields(type(holder)) if attrs.has(type(holder)) else ()
    names = [field.name for field in fields if field.metadata.get("lifetime") != "transient"]
    return {name: getattr(holder, name, None) for name in names} | getattr(holder, "__dict__", {})


@functools.cache
def is_of_package(module: str) -> bool:
    """Return whether a module is of an installed package, so that it is up to this what its attributes mean."""
    root = module.partition(".")[0]
    if root in {"composer", "torch"} or root in sys.stdlib_module_names:
        return True
    file = getattr(sys.modules.get(module), "__file__", None)
    return file is not None and bool({"site-packages", "dist-packages"}.intersection(Path(file).parts))
