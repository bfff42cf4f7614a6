"""What algorithms, callbacks and loggers of a run have in common: their keys, and what is saved of each."""

from __future__ import annotations

import typing
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import attrs

from composer.core.checks import NamesArguments, describe, error_text, nearest
from composer.core.saving.codec import NotSerializableError, equal, plain
from composer.core.saving.records import field_types, read
from composer.core.saving.secrets import hide_secrets

T = TypeVar("T")


def by_key(components: Iterable[T], name_of: Callable[[T], str] = lambda one: type(one).__name__) -> dict[str, T]:
    """Return components by their keys: the names of their classes or others, numbered from the second of a name on.

    Example:
        >>> by_key([1.5, 2, 2.5])
        {'float': 1.5, 'int': 2, 'float.1': 2.5}
    """
    keys, counts = {}, Counter[str]()
    for component in components:
        name = name_of(component)
        keys[f"{name}.{counts[name]}" if counts[name] else name] = component
        counts[name] += 1
    return keys


def saved(**options: Any) -> Any:
    """Return an attrs field that is saved with a run and is not a setting: the progress of an algorithm or callback.

    Args:
        options: As those of ``attrs.field``; a ``default`` or ``factory`` is needed.

    Example:
        >>> from composer.core import Callback
        >>> @attrs.define(eq=False)
        ... class CountBatches(Callback):
        ...     seen: int = saved(default=0)
        ...     def batch_end(self, state, logger):
        ...         self.seen += 1
        >>> CountBatches().state_dict()
        {'seen': 0}
    """
    return attrs.field(metadata={"lifetime": "saved"}, init=False, repr=False, **options)


def transient(**options: Any) -> Any:
    """Return an attrs field that is neither a setting nor saved: what an algorithm keeps within a step or a fit.

    Setting it calls no validators and converters, which takes time in each step.

    Args:
        options: As those of :func:`attrs.field`; a ``default`` or ``factory`` is needed.

    Example:
        >>> @attrs.define
        ... class Count:
        ...     limit: int = attrs.field(default=3, validator=attrs.validators.gt(0))
        ...     seen: int = transient(default=0)
        >>> Count(limit=2)
        Count(limit=2)
    """
    metadata = {"lifetime": "transient"}
    return attrs.field(metadata=metadata, init=False, repr=False, on_setattr=attrs.setters.NO_OP, **options)


def saved_fields(kind: type) -> dict[str, attrs.Attribute[Any]]:
    """Return the fields of a class that are saved, by the names of the constructor's arguments."""
    if not attrs.has(kind):
        return {}
    return {str(field.alias): field for field in attrs.fields(kind) if field.metadata.get("lifetime") == "saved"}


def read_field(kind: type, field: attrs.Attribute[Any], data: Any, path: str) -> Any:
    """Return the value of a field of an attrs class from saved data.

    Raises:
        ValueError: The data is not of the field's type, or the field's own converter or validator rejects it.
    """
    value, converter = read(data, field_types(kind)[field.name], path), typing.cast("Any", field.converter)
    try:
        if callable(converter):
            value = converter(value)
        if field.validator is not None:
            field.validator(None, field, value)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{path}: {error_text(error)}") from None
    return value


def reset_fields(component: Any) -> None:
    """Set the fields of an attrs object that are not settings to their defaults, as in a new object.

    Example:
        >>> @attrs.define
        ... class Count:
        ...     step: int = 1
        ...     value: int = attrs.field(default=0, init=False)
        >>> count = Count(step=2)
        >>> count.value = 7
        >>> reset_fields(count)
        >>> count
        Count(step=2, value=0)
    """
    for field in attrs.fields(type(component)):
        default: Any = field.default
        if field.init or default is attrs.NOTHING:
            continue
        if isinstance(default, attrs.Factory):  # type: ignore[arg-type]
            default = default.factory(component) if default.takes_self else default.factory()
        setattr(component, field.name, default)


