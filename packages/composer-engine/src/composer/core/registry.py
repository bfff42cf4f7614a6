"""Algorithms by name: how a saved one is constructed again from its name and settings, without running saved code."""

from __future__ import annotations

import copy
import inspect
import warnings
from typing import TYPE_CHECKING, Any, cast

import attrs
import torch

from composer.core.algorithm import Algorithm
from composer.core.checks import nearest
from composer.core.engine import Engine
from composer.core.event import Event
from composer.core.logger import Logger, LoggerDestination
from composer.core.plan import explain
from composer.core.saved_state import StateMismatchError, register_rebuild
from composer.core.serializable import is_unsaved
from composer.core.serialization import field_types, from_data

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from composer.core.passes import Passes
    from composer.core.saved_state import AlgorithmRecord
    from composer.core.state import State

__all__ = ["algorithm_classes", "rebuild_algorithm"]


def algorithm_classes(classes: Iterable[type[Algorithm]] = ()) -> dict[str, list[type[Algorithm]]]:
    """Return the classes of algorithms that can be constructed from saved settings, by name.

    These are all classes that have been defined, such as those of imported modules; a class that was defined a second
    time, as in a notebook, replaces the first.

    Args:
        classes: Classes that take precedence over all others of their name.

    Returns:
        For each name the classes that have it: several only if different modules define one each.

    Example:
        >>> class Halve(Algorithm):
        ...     def apply(self, event, state, logger):
        ...         state.loss = state.loss / 2
        >>> algorithm_classes()["Halve"]
        [<class 'composer.core.registry.Halve'>]
    """
    preferred = {kind.__name__: [kind] for kind in classes}
    latest = {(kind.__module__, kind.__qualname__): kind for kind in _subclasses(Algorithm)}
    known: dict[str, list[type[Algorithm]]] = {}
    for kind in latest.values():
        if not inspect.isabstract(kind):
            known.setdefault(kind.__name__, []).append(kind)
    return known | preferred


def _subclasses(kind: Any) -> Iterable[type[Algorithm]]:
    for subclass in kind.__subclasses__():
        yield subclass
        yield from _subclasses(subclass)


def rebuild_algorithm(record: Mapping[str, Any], classes: Iterable[type[Algorithm]] = ()) -> Algorithm:
    """Return a new algorithm from its saved name and settings.

    Args:
        record: ``{"name": "BlurPool", "settings": {"min_channels": 8}}``; other keys are ignored.
        classes: Classes that take precedence; see :func:`algorithm_classes`.

    Raises:
        ValueError: No class has the name, or more than one; a setting does not exist, does not fit or was not data.

    Example:
        >>> @attrs.define(eq=False)
        ... class Scale(Algorithm):
        ...     factor: float = 2.0
        ...     def apply(self, event, state, logger):
        ...         state.loss = self.factor * state.loss
        >>> rebuild_algorithm({"name": "Scale", "settings": {"factor": 3.0}}, classes=[Scale])
        Scale(factor=3.0)
    """
    name, settings = record.get("name"), record.get("settings")
    if not isinstance(name, str) or not isinstance(settings, dict):
        raise ValueError(f"A saved algorithm must have a name and a dictionary of settings, got {record!r:.200}.")  # noqa: TRY004
    kind: Any = _find(name, classes)
    if not attrs.has(kind):
        if settings or inspect.signature(kind).parameters:
            raise ValueError(
                f"{name} cannot be constructed again: it is no attrs class, so its settings are unknown. Decorate it "
                f"by @attrs.define(eq=False), or pass the object by algorithms=[{name}(...)]."
            )
        return cast("Algorithm", kind())
    problems, values = _read_settings(kind, settings)
    if problems:
        raise ValueError(f"{name} cannot be constructed again: {' '.join(problems)}")
    try:
        algorithm = kind(**values)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{name} cannot be constructed again from its saved settings: {error}") from error
    return cast("Algorithm", algorithm)


