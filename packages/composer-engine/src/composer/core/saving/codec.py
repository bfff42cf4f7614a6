"""The encoding of all that is saved: nested data as JSON and tensors, in which each value states its type.

:func:`split_tensors` encodes, and :func:`join_tensors` decodes what it returned, also after a round trip through JSON.
:func:`to_data` and :func:`decode` do the same with the tensors in their places, as for ``torch.save``. :func:`plain`
copies such data without encoding it. ``records.py`` reads decoded data as declared types.

What JSON cannot represent becomes a dictionary of one key that begins with ``$``: ``{"$tensor": name}``,
``{"$tuple": [...]}``, ``{"$float": "nan"}``, ``{"$time": "10ep"}``, ``{"$enum": [class, value]}``, and so on. The class
of an enumeration is looked up among the loaded modules and never imported.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import enum
import itertools
import math
import numbers
import operator
import pathlib
import sys
import warnings
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeAlias

import attrs
import torch
from torch import Tensor

from composer.core.checks import describe, nearest, shortened
from composer.core.time import Time, Timestamp

# Both are far below what Python limits, recursion and digits of a number, so that no saved data exceeds it.
MAX_DEPTH = 64
MAX_BITS = 4096

Place: TypeAlias = "tuple[Place | str, object] | str"
"""A place in nested data: that of the container, and the key in it. Only an error formats it as a string."""


class _Mode(NamedTuple):
    """How values are written.

    Attributes:
        encodes: Whether what JSON cannot represent states its type; else it is copied as it is.
        store: Returns the names that replace tensors; None leaves tensors in their places.
    """

    encodes: bool
    store: Callable[[Tensor, Place], str] | None = None


_COPY, _ENCODE = _Mode(encodes=False), _Mode(encodes=True)

_ATOMS = frozenset({bool, int, float, str})
_SEQUENCES: Mapping[type, str] = {list: "", torch.Size: "$tuple", tuple: "$tuple", set: "$set", frozenset: "$frozenset"}
_MAPPINGS: Mapping[type, str] = {Counter: "$counter", OrderedDict: "$ordered"}
# Of the types with one tag the last one is decoded, and the tag of a list never occurs.
_FROM_LIST: Mapping[str, Callable[[list[Any]], Any]] = {
    **{tag: kind for kind, tag in _SEQUENCES.items()},
    "$dict": dict,
    "$counter": lambda pairs: Counter(dict(pairs)),
    "$ordered": OrderedDict,
}
_FLOATS = {str(value): value for value in (math.nan, math.inf, -math.inf)}
_DTYPES = {str(one).removeprefix("torch."): one for one in vars(torch).values() if isinstance(one, torch.dtype)}
_CODECS: Mapping[str, tuple[type, Callable[[Any], Any], Callable[[Any], Any]]] = {
    "$time": (Time, Time.to_timestring, Time.from_timestring),
    "$timestamp": (Timestamp, Timestamp.state_dict, Timestamp.from_state_dict),
    "$timedelta": (dt.timedelta, dt.timedelta.total_seconds, lambda seconds: dt.timedelta(seconds=seconds)),
    "$dtype": (torch.dtype, lambda dtype: str(dtype).removeprefix("torch."), _DTYPES.__getitem__),
    "$device": (torch.device, str, torch.device),
    "$path": (pathlib.PurePath, str, pathlib.Path),
}
_FROM_SCALAR: Mapping[str, Callable[[Any], Any]] = {
    "$float": _FLOATS.__getitem__,
    **{tag: one[2] for tag, one in _CODECS.items()},
}


class NotSerializableError(TypeError):
    """A value that is neither plain data nor a tensor cannot be saved; ``path`` is its place, ``reason`` the cause."""

    def __init__(self, path: str, reason: str) -> None:
        super().__init__(f"{path}: {reason}" if path else reason)
        self.path, self.reason = path, reason


class Record:
    """An attrs class that is saved as the dictionary of its fields, which ``read()`` in ``records.py`` reads again."""

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
    return _encode(value, path, 0, _COPY)


def to_data(value: Any, path: str = "") -> Any:
    """Return a value encoded as numbers, strings, None, lists, dictionaries and tensors, which any program can load.

    Raises:
        NotSerializableError: The value contains what ``plain()`` does not accept.

    Example:
        >>> to_data({"when": (Time(10, "ep"), None)})
        {'when': {'$tuple': [{'$time': '10ep'}, None]}}
    """
    return _encode(value, path, 0, _ENCODE)


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

    def store(tensor: Tensor, place: Place) -> str:
        held: Any = tensor
        if hasattr(held, "device_mesh"):  # a DTensor has no memory of its own
            held = held.to_local()
        view = tensor.is_conj(), tensor.is_neg(), tuple(tensor.shape), tensor.stride()
        memory = (tensor.device, tensor.dtype, held.data_ptr(), *view)
        if not held.numel() or memory not in names:
            path = text_of(place) or "tensor"
            candidates = itertools.chain([path], (f"{path}#{number}" for number in itertools.count(1)))
            names[memory] = next(name for name in candidates if name not in tensors)
            tensors[names[memory]] = tensor.detach() if tensor.requires_grad else tensor
        return names[memory]

    return _encode(state, "", 0, _Mode(encodes=True, store=store)), tensors


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


def _encode(value: Any, place: Place, depth: int, mode: _Mode) -> Any:  # noqa: PLR0911  (one for each kind)
    """Return a value as JSON data, or a copy of it."""
    kind = type(value)
    if value is None or kind is bool or kind is str or (kind is float and math.isfinite(value)):
        return value
    if kind is int and value.bit_length() <= MAX_BITS:
        return value
    if isinstance(value, Tensor):
        _check_tensor(value, place)
        return value if mode.store is None else {"$tensor": mode.store(value, place)}
    if depth > MAX_DEPTH:
        raise NotSerializableError(
            text_of(place), f"cannot be saved: it is nested more than {MAX_DEPTH} deep, or contains itself."
        )
    if isinstance(value, Record):
        value = {field.name: getattr(value, field.name) for field in attrs.fields(kind)}
    if isinstance(value, Mapping):
        return _encode_mapping(value, place, depth + 1, mode)
    if kind in _SEQUENCES:
        items = []
        for index, item in enumerate(value):
            # Names of parameters are most of what a list has.
            items.append(item if type(item) is str else _encode(item, (place, index), depth + 1, mode))
        if not mode.encodes:
            return kind(items)
        return items if kind is list else {_SEQUENCES[kind]: _in_order(items) if kind in (set, frozenset) else items}
    return _encode_scalar(value, place, mode)


def _encode_mapping(mapping: Mapping[Any, Any], place: Place, depth: int, mode: _Mode) -> Any:
    kind: Any = type(mapping)
    tag = _MAPPINGS.get(kind)
    pairs, is_json = [], tag is None
    for key, item in mapping.items():
        name = key
        if type(key) is not str:
            is_json = False
            if any(isinstance(part, Tensor) for part in (key if type(key) is tuple else (key,))):
                raise NotSerializableError(text_of(place), "a tensor cannot be a dictionary's key.")
            name = _encode(key, place, depth, mode)
        elif key.startswith("$"):
            is_json = False
        pairs.append([name, _encode(item, (place, key), depth, mode)])
    if not mode.encodes:
        return dict(pairs) if tag is None else kind(dict(pairs))
    return dict(pairs) if is_json else {tag or "$dict": pairs}


def _encode_scalar(value: Any, place: Place, mode: _Mode) -> Any:
    if isinstance(value, enum.Enum):
        name = f"{type(value).__module__}:{type(value).__qualname__}"
        return value if not mode.encodes else {"$enum": [name, _encode(value.value, place, 0, mode)]}
    if isinstance(value, numbers.Real):
        number = to_number(value, place)
        return number if not mode.encodes or math.isfinite(number) else {"$float": str(number)}
    if isinstance(value, str):
        return str(value)
    for tag, (kind, write, _) in _CODECS.items():
        if isinstance(value, kind):
            return value if not mode.encodes else {tag: write(value)}
    remedy = "; save the values that it is constructed from" if not isinstance(value, tuple) else "; save a tuple"
    expected = "A checkpoint holds numbers, strings, lists, tuples, sets, dictionaries, times, None and tensors"
    raise NotSerializableError(text_of(place), f"{describe(value)} cannot be saved. {expected}{remedy}.")


def _in_order(items: list[Any]) -> list[Any]:
    """Return the items of a set in an order that is the same in each process."""
    return sorted(items, key=lambda item: (type(item).__name__, repr(item)))


def to_number(value: Any, path: Place = "") -> int | float:
    """Return a number, such as one of NumPy's, as one of Python's.

    Raises:
        NotSerializableError: It has too many digits.
    """
    if not isinstance(value, numbers.Integral):
        return float(value)
    number = operator.index(value)
    if number.bit_length() > MAX_BITS:
        raise NotSerializableError(text_of(path), f"a whole number of more than {MAX_BITS} bits cannot be saved.")
    return number


def is_number(value: object) -> bool:
    """Return whether a value is a number, including NumPy's and truth values, excluding members of enumerations."""
    return isinstance(value, numbers.Real) and enum.Enum not in type(value).__mro__


