"""Batches of any type: counting their samples and tokens, finding and setting their items, splitting and moving."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias, TypeGuard

import torch
from torch import Tensor

from composer.functional.nested import has_items, is_list_of_items, is_list_of_samples, leaves, rebuild, sizes, take

# The items of a container that a description shows.
_MOST_ITEMS_SHOWN = 8
_BUILTIN_SEQUENCES = {list, tuple}
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
see ``composer.core.data.batches.usual_key``."""


def count_samples(batch: Batch) -> int:
    """Return the size of the first dimension of a batch's tensors (or the length of its lists of other objects).

    A list in the batch may also have a list of numbers for each sample, of any length. A batch that was not collated, a
    list of items such as ``(image, class)``, has as many samples as items.

    Raises:
        ValueError: The batch's parts have different lengths, or there is nothing to count.

    Example:
        >>> count_samples((torch.zeros(8, 3), torch.zeros(8)))
        8
    """
    is_pair = type(batch) in (list, tuple) and len(batch) == 2 and type(batch[0]) is type(batch[1]) is Tensor
    if is_pair and batch[0].shape[:1] == batch[1].shape[:1] != ():  # the usual case, in each step, without a call
        return batch[0].shape[0]  # type: ignore[no-any-return]
    if is_list_of_items(batch):
        return len(batch)
    lengths = set(sizes(batch))
    if len(lengths) > 1:
        parts = batch.values() if isinstance(batch, Mapping) else batch
        candidates = lengths | {len(part) for part in parts if isinstance(part, (list, tuple))}
        lengths = {length for length in candidates if _fits(batch, length)} or lengths
    if len(lengths) != 1:
        found = f"lengths {sorted(lengths)}" if lengths else "no tensor and no list"
        raise ValueError(
            f"The number of samples in a batch must be the first dimension of all its tensors; this "
            f"{type(batch).__name__} has {found}. Wrap the loader: DataSpec(loader, get_num_samples_in_batch=...), and "
            "split_batch=... for microbatches."
        )
    return lengths.pop()


def count_tokens(batch: Batch) -> int:
    """Return the number of ids in ``batch["input_ids"]``, padding included; 0 for batches without.

    The padding of packed sequences, whose batches have ``"document_lengths"``, is not counted.

    Example:
        >>> count_tokens({"input_ids": torch.zeros(4, 16)}), count_tokens(torch.zeros(4))
        (64, 0)
    """
    if isinstance(batch, (list, tuple, Tensor)) or not isinstance(batch, Mapping):
        return 0
    if "document_lengths" in batch:
        return sum(map(sum, batch["document_lengths"]))
    ids = batch.get("input_ids")
    return ids.numel() if isinstance(ids, Tensor) else 0


def split_batch(batch: Batch, microbatch_size: int) -> list[Batch]:
    """Split a batch into parts of ``microbatch_size`` samples, of which the last may be smaller.

    Tensors and NumPy arrays with as many rows are split along their first dimension, lists of other objects by their
    items. A list in the batch with as many items as there are samples has one for each sample, unless each of them has
    values of all samples, as lists of tensors do. Beside targets with the boxes of each image, a list has an item for
    each image. Values of the batch (numbers, strings, tensors without dimensions) are part of every part. The type of
    the batch is preserved.

    Raises:
        ValueError: ``microbatch_size`` is less than 1.

    Example:
        >>> [len(part[0]) for part in split_batch((torch.zeros(5, 2), torch.zeros(5)), 2)]
        [2, 2, 1]
    """
    if microbatch_size < 1:
        raise ValueError(f"microbatch_size must be at least 1, got {microbatch_size}.")
    num_samples = count_samples(batch)
    return [
        _slice(batch, slice(start, start + microbatch_size), num_samples)
        for start in range(0, num_samples, microbatch_size)
    ]


def _slice(part: Any, of: slice, num_samples: int, *, is_nested: bool = False) -> Any:
    if isinstance(part, Tensor):
        return part[of] if part.ndim else part
    is_sequence = isinstance(part, (list, tuple))
    if not is_nested and has_items(part):
        return take(part, of)
    if is_sequence or isinstance(part, Mapping):
        # The items of the batch itself are its parts, unless they have no length.
        may_be_samples = is_sequence and len(part) == num_samples and (is_nested or not any(map(sizes, part)))
        if may_be_samples and is_list_of_samples(part, num_samples):
            return part[of]
        items = part if is_sequence else part.values()
        return rebuild(part, [_slice(item, of, num_samples, is_nested=True) for item in items])
    if getattr(part, "ndim", 0) and hasattr(part, "__array__") and len(part) == num_samples:  # NumPy's
        return part[of]
    return part


