"""Typed values as plain data and back, through one cattrs converter."""

from __future__ import annotations

import collections.abc
import contextlib
import datetime as dt
import enum
import math
import numbers
import operator
import pathlib
import sys
import types
import typing
import weakref
from functools import partial
from typing import TYPE_CHECKING, Any

import attrs
import cattrs
import torch
from cattrs.errors import ForbiddenExtraKeysError
from torch import Tensor

from composer.core.serialization import (
    NotSerializableError,
    describe,
    is_number,
    nearest,
    plain,
    plain_number,
    shortened,
)
from composer.core.time import Time, Timestamp

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

__all__ = ["field_types", "from_data", "to_data"]

_KNOWN_TYPES: weakref.WeakKeyDictionary[type, dict[str, Any]] = weakref.WeakKeyDictionary()


def field_types(kind: type) -> dict[str, Any]:
    """Return the types of an attrs class's fields by name; ``Any`` where an annotation cannot be read at run time.

    Example:
        >>> @attrs.define
        ... class Point:
        ...     x: "int | None" = None
        >>> field_types(Point)
        {'x': int | None}
    """
    known = _KNOWN_TYPES.setdefault(kind, {})
    for field in attrs.fields(kind):
        if field.name not in known:
            with contextlib.suppress(NameError, AttributeError, TypeError, SyntaxError):  # it may be readable later
                known[field.name] = _field_type(kind, field)
    return {field.name: known.get(field.name, Any) for field in attrs.fields(kind)}


def _field_type(kind: type, field: attrs.Attribute[Any]) -> Any:
    if field.type is None:
        return Any
    owner = next(
        base
        for base in kind.__mro__
        if attrs.has(base) and any(one.name == field.name and not one.inherited for one in attrs.fields(base))
    )
    holder = type("_Holder", (), {"__annotations__": {field.name: field.type}})
    return typing.get_type_hints(holder, vars(sys.modules[owner.__module__]), dict(vars(owner)))[field.name]


def to_data(value: Any, kind: Any = Any, path: str = "") -> Any:
    """Return a value of a declared type as plain data and tensors.

    A :class:`Time` becomes its text, an enumeration's member its value, a duration its seconds, a dtype, device or file
    path its name, a tuple or set a list, an attrs object a dictionary. What has no declared type (``Any``) is plain
    data already.

    Args:
        value: What to save.
        kind: Its type, as annotated.
        path: Where the value lies, for the error.

    Raises:
        NotSerializableError: It holds something else, or something that would not be the same when read again.

    Example:
        >>> to_data(Time(10, "ep"), Time), to_data((0.9, None), tuple[float, Time | None])
        ('10ep', [0.9, None])
    """
    try:
        data = _CONVERTER.unstructure(value, kind)
    except Exception as error:  # noqa: BLE001  (a value that is not of its declared type fails in many ways)
        plain(value, path)
        raise NotSerializableError(path, f"{describe(value)} cannot be saved as {_type_name(kind)}: {error}") from None
    data = plain(data, path)
    try:
        same = _same(from_data(data, kind, path), value)
    except ValueError:
        same = False
    if not same:
        raise NotSerializableError(
            path, f"{describe(value)} cannot be saved: it would not be the same when read as {_type_name(kind)}."
        )
    return data


def from_data(data: Any, kind: Any = Any, path: str = "") -> Any:
    """Return the value of a declared type that :func:`to_data` made ``data`` of.

    Args:
        data: Plain data and tensors.
        kind: The value's type.
        path: Where the data lies, for the error.

    Raises:
        ValueError: The data does not say a value of this type.

    Example:
        >>> from_data([0.9, "10ep"], tuple[float, Time | None])
        (0.9, Time(10, 'ep'))
    """
    try:
        value = _CONVERTER.structure(data, kind)
        again = _CONVERTER.unstructure(value, kind)
    except Exception as error:  # noqa: BLE001  (data that nobody wrote on purpose fails in many ways)
        raise ValueError(" ".join(_sentences(error, data, kind, path))) from None
    if not _same(again, data):
        raise ValueError(_must_be(kind, data, path))
    return value


