"""Algorithms by name: how one that was saved as name and settings is made again, without running what was saved."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any, cast

import attrs

from composer.core.algorithm import Algorithm
from composer.core.checks import nearest
from composer.core.serialization import field_types, from_data, is_unsaved

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

__all__ = ["algorithm_classes", "rebuild_algorithm"]


def algorithm_classes(classes: Iterable[type[Algorithm]] = ()) -> dict[str, list[type[Algorithm]]]:
    """Return the classes of algorithms that can be made again, by name.

    Known are all classes that have been defined, so those of a module that has been imported; a class that was defined
    a second time, as in a notebook, replaces the first.

    Args:
        classes: Classes that come before all others of their name.

    Returns:
        For each name the classes that have it: more than one only if different modules define one each.

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
    """Return a new algorithm from the name and the settings that a run has saved.

    Args:
        record: ``{"name": "BlurPool", "settings": {"min_channels": 8}}``; what else is in it is not looked at.
        classes: Classes to look among first; see :func:`algorithm_classes`.

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
        return _make_plain(kind, settings)
    problems, values = _read_settings(kind, settings)
    if problems:
        raise ValueError(f"{name} cannot be made again: {' '.join(problems)}")
    try:
        algorithm = kind(**values)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{name} cannot be made again from its saved settings: {error}") from error
    return cast("Algorithm", algorithm)


def _find(name: str, classes: Iterable[type[Algorithm]]) -> type[Algorithm]:
    known = algorithm_classes(classes)
    found = known.get(name, [])
    if not found:
        raise ValueError(
            f"No algorithm is named {name!r}{nearest(name, known)} Import the module that defines it (ours are in "
            "composer.algorithms), hand the class in by classes=[...], or give the run the object itself."
        )
    if len(found) > 1:
        modules = " and ".join(sorted(f"{kind.__module__}.{kind.__qualname__}" for kind in found))
        raise ValueError(
            f"{name!r} may be {modules}; say which by classes=[...], or give the run the algorithm itself."
        )
    return found[0]


def _make_plain(kind: type[Algorithm], settings: Mapping[str, Any]) -> Algorithm:
    if settings or inspect.signature(kind).parameters:
        raise ValueError(
            f"{kind.__name__} cannot be made again: it is no attrs class, so its settings are not known. Decorate it "
            f"by @attrs.define(eq=False), or hand the object in by algorithms=[{kind.__name__}(...)]."
        )
    return kind()


def _read_settings(kind: Any, settings: Mapping[str, Any]) -> tuple[list[str], dict[str, Any]]:
    types = field_types(kind)
    fields = {str(field.alias): field for field in attrs.fields(kind) if field.init}
    problems, values = [], {}
    for name, data in settings.items():
        if name not in fields:
            problems.append(f"It has no setting {name!r}{nearest(name, fields)}")
        elif is_unsaved(data):
            problems.append(
                f"Its setting {name} was not data but {data['unsaved']}, which is not saved; hand the object in by "
                f"algorithms=[{kind.__name__}({name}=...)]."
            )
        else:
            try:
                values[name] = from_data(data, types[fields[name].name], f"Its setting {name}")
            except ValueError as error:
                problems.append(str(error))
    return problems, values
