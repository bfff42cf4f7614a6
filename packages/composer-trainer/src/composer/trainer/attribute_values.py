"""Values of attributes as data: compared, saved, and put back into attributes of the same kind."""

from __future__ import annotations

import collections
import sys
import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from composer.core import NotSerializableError, Time, Timestamp
from composer.core.serialization import MAX_DEPTH, is_number, plain, plain_number
from composer.trainer.generator_states import generator_state, is_generator

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
"""How deep a value may be nested, to be saved within the rest of a checkpoint."""

_MAX_ITEMS = 10_000
_MAX_FLAT = 1_000_000
_SCALARS = {bool, int, float, str, type(None)}
_COMPARED_BY_VALUE = 1024
_BYTES_OF_ITEM = 8
_SEQUENCES: dict[Any, str] = {
    list: "list",
    tuple: "tuple",
    torch.Size: "tuple",
    set: "set",
    frozenset: "frozenset",
    collections.deque: "deque",
}
_CONTAINERS = ("list", "tuple", "set", "frozenset", "deque", "mapping")
_MAPPINGS = (dict, collections.OrderedDict, collections.defaultdict, collections.Counter)

Mark = tuple[Any, ...]
"""What a value is compared by: its kind, and its contents where they are small."""


class UnsavedError(Exception):
    """A value cannot be saved; the text is the end of a sentence about it."""


class TransientError(UnsavedError):
    """A value is part of a step's graph, from which no later step can go on."""


def kind_of(value: Any) -> str | None:  # noqa: PLR0911  (one for each kind)
    """Return which kind of data a value is; None if it is none. ``None`` is a number that is not known yet.

    Example:
        >>> kind_of(None), kind_of(collections.deque()), kind_of(print)
        ('number', 'deque', None)
    """
    kind = type(value)
    if value is None or is_number(value):
        return "number"
    if kind in _SEQUENCES:
        return _SEQUENCES[kind]
    if kind in _MAPPINGS:
        return "mapping"
    if kind in (str, bytes, bytearray):
        return "text"
    if isinstance(value, Tensor):
        return "tensor"
    if is_array(value):
        return "array"
    if is_generator(value):
        return "generator"
    others: dict[Any, str] = {Time: "time", Timestamp: "timestamp"}
    return others.get(kind)


def is_array(value: Any) -> bool:
    """Return whether a value is an array of NumPy's."""
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, numpy.ndarray)


def mark_of(value: Any, of_modules: Container[int] = ()) -> Mark:
    """Return what a value is compared by; equal marks mean that it has not changed.

    Args:
        value: The value.
        of_modules: Ids of tensors that modules hold: here they are references, and saved with the modules.
    """
    if is_generator(value):
        state = generator_state(value)
        return ("generator", type(value).__name__, None if state is None else _listed(state))
    try:
        return _mark(value, [_MAX_ITEMS], of_modules)
    except _TooManyError:
        return (kind_of(value), "large", len(value))


class _Identity:
    """Compares as the object that it was made of, also after that is gone and another has its address."""

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


def _listed(state: Any) -> Any:
    """Return a generator's state as something to compare."""
    if isinstance(state, dict):
        return tuple((name, _listed(part)) for name, part in state.items())
    return state.tolist() if isinstance(state, Tensor) else state


class _TooManyError(Exception):
    pass


def _mark(value: Any, budget: list[int], of_modules: Container[int], depth: int = 0) -> Mark:  # noqa: PLR0911  (one for each kind)
    kind = kind_of(value)
    if kind in _CONTAINERS:
        if len(value) <= _MAX_FLAT and _is_flat(value):
            return (kind, "flat", *_flat_contents(value))
        budget[0] -= len(value)
    budget[0] -= 1
    if budget[0] < 0 or depth > _MAX_DEPTH:
        raise _TooManyError
    if kind in ("number", "text", "time", "timestamp"):
        return (kind, value)
    if kind == "tensor":
        return ("object", _Identity(value)) if id(value) in of_modules else _tensor_mark(value)
    if kind == "array":
        contents = value.tobytes() if value.nbytes <= MAX_BYTES else value.__array_interface__["data"]
        return (kind, value.shape, str(value.dtype), contents)
    if kind == "generator":  # in a container it is an object as others: what it draws does not change the container
        return ("object", _Identity(value))
    marks = [_mark(item, budget, of_modules, depth + 1) for item in value] if kind in _CONTAINERS else []
    if kind in ("set", "frozenset"):
        return (kind, frozenset(marks))
    if kind == "mapping":
        return (kind, *marks, *(_mark(item, budget, of_modules, depth + 1) for item in value.values()))
    return ("object", _Identity(value)) if kind is None else (kind, *marks)


