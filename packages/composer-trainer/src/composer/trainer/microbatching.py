"""Gradient accumulation: split a batch into microbatches, and sum their weighted losses."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

if TYPE_CHECKING:
    from composer.core import Batch, DataSpec, State

__all__ = ["LossSum", "scaled_losses", "split_microbatches", "total_of"]


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


def total_of(loss: Any) -> Tensor:
    """Return the loss to minimize: a tensor as it is; of several losses the one named ``"total"``, or else their sum.

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
    """Return a microbatch's losses times its weight, without graphs: ``total``, and each of several losses by name."""
    if isinstance(loss, Tensor):
        return {"total": loss.detach() if weight == 1 else loss.detach() * weight}
    if isinstance(loss, Mapping):
        parts = {"total": total_of(loss), **loss}
    else:
        parts = {"total": total_of(loss), **{f"loss{index}": one for index, one in enumerate(loss)}}
    return {name: one.detach() if weight == 1 else one.detach() * weight for name, one in parts.items()}


class LossSum:
    """The losses of a batch, summed over its microbatches.

    An optimizer may compute a batch several times in a step. The losses to log are those of the first time, as later
    ones are computed at trial weights.

    Args:
        state: Its ``total_loss`` is set; its ``microbatch`` is 0 where a sum begins.

    Attributes:
        total: The sum of the current computation, without its graph.
        logged: The losses to log, by name.
        times_computed: How often the batch has been computed, including the current computation.
    """

    total: Tensor

    def __init__(self, state: State) -> None:
        self._state, self.times_computed = state, 0
        self.logged: dict[str, Tensor] = {}
        self._parts: dict[str, Tensor] = {}

    def add(self, loss: Any, weight: float) -> None:
        """Add the loss of a microbatch."""
        is_unweighted = weight == 1 and isinstance(loss, Tensor)  # the usual case, without a further call
        parts = {"total": loss.detach()} if is_unweighted else scaled_losses(loss, weight)
        if self._state.microbatch > 0:
            parts = {name: self._parts[name] + part for name, part in parts.items()}
        self._parts, self.total = parts, parts["total"]
        if self.times_computed == 1:
            self.logged = parts
        self._state.total_loss = self.logged["total"]

    def scale(self, factor: float) -> None:
        """Multiply the losses of the current computation."""
        self._parts = {name: part * factor for name, part in self._parts.items()}
        self.total = self._parts["total"]
        if self.times_computed == 1:
            self.logged = self._parts
            self._state.total_loss = self.total
