"""Gradient accumulation: split a batch into weighted microbatches."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from composer.core import Batch, DataSpec

__all__ = ["split_microbatches"]


def split_microbatches(
    batch: Batch, spec: DataSpec, microbatch_size: int | None, count: Callable[[Batch], int] | None = None
) -> Sequence[tuple[Batch, float]]:
    """Return the microbatches, each with its weight: its fraction of the batch.

    The mean over the batch equals the sum of the microbatches' means times these weights, whatever their sizes. Samples
    are counted, or what ``count`` returns for a batch.

    Example:
        >>> import torch
        >>> from composer.core import DataSpec
        >>> spec = DataSpec([])
        >>> [(len(part), weight) for part, weight in split_microbatches(torch.zeros(5, 2), spec, 2)]
        [(2, 0.4), (2, 0.4), (1, 0.2)]
    """
    if microbatch_size is None:
        return ((batch, 1.0),)
    num_samples = spec.get_num_samples_in_batch(batch)
    if microbatch_size >= num_samples:
        return ((batch, 1.0),)
    parts = spec.split_batch(batch, microbatch_size)
    counts = list(map(count or spec.get_num_samples_in_batch, parts))
    total = sum(counts)
    if not total:
        raise ValueError(
            "accumulate_train_batch_on_tokens=True, but a batch has no token. Tokens are counted in "
            "batch['input_ids']; for other batches give DataSpec(loader, get_num_tokens_in_batch=...)."
        )
    return [(part, number / total) for part, number in zip(parts, counts, strict=True)]
