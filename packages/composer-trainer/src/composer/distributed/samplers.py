"""Each process its own part of the data, and each sample once."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence, Sized
from typing import TYPE_CHECKING, Any

from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from composer.distributed.collectives import all_gather_object
from composer.distributed.environment import get_global_rank, get_world_size

if TYPE_CHECKING:
    from composer.core import Batch, DataSpec

__all__ = [
    "check_lengths",
    "check_sampler",
    "get_sampler",
    "num_real_samples",
    "num_real_samples_in_loader",
    "real_parts",
    "set_epoch",
]

_THE_SAME_EVERYWHERE = {SequentialSampler, RandomSampler, SubsetRandomSampler, WeightedRandomSampler}
"""What the trainer lets draw by the run's seed and the epoch alone."""


def get_sampler(
    dataset: Dataset[Any],
    *,
    drop_last: bool = False,
    shuffle: bool = False,
    num_replicas: int | None = None,
    rank: int | None = None,
    seed: int = 0,
) -> DistributedSampler[Any]:
    """Return a sampler that gives this process its part of a dataset: ``DataLoader(dataset, sampler=…)``.

    Args:
        dataset: With a length.
        drop_last: Whether samples that cannot be dealt out evenly are left out; else the first ones are dealt twice, so
            that every process has equally many. The Trainer leaves the repeats out again, in training and evaluation.
        shuffle: Whether the order differs between epochs, see :func:`set_epoch`.
        num_replicas: Into how many parts; the number of processes if None.
        rank: Which part; that of this process if None.
        seed: Seed of the shuffled order, the same in every process. The Trainer combines it with the run's seed.

    Raises:
        TypeError: The dataset has no length.
        ValueError: There is no such part.

    Example:
        >>> list(get_sampler(range(5), num_replicas=2, rank=1))
        [1, 3, 0]
    """
    if isinstance(dataset, IterableDataset) or not isinstance(dataset, Sized):
        raise TypeError(
            f"dataset must have a length to be dealt out to processes, got {type(dataset).__name__}. "
            "A dataset that is iterated over gives each process its own part by itself: "
            "see composer.distributed.get_global_rank."
        )
    return DistributedSampler(
        dataset,
        num_replicas=get_world_size() if num_replicas is None else num_replicas,
        rank=get_global_rank() if rank is None else rank,
        shuffle=shuffle,
        seed=seed,
        drop_last=drop_last,
    )


def set_epoch(loader: object, epoch: int) -> None:
    """Tell a loader's sampler which epoch begins, if it wants to know: the order of shuffled samples depends on it.

    Example:
        >>> sampler = get_sampler(range(3), shuffle=True, num_replicas=1, rank=0)
        >>> set_epoch(DataLoader(range(3), sampler=sampler), 4)
        >>> sampler.epoch
        4
    """
    for sampler in _samplers(loader):
        tell = getattr(sampler, "set_epoch", None)
        if callable(tell):
            tell(epoch)


def check_sampler(loader: object, name: str = "train_dataloader") -> None:
    """Refuse a loader that gives every process the same samples, where there are several processes.

    Only what is known to do so is refused: a ``DataLoader`` with torch's own plain sampler, or with one that was made
    for another number of processes.

    Args:
        loader: Whatever gives batches.
        name: What to call it in the error.

    Raises:
        ValueError: It gives every process the same samples, or samples of the wrong part.

    Example:
        >>> check_sampler(DataLoader(range(3)))
    """
    world_size = get_world_size()
    if world_size == 1:
        return
    for sampler in _samplers(loader):
        if type(sampler) in _THE_SAME_EVERYWHERE:
            raise ValueError(
                f"{name} would give each of the {world_size} processes the same samples, as its sampler is a "
                f"{type(sampler).__name__}. Deal them out: DataLoader(dataset, batch_size=..., "
                f"sampler=composer.distributed.get_sampler(dataset, shuffle=...))."
            )
        if isinstance(sampler, DistributedSampler):
            made_for, own = (sampler.num_replicas, sampler.rank), (world_size, get_global_rank())
            if made_for != own:
                raise ValueError(
                    f"{name}'s sampler must be that of process {own[1]} of {own[0]}, and is that of "
                    f"{made_for[1]} of {made_for[0]}. composer.distributed.get_sampler(dataset) chooses by itself."
                )


def is_split_by_rank(loader: object) -> bool:
    """Return whether a loader's sampler is known to give each process samples of its own.

    Example:
        >>> dataset = range(4)
        >>> is_split_by_rank(DataLoader(dataset, sampler=get_sampler(dataset))), is_split_by_rank(DataLoader(dataset))
        (True, False)
    """
    return any(isinstance(sampler, DistributedSampler) for sampler in _samplers(loader))


def check_lengths(length: int | None, name: str = "train_dataloader") -> None:
    """Refuse loaders of different lengths: a process with more batches would wait for the others forever.

    All processes have to call it.

    Args:
        length: This process's batches in an epoch; None where that is not known, which is not checked.
        name: What to call the loader in the error.

    Raises:
        ValueError: The processes have different lengths.

    Example:
        >>> check_lengths(10)
    """
    lengths = all_gather_object(length)
    if len(set(lengths)) > 1:
        raise ValueError(
            f"{name} must have equally many batches in every process, got {lengths} by rank. "
            "composer.distributed.get_sampler(dataset) deals samples out evenly."
        )


