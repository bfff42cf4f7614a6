"""Nested batches and results: rebuild their containers, and iterate over what they contain.

Unlike ``torch.utils._pytree``, these functions treat every mapping and sequence type as a container, such as a
tokenizer's ``BatchEncoding``, and are fast enough for a training step.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from typing import Any

import torch
from torch import Tensor


def rebuild(container: Any, items: Iterable[Any]) -> Any:
    """Return a mapping, list or tuple of the same type with other items; the original is not changed.

    Args:
        container: The container. Other attributes of a mapping's class are preserved; an immutable mapping becomes a
            dictionary.
        items: The new items, in the order of the old ones.

    Example:
        >>> rebuild({"image": 1, "label": 2}, [3, 4]), rebuild((1, 2), [3, 4])
        ({'image': 3, 'label': 4}, (3, 4))
    """
    if isinstance(container, (list, tuple)):
        kind: Callable[..., Any] = type(container)
        return kind(*items) if hasattr(container, "_fields") else kind(items)
    rebuilt: Any = dict(zip(container, items, strict=True))
    if type(container) is not dict and isinstance(container, MutableMapping):
        new, rebuilt = rebuilt, copy.copy(container)  # not for a dict, because torch.compile does not support copy
        for key, item in new.items():
            rebuilt[key] = item
    return rebuilt


def join(parts: Sequence[Any], lengths: Sequence[int]) -> Any:
    """Return the results of several batches as one of the same structure.

    Tensors are concatenated along their first dimension, and those without dimensions are stacked. Tensors that differ
    in another dimension, as of padded texts, become a list with the tensor of each sample. Lists with an item for each
    sample, such as the boxes of each image, are joined to one list, and so is everything that is no tensor, mapping,
    list or tuple.

    Args:
        parts: The results, at least one.
        lengths: The number of samples of each.

    Example:
        >>> join([{"id": torch.tensor([1, 2])}, {"id": torch.tensor([3])}], [2, 1])
        {'id': tensor([1, 2, 3])}
        >>> [len(one) for one in join([torch.zeros(2, 5), torch.zeros(1, 4)], [2, 1])]
        [5, 5, 4]
    """
    first, joined = parts[0], [*parts]
    if any(type(part) is not type(first) for part in parts):
        return joined
    if isinstance(first, Tensor):
        return _join_tensors(joined)
    if isinstance(first, Mapping) and all(part.keys() == first.keys() for part in parts):
        return rebuild(first, [join([part[key] for part in parts], lengths) for key in first])
    if isinstance(first, (list, tuple)):
        pairs = zip(parts, lengths, strict=True)
        if all(_has_boxes(part) or is_list_of_samples(part, length) for part, length in pairs):
            joined = [item for part in parts for item in part]
        elif all(len(part) == len(first) for part in parts):
            return rebuild(first, [join(column, lengths) for column in zip(*parts, strict=True)])
    return None if first is None else joined


def _join_tensors(parts: list[Tensor]) -> Tensor | list[Tensor]:
    shapes = {part.shape[1:] if part.ndim else None for part in parts}
    if len(shapes) == 1:
        return torch.stack(parts) if None in shapes else torch.cat(parts)
    return parts if None in shapes else [row for part in parts for row in part]


def leaves(nested: Any) -> Iterator[Any]:
    """Yield what nested mappings, lists and tuples contain, in order.

    Example:
        >>> [*leaves([1, {"a": (2, "text")}])]
        [1, 2, 'text']
    """
    if isinstance(nested, (Mapping, list, tuple)):
        for item in nested.values() if isinstance(nested, Mapping) else nested:
            yield from leaves(item)
    else:
        yield nested


def sizes(batch: Any) -> list[int]:
    """Return the lengths of all tensors in a batch; lists without tensors count by their number of items.

    Example:
        >>> import torch
        >>> sizes({"image": torch.zeros(8, 3), "name": ["a", "b"], "step": torch.tensor(7)})
        [8, 2]
    """
    # Runs in each step: tensors are examined without a call, and the slowest checks come last.
    is_sequence = isinstance(batch, (list, tuple))
    if not is_sequence and not isinstance(batch, Mapping):
        return list(batch.shape[:1]) if isinstance(batch, Tensor) else []
    lengths: list[int] = []
    for part in batch if is_sequence else batch.values():
        if isinstance(part, Tensor):
            if part.ndim:  # slicing the shape takes twice as long, and a batch may have many tensors
                lengths.append(part.shape[0])
        elif _has_boxes(part):  # the tensors of images and boxes have other lengths
            return [len(part)]
        else:
            lengths += sizes(part)
    return lengths or ([len(batch)] if is_sequence and not hasattr(batch, "_fields") else [])


def is_list_of_samples(items: list[Any] | tuple[Any, ...], num_samples: int) -> bool:
    """Return whether a list in a batch has one item for each sample, and not fields with values of all samples.

    Items that all have the length ``num_samples`` are fields, unless they are mappings or consist of numbers alone.

    Example:
        >>> import torch
        >>> is_list_of_samples([[1, 2], [3]], 2), is_list_of_samples([torch.zeros(2), torch.zeros(2)], 2)
        (True, False)
    """
    if len(items) != num_samples or hasattr(items, "_fields"):
        return False
    if {length for item in items for length in sizes(item)} != {num_samples}:
        return True
    has_fields = any(isinstance(leaf, (Tensor, str)) for leaf in leaves(items))
    return not has_fields or all(isinstance(item, Mapping) for item in items)


def _has_boxes(items: Any) -> bool:
    """Return whether this is a list with a mapping for each image that has its boxes ``(n, 4)``, or ``(0,)``."""
    first = items[0] if isinstance(items, (list, tuple)) and items else None
    shape = getattr(first.get("boxes"), "shape", ()) if isinstance(first, Mapping) else ()
    return len(shape) == 2 or tuple(shape) == (0,)


def has_items(batch: Any) -> bool:
    """Return whether :func:`take` can take samples of a batch: it was not collated, or has boxes of each image.

    Example:
        >>> import torch
        >>> has_items([(torch.zeros(3, 8, 8), 1)] * 4), has_items([torch.zeros(4, 8)])
        (True, False)
    """
    parts = batch.values() if isinstance(batch, Mapping) else batch if isinstance(batch, (list, tuple)) else ()
    return any(map(_has_boxes, parts)) or is_list_of_items(batch)


def take(batch: Any, of: slice) -> Any:
    """Return some samples of a batch that is a list of items, or has a list of targets with the boxes of each image.

    Example:
        >>> import torch
        >>> take((("image 0", "image 1"), ({"boxes": torch.zeros(2, 4)}, {"boxes": torch.zeros(0, 4)})), slice(1, 2))
        (('image 1',), ({'boxes': tensor([], size=(0, 4))},))
    """
    if is_list_of_items(batch):
        return batch[of]
    parts = batch.values() if isinstance(batch, Mapping) else batch
    return rebuild(batch, [part[of] if isinstance(part, (list, tuple, Tensor)) else part for part in parts])


def is_list_of_items(batch: Any) -> bool:
    """Return whether a batch is a list of items of a data set that were not collated.

    Each item is a tuple, list or mapping of the same structure. One with a number, a string or a tensor without
    dimensions beside a tensor is a sample, because a field has values of all samples.

    Example:
        >>> import torch
        >>> is_list_of_items([(torch.zeros(4), 1)] * 6), is_list_of_items([(torch.zeros(4), torch.zeros(4))] * 6)
        (True, False)
    """
    if not isinstance(batch, (list, tuple)) or not batch or isinstance(batch[0], Tensor) or hasattr(batch, "_fields"):
        return False
    first, is_mapping = batch[0], isinstance(batch[0], Mapping)
    if not is_mapping and not isinstance(first, (list, tuple)):
        return False
    if any(type(item) is not type(first) or len(item) != len(first) for item in batch):
        return False
    if is_mapping and any(item.keys() != first.keys() for item in batch):
        return False
    values = first.values() if is_mapping else first
    ranks = {
        part.ndim if isinstance(part, Tensor) else 0 if isinstance(part, (int, float, str)) else -1 for part in values
    }
    return 0 in ranks and max(ranks) > 0
