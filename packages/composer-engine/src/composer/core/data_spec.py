"""What a run has to know about its data: how to count, split and prepare a batch."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import attrs
import torch
from torch import Tensor

from composer.core.batch import Batch

__all__ = ["DataSpec", "count_samples", "count_tokens", "ensure_data_spec", "move_batch", "split_batch"]


@attrs.define(eq=False)
class DataSpec:
    """A data loader with what is known about its batches.

    Args:
        dataloader: Any iterable of batches.
        num_samples: Samples in an epoch; asked of the loader's dataset if None.
        num_tokens: Tokens in an epoch.
        batch_transforms: ``f(batch) -> batch``, after the batch was moved to the device.
        microbatch_transforms: ``f(batch) -> batch`` for each microbatch.
        split_batch: ``f(batch, microbatch_size) -> microbatches``; :func:`split_batch` if None.
        get_num_samples_in_batch: ``f(batch) -> int``; :func:`count_samples` if None.
        get_num_tokens_in_batch: ``f(batch) -> int``; :func:`count_tokens` if None.

    Raises:
        TypeError: ``dataloader`` cannot be iterated over.

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
    split_batch: Callable[[Batch, int], Sequence[Batch]] = attrs.field(
        default=None, converter=lambda given: given or split_batch
    )
    get_num_samples_in_batch: Callable[[Batch], int] = attrs.field(
        default=None, converter=lambda given: given or count_samples
    )
    _get_num_tokens_in_batch: Callable[[Batch], int] = attrs.field(
        default=None, converter=lambda given: given or count_tokens
    )

    @dataloader.validator
    def _check_dataloader(self, _: object, dataloader: object) -> None:
        if not hasattr(dataloader, "__iter__"):
            raise TypeError(f"dataloader must be an iterable of batches, got {type(dataloader).__name__}.")

    @property
    def length(self) -> int | None:
        """Batches in an epoch; None where the loader does not know."""
        try:
            return len(self.dataloader)  # type: ignore[arg-type]
        except (TypeError, NotImplementedError):
            return None

    def get_num_tokens_in_batch(self, batch: Batch, token_type: str = "total") -> int:  # noqa: S107
        """Return the tokens in a batch; ``token_type`` other than ``"total"`` needs a function of one's own that takes it."""
        if token_type == "total":  # noqa: S105
            return self._get_num_tokens_in_batch(batch)
        return self._get_num_tokens_in_batch(batch, token_type=token_type)  # type: ignore[call-arg]


def ensure_data_spec(dataloader: DataSpec | Iterable[Batch] | Mapping[str, Any]) -> DataSpec:
    """Return a :class:`DataSpec` from one, from a data loader, or from a dictionary of its arguments."""
    if isinstance(dataloader, DataSpec):
        return dataloader
    return DataSpec(**dataloader) if isinstance(dataloader, Mapping) else DataSpec(dataloader)


def count_samples(batch: Batch) -> int:
    """Return the length of the first dimension of a batch's tensors (or of its lists of anything else).

    Raises:
        ValueError: The batch's parts have different lengths, or there is nothing to count.

    Example:
        >>> count_samples((torch.zeros(8, 3), torch.zeros(8)))
        8
    """
    sizes = set(_sizes(batch))
    if len(sizes) != 1:
        found = f"lengths {sorted(sizes)}" if sizes else "no tensor and no list"
        raise ValueError(
            f"The number of samples in a batch must be the first dimension of all its tensors; this "
            f"{type(batch).__name__} has {found}. Wrap the loader: DataSpec(loader, get_num_samples_in_batch=...)."
        )
    return sizes.pop()


def _sizes(batch: Batch) -> Iterator[int]:
    if isinstance(batch, Tensor):
        if batch.ndim:
            yield batch.shape[0]
    elif isinstance(batch, Mapping):
        for part in batch.values():
            yield from _sizes(part)
    elif isinstance(batch, (list, tuple)):
        parts = [size for part in batch for size in _sizes(part)]
        yield from parts or [len(batch)]


def count_tokens(batch: Batch) -> int:
    """Return the number of ids in ``batch["input_ids"]``, padding included; 0 for batches without.

    Example:
        >>> count_tokens({"input_ids": torch.zeros(4, 16)}), count_tokens(torch.zeros(4))
        (64, 0)
    """
    if not isinstance(batch, Mapping):
        return 0
    ids = batch.get("input_ids")
    return ids.numel() if isinstance(ids, Tensor) else 0


def split_batch(batch: Batch, microbatch_size: int) -> list[Batch]:
    """Split a batch into parts of ``microbatch_size`` samples, of which the last may be smaller.

    Tensors are split along their first dimension, lists of anything else by their items; what belongs to the batch as a
    whole (numbers, text, tensors without dimensions) goes into every part. The batch's own type is kept.

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


def _slice(part: Any, of: slice, num_samples: int) -> Any:
    if isinstance(part, Tensor):
        return part[of] if part.ndim else part
    if isinstance(part, Mapping):
        return _rebuilt_mapping(part, lambda item: _slice(item, of, num_samples))
    if isinstance(part, (list, tuple)):
        if not any(True for item in part for _ in _sizes(item)) and len(part) == num_samples:
            return part[of]
        return _rebuilt_sequence(part, [_slice(item, of, num_samples) for item in part])
    return part


def move_batch(batch: Batch, device: torch.device) -> Batch:
    """Return the batch with every tensor in it, and everything else that has ``.to``, on ``device``."""
    if isinstance(batch, Tensor):
        return batch.to(device, non_blocking=True)
    if isinstance(batch, Mapping):
        return _rebuilt_mapping(batch, lambda item: move_batch(item, device))
    if isinstance(batch, (list, tuple)):
        return _rebuilt_sequence(batch, [move_batch(item, device) for item in batch])
    return batch.to(device) if hasattr(batch, "to") else batch


def _rebuilt_mapping(batch: Mapping[Any, Any], change: Callable[[Any], Any]) -> Any:
    rebuilt: Any = copy.copy(batch)
    for key, item in batch.items():
        rebuilt[key] = change(item)
    return rebuilt


def _rebuilt_sequence(batch: Sequence[Any], items: list[Any]) -> Any:
    return type(batch)(*items) if hasattr(batch, "_fields") else type(batch)(items)  # type: ignore[call-arg]
