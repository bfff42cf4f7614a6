"""A nested state as two: data that JSON holds exactly, and tensors by name; and both as one again."""

from __future__ import annotations

import functools
import math
from typing import TYPE_CHECKING, Any, TypeAlias

from torch import Tensor

from composer.core.serialization import MAX_DEPTH, NotSerializableError, at, nearest, plain, shortened

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

__all__ = ["join_tensors", "split_tensors"]

_MAX_DEPTH = 2 * MAX_DEPTH

_Path: TypeAlias = "tuple[_Path, object] | None"
"""Where something lies: where that lies which it is in, and its key there. Only an error makes text of it."""


def split_tensors(state: Any) -> tuple[Any, dict[str, Tensor]]:
    """Return ``(data, tensors)``: what JSON can hold, and the tensors by the names that stand in their places.

    ``join_tensors(json.loads(json.dumps(data)), tensors)`` is ``state`` again. What JSON has no word for is written as
    a dictionary of one key that begins with ``$``: ``{"$tensor": name}``, ``{"$tuple": [...]}``, ``{"$float": "nan"}``,
    and ``{"$dict": [[key, value], ...]}`` where keys are no text or begin with ``$``.

    Args:
        state: Numbers, text, None, tensors, and lists, tuples and dictionaries of them.

    Returns:
        The data, and the tensors as they are: not copied, without gradient, and one where two are the same memory.

    Raises:
        NotSerializableError: Something else is in ``state``.

    Example:
        >>> import torch
        >>> data, tensors = split_tensors({"average": torch.ones(2), "betas": (0.9, math.inf)})
        >>> data
        {'average': {'$tensor': 'average'}, 'betas': {'$tuple': [0.9, {'$float': 'inf'}]}}
        >>> tensors
        {'average': tensor([1., 1.])}
    """
    splitter = _Splitter()
    return splitter.split(plain(state), ""), splitter.tensors


def join_tensors(data: Any, tensors: Mapping[str, Tensor]) -> Any:
    """Return the state that :func:`split_tensors` made ``data`` and ``tensors`` of.

    Args:
        data: The data, also after it has been through JSON.
        tensors: The tensors by name.

    Raises:
        ValueError: The data names a tensor that is not there or is not as :func:`split_tensors` writes it, or a tensor
            is nowhere named.

    Example:
        >>> join_tensors({"betas": {"$tuple": [0.9, {"$float": "inf"}]}}, {})
        {'betas': (0.9, inf)}
    """
    joiner = _Joiner(tensors)
    state = joiner.join(data, None, 0)
    unused = sorted(set(tensors) - joiner.used)
    if unused:
        raise ValueError(f"These tensors have no place in the data: {', '.join(map(repr, unused))}.")
    return state


class _Splitter:
    def __init__(self) -> None:
        self.tensors: dict[str, Tensor] = {}
        self._names: dict[tuple[Any, ...], str] = {}

    def split(self, value: Any, path: str) -> Any:
        if isinstance(value, Tensor):
            return {"$tensor": self._name(value, path or "tensor")}
        if isinstance(value, float):
            return value if math.isfinite(value) else {"$float": str(value)}
        if isinstance(value, (list, tuple)):
            items = [self.split(item, at(path, place)) for place, item in enumerate(value)]
            return items if isinstance(value, list) else {"$tuple": items}
        if isinstance(value, dict):
            return self._split_dict(value, path)
        return value

    def _split_dict(self, value: dict[Any, Any], path: str) -> dict[str, Any]:
        if all(isinstance(key, str) and not key.startswith("$") for key in value):
            return {key: self.split(item, at(path, key)) for key, item in value.items()}
        pairs = [[self._split_key(key, path), self.split(item, at(path, key))] for key, item in value.items()]
        return {"$dict": pairs}

    def _split_key(self, key: Any, path: str) -> Any:
        if isinstance(key, Tensor) or (isinstance(key, tuple) and any(isinstance(item, Tensor) for item in key)):
            raise NotSerializableError(path, "a tensor cannot be a dictionary's key.")
        return self.split(key, path)

    def _name(self, tensor: Tensor, path: str) -> str:
        tensor = tensor.detach()
        place = (tensor.device, tensor.dtype, tensor.data_ptr(), tuple(tensor.shape), tensor.stride())
        if tensor.numel() and place in self._names:
            return self._names[place]
        name, again = path, 1
        while name in self.tensors:
            name, again = f"{path}#{again}", again + 1
        self.tensors[name] = tensor
        self._names[place] = name
        return name


def _reported(path: _Path) -> str:
    """Return where something lies in the data, as text, cut off where it is long."""
    keys = []
    while path is not None:
        path, key = path
        keys.append(shortened(key)[1:-1] if isinstance(key, str) and len(key) > 80 else key)
    return functools.reduce(at, reversed(keys), "")


class _Joiner:
    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._tensors = tensors
        self._read: Mapping[str, Callable[[Any, _Path, int], Any]] = {
            "$tensor": self._tensor,
            "$float": self._float,
            "$tuple": self._tuple,
            "$dict": self._dict,
        }
        self.used: set[str] = set()

    def join(self, data: Any, path: _Path, depth: int) -> Any:
        if depth > _MAX_DEPTH:
            raise ValueError(f"{_reported(path)[:80]}...: is nested more than {_MAX_DEPTH} deep.")
        if data is None or isinstance(data, (bool, int, float, str)):
            return data
        if isinstance(data, list):
            return [self.join(item, (path, place), depth + 1) for place, item in enumerate(data)]
        if not isinstance(data, dict):
            raise ValueError(f"{_reported(path)}: must be what JSON can hold, got {type(data).__name__}.")  # noqa: TRY004
        tags = [key for key in data if not isinstance(key, str) or key.startswith("$")]
        if not tags:
            return {key: self.join(item, (path, key), depth + 1) for key, item in data.items()}
        if len(data) > 1 or tags[0] not in self._read:
            raise ValueError(f"{_reported(path)}: {tags[0]!r} is no key of a dictionary in saved data.")
        return self._read[tags[0]](data[tags[0]], path, depth + 1)

    def _tensor(self, name: Any, path: _Path, _: int) -> Tensor:
        if not isinstance(name, str) or name not in self._tensors:
            raise ValueError(f"{_reported(path)}: there is no tensor {name!r}{nearest(name, self._tensors)}")
        self.used.add(name)
        return self._tensors[name]

    def _float(self, text: Any, path: _Path, _: int) -> float:
        if not isinstance(text, str) or text not in {"nan", "inf", "-inf"}:
            raise ValueError(f"{_reported(path)}: '$float' must be 'nan', 'inf' or '-inf', got {text!r}.")
        return float(text)

    def _tuple(self, items: Any, path: _Path, depth: int) -> tuple[Any, ...]:
        if not isinstance(items, list):
            raise ValueError(f"{_reported(path)}: '$tuple' must be a list, got {items!r}.")  # noqa: TRY004
        return tuple(self.join(items, path, depth))

    def _dict(self, pairs: Any, path: _Path, depth: int) -> dict[Any, Any]:
        if not isinstance(pairs, list) or any(not isinstance(pair, list) or len(pair) != 2 for pair in pairs):
            raise ValueError(f"{_reported(path)}: '$dict' must be a list of pairs.")
        joined = [(self.join(key, path, depth), item) for key, item in pairs]
        try:
            return {key: self.join(item, (path, key), depth) for key, item in joined}
        except TypeError:
            raise ValueError(
                f"{_reported(path)}: a key of '$dict' must be a number, a text or a tuple of them."
            ) from None