class Serializable(NamesArguments):
    """An object whose progress is saved with a run, as plain data (numbers, strings, lists, dictionaries) and tensors.

    Of an attrs class, the fields defined by :func:`saved` are saved and loaded. Other classes override
    :meth:`state_dict` and :meth:`load_state_dict`; and :meth:`check_state_dict`, so that a run remains unchanged if
    the saved state does not fit.

    Example:
        >>> Serializable().state_dict()
        {}
    """

    def settings(self) -> dict[str, Any]:
        """Return the constructor's arguments by name, of attrs classes; otherwise an empty dictionary."""
        kind = type(self)
        if not attrs.has(kind):
            return {}
        return {str(field.alias): getattr(self, field.name) for field in attrs.fields(kind) if field.init}

    def state_dict(self) -> dict[str, Any]:
        """Return what a later run needs to continue; tensors are not copied.

        Raises:
            NotSerializableError: A field contains something that is neither data nor a tensor.
        """
        kind = type(self)
        return {
            name: plain(getattr(self, field.name), f"{kind.__name__}.{name}")
            for name, field in saved_fields(kind).items()
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned; tensors are not copied.

        A subclass that overrides it may pass on what it has saved itself, which is ignored here.

        Raises:
            ValueError: ``state`` is not the state of an object of this class. Nothing has been changed.
        """
        if type(self).load_state_dict is not Serializable.load_state_dict:
            state = {name: state[name] for name in saved_fields(type(self)) if name in state}
        for name, value in read_state(self, state).items():
            setattr(self, name, value)

    def check_state_dict(self, state: dict[str, Any]) -> None:
        """Raise what :meth:`load_state_dict` would raise, and change nothing.

        Raises:
            ValueError: ``state`` is not the state of an object of this class.
        """
        # A class with a load_state_dict of its own has a form of the state that is unknown here.
        if type(self).load_state_dict is Serializable.load_state_dict:
            read_state(self, state)


def read_state(component: Serializable, state: dict[str, Any]) -> dict[str, Any]:
    """Return the values of the saved fields of an object, by the names of the attributes.

    Raises:
        ValueError: ``state`` is not the state of an object of this class.

    Example:
        >>> read_state(Serializable(), {})
        {}
    """
    kind, fields = type(component).__name__, saved_fields(type(component))
    if state and not fields:
        raise ValueError(f"{kind} saves nothing and cannot load {sorted(state, key=str)}.")
    problems = [f"{kind} saves no {name!r}{nearest(name, fields)}" for name in state if name not in fields]
    problems += [f"{kind}'s {name!r} is missing." for name in fields if name not in state]
    values = {}
    for name, field in fields.items():
        if name in state:
            try:
                values[field.name] = read_field(type(component), field, state[name], f"{kind}.{name}")
            except ValueError as error:
                problems.append(str(error))
    if problems:
        raise ValueError(" ".join(problems))
    return values


def settings_to_save(component: Serializable) -> dict[str, Any]:
    """Return the settings of an algorithm or callback as data.

    A setting that is not data, such as a function, is described: ``{"unsaved": "function my.module.get_image"}``. A
    run with such a setting can be saved and resumed with an object that the caller constructs; only constructing it
    from its saved settings fails. A field may have its own description: ``attrs.field(metadata={"describe": f})``.
    Likely secrets are not saved: :func:`~composer.core.saving.secrets.hide_secrets`.

    Example:
        >>> from composer.core import Algorithm
        >>> @attrs.define(eq=False)
        ... class Scale(Algorithm):
        ...     factor: float = 2.0
        ...     log: "object" = None
        ...     def apply(self, event, state, logger):
        ...         state.loss = self.factor * state.loss
        >>> settings_to_save(Scale(log=print))
        {'factor': 2.0, 'log': {'unsaved': 'function builtins.print'}}
    """
    kind: Any = type(component)
    if not attrs.has(kind):
        return {}
    data = {}
    for field in attrs.fields(kind):
        if field.init:
            value = getattr(component, field.name)
            name = str(field.alias)
            try:
                data[name] = plain(value)
                if not equal(shown := hide_secrets(data[name], name), data[name]):
                    data[name] = {"unsaved": str(shown)}
            except NotSerializableError:
                data[name] = {"unsaved": field.metadata.get("describe", describe)(hide_secrets(value, name))}
    return data


def is_unsaved(data: Any) -> bool:
    """Return whether a saved setting is only described."""
    return isinstance(data, dict) and data.keys() == {"unsaved"} and isinstance(data["unsaved"], str)
