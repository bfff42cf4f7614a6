"""Split the data over processes, and count each sample once.

Each process sees only its own data, so that three faults would give no error:

- Several processes get the same samples. :func:`check_sampler` raises an error where this is certain;
  :func:`split_data` splits loaders without a sampler of the user.
- A process has more batches than the others, and waits for them forever. In the Trainer, :func:`in_step` gives
  processes without further batches copies, which do not count; other loops call :func:`check_lengths`.
- A sampler repeats samples, so that all processes have the same number, and these count twice. :func:`real_indices`
  leaves them out of the Trainer's batches, and :func:`real_parts` of those of other loops.
"""

from __future__ import annotations

import copy
import itertools
import logging
from collections.abc import Iterable, Iterator, Sequence, Sized
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
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

from composer.core.saving.randomness import derive_seed
from composer.distributed.collectives import (
    all_gather_object,
    any_rank,
    broadcast_object_list,
    from_rank_zero,
)
from composer.distributed.environment import (
    get_data_rank,
    get_data_world_size,
    get_global_rank,
    get_tensor_parallel_size,
    get_world_size,
)
from composer.functional.datasets import by_epoch

if TYPE_CHECKING:
    from composer.core import Batch, DataSpec

_log = logging.getLogger(__name__)

ORDERED_BY_SEED = {SequentialSampler, RandomSampler, SubsetRandomSampler, WeightedRandomSampler}
"""Samplers whose order the trainer makes depend only on seed and epoch, so that all processes get the same samples."""

_REMEDIES: dict[type, str] = {
    SubsetRandomSampler: "get_sampler(dataset, shuffle=True)), with dataset=Subset(dataset, indices",
    WeightedRandomSampler: "DistributedWeightedSampler(weights, num_samples)",
}
"""What replaces a sampler of torch in several processes."""

NO_BATCH: Any = object()
"""Stands for the batch after the last one."""


def get_sampler(
    dataset: Dataset[Any],
    *,
    drop_last: bool = False,
    shuffle: bool = False,
    num_replicas: int | None = None,
    rank: int | None = None,
    seed: int = 0,
) -> DistributedSampler[Any]:
    """Return a sampler of this process's part of a dataset: ``DataLoader(dataset, sampler=…)``.

    Args:
        dataset: A dataset with a length.
        drop_last: Whether to drop the samples that cannot be split evenly; otherwise the first samples are repeated, so
            that every process has the same number. The Trainer ignores the repeats, in training and evaluation.
        shuffle: Whether to shuffle, with another order in each epoch; see :func:`set_epoch`.
        num_replicas: Number of parts; :func:`~composer.distributed.get_data_world_size` if None.
        rank: Index of the part; :func:`~composer.distributed.get_data_rank` if None.
        seed: Seed of the shuffled order, equal in all processes. The Trainer combines it with the run's seed.

    Raises:
        TypeError: The dataset has no length.
        ValueError: The part does not exist.

    Example:
        >>> list(get_sampler(range(5), num_replicas=2, rank=1))
        [1, 3, 0]
    """
    if isinstance(dataset, IterableDataset) or not isinstance(dataset, Sized):
        raise TypeError(
            f"dataset must have a length to be split over processes, got {type(dataset).__name__}. An iterable dataset "
            "must select the part of each process itself: see composer.distributed.get_data_rank."
        )
    return DistributedSampler(
        dataset,
        num_replicas=get_data_world_size() if num_replicas is None else num_replicas,
        rank=get_data_rank() if rank is None else rank,
        shuffle=shuffle,
        seed=seed,
        drop_last=drop_last,
    )


