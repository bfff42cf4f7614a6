"""Batches of any type: their items, and data loaders with functions that count, split and transform them."""

from __future__ import annotations

import copy
import functools
import inspect
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence, Sized
from typing import Any, TypeAlias, TypeGuard

import attrs
import torch
from torch import Tensor
from torch.utils.data import IterableDataset

from composer.core.checks import NamesArguments
from composer.functional.checks import check_whole
from composer.functional.nested import is_list_of_items, is_list_of_samples, leaves, rebuild, sizes

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
see ``composer.core.data_spec.usual_key``."""

TokenCount: TypeAlias = Callable[[Any], int | Mapping[str, int]]


def _check_function(name: str, function: object) -> None:
    if function is not None and not callable(function):
        raise TypeError(f"{name} must be None or a function of a batch, got {function!r}.")


def _checked_count(name: str, lowest: int, count: Callable[..., Any]) -> Callable[..., int]:
    """Return the user's counting function with a check of its result."""
    _check_function(name, count)

    def counted(*arguments: Any, **options: Any) -> int:
        number = count(*arguments, **options)
        try:
            # int() accepts strings, and comparing with it lets floats such as 8.0 and tensors of one number pass.
            whole = None if isinstance(number, (str, bytes)) or int(number) != number else int(number)
        except (TypeError, ValueError, OverflowError, RuntimeError):
            whole = None
        if whole is None or whole < lowest:
            raise (TypeError if whole is None else ValueError)(
                f"DataSpec's {name} must return a whole number, at least {lowest}, got {number!r}."
            )
        return whole

    return counted


# Converters, as their defaults are defined below; the fields have the names of those functions.
def _to_split(given: Callable[[Batch, int], Sequence[Batch]] | None) -> Callable[[Batch, int], Sequence[Batch]]:
    return given or split_batch


def _to_count_samples(given: Callable[[Batch], int] | None) -> Callable[[Batch], int]:
    return count_samples if given in (None, count_samples) else _checked_count("get_num_samples_in_batch", 1, given)


def _to_count_tokens(given: TokenCount | None) -> TokenCount:
    if given is None or given is count_tokens:
        return count_tokens
    name = "get_num_tokens_in_batch"
    _check_function(name, given)
    one = _checked_count(name, 0, lambda number: number)

    def counted(batch: Batch) -> int | dict[str, int]:
        found = given(batch)
        if not isinstance(found, Mapping):
            return one(found)
        if "total" not in found:
            raise ValueError(f"DataSpec's {name} must return a dictionary with the key 'total', got {dict(found)!r}.")
        return {kind: one(number) for kind, number in found.items()}

    return counted


@attrs.define(eq=False)
class DataSpec(NamesArguments):
    """A data loader, with functions that count, split and transform its batches.

    Args:
        dataloader: Any iterable of batches.
        num_samples: Samples in an epoch; the length of the loader's dataset if None.
        num_tokens: Tokens in an epoch.
        batch_transforms: ``f(batch) -> batch``, called after the batch has been moved to the device.
        microbatch_transforms: ``f(batch) -> batch`` for each microbatch.
        split_batch: ``f(batch, microbatch_size) -> microbatches``; if None, tensors and lists are split along their
            first dimension.
        get_num_samples_in_batch: ``f(batch) -> int``; if None, the size of the first dimension of its tensors.
        get_num_tokens_in_batch: ``f(batch) -> int``, or a dictionary of ``"total"`` and ``"loss_generating"``, the
            tokens whose loss counts; if None, the number of its ``input_ids``, of packed ones without padding.

    Raises:
        TypeError: ``dataloader`` is not iterable, or another argument is of the wrong type.
        ValueError: ``num_samples`` is less than 1, or ``num_tokens`` is negative.

    The results of these functions are checked: a count must be a whole number (of samples at least 1), and the parts of
    a batch must contain each of its samples once.

    Example:
        >>> spec = DataSpec([torch.zeros(8, 3)])
        >>> spec.get_num_samples_in_batch(torch.zeros(8, 3))
        8
    """

    dataloader: Iterable[Batch] = attrs.field()
    num_samples: int | None = None
    num_tokens: int | None = None
    batch_transforms: Callable[[Batch], Batch] | None = None
    microbatch_transforms: Callable[[Batch], Batch] | None = None
    split_batch: Callable[[Batch, int], Sequence[Batch]] = attrs.field(default=None, converter=_to_split)
    get_num_samples_in_batch: Callable[[Batch], int] = attrs.field(default=None, converter=_to_count_samples)
    _get_num_tokens_in_batch: TokenCount = attrs.field(default=None, converter=_to_count_tokens)

    @dataloader.validator
    def _check_dataloader(self, _: object, dataloader: object) -> None:
        # These can be iterated over, and yield samples or layers; with_format is a method of those of Hugging Face.
        kinds = (IterableDataset, Tensor, torch.nn.Module)
        is_dataset = isinstance(dataloader, kinds) or hasattr(dataloader, "with_format")
        if is_dataset or not hasattr(dataloader, "__iter__") or isinstance(dataloader, (str, bytes, type)):
            got = repr(dataloader) if isinstance(dataloader, (str, bytes, type)) else type(dataloader).__name__
            raise TypeError(
                f"dataloader must be an iterable of batches, got {got}. Wrap a dataset in a DataLoader: "
                "DataLoader(dataset, batch_size=32), with batch_size=None if the dataset yields batches. One of "
                "Hugging Face returns tensors after dataset.with_format('torch')."
            )

    def __attrs_post_init__(self) -> None:
        for name, least in (("num_samples", 1), ("num_tokens", 0)):
            if getattr(self, name) is not None:
                check_whole(name, getattr(self, name), least, "It is the number in an epoch, or None.")
        for name in ("batch_transforms", "microbatch_transforms", "split_batch"):
            _check_function(name, getattr(self, name))
        if self.split_batch is not split_batch:
            self.split_batch = functools.partial(_split_completely, self.split_batch, self.get_num_samples_in_batch)
        if self.num_samples is None:
            self.num_samples = length_of(getattr(self.dataloader, "dataset", None))

    @property
    def length(self) -> int | None:
        """Batches in an epoch; None if unknown."""
        return length_of(self.dataloader)

    def get_num_tokens_in_batch(self, batch: Batch, token_type: str = "total") -> int:  # noqa: S107
        """Return the number of tokens in a batch: all, or those of a type in the dictionary of the counting function.

        Raises:
            ValueError: The counting function returns no such type.
        """
        counts = self._get_num_tokens_in_batch(batch)
        if type(counts) is int and token_type == "total":  # noqa: S105  (nearly always)
            return counts
        if isinstance(counts, Mapping) and token_type in counts:
            return counts[token_type]
        raise ValueError(
            f"token_type={token_type!r} needs a DataSpec whose get_num_tokens_in_batch returns a dictionary with this "
            f"key, got {counts!r}."
        )

    def get_num_loss_tokens_in_batch(self, batch: Batch) -> int:
        """Return the number of ``"loss_generating"`` tokens; of all if the counting function makes no difference."""
        counts = self._get_num_tokens_in_batch(batch)
        return counts.get("loss_generating", counts["total"]) if isinstance(counts, Mapping) else counts