def _find(name: str, classes: Iterable[type[Algorithm]]) -> type[Algorithm]:
    known = algorithm_classes(classes)
    candidates = known.get(name, [])
    if not candidates:
        raise ValueError(
            f"No algorithm is named {name!r}{nearest(name, known)} Import the module that defines it (ours are in "
            "composer.algorithms), pass the class by classes=[...], or pass the object itself to the run."
        )
    if len(candidates) > 1:
        modules = " and ".join(sorted(f"{kind.__module__}.{kind.__qualname__}" for kind in candidates))
        raise ValueError(
            f"{name!r} may be {modules}; choose one by classes=[...], or pass the algorithm itself to the run."
        )
    return candidates[0]


def _read_settings(kind: Any, settings: Mapping[str, Any]) -> tuple[list[str], dict[str, Any]]:
    types = field_types(kind)
    fields = {str(field.alias): field for field in attrs.fields(kind) if field.init}
    problems, values = [], {}
    for name, data in settings.items():
        if name not in fields:
            problems.append(f"It has no setting {name!r}{nearest(name, fields)}")
        elif is_unsaved(data):
            problems.append(
                f"Its setting {name} was not data but {data['unsaved']}, which is not saved; pass the object by "
                f"algorithms=[{kind.__name__}({name}=...)]."
            )
        else:
            try:
                values[name] = from_data(data, types[fields[name].name], f"Its setting {name}")
            except ValueError as error:
                problems.append(str(error))
    return problems, values


@register_rebuild
class _RebuiltAlgorithms:
    """See :class:`composer.core.saved_state.RebuiltAlgorithms`."""

    def __init__(self, state: State, records: Mapping[int, AlgorithmRecord], passes: Passes) -> None:
        self._state, self._passes = state, passes
        self.made: dict[int, Algorithm] = {}
        problems = []
        for place, record in records.items():
            try:
                algorithm = rebuild_algorithm({"name": record.name, "settings": record.settings})
            except ValueError as error:
                problems.append(f"algorithms.{record.key}, which the weights need: {error}")
                continue
            if algorithm.required_on_load():  # a checkpoint alone cannot add algorithms to a run
                self.made[place] = algorithm
        if problems:
            raise StateMismatchError(problems)
        self.trial = self._try() if self.made else state

    def _try(self) -> State:
        state = self._state
        model, optimizers, made = copy.deepcopy((state.model, state.optimizers, self.made))
        with warnings.catch_warnings(), torch.random.fork_rng():
            warnings.simplefilter("ignore")
            explain(_merged(state.algorithms, made))
            changed = self._operate(_evolve(state, model=model, optimizers=optimizers), made, None)
        return _evolve(changed, algorithms=_merged(state.algorithms, made), callbacks=state.callbacks)

    def add(self, logger: Logger | None) -> None:
        if self.made:
            state = self._state
            changed = self._operate(state, self.made, logger)
            state.model, state.optimizers = changed.model, changed.optimizers
            state.made_on_load += self.made.values()
            state.algorithms = _merged(state.algorithms, self.made)

    def _operate(self, state: State, made: Mapping[int, Algorithm], logger: Logger | None) -> State:
        """Run the new algorithms, and no others, on the model; return the changed state."""
        changed = _evolve(state, algorithms=[*made.values()], callbacks=())
        # Not with the logger itself, whose destinations would be called at these events a second time.
        engine = Engine(changed, Logger(changed, _Relay(logger)) if logger else None, self._passes)
        for event in (Event.INIT, Event.BEFORE_LOAD):
            engine.run_event(event)
        return changed


def _evolve(state: State, **changes: Any) -> State:
    return attrs.evolve(state, **changes)


def _merged(algorithms: Iterable[Algorithm], made: Mapping[int, Algorithm]) -> list[Algorithm]:
    merged = list(algorithms)
    for place, algorithm in sorted(made.items()):
        merged.insert(place, algorithm)
    return merged


class _Relay(LoggerDestination):
    """Passes on what is logged, and ignores the events of a run."""

    def __init__(self, logger: Logger) -> None:
        self._logger = logger

    def log_hyperparameters(self, hyperparameters: Mapping[str, Any]) -> None:
        self._logger.log_hyperparameters(hyperparameters)

    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        self._logger.log_metrics(metrics, step)