class DistributedWeightedSampler(DistributedSampler[Any]):
    """Draws samples with given weights, and gives each process its part: a distributed ``WeightedRandomSampler``.

    All processes draw one order, which in the Trainer depends on its seed, ``seed`` and the epoch. A run that resumes
    within an epoch continues exactly, in another number of processes with the draws that are left.

    Args:
        weights: The weight of each sample of the data set; they need not add up to 1.
        num_samples: The number of draws in an epoch of all processes; one for each weight if None.
        replacement: Whether a sample may be drawn several times in an epoch.
        drop_last: Whether to drop the draws that cannot be split evenly; see :func:`get_sampler`.
        num_replicas: Number of parts; :func:`~composer.distributed.get_data_world_size` if None.
        rank: Index of the part; :func:`~composer.distributed.get_data_rank` if None.
        seed: Seed of the draws, equal in all processes.

    Raises:
        ValueError: There are fewer weights than draws without replacement, or the part does not exist.

    Example:
        >>> parts = [DistributedWeightedSampler([0, 1, 1], 4, num_replicas=2, rank=rank) for rank in range(2)]
        >>> [len(part) for part in parts], {*parts[0], *parts[1]} <= {1, 2}
        ([2, 2], True)
    """

    def __init__(
        self,
        weights: Sequence[float],
        num_samples: int | None = None,
        *,
        replacement: bool = True,
        drop_last: bool = False,
        num_replicas: int | None = None,
        rank: int | None = None,
        seed: int = 0,
    ) -> None:
        self.weighted = WeightedRandomSampler(
            weights, len(weights) if num_samples is None else num_samples, replacement
        )
        draws: Any = range(len(self.weighted))  # the order that is split: of draws, not of samples
        super().__init__(
            draws,
            num_replicas=get_data_world_size() if num_replicas is None else num_replicas,
            rank=get_data_rank() if rank is None else rank,
            seed=seed,
            drop_last=drop_last,
        )

    def __iter__(self) -> Iterator[int]:
        """Return this process's part of the epoch's draws; the first ones are repeated if the last ones are too few."""
        drawing = copy.copy(self.weighted)
        drawing.generator = torch.Generator().manual_seed(derive_seed(self.seed, self.epoch))
        return itertools.islice(itertools.cycle([*drawing]), self.rank, self.total_size, self.num_replicas)


def set_epoch(loader: object, epoch: int) -> None:
    """Call ``set_epoch`` of a loader, its data set and its samplers, of those that have this method.

    Samplers use it to shuffle in the order of that epoch. A data set without the method, such as a ``Subset`` or
    ``ConcatDataset`` of torch, is replaced by those that it consists of. Worker processes that exist already are not
    reached.

    Example:
        >>> sampler = get_sampler(range(3), shuffle=True, num_replicas=1, rank=0)
        >>> set_epoch(DataLoader(range(3), sampler=sampler), 4)
        >>> sampler.epoch
        4
    """
    outermost = [loader, *by_epoch(getattr(loader, "dataset", None)), getattr(loader, "batch_sampler", None)]
    reached = {id(part): part for outer in outermost for part in with_samplers(outer)}
    for part in reached.values():
        setter = getattr(part, "set_epoch", None)
        if callable(setter):
            setter(epoch)


def with_samplers(part: object, depth: int = 64) -> list[object]:
    """Return a part of a loader, its sampler, the sampler in that one and so on; those of a proxy never end.

    Example:
        >>> parts = with_samplers(BatchSampler(SequentialSampler(range(3)), batch_size=2, drop_last=False))
        >>> [type(part).__name__ for part in parts]
        ['BatchSampler', 'SequentialSampler']
    """
    return [part, *with_samplers(getattr(part, "sampler", None), depth - 1)] if part is not None and depth else []


def check_sampler(loader: object, name: str = "train_dataloader") -> None:
    """Raise an error for a loader that returns the same samples in several processes.

    With tensor parallelism, a sampler that splits the data over all processes is changed to split it over the groups of
    processes that train on different samples.

    Only known cases raise an error: a ``DataLoader`` with a non-distributed torch sampler, or with a sampler for
    another number of processes.

    Args:
        loader: An iterable of batches.
        name: Its name in the error.

    Raises:
        ValueError: It returns the same samples in every process, or the samples of another part.

    Example:
        >>> check_sampler(DataLoader(range(3)))
    """
    world_size = get_data_world_size()
    for sampler in _samplers(loader):
        if type(sampler) in ORDERED_BY_SEED and world_size > 1:
            raise ValueError(
                f"{name} would give each of the {world_size} processes the same samples, as its sampler is a "
                f"{type(sampler).__name__}. Split them: DataLoader(dataset, batch_size=..., "
                f"sampler=composer.distributed.{_REMEDIES.get(type(sampler), 'get_sampler(dataset, shuffle=...)')})."
            )
        if isinstance(sampler, DistributedSampler) and get_world_size() > 1:
            _split_over_data(sampler)
            configured, own = (sampler.num_replicas, sampler.rank), (world_size, get_data_rank())
            if configured != own:
                raise ValueError(
                    f"{name}'s sampler must be for process {own[1]} of {own[0]}, got one for process "
                    f"{configured[1]} of {configured[0]}. composer.distributed.get_sampler(dataset) sets both."
                )


