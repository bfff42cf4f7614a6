"""Plain data, which a checkpoint holds: numbers, strings, None, tensors, and lists, tuples and dictionaries of them.

:func:`plain` copies such data and rejects everything else. :func:`split_tensors` splits them into JSON and tensors,
which :func:`join_tensors` puts together again.
"""

from __future__ import annotations

import collections.abc
import datetime as dt
import enum
import functools
import itertools
import math
import numbers
import operator
import pathlib
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import attrs
import torch
from torch import Tensor

from composer.core.checks import describe, nearest, shortened
from composer.core.former import ClockData
from composer.core.time import Time, Timestamp

# Both are far below what Python limits, recursion and digits of a number, so that no saved data exceeds it.
MAX_DEPTH = 64
MAX_BITS = 4096

ENCODED = (enum.Enum, Time, Timestamp, dt.timedelta, torch.dtype, torch.device, pathlib.PurePath)
"""Types that are no plain data, and whose values :mod:`composer.core.serialization` encodes as such."""

_Path: TypeAlias = "tuple[_Path, object] | None"
"""A place in JSON data: that of the container, and the key in it. Only an error formats it as a string."""


class NotSerializableError(TypeError):
    """A value that is neither plain data nor a tensor cannot be saved; ``path`` is its place, ``reason`` the cause."""

    def __init__(self, path: str, reason: str) -> None:
        super().__init__(f"{path}: {reason}" if path else reason)
        self.path, self.reason = path, reason


def plain(value: Any, path: str = "", depth: int = 0, *, mappings: bool = False) -> Any:
    """Return a copy of plain data: new containers, the same tensors, and Python's numbers in place of NumPy's.

    Args:
        value: Numbers, strings, None, tensors, and lists, tuples and dictionaries of them.
        path: The place of the value, for the error.
        depth: The number of containers around it.
        mappings: Whether other mappings, such as the Counter in torch's MultiStepLR, are saved as dictionaries.

    Raises:
        NotSerializableError: The value contains something else.

    Example:
        >>> plain({"step": 3, "when": print}, "EMA")
        Traceback (most recent call last):
        composer.core.plain_data.NotSerializableError: EMA.when: function builtins.print cannot be saved. ...
    """
    return _PlainEncoder(mappings=mappings).encode(value, path, depth)


@attrs.frozen
class _PlainEncoder:
    """Returns copies of plain data.

    Args:
        mappings: Whether other mappings than dictionaries are encoded as dictionaries.
        name_of: If given, the copies have the form of JSON: ``name_of(tensor, path)`` stores a tensor and returns its
            name. Otherwise they have the same types as the data, and refer to the same tensors.
    """

    mappings: bool = False
    name_of: Callable[[Tensor, str], str] | None = None

    def encode(self, value: Any, path: str = "", depth: int = 0) -> Any:
        kind = type(value)
        if value is None or kind is bool or kind is str:
            return value
        if isinstance(value, Tensor):
            return self._encode_tensor(value, path)
        if is_number(value):
            number = to_number(value, path)
            is_finite = isinstance(number, int) or math.isfinite(number)
            return number if is_finite or self.name_of is None else {"$float": str(number)}
        if kind is dict or kind is ClockData or (self.mappings and isinstance(value, collections.abc.Mapping)):
            check_depth(path, depth)
            return self._encode_pairs(value, path, depth + 1)
        if kind is not list and kind is not tuple:
            expected = "A checkpoint holds numbers, strings, lists, tuples, dictionaries, None and tensors"
            raise NotSerializableError(path, f"{describe(value)} cannot be saved. {expected}{_remedy(value)}.")
        check_depth(path, depth)
        items = [self.encode(item, at(path, index), depth + 1) for index, item in enumerate(value)]
        return {"$tuple": items} if self.name_of is not None and kind is tuple else kind(items)

    def _encode_tensor(self, tensor: Tensor, path: str) -> Any:
        _check_tensor(tensor, path)
        if self.name_of is None:
            return tensor
        return {"$tensor": self.name_of(tensor.detach() if tensor.requires_grad else tensor, path or "tensor")}

    def _encode_pairs(self, mapping: Mapping[Any, Any], path: str, depth: int) -> dict[Any, Any]:
        pairs = []
        for key, item in mapping.items():
            parts = key if type(key) is tuple else (key,)
            if self.name_of is not None and any(isinstance(part, Tensor) for part in parts):
                raise NotSerializableError(path, "a tensor cannot be a dictionary's key.")
            encoded_key = key if type(key) is str else self.encode(key, path, depth)
            pairs.append([encoded_key, self.encode(item, at(path, key), depth)])
        is_json = all(isinstance(key, str) and not key.startswith("$") for key, _ in pairs)
        return dict(pairs) if is_json or self.name_of is None else {"$dict": pairs}


