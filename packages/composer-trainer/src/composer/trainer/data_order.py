"""The order of the data and the randomness in it, by key: the same whatever happened before, whatever the workers."""

from __future__ import annotations

import copy
import hashlib
import itertools
import marshal
from collections.abc import Iterable, Iterator, Sized
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

from composer.core.randomness import derive_seed, preserve_rng_state, seed_globals
from composer.distributed.environment import get_global_rank
from composer.distributed.samplers import is_plain_distributed, num_real_samples_in_loader, real_indices

if TYPE_CHECKING:
    from collections.abc import Callable

    from composer.core import Batch

__all__ = ["DataOrder", "make_order"]

_DRAW_AT_ONCE = (RandomSampler, SubsetRandomSampler, WeightedRandomSampler)
_FAR = 2**62
_DIGEST = 8
_WITHOUT_REFERENCES = 2
"""The version of :mod:`marshal` whose output depends on the value alone."""


class DataOrder:
    """Gives the batches of any epoch of a loader, from any batch on.

    Args:
        loader: The loader.
        seed: The run's seed, which all draws hang on.

    Attributes:
        skips: Whether an epoch can be begun in its middle without loading what comes before.
        num_real_batches: How many of an epoch's batches have a sample that no other process counts; None is all.
    """

    skips = True
    num_real_batches: int | None = None

    def __init__(self, loader: Iterable[Batch], seed: int) -> None:
        self.loader, self.seed = loader, seed

    def begin(self, epoch: int, skip: int = 0) -> Iterator[Batch]:
        """Return the batches of an epoch, without the first ``skip``."""
        del epoch
        return iter(itertools.islice(self.loader, skip, None)) if skip else iter(self.loader)

    def fingerprint(self, batches: int) -> str | None:
        """Return a digest of the begun epoch's order, where it is not certain to come again; else None.

        Args:
            batches: How many of its batches have been given.
        """
        del batches
        return None

    def sizes(self) -> dict[str, int]:
        """Return the numbers of samples that decide which of them are in which batch, as far as they are known.

        Example:
            >>> make_order(DataLoader(range(10), batch_size=4), seed=17).sizes()
            {'samples a batch': 4, 'samples': 10}
        """
        loader: Any = self.loader
        size = getattr(loader, "batch_size", None) or getattr(getattr(loader, "batch_sampler", None), "batch_size", 0)
        dataset: Any = getattr(loader, "dataset", None)
        found = {"samples a batch": size, "samples": len(dataset) if _has_length(dataset) else 0}
        return {name: number for name, number in found.items() if type(number) is int and number}

    def choose_again(self, epoch: int, batches: int) -> str | None:
        """Return the :meth:`fingerprint` of an epoch that the sampler chooses again, without loading a batch."""
        del epoch
        return self.fingerprint(batches)

    def state_dict(self) -> dict[str, Any] | None:
        """Return the loader's own state, if it keeps one."""
        return None


def make_order(loader: Iterable[Batch], seed: int) -> DataOrder:
    """Return the order of a loader, of the kind that suits it.

    - A loader with ``state_dict`` and ``load_state_dict`` keeps its place by itself.
    - A ``DataLoader`` is copied: its sampler draws by (seed, epoch), its dataset and ``collate_fn`` by
      (seed, rank, epoch, place of the batch).
    - A list of batches is what it is.
    - Anything else is iterated over, with the global generators seeded for each batch.

    Example:
        >>> order = make_order([1, 2, 3], seed=17)
        >>> list(order.begin(epoch=0, skip=1))
        [2, 3]
    """
    # Processes share the order of a dataset, of which each has its part. What else they draw differs by rank.
    own = seed if get_global_rank() == 0 else derive_seed(seed, "rank", get_global_rank())
    if callable(getattr(loader, "state_dict", None)) and callable(getattr(loader, "load_state_dict", None)):
        return StatefulOrder(loader, own)
    if isinstance(loader, DataLoader) and type(loader).__iter__ is DataLoader.__iter__:
        is_stream = isinstance(loader.dataset, IterableDataset)
        return StreamOrder(loader, own) if is_stream else IndexedOrder(loader, seed)
    return DataOrder(loader, own) if isinstance(loader, (list, tuple, Tensor)) else OpaqueOrder(loader, own)


