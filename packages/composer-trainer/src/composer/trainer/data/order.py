"""Order and randomness of the data: they depend only on seed and epoch, for any number of workers."""

from __future__ import annotations

import copy
import hashlib
import itertools
import operator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    ConcatDataset,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
    default_collate,
    default_convert,
    get_worker_info,
)

from composer.core.data_spec import length_of
from composer.core.randomness import derive_seed, preserve_rng_state, seed_globals
from composer.distributed.environment import get_data_rank
from composer.distributed.samplers import is_plain_distributed, num_real_samples, real_indices, set_epoch
from composer.trainer.resume.contract import has_state

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from composer.core import Batch

__all__ = ["DataOrder", "make_order"]

# Samplers of torch that draw from their generator alone, so that a copy with a seeded generator replaces them.
_DRAW_AT_ONCE = (RandomSampler, SubsetRandomSampler, WeightedRandomSampler)
# A sampler with more keys is endless, and its order cannot be drawn in advance.
_ENDLESS = 2**62
# Bytes of a digest: short, as one is stored for each key of an epoch.
_DIGEST_BYTES = 8


class DataOrder:
    """Iterates over any epoch of a loader, from any place on.

    With a ``DistributedSampler``, which gives each process a part of one order, a place is the number of samples before
    it in this order; it is then the same for any number of processes. Otherwise a place is a number of batches.

    Args:
        loader: The loader.
        seed: The run's seed, from which all seeds are derived.

    Attributes:
        skips: Whether an epoch can start in its middle without loading the batches before.
        batch_size: The number of samples in nearly all batches; None if it is not known.
        is_collated_by_torch: Whether ``default_collate`` is used, so a batch has one sample per index.
        global_batch_size: The number of samples in a batch of all processes, if a place is a number of samples;
            otherwise None.
    """

    skips = True
    batch_size: int | None = None
    is_collated_by_torch = False
    global_batch_size: int | None = None

    def __init__(self, loader: Iterable[Batch], seed: int) -> None:
        self.loader, self.seed = loader, seed

    @property
    def step(self) -> int:
        """The distance between the places of two batches."""
        return self.global_batch_size or 1

    def begin(self, epoch: int, place: int = 0) -> Iterator[Batch]:
        """Return the batches of an epoch from a place on."""
        del epoch
        return iter(itertools.islice(self.loader, place, None)) if place else iter(self.loader)

    def end(self, place: int) -> int | None:
        """Return the place where an epoch that passes ``place`` ends; None if only the loader can show it."""
        del place
        return length_of(self.loader) if self.skips else None

    def close(self) -> None:
        """Stop the workers that the order has started."""

    def fingerprint(self, place: int) -> str | None:
        """Return a digest of the current epoch's order up to a place if it may differ in a resumed run; else None."""
        del place
        return None

    def sizes(self) -> dict[str, int]:
        """Return the known sizes on which the contents of the batches depend.

        Example:
            >>> make_order(DataLoader(range(10), batch_size=4), seed=17).sizes()
            {'samples a batch': 4, 'samples': 10}
        """
        loader: Any = self.loader
        size = getattr(loader, "batch_size", None) or getattr(getattr(loader, "batch_sampler", None), "batch_size", 0)
        dataset: Any = getattr(loader, "dataset", None)
        found = {"samples a batch": size, "samples": length_of(dataset)}
        return {name: number for name, number in found.items() if type(number) is int and number}


def make_order(loader: Iterable[Batch], seed: int) -> DataOrder:
    """Return the order of a loader, depending on its type.

    - A loader with ``state_dict`` and ``load_state_dict`` stores its position itself.
    - A ``DataLoader`` is copied: its sampler is seeded by (seed, epoch), its dataset and ``collate_fn`` by
      (seed, rank, epoch, number of the batch).
    - A list of batches is used as it is.
    - Other loaders are iterated over, with the global generators seeded for each batch.

    Example:
        >>> order = make_order([1, 2, 3], seed=17)
        >>> list(order.begin(epoch=0, place=1))
        [2, 3]
    """
    # Processes share the order of a dataset, of which each has a part. All other draws differ by rank.
    own = seed if get_data_rank() == 0 else derive_seed(seed, "rank", get_data_rank())
    if has_state(loader):
        return OpaqueOrder(loader, own)
    # A subclass with its own __iter__ may use the sampler in any way, or not at all.
    if isinstance(loader, DataLoader) and type(loader).__iter__ is DataLoader.__iter__:
        is_stream = isinstance(loader.dataset, IterableDataset)
        return StreamOrder(loader, own) if is_stream else IndexedOrder(loader, seed)
    return DataOrder(loader, own) if isinstance(loader, (list, tuple, Tensor)) else OpaqueOrder(loader, own)


