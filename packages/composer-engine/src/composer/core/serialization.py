"""What a checkpoint holds: plain data and tensors, encoded from typed values and decoded with all checks.

:func:`to_data` encodes a value by its declared type and :func:`from_data` decodes it, through one cattrs converter.
:func:`split_tensors` splits plain data into JSON and tensors, which :func:`join_tensors` puts together again.
"""

from __future__ import annotations

import collections.abc
import contextlib
import dataclasses
import datetime as dt
import enum
import functools
import itertools
import math
import numbers
import operator
import pathlib
import sys
import types
import typing
import weakref
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import attrs
import cattrs
import torch
from cattrs.errors import ForbiddenExtraKeysError
from torch import Tensor

from composer.core.checks import describe, error_text, nearest, shortened
from composer.core.former import ClockData
from composer.core.time import Time, Timestamp

# Both are far below what Python limits, recursion and digits of a number, so that no saved data exceeds it.
MAX_DEPTH = 64
MAX_BITS = 4096

_Path: TypeAlias = "tuple[_Path, object] | None"
"""A place in JSON data: that of the container, and the key in it. Only an error formats it as a string."""


class NotSerializableError(TypeError):
    """A value that is neither plain data nor a tensor cannot be saved; ``path`` is its place, ``reason`` the cause."""

    def __init__(self, path: str, reason: str) -> None:
        super().__init__(f"{path}: {reason}" if path else reason)
        self.path, self.reason = path, reason


def to_data(value: Any, kind: Any = Any, path: str = "") -> Any:
    """Encode a value of a declared type as plain data and tensors.

    A :class:`Time` becomes its string, an enumeration's member its value, a duration its seconds, a dtype, device or
    file path its name, a tuple or set a list, an attrs object a dictionary. A value of type ``Any`` must be plain data.

    Args:
        value: The value to encode.
        kind: Its type, as annotated.
        path: The place of the value, for the error.

    Raises:
        NotSerializableError: The value is not of this type, contains something that is neither data nor a tensor, or
            would be decoded as another member of a union.

    Example:
        >>> to_data(Time(10, "ep"), Time), to_data((0.9, None), tuple[float, Time | None])
        ('10ep', [0.9, None])
    """
    return _encode(value, kind, path, 0)


def plain(value: Any, path: str = "", *, mappings: bool = False) -> Any:
    """Return a copy of plain data: new containers, the same tensors, and Python's numbers in place of NumPy's.

    Args:
        value: Numbers, strings, None, tensors, and lists, tuples and dictionaries of them.
        path: The place of the value, for the error.
        mappings: Whether other mappings, such as the Counter in torch's MultiStepLR, are saved as dictionaries.

    Raises:
        NotSerializableError: The value contains something else.

    Example:
        >>> plain({"step": 3, "when": print}, "EMA")
        Traceback (most recent call last):
        composer.core.serialization.NotSerializableError: EMA.when: function builtins.print cannot be saved. ...
    """
    return encode_plain(value, path, 0, mappings=mappings)