def _must_be(kind: Any, data: Any, path: str, why: str = "") -> str:
    return f"{path or 'The value'}: must be {_type_name(kind)}, got {shortened(data)}{why}."


def _sentences(error: Exception, data: Any, kind: Any, path: str) -> list[str]:
    if not isinstance(error, cattrs.BaseValidationError):
        text = str(error)
        return [_must_be(kind, data, path, "" if text.startswith("got ") else f": {text}".rstrip(".:"))]
    lines = cattrs.transform_error(error, path or "The value", _problem)
    return [f"{where}: {problem}." for problem, _, where in (line.rpartition(" @ ") for line in lines)]


def _problem(error: BaseException, kind: Any) -> str:
    if isinstance(error, ForbiddenExtraKeysError):
        known = [field.name for field in attrs.fields(error.cl)]
        return "; ".join(f"unknown field {name!r}{nearest(name, known, '')}" for name in sorted(error.extra_fields))
    if isinstance(error, KeyError):
        return f"field {error} is missing"
    return f"must be {_type_name(kind)}: {error}".rstrip(".:")


def _type_name(kind: Any) -> str:
    return kind.__name__ if isinstance(kind, type) and not typing.get_args(kind) else str(kind).replace("typing.", "")


def _same(one: Any, other: Any) -> bool:
    """Return whether what was read is what was saved; NumPy's numbers and Python's are the same."""
    if isinstance(one, Tensor) or isinstance(other, Tensor):
        return one is other
    if is_number(one):
        return _same_number(one, other)
    if isinstance(one, (list, tuple, dict)):
        return type(one) is type(other) and len(one) == len(other) and all(map(_same, _parts(one), _parts(other)))
    if attrs.has(type(one)) and type(one) is not Time:
        return type(one) is type(other) and all(map(_same, _parts(one), _parts(other)))
    both_sets = isinstance(one, collections.abc.Set) and isinstance(other, collections.abc.Set)
    # Where a text is as good as what it says, it is read as that: "10ep" as a Time.
    return (type(one) is type(other) or both_sets or isinstance(other, str)) and bool(one == other)


def _same_number(one: Any, other: Any) -> bool:
    if not isinstance(other, numbers.Real) or isinstance(one, bool) is not isinstance(other, bool):
        return False
    return bool(one == other) or (math.isnan(one) and math.isnan(other))


def _parts(whole: Any) -> list[Any]:
    if isinstance(whole, dict):  # in any order
        return [part for item in sorted(whole.items(), key=lambda item: repr(item[0])) for part in item]
    return (
        list(whole) if isinstance(whole, (list, tuple)) else [getattr(whole, f.name) for f in attrs.fields(type(whole))]
    )


def _is_union(kind: Any) -> bool:
    return typing.get_origin(kind) in {typing.Union, types.UnionType}


def _is_free(kind: Any) -> bool:
    return kind is Any or kind is object or (_is_union(kind) and any(map(_is_free, typing.get_args(kind))))


def _is_choice(kind: Any) -> bool:
    return _is_union(kind) and not _is_free(kind)


def _write_choice(kind: Any) -> Callable[[Any], Any]:
    def write(value: Any) -> Any:
        for member in typing.get_args(kind):
            try:
                return to_data(value, member)
            except NotSerializableError:
                continue
        return value

    return write


def _read_choice(kind: Any) -> Callable[[Any, Any], Any]:
    def read(data: Any, _: Any) -> Any:
        for member in typing.get_args(kind):
            try:
                return from_data(data, member)
            except ValueError:
                continue
        raise ValueError(f"got {shortened(data)}")

    return read


def _is_bare(kind: Any) -> bool:
    return kind in (list, tuple, dict) or (
        kind in (collections.abc.Sequence, collections.abc.Mapping, typing.List, typing.Dict, typing.Tuple)  # noqa: UP006
    )


def _is_sequence(kind: Any) -> bool:
    """Whether a list is as good as a tuple, so that each has to stay what it is."""
    return typing.get_origin(kind) in {collections.abc.Sequence, collections.abc.Iterable, collections.abc.Collection}


