"""Reads and replaces one item of a batch of any type."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias, TypeGuard

from torch import Tensor

from composer.functional.nested import rebuild

__all__ = ["Batch", "BatchKey", "batch_get", "batch_set", "describe_batch", "note_batch", "usual_key"]

_MANY = 8
_PLAIN = {list, tuple}
_USUAL_NAMES = {
    0: ("input_ids", "pixel_values", "input_values", "input_features", "inputs", "input", "images", "image", "x"),
    1: ("labels", "label", "targets", "target", "y"),
}
"""Where dictionaries usually have what is first and second in a tuple: the samples and the targets."""

Batch: TypeAlias = Any
"""What a data loader yields: a tensor, a tuple, a list, a dictionary, or anything else."""

BatchKey: TypeAlias = int | str | tuple[Callable[[Any], Any], Callable[[Any, Any], Any]] | Any
"""The place of an item in a batch: an index, a key, an attribute's name, or a pair of functions, ``get(batch)`` and
``set(batch, value)``, of which the second returns the changed batch. A slice, or a list of places, is several items.

In a dictionary, 0 is the samples and 1 the targets under their usual names, such as ``"input_ids"`` and ``"labels"``;
see ``composer.core.batch.usual_key``."""


def batch_get(batch: Batch, key: BatchKey) -> Any:
    """Return an item of a batch.

    Args:
        batch: A tuple, list, dictionary, or object with attributes.
        key: An index, a slice, a key, an attribute's name, a function ``get(batch)``, or a pair of functions
            ``(get, set)``; or a list or tuple of these, for a tuple of items.

    Raises:
        KeyError: The batch has no such item.

    Example:
        >>> batch_get(("image", "label"), 1), batch_get({"input_ids": 7, "labels": 8}, ["labels", "input_ids"])
        ('label', (8, 7))
    """
    if type(key) is int and type(batch) is dict:
        key = usual_key(batch, key)
    elif type(key) is not int and type(key) is not str:  # nearly always one of these, and in each step
        if callable(key):
            return key(batch)
        if _is_pair(key):
            return key[0](batch)
    try:
        return batch[key]
    except (TypeError, KeyError, IndexError):
        if _is_several(key, batch):
            return tuple(batch_get(batch, one) for one in key)
        usual = usual_key(batch, key)
        if usual is not key:
            return batch[usual]
        if isinstance(key, str) and hasattr(batch, key):
            return getattr(batch, key)
        raise KeyError(_no_item(batch, key)) from None


def usual_key(batch: Batch, key: BatchKey) -> BatchKey:
    """Return the usual name of the samples for 0, and of the targets for 1, in a dictionary without these keys.

    Example:
        >>> usual_key({"input_ids": 7, "labels": 8}, 1), usual_key((7, 8), 1)
        ('labels', 1)
    """
    if type(key) is int and isinstance(batch, Mapping) and key not in batch:
        for name in _USUAL_NAMES.get(key, ()):
            if name in batch:
                return name
    return key


def batch_set(batch: Batch, key: BatchKey, value: Any) -> Batch:
    """Return a batch with one item replaced; the original is not changed.

    Args:
        batch: A tuple, list, dictionary, or object with attributes; a shallow copy is returned.
        key: An index, a slice, a key, an attribute's name, a function ``set(batch, value)``, or a pair of functions
            ``(get, set)``; or a list or tuple of these.
        value: The new item; of several, one for each key.

    Raises:
        KeyError: The batch has no such item.
        ValueError: There are fewer or more new items than keys.

    Example:
        >>> batch_set(("image", "label"), 1, "soft label")
        ('image', 'soft label')
        >>> batch_set({"x": 1, "y": 2}, ["x", "y"], [3, 4])
        {'x': 3, 'y': 4}
    """
    # These two are fast, and nearly always one of them, in each step.
    if type(key) is int and type(batch) in _PLAIN and -len(batch) <= key < len(batch):
        items = [*batch]
        items[key] = value
        return items if type(batch) is list else tuple(items)
    if type(batch) is dict and (type(key) is int or type(key) is str):
        key = usual_key(batch, key)
        if key in batch:
            return {**batch, key: value}
    return _set_item(batch, key, value)


def _set_item(batch: Batch, key: BatchKey, value: Any) -> Batch:
    """Return a batch of any type with one item replaced, for any key."""
    setter = key[1] if _is_pair(key) else key
    if callable(setter):
        return setter(batch, value)
    if _is_several(key, batch):
        if len(value) != len(key):
            raise ValueError(f"value must have one item for each of the {len(key)} keys {key!r}, got {len(value)}.")
        for one, item in zip(key, value, strict=True):
            batch = batch_set(batch, one, item)
        return batch
    batch_get(batch, key)
    key = usual_key(batch, key)
    if hasattr(batch, "_replace") and isinstance(key, str):
        return batch._replace(**{key: value})
    if isinstance(batch, tuple):
        place: Any = key
        items = [*batch]
        items[place] = value
        return rebuild(batch, items)
    changed: Any = batch.clone() if isinstance(batch, Tensor) else copy.copy(batch)  # a tensor's copy shares its memory
    if isinstance(key, str) and not hasattr(batch, "__setitem__"):
        setattr(changed, key, value)
    else:
        changed[key] = value
    return changed


def describe_batch(batch: Batch) -> str:
    """Return a short description of a batch: the dtype and shape of tensors, the type of other items.

    Example:
        >>> import torch
        >>> describe_batch({"image": torch.zeros(8, 3), "name": ["a", "b"]})
        "{'image': float32[8, 3], 'name': [str, str]}"
    """
    if isinstance(batch, Tensor):
        dtype = str(batch.dtype).removeprefix("torch.")
        return f"nested {dtype}" if batch.is_nested else f"{dtype}{list(batch.shape)}"  # those may have no shape
    if isinstance(batch, Mapping):
        items = [f"{key!r}: {describe_batch(item)}" for key, item in itertools.islice(batch.items(), _MANY)]
    elif isinstance(batch, (list, tuple)):
        items = [describe_batch(item) for item in batch[:_MANY]]
    else:
        return type(batch).__name__
    items += [f"... {len(batch)} in all"] if len(batch) > _MANY else []
    left, right = "{}" if isinstance(batch, Mapping) else "[]" if isinstance(batch, list) else "()"
    return f"{left}{', '.join(items)}{right}"


def note_batch(error: BaseException, event: str, called: str, batch: Batch) -> None:
    """Add a note to an error of a model: the call, the event before it, and the batch."""
    error.add_note(f"{called} was called after the event {str(event)!r}, with the batch {describe_batch(batch)}.")


def _is_pair(key: BatchKey) -> TypeGuard[tuple[Callable[[Any], Any], Callable[[Any, Any], Any]]]:
    return isinstance(key, tuple) and len(key) == 2 and all(map(callable, key))


def _is_several(key: BatchKey, batch: Batch) -> TypeGuard[Sequence[BatchKey]]:
    """Return whether a list is several keys, and not itself a key of a mapping or an index of an array."""
    if not isinstance(key, (list, tuple)) or not key or hasattr(batch, "__array__"):
        return False
    return not (isinstance(batch, Mapping) and isinstance(key, tuple) and key in batch)


def _no_item(batch: Batch, key: BatchKey) -> str:
    if isinstance(batch, Mapping):
        content = f"a {type(batch).__name__} with the keys {list(batch)}"
    elif isinstance(batch, Sequence):
        content = f"a {type(batch).__name__} of {len(batch)} items"
    else:
        content = f"a {type(batch).__name__}"
    return (
        f"The batch has no item {key!r}: it is {content}. Pass the places of the items by input_key= and target_key=: "
        "an index, a key, or a pair of functions (get, set)."
    )
