"""What a checkpoint may hold: plain data and tensors, and nothing else."""

from __future__ import annotations

import collections.abc
import datetime as dt
import difflib
import enum
import numbers
import operator
import pathlib
from typing import TYPE_CHECKING, Any

import attrs
import torch
from torch import Tensor

from composer.core.time import Time, Timestamp

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = [
    "MAX_DEPTH",
    "NotSerializableError",
    "abridged",
    "at",
    "describe",
    "is_number",
    "nearest",
    "plain",
    "plain_number",
    "saved",
    "shortened",
]

MAX_DEPTH = 64
MAX_BITS = 4096
_LONGEST_NAME = 500
_LONGEST_LINE = 600
_HOLDS = "A checkpoint holds numbers, text, lists, tuples, dictionaries, None and tensors"


class NotSerializableError(TypeError):
    """Something that is neither plain data nor a tensor was to be saved; ``path`` says where, ``reason`` why not."""

    def __init__(self, path: str, reason: str) -> None:
        super().__init__(f"{path}: {reason}" if path else reason)
        self.path, self.reason = path, reason


def saved(**options: Any) -> Any:
    """Return an attrs field that is saved with a run and is no setting: what an algorithm or callback remembers.

    Args:
        options: As those of :func:`attrs.field`; a ``default`` or ``factory`` is needed.

    Example:
        >>> from composer.core import Callback
        >>> @attrs.define(eq=False)
        ... class CountBatches(Callback):
        ...     seen: int = saved(default=0)
        ...     def batch_end(self, state, logger):
        ...         self.seen += 1
        >>> CountBatches().state_dict()
        {'seen': 0}
    """
    return attrs.field(metadata={"lifetime": "saved"}, init=False, repr=False, **options)


def plain(value: Any, path: str = "") -> Any:
    """Return ``value`` with containers copied, tensors as they are and NumPy's numbers as Python's.

    Args:
        value: Numbers, text, None, tensors, and lists, tuples and dictionaries of them.
        path: Where the value lies, for the error.

    Raises:
        NotSerializableError: Something else is in it.

    Example:
        >>> plain({"step": 3, "when": print}, "EMA")
        Traceback (most recent call last):
        composer.core.serialization.NotSerializableError: EMA.when: function builtins.print cannot be saved. ...
    """
    return _plain(value, path, 0)


def _plain(value: Any, path: str, depth: int) -> Any:
    kind = type(value)
    if value is None or kind in {bool, float, str}:
        return value
    if isinstance(value, Tensor):
        return _checked_tensor(value, path)
    if is_number(value):
        return plain_number(value, path)
    if kind not in {list, tuple, dict}:
        raise NotSerializableError(path, f"{describe(value)} cannot be saved. {_HOLDS}{_remedy(value)}.")
    if depth > MAX_DEPTH:
        raise NotSerializableError(path, f"cannot be saved: it is nested more than {MAX_DEPTH} deep, or holds itself.")
    if kind is dict:
        return {
            key if type(key) is str else _plain(key, path, depth + 1): _plain(item, at(path, key), depth + 1)
            for key, item in value.items()
        }
    return kind([_plain(item, at(path, place), depth + 1) for place, item in enumerate(value)])


def at(path: str, key: object) -> str:
    """Return the path of an item in what lies at ``path``."""
    if isinstance(key, str):
        return f"{path}.{key}" if path else key
    return f"{path}[{key!r}]"


def is_number(value: object) -> bool:
    """Return whether something is a number, NumPy's ones and truth values included, and no enumeration's member."""
    return isinstance(value, numbers.Real) and enum.Enum not in type(value).__mro__


def plain_number(value: Any, path: str = "") -> int | float:
    """Return a number, also one of NumPy's, as Python's.

    Raises:
        NotSerializableError: It has too many digits.
    """
    if not isinstance(value, numbers.Integral):
        return float(value)
    number = operator.index(value)
    if number.bit_length() > MAX_BITS:
        raise NotSerializableError(path, f"a whole number of more than {MAX_BITS} bits cannot be saved.")
    return number


def _checked_tensor(tensor: Tensor, path: str) -> Tensor:
    layout = "a nested" if tensor.is_nested else "a sparse" if tensor.layout is not torch.strided else None
    reason = layout or ("a quantized" if tensor.is_quantized else "a meta" if tensor.is_meta else None)
    if reason is None:
        return tensor
    raise NotSerializableError(path, f"{reason} tensor cannot be saved; make it a dense one that has data.")


def _remedy(value: Any) -> str:
    if isinstance(value, enum.Enum):
        return "; save its value"
    if isinstance(value, dict):
        return "; make it a dictionary by dict(...)"
    if isinstance(value, collections.abc.Set):
        return "; make it a list by sorted(...)"
    if isinstance(value, (Time, Timestamp, dt.timedelta, torch.dtype, torch.device, pathlib.PurePath)):
        return "; annotate the field with its type, or save its text"
    return "; save what it is made from"


def describe(value: Any) -> str:
    """Return what something is, without what differs from run to run.

    Example:
        >>> describe(print), describe(torch.nn.GELU()), describe((int, 1))
        ('function builtins.print', 'object of torch.nn.modules.activation.GELU', '(class builtins.int, 1)')
    """
    if value is None or isinstance(value, (bool, int, float, str)):
        return shortened(value)
    if isinstance(value, (list, tuple)):
        return f"({', '.join(map(describe, value[:4]))}{', ...' if len(value) > 4 else ''})"
    if isinstance(value, type):
        return f"class {_full_name(value)}"
    return f"function {_full_name(value)}" if hasattr(value, "__qualname__") else f"object of {_full_name(type(value))}"


def _full_name(named: Any) -> str:
    return f"{named.__module__}.{named.__qualname__}" if named.__module__ else str(named.__qualname__)


def shortened(value: object) -> str:
    """Return what an object prints as, cut off where it is long."""
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def abridged(text: str) -> str:
    """Return a text whose lines have no middle where they are longer than any sentence, as by a name from a file.

    Example:
        >>> len(abridged(f"model.{'a' * 5_000_000} is not saved."))
        645
    """
    return "\n".join(map(_abridged_line, text.split("\n")))


def _abridged_line(line: str) -> str:
    left_out, half = len(line) - _LONGEST_LINE, _LONGEST_LINE // 2
    return line if left_out <= 0 else f"{line[:half]} ... ({left_out:,} characters are left out) ... {line[-half:]}"


def nearest(name: object, names: Iterable[str], end: str = ".") -> str:
    """Return the end of a sentence: a question for the nearest of some names, or ``end`` if none is near.

    Example:
        >>> nearest("halflife", ["half_life", "smoothing"])
        "; did you mean 'half_life'?"
    """
    text = str(name)
    # Of texts that nobody would call names, the comparison takes time with the square of their length.
    known = [one for one in names if len(one) <= _LONGEST_NAME] if len(text) <= _LONGEST_NAME else []
    found = difflib.get_close_matches(text, known, n=1)
    return f"; did you mean {found[0]!r}?" if found else end