def encode_plain(
    value: Any, path: str, depth: int, *, mappings: bool = False, name_of: Callable[[Tensor, str], str] | None = None
) -> Any:
    """Return a copy of plain data; in the form of JSON if ``name_of`` is given, which names and stores tensors."""
    kind, to_json = type(value), name_of is not None
    if value is None or kind is bool or kind is str:
        return value
    if isinstance(value, Tensor):
        _check_tensor(value, path)
        if name_of is None:
            return value
        return {"$tensor": name_of(value.detach() if value.requires_grad else value, path or "tensor")}
    if is_number(value):
        number = plain_number(value, path)
        is_finite = isinstance(number, int) or math.isfinite(number)
        return number if is_finite or not to_json else {"$float": str(number)}
    if kind is ClockData or (mappings and isinstance(value, collections.abc.Mapping)):
        kind = dict
    if kind not in {list, tuple, dict}:
        expected = "A checkpoint holds numbers, strings, lists, tuples, dictionaries, None and tensors"
        raise NotSerializableError(path, f"{describe(value)} cannot be saved. {expected}{_remedy(value)}.")
    check_depth(path, depth)
    encode = functools.partial(encode_plain, depth=depth + 1, mappings=mappings, name_of=name_of)
    if kind is not dict:
        items = [encode(item, at(path, index)) for index, item in enumerate(value)]
        return {"$tuple": items} if to_json and kind is tuple else kind(items)
    pairs = []
    for key, item in value.items():
        if to_json and any(isinstance(part, Tensor) for part in (key if isinstance(key, tuple) else (key,))):
            raise NotSerializableError(path, "a tensor cannot be a dictionary's key.")
        pairs.append([key if type(key) is str else encode(key, path), encode(item, at(path, key))])
    is_json = all(isinstance(key, str) and not key.startswith("$") for key, _ in pairs)
    return dict(pairs) if is_json or not to_json else {"$dict": pairs}


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

    return encode_plain(state, "", 0, name_of=name_of), tensors


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


def _encode(value: Any, kind: Any, path: str, depth: int) -> Any:
    """Return a value of a declared type as plain data."""
    kind = types.NoneType if kind is None else getattr(kind, "__supertype__", kind)  # of a NewType
    if (kind is Tensor and isinstance(value, Tensor)) or _accepts_any_data(
        kind
    ):  # averages have a tensor for each weight
        return encode_plain(value, path, depth)
    check_depth(path, depth)
    if _is_union(kind):
        return _encode_choice(value, kind, path, depth)
    expected, arguments = typing.get_origin(kind) or kind, typing.get_args(kind)
    if expected in {typing.Annotated, typing.Final}:
        return _encode(value, arguments[0], path, depth)
    if expected is typing.Literal and value in arguments:
        return _encode(value, type(value), path, depth)
    if typing.is_typeddict(expected) and type(value) is dict and value.keys() <= typing.get_type_hints(expected).keys():
        return _encode_fields(typing.get_type_hints(expected), value, path, depth)
    if not isinstance(expected, type) or not _is_instance(value, expected):
        _reject(value, kind, path)
    return _encode_instance(value, kind, path, depth)


def _encode_instance(value: Any, kind: Any, path: str, depth: int) -> Any:
    """Return an instance of a class as plain data."""
    expected = typing.get_origin(kind) or kind
    if _has_no_item_types(kind) or expected in _PLAIN or isinstance(value, Tensor):
        return encode_plain(value, path, depth)
    for base, (write, _) in _CODECS.items():
        if issubclass(expected, base):
            return write(value)
    return _encode_container(value, kind, path, depth)


def _encode_container(value: Any, kind: Any, path: str, depth: int) -> Any:
    """Return an object with fields, a dictionary, a tuple, a sequence or a set as plain data."""
    expected, arguments = typing.get_origin(kind) or kind, typing.get_args(kind)
    if attrs.has(expected) or dataclasses.is_dataclass(expected):
        variables = dict(zip(getattr(expected, "__parameters__", ()), arguments, strict=False))
        kinds = {name: variables.get(field, field) for name, field in field_types(expected, init=True).items()}
        return _encode_fields(kinds, {name: getattr(value, name) for name in kinds}, path, depth)
    if isinstance(value, dict) and arguments:
        keys = [_encode(key, arguments[0], path, depth + 1) for key in value]
        kinds = dict.fromkeys(value, arguments[1] if len(arguments) == 2 else int)  # of a Counter
        return dict(zip(keys, _encode_fields(kinds, value, path, depth).values(), strict=True))
    if hasattr(expected, "_fields"):  # a NamedTuple
        arguments = tuple(typing.get_type_hints(expected).values())
        return tuple(_encode(tuple(value), types.GenericAlias(tuple, arguments), path, depth + 1))
    if not arguments and expected is not tuple:
        _reject(value, kind, path)
    if expected is not tuple or arguments[1:] == (...,):
        arguments = arguments[:1] * len(value)
    if len(arguments) != len(value):
        _reject(value, kind, path)
    pairs = enumerate(zip(value, arguments, strict=True))
    items = [_encode(item, item_kind, at(path, index), depth + 1) for index, (item, item_kind) in pairs]
    if isinstance(value, collections.abc.Set):
        return _in_order(items)
    return tuple(items) if isinstance(value, tuple) and expected is not tuple else items


