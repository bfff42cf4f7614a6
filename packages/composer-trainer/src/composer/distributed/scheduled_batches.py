"""Batches whose size follows a schedule."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Iterator, Mapping, Sized
from typing import Any

import torch
from torch.utils.data import Dataset, IterableDataset, Sampler

from composer.core import Time, Timestamp, TimeUnit
from composer.core.randomness import derive_seed
from composer.distributed.environment import get_data_rank, get_data_world_size
from composer.functional.checks import check_flags, check_whole

_UNITS = (TimeUnit.BATCH, TimeUnit.SAMPLE, TimeUnit.EPOCH)


class ScheduledBatchSampler(Sampler[list[int]]):
    """Choose batches whose size changes at times of the training (arXiv:1812.06162, arXiv:2505.23971).

    ``DataLoader(dataset, batch_sampler=ScheduledBatchSampler(dataset, {"0ba": 32, "1000ba": 64}, shuffle=True))``

    A size counts the samples of all processes, each of which gets an equal part of each batch. The size of a batch
    depends only on the clock at the start of its epoch and its place in it, so that runs resume exactly, also within
    an epoch, with workers, and with another number of processes.

    Args:
        dataset: A dataset with a length.
        sizes: The size from each time on, in batches, samples or epochs of the training; the first time is 0.
        shuffle: Whether to shuffle, with another order in each epoch.
        drop_last: Whether to drop the last batch of an epoch if it is smaller. Otherwise at most so many samples are
            dropped that the number of processes divides the rest.
        seed: Seed of the shuffled order in another loop than that of the Trainer, which depends on the run's seed.

    Raises:
        TypeError: The dataset has no length, or an argument has another type.
        ValueError: The first time is not 0, times do not increase, have another unit or are mixed, or a size is less
            than 1 or not divisible by the number of processes.

    Example:
        >>> sampler = ScheduledBatchSampler(range(10), {"0ba": 2, "2ba": 3})
        >>> list(sampler)
        [[0, 1], [2, 3], [4, 5, 6], [7, 8, 9]]
        >>> sampler.begin_epoch(Timestamp(epoch=1, batch=4, sample=10))
        >>> list(sampler)
        [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9]]
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        sizes: Mapping[Time | str, int],
        *,
        shuffle: bool = False,
        drop_last: bool = False,
        seed: int = 0,
    ) -> None:
        if isinstance(dataset, IterableDataset) or not isinstance(dataset, Sized):
            raise TypeError(f"dataset must have a length, got {type(dataset).__name__}.")
        check_flags(shuffle=shuffle, drop_last=drop_last)
        check_whole("seed", seed)
        self.dataset, self.shuffle, self.drop_last, self.seed = dataset, shuffle, drop_last, seed
        self.sizes = _checked(sizes)
        self._times, self._unit = [time.value for time in self.sizes], next(iter(self.sizes)).unit
        self.generator: torch.Generator | None = None
        """Draws the order instead of one with the seed; the Trainer sets it."""
        self.begin_epoch(Timestamp())

    def begin_epoch(self, clock: Timestamp) -> None:
        """Set the clock at the start of an epoch, on which the sizes of its batches depend; the Trainer calls it.

        Raises:
            ValueError: A size is not divisible by the number of processes.
        """
        world_size = get_data_world_size()
        wrong = [size for size in self.sizes.values() if size % world_size]
        if wrong:
            raise ValueError(
                f"sizes must be divisible by the number of processes, {world_size}, got {wrong[0]}: a size counts the "
                "samples of all processes in a batch."
            )
        self.epoch, self._ends = clock.counts.epoch, [0]
        total = len(self.dataset) - len(self.dataset) % world_size
        while self._ends[-1] < total:
            done = {TimeUnit.EPOCH: 0, TimeUnit.BATCH: len(self), TimeUnit.SAMPLE: self._ends[-1]}
            end = self._ends[-1] + self._size(clock.count(self._unit) + done[self._unit])
            if end > total and self.drop_last:
                break
            self._ends.append(min(end, total))

    def check_end(self, duration: Time) -> None:
        """Check that a training is longer than the last time, if it has the same unit; the Trainer calls it.

        Raises:
            ValueError: It is not.
        """
        last, size = list(self.sizes.items())[-1]
        if last.unit is duration.unit and last >= duration:
            raise ValueError(
                f"sizes must change within the training of {duration}, and batches of {size} samples would begin at "
                f"{last}: train longer, or leave out that size."
            )

    def size_at(self, clock: Timestamp) -> int:
        """Return the size of a batch that begins at a time, unless it is the last one of an epoch.

        Example:
            >>> ScheduledBatchSampler(range(10), {"0ep": 2, "3ep": 4}).size_at(Timestamp(epoch=5))
            4
        """
        return self._size(clock.count(self._unit))

    def num_samples(self, num_batches: int) -> int:
        """Return the number of samples in the first batches of the epoch, of all processes."""
        return self._ends[min(num_batches, len(self))]

    def __iter__(self) -> Iterator[list[int]]:
        """Yield this process's part of each batch."""
        count, rank, world_size = len(self.dataset), get_data_rank(), get_data_world_size()
        generator = self.generator or torch.Generator().manual_seed(derive_seed(self.seed, "order", self.epoch))
        order = torch.randperm(count, generator=generator) if self.shuffle else torch.arange(count)
        for start, end in itertools.pairwise(self._ends):
            yield order[start + rank : end : world_size].tolist()

    def __len__(self) -> int:
        """Return the number of batches in the epoch."""
        return len(self._ends) - 1

    def __repr__(self) -> str:
        sizes = {str(time): size for time, size in self.sizes.items()}
        return f"ScheduledBatchSampler({type(self.dataset).__name__}, {sizes}, shuffle={self.shuffle})"

    def _size(self, time: float) -> int:
        return list(self.sizes.values())[bisect.bisect_right(self._times, time) - 1]


def _checked(sizes: Mapping[Time | str, int]) -> dict[Time, int]:
    """Return the sizes by their times."""
    if not isinstance(sizes, Mapping) or not sizes:
        raise TypeError(f'sizes must map times to sizes, {{"0ba": 32, "1000ba": 64}}, got {sizes!r}.')
    found = {Time.from_input(time, name="A time in sizes"): size for time, size in sizes.items()}
    for size in found.values():
        check_whole("A size in sizes", size, 1, "It counts the samples of all processes in a batch.")
    times, values = list(found), [time.value for time in found]
    is_of_one_unit = len({time.unit for time in times}) == 1 and times[0].unit in _UNITS
    if not is_of_one_unit or values[0] or values != sorted(set(values)):
        raise ValueError(
            f"sizes must have increasing times from 0 on, all in batches ('ba'), samples ('sp') or epochs ('ep'), got "
            f"{', '.join(map(str, times))}."
        )
    return found
