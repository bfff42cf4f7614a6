"""Values of other types than plain data, encoded as plain data and decoded with all checks.

There are two forms. :func:`to_data` and :func:`from_data` encode and decode a value by its declared type, such as that
of a field, and the data do not contain the type. Where no type is declared, as in the state of a user's object,
:func:`coded` and :func:`decoded`, at the end of this file, write the name of the type beside the data.

Encoding goes through the types itself, because it must reject what decoding would change. Decoding is done by cattrs
with the hooks of ``_make_converter``. :func:`from_data` encodes the decoded value again and compares: a codec that
loses anything, or data that cattrs has converted, raises an error. So data must contain every field of a class, also
those with defaults: a field that is added later has to be filled in before earlier data is decoded.
"""

from __future__ import annotations

import collections.abc
import contextlib
import dataclasses
import datetime as dt
import enum
import numbers
import operator
import pathlib
import signal
import sys
import types
import typing
import warnings
import weakref
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import attrs
import cattrs
import torch
from cattrs.errors import ForbiddenExtraKeysError
from torch import Tensor

from composer.core.checks import describe, error_text, nearest, shortened
from composer.core.plain_data import ENCODED, MAX_DEPTH, NotSerializableError, at, check_depth, equal, plain, to_number
from composer.core.time import Time, Timestamp

# Where a type is encoded and decoded. To add one with a codec, add the type to ENCODED, and its functions to _CODECS.
# Any other kind of type has to be added to _encode or _encode_instance, _is_instance, _has_no_item_types if its items
# may be undeclared, and the hooks of _make_converter, of which the last one that accepts a type decodes it.
#
#   type                                       encoded by          decoded by
#   Any, object, a union with one of them      plain               as it is
#   bool, int, float, None, Tensor             plain               _read_instance
#   containers without types of items          plain               _read_instance
#   the keys of _CODECS, and subclasses        _CODECS             _CODECS
#   other unions                               _encode_choice      _read_choice: the first member that fits
#   attrs classes                              _encode_fields      _make_reader
#   Sequence[X], Iterable[X], Collection[X]    _encode_items       _read_sequence
#   list[X], tuple[X, ...], sets               _encode_items       cattrs
#   dict[X, Y], Counter[X]                     _encode_pairs       cattrs
#   dataclasses, TypedDict                     _encode_fields      cattrs
#   NamedTuple, Literal, Annotated, Final      _encode             cattrs


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


def _reject(value: Any, kind: Any, path: str) -> typing.NoReturn:
    """Raise the error for a value that is not of its declared type."""
    plain(value, path)  # raises the more precise error for what is no data
    raise NotSerializableError(path, f"{describe(value)} cannot be saved as {_type_name(kind)}.")


def _encode(value: Any, kind: Any, path: str, depth: int) -> Any:
    """Return a value of a declared type as plain data: of a special form of typing here, of a class by the next one."""
    kind = types.NoneType if kind is None else getattr(kind, "__supertype__", kind)  # of a NewType
    # Tensors first, because averages have one for each weight.
    if (kind is Tensor and isinstance(value, Tensor)) or _accepts_any_data(kind):
        return plain(value, path, depth)
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
    if isinstance(expected, type) and _is_instance(value, expected):
        return _encode_instance(value, kind, path, depth)
    _reject(value, kind, path)


def _encode_instance(value: Any, kind: Any, path: str, depth: int) -> Any:
    """Return an instance of a class as plain data."""
    expected, arguments = typing.get_origin(kind) or kind, typing.get_args(kind)
    if _has_no_item_types(kind) or expected in _PLAIN or isinstance(value, Tensor):
        return plain(value, path, depth)
    for base, (write, _) in _CODECS.items():
        if issubclass(expected, base):
            return write(value)
    if attrs.has(expected) or dataclasses.is_dataclass(expected):
        variables = dict(zip(getattr(expected, "__parameters__", ()), arguments, strict=False))
        kinds = {name: variables.get(field, field) for name, field in field_types(expected, init=True).items()}
        return _encode_fields(kinds, {name: getattr(value, name) for name in kinds}, path, depth)
    if hasattr(expected, "_fields"):  # a NamedTuple
        of_items = types.GenericAlias(tuple, tuple(typing.get_type_hints(expected).values()))
        return tuple(_encode(tuple(value), of_items, path, depth + 1))
    if isinstance(value, dict) and arguments:
        return _encode_pairs(value, arguments, path, depth)
    if arguments or expected is tuple:  # tuple[()] has no arguments
        return _encode_items(value, kind, path, depth)
    _reject(value, kind, path)


def _encode_fields(kinds: Mapping[Any, Any], values: Mapping[Any, Any], path: str, depth: int) -> dict[Any, Any]:
    return {name: _encode(value, kinds[name], at(path, name), depth + 1) for name, value in values.items()}