def num_real_samples(dataset_len: int, world_size: int, rank: int, start: int = 0, count: int | None = None) -> int:
    """Return how many samples of a stretch of a process's part are counted by no other process.

    A part is padded to ``ceil(dataset_len / world_size)`` samples; what is repeated comes last. Sample ``i`` of the
    part is sample ``rank + i * world_size`` of the dataset, in its order for the epoch.

    Args:
        dataset_len: Samples in the dataset.
        world_size: Processes.
        rank: Which one.
        start: Where the stretch begins in the part: the samples of the batches before.
        count: How long it is: the samples of the batch. To the end of the part if None.

    Raises:
        ValueError: A number is out of range.

    Example:
        Five samples for two processes, which take two at a time; sample 0 is dealt twice.

        >>> [[num_real_samples(5, 2, rank, start, 2) for start in (0, 2)] for rank in (0, 1)]
        [[2, 1], [2, 0]]
    """
    if dataset_len < 0 or start < 0 or (count is not None and count < 0) or not 0 <= rank < world_size:
        raise ValueError(
            "dataset_len, start and count must be at least 0 and rank in [0, world_size), got "
            f"{dataset_len=}, {start=}, {count=}, {rank=}, {world_size=}."
        )
    own = max(0, -(-(dataset_len - rank) // world_size))
    left = max(0, own - start)
    return left if count is None else min(count, left)


def num_real_samples_in_loader(loader: object) -> int | None:
    """Return how many samples of a loader's part are counted by no other process; None if all are.

    Example:
        >>> sampler = get_sampler(range(5), num_replicas=2, rank=1)
        >>> num_real_samples_in_loader(DataLoader(range(5), sampler=sampler)), len(sampler)
        (2, 3)
    """
    for sampler in _samplers(loader):
        if isinstance(sampler, DistributedSampler) and not sampler.drop_last:
            dataset = sampler.dataset
            return num_real_samples(len(dataset), sampler.num_replicas, sampler.rank)  # type: ignore[arg-type]
    return None


def real_indices(batches: Iterable[list[Any]], num_real: int) -> Iterator[list[Any]]:
    """Yield a process's batches of indices, with only the first ``num_real`` indices; the others are repeats.

    A batch that holds only repeats is yielded unchanged: every process has equally many batches, and this one must be
    trained on with weight 0.

    Example:
        >>> list(real_indices([[0, 2, 4], [6, 1]], 4))
        [[0, 2, 4], [6]]
        >>> list(real_indices([[0, 2, 4], [1]], 3))
        [[0, 2, 4], [1]]
    """
    for batch in batches:
        real = batch[:num_real]
        num_real -= len(real)
        yield real or batch


def real_parts(parts: Iterable[Batch], num_real: int | None, spec: DataSpec) -> Iterator[tuple[Batch, bool]]:
    """Yield a batch's microbatches without the samples that another process counts, each with whether it counts at all.

    One in which no sample is left is yielded as it is, and is not to be counted: where the model is sharded, each
    process has to put as many microbatches through it as the others.

    Args:
        parts: The microbatches.
        num_real: How many of their samples count, the first ones; None is all.
        spec: How to count and split samples.

    Example:
        >>> import torch
        >>> from composer.core import DataSpec
        >>> batch = torch.arange(5)
        >>> list(real_parts(batch.split(2), 3, DataSpec([])))
        [(tensor([0, 1]), True), (tensor([2]), True), (tensor([4]), False)]
    """
    if num_real is None:
        yield from ((part, True) for part in parts)
        return
    for part in parts:
        held = spec.get_num_samples_in_batch(part)
        kept = min(held, num_real)
        num_real -= kept
        yield (part if kept in {0, held} else spec.split_batch(part, kept)[0]), kept > 0


def num_repeated_samples(loader: object) -> int:
    """Return how many samples a loader's sampler gives to two processes, so that all get equally many.

    Example:
        >>> dataset = range(22)
        >>> num_repeated_samples(DataLoader(dataset, sampler=get_sampler(dataset, num_replicas=4, rank=0)))
        2
    """
    for sampler in _samplers(loader):
        if isinstance(sampler, DistributedSampler) and is_plain_distributed(sampler):
            return max(0, sampler.total_size - len(sampler.dataset))  # type: ignore[arg-type]
    return 0


def is_plain_distributed(sampler: object) -> bool:
    """Return whether a sampler orders and repeats samples as torch's ``DistributedSampler`` does.

    Example:
        >>> is_plain_distributed(get_sampler(range(3)))
        True
    """
    return isinstance(sampler, DistributedSampler) and type(sampler).__iter__ is DistributedSampler.__iter__


def _samplers(loader: object) -> Sequence[object]:
    """Return what decides on the order of a loader's samples; nothing where that cannot be seen."""
    if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
        return ()
    batches = loader.batch_sampler
    if batches is None:
        return (loader.sampler,)
    # Beside a batch sampler of the user's own, a DataLoader has a sampler that it does not use.
    return (batches.sampler,) if type(batches) is BatchSampler else (batches,)
