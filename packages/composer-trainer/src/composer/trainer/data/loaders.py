"""Problems of a loader to train or to evaluate on, as errors and warnings.

Each function checks for one problem and describes it, with what to change; none changes a loader. Those that compare
processes must be called by all of them. ``Batches`` and the evaluation call it.
"""

from __future__ import annotations

import logging
import warnings
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import DataLoader

from composer.distributed import all_agree, get_world_size
from composer.distributed.samplers import num_repeated_samples
from composer.functional.datasets import by_epoch
from composer.functional.nested import leaves

if TYPE_CHECKING:
    from collections.abc import Iterator

    from composer.core import Batch
    from composer.trainer.data.iterable_order import DataOrder

__all__ = ["batch_is_none", "warn_if_equal", "warn_of_any_order", "warn_of_repeats", "warn_of_workers", "watched"]

_log = logging.getLogger(__name__)

_MANY_BATCHES = 100_000
"""Batches after which an epoch of unknown length is reported, because it may never end."""

# The numbers of each tensor by which first batches are compared between processes.
_COMPARED = 1000


def batch_is_none(what: str, number: int) -> ValueError:
    """Return the error for a loader, or transforms, that returned None as a batch."""
    return ValueError(
        f"{what} returned None as batch {number} of the epoch (counted from 0). Every batch must hold data: does "
        "the loader's collate_fn or a transform end without a return, or does its list or iterator hold None?"
    )


def warn_of_repeats(loader: object, used: str = "trained on") -> None:
    """Warn if samples that a sampler repeats, so that all processes have equally many, cannot be left out."""
    repeated = num_repeated_samples(loader)
    if repeated:
        is_loader = isinstance(loader, DataLoader) and type(loader).__iter__ is DataLoader.__iter__
        described = type(loader.batch_sampler if is_loader else loader).__name__  # type: ignore[attr-defined]
        warnings.warn(
            f"{repeated} samples of each epoch are {used} twice, as the processes cannot share them out evenly and "
            f"the {described} chooses its batches itself, so that repeats cannot be left out. Give its sampler "
            "drop_last=True: composer.distributed.get_sampler(dataset, drop_last=True).",
            stacklevel=4,
        )


def warn_of_workers(loader: Any, order: DataOrder) -> None:
    """Warn if a loader has workers that the training does not reach."""
    if getattr(loader, "_iterator", None) is not None:  # torch's DataLoader keeps it if its workers are persistent
        warnings.warn(
            "train_dataloader has an active iterator, whose workers keep running beside those of the training. Do not "
            "iterate over it before, or create another one with persistent_workers=True for the training.",
            stacklevel=4,
        )
    is_own = order.loader is loader and getattr(loader, "persistent_workers", False)
    if is_own and by_epoch(loader.dataset):
        warnings.warn(
            f"set_epoch() of the data set does not reach the workers of this {type(loader).__name__}, which keep their "
            "copies for all epochs, so that each epoch has the same order. Give it persistent_workers=False.",
            stacklevel=4,
        )


def warn_of_any_order(loader: Any) -> None:
    """Warn, within an epoch, if a loader returns batches in another order than that of its sampler."""
    if not getattr(loader, "in_order", True) and loader.num_workers > 1:
        warnings.warn(
            "train_dataloader has in_order=False: the workers' batches came in another order before the run stopped, "
            "so some samples of this epoch may come twice and others not at all. in_order=True resumes exactly.",
            stacklevel=3,
        )


def warn_if_equal(batch: Batch | None) -> None:
    """Warn if all processes have the same first batch, by the first numbers of each tensor; None if one has none."""
    tensors = [value for value in leaves(batch) if isinstance(value, torch.Tensor)]
    dense = [one for one in tensors if one.layout is torch.strided and not one.is_nested]
    beginnings = [(tuple(one.shape), one.reshape(-1)[:_COMPARED].tolist()) for one in dense]
    if all_agree(beginnings) and beginnings:
        warnings.warn(
            f"train_dataloader returned the same first batch in all {get_world_size()} processes, so that each "
            "trains on every sample. Split the data by rank: an IterableDataset may yield itertools.islice(samples, "
            "composer.distributed.get_data_rank(), None, composer.distributed.get_data_world_size()).",
            stacklevel=3,
        )


def watched(batches: Iterator[Batch]) -> Iterator[Batch]:
    """Yield the batches of a loader without a length, and log a warning if there are very many."""
    for number, batch in enumerate(batches, start=1):
        if number == _MANY_BATCHES:
            _log.warning(
                "train_dataloader has no length and has returned %d batches in one epoch. If it is endless, the epoch "
                "never ends, and evaluations and checkpoints at its end never run: give train_subset_num_batches.",
                number,
            )
        yield batch