def _reject(value: Any, kind: Any, path: str) -> typing.NoReturn:
    plain(value, path)  # raises the more precise error for what is no data
    raise NotSerializableError(path, f"{describe(value)} cannot be saved as {_type_name(kind)}.")


def _encode_fields(kinds: Mapping[Any, Any], values: Mapping[Any, Any], path: str, depth: int) -> dict[Any, Any]:
    return {name: _encode(value, kinds[name], at(path, name), depth + 1) for name, value in values.items()}


def _encode_choice(value: Any, kind: Any, path: str, depth: int) -> Any:
    """Return a value of a union as plain data, if decoding it with an earlier member does not change the value."""
    members = typing.get_args(kind)
    for index, member in enumerate(members):
        try:
            data = _encode(value, member, path, depth + 1)
        except NotSerializableError:
            continue
        for earlier in members[:index]:
            with contextlib.suppress(ValueError):
                if from_data(data, earlier) != value:
                    raise NotSerializableError(
                        path,
                        f"{describe(value)} cannot be saved: it would not be the same when read as {_type_name(kind)}.",
                    )
        return data
    _reject(value, kind, path)


def _is_instance(value: Any, expected: type) -> bool:
    """Return whether decoding yields an equal value of the same type: subclasses of containers would be lost."""
    if expected in {int, float}:
        number = numbers.Integral if expected is int else numbers.Real
        return is_number(value) and isinstance(value, number) and not isinstance(value, bool)
    if expected in _PLAIN or issubclass(expected, (collections.abc.Set, Tensor, *_CODECS)):
        return isinstance(value, collections.abc.Set if issubclass(expected, collections.abc.Set) else expected)
    return type(value) is expected or (
        expected.__module__ == "collections.abc" and type(value) in {list, tuple, dict} and isinstance(value, expected)
    )


def _in_order(items: list[Any]) -> list[Any]:
    try:
        return sorted(items)
    except TypeError:
        return sorted(items, key=lambda item: (type(item).__name__, repr(item)))


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
    if isinstance(value, tuple(_CODECS)):
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


def plain_number(value: Any, path: str = "") -> int | float:
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


_KNOWN_TYPES: weakref.WeakKeyDictionary[type, dict[str, Any]] = weakref.WeakKeyDictionary()


def field_types(kind: Any, *, init: bool = False) -> dict[str, Any]:
    """Return the types of an attrs class's fields by name; ``Any`` if an annotation cannot be resolved at run time.

    Args:
        kind: An attrs class or dataclass.
        init: Whether to return only the fields that the constructor takes.

    Example:
        >>> @attrs.define
        ... class Point:
        ...     x: "int | None" = None
        >>> field_types(Point)
        {'x': int | None}
    """
    if not attrs.has(kind):
        return typing.get_type_hints(kind) if dataclasses.is_dataclass(kind) else {}
    known = _KNOWN_TYPES.setdefault(kind, {})
    for field in attrs.fields(kind):
        if field.name not in known and field.type is not None:
            with contextlib.suppress(NameError, AttributeError, TypeError, SyntaxError):  # it may be resolved later
                owner = next(base for base in kind.__mro__ if field.name in vars(base).get("__annotations__", {}))
                holder = type("_Holder", (), {"__annotations__": {field.name: field.type}})
                names = vars(sys.modules[owner.__module__])
                known[field.name] = typing.get_type_hints(holder, names, dict(vars(owner)))[field.name]
    return {field.name: known.get(field.name, Any) for field in attrs.fields(kind) if field.init or not init}