def _fits(part: Any, num_samples: int, *, is_nested: bool = False) -> bool:
    """Return whether a part of a batch has values of as many samples, in its tensors or as the items of its lists."""
    if isinstance(part, Tensor):
        return not part.ndim or len(part) == num_samples
    if not isinstance(part, (list, tuple, Mapping)):
        return True
    items = part.values() if isinstance(part, Mapping) else part
    if not isinstance(part, Mapping) and not hasattr(part, "_fields"):
        if not any(map(sizes, items)):
            return len(part) == num_samples
        # A list with a tensor for each sample may by chance look like a list of fields, in some batches.
        if is_nested and len(part) == num_samples and not any(isinstance(leaf, Tensor) for leaf in leaves(part)):
            return True
    return all(_fits(item, num_samples, is_nested=True) for item in items)


def move_batch(batch: Batch, device: torch.device) -> Batch:
    """Return the batch with every tensor in it, and everything else that has ``.to``, on ``device``."""
    if isinstance(batch, Tensor):
        # With CUDA, a copy from pinned memory may be incomplete when it returns. What the step computes comes after it
        # in the same stream, so that no tensor needs record_stream; torch reuses the pinned memory only after the event
        # that it records behind the copy. On the CPU, the result may be read at once.
        return batch.to(device, non_blocking=device.type != "cpu")
    if isinstance(batch, Mapping):
        return rebuild(batch, [move_batch(item, device) for item in batch.values()])
    if hasattr(batch, "to"):  # before tuples: a PackedSequence is one, and some of its tensors must stay on the CPU
        return batch.to(device)
    if isinstance(batch, (list, tuple)):
        return rebuild(batch, [move_batch(item, device) for item in batch])
    return batch


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
    if type(key) is int and type(batch) in _BUILTIN_SEQUENCES and -len(batch) <= key < len(batch):
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
        items = [f"{key!r}: {describe_batch(item)}" for key, item in itertools.islice(batch.items(), _MOST_ITEMS_SHOWN)]
    elif isinstance(batch, (list, tuple)):
        items = [describe_batch(item) for item in batch[:_MOST_ITEMS_SHOWN]]
    else:
        return type(batch).__name__
    items += [f"... {len(batch)} in all"] if len(batch) > _MOST_ITEMS_SHOWN else []
    left, right = "{}" if isinstance(batch, Mapping) else "[]" if isinstance(batch, list) else "()"
    return f"{left}{', '.join(items)}{right}"


def note_batch(error: BaseException, event: str, model: Any, method: str, batch: Batch) -> None:
    """Add a note to an error of a model: the call, the event before it, the batch, and the dtype that it needs."""
    name = type(model).__name__
    error.add_note(f"{name}{method} was called after the event {str(event)!r}, with the batch {describe_batch(batch)}.")
    parameters = model.parameters() if isinstance(model, torch.nn.Module) else ()
    own = {str(one.dtype).removeprefix("torch.") for one in parameters if one.is_floating_point()}
    if own and isinstance(error, RuntimeError) and "type" in str(error):  # all of torch's errors of a dtype have it
        error.add_note(
            f"The parameters of {name} are {', '.join(sorted(own))}. Convert inputs of another type in the dataset, "
            "such as arrays of float64 or images of uint8, by x.float(); class ids stay integers."
        )
    if "`find_unused_parameters=True`" in str(error):  # as DistributedDataParallel advises
        error.add_note("In a Trainer, pass parallelism_config={'ddp': {'find_unused_parameters': True}}.")
    if "Expected more than 1 value per channel" in str(error):
        error.add_note("BatchNorm needs two samples: drop incomplete batches, DataLoader(..., drop_last=True).")
    lists = [name for name, part in batch.items() if _is_transposed(part)] if isinstance(batch, Mapping) else []
    if lists:
        error.add_note(
            f"In {', '.join(map(repr, lists))} the batch has lists of strings, or of a tensor for each position, as a "
            "DataLoader collates strings and lists of numbers. A data set of Hugging Face returns tensors after "
            "dataset.with_format('torch'); strings must be tokenized."
        )


def _is_transposed(part: Any) -> bool:
    """Return whether a part of a batch is what the default collate function makes of lists of numbers, or strings."""
    if not isinstance(part, list) or not part:
        return False
    return all(isinstance(one, str) or (isinstance(one, Tensor) and one.ndim == 1) for one in part)


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