def _check_tensor(tensor: Tensor, place: Place) -> None:
    layout = "a nested" if tensor.is_nested else "a sparse" if tensor.layout is not torch.strided else None
    # Torchao's are tensors around others and have no memory of their own, by which equal tensors are found.
    is_quantized = tensor.is_quantized or hasattr(getattr(tensor, "_local_tensor", tensor), "__tensor_flatten__")
    if reason := layout or ("a quantized" if is_quantized else "a meta" if tensor.is_meta else None):
        text = f"{reason} tensor cannot be saved; convert it to a dense one that has data."
        raise NotSerializableError(text_of(place), text)


def decode(data: Any, path: str = "") -> Any:
    """Return what :func:`to_data` encoded.

    Raises:
        ValueError: The data is not as :func:`to_data` returns it.
    """
    return _decode(data, path, 0, {}, set())


def _decode(data: Any, place: Place, depth: int, tensors: Mapping[str, Tensor], used: set[str]) -> Any:
    kind = type(data)
    if data is None or kind in _ATOMS or isinstance(data, Tensor):
        return data
    if depth > 2 * MAX_DEPTH:
        raise ValueError(f"{text_of(place)[:80]}...: is nested more than {2 * MAX_DEPTH} deep.")
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


def _malformed(data: Any, place: Place, reason: str = "") -> ValueError:
    return ValueError(f"{text_of(place)}: must be as split_tensors() writes it, got {shortened(data)}{reason}.")


