"""The encoding of all that is saved: nested data as JSON and tensors, in which each value states its type.

:func:`split_tensors` encodes, and :func:`join_tensors` decodes what it returned, also after a round trip through JSON.
:func:`to_data` and :func:`from_data` do the same with the tensors in their places, as for ``torch.save``. :func:`plain`
copies such data without encoding it. :func:`read` checks a value against a declared type, and constructs
:class:`Record` objects, whose dictionaries do not state their class.

What JSON cannot represent becomes a dictionary of one key that begins with ``$``: ``{"$tensor": name}``,
``{"$tuple": [...]}``, ``{"$float": "nan"}``, ``{"$time": "10ep"}``, ``{"$enum": [class, value]}``, and so on. The class
of an enumeration is looked up among the loaded modules and never imported.
"""

from __future__ import annotations

import collections.abc
import contextlib
import datetime as dt
import enum
import itertools
import math
import numbers
import operator
import pathlib
import sys
import types
import typing
import warnings
import weakref
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeAlias

import attrs
import torch
from torch import Tensor

from composer.core.checks import describe, error_text, nearest, shortened
from composer.core.time import Time, Timestamp

# Both are far below what Python limits, recursion and digits of a number, so that no saved data exceeds it.
MAX_DEPTH = 64
MAX_BITS = 4096

_Place: TypeAlias = "tuple[_Place | str, object] | str"
"""A place in nested data: that of the container, and the key in it. Only an error formats it as a string."""
_Store: TypeAlias = "Callable[[Tensor, _Place], str] | None"


class NotSerializableError(TypeError):
    """A value that is neither plain data nor a tensor cannot be saved; ``path`` is its place, ``reason`` the cause."""

    def __init__(self, path: str, reason: str) -> None:
        super().__init__(f"{path}: {reason}" if path else reason)
        self.path, self.reason = path, reason


class Record:
    """An attrs class that is saved as the dictionary of its fields, which ``read()`` constructs again."""

    __slots__ = ()


def plain(value: Any, path: str = "") -> Any:
    """Return a copy of data: new containers, the same tensors, and Python's numbers in place of NumPy's.

    Args:
        value: Numbers, strings, None, tensors, members of enumerations, times, dtypes, devices and file paths; lists,
            tuples, sets and mappings of them; records, which become dictionaries.
        path: The place of the value, for the error.

    Raises:
        NotSerializableError: The value contains something else.

    Example:
        >>> plain({"step": 3, "when": print}, "EMA")
        Traceback (most recent call last):
        composer.core.saving.codec.NotSerializableError: EMA.when: function builtins.print cannot be saved. ...
    """
    return _encode(value, path, 0, None)


def to_data(value: Any, path: str = "") -> Any:
    """Return a value encoded as numbers, strings, None, lists, dictionaries and tensors, which any program can load.

    Raises:
        NotSerializableError: The value contains what ``plain()`` does not accept.

    Example:
        >>> to_data({"when": (Time(10, "ep"), None)})
        {'when': {'$tuple': [{'$time': '10ep'}, None]}}
    """
    return _encode(value, path, 0, _in_place)


def from_data(data: Any, kind: Any = Any, path: str = "") -> Any:
    """Return what :func:`to_data` encoded, of a declared type.

    Raises:
        ValueError: The data is not as :func:`to_data` returns it, or of another type.

    Example:
        >>> from_data({"$tuple": [{"$time": "10ep"}, None]}, tuple[Time | None, ...])
        (Time(10, TimeUnit.EPOCH), None)
    """
    return read(_decode(data, path, 0, {}, set()), kind, path)


def _in_place(tensor: Tensor, place: _Place) -> Any:
    """Return a tensor in place of its name."""
    del place
    return tensor


