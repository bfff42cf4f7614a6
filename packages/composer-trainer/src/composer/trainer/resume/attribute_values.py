"""Values of attributes: compare, encode as plain data, and restore into attributes of the same kind."""

from __future__ import annotations

import collections
import functools
import itertools
import sys
import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from composer.core import NotSerializableError, Time, Timestamp
from composer.core.serialization import MAX_DEPTH, is_number, plain
from composer.trainer.resume.generators import generator_state, is_generator

if TYPE_CHECKING:
    from collections.abc import Callable, Container

__all__ = [
    "Mark",
    "TextKeys",
    "TransientError",
    "UnsavedError",
    "encoded",
    "kind_of",
    "mark_of",
    "restored",
    "text_keys",
]

MAX_BYTES = 1 << 20
"""The largest attribute that is saved."""

_MAX_DEPTH = MAX_DEPTH // 2
"""How deep a value may be nested, so that it can be saved within a checkpoint."""

_MAX_ITEMS = 10_000
_MAX_FLAT = 1_000_000
_SCALARS = {bool, int, float, str, type(None)}
_COMPARED_BY_VALUE = 1024
_BYTES_OF_ITEM = 8
_CONTAINERS = ("list", "tuple", "set", "frozenset", "deque", "mapping")
_KINDS: dict[type, str] = {
    **{kind: kind.__name__ for kind in (list, tuple, set, frozenset, collections.deque)},
    torch.Size: "tuple",
    **dict.fromkeys((dict, collections.OrderedDict, collections.defaultdict, collections.Counter), "mapping"),
    **dict.fromkeys((str, bytes, bytearray), "text"),
    Time: "time",
    Timestamp: "timestamp",
}

Mark = tuple[Any, ...]
"""Equal marks mean that a value has not changed: its kind, and its contents if they are small."""


class UnsavedError(Exception):
    """A value cannot be saved; the message completes a sentence that begins with its path."""


class TransientError(UnsavedError):
    """A value is part of the graph of a step, and no later step uses it."""


def kind_of(value: Any) -> str | None:
    """Return the kind of data of a value; None if it is not data. ``None`` is a number that is not set yet.

    Example:
        >>> kind_of(None), kind_of(collections.deque()), kind_of(print)
        ('number', 'deque', None)
    """
    if kind := _KINDS.get(type(value)):
        return kind
    if value is None or is_number(value):
        return "number"
    if isinstance(value, Tensor):
        return "tensor"
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(value, numpy.ndarray):
        return "array"
    return "generator" if is_generator(value) else None


def mark_of(value: Any, of_modules: Container[int] = ()) -> Mark:
    """Return the mark of a value.

    Args:
        value: The value.
        of_modules: Ids of tensors that modules hold. Attributes refer to them, and they are saved with the modules.
    """
    if is_generator(value):
        state = tree_map_only(Tensor, Tensor.tolist, generator_state(value))
        return ("generator", type(value).__name__, None if state is None else str(state))
    try:
        return _mark(value, [_MAX_ITEMS], of_modules)
    except UnsavedError:
        return (kind_of(value), "large", len(value))


class _Identity:
    """Equal for the same object only, also after it is deleted and another object has its address."""

    def __init__(self, value: Any) -> None:
        self._id = id(value)
        try:
            self._reference: Callable[[], Any] = weakref.ref(value)
        except TypeError:
            self._reference = lambda: True

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _Identity) or self._id != other._id:
            return False
        return self._reference() is not None and other._reference() is not None

    def __hash__(self) -> int:
        return self._id


def _mark(value: Any, budget: list[int], of_modules: Container[int], depth: int = 0) -> Mark:  # noqa: PLR0911  (one for each kind)
    kind = kind_of(value)
    if kind in _CONTAINERS:
        contents = tuple(value.values()) if kind == "mapping" and len(value) <= _MAX_FLAT else ()
        # Scalars are compared much faster than other values.
        if len(value) <= _MAX_FLAT and _SCALARS.issuperset(map(type, itertools.chain(value, contents))):
            return (kind, "flat", frozenset(value) if kind in ("set", "frozenset") else tuple(value), contents)
        budget[0] -= len(value)
    budget[0] -= 1
    if budget[0] < 0 or depth > _MAX_DEPTH:
        raise UnsavedError("is too large to compare")
    if kind in ("number", "text", "time", "timestamp"):
        return (kind, value)
    if kind == "tensor":
        return ("object", _Identity(value)) if id(value) in of_modules else _tensor_mark(value)
    if kind == "array":
        contents = value.tobytes() if value.nbytes <= MAX_BYTES else value.__array_interface__["data"]
        return (kind, value.shape, str(value.dtype), contents)
    if kind == "generator":  # draws do not change the container
        return ("object", _Identity(value))
    marks = [_mark(item, budget, of_modules, depth + 1) for item in value] if kind in _CONTAINERS else []
    if kind in ("set", "frozenset"):
        return (kind, frozenset(marks))
    if kind == "mapping":
        return (kind, *marks, *(_mark(item, budget, of_modules, depth + 1) for item in value.values()))
    return ("object", _Identity(value)) if kind is None else (kind, *marks)