def split_data(spec: DataSpec, name: str = "train_dataloader") -> DataSpec:
    """Return data of which each of several processes gets its own samples; all must call it.

    A ``DataLoader`` of a map-style data set without a sampler of the user is replaced by a copy with that of
    :func:`get_sampler`, which is logged. All other loaders are checked by :func:`check_sampler`.

    Args:
        spec: The data; it does not change.
        name: The name of its loader in messages.

    Raises:
        ValueError: Processes would get the same samples.

    Example:
        >>> from composer.core import DataSpec
        >>> spec = DataSpec(DataLoader(range(4), shuffle=True))
        >>> split_data(spec) is spec  # there is one process
        True
    """
    if get_data_world_size() > 1 and _has_no_own_sampler(spec.dataloader):
        loader, spec = copy.copy(spec.dataloader), copy.copy(spec)
        spec.dataloader = loader
        own: Any = loader.sampler
        batches: Any = loader.batch_sampler
        generator = getattr(own, "generator", None)
        seed = 0 if generator is None else from_rank_zero(generator.initial_seed())
        sampler = get_sampler(loader.dataset, shuffle=isinstance(own, RandomSampler), seed=seed)
        # In __dict__, because DataLoader.__setattr__ rejects another sampler.
        loader.__dict__ |= {"sampler": sampler, "split_over": sampler.num_replicas}
        if batches is not None:
            loader.__dict__["batch_sampler"] = BatchSampler(sampler, batches.batch_size, batches.drop_last)
        if get_global_rank() == 0:
            _log.warning(
                "%s has no sampler and is split over the %d processes, as by sampler=composer.distributed.get_sampler("
                "dataset, shuffle=%s). Its batch size, %s, is that of one process.",
                name,
                sampler.num_replicas,
                sampler.shuffle,
                loader.batch_size,
            )
    check_sampler(spec.dataloader, name)
    return spec


def _has_no_own_sampler(loader: Any) -> TypeGuard[DataLoader[Any]]:
    """Return whether torch's loader iterates over a map-style data set once, in its order or shuffled."""
    if not isinstance(loader, DataLoader) or type(loader).__iter__ is not DataLoader.__iter__:
        return False
    sampler: Any = loader.sampler
    if _samplers(loader) != (sampler,) or type(sampler) not in (SequentialSampler, RandomSampler):
        return False
    draws_again = getattr(sampler, "replacement", False) or len(sampler) != len(loader.dataset)  # type: ignore[arg-type]
    return sampler.data_source is loader.dataset and not draws_again


def _split_over_data(sampler: DistributedSampler[Any]) -> None:
    """Let a sampler for all processes, constructed before the mesh was known, split the data over its groups."""
    is_for_all = (sampler.num_replicas, sampler.rank) == (get_world_size(), get_global_rank())
    if get_tensor_parallel_size() > 1 and is_for_all:
        other: DistributedSampler[Any] = DistributedSampler(
            sampler.dataset, get_data_world_size(), get_data_rank(), drop_last=sampler.drop_last
        )
        for name in ("num_replicas", "rank", "num_samples", "total_size"):
            setattr(sampler, name, getattr(other, name))


def is_split_by_rank(loader: object) -> bool:
    """Return whether a loader's sampler is known to give each process its own samples.

    Example:
        >>> dataset = range(4)
        >>> is_split_by_rank(DataLoader(dataset, sampler=get_sampler(dataset))), is_split_by_rank(DataLoader(dataset))
        (True, False)
    """
    return any(isinstance(sampler, DistributedSampler) for sampler in _samplers(loader))


def check_lengths(length: int | None, name: str = "train_dataloader") -> None:
    """Raise an error for loaders of different lengths: a process with more batches would wait for the others forever.

    All processes must call it.

    Args:
        length: Number of batches per epoch in this process; None if unknown, which is not checked.
        name: The name of the loader in the error.

    Raises:
        ValueError: The processes have different lengths.

    Example:
        >>> check_lengths(10)
    """
    lengths = all_gather_object(length)
    if len(set(lengths)) > 1:
        raise unequal_lengths(lengths, name)


def unequal_lengths(lengths: Sequence[int | None], name: str = "train_dataloader") -> ValueError:
    """Return the error for loaders with different numbers of batches."""
    return ValueError(
        f"{name} must have the same number of batches in every process, got {lengths} by rank. "
        "composer.distributed.get_sampler(dataset) splits samples evenly."
    )