@torch.no_grad()  # a DTensor returns its local tensor much faster without a graph
def split_tensors(state: Any) -> tuple[Any, dict[str, Tensor]]:
    """Return ``(data, tensors)``: data for JSON, and the tensors by the names that replace them in the data.

    ``join_tensors(json.loads(json.dumps(data)), tensors)`` returns an equal ``state``.

    Args:
        state: What ``plain()`` accepts.

    Returns:
        The data and the tensors. Tensors are detached and not copied; tensors of the same memory are returned once.

    Raises:
        NotSerializableError: ``state`` contains something else.

    Example:
        >>> data, tensors = split_tensors({"average": torch.ones(2), "betas": (0.9, float("inf")), "at": Time(3, "ep")})
        >>> data
        {'average': {'$tensor': 'average'}, 'betas': {'$tuple': [0.9, {'$float': 'inf'}]}, 'at': {'$time': '3ep'}}
        >>> tensors
        {'average': tensor([1., 1.])}
    """
    tensors: dict[str, Tensor] = {}
    names: dict[tuple[Any, ...], str] = {}

    def store(tensor: Tensor, place: _Place) -> str:
        held: Any = tensor
        if hasattr(held, "device_mesh"):  # a DTensor has no memory of its own
            held = held.to_local()
        view = tensor.is_conj(), tensor.is_neg(), tuple(tensor.shape), tensor.stride()
        memory = (tensor.device, tensor.dtype, held.data_ptr(), *view)
        if not held.numel() or memory not in names:
            path = _text(place) or "tensor"
            candidates = itertools.chain([path], (f"{path}#{number}" for number in itertools.count(1)))
            names[memory] = next(name for name in candidates if name not in tensors)
            tensors[names[memory]] = tensor.detach() if tensor.requires_grad else tensor
        return names[memory]

    return _encode(state, "", 0, store), tensors


def join_tensors(data: Any, tensors: Mapping[str, Tensor]) -> Any:
    """Return the state from which :func:`split_tensors` made ``data`` and ``tensors``.

    Args:
        data: The data, as it was or after a round trip through JSON.
        tensors: The tensors by name.

    Raises:
        ValueError: The data refers to a tensor that is missing, or is not as :func:`split_tensors` writes it, or does
            not refer to one of the tensors.

    Example:
        >>> join_tensors({"betas": {"$tuple": [0.9, {"$float": "inf"}]}}, {})
        {'betas': (0.9, inf)}
    """
    used: set[str] = set()
    state = _decode(data, "", 0, tensors, used)
    unused = sorted(set(tensors) - used)
    if unused:
        raise ValueError(f"These tensors have no place in the data: {', '.join(map(repr, unused))}.")
    return state


def _encode(value: Any, place: _Place, depth: int, store: _Store) -> Any:  # noqa: PLR0911  (one for each kind)
    """Return a value as JSON data; without ``store`` a copy of it."""
    kind = type(value)
    if value is None or kind is bool or kind is str or (kind is float and math.isfinite(value)):
        return value
    if kind is int and value.bit_length() <= MAX_BITS:
        return value
    if isinstance(value, Tensor):
        _check_tensor(value, place)
        return value if store is None or store is _in_place else {"$tensor": store(value, place)}
    if depth > MAX_DEPTH:
        raise NotSerializableError(
            _text(place), f"cannot be saved: it is nested more than {MAX_DEPTH} deep, or contains itself."
        )
    if isinstance(value, Record):
        value = {field.name: getattr(value, field.name) for field in attrs.fields(kind)}
    if isinstance(value, Mapping):
        return _encode_mapping(value, place, depth + 1, store)
    if kind in _SEQUENCES:
        items = []
        for index, item in enumerate(value):
            # Names of parameters are most of what a list has.
            items.append(item if type(item) is str else _encode(item, (place, index), depth + 1, store))
        if store is None:
            return kind(items)
        return items if kind is list else {_SEQUENCES[kind]: _in_order(items) if kind in (set, frozenset) else items}
    return _encode_scalar(value, place, store)