def _flat_contents(value: Any) -> tuple[Any, ...]:
    if isinstance(value, dict):
        return tuple(value), tuple(value.values())
    return (frozenset(value) if isinstance(value, (set, frozenset)) else tuple(value),)


def _is_flat(value: Any) -> bool:
    """Return whether a container holds only scalars, which are compared many times faster than other values."""
    held = value.values() if isinstance(value, dict) else value
    return _SCALARS.issuperset(map(type, held)) and (held is value or _SCALARS.issuperset(map(type, value)))


def _tensor_mark(tensor: Tensor) -> Mark:
    looks = (tensor.shape, tensor.dtype, tensor.device)
    if tensor.layout is not torch.strided or tensor.is_meta or tensor.is_quantized or tensor.is_nested:
        return ("tensor", _Identity(tensor), *looks)
    if tensor.device.type == "cpu" and tensor.numel() <= _COMPARED_BY_VALUE:
        return ("tensor", *looks, str(tensor.detach().tolist()))  # as text, a number that is none equals itself
    return ("tensor", *looks, _Identity(tensor), tensor.data_ptr(), None if tensor.is_inference() else tensor._version)  # noqa: SLF001


TextKeys = dict[str, Any]
"""The text among a mapping's keys, each with that in the mapping behind it."""

_NO_TEXT: TextKeys = {}


def text_keys(value: Any, depth: int = 0) -> TextKeys:
    """Return the text among a mapping's keys; nothing of other values.

    Example:
        >>> text_keys({"loss": {"sum": 3.0}, 5: 1})
        {'loss': {'sum': {}}}
    """
    if kind_of(value) != "mapping" or depth > _MAX_DEPTH or len(value) > MAX_BYTES // _BYTES_OF_ITEM:
        return _NO_TEXT
    return {key: text_keys(item, depth + 1) for key, item in value.items() if type(key) is str}