def num_real_samples(dataset_len: int, world_size: int, rank: int) -> int:
    """Return how many samples of a process's part are not repeats.

    A part is padded to ``ceil(dataset_len / world_size)`` samples; repeated samples are last. Sample ``i`` of the part
    is sample ``rank + i * world_size`` of the dataset, in its order for the epoch.

    Args:
        dataset_len: Samples in the dataset.
        world_size: Number of processes.
        rank: Rank of the process.

    Raises:
        ValueError: A number is out of range.

    Example:
        Five samples for two processes: the second one gets sample 0 again.

        >>> [num_real_samples(5, 2, rank) for rank in (0, 1)]
        [3, 2]
    """
    if dataset_len < 0 or not 0 <= rank < world_size:
        raise ValueError(
            f"dataset_len must be at least 0 and rank in [0, world_size), got {dataset_len=}, {rank=}, {world_size=}."
        )
    # How many of rank, rank + world_size, … are below dataset_len.
    return max(0, -(-(dataset_len - rank) // world_size))


def num_real_samples_in_loader(loader: object) -> int | None:
    """Return how many samples of a loader's part are not repeats; None if none is repeated.

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

    A batch of only repeats is yielded unchanged: every process has the same number of batches, and this one must be
    trained with weight 0.

    Example:
        >>> list(real_indices([[0, 2, 4], [6, 1]], 4))
        [[0, 2, 4], [6]]
        >>> list(real_indices([[0, 2, 4], [1]], 3))
        [[0, 2, 4], [1]]
    """
    for batch in batches:
        real = batch[:num_real]  # repeats are last in a process's part
        num_real -= len(real)
        yield real or batch


def in_step(batches: Iterator[Batch], last: Batch = NO_BATCH) -> Iterator[tuple[Batch, bool]]:
    """Yield a process's batches until those of all processes have ended, each with whether it must be counted.

    A process without further batches yields copies of its last one, or one of another process if it had none. They must
    be computed with weight 0, so that all processes call the same collectives. All processes must iterate at the same
    time; each batch exchanges one number between the hosts.

    Args:
        batches: The batches of this process.
        last: The batch before them, if they begin in the middle of an epoch.

    Example:
        >>> list(in_step(iter([[1, 2], [3]])))
        [([1, 2], True), ([3], True)]
    """
    batch = next(batches, NO_BATCH)
    spare = last if batch is NO_BATCH else batch
    # A process may have had no batch at all, and needs one to compute with.
    has_batch, has_spare = zip(*all_gather_object((batch is not NO_BATCH, spare is not NO_BATCH)), strict=True)
    continues = any(has_batch)
    if continues and not all(has_spare):
        received = [None if spare is NO_BATCH else spare]
        broadcast_object_list(received, src=has_spare.index(True))
        spare = received[0] if spare is NO_BATCH else spare
    while continues:
        if batch is NO_BATCH:
            yield copy.deepcopy(spare), False  # a copy, because algorithms may change a batch in place
        else:
            spare = batch
            yield batch, True
            batch = next(batches, NO_BATCH)
        continues = any_rank(batch is not NO_BATCH)


def real_parts(parts: Iterable[Batch], num_real: int | None, spec: DataSpec) -> Iterator[tuple[Batch, bool]]:
    """Yield a batch's microbatches without repeated samples, each with whether it contains any other sample.

    A microbatch of only repeats is yielded unchanged and must not be counted: with a sharded model, each process must
    run the same number of microbatches.

    Args:
        parts: The microbatches.
        num_real: Number of samples that are not repeats, the first ones; None for all.
        spec: Defines how to count and split samples.

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
        size = spec.get_num_samples_in_batch(part)
        real = min(size, num_real)
        num_real -= real
        yield (part if real in {0, size} else spec.split_batch(part, real)[0]), real > 0


def num_repeated_samples(loader: object) -> int:
    """Return how many samples a loader's sampler repeats so that all processes have the same number.

    Example:
        >>> dataset = range(22)
        >>> num_repeated_samples(DataLoader(dataset, sampler=get_sampler(dataset, num_replicas=4, rank=0)))
        2
    """
    for chosen in _samplers(loader):
        sampler = getattr(chosen, "sampler", chosen)  # a batch sampler of the user usually has one
        if isinstance(sampler, DistributedSampler) and is_plain_distributed(sampler):
            return max(0, sampler.total_size - len(sampler.dataset))  # type: ignore[arg-type]
    return 0


def is_plain_distributed(sampler: object) -> bool:
    """Return whether a sampler splits one order and repeats samples at its end as torch's ``DistributedSampler`` does.

    Example:
        >>> is_plain_distributed(get_sampler(range(3)))
        True
    """
    known = (DistributedSampler.__iter__, DistributedWeightedSampler.__iter__)
    return isinstance(sampler, DistributedSampler) and type(sampler).__iter__ in known


def _samplers(loader: object) -> Sequence[object]:
    """Return the samplers that determine the order of a loader's samples; empty if unknown."""
    if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
        return ()
    batches = loader.batch_sampler
    if batches is None:
        return (loader.sampler,)
    # With a custom batch sampler, DataLoader.sampler is not used.
    return (batches.sampler,) if type(batches) is BatchSampler else (batches,)