def _tensor_mark(tensor: Tensor) -> Mark:
    properties = (tensor.shape, tensor.dtype, tensor.device)
    if tensor.layout is not torch.strided or tensor.is_meta or tensor.is_quantized or tensor.is_nested:
        return ("tensor", _Identity(tensor), *properties)
    if tensor.device.type == "cpu" and tensor.numel() <= _COMPARED_BY_VALUE:
        return ("tensor", *properties, str(tensor.detach().tolist()))  # as text, NaN equals NaN
    version = None if tensor.is_inference() else tensor._version  # noqa: SLF001
    return ("tensor", *properties, _Identity(tensor), tensor.data_ptr(), version)


TextKeys = dict[str, Any]
"""The text keys of a mapping, each with the text keys of its value."""

_NO_TEXT: TextKeys = {}


def text_keys(value: Any, depth: int = 0) -> TextKeys:
    """Return the text keys of a mapping, and none of other values.

    Example:
        >>> text_keys({"loss": {"sum": 3.0}, 5: 1})
        {'loss': {'sum': {}}}
    """
    if kind_of(value) != "mapping" or depth > _MAX_DEPTH or len(value) > MAX_BYTES // _BYTES_OF_ITEM:
        return _NO_TEXT
    return {key: text_keys(item, depth + 1) for key, item in value.items() if type(key) is str}


def encoded(value: Any, known: TextKeys | None = None, of_modules: Container[int] = ()) -> Any:
    """Return a value as plain data and copies of its tensors.

    Args:
        value: The value.
        known: The text keys that it may have. Other text is never saved: a checkpoint must not decide what a program
            reads, writes or runs.
        of_modules: As for :func:`mark_of`.

    Raises:
        UnsavedError: The value is of another kind, or too large.

    Example:
        >>> encoded(collections.deque([1, 2]))
        [1, 2]
        >>> encoded("text")
        Traceback (most recent call last):
        composer.trainer.resume.attribute_values.UnsavedError: holds text
    """
    kind = kind_of(value)
    if kind == "array":
        if not 0 < value.nbytes <= MAX_BYTES:
            raise UnsavedError("is larger than 1 MiB" if value.nbytes else "is empty")
        try:
            return torch.from_numpy(value.copy())
        except TypeError:
            raise UnsavedError(f"is an array of {value.dtype}") from None
    if kind == "time":
        return {"value": value.value, "unit": value.unit.value}
    if kind == "timestamp":
        return value.state_dict()
    if kind in ("set", "frozenset", "deque"):
        value = list(value)
    if kind == "mapping":
        value = dict(value)
    return _encoded(value, [MAX_BYTES], known or {}, of_modules)


def _encoded(value: Any, budget: list[int], known: TextKeys, of_modules: Container[int], depth: int = 0) -> Any:
    kind = kind_of(value)
    budget[0] -= value.nbytes if kind == "tensor" else _BYTES_OF_ITEM
    if budget[0] < 0:
        raise UnsavedError("is larger than 1 MiB")
    if depth > _MAX_DEPTH:
        raise UnsavedError(f"is nested more than {_MAX_DEPTH} deep, or holds itself")
    if kind == "tensor" and id(value) in of_modules:
        raise UnsavedError("holds a tensor of a module")
    if kind == "tensor" and value.grad_fn is not None:
        raise TransientError("is part of a graph")
    if kind in ("number", "tensor"):
        try:
            data = plain(value)
        except NotSerializableError as error:
            cause = "is" if kind == "tensor" else "holds a number that cannot be saved:"
            raise UnsavedError(f"{cause} {error.reason}") from None
        return data.detach().to("cpu", copy=True) if kind == "tensor" else data
    if kind == "text":
        raise UnsavedError("holds text")
    encode = functools.partial(_encoded, budget=budget, of_modules=of_modules, depth=depth + 1)
    if type(value) in (list, tuple, torch.Size):
        items = [encode(item, known=_NO_TEXT) for item in value]
        return items if type(value) is list else tuple(items)
    if type(value) is dict:
        if any(type(key) is str and key not in known for key in value):
            raise UnsavedError("has text as new keys")
        if any(isinstance(key, Tensor) for key in value):  # a tensor is looked up by identity
            raise UnsavedError("has tensors as keys")
        keys = [key if type(key) is str else encode(key, known=_NO_TEXT) for key in value]
        items = [encode(item, known=known.get(key, _NO_TEXT)) for key, item in value.items()]
        return dict(zip(keys, items, strict=True))
    raise UnsavedError(f"holds an object of class {type(value).__name__}")