def encoded(value: Any, known: TextKeys | None = None, of_modules: Container[int] = ()) -> Any:
    """Return a value as plain data and tensors that nobody else holds.

    Args:
        value: The value.
        known: The text that may be among its keys. Other text is never saved: what is read from a checkpoint must not
            decide what a program reads, writes or runs.
        of_modules: As for :func:`mark_of`.

    Raises:
        UnsavedError: It is something else, or too large.

    Example:
        >>> encoded(collections.deque([1, 2]))
        [1, 2]
        >>> encoded("text")
        Traceback (most recent call last):
        composer.trainer.attribute_values.UnsavedError: holds text
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
    if kind == "number":
        return None if value is None else value if isinstance(value, bool) else _plain_number(value)
    if kind == "tensor":
        if id(value) in of_modules:
            raise UnsavedError("holds a tensor of a module")
        if value.grad_fn is not None:
            raise TransientError("is part of a graph")
        try:
            return plain(value).detach().to("cpu", copy=True)
        except NotSerializableError as error:
            raise UnsavedError(f"is {error.reason}") from None
    if kind == "text":
        raise UnsavedError("holds text")
    if type(value) in (list, tuple, torch.Size):
        return (list if type(value) is list else tuple)(
            [_encoded(item, budget, _NO_TEXT, of_modules, depth + 1) for item in value]
        )
    if type(value) is dict:
        if any(type(key) is str and key not in known for key in value):
            raise UnsavedError("has text as new keys")
        if any(isinstance(key, Tensor) for key in value):  # they are found by identity
            raise UnsavedError("has tensors as keys")
        return {
            key if type(key) is str else _encoded(key, budget, _NO_TEXT, of_modules, depth + 1): _encoded(
                item, budget, _below(known, key), of_modules, depth + 1
            )
            for key, item in value.items()
        }
    raise UnsavedError(f"holds an object of class {type(value).__name__}")


def _plain_number(value: Any) -> int | float:
    try:
        return plain_number(value)
    except NotSerializableError as error:
        raise UnsavedError(f"holds a number that cannot be saved: {error.reason}") from None


def _below(known: TextKeys, key: Any) -> TextKeys:
    below: TextKeys = known.get(key, {}) if type(key) is str else {}
    return below


def restored(current: Any, data: Any, device: torch.device | None) -> Any:  # noqa: PLR0911  (one for each kind)
    """Return what an attribute is set to by data that :func:`encoded` returned; containers are changed in place.

    Args:
        current: What the attribute holds: nothing else than data of that kind is taken. A number, or None, may become
            a tensor, and a list, tuple or dictionary of numbers and tensors.
        data: The data.
        device: Where tensors go that nothing was in the place of; None leaves them on the CPU.

    Raises:
        UnsavedError: The data is of another kind.

    Example:
        >>> counts = collections.Counter({3: 1})
        >>> restored(counts, {3: 2, 5: 1}, None) is counts, counts
        (True, Counter({3: 2, 5: 1}))
    """
    kind = kind_of(current)
    if kind == "number":
        return _number_or_more(current, data, device)
    if kind == "tensor" and isinstance(data, Tensor):
        return _into_tensor(current, data)
    if kind == "array" and isinstance(data, Tensor):
        return _into_array(current, data)
    if kind == "time" and _are(data, {"value", "unit"}):
        return _made(lambda: Time(data["value"], data["unit"]))
    if kind == "timestamp" and isinstance(data, dict):
        return _made(lambda: Timestamp.from_state_dict(data))
    if kind == "tuple" and type(data) is tuple:
        return _moved(data, device)
    if kind in ("list", "set", "frozenset", "deque") and type(data) is list:
        return _into_sequence(current, _moved(data, device))
    if kind == "mapping" and type(data) is dict:
        moved = _moved(data, device, text_keys(current))
        current.clear()
        current.update(moved)
        return current
    raise UnsavedError(f"is a {kind or type(current).__name__} here, and something else was saved")


def _are(data: Any, keys: set[str]) -> bool:
    return isinstance(data, dict) and data.keys() == keys


def _made(make: Any) -> Any:
    try:
        return make()
    except (AttributeError, TypeError, ValueError):
        raise UnsavedError("was saved as something else") from None


def _number_or_more(current: Any, data: Any, device: torch.device | None) -> Any:
    if current is None and _are(data, {"value", "unit"}):
        return _made(lambda: Time(data["value"], data["unit"]))
    if current is None and isinstance(data, dict) and "batch_in_epoch" in data:
        return _made(lambda: Timestamp.from_state_dict(data))
    moved = _moved(data, device)
    is_numpys = type(current).__module__ == "numpy" and is_number(moved)
    return type(current)(moved) if is_numpys else moved


def _into_tensor(current: Tensor, data: Tensor) -> Tensor:
    if current.dtype != data.dtype:
        raise UnsavedError(f"is {current.dtype} here, and {data.dtype} was saved")
    if current.shape != data.shape:
        if current.requires_grad:
            raise UnsavedError(f"has shape {tuple(current.shape)} here, and {tuple(data.shape)} was saved")
        return data.to(current.device)
    if current.is_inference() or 0 in current.stride():  # it cannot be written to; of several elements, or at all
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


def _into_sequence(current: Any, items: list[Any]) -> Any:
    if isinstance(current, frozenset):
        return frozenset(items)
    if isinstance(current, list):
        current[:] = items
    elif isinstance(current, set):
        new = set(items)
        current.clear()
        current |= new
    else:
        current.clear()
        current.extend(items)
    return current


def _moved(data: Any, device: torch.device | None, known: TextKeys | None = None) -> Any:
    """Return data with copies of its tensors on the device; the only text in it are keys that are known."""
    if data is None or isinstance(data, (bool, int, float)):
        return data
    if isinstance(data, Tensor):
        return data.to(device or "cpu", copy=True)
    if type(data) in (list, tuple):
        return type(data)([_moved(item, device) for item in data])
    if type(data) is dict:
        known = known or {}
        if all(type(key) is not str or key in known for key in data):
            return {
                key if type(key) is str else _moved(key, device): _moved(item, device, _below(known, key))
                for key, item in data.items()
            }
    raise UnsavedError("was saved with text that is not there")
