"""What a checkpoint can hold."""

from __future__ import annotations

import typing
from typing import Any

import attrs

from composer.core.conversion import field_types, from_data, to_data
from composer.core.serialization import nearest

__all__ = ["Serializable", "read_field", "reset_fields", "saved_fields"]


class Serializable:
    """Something whose progress is saved with a run, as plain data (numbers, text, lists, dictionaries) and tensors.

    Of an attrs class the fields made by :func:`saved` are saved and loaded without further ado. Others override
    :meth:`state_dict` and :meth:`load_state_dict`; and :meth:`check_state_dict`, so that a run is left as it is where
    something does not fit.

    Example:
        >>> Serializable().state_dict()
        {}
    """

    def settings(self) -> dict[str, Any]:
        """Return the constructor's arguments by name, of attrs classes; else nothing."""
        kind = type(self)
        if not attrs.has(kind):
            return {}
        return {str(field.alias): getattr(self, field.name) for field in attrs.fields(kind) if field.init}

    def state_dict(self) -> dict[str, Any]:
        """Return what a later run needs to go on; tensors are not copied.

        Raises:
            NotSerializableError: A field holds something that is neither data nor a tensor.
        """
        fields, types = saved_fields(type(self)), _types(type(self))
        return {
            name: to_data(getattr(self, field.name), types[field.name], f"{type(self).__name__}.{name}")
            for name, field in fields.items()
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from what :meth:`state_dict` returned; tensors are taken over, not copied.

        Raises:
            ValueError: ``state`` is not what an object of this class saves. Nothing has been changed.
        """
        fields = saved_fields(type(self))
        for name, value in _read(self, state).items():
            setattr(self, fields[name].name, value)

    def check_state_dict(self, state: dict[str, Any]) -> None:
        """Raise what :meth:`load_state_dict` would raise, and change nothing.

        Raises:
            ValueError: ``state`` is not what an object of this class saves.
        """
        if type(self).load_state_dict is Serializable.load_state_dict:
            _read(self, state)


def read_field(field: attrs.Attribute[Any], kind: Any, data: Any, path: str) -> Any:
    """Return what an attrs field takes for saved data.

    Raises:
        ValueError: The data is not of the field's type, or the field's own converter or validator refuses it.
    """
    value, converter = from_data(data, kind, path), typing.cast("Any", field.converter)
    try:
        if callable(converter):
            value = converter(value)
        if field.validator is not None:
            field.validator(None, field, value)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{path}: {error}") from None
    return value


def saved_fields(kind: type) -> dict[str, attrs.Attribute[Any]]:
    """Return the fields of a class that are saved, by the names of the constructor's arguments."""
    if not attrs.has(kind):
        return {}
    return {str(field.alias): field for field in attrs.fields(kind) if field.metadata.get("lifetime") == "saved"}


def reset_fields(component: Any) -> None:
    """Set the fields of an attrs object that are no settings back to their defaults, as in a new object.

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


def _types(kind: type) -> dict[str, Any]:
    return field_types(kind) if attrs.has(kind) else {}


def _read(component: Serializable, state: dict[str, Any]) -> dict[str, Any]:
    kind, fields, types = type(component).__name__, saved_fields(type(component)), _types(type(component))
    if state and not fields:
        raise ValueError(f"{kind} saves nothing and cannot load {sorted(state)}.")
    problems = [f"{kind} saves no {name!r}{nearest(name, fields)}" for name in state if name not in fields]
    problems += [f"{kind}'s {name!r} is missing." for name in fields if name not in state]
    values = {}
    for name in fields.keys() & state.keys():
        try:
            values[name] = read_field(fields[name], types[fields[name].name], state[name], f"{kind}.{name}")
        except ValueError as error:
            problems.append(str(error))
    if problems:
        raise ValueError(" ".join(problems))
    return values