def from_data(data: Any, kind: Any = Any, path: str = "") -> Any:
    """Decode a value of a declared type from the data that :func:`to_data` returns for it.

    Args:
        data: Plain data and tensors.
        kind: The value's type.
        path: The place of the data, for the error.

    Raises:
        ValueError: :func:`to_data` returns such data for no value of this type.

    Example:
        >>> from_data([0.9, "10ep"], tuple[float, Time | None])
        (0.9, Time(10, TimeUnit.EPOCH))
    """
    try:
        value = _CONVERTER.structure(data, kind)
        # The value was encoded without the containers around it, which count in a file: so twice the depth, as there.
        canonical = _encode(value, kind, "", -MAX_DEPTH)
    except Exception as error:  # noqa: BLE001  (data of another program fails in many ways)
        raise ValueError(" ".join(_sentences(error, data, kind, path))) from None
    if not equal(canonical, data):  # cattrs converts where it can, as 3 to '3'
        raise ValueError(_must_be(kind, data, path))
    return value


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


def _sentences(error: Exception, data: Any, kind: Any, path: str) -> list[str]:
    if not isinstance(error, cattrs.BaseValidationError):
        got = f"got {shortened(data)}"
        reason = str(error).removeprefix(got) if str(error).startswith(got) else f": {error}".rstrip(".:")
        return [_must_be(kind, data, path, reason)]
    lines = cattrs.transform_error(error, path or "The value", _problem)
    return [f"{place}: {problem}." for problem, _, place in (line.rpartition(" @ ") for line in lines)]


def _must_be(kind: Any, data: Any, path: str, reason: str = "") -> str:
    return f"{path or 'The value'}: must be {_type_name(kind)}, got {shortened(data)}{reason}."


def _problem(error: BaseException, kind: Any) -> str:
    if isinstance(error, ForbiddenExtraKeysError):
        known = [field.name for field in attrs.fields(error.cl)]
        return "; ".join(
            f"unknown field {name!r}{nearest(name, known, '')}" for name in sorted(error.extra_fields, key=str)
        )
    if isinstance(error, KeyError):
        return f"field {error} is missing"
    reason = error_text(error)
    return (reason if kind is None else f"must be {_type_name(kind)}: {reason}").rstrip(".:")


def _type_name(kind: Any) -> str:
    return kind.__name__ if isinstance(kind, type) and not typing.get_args(kind) else str(kind).replace("typing.", "")


def _is_union(kind: Any) -> bool:
    return typing.get_origin(kind) in {typing.Union, types.UnionType}


def _accepts_any_data(kind: Any) -> bool:
    return kind is Any or kind is object or (_is_union(kind) and any(map(_accepts_any_data, typing.get_args(kind))))


def _has_no_item_types(kind: Any) -> bool:
    return kind in (list, tuple, dict, dict[Any, Any]) or (
        kind in (collections.abc.Sequence, collections.abc.Mapping, typing.List, typing.Dict, typing.Tuple)  # noqa: UP006
    )


def _read_sequence(data: Any, kind: Any) -> Any:
    if type(data) not in {list, tuple}:
        raise TypeError(f"got {shortened(data)}")
    items: Any = list[typing.get_args(kind)[0]]  # type: ignore[misc]
    return type(data)(_CONVERTER.structure(data, items))


def _read_choice(data: Any, kind: Any) -> Any:
    for member in typing.get_args(kind):
        with contextlib.suppress(ValueError):
            return from_data(data, member)
    raise ValueError(f"got {shortened(data)}")


def _read_instance(value: Any, kind: Any) -> Any:
    kind = typing.get_origin(kind) or kind
    if issubclass(kind, enum.Enum):  # cattrs uses the hook of a class for its subclasses
        return kind(value)
    if not _is_instance(value, kind):
        raise TypeError(f"got {shortened(value)}")
    return plain_number(value) if kind in {int, float} else value