class OpaqueOrder(DataOrder):
    """A loader that stores its position itself, or an iterable of unknown type."""

    skips = False  # a stateful loader only by its own state, which is missing if another loader was saved

    def begin(self, epoch: int, place: int = 0) -> Iterator[Batch]:
        """Return the batches from a place on; those before it are loaded unless the loader restored its position."""
        set_epoch(self.loader, epoch)
        is_there = has_state(self.loader)
        batches = _seeded_batches(lambda: iter(self.loader), self.seed, epoch, first=place if is_there else 0)
        return batches if is_there else itertools.islice(batches, place, None)


class _CopiedOrder(DataOrder):
    """A copy of a ``DataLoader``, so that the user's own does not change and draws nothing from global generators."""

    loader: DataLoader[Any]

    def __init__(self, loader: DataLoader[Any], seed: int) -> None:
        generator, copied, self._given = loader.generator, copy.copy(loader), loader
        super().__init__(copied, seed if generator is None else derive_seed(seed, generator.initial_seed()))
        # A loader with persistent workers keeps its iterator, which the copy must not share.
        copied.__dict__["_iterator"] = None
        copied.generator = torch.Generator()
        self.is_collated_by_torch = loader.collate_fn is default_collate
        # A batch of one sample is often a ready-made batch, which a function takes out.
        if loader.batch_size is not None and (loader.batch_size > 1 or self.is_collated_by_torch):
            self.batch_size = loader.batch_size
        self._is_plain = _draws_nothing(loader.dataset) and loader.collate_fn in (default_collate, default_convert)

    def close(self) -> None:
        """Stop the workers that the order has started."""
        self.loader.__dict__["_iterator"] = None

    def _set_epoch(self, epoch: int) -> None:
        set_epoch(self._given, epoch)
        if hasattr(self._given.dataset, "set_epoch"):
            self.close()  # persistent workers have copies of the data set, which stay in the earlier epoch

    def _iterate(self, epoch: int) -> Iterator[Batch]:
        assert self.loader.generator is not None
        self.loader.generator.manual_seed(derive_seed(self.seed, "loader", epoch))
        # Workers have global generators of their own, and such data draws nothing.
        if self.loader.num_workers or self._is_plain:
            return iter(self.loader)
        return _preserve_torch_rng_state(lambda: iter(self.loader))


class IndexedOrder(_CopiedOrder):
    """A ``DataLoader`` of a map-style dataset: skipped batches are skipped among the indices."""

    def __init__(self, loader: DataLoader[Any], seed: int) -> None:
        super().__init__(loader, seed)
        name = "sampler" if loader.batch_sampler is None else "batch_sampler"
        self._sampler: Any = getattr(loader, name)
        self._length = length_of(self._sampler) if _is_known(self._sampler) else None
        self._chosen: Iterator[Any] = iter(())
        # In __dict__, because DataLoader.__setattr__ rejects another sampler or data set.
        # Persistent workers use the same object in the next epoch.
        self._keys = self.loader.__dict__[name] = _Keys(self._sampler)
        self._source = loader.dataset if self._is_plain else _SeededDataset(loader.dataset)
        self._loads_here = not (loader.num_workers or loader.pin_memory) and type(loader) is DataLoader
        if not self._loads_here:
            self.loader.__dict__["dataset"] = self._source
        inner: Any = getattr(self._sampler, "sampler", self._sampler)
        # Processes share one order, whatever generator each one's loader has.
        self._order_seed = seed if is_plain_distributed(inner) else self.seed
        is_own = inner is self._sampler or type(self._sampler) is BatchSampler  # other batch samplers choose themselves
        self._distributed: Any = inner if is_plain_distributed(inner) and is_own else None
        if self._distributed is not None:
            self.global_batch_size = getattr(self._sampler, "batch_size", 1) * inner.num_replicas

    def begin(self, epoch: int, place: int = 0) -> Iterator[Batch]:
        """Return the epoch's batches from a place on, without loading those before it."""
        self._set_epoch(epoch)
        if self.global_batch_size is None:
            remaining = self._chosen = _order_of(self._sampler, self._order_seed, epoch)
            if isinstance(remaining, _WithDigests):
                self._length = remaining.length
            for _ in itertools.islice(remaining, place):
                pass
        else:
            remaining = self._own_part(epoch, place)
        if not self._is_plain:
            # Each batch has its own seed, whichever worker loads it and wherever the epoch continues.
            first = _first_key(self.seed, get_data_rank(), epoch) + place
            remaining = zip(itertools.count(first, self.step), remaining)
        self._keys.next = remaining
        return self._iterate(epoch)

    def end(self, place: int) -> int | None:
        """Return the place after the last sample, or batch, that neither sampler nor batch sampler drops.

        The number of batches of an unknown sampler is known when the epoch begins.
        """
        if self.global_batch_size is None:
            return self._length
        sampler, end = self._distributed, len(self._distributed.dataset)
        if sampler.drop_last:
            end -= end % sampler.num_replicas
        drops = sampler is not self._sampler and self._sampler.drop_last
        return end - max(0, end - place) % self.global_batch_size if drops else end

    def _own_part(self, epoch: int, place: int) -> Iterator[Any]:
        """Return the keys of this process: those at the places ``place + rank :: num_replicas`` of the order.

        If the last ones are fewer than the processes, the others get one of the first, which only keeps them in step.
        """
        sampler: Any = self._distributed
        # The order of all processes, as if there were one. It is split from ``place`` on and not from its start, so
        # that another number of processes continues with exactly the samples that are left.
        drawing = copy.copy(sampler)
        drawing.seed, drawing.epoch = derive_seed(derive_seed(self._order_seed, "order", epoch), sampler.seed), 0
        drawing.num_replicas, drawing.rank, drawing.drop_last = 1, 0, False
        drawing.num_samples = drawing.total_size = len(sampler.dataset)
        order = list(drawing)
        left = max(0, (self.end(place) or 0) - place)
        part = order[place + sampler.rank : place + left : sampler.num_replicas]
        if len(part) * sampler.num_replicas < left:
            part.append(order[(sampler.rank - left % sampler.num_replicas) % len(order)])
        if sampler is self._sampler:
            return iter(part)
        batches = copy.copy(self._sampler)
        batches.sampler = part
        return real_indices(iter(batches), num_real_samples(left, sampler.num_replicas, sampler.rank))

    def _iterate(self, epoch: int) -> Iterator[Batch]:
        if not self._loads_here:
            return super()._iterate(epoch)
        # As torch's loader does, without the range that it records for profilers, which takes as long as seeding.
        load = operator.getitem if self.loader.batch_sampler is None else _items
        source, collate = self._source, self.loader.collate_fn
        batches = (collate(load(source, keys)) for keys in self._keys.next)
        return batches if self._is_plain else _preserve_torch_rng_state(lambda: batches)

    def fingerprint(self, place: int) -> str | None:
        """Return a digest of the epoch's indices if the type of the sampler is unknown."""
        return self._chosen.fingerprint(place) if isinstance(self._chosen, _WithDigests) else None