_SEQUENCES: Mapping[type, str] = {list: "", torch.Size: "$tuple", tuple: "$tuple", set: "$set", frozenset: "$frozenset"}


def _encode_mapping(mapping: Mapping[Any, Any], place: _Place, depth: int, store: _Store) -> Any:
    kind: Any = type(mapping)
    tag = _MAPPINGS.get(kind)
    pairs, is_json = [], tag is None
    for key, item in mapping.items():
        name = key
        if type(key) is not str:
            is_json = False
            if any(isinstance(part, Tensor) for part in (key if type(key) is tuple else (key,))):
                raise NotSerializableError(_text(place), "a tensor cannot be a dictionary's key.")
            name = _encode(key, place, depth, store)
        elif key.startswith("$"):
            is_json = False
        pairs.append([name, _encode(item, (place, key), depth, store)])
    if store is None:
        return dict(pairs) if tag is None else kind(dict(pairs))
    return dict(pairs) if is_json else {tag or "$dict": pairs}


_MAPPINGS: Mapping[type, str] = {Counter: "$counter", OrderedDict: "$ordered"}


def _encode_scalar(value: Any, place: _Place, store: _Store) -> Any:
    if isinstance(value, enum.Enum):
        name = f"{type(value).__module__}:{type(value).__qualname__}"
        return value if store is None else {"$enum": [name, _encode(value.value, place, 0, store)]}
    if isinstance(value, numbers.Real):
        number = to_number(value, place)
        return number if store is None or math.isfinite(number) else {"$float": str(number)}
    if isinstance(value, str):
        return str(value)
    for tag, (kind, write, _) in _CODECS.items():
        if isinstance(value, kind):
            return value if store is None else {tag: write(value)}
    remedy = "; save the values that it is constructed from" if not isinstance(value, tuple) else "; save a tuple"
    expected = "A checkpoint holds numbers, strings, lists, tuples, sets, dictionaries, times, None and tensors"
    raise NotSerializableError(_text(place), f"{describe(value)} cannot be saved. {expected}{remedy}.")


def _in_order(items: list[Any]) -> list[Any]:
    """Return the items of a set in an order that is the same in each process."""
    return sorted(items, key=lambda item: (type(item).__name__, repr(item)))


def to_number(value: Any, path: _Place = "") -> int | float:
    """Return a number, such as one of NumPy's, as one of Python's.

    Raises:
        NotSerializableError: It has too many digits.
    """
    if not isinstance(value, numbers.Integral):
        return float(value)
    number = operator.index(value)
    if number.bit_length() > MAX_BITS:
        raise NotSerializableError(_text(path), f"a whole number of more than {MAX_BITS} bits cannot be saved.")
    return number


def is_number(value: object) -> bool:
    """Return whether a value is a number, including NumPy's and truth values, excluding members of enumerations."""
    return isinstance(value, numbers.Real) and enum.Enum not in type(value).__mro__


def _check_tensor(tensor: Tensor, place: _Place) -> None:
    layout = "a nested" if tensor.is_nested else "a sparse" if tensor.layout is not torch.strided else None
    reason = layout or ("a quantized" if tensor.is_quantized else "a meta" if tensor.is_meta else None)
    if reason is not None:
        raise NotSerializableError(
            _text(place), f"{reason} tensor cannot be saved; convert it to a dense one that has data."
        )


def _decode(data: Any, place: _Place, depth: int, tensors: Mapping[str, Tensor], used: set[str]) -> Any:
    kind = type(data)
    if data is None or kind in _ATOMS or isinstance(data, Tensor):
        return data
    if depth > 2 * MAX_DEPTH:
        raise ValueError(f"{_text(place)[:80]}...: is nested more than {2 * MAX_DEPTH} deep.")
    if kind is list:
        items = []
        for index, item in enumerate(data):
            items.append(_decode(item, (place, index), depth + 1, tensors, used))
        return items
    if isinstance(data, dict):
        decoded = {}
        for key, item in data.items():
            if type(key) is not str or key.startswith("$"):
                break
            decoded[key] = _decode(item, (place, key), depth + 1, tensors, used)
        else:
            return decoded
        if len(data) == 1:
            ((tag, content),) = data.items()
            return _decode_tagged(tag, content, place, depth, tensors, used)
    raise _malformed(data, place)