def _to_dtype(name: str, _: Any) -> torch.dtype:
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"torch has no dtype {name!r}")
    return dtype


_PLAIN = frozenset({bool, int, float, types.NoneType})

# How values are encoded and decoded. The first type that fits is used: a StrEnum is an Enum and a str.
# Where a type is handled. To add one, add it here, which serves both directions, and through ENCODED the codes of
# components. from_data() encodes again and compares: a codec that loses anything raises an error.
#
#   type                                       encoded by          decoded by
#   Any, object, a union with one of them      encode_plain        as it is
#   bool, int, float, None, Tensor             encode_plain        _read_instance
#   containers without types of items          encode_plain        _read_instance
#   the keys of _CODECS, and subclasses        _CODECS             _CODECS
#   other unions                               _encode_choice      _read_choice: the first member that fits
#   attrs classes                              _encode_container   _make_reader
#   Sequence[X], Iterable[X], Collection[X]    _encode_container   _read_sequence
#   list[X], dict[X, Y], sets, dataclasses     _encode_container   cattrs
#   Literal, Annotated, Final, TypedDict       _encode             cattrs
_CODECS: Mapping[type, tuple[Callable[[Any], Any], Callable[[Any, Any], Any]]] = {
    enum.Enum: (operator.attrgetter("value"), _read_instance),
    str: (lambda text: str(text.value if isinstance(text, enum.Enum) else text), _read_instance),
    Time: (Time.to_timestring, lambda text, _: Time.from_timestring(text)),
    Timestamp: (Timestamp.state_dict, lambda state, _: Timestamp.from_state_dict(state)),
    dt.timedelta: (dt.timedelta.total_seconds, lambda seconds, _: dt.timedelta(seconds=seconds)),
    torch.dtype: (lambda dtype: str(dtype).removeprefix("torch."), _to_dtype),
    torch.device: (str, lambda name, _: torch.device(name)),
    pathlib.PurePath: (str, lambda text, kind: kind(text)),
}

ENCODED = tuple(kind for kind in _CODECS if kind is not str)
"""The types whose values are encoded as strings, numbers or dictionaries, and which the data do not name."""


def _make_reader(kind: Any) -> Callable[[Any, Any], Any]:
    """Return the function that decodes objects of an attrs class, with one error for what is no dictionary."""
    read = _CONVERTER.gen_structure_attrs_fromdict(kind)
    names = ", ".join(field_types(typing.get_origin(kind) or kind, init=True))

    def read_dict(data: Any, _: Any) -> Any:
        if type(data) is not dict:
            raise TypeError(f"got {shortened(data)}, expected a dictionary of {names}")
        return read(data, kind)

    return read_dict


def _make_converter() -> cattrs.Converter:
    converter = cattrs.Converter(forbid_extra_keys=True)
    # Of the conditions below, cattrs checks those registered last first.
    for kind in _PLAIN:
        converter.register_structure_hook(kind, _read_instance)
    for kind, (_, read) in _CODECS.items():
        converter.register_structure_hook(kind, read)
    converter.register_structure_hook_factory(attrs.has, _make_reader)
    converter.register_structure_hook(Tensor, _read_instance)
    converter.register_structure_hook_func(_has_no_item_types, _read_instance)
    converter.register_structure_hook_func(_accepts_any_data, lambda data, _: data)
    # Lists and tuples are both of these, and each must remain what it is.
    either: set[Any] = {collections.abc.Sequence, collections.abc.Iterable, collections.abc.Collection}
    converter.register_structure_hook_func(lambda kind: typing.get_origin(kind) in either, _read_sequence)
    converter.register_structure_hook_func(lambda kind: _is_union(kind) and not _accepts_any_data(kind), _read_choice)
    return converter


_CONVERTER = _make_converter()