class StatefulOrder(DataOrder):
    """A loader that knows its place."""

    loader: Any
    skips = False  # but by a state of its own, which is not there if another loader was saved

    def begin(self, epoch: int, skip: int = 0) -> Iterator[Batch]:
        """Return the batches that the loader has left; it has been told where it is by ``load_state_dict``."""
        _tell_epoch(self.loader, epoch)
        return _seeded_batches(lambda: iter(self.loader), self.seed, epoch, first=skip)

    def state_dict(self) -> dict[str, Any] | None:
        """Return what the loader says."""
        state: dict[str, Any] = self.loader.state_dict()
        return state


class OpaqueOrder(DataOrder):
    """Something to iterate over, of which no more is known."""

    skips = False

    def begin(self, epoch: int, skip: int = 0) -> Iterator[Batch]:
        """Return the batches; those to skip are loaded and thrown away."""
        _tell_epoch(self.loader, epoch)
        return itertools.islice(_seeded_batches(lambda: iter(self.loader), self.seed, epoch), skip, None)


class _CopiedOrder(DataOrder):
    """A ``DataLoader``, copied, so that the user's own stays as it is and draws nothing from global generators."""

    loader: DataLoader[Any]

    def __init__(self, loader: DataLoader[Any], seed: int) -> None:
        given = loader.generator
        super().__init__(_copied(loader), seed if given is None else derive_seed(seed, given.initial_seed()))
        self.loader.generator = torch.Generator()
        self._is_plain = _draws_nothing(loader.dataset) and loader.collate_fn in (default_collate, default_convert)

    def _iterate(self, epoch: int) -> Iterator[Batch]:
        assert self.loader.generator is not None
        self.loader.generator.manual_seed(derive_seed(self.seed, "loader", epoch))
        if self.loader.num_workers or self._is_plain:
            return iter(self.loader)
        return _torch_kept_between(lambda: iter(self.loader))