class StreamOrder(_CopiedOrder):
    """A ``DataLoader`` of an ``IterableDataset``, which is iterated over from its beginning."""

    skips = False

    def __init__(self, loader: DataLoader[Any], seed: int) -> None:
        super().__init__(loader, seed)
        self._next_epoch = 0
        self._stream = self.loader.__dict__["dataset"] = _SeededStream(loader.dataset, self.seed, loader.batch_size)

    def sizes(self) -> dict[str, int]:
        """Return the known sizes, and the number of workers, over which streams are usually split."""
        return {**super().sizes(), "workers": max(1, self.loader.num_workers)}

    def begin(self, epoch: int, place: int = 0) -> Iterator[Batch]:
        """Return the epoch's batches from a place on; those before it are loaded and discarded."""
        self._set_epoch(epoch)
        if epoch != self._next_epoch:  # persistent workers count epochs themselves
            self.close()
        self._next_epoch = epoch + 1
        self._stream.begin(epoch)
        return itertools.islice(self._iterate(epoch), place, None)


def _draws_nothing(dataset: Any) -> bool:
    if type(dataset) in (Subset, ConcatDataset):
        return all(map(_draws_nothing, [dataset.dataset] if type(dataset) is Subset else dataset.datasets))
    return type(dataset) in (TensorDataset, list, tuple, Tensor, range)


def _is_known(sampler: Any) -> bool:
    """Return whether a sampler is of torch, so that its length is exact, and a copy draws its order."""
    if type(sampler) is BatchSampler:
        return _is_known(sampler.sampler)
    return type(sampler) in (*_DRAW_AT_ONCE, SequentialSampler)


