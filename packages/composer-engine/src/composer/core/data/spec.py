"""Data loaders with functions that count, split and transform their batches."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence, Sized
from typing import Any, TypeAlias

import attrs
from torch import Tensor, nn
from torch.utils.data import IterableDataset

from composer.core.checks import NamesArguments
from composer.core.data.batches import Batch, count_samples, count_tokens, split_batch
from composer.functional.checks import check_whole

TokenCount: TypeAlias = Callable[[Any], int | Mapping[str, int]]


def _check_function(name: str, function: object) -> None:
    if function is not None and not callable(function):
        raise TypeError(f"{name} must be None or a function of a batch, got {function!r}.")


# Converters, as their defaults are defined below; the fields have the names of those functions.
def _to_split(given: Callable[[Batch, int], Sequence[Batch]] | None) -> Callable[[Batch, int], Sequence[Batch]]:
    return given or split_batch


def _to_count_samples(given: Callable[[Batch], int] | None) -> Callable[[Batch], int]:
    if given is None or given is count_samples:
        return count_samples
    _check_function("get_num_samples_in_batch", given)
    return lambda *arguments, **options: int(given(*arguments, **options))  # also of a tensor


def _to_count_tokens(given: TokenCount | None) -> TokenCount:
    if given is None or given is count_tokens:
        return count_tokens
    name = "get_num_tokens_in_batch"
    _check_function(name, given)

    def counted(batch: Batch) -> int | dict[str, int]:
        found = given(batch)
        if not isinstance(found, Mapping):
            return int(found)
        if "total" not in found:
            raise ValueError(f"DataSpec's {name} must return a dictionary with the key 'total', got {dict(found)!r}.")
        return {kind: int(number) for kind, number in found.items()}

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

    The parts of a batch are checked: they must contain each of its samples once.

    Example:
        >>> import torch
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
        kinds = (IterableDataset, Tensor, nn.Module)
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
    # A DataLoader has __len__ and raises TypeError if its dataset has none; some raise other errors.
    try:
        return len(sized) if isinstance(sized, Sized) else None
    except (TypeError, NotImplementedError, ValueError):
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