def _each(kind: Any, convert: Callable[[Any, Any], Any]) -> Callable[..., Any]:
    (item_kind,) = typing.get_args(kind)

    def apply(items: Any, *_: Any) -> Any:
        if type(items) not in {list, tuple}:
            raise TypeError(f"got {shortened(items)}")
        return type(items)([convert(item, item_kind) for item in items])

    return apply


def _instance(value: Any, kind: Any) -> Any:
    wanted = typing.get_origin(kind) or kind
    if not isinstance(value, wanted):
        raise TypeError(f"got {shortened(value)}")
    return value


def _number_as_it_is(value: Any, kind: type) -> Any:
    """Return a number: a whole one may stand where a float is declared, and is not changed into one."""
    if kind not in {int, float}:  # cattrs asks for subclasses, too: bool, and enumerations of numbers
        return kind(value)
    wanted = numbers.Integral if kind is int else numbers.Real
    if isinstance(value, (bool, enum.Enum)) or not isinstance(value, wanted):
        raise TypeError(f"got {shortened(value)}")
    return plain_number(value)


def _to_dtype(name: str, _: Any) -> torch.dtype:
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"torch has no dtype {name!r}")
    return dtype


def _is_subclass_of(base: type) -> Callable[[Any], bool]:
    return lambda kind: isinstance(kind, type) and not typing.get_args(kind) and issubclass(kind, base)


def _in_order(items: Iterable[Any]) -> list[Any]:
    listed = list(items)
    try:
        return sorted(listed)
    except TypeError:
        return sorted(listed, key=lambda item: (type(item).__name__, repr(item)))


def _make_converter() -> cattrs.Converter:
    converter = cattrs.Converter(
        forbid_extra_keys=True, unstruct_collection_overrides={collections.abc.Set: _in_order, tuple: list}
    )
    leaves: Mapping[type, tuple[Callable[[Any], Any], Callable[[Any, Any], Any]]] = {
        Time: (Time.to_timestring, lambda text, _: Time.from_timestring(text)),
        Timestamp: (Timestamp.state_dict, lambda state, _: Timestamp.from_state_dict(state)),
        dt.timedelta: (dt.timedelta.total_seconds, lambda seconds, _: dt.timedelta(seconds=seconds)),
        torch.dtype: (lambda dtype: str(dtype).removeprefix("torch."), _to_dtype),
        torch.device: (str, lambda name, _: torch.device(name)),
    }
    for kind, (write, read) in leaves.items():
        converter.register_unstructure_hook(kind, write)
        converter.register_structure_hook(kind, read)
    for number in (int, float):
        converter.register_unstructure_hook_func(partial(operator.is_, number), partial(_number_as_it_is, kind=number))
        converter.register_structure_hook(number, _number_as_it_is)
    for base, write in ((pathlib.PurePath, str), (Tensor, lambda tensor: tensor)):
        converter.register_unstructure_hook_func(_is_subclass_of(base), write)
    converter.register_unstructure_hook(str, lambda text: text.value if isinstance(text, enum.Enum) else str(text))
    converter.register_structure_hook(types.NoneType, _instance)
    converter.register_structure_hook_func(_is_subclass_of(pathlib.PurePath), lambda text, kind: kind(text))
    converter.register_structure_hook_func(_is_subclass_of(Tensor), _instance)
    for is_it, read in ((_is_bare, _instance), (_is_free, lambda data, _: data)):
        converter.register_unstructure_hook_func(is_it, lambda value: value)
        converter.register_structure_hook_func(is_it, read)
    converter.register_unstructure_hook_factory(_is_sequence, lambda kind: _each(kind, converter.unstructure))
    converter.register_structure_hook_factory(_is_sequence, lambda kind: _each(kind, converter.structure))
    converter.register_unstructure_hook_factory(_is_choice, _write_choice)
    converter.register_structure_hook_factory(_is_choice, _read_choice)
    return converter


_CONVERTER = _make_converter()