def restored(current: Any, data: Any, device: torch.device | None) -> Any:  # noqa: PLR0911  (one for each kind)
    """Return the value to set an attribute to, from data that :func:`encoded` returned; containers change in place.

    Args:
        current: The attribute's value. Only data of its kind is accepted. A number, or None, may become a tensor, a
            list, a tuple or a dictionary of numbers and tensors.
        data: The data.
        device: The device of new tensors; None leaves them on the CPU.

    Raises:
        UnsavedError: The data is of another kind.

    Example:
        >>> counts = collections.Counter({3: 1})
        >>> restored(counts, {3: 2, 5: 1}, None) is counts, counts
        (True, Counter({3: 2, 5: 1}))
    """
    kind = kind_of(current)
    if current is None and isinstance(data, dict):
        is_time = data.keys() == {"value", "unit"}
        kind = "time" if is_time else "timestamp" if "batch_in_epoch" in data else kind
    if kind == "number":
        moved = _moved(data, device)
        return type(current)(moved) if type(current).__module__ == "numpy" and is_number(moved) else moved
    if kind in ("tensor", "array") and isinstance(data, Tensor):
        return _into_tensor(current, data) if kind == "tensor" else _into_array(current, data)
    if kind in ("time", "timestamp") and isinstance(data, dict):
        try:
            return Time(data["value"], data["unit"]) if kind == "time" else Timestamp.from_state_dict(data)
        except (AttributeError, KeyError, TypeError, ValueError):
            raise UnsavedError("was saved as something else") from None
    if kind == "tuple" and type(data) is tuple:
        return _moved(data, device)
    if kind in ("list", "set", "frozenset", "deque") and type(data) is list:
        items = _moved(data, device)
        if kind == "frozenset":
            return frozenset(items)
        new = set(items) if kind == "set" else items
        current.clear()
        (current.update if kind == "set" else current.extend)(new)
        return current
    if kind == "mapping" and type(data) is dict:
        items = _moved(data, device, text_keys(current))
        current.clear()
        current.update(items)
        return current
    raise UnsavedError(f"is a {kind or type(current).__name__} here, and something else was saved")


def _into_tensor(current: Tensor, data: Tensor) -> Tensor:
    if current.dtype != data.dtype:
        raise UnsavedError(f"is {current.dtype} here, and {data.dtype} was saved")
    if current.shape != data.shape:
        if current.requires_grad:
            raise UnsavedError(f"has shape {tuple(current.shape)} here, and {tuple(data.shape)} was saved")
        return data.to(current.device)
    if current.is_inference() or 0 in current.stride():  # it cannot be written in place
        return data.to(current.device, copy=True)
    with torch.no_grad():
        current.copy_(data)
    return current


def _into_array(current: Any, data: Tensor) -> Any:
    array = data.numpy()
    if array.dtype != current.dtype:
        raise UnsavedError(f"is {current.dtype} here, and {array.dtype} was saved")
    if array.shape != current.shape or not current.flags.writeable:
        return array.copy()
    current[...] = array
    return current


def _moved(data: Any, device: torch.device | None, known: TextKeys | None = None) -> Any:
    """Return data with copies of its tensors on the device; text is accepted only as known keys."""
    if data is None or isinstance(data, (bool, int, float)):
        return data
    if isinstance(data, Tensor):
        return data.to(device or "cpu", copy=True)
    if type(data) in (list, tuple):
        return type(data)([_moved(item, device) for item in data])
    if type(data) is dict:
        known = known or {}
        if all(type(key) is not str or key in known for key in data):
            keys = [key if type(key) is str else _moved(key, device) for key in data]
            return {key: _moved(item, device, known.get(key)) for key, item in zip(keys, data.values(), strict=True)}
    raise UnsavedError("was saved with text that is not there")