_ATOMS = frozenset({bool, int, float, str})


def _malformed(data: Any, place: _Place, reason: str = "") -> ValueError:
    return ValueError(f"{_text(place)}: must be as split_tensors() writes it, got {shortened(data)}{reason}.")


def _decode_tagged(
    tag: str, content: Any, place: _Place, depth: int, tensors: Mapping[str, Tensor], used: set[str]
) -> Any:
    if tag == "$tensor":
        if not isinstance(content, str) or content not in tensors:
            raise ValueError(f"{_text(place)}: there is no tensor {content!r}{nearest(content, tensors)}")
        used.add(content)
        return tensors[content]
    inner = _decode(content, place, depth, tensors, used) if type(content) is list else content
    with contextlib.suppress(TypeError, ValueError, AttributeError, KeyError, OverflowError, RuntimeError):
        if inner is content:
            return _CODECS[tag][2](content)
        return _FROM_LIST[tag](inner) if tag != "$enum" else _member(inner, place)
    raise _malformed({tag: content}, place)


_FROM_LIST: Mapping[str, Callable[[list[Any]], Any]] = {
    **{tag: kind for kind, tag in _SEQUENCES.items()},
    "$dict": dict,
    "$counter": lambda pairs: Counter(dict(pairs)),
    "$ordered": OrderedDict,
}


def _member(saved: list[Any], place: _Place) -> Any:
    """Return a member of an enumeration, or with a warning its value if no loaded module has the enumeration."""
    name, value = saved
    module, _, qualified = name.partition(":")
    found: Any = sys.modules.get(module)
    for part in qualified.split("."):
        found = vars(found).get(part) if found is not None else None
    if isinstance(found, enum.EnumType):
        with contextlib.suppress(ValueError):
            return found(value)
    warnings.warn(
        f"{_text(place) or 'The value'}: a member of {qualified} was saved, and its value is loaded in its place: "
        f"import {module} before, with this member.",
        stacklevel=2,
    )
    return value


def _to_float(text: str) -> float:
    if text not in ("nan", "inf", "-inf"):
        raise TypeError
    return float(text)


def _to_dtype(name: str) -> torch.dtype:
    dtype = vars(torch)[name]
    if not isinstance(dtype, torch.dtype):
        raise TypeError
    return dtype


_CODECS: Mapping[str, tuple[type, Callable[[Any], Any], Callable[[Any], Any]]] = {
    "$float": (type(None), str, _to_float),  # written by _encode_scalar
    "$time": (Time, Time.to_timestring, Time.from_timestring),
    "$timestamp": (Timestamp, Timestamp.state_dict, Timestamp.from_state_dict),
    "$timedelta": (dt.timedelta, dt.timedelta.total_seconds, lambda seconds: dt.timedelta(seconds=seconds)),
    "$dtype": (torch.dtype, lambda dtype: str(dtype).removeprefix("torch."), _to_dtype),
    "$device": (torch.device, str, torch.device),
    "$path": (pathlib.PurePath, str, pathlib.Path),
}


def _text(place: _Place) -> str:
    keys = []
    while not isinstance(place, str):
        place, key = place
        keys.append(shortened(key)[1:-1] if isinstance(key, str) and len(key) > 80 else key)
    for key in reversed(keys):
        place = at(place, key)
    return place


def at(path: str, key: object) -> str:
    """Return the path of an item of the container at ``path``."""
    if isinstance(key, str):
        return f"{path}.{key}" if path else key
    return f"{path}[{key!r}]"


