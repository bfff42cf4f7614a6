"""Seeded draws of the data: loading a batch seeds the global generators by its number, and leaves torch's unchanged.

Data sets and transforms draw from the global generators of Python, NumPy and torch. As each batch has its own seed,
these draws depend neither on the workers nor on where an epoch continues. Layers draw from torch's global generator,
which is restored after each batch. The modules of orders call it.
"""

from __future__ import annotations

import itertools
import pickle
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils.data import ConcatDataset, Dataset, IterableDataset, Subset, TensorDataset, get_worker_info

from composer.core.saving.randomness import derive_seed, generator_state, seed_generator, seed_globals
from composer.distributed.environment import get_data_rank
from composer.trainer.resume.contract import generators_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


def draws_nothing(dataset: Any) -> bool:
    """Return whether the samples of a data set are known to be loaded without a draw."""
    if type(dataset) in (Subset, ConcatDataset):
        return all(map(draws_nothing, [dataset.dataset] if type(dataset) is Subset else dataset.datasets))
    return type(dataset) in (TensorDataset, list, tuple, Tensor, range)


def seed_of_rank(seed: int) -> int:
    """Return the seed of this process; processes with the same samples have the same one."""
    return seed if get_data_rank() == 0 else derive_seed(seed, "rank", get_data_rank())


def seed_of_first_batch(*words: object) -> int:
    """Return the seed of an epoch's first batch; later batches have the following numbers, all of 64 bits."""
    return derive_seed("batches", *words) >> 1


def seeded_batches(
    begin: Callable[[], Iterator[Any]], seed: int, epoch: int, numbers: Iterator[int] | None = None
) -> Iterator[Any]:
    """Yield an iterator's items, with the global generators seeded for each by its number, from 0 on if None."""
    return restoring_torch_rng(lambda: _seeded(begin, seed_of_first_batch(seed, epoch), numbers or itertools.count()))


def _seeded(
    begin: Callable[[], Iterator[Any]], first_seed: int, numbers: Iterator[int], every: int = 1
) -> Iterator[Any]:
    """Yield an iterator's items, with the global generators seeded at the start and before ``every`` so many items.

    The seeds before items are ``first_seed`` plus one of the ``numbers``.
    """
    seed_globals(derive_seed(first_seed, "begin"))
    iterator = begin()
    for count in itertools.count():
        if count % every == 0:
            seed_globals(first_seed + next(numbers))
        try:
            item = next(iterator)
        except StopIteration:
            return
        yield item


def restoring_torch_rng(begin: Callable[[], Iterator[Any]]) -> Iterator[Any]:
    """Yield an iterator's items, and restore torch's global generator, from which layers draw, after each.

    Restoring those of Python and NumPy takes a hundred times longer. Their states follow from the last sample's seed,
    which is the same in every run.
    """
    generator, iterator = torch.default_generator, None
    while True:
        state = generator.get_state()
        try:
            iterator = begin() if iterator is None else iterator
            batch = next(iterator)
        except StopIteration:
            return
        finally:
            generator.set_state(state)
        yield batch


def items(dataset: Any, indices: Any) -> Any:
    """Return the items of a batch as torch's loader loads them."""
    load = getattr(dataset, "__getitems__", None)
    return load(indices) if load else [dataset[index] for index in indices]


class _DatasetWrapper:
    """Wraps a dataset and forwards attributes to it, for example for a ``worker_init_fn``."""

    def __init__(self, dataset: Any) -> None:
        self.__dict__["_dataset"] = dataset

    def __len__(self) -> int:
        return len(self._dataset)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "_dataset" not in self.__dict__:  # while it is unpickled in a worker
            raise AttributeError(name)
        return getattr(self._dataset, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._dataset, name, value)


class SeededDataset(_DatasetWrapper, Dataset[Any]):
    """A dataset that seeds the global generators for each batch, by the seed beside the batch's indices.

    The draws of ``collate_fn`` follow those of the samples. Seeding for each sample would take longer than loading many
    samples, and a run resumes only between batches.
    """

    def __getitem__(self, batch: tuple[int, Any]) -> Any:
        """Load the item of a loader without automatic batching."""
        seed, index = batch
        seed_globals(seed)
        return self._dataset[index]

    def __getitems__(self, batch: tuple[int, Any]) -> Any:
        """Load a batch."""
        seed, indices = batch
        seed_globals(seed)
        return items(self._dataset, indices)


class WorkerDataset(SeededDataset):
    """A dataset that returns complete batches in worker processes, and seeds also its generators, for each batch.

    These are the generators that are attributes of the dataset and ``collate_fn``, whose seeds count, too. The first
    batch of a worker is loaded twice if it finds any, because they may be created when they are first used.
    """

    def __init__(self, dataset: Any, collate: Callable[[Any], Any]) -> None:
        super().__init__(dataset)
        self.__dict__.update(_collate=collate, _generators=None)

    def __getitem__(self, batch: tuple[int, Any]) -> Any:
        """Load the item of a loader without automatic batching."""
        seed, index = batch
        return self._load(seed, lambda: self._collate(self._dataset[index]))

    def __getitems__(self, batch: tuple[int, Any]) -> Any:
        """Load a batch."""
        seed, indices = batch
        return self._load(seed, lambda: self._collate(items(self._dataset, indices)))

    def _load(self, seed: int, load: Callable[[], Any]) -> Any:
        seed_globals(seed)
        if self._generators is None:
            objects = {"dataset": self._dataset, "collate_fn": self._collate}
            seeds = {path: (generator, _seed_of(generator)) for path, generator in generators_of(objects).items()}
            batch, found = load(), generators_of(objects)
            # Not those that were replaced, as Transformers' collator does in each worker.
            own = [seed for path, (generator, seed) in seeds.items() if found.get(path) is generator]
            own += [one for part in objects.values() if isinstance(one := getattr(part, "seed", None), int)]
            self.__dict__["_generators"] = {derive_seed(*own, path): generator for path, generator in found.items()}
            if not found:
                return batch
            seed_globals(seed)
        for own_seed, generator in self._generators.items():
            seed_generator(generator, derive_seed(seed, own_seed))
        return load()


def _seed_of(generator: Any) -> Any:
    """Return what identifies the seed of a generator; of torch's it is the same after draws."""
    return (
        generator.initial_seed() if isinstance(generator, torch.Generator) else pickle.dumps(generator_state(generator))
    )


class SeededStream(_DatasetWrapper, IterableDataset[Any]):
    """A stream that seeds the global generators for each batch, by (seed, epoch, number of the batch).

    Torch's loader takes a batch of each worker in turn, beginning with the first one.
    """

    def __init__(self, dataset: Any, seed: int, batch_size: int | None) -> None:
        super().__init__(dataset)
        self.__dict__.update(_seed=seed, _batch_size=batch_size or 1)

    def begin(self, epoch: int, first: int = 0) -> None:
        """Set the epoch and the number of its next batch; persistent workers count later epochs themselves."""
        self.__dict__.update(_epoch=epoch, _first=first, _times=0)

    def __iter__(self) -> Iterator[Any]:
        worker, own = get_worker_info(), self.__dict__
        number, workers = (0, 1) if worker is None else (worker.id, worker.num_workers)
        seed, first = seed_of_first_batch(self._seed, own["_epoch"] + own["_times"]) + number, own["_first"]
        own.update(_first=0, _times=own["_times"] + 1)
        return _seeded(lambda: iter(self._dataset), seed, itertools.count(first, workers), self._batch_size)
