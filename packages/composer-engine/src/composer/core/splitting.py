"""Plain data with tensors as JSON and the tensors by name, and back."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Mapping
from typing import Any, TypeAlias

import torch
from torch import Tensor

from composer.core.checks import nearest, shortened
from composer.core.serialization import MAX_DEPTH, at, encode_plain

__all__ = ["join_tensors", "split_tensors"]

_MAX_JSON_DEPTH = 2 * MAX_DEPTH

_Path: TypeAlias = "tuple[_Path, object] | None"
"""A place in the data: that of the container, and the key in it. Only an error formats it as a string."""


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


def _join(  # noqa: PLR0911, PLR0912  (one for each tag)
    data: Any, path: _Path, depth: int, tensors: Mapping[str, Tensor], used: set[str]
) -> Any:
    if depth > _MAX_JSON_DEPTH:
        raise ValueError(f"{_as_text(path)[:80]}...: is nested more than {_MAX_JSON_DEPTH} deep.")
    if data is None or isinstance(data, (bool, int, float, str)):
        return data
    join = functools.partial(_join, depth=depth + 1, tensors=tensors, used=used)
    if isinstance(data, list):
        return [join(item, (path, index)) for index, item in enumerate(data)]
    if not isinstance(data, dict):
        raise ValueError(f"{_as_text(path)}: must be what JSON can represent, got {type(data).__name__}.")  # noqa: TRY004
    tags = [key for key in data if not isinstance(key, str) or key.startswith("$")]
    if not tags:
        return {key: join(item, (path, key)) for key, item in data.items()}
    tag, content = tags[0], data[tags[0]]
    if tag == "$tensor" and len(data) == 1:
        if not isinstance(content, str) or content not in tensors:
            raise ValueError(f"{_as_text(path)}: there is no tensor {content!r}{nearest(content, tensors)}")
        used.add(content)
        return tensors[content]
    if tag == "$float" and len(data) == 1:
        if not isinstance(content, str) or content not in {"nan", "inf", "-inf"}:
            raise ValueError(f"{_as_text(path)}: '$float' must be 'nan', 'inf' or '-inf', got {content!r}.")
        return float(content)
    if tag == "$tuple" and len(data) == 1:
        if not isinstance(content, list):
            raise ValueError(f"{_as_text(path)}: '$tuple' must be a list, got {content!r}.")
        return tuple(join(content, path))
    if tag != "$dict" or len(data) > 1:
        raise ValueError(f"{_as_text(path)}: {tag!r} is no key of a dictionary in saved data.")
    if not isinstance(content, list) or any(not isinstance(pair, list) or len(pair) != 2 for pair in content):
        raise ValueError(f"{_as_text(path)}: '$dict' must be a list of pairs.")
    keys = [join(key, path) for key, _ in content]
    try:
        return {key: join(item, (path, key)) for key, (_, item) in zip(keys, content, strict=True)}
    except TypeError:
        raise ValueError(f"{_as_text(path)}: a key of '$dict' must be a number, a string or a tuple of them.") from None


def _as_text(path: _Path) -> str:
    keys = []
    while path is not None:
        path, key = path
        keys.append(shortened(key)[1:-1] if isinstance(key, str) and len(key) > 80 else key)
    return functools.reduce(at, reversed(keys), "")