def _encode_pairs(value: dict[Any, Any], arguments: tuple[Any, ...], path: str, depth: int) -> dict[Any, Any]:
    key_kind, item_kind = arguments if len(arguments) == 2 else (arguments[0], int)  # a Counter counts its keys
    keys = [_encode(key, key_kind, path, depth + 1) for key in value]
    return dict(zip(keys, _encode_fields(dict.fromkeys(value, item_kind), value, path, depth).values(), strict=True))


def _encode_items(value: Any, kind: Any, path: str, depth: int) -> Any:
    """Return a tuple, a sequence or a set as plain data: a list, or a tuple where any sequence is declared."""
    expected, item_kinds = typing.get_origin(kind) or kind, typing.get_args(kind)
    if expected is not tuple or item_kinds[1:] == (...,):
        item_kinds = item_kinds[:1] * len(value)
    if len(item_kinds) != len(value):
        _reject(value, kind, path)
    pairs = enumerate(zip(value, item_kinds, strict=True))
    items = [_encode(item, item_kind, at(path, index), depth + 1) for index, (item, item_kind) in pairs]
    if isinstance(value, collections.abc.Set):
        return _in_order(items)
    return tuple(items) if isinstance(value, tuple) and expected is not tuple else items


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
    """Return whether a value is of a class, and decoding yields an equal value of the same type.

    Subclasses of containers would become the declared container, so that only the types of codecs may have subclasses.
    """
    if expected in {int, float}:
        number = numbers.Integral if expected is int else numbers.Real
        return isinstance(value, number) and not isinstance(value, (bool, enum.Enum))
    if issubclass(expected, collections.abc.Set):
        return isinstance(value, collections.abc.Set)
    if expected in _PLAIN or issubclass(expected, (Tensor, *_CODECS)):
        return isinstance(value, expected)
    is_abstract = expected.__module__ == "collections.abc" and type(value) in {list, tuple, dict}
    return isinstance(value, expected) if is_abstract else type(value) is expected


def _in_order(items: list[Any]) -> list[Any]:
    """Return the items of a set in an order that is the same in each process."""
    try:
        return sorted(items)
    except TypeError:
        return sorted(items, key=lambda item: (type(item).__name__, repr(item)))


def from_data(data: Any, kind: Any = Any, path: str = "") -> Any:
    """Decode a value of a declared type from the data that :func:`to_data` returns for it.

    Args:
        data: Plain data and tensors.
        kind: The value's type.
        path: The place of the data, for the error.

    Raises:
        ValueError: :func:`to_data` returns such data for no value of this type. A missing field is an error, too, even
            if it has a default.

    Example:
        >>> from_data([0.9, "10ep"], tuple[float, Time | None])
        (0.9, Time(10, TimeUnit.EPOCH))
    """
    try:
        value = _CONVERTER.structure(data, kind)
        # Data may be nested twice as deep in a file as in memory, so encoding begins at a negative depth.
        encoded_again = _encode(value, kind, "", -MAX_DEPTH)
    except Exception as error:  # noqa: BLE001  (data of another program fails in many ways)
        raise ValueError(" ".join(_sentences(error, data, kind, path))) from None
    if not equal(encoded_again, data):  # cattrs converts where it can, as 3 to '3'
        raise ValueError(_must_be(kind, data, path))
    return value


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
        unknown = sorted(error.extra_fields, key=str)
        return "; ".join(f"unknown field {name!r}{nearest(name, known, '')}" for name in unknown)
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
    own_names = typing.List, typing.Dict, typing.Tuple  # noqa: UP006
    return kind in (list, tuple, dict, dict[Any, Any], collections.abc.Sequence, collections.abc.Mapping, *own_names)


def _read_sequence(data: Any, kind: Any) -> Any:
    if type(data) not in {list, tuple}:
        raise TypeError(f"got {shortened(data)}")
    items: Any = list[typing.get_args(kind)[0]]  # type: ignore[misc]
    return type(data)(_CONVERTER.structure(data, items))


def _read_choice(data: Any, kind: Any) -> Any:
    """Return data decoded as the first member of a union that accepts it."""
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
    return to_number(value) if kind in {int, float} else value


def _to_dtype(name: str, _: Any) -> torch.dtype:
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"torch has no dtype {name!r}")
    return dtype


_PLAIN = frozenset({bool, int, float, types.NoneType})

# The order is that of ENCODED, with str second, as a StrEnum is an Enum and a str: the first type that fits is used.
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


_CODED = "$coded"