def _order_of(sampler: Any, seed: int, epoch: int) -> Iterator[Any]:
    """Return a sampler's keys for an epoch, with digests if its type is unknown, so that it may draw others."""
    if type(sampler) is BatchSampler:
        keys, batches = _order_of(sampler.sampler, seed, epoch), copy.copy(sampler)
        if not isinstance(keys, _WithDigests):
            batches.sampler = keys
            return iter(batches)
        batches.sampler, length = keys.keys, keys.length
        if length is not None:
            length = length // sampler.batch_size if sampler.drop_last else -(-length // sampler.batch_size)
        return _WithDigests(iter(batches), length)
    key = derive_seed(seed, "order", epoch)
    if _is_known(sampler):
        drawing = copy.copy(sampler)
        if type(sampler) in _DRAW_AT_ONCE:
            drawing.generator = torch.Generator().manual_seed(key)
        return iter(drawing)
    if (length_of(sampler) or _ENDLESS) >= _ENDLESS:
        return _WithDigests(_seeded_batches(lambda: iter(sampler), seed, epoch))
    # An unknown sampler may draw from any generator: the global ones are seeded, and it is read completely before they
    # are restored.
    with preserve_rng_state():
        seed_globals(key)
        if isinstance(getattr(sampler, "generator", None), torch.Generator):
            sampler.generator.manual_seed(key)
        drawn = list(sampler)
    return _WithDigests(iter(drawn), len(drawn))


def _first_key(*words: object) -> int:
    """Return the seed of an epoch's first batch; later batches have the following numbers, all of 64 bits."""
    return derive_seed("batches", *words) >> 1


def _seeded_batches(begin: Callable[[], Iterator[Any]], seed: int, epoch: int, first: int = 0) -> Iterator[Any]:
    """Yield an iterator's items, with the global generators seeded for each; ``first`` is the first one's number."""
    return _preserve_torch_rng_state(lambda: _seeded(begin, _first_key(seed, epoch), first))


def _seeded(begin: Callable[[], Iterator[Any]], key: int, first: int = 0, every: int = 1) -> Iterator[Any]:
    """Yield an iterator's items, with the global generators seeded at the start and before ``every`` so many items."""
    seed_globals(derive_seed(key, "begin"))
    iterator = begin()
    for place in itertools.count(first):
        if place % every == 0:
            seed_globals(key + place // every)
        try:
            item = next(iterator)
        except StopIteration:
            return
        yield item


def _preserve_torch_rng_state(begin: Callable[[], Iterator[Any]]) -> Iterator[Any]:
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


def _items(dataset: Any, indices: Any) -> Any:
    """Return the items of a batch as torch's loader loads them."""
    load = getattr(dataset, "__getitems__", None)
    return load(indices) if load else [dataset[index] for index in indices]


class _WithDigests:
    """Yields an iterator's items, and stores a digest of the items up to each; ``length`` is their number if known."""

    def __init__(self, keys: Iterator[Any], length: int | None = None) -> None:
        self.keys, self.length = keys, length
        self._digest, self._digests = hashlib.blake2b(digest_size=_DIGEST_BYTES), bytearray()

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        key = next(self.keys)
        self._digest.update(repr(key).encode())
        self._digests += self._digest.digest()
        return key

    def fingerprint(self, count: int) -> str | None:
        """Return the digest of the first items; None if there are fewer."""
        end = count * _DIGEST_BYTES
        return bytes(self._digests[end - _DIGEST_BYTES : end]).hex() if 0 < end <= len(self._digests) else None


class _Keys:
    """The remaining keys of a sampler, with its length."""

    def __init__(self, sampler: Any) -> None:
        self._sampler = sampler
        self.next: Iterator[Any] = iter(())

    def __iter__(self) -> Iterator[Any]:
        return self.next

    def __len__(self) -> int:
        return len(self._sampler)


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


class _SeededDataset(_DatasetWrapper, Dataset[Any]):
    """A dataset that seeds the global generators for each batch, by the key beside the batch's indices.

    The draws of ``collate_fn`` follow those of the samples. Seeding for each sample would take longer than loading many
    samples, and a run resumes only between batches.
    """

    def __getitem__(self, batch: tuple[int, Any]) -> Any:
        """Load the item of a loader without automatic batching."""
        key, index = batch
        seed_globals(key)
        return self._dataset[index]

    def __getitems__(self, batch: tuple[int, Any]) -> Any:
        """Load a batch."""
        key, indices = batch
        seed_globals(key)
        return _items(self._dataset, indices)


class _SeededStream(_DatasetWrapper, IterableDataset[Any]):
    """A stream that seeds the global generators for each batch, by (seed, epoch, worker, number of its batch)."""

    def __init__(self, dataset: Any, seed: int, batch_size: int | None) -> None:
        super().__init__(dataset)
        self.__dict__.update(_seed=seed, _batch_size=batch_size or 1)

    def begin(self, epoch: int) -> None:
        """Set the epoch; persistent workers count later epochs themselves."""
        self.__dict__.update(_epoch=epoch, _times=0)

    def __iter__(self) -> Iterator[Any]:
        worker = get_worker_info()
        epoch = self.__dict__["_epoch"] + self.__dict__["_times"]
        self.__dict__["_times"] += 1
        key = _first_key(self._seed, epoch, "worker", 0 if worker is None else worker.id)
        return _seeded(lambda: iter(self._dataset), key, every=self._batch_size)