class IndexedOrder(_CopiedOrder):
    """A ``DataLoader`` of a dataset with indices: what is skipped is skipped among the indices."""

    def __init__(self, loader: DataLoader[Any], seed: int) -> None:
        super().__init__(loader, seed)
        self._dataset = loader.dataset
        self._name = "sampler" if loader.batch_sampler is None else "batch_sampler"
        self._sampler: Any = getattr(loader, self._name)
        self._chosen: list[Any] | _Noted | None = None
        # Workers that outlive an epoch ask the same object again.
        self._keys = self.loader.__dict__[self._name] = _Keys(self._sampler)
        self._loads_here = not (loader.num_workers or loader.pin_memory) and type(loader) is DataLoader
        if not (self._is_plain or self._loads_here):
            self.loader.__dict__["dataset"] = _SeededDataset(loader.dataset)
        is_distributed = is_plain_distributed(getattr(self._sampler, "sampler", self._sampler))
        # Processes share one order, whatever generator each one's loader has.
        self._order_seed = seed if is_distributed else self.seed
        self._num_real = num_real_samples_in_loader(loader) if is_distributed else None
        if self._num_real is not None:
            self.num_real_batches = -(-self._num_real // getattr(self._sampler, "batch_size", 1))

    def begin(self, epoch: int, skip: int = 0) -> Iterator[Batch]:
        """Return the epoch's batches, without loading the first ``skip``."""
        keys: Iterable[Any] = self._choose(epoch)
        if self._num_real is not None and self._name == "batch_sampler":
            keys = real_indices(keys, self._num_real)
        remaining: Iterator[Any] = iter(keys)
        _advance(remaining, skip)
        if not self._is_plain:
            remaining = zip(itertools.count(_first_key(self.seed, get_global_rank(), epoch) + skip), remaining)
        self._keys.next = remaining
        return self._iterate(epoch)

    def _iterate(self, epoch: int) -> Iterator[Batch]:
        if not self._loads_here:
            return super()._iterate(epoch)
        # As torch's loader does, without the range that it records for profilers: that takes as long as seeding does,
        # and the trainer's profiler has its own.
        dataset, collate = self._dataset, self.loader.collate_fn
        load = getattr(dataset, "__getitems__", None)

        def fetch(indices: Any) -> Batch:
            if load:
                return collate(load(indices))
            return collate([dataset[index] for index in indices])

        def fetch_one(index: Any) -> Batch:
            return collate(dataset[index])

        one_batch = fetch_one if self.loader.batch_sampler is None else fetch
        return map(one_batch, self._keys.next) if self._is_plain else _load_seeded(one_batch, self._keys.next)

    def _choose(self, epoch: int) -> Iterable[Any]:
        _tell_epoch(self._dataset, epoch)
        keys = _order_of(self._sampler, self._order_seed, epoch)
        self._chosen = keys if isinstance(keys, (list, _Noted)) else None
        return keys

    def fingerprint(self, batches: int) -> str | None:
        """Return a digest of the epoch's indices where an unknown sampler has chosen them."""
        if isinstance(self._chosen, _Noted):
            return self._chosen.fingerprint(batches)
        return None if self._chosen is None else hashlib.blake2b(repr(self._chosen).encode(), digest_size=8).hexdigest()

    def choose_again(self, epoch: int, batches: int) -> str | None:
        """Return the :meth:`fingerprint` of an epoch that the sampler chooses again."""
        keys = self._choose(epoch)
        if isinstance(keys, _Noted):
            _advance(keys, batches)
        return self.fingerprint(batches)


class StreamOrder(_CopiedOrder):
    """A ``DataLoader`` of an ``IterableDataset``: it can only be gone through from its beginning."""

    skips = False

    def __init__(self, loader: DataLoader[Any], seed: int) -> None:
        super().__init__(loader, seed)
        self._set, self._next_epoch = loader.dataset, 0
        self._stream = self.loader.__dict__["dataset"] = _SeededStream(loader.dataset, self.seed, loader.batch_size)

    def begin(self, epoch: int, skip: int = 0) -> Iterator[Batch]:
        """Return the epoch's batches; those to skip are loaded and thrown away."""
        _tell_epoch(self._set, epoch)
        if epoch != self._next_epoch:  # workers that outlive an epoch count on
            self.loader.__dict__["_iterator"] = None
        self._next_epoch = epoch + 1
        self._stream.begin(epoch)
        return itertools.islice(self._iterate(epoch), skip, None)


def _copied(loader: DataLoader[Any]) -> DataLoader[Any]:
    copied = copy.copy(loader)
    copied.__dict__["_iterator"] = None
    return copied


def _tell_epoch(told: Any, epoch: int) -> None:
    set_epoch = getattr(told, "set_epoch", None)
    if callable(set_epoch):
        set_epoch(epoch)


def _draws_nothing(dataset: Any) -> bool:
    if isinstance(dataset, Subset):
        return type(dataset) is Subset and _draws_nothing(dataset.dataset)
    if isinstance(dataset, ConcatDataset):
        return type(dataset) is ConcatDataset and all(map(_draws_nothing, dataset.datasets))
    return type(dataset) in (TensorDataset, list, tuple, Tensor, range)


def _order_of(sampler: Any, seed: int, epoch: int) -> list[Any] | Iterator[Any]:
    """Return a sampler's keys for an epoch; of an unknown one as a list or, if it may not end, as :class:`_Noted`."""
    _tell_epoch(sampler, epoch)
    in_order: Iterator[Any]
    if type(sampler) is BatchSampler:
        batches = copy.copy(sampler)
        keys = _order_of(sampler.sampler, seed, epoch)
        batches.sampler = _Keys(sampler.sampler, keys.keys if isinstance(keys, _Noted) else iter(keys))
        in_order = iter(batches)
        if isinstance(keys, _Noted):
            return _Noted(in_order)
        return list(in_order) if isinstance(keys, list) else in_order
    if type(sampler) not in (*_DRAW_AT_ONCE, SequentialSampler) and not is_plain_distributed(sampler):
        return _unknown_order_of(sampler, seed, epoch)
    key, drawing = derive_seed(seed, "order", epoch), copy.copy(sampler)
    if is_plain_distributed(sampler):
        drawing.seed, drawing.epoch = derive_seed(key, sampler.seed), 0
    elif type(sampler) in _DRAW_AT_ONCE:
        drawing.generator = torch.Generator().manual_seed(key)
    in_order = iter(drawing)
    return in_order


def _unknown_order_of(sampler: Any, seed: int, epoch: int) -> list[Any] | _Noted:
    if callable(getattr(sampler, "set_epoch", None)):
        return _Noted(iter(sampler))
    _tell_epoch(getattr(sampler, "sampler", None), epoch)
    if not _has_length(sampler):
        return _Noted(_seeded_batches(lambda: iter(sampler), seed, epoch))
    key = derive_seed(seed, "order", epoch)
    with preserve_rng_state():
        seed_globals(key)
        if isinstance(getattr(sampler, "generator", None), torch.Generator):
            sampler.generator.manual_seed(key)
        return list(sampler)


def _advance(iterator: Iterator[Any], count: int) -> None:
    for _ in itertools.islice(iterator, count):
        pass


def _has_length(sampler: Any) -> bool:
    try:
        return isinstance(sampler, Sized) and len(sampler) < _FAR
    except (TypeError, NotImplementedError):
        return False


def _first_key(*words: object) -> int:
    """Return the key of an epoch's first batch; the others have the numbers after it, all of 64 bits."""
    return derive_seed("batches", *words) >> 1


def _seeded_batches(begin: Callable[[], Iterator[Any]], seed: int, epoch: int, first: int = 0) -> Iterator[Any]:
    """Yield what an iterator gives, with the global generators seeded for each; ``first`` is the first one's place."""
    return _torch_kept_between(lambda: _seeded(begin, _first_key(seed, epoch), first))


def _seeded(begin: Callable[[], Iterator[Any]], key: int, first: int = 0, every: int = 1) -> Iterator[Any]:
    """Yield what an iterator gives, with the global generators seeded before it begins and ``every`` so many items."""
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


def _torch_kept_between(begin: Callable[[], Iterator[Any]]) -> Iterator[Any]:
    """Yield what an iterator gives, and give torch's generator back as it was each time.

    Layers draw from that one. Python's and NumPy's take a hundred times longer to give back and are left where the last
    sample's seed has brought them, which is the same in every run.
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


def _load_seeded(load: Callable[[Any], Batch], keys: Iterator[tuple[int, Any]]) -> Iterator[Batch]:
    """Yield the batches that ``load(indices)`` returns, each with the global generators seeded by its key.

    Torch's generator is restored after each batch, as :func:`_torch_kept_between` does, with fewer calls in a step.
    """
    generator = torch.default_generator
    while True:
        state = generator.get_state()
        try:
            chosen = next(keys, None)
            if chosen is None:
                return
            key, indices = chosen
            seed_globals(key)
            batch = load(indices)
        finally:
            generator.set_state(state)
        yield batch


class _Noted:
    """Gives what an iterator gives, and keeps a digest of all up to each item."""

    def __init__(self, keys: Iterator[Any]) -> None:
        self.keys = keys
        self._digest, self._digests = hashlib.blake2b(digest_size=_DIGEST), bytearray()

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        key = next(self.keys)
        try:
            content = marshal.dumps(key, _WITHOUT_REFERENCES)
        except ValueError:  # a tensor, or an object of another library
            content = repr(key).encode()
        self._digest.update(content)
        self._digests += self._digest.digest()
        return key

    def fingerprint(self, count: int) -> str | None:
        """Return the digest of the first items; None if there are fewer."""
        end = count * _DIGEST
        return bytes(self._digests[end - _DIGEST : end]).hex() if 0 < end <= len(self._digests) else None


class _Keys:
    """What a sampler gives, without what is skipped, and of its length."""

    def __init__(self, sampler: Any, keys: Iterator[Any] = iter(())) -> None:  # noqa: B008  (it is empty)
        self._sampler, self.next = sampler, keys

    def __iter__(self) -> Iterator[Any]:
        return self.next

    def __len__(self) -> int:
        return len(self._sampler)


class _StandIn:
    """Holds a dataset, and is that dataset to all who ask for or set its attributes, such as a worker's set-up."""

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


class _SeededDataset(_StandIn, Dataset[Any]):
    """A dataset whose process is seeded once for each batch that it loads, by the key beside the batch's indices.

    What a ``collate_fn`` draws follows on what the samples have drawn. Seeding takes longer than to load many a sample,
    and a run resumes between batches only.
    """

    def __getitem__(self, batch: tuple[int, Any]) -> Any:
        """Load what a loader without automatic batching asks for."""
        key, index = batch
        seed_globals(key)
        return self._dataset[index]

    def __getitems__(self, batch: tuple[int, Any]) -> Any:
        """Load a batch as torch's loader does."""
        key, indices = batch
        seed_globals(key)
        dataset = self._dataset
        load = getattr(dataset, "__getitems__", None)
        return load(indices) if load else [dataset[index] for index in indices]


class _SeededStream(_StandIn, IterableDataset[Any]):
    """A stream whose process is seeded once for each batch, by (seed, epoch, worker, place of the worker's batch)."""

    def __init__(self, dataset: Any, seed: int, batch_size: int | None) -> None:
        super().__init__(dataset)
        self.__dict__.update(_seed=seed, _batch_size=batch_size or 1)

    def begin(self, epoch: int) -> None:
        """Count from an epoch on; workers that outlive it count by themselves."""
        self.__dict__.update(_epoch=epoch, _times=0)

    def __iter__(self) -> Iterator[Any]:
        worker = get_worker_info()
        epoch = self.__dict__["_epoch"] + self.__dict__["_times"]
        self.__dict__["_times"] += 1
        key = _first_key(self._seed, epoch, "worker", 0 if worker is None else worker.id)
        return _seeded(lambda: iter(self._dataset), key, every=self._batch_size)