def _decode_tagged(
    tag: str, content: Any, place: Place, depth: int, tensors: Mapping[str, Tensor], used: set[str]
) -> Any:
    if tag == "$tensor":
        if not isinstance(content, str) or content not in tensors:
            raise ValueError(f"{text_of(place)}: there is no tensor {content!r}{nearest(content, tensors)}")
        used.add(content)
        return tensors[content]
    is_list = type(content) is list
    inner = _decode(content, place, depth, tensors, used) if is_list else content
    if is_list and tag == "$enum" and len(inner) == 2 and isinstance(inner[0], str):
        return _member(inner[0], inner[1], place)
    read = (_FROM_LIST if is_list else _FROM_SCALAR).get(tag)
    if read is None:
        raise _malformed({tag: content}, place)
    try:
        return read(inner)
    except Exception as error:  # whatever the constructors of Python and torch raise
        raise _malformed({tag: content}, place) from error


def _member(name: str, value: Any, place: Place) -> Any:
    """Return a member of an enumeration, or with a warning its value if no loaded module has the enumeration."""
    module, _, qualified = name.partition(":")
    found: Any = sys.modules.get(module)
    for part in qualified.split("."):
        found = vars(found).get(part) if found is not None else None
    if isinstance(found, enum.EnumType):
        with contextlib.suppress(ValueError, TypeError):
            return found(value)
    warnings.warn(
        f"{text_of(place) or 'The value'}: a member of {qualified} was saved, and its value is loaded in its place: "
        f"import {module} before, with this member.",
        stacklevel=2,
    )
    return value


def text_of(place: Place) -> str:
    """Return a place as a string, ``"optimizers.SGD.param_groups[0]"``."""
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