def has_own_functions(spec: DataSpec) -> bool:
    """Return whether functions of the user transform, split or count the batches of a loader.

    Example:
        >>> has_own_functions(DataSpec([])), has_own_functions(DataSpec([], batch_transforms=lambda batch: batch))
        (False, True)
    """
    usual = (split_batch, count_samples, count_tokens)
    own = (spec.split_batch, spec.get_num_samples_in_batch, spec._get_num_tokens_in_batch)  # noqa: SLF001
    return own != usual or (spec.batch_transforms, spec.microbatch_transforms) != (None, None)


def _split_completely(
    split: Callable[[Batch, int], Iterable[Batch]], count: Callable[[Batch], int], batch: Batch, microbatch_size: int
) -> list[Batch]:
    """Split a batch by the user's function, and check that its parts contain each sample once."""
    parts = split(batch, microbatch_size)
    if not isinstance(parts, Iterable) or isinstance(parts, (str, bytes, Tensor, Mapping)):
        raise TypeError(f"DataSpec's split_batch must return a list of microbatches, got {type(parts).__name__}.")
    parts = list(parts)
    num_samples, sizes = count(batch), [count(part) for part in parts]
    if sum(sizes) != num_samples:
        raise ValueError(
            f"DataSpec's split_batch must return each sample of a batch once, but of {num_samples} samples it returned "
            f"{len(parts)} microbatches with {sizes} samples for microbatch_size={microbatch_size}."
        )
    return parts


def length_of(sized: object) -> int | None:
    """Return the length of a loader or dataset; None if it has none.

    Example:
        >>> length_of([1, 2]), length_of(iter([1, 2])), length_of(None)
        (2, None, None)
    """
    # A DataLoader has __len__ and raises TypeError if its dataset has none; some datasets raise NotImplementedError.
    try:
        return len(sized) if isinstance(sized, Sized) else None
    except (TypeError, NotImplementedError):
        return None


def ensure_data_spec(dataloader: DataSpec | Iterable[Batch] | Mapping[str, Any]) -> DataSpec:
    """Return a :class:`DataSpec` from one, from a data loader, or from a dictionary of its arguments.

    Raises:
        TypeError: ``dataloader`` cannot be iterated over, or is a dictionary with other keys.
    """
    if isinstance(dataloader, DataSpec):
        return dataloader
    if not isinstance(dataloader, Mapping):
        return DataSpec(dataloader)
    arguments = list(inspect.signature(DataSpec).parameters)
    if "dataloader" not in dataloader or not dataloader.keys() <= set(arguments):
        raise TypeError(
            f"A dictionary as a dataloader must have the arguments of DataSpec ('dataloader' and perhaps "
            f"{', '.join(arguments[1:])}), got the keys {list(dataloader)}. To evaluate on several data sets, "
            "give a list of Evaluator(label='...', dataloader=...)."
        )
    return DataSpec(**dataloader)


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
            f"{type(batch).__name__} has {found}. Wrap the loader: DataSpec(loader, get_num_samples_in_batch=...)."
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
    values of all samples, as lists of tensors do. Values of the batch (numbers, strings, tensors without dimensions)
    are part of every part. The type of the batch is preserved.

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
    if not is_nested and is_list_of_items(part):
        return part[of]
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
