"""Gradient accumulation: a batch in parts, and losses weighed so that the split makes no difference."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

if TYPE_CHECKING:
    from composer.core import Batch, DataSpec

__all__ = ["scaled_losses", "split_microbatches", "total_of"]


def split_microbatches(
    batch: Batch, spec: DataSpec, microbatch_size: int | None, count: Callable[[Batch], int] | None = None
) -> Sequence[tuple[Batch, float]]:
    """Return the microbatches, each with its weight: its fraction of the batch.

    A mean over the batch is the sum of the microbatches' means times these shares, whatever their sizes. What is shared
    are samples, or what ``count`` counts in a batch.

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
    whole = sum(counts)
    if not whole:
        raise ValueError(
            "accumulate_train_batch_on_tokens=True, but a batch has no token. Tokens are counted in "
            "batch['input_ids']; for other batches give DataSpec(loader, get_num_tokens_in_batch=...)."
        )
    return [(part, number / whole) for part, number in zip(parts, counts, strict=True)]


def total_of(loss: Any) -> Tensor:
    """Return what is minimised: a loss as it is; of several the one named ``"total"``, or else their sum.

    Raises:
        TypeError: ``loss`` is neither a tensor nor a dictionary or sequence of tensors.
    """
    if isinstance(loss, Tensor):
        return loss
    several = list(loss.values()) if isinstance(loss, Mapping) else loss
    if not isinstance(several, (list, tuple)) or not several or not all(isinstance(one, Tensor) for one in several):
        raise TypeError(f"The model's loss must be a tensor, or a dictionary or sequence of tensors, got {loss!r}.")
    total: Tensor = loss["total"] if isinstance(loss, Mapping) and "total" in loss else sum(several[1:], several[0])
    return total


def scaled_losses(loss: Any, weight: float) -> dict[str, Tensor]:
    """Return what to log of a microbatch's loss: ``total``, and each part where the model has several."""
    if isinstance(loss, Tensor):
        return {"total": loss.detach() if weight == 1 else loss.detach() * weight}
    if isinstance(loss, Mapping):
        parts = {"total": total_of(loss), **loss}
    else:
        parts = {"total": total_of(loss), **{f"loss{index}": one for index, one in enumerate(loss)}}
    return {name: one.detach() if weight == 1 else one.detach() * weight for name, one in parts.items()}