def coded(value: Any, path: str = "", depth: int = 0) -> Any:
    """Return data in which members of enumerations, times, dtypes and paths are encoded, with the names of their types.

    A value becomes ``{"$coded": [type, data]}``, a dictionary's key ``("$coded", type, data)``. Keys of the user that
    begin so are encoded, too: ``("$coded", "$key", key)``.

    Args:
        value: Plain data, and values of these types.
        path: The place of the value, for the error.
        depth: The number of containers around it.

    Raises:
        NotSerializableError: The value is nested too deep, or contains itself.

    Example:
        >>> from composer.core import Time, TimeUnit
        >>> coded({"unit": TimeUnit.BATCH, "at": [Time(3, "ba")]})
        {'unit': {'$coded': ['TimeUnit', 'ba']}, 'at': [{'$coded': ['Time', '3ba']}]}
    """
    if isinstance(value, ENCODED):
        return {_CODED: [*_code(value)]}
    # A plain dictionary cannot replace these: plain() rejects them, or copies their items if it accepts all mappings.
    if isinstance(value, dict) and not isinstance(value, (OrderedDict, defaultdict)):
        check_depth(path, depth)
        return {_coded_key(key): coded(item, at(path, key), depth + 1) for key, item in value.items()}
    if type(value) in {list, tuple, torch.Size}:
        check_depth(path, depth)
        return (list if type(value) is list else tuple)(
            coded(item, at(path, index), depth + 1) for index, item in enumerate(value)
        )
    return value


def _code(value: Any) -> tuple[str, Any]:
    base = next(base for base in ENCODED if isinstance(value, base))
    return (type(value) if base is enum.Enum else base).__name__, to_data(value, type(value))


def _coded_key(key: Any) -> Any:
    if isinstance(key, ENCODED):
        return (_CODED, *_code(key))
    is_like_a_code = key == _CODED or (type(key) is tuple and key[:1] == (_CODED,))
    return (_CODED, "$key", key) if is_like_a_code else key


def decoded(own: Any, saved: Any, owner: type = object, path: str = "") -> Any:
    """Return saved data with the types that :func:`coded` has named, or that ``own`` has at the same places.

    Also a Counter, as in torch's MultiStepLR. An enumeration that is not found, such as a renamed one, is that of
    ``own`` if it has the value; otherwise the saved value remains, with a warning.

    Args:
        own: The state of a new object.
        saved: What was saved of one.
        owner: Its class. Enumerations that ``own`` lacks are found in this class, its module, and the modules that are
            imported there, and in :mod:`composer.core` and :mod:`signal`; those of its bases likewise.
        path: The place of the data, for the warning.

    Raises:
        ValueError: A value is none of the type.

    Example:
        >>> decoded({"at": None}, {"at": {"$coded": ["Time", "3ba"]}, "more": 4})
        {'at': Time(3, TimeUnit.BATCH), 'more': 4}
    """
    match saved:
        case {"$coded": [str(name), data], **others} if not others:
            return from_data(data, _coded_type(name, data, own, owner, path))
    if isinstance(own, ENCODED) and saved is not None:  # former versions have saved no name
        return from_data(saved, type(own))
    if type(saved) is dict:
        own_items = own if isinstance(own, dict) else {}
        keys = [_decoded_key(key, own_items, owner, path) for key in saved]
        pairs = zip(keys, saved.values(), strict=True)
        items = {key: decoded(own_items.get(key), item, owner, at(path, key)) for key, item in pairs}
        return Counter(items) if isinstance(own, Counter) else items
    if type(saved) in {list, tuple}:
        is_alike = type(own) is type(saved) and len(own) == len(saved)
        indexed = enumerate(zip(own if is_alike else [None] * len(saved), saved, strict=True))
        return type(saved)(decoded(own_item, item, owner, at(path, index)) for index, (own_item, item) in indexed)
    return saved


def _decoded_key(key: Any, own_keys: Iterable[Any], owner: type, path: str) -> Any:
    match key:
        case ("$coded", "$key", user_key):
            return user_key
        case ("$coded", str(name), data):
            similar = next((own_key for own_key in own_keys if type(own_key).__name__ == name), None)
            return from_data(data, _coded_type(name, data, similar, owner, path))
    return key


def _coded_type(name: str, data: Any, own: Any, owner: type, path: str) -> Any:
    """Return a type that :func:`coded` has named; Any, with a warning, for an enumeration that is not found.

    Saved data do not decide what is imported: modules are those of the classes, and what these have imported.
    """
    own_type = type(own)
    modules = [sys.modules.get(base.__module__) for base in owner.__mro__]
    scopes = [*owner.__mro__, *filter(None, modules)]
    nearby = [own_type, *(item for scope in scopes for item in tuple(vars(scope).values()))]
    for item in nearby:
        if isinstance(item, enum.EnumType) and item.__name__ == name:
            return item
    base = next((base for base in ENCODED if base.__name__ == name), None)
    if base is not None:
        kind = own_type if issubclass(own_type, base) else base
        return pathlib.Path if kind is pathlib.PurePath else kind
    imported = [item for item in nearby if isinstance(item, types.ModuleType)]
    for module in [*imported, sys.modules["composer.core"], signal]:
        item = vars(module).get(name)
        if isinstance(item, enum.EnumType):
            return item
    if isinstance(own_type, enum.EnumType) and any(data == member.value for member in own_type):  # renamed
        return own_type
    warnings.warn(
        f"{path or 'The value'}: a member of {name} was saved, and its value is loaded in its place: define or import "
        f"this enumeration in {owner.__module__}.",
        stacklevel=2,
    )
    return Any
