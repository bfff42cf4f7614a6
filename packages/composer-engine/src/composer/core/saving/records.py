"""Saved data with declared types: attrs classes that are saved as dictionaries, and their construction from these.

:func:`read` checks a decoded value against a type, as annotated, and constructs :class:`Record` objects, whose
dictionaries do not state their class. :func:`from_data` decodes before.
"""

from __future__ import annotations

import collections.abc
import contextlib
import enum
import numbers
import sys
import types
import typing
import weakref
from collections.abc import Iterator, Mapping
from typing import Any

import attrs

from composer.core.checks import error_text, nearest, shortened
from composer.core.saving.codec import Place, Record, decode, text_of
from composer.core.time import Timestamp


def from_data(data: Any, kind: Any = Any, path: str = "") -> Any:
    """Return what :func:`~composer.core.to_data` encoded, of a declared type.

    Raises:
        ValueError: The data is not as :func:`~composer.core.to_data` returns it, or of another type.

    Example:
        >>> from composer.core import Time
        >>> from_data({"$tuple": [{"$time": "10ep"}, None]}, tuple[Time | None, ...])
        (Time(10, TimeUnit.EPOCH), None)
    """
    return read(decode(data, path), kind, path)


def read(value: Any, kind: Any, path: Place = "") -> Any:  # noqa: PLR0911  (one for each kind of type)
    """Return a decoded value if it is of a declared type, with records constructed from their dictionaries.

    Args:
        value: What :func:`join_tensors` returned.
        kind: The type, as annotated.
        path: The place of the value, for the error: a string, or that of the container with the key in it.

    Raises:
        ValueError: The value is of another type, or a record lacks a field, has another, or rejects a value.

    Example:
        >>> from composer.core import Time
        >>> read([Time(3, "ep"), None], list[Time | None])
        [Time(3, TimeUnit.EPOCH), None]
        >>> read([1, "a"], list[int], "sizes")
        Traceback (most recent call last):
        ValueError: sizes[1]: must be int, got 'a'.
    """
    kind = types.NoneType if kind is None else getattr(kind, "__supertype__", kind)  # of a NewType
    origin, arguments = typing.get_origin(kind) or kind, typing.get_args(kind)
    if origin in (typing.Annotated, typing.Final):
        return read(value, arguments[0], path)
    if origin in (typing.Union, types.UnionType):
        for member in arguments:
            with contextlib.suppress(ValueError):
                return read(value, member, path)
    elif origin is typing.Literal:
        if any(type(value) is type(choice) and value == choice for choice in arguments):
            return value
    elif origin in (Any, object) or not isinstance(origin, type):
        return value  # any data, a variable of a generic class, or a special form
    elif issubclass(origin, Record) and type(value) is dict:
        return _read_record(value, kind, path)
    elif origin is Timestamp and type(value) is dict:  # as a state has it
        with _at(path):
            return Timestamp.from_state_dict(value)
    elif origin is tuple and type(value) is list:  # of JSON that others have written
        return read(tuple(value), kind, path)
    elif _is_a(value, origin):
        return _read_items(value, origin, arguments, path)
    raise ValueError(f"{text_of(path) or 'The value'}: must be {_type_name(kind)}, got {shortened(value)}.")


def _is_a(value: Any, kind: type) -> bool:
    if kind in (int, float):
        number = numbers.Integral if kind is int else numbers.Real
        return isinstance(value, number) and not isinstance(value, (bool, enum.Enum))
    return isinstance(value, kind) and not (isinstance(value, str) and kind is not str and not issubclass(kind, str))


def _read_items(value: Any, origin: type, arguments: tuple[Any, ...], path: Place) -> Any:
    """Return a container with its items read; other values as they are."""
    if isinstance(value, Mapping) and arguments:
        key_kind, item_kind = arguments if len(arguments) == 2 else (arguments[0], int)  # a Counter counts its keys
        items = {}
        for key, item in value.items():
            read_key = key if key_kind is str and type(key) is str else read(key, key_kind, path)
            items[read_key] = read(item, item_kind, (path, key))
        return items if type(value) is dict else type(value)(items)  # type: ignore[call-arg]
    if not arguments or not issubclass(origin, collections.abc.Collection):
        return value
    if origin is not tuple or arguments[1:] == (...,):
        arguments = arguments[:1] * len(value)
    if len(arguments) != len(value):
        raise ValueError(f"{text_of(path) or 'The value'}: must have {len(arguments)} items, got {shortened(value)}.")
    pairs = zip(value, arguments, strict=True)
    return type(value)(read(item, one, (path, index)) for index, (item, one) in enumerate(pairs))


def _read_record(data: dict[str, Any], kind: Any, path: Place) -> Any:
    cls = typing.get_origin(kind) or kind
    variables = dict(zip(getattr(cls, "__parameters__", ()), typing.get_args(kind), strict=False))
    kinds = field_types(cls)
    problems = [f"unknown field {name!r}{nearest(name, kinds, '')}" for name in data if name not in kinds]
    required = [field.name for field in attrs.fields(cls) if field.default is attrs.NOTHING]
    problems += [f"field {name!r} is missing" for name in required if name not in data]
    if problems:
        raise ValueError(f"{text_of(path) or 'The value'}: {'; '.join(problems)}.")
    values = {name: read(item, variables.get(kinds[name], kinds[name]), (path, name)) for name, item in data.items()}
    with _at(path):
        return cls(**{str(field.alias): values[field.name] for field in attrs.fields(cls) if field.name in values})


@contextlib.contextmanager
def _at(path: Place) -> Iterator[None]:
    """Raise the errors of a constructor as ValueErrors that begin with the place of its arguments."""
    try:
        yield
    except (TypeError, ValueError) as error:
        raise ValueError(f"{text_of(path) or 'The value'}: {error_text(error)}") from None


def _type_name(kind: Any) -> str:
    return kind.__name__ if isinstance(kind, type) and not typing.get_args(kind) else str(kind).replace("typing.", "")


_KNOWN_TYPES: weakref.WeakKeyDictionary[type, dict[str, Any]] = weakref.WeakKeyDictionary()


def field_types(kind: Any) -> dict[str, Any]:
    """Return the types of an attrs class's fields by name; ``Any`` if an annotation cannot be resolved at run time.

    Example:
        >>> @attrs.define
        ... class Point:
        ...     x: "int | None" = None
        >>> field_types(Point)
        {'x': int | None}
    """
    if not attrs.has(kind):
        return {}
    known = _KNOWN_TYPES.setdefault(kind, {})
    for field in attrs.fields(kind):
        if field.name not in known and field.type is not None:
            with contextlib.suppress(NameError, AttributeError, TypeError, SyntaxError):  # it may be resolved later
                owner = next(base for base in kind.__mro__ if field.name in vars(base).get("__annotations__", {}))
                holder = type("_Holder", (), {"__annotations__": {field.name: field.type}})
                names = vars(sys.modules[owner.__module__])
                known[field.name] = typing.get_type_hints(holder, names, dict(vars(owner)))[field.name]
    return {field.name: known.get(field.name, Any) for field in attrs.fields(kind)}