@torch.no_grad()  # a DTensor returns its local tensor much faster without a graph
def split_tensors(state: Any) -> tuple[Any, dict[str, Tensor]]:
    """Return ``(data, tensors)``: data for JSON, and the tensors by the names that replace them in the data.

    ``join_tensors(json.loads(json.dumps(data)), tensors)`` returns an equal ``state``. Values that JSON cannot
    represent become a dictionary of one key that begins with ``$``: ``{"$tensor": name}``, ``{"$tuple": [...]}``,
    ``{"$float": "nan"}``, and ``{"$dict": [[key, value], ...]}`` if a key is no string or begins with ``$``.

    Args:
        state: Numbers, strings, None, tensors, and lists, tuples and dictionaries of them.

    Returns:
        The data and the tensors. Tensors are detached and not copied; tensors of the same memory are returned once.

    Raises:
        NotSerializableError: ``state`` contains something else.

    Example:
        >>> data, tensors = split_tensors({"average": torch.ones(2), "betas": (0.9, float("inf"))})
        >>> data
        {'average': {'$tensor': 'average'}, 'betas': {'$tuple': [0.9, {'$float': 'inf'}]}}
        >>> tensors
        {'average': tensor([1., 1.])}
    """
    tensors: dict[str, Tensor] = {}
    names: dict[tuple[Any, ...], str] = {}

    def name_of(tensor: Tensor, path: str) -> str:
        held: Any = tensor
        if hasattr(held, "device_mesh"):  # a DTensor has no memory of its own
            held = held.to_local()
        view = tensor.is_conj(), tensor.is_neg(), tuple(tensor.shape), tensor.stride()
        memory = (tensor.device, tensor.dtype, held.data_ptr(), *view)
        if not held.numel() or memory not in names:
            candidates = itertools.chain([path], (f"{path}#{number}" for number in itertools.count(1)))
            names[memory] = next(name for name in candidates if name not in tensors)
            tensors[names[memory]] = tensor
        return names[memory]

    return _PlainEncoder(name_of=name_of).encode(state), tensors


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
    state = _join(data, None, 0, tensors, used)
    unused = sorted(set(tensors) - used)
    if unused:
        raise ValueError(f"These tensors have no place in the data: {', '.join(map(repr, unused))}.")
    return state


def _join(  # noqa: PLR0911  (one for each form)
    data: Any, path: _Path, depth: int, tensors: Mapping[str, Tensor], used: set[str]
) -> Any:
    if depth > 2 * MAX_DEPTH:
        raise ValueError(f"{_as_text(path)[:80]}...: is nested more than {2 * MAX_DEPTH} deep.")
    join = functools.partial(_join, depth=depth + 1, tensors=tensors, used=used)
    match data:
        case None | bool() | int() | float() | str():
            return data
        case list():
            return [join(item, (path, index)) for index, item in enumerate(data)]
        case dict() if all(isinstance(key, str) and not key.startswith("$") for key in data):
            return {key: join(item, (path, key)) for key, item in data.items()}
        case {"$tensor": name, **others} if not others:
            if not isinstance(name, str) or name not in tensors:
                raise ValueError(f"{_as_text(path)}: there is no tensor {name!r}{nearest(name, tensors)}")
            used.add(name)
            return tensors[name]
        case {"$float": ("nan" | "inf" | "-inf") as number, **others} if not others:
            return float(number)
        case {"$tuple": list(items), **others} if not others:
            return tuple(join(items, path))
        case {"$dict": list(pairs), **others} if not others and all(map(_is_pair, pairs)):
            keys = [join(key, path) for key, _ in pairs]
            if not any(isinstance(key, list | dict) for key in keys):
                return {key: join(item, (path, key)) for key, (_, item) in zip(keys, pairs, strict=True)}
    raise ValueError(f"{_as_text(path)}: must be as split_tensors() writes it, got {shortened(data)}.")


def _is_pair(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 2


def _as_text(path: _Path) -> str:
    keys = []
    while path is not None:
        path, key = path
        keys.append(shortened(key)[1:-1] if isinstance(key, str) and len(key) > 80 else key)
    return functools.reduce(at, reversed(keys), "")


def check_depth(path: str, depth: int) -> None:
    """Raise a NotSerializableError if data is nested too deep, or contains itself."""
    if depth > MAX_DEPTH:
        raise NotSerializableError(
            path, f"cannot be saved: it is nested more than {MAX_DEPTH} deep, or contains itself."
        )


def _check_tensor(tensor: Tensor, path: str) -> None:
    layout = "a nested" if tensor.is_nested else "a sparse" if tensor.layout is not torch.strided else None
    reason = layout or ("a quantized" if tensor.is_quantized else "a meta" if tensor.is_meta else None)
    if reason is not None:
        raise NotSerializableError(path, f"{reason} tensor cannot be saved; convert it to a dense one that has data.")


def _remedy(value: Any) -> str:
    if isinstance(value, enum.Enum):
        return "; save its value"
    if isinstance(value, dict):
        return "; convert it by dict(...)"
    if isinstance(value, collections.abc.Set):
        return "; convert it to a list by sorted(...)"
    if isinstance(value, (str, *ENCODED)):
        return "; annotate the field with its type, or save it as a string"
    return "; save the values that it is constructed from"


def at(path: str, key: object) -> str:
    """Return the path of an item of the container at ``path``."""
    if isinstance(key, str):
        return f"{path}.{key}" if path else key
    return f"{path}[{key!r}]"


def is_number(value: object) -> bool:
    """Return whether a value is a number, including NumPy's and truth values, excluding members of enumerations."""
    return isinstance(value, numbers.Real) and enum.Enum not in type(value).__mro__


def to_number(value: Any, path: str = "") -> int | float:
    """Return a number, such as one of NumPy's, as one of Python's.

    Raises:
        NotSerializableError: It has too many digits.
    """
    if not isinstance(value, numbers.Integral):
        return float(value)
    number = operator.index(value)
    if number.bit_length() > MAX_BITS:
        raise NotSerializableError(path, f"a whole number of more than {MAX_BITS} bits cannot be saved.")
    return number


def equal(one: Any, other: Any) -> bool:
    """Return whether plain data are equal; NaN equals NaN, True is not 1, and a tuple is not a list."""
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
