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
from torch.utils.data import ConcatDataset, DataLoader, Dataset, IterableDataset, Subset, TensorDataset, get_worker_info

from composer.core.saving.randomness import derive_seed, generator_state, seed_generator, seed_globals
from composer.distributed.environment import get_data_rank
from composer.trainer.data.objects import generators_of

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
    begin: Callable[[], Iterator[Any]],
    first_seed: int,
    numbers: Iterator[int],
    seed_others: Callable[[int], object] | None = None,
) -> Iterator[Any]:
    """Yield an iterator's items, with the global generators, and others, seeded at the start and before each item.

    The seeds before items are ``first_seed`` plus one of the ``numbers``.
    """
    seed_globals(derive_seed(first_seed, "begin"))
    iterator = begin()
    for number in numbers:
        seed_globals(first_seed + number)
        if seed_others is not None:
            seed_others(first_seed + number)
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


def seeded_loads(loader: Any, keys: Iterator[tuple[int, Any]]) -> Iterator[Any]:
    """Yield the batch of each key, with the global generators seeded by the number beside it; torch's is restored.

    As :func:`restoring_torch_rng` with a :class:`SeededDataset`, in fewer calls for each batch.
    """
    dataset, collate, generator = loader.dataset, loader.collate_fn, torch.default_generator
    load = dataset.__getitem__ if loader.batch_sampler is None else getattr(dataset, "__getitems__", None)
    while True:
        state = generator.get_state()
        try:
            seeded = next(keys, None)  # the sampler may draw
            if seeded is None:
                return
            seed, key = seeded
            seed_globals(seed)
            batch = collate(load(key) if load else [dataset[index] for index in key])
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


class _OwnGenerators:
    """The generators of a data set and its ``collate_fn`` in a worker process, which are seeded when they load.

    These are those that are attributes, also of what the objects consist of; their own seeds count, too.

    Args:
        dataset: The data set.
        collate: The ``collate_fn``.
        worker: The worker whose generators in ``collate_fn`` differ from those of others; empty if they do not, because
            any worker may load the same batch.
    """

    def __init__(self, dataset: Any, collate: Callable[[Any], Any], worker: str = "") -> None:
        self._objects, self._worker = {"dataset": dataset, f"collate_fn{worker}": collate}, worker
        self._by_seed: dict[int, Any] | None = None

    def load(self, seed: int, load: Callable[[], Any]) -> Any:
        """Return what ``load`` returns, with the generators seeded.

        The first time, it is called again if it has created generators when they are first used.
        """
        if self._by_seed is not None:
            self.seed(seed)
            return load()
        before = {path: (generator, _seed_of(generator)) for path, generator in generators_of(self._objects).items()}
        self._find([own for _, own in before.values()])
        self.seed(seed)
        loaded, found = load(), generators_of(self._objects)
        # Not those that were replaced, as Transformers' collator does in each worker.
        kept = [own for path, (generator, own) in before.items() if found.get(path) is generator]
        if len(kept) < len(found):
            self._find(kept)
            self.seed(seed)
            loaded = load()
        return loaded

    def seed(self, seed: int) -> None:
        """Seed the generators that have been found."""
        for own_seed, generator in (self._by_seed or {}).items():
            seed_generator(generator, derive_seed(seed, own_seed))

    def _find(self, seeds: list[Any]) -> None:
        seeds += [one for part in self._objects.values() if isinstance(one := getattr(part, "seed", None), int)]
        found = generators_of(self._objects)
        self._by_seed = {derive_seed(*seeds, path): generator for path, generator in found.items()}


class WorkerDataset(SeededDataset):
    """A dataset that returns complete batches in worker processes, and seeds also its generators, for each batch."""

    def __init__(self, dataset: Any, collate: Callable[[Any], Any]) -> None:
        super().__init__(dataset)
        self.__dict__.update(_collate=collate, _own=_OwnGenerators(dataset, collate))

    def __getitem__(self, batch: tuple[int, Any]) -> Any:
        """Load the item of a loader without automatic batching."""
        return self._load(batch, lambda index: self._dataset[index])

    def __getitems__(self, batch: tuple[int, Any]) -> Any:
        """Load a batch."""
        return self._load(batch, lambda indices: items(self._dataset, indices))

    def _load(self, batch: tuple[int, Any], load: Callable[[Any], Any]) -> Any:
        seed, keys = batch

        def load_seeded() -> Any:
            seed_globals(seed)
            return self._collate(load(keys))

        return self._own.load(seed, load_seeded)


def _seed_of(generator: Any) -> Any:
    """Return what identifies the seed of a generator; of torch's it is the same after draws."""
    return (
        generator.initial_seed() if isinstance(generator, torch.Generator) else pickle.dumps(generator_state(generator))
    )


class SeededStream(_DatasetWrapper, IterableDataset[Any]):
    """A stream of complete batches that seeds the global generators for each, by (seed, epoch, number of the batch).

    Torch's loader takes a batch of each worker in turn, beginning with the first one. In workers, the generators of the
    dataset and ``collate_fn`` are seeded, too, so that it does not matter how many epochs a worker has loaded before. A
    stream that begins at any place seeds them for each batch. Others seed them at the start of an epoch, those of the
    dataset equally in all workers and ranks, which may draw one order with them, of which each takes a part.
    """

    def __init__(self, loader: DataLoader[Any], seed: int, shared_seed: int, *, skips: bool) -> None:
        super().__init__(loader.dataset)
        self.__dict__.update(_loader=(loader.collate_fn, loader.batch_size, loader.drop_last), _own=None)
        self.__dict__.update(_seed=seed, _shared_seed=shared_seed, _skips=skips)

    def begin(self, epoch: int, first: int = 0) -> None:
        """Set the epoch and the number of its next batch; persistent workers count later epochs themselves."""
        self.__dict__.update(_epoch=epoch, _first=first, _times=0)

    def __iter__(self) -> Iterator[Any]:
        worker, own = get_worker_info(), self.__dict__
        number, workers = (0, 1) if worker is None else (worker.id, worker.num_workers)
        epoch, first = own["_epoch"] + own["_times"], own["_first"]
        seed = seed_of_first_batch(self._seed, epoch) + number
        own.update(_first=0, _times=own["_times"] + 1)
        if worker is None:
            return _seeded(self._batches, seed, itertools.count(first, workers))
        if own["_own"] is None:
            own["_own"] = _OwnGenerators(self._dataset, self._loader[0], "" if self._skips else f" of {number}")
        generators = own["_own"].seed if self._skips else None
        return self._in_worker(
            derive_seed(self._shared_seed, "stream", epoch),
            lambda: _seeded(self._batches, seed, itertools.count(first, workers), generators),
        )

    def _in_worker(self, seed: int, begin: Callable[[], Iterator[Any]]) -> Iterator[Any]:
        """Yield batches, with the first of them loaded while generators that are created then are found."""

        def load() -> tuple[list[Any], Iterator[Any]]:
            batches = begin()
            return list(itertools.islice(batches, 1)), batches

        first, batches = self._own.load(seed, load)
        yield from first
        yield from batches

    def _batches(self) -> Iterator[Any]:
        """Return the batches as torch's loader does, of an iterator that is created now."""
        collate, size, drop_last = self._loader
        samples = iter(self._dataset)
        return map(collate, samples if size is None else _batched(samples, size, drop_last))


def _batched(samples: Iterator[Any], size: int, drop_last: bool) -> Iterator[list[Any]]:
    while len(batch := list(itertools.islice(samples, size))) == size:
        yield batch
    if batch and not drop_last:
        yield batch