def equal(one: Any, other: Any) -> bool:
    """Return whether data are equal; NaN equals NaN, True is not 1, and a tuple is not a list."""
    if isinstance(one, Tensor) or isinstance(other, Tensor):
        are_tensors = isinstance(one, Tensor) and isinstance(other, Tensor)
        return one is other or (are_tensors and one.dtype == other.dtype and torch.equal(one.cpu(), other.cpu()))
    if isinstance(one, (list, tuple)):
        return type(one) is type(other) and len(one) == len(other) and all(map(equal, one, other))
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(equal(item, other[key]) for key, item in one.items())
    if isinstance(one, bool) is not isinstance(other, bool):
        return False
    return bool(one == other) or (one != one and other != other)  # noqa: PLR0124  (not a number)


def read(value: Any, kind: Any, path: str = "") -> Any:  # noqa: PLR0911  (one for each kind of type)
    """Return a decoded value if it is of a declared type, with records constructed from their dictionaries.

    Args:
        value: What :func:`join_tensors` returned.
        kind: The type, as annotated.
        path: The place of the value, for the error.

    Raises:
        ValueError: The value is of another type, or a record lacks a field, has another, or rejects a value.

    Example:
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
    raise ValueError(f"{path or 'The value'}: must be {_type_name(kind)}, got {shortened(value)}.")


def _is_a(value: Any, kind: type) -> bool:
    if kind in (int, float):
        number = numbers.Integral if kind is int else numbers.Real
        return isinstance(value, number) and not isinstance(value, (bool, enum.Enum))
    return isinstance(value, kind) and not (isinstance(value, str) and kind is not str and not issubclass(kind, str))


def _read_items(value: Any, origin: type, arguments: tuple[Any, ...], path: str) -> Any:
    """Return a container with its items read; other values as they are."""
    if isinstance(value, Mapping) and arguments:
        key_kind, item_kind = arguments if len(arguments) == 2 else (arguments[0], int)  # a Counter counts its keys
        items = {read(key, key_kind, path): read(item, item_kind, at(path, key)) for key, item in value.items()}
        return items if type(value) is dict else type(value)(items)  # type: ignore[call-arg]
    if not arguments or not issubclass(origin, collections.abc.Collection):
        return value
    if origin is not tuple or arguments[1:] == (...,):
        arguments = arguments[:1] * len(value)
    if len(arguments) != len(value):
        raise ValueError(f"{path or 'The value'}: must have {len(arguments)} items, got {shortened(value)}.")
    pairs = zip(value, arguments, strict=True)
    return type(value)(read(item, one, at(path, index)) for index, (item, one) in enumerate(pairs))


def _read_record(data: dict[str, Any], kind: Any, path: str) -> Any:
    cls = typing.get_origin(kind) or kind
    variables = dict(zip(getattr(cls, "__parameters__", ()), typing.get_args(kind), strict=False))
    kinds = field_types(cls)
    problems = [f"unknown field {name!r}{nearest(name, kinds, '')}" for name in data if name not in kinds]
    required = [field.name for field in attrs.fields(cls) if field.default is attrs.NOTHING]
    problems += [f"field {name!r} is missing" for name in required if name not in data]
    if problems:
        raise ValueError(f"{path or 'The value'}: {'; '.join(problems)}.")
    values = {name: read(item, variables.get(kinds[name], kinds[name]), at(path, name)) for name, item in data.items()}
    with _at(path):
        return cls(**{str(field.alias): values[field.name] for field in attrs.fields(cls) if field.name in values})


@contextlib.contextmanager
def _at(path: str) -> Iterator[None]:
    """Raise the errors of a constructor as ValueErrors that begin with the place of its arguments."""
    try:
        yield
    except (TypeError, ValueError) as error:
        raise ValueError(f"{path or 'The value'}: {error_text(error)}") from None


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
