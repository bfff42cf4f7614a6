"""Order and randomness of the data: they depend only on seed and epoch, for any number of workers.

Each type of loader has a :class:`DataOrder`, which iterates over any epoch from any place on; :func:`make_order`
chooses it. It is created with its ``Batches``, and changes a copy of a ``DataLoader``, not the user's. Evaluations and
``find_lr`` iterate over their data with it, too.

All draws depend on the run's seed, the epoch, and the seed of the loader's generator, if it has one. Besides,

- the order of a map-style data set depends on the generators of its samplers, and not on the rank where processes share
  one order (:func:`shares_order`);
- draws while a batch is loaded depend on the rank and on the place of the batch, or its number in a stream.

Copies of torch's samplers draw from a seeded generator. An unknown sampler may draw from any: it is read at once, with
the global generators seeded, and a digest of its keys shows later whether a resumed run has the same order.
"""

from __future__ import annotations

import copy
import hashlib
import itertools
import operator
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, default_collate, default_convert

from composer.checkpoint.contents import SavedObjects
from composer.core.data.spec import length_of
from composer.core.saving.randomness import derive_seed, preserve_rng_state, seed_globals
from composer.distributed import get_world_size, samplers
from composer.distributed.environment import get_data_rank
from composer.functional.datasets import by_epoch
from composer.trainer.data import seeding, workers
from composer.trainer.data.objects import create_generators, has_state, load_objects, save_objects, takes_position

if TYPE_CHECKING:
    from collections.abc import Iterable

    from composer.core import Batch


def make_order(loader: Iterable[Batch], seed: int) -> DataOrder:
    """Return the order of a loader, depending on its type.

    - A loader with ``state_dict`` and ``load_state_dict`` stores its position itself.
    - A ``DataLoader`` is copied: its sampler is seeded by (seed, epoch), its dataset and ``collate_fn`` by
      (seed, rank, epoch, number of the batch).
    - A list of batches is used as it is.
    - Other loaders are iterated over, with the global generators seeded for each batch.

    Args:
        loader: The loader.
        seed: The run's seed.

    Example:
        >>> order = make_order([1, 2, 3], seed=17)
        >>> list(order.begin(epoch=0, place=1))
        [2, 3]
    """
    if has_state(loader):
        return StatefulOrder(loader, seed)
    # A subclass with its own __iter__ may use the sampler in any way, or not at all.
    if not isinstance(loader, DataLoader) or type(loader).__iter__ is not DataLoader.__iter__:
        return ListOrder(loader, seed) if isinstance(loader, (list, tuple, Tensor)) else OpaqueOrder(loader, seed)
    if isinstance(loader.dataset, IterableDataset):
        return StreamOrder(loader, seed)
    _, sampler = _sampler_of(loader)
    # Batch samplers of other types choose themselves, so that a place in the shared order is no number of samples.
    takes_all = type(sampler) is BatchSampler or not hasattr(sampler, "sampler")
    return SharedOrder(loader, seed) if takes_all and shares_order(sampler) else IndexedOrder(loader, seed)


class DataOrder:
    """Iterates over any epoch of a loader, from any place on.

    It is called with the epoch and the place, which ``Batches`` and ``EpochPosition`` count. A place is a number of
    batches. Only with a ``DistributedSampler``, which gives each process a part of one order, is it the number of
    samples before it in this order; it is then the same for any number of processes.

    Args:
        loader: The loader.
        seed: The run's seed, from which all seeds are derived.

    Attributes:
        skips: Whether an epoch can start in its middle without loading the batches before.
        saves_itself: Whether the loader saves its own state, so that :meth:`save` and :meth:`load` are of use.
        place_distance: The distance between the places of two batches.
        usual_samples: The number of samples in nearly all batches of this process; None if it is not known.
        global_batch_size: The number of samples in a batch of all processes, if a place is a number of samples;
            otherwise None.
        as_sampler: Whether a ``DistributedSampler`` gives its own order, without the run's seed, as in MosaicML
            Composer; from the saved place.
    """

    skips = True
    saves_itself = False
    place_distance = 1
    usual_samples: int | None = None
    global_batch_size: int | None = None
    as_sampler = False

    def __init__(self, loader: Iterable[Batch], seed: int) -> None:
        self.loader, self.seed = loader, seed

    def begin(self, epoch: int, place: int = 0) -> Iterator[Batch]:
        """Return the batches of an epoch from a place on."""
        raise NotImplementedError(f"{type(self).__name__} must define begin.")

    def end(self, place: int) -> int | None:
        """Return the place where an epoch that passes ``place`` ends; None if only the loader can show it."""

    def rewind(self) -> None:
        """Forget the order of an epoch, as another one begins now, or one continues at a saved place."""

    def save(self, *, in_epoch: bool) -> Any:
        """Return what a loader that saves itself continues from; else None."""

    def load(self, saved: Any) -> None:
        """Let the next call of :meth:`begin` continue where :meth:`save` was called."""

    def close(self) -> None:
        """Stop the workers that the order has started."""

    def fingerprint(self, place: int) -> str | None:
        """Return a digest of the current epoch's order up to a place if it may differ in a resumed run; else None."""

    def sizes(self) -> dict[str, int]:
        """Return the known sizes on which the contents of the batches depend.

        Example:
            >>> make_order(DataLoader(range(10), batch_size=4), seed=17).sizes()
            {'samples a batch': 4, 'samples': 10}
        """
        loader: Any = self.loader
        size = getattr(loader, "batch_size", None) or getattr(getattr(loader, "batch_sampler", None), "batch_size", 0)
        sizes = {"samples a batch": size, "samples": length_of(getattr(loader, "dataset", None))}
        return {name: number for name, number in sizes.items() if type(number) is int and number}


class ListOrder(DataOrder):
    """A list of batches.

    Example:
        >>> order = ListOrder([1, 2, 3], seed=17)
        >>> list(order.begin(epoch=0, place=1)), order.end(place=1)
        ([2, 3], 3)
    """

    def begin(self, epoch: int, place: int = 0) -> Iterator[Batch]:
        """Return the batches from a place on, the same in each epoch."""
        del epoch
        return itertools.islice(self.loader, place, None)

    def end(self, place: int) -> int | None:
        """Return the number of batches."""
        del place
        return length_of(self.loader)


class OpaqueOrder(DataOrder):
    """An iterable of unknown type."""

    skips = False
    loader: Any

    def __init__(self, loader: Iterable[Batch], seed: int) -> None:
        super().__init__(loader, seeding.seed_of_rank(seed))

    def begin(self, epoch: int, place: int = 0) -> Iterator[Batch]:
        """Return the batches from a place on; those before it are loaded."""
        samplers.set_epoch(self.loader, epoch)
        return itertools.islice(
            seeding.seeded_batches(lambda: workers.iterate(self.loader), self.seed, epoch), place, None
        )


class StatefulOrder(OpaqueOrder):
    """A loader that saves its own state, such as torchdata's ``StatefulDataLoader``.

    A resumed run loads the state and iterates over the loader, which continues where the state was saved; that this is
    exact is the promise of the loader. Random draws outside of its state are seeded for each batch.

    Random generators that are attributes of the loader or of its samplers are saved separately, as its state may not
    contain them. They get their states at the start of the epoch before the loader is iterated over, because it may
    draw the order then, and those at the place where the run stopped before the next batch is requested.

    An epoch that is a part of the data leaves its iterator before the end. Some loaders then begin the next epoch at
    their start and, when they have loaded the same state, where the iterator was left. So a resumed run leaves an
    iterator, too.

    Attributes:
        _loaded: What :meth:`load` got, until the loader is iterated over; in a process without further batches in this
            epoch, until the next one begins.
        _left: Whether the last iterator has not reached its end.
        _at_start: The states of the random generators at the start of the epoch.
    """

    saves_itself = True

    def __init__(self, loader: Iterable[Batch], seed: int) -> None:
        super().__init__(loader, seed)
        self._loaded: dict[str, Any] | None = None
        self._left = False
        names = ("batch_sampler", "sampler", "dataset", "collate_fn")
        self._parts = {"loader": loader, **{name: getattr(loader, name, None) for name in names}}
        self._at_start = self._generators()

    def save(self, *, in_epoch: bool) -> dict[str, Any]:
        """Return the state of the loader, whether an iterator was left, and the states of its generators.

        Raises:
            NotSerializableError: The state contains something that is neither data nor a tensor.
        """
        if self._loaded is not None:
            return self._loaded
        now = self._generators()
        state = save_objects({"train_dataloader": self.loader}).states["train_dataloader"]
        return {"state": state, "left": self._left, "at_start": self._at_start if in_epoch else now, "now": now}

    def load(self, saved: dict[str, Any]) -> None:
        """Load what was saved, where the next call of :meth:`begin` continues.

        Until then, :meth:`save` returns it, as some loaders need to be iterated over before they save a loaded state.
        """
        self._load_state(saved["state"])
        self._loaded = saved

    def begin(self, epoch: int, place: int = 0) -> Iterator[Batch]:
        """Return the batches of an epoch from a place on, which is 0 or that of the loaded state.

        At the start of an epoch, its first batch is loaded now.
        """
        loaded, self._loaded = self._loaded, None
        samplers.set_epoch(self.loader, epoch)
        if loaded is not None:
            # At the end of the data, the first iterator has no batch.
            both = itertools.chain(self._iterate(epoch), self._iterate(epoch))
            create_generators(loaded["now"], self._parts, lambda: next(both, samplers.NO_BATCH))
            self._at_start = loaded["at_start"]
            self._set_generators(self._at_start)  # before the state of the loader, which may contain them, too
            self._load_state(loaded["state"])
            if place:
                return self._iterate(epoch, place, loaded["now"])
            if loaded["left"]:
                next(self._iterate(epoch), samplers.NO_BATCH)  # its iterator may be a generator, which a request begins
                self._set_generators(loaded["now"])
        self._at_start = self._generators()
        batches = self._iterate(epoch)
        if (first := next(batches, samplers.NO_BATCH)) is not samplers.NO_BATCH:
            return itertools.chain([first], batches)
        # The former epoch ended at the end of the data, where the first iterator of some loaders has no batch.
        self._set_generators(self._at_start)
        return self._iterate(epoch)

    def _iterate(self, epoch: int, place: int = 0, generators: dict[str, Any] | None = None) -> Iterator[Batch]:
        """Yield the batches of a new iterator from a place on; generators get these states when it is open."""

        def open_loader() -> Iterator[Batch]:
            batches = workers.iterate(self.loader)
            self._set_generators(generators or {})
            return batches

        self._left = True
        yield from seeding.seeded_batches(open_loader, self.seed, epoch, itertools.count(place))
        self._left = False

    def _load_state(self, state: Any) -> None:
        state = copy.deepcopy(state)  # which a loader may change in place
        load_objects(SavedObjects({"train_dataloader": state}), {"train_dataloader": self.loader})

    def _generators(self) -> dict[str, Any]:
        """Return the states of the random generators that are attributes of the loader or of its samplers."""
        return save_objects({}, self._parts).generators

    def _set_generators(self, states: dict[str, Any]) -> None:
        load_objects(SavedObjects({}, states), {}, self._parts)


def shares_order(sampler: Any) -> bool:
    """Return whether processes share the order that a sampler draws, and so draw it with one seed.

    Example:
        >>> shares_order(samplers.get_sampler(range(4))), shares_order(torch.utils.data.SequentialSampler(range(4)))
        (True, False)
    """
    return samplers.is_plain_distributed(getattr(sampler, "sampler", sampler))  # that of a batch sampler


def _sampler_of(loader: DataLoader[Any]) -> tuple[str, Any]:
    """Return the sampler of a loader's indices, or of its batches of indices, and the name of its attribute."""
    name = "sampler" if loader.batch_sampler is None else "batch_sampler"
    return name, getattr(loader, name)


class _CopiedOrder(DataOrder):
    """A copy of a ``DataLoader``, so that the user's own does not change and draws nothing from global generators.

    Attributes:
        loader: The copy.
        _given: The user's own.
        _is_plain: Whether loading a batch is certain to draw nothing, so that no generator has to be seeded for it.
    """

    loader: DataLoader[Any]

    def __init__(self, loader: DataLoader[Any], seed: int) -> None:
        generator, copied, self._given = loader.generator, copy.copy(loader), loader
        super().__init__(copied, seed if generator is None else derive_seed(seed, generator.initial_seed()))
        # A loader with persistent workers keeps its iterator, which the copy must not share.
        copied.__dict__["_iterator"] = None
        copied.generator = torch.Generator()
        # With a batch size of 1, a sample is often a complete batch of unknown size, which collate_fn takes out.
        if loader.batch_size is not None and (loader.batch_size > 1 or loader.collate_fn is default_collate):
            self.usual_samples = loader.batch_size
        draws_nothing = loader.collate_fn in (default_collate, default_convert)
        self._is_plain = draws_nothing and seeding.draws_nothing(loader.dataset)

    def close(self) -> None:
        """Stop the workers that the order has started."""
        self.loader.__dict__["_iterator"] = None

    def _set_epoch(self, epoch: int) -> None:
        samplers.set_epoch(self._given, epoch)
        if by_epoch(self._given.dataset):
            self.close()  # persistent workers have copies of the data set, which stay in the earlier epoch

    def _iterate(self, epoch: int) -> Iterator[Batch]:
        assert self.loader.generator is not None
        self.loader.generator.manual_seed(derive_seed(self.seed, "loader", epoch))
        # Workers have global generators of their own, and such data draws nothing.
        if self.loader.num_workers or self._is_plain:
            # Workers begin with the first batch, as states of the data set, which they copy, may be restored before.
            return itertools.chain.from_iterable(map(workers.iterate, [self.loader]))
        return seeding.restoring_torch_rng(lambda: iter(self.loader))


class IndexedOrder(_CopiedOrder):
    """A ``DataLoader`` of a map-style dataset: skipped batches are skipped among the keys of its sampler.

    The copy's sampler is replaced by ``_keys``, whose keys :meth:`begin` sets for each epoch: those of the user's
    sampler, each with the seed of its batch unless nothing is drawn. This seed is that of the epoch plus the place of
    the batch, whichever worker loads it and wherever the epoch continues.

    Attributes:
        _sampler: The user's own, of indices or of batches of indices.
        _drawn: The keys of the current epoch, if the type of the sampler is unknown and they have an end.
        _loads_here: Whether batches are loaded without torch's loader, as it has no workers, pinned memory or subclass.
    """

    _drawn: list[Any] | None = None

    def __init__(self, loader: DataLoader[Any], seed: int) -> None:
        super().__init__(loader, seed)
        name, self._sampler = _sampler_of(loader)
        self._order_seed = seed if shares_order(self._sampler) else self.seed
        # In __dict__, because DataLoader.__setattr__ rejects another sampler or data set.
        # Persistent workers use the same object in the next epoch.
        self._keys = self.loader.__dict__[name] = _Keys(self._sampler)
        self._loads_here = not (loader.num_workers or loader.pin_memory) and type(loader) is DataLoader
        if self._is_plain or self._loads_here:
            return
        source = seeding.SeededDataset(loader.dataset)
        if loader.num_workers:
            source = seeding.WorkerDataset(loader.dataset, loader.collate_fn)
            self.loader.__dict__["collate_fn"] = _same
        self.loader.__dict__["dataset"] = source

    def begin(self, epoch: int, place: int = 0) -> Iterator[Batch]:
        """Return the epoch's batches from a place on, without loading those before it."""
        self._set_epoch(epoch)
        keys = self._keys_from(epoch, place)
        if not self._is_plain:
            first = seeding.seed_of_first_batch(self.seed, get_data_rank(), epoch) + place
            keys = zip(itertools.count(first, self.place_distance), keys)
        self._keys.next = keys
        return self._iterate(epoch)

    def _keys_from(self, epoch: int, place: int) -> Iterator[Any]:
        """Return the keys of the epoch's batches from a place on."""
        seeds = [own.initial_seed() for own in _generators_of(self._sampler) if own is not self._given.generator]
        seed = derive_seed(self._order_seed, *seeds) if seeds else self._order_seed
        drawn = _keys_of_epoch(self._sampler, seed, epoch)
        if not _is_known(self._sampler) and length_of(drawn) is not None:  # it may draw others in a resumed run
            drawn = self._drawn = list(drawn)
        keys = iter(drawn)
        next(itertools.islice(keys, place, place), None)  # takes those before the place, and none after
        return keys

    def end(self, place: int) -> int | None:
        """Return the number of batches; that of an unknown sampler is known when the epoch has begun."""
        del place
        if self._drawn is not None:
            return len(self._drawn)
        return len(self._sampler) if _is_known(self._sampler) else None

    def rewind(self) -> None:
        """Forget the order of an epoch."""
        self._drawn = None

    def fingerprint(self, place: int) -> str | None:
        """Return a digest of the epoch's keys before a place if the type of the sampler is unknown."""
        if not self._drawn or not place:
            return None
        before = self._drawn[max(0, place - _COMPARED_KEYS) : place]  # all of them would take long in each save
        return hashlib.blake2b(repr(before).encode(), digest_size=8).hexdigest()

    def _iterate(self, epoch: int) -> Iterator[Batch]:
        if not self._loads_here:
            return super()._iterate(epoch)
        # As torch's loader does, without the range that it records for profilers, which takes as long as seeding.
        if not self._is_plain:
            return seeding.seeded_loads(self.loader, self._keys.next)
        dataset, collate = self.loader.dataset, self.loader.collate_fn
        load = operator.getitem if self.loader.batch_sampler is None else seeding.items
        return (collate(load(dataset, key)) for key in self._keys.next)


class SharedOrder(IndexedOrder):
    """A ``DataLoader`` with a ``DistributedSampler``: places are samples of the order that all processes share.

    Ten samples, of which each of two processes takes two in a batch, have batches at the places 0, 4 and 8. Rank 0 gets
    the samples at ``[0, 2]``, ``[4, 6]`` and ``[8]``, rank 1 those between. Three processes that continue at place 4
    split the rest from there: rank 0 gets ``[4, 7]``, rank 1 ``[5, 8]``, rank 2 ``[6, 9]``.

    Example:
        >>> from composer.distributed import get_sampler
        >>> sampler = get_sampler(range(10), num_replicas=3, rank=2)
        >>> order = make_order(DataLoader(range(10), batch_size=2, sampler=sampler), seed=17)
        >>> list(order.begin(epoch=0, place=4)), order.end(place=4)
        ([tensor([6, 9])], 10)
    """

    def __init__(self, loader: DataLoader[Any], seed: int) -> None:
        super().__init__(loader, seed)
        is_batched = type(self._sampler) is BatchSampler
        self._distributed: Any = self._sampler.sampler if is_batched else self._sampler
        self.place_distance = (self._sampler.batch_size if is_batched else 1) * self._distributed.num_replicas
        self.global_batch_size = self.place_distance

    def end(self, place: int) -> int:
        """Return the place after the last sample that neither the sampler nor the batch sampler drops."""
        sampler, end = self._distributed, len(self._distributed.dataset)
        if sampler.drop_last:
            end -= end % sampler.num_replicas
        drops = sampler is not self._sampler and self._sampler.drop_last
        return end - max(0, end - place) % self.place_distance if drops else end

    def _keys_from(self, epoch: int, place: int) -> Iterator[Any]:
        """Return the keys of this process: those at the places ``place + rank :: num_replicas`` of the order.

        If the last ones are fewer than the processes, the others get one of the first, which only keeps them in step.
        """
        sampler: Any = self._distributed
        # It is split from ``place`` on and not from its start, so that another number of processes continues with
        # exactly the samples that are left.
        order = _shared_order_of(sampler, None if self.as_sampler else self._order_seed, epoch)
        left = max(0, self.end(place) - place)
        part = order[place + sampler.rank : place + left : sampler.num_replicas]
        if len(part) * sampler.num_replicas < left:
            part.append(order[(sampler.rank - left % sampler.num_replicas) % len(order)])
        if sampler is self._sampler:
            return iter(part)
        batches = copy.copy(self._sampler)
        batches.sampler = part
        return samplers.real_indices(iter(batches), samplers.num_real_samples(left, sampler.num_replicas, sampler.rank))


class StreamOrder(_CopiedOrder):
    """A ``DataLoader`` of an ``IterableDataset``, which is iterated over from its beginning.

    A ``StreamingDataset`` of mosaicml-streaming, which has an order for each epoch, begins at any place.
    """

    def __init__(self, loader: DataLoader[Any], seed: int) -> None:
        super().__init__(loader, seeding.seed_of_rank(seed))
        self._next_epoch = 0
        self.skips = takes_position(loader.dataset) and loader.batch_size is not None
        self._stream = seeding.SeededStream(loader, self.seed, seed, skips=self.skips)
        self.loader.__dict__.update(dataset=self._stream, batch_sampler=None, collate_fn=_same)

    def sizes(self) -> dict[str, int]:
        """Return the known sizes, and the number of workers, over which streams are usually split."""
        return {**super().sizes(), "workers": max(1, self.loader.num_workers)}

    def begin(self, epoch: int, place: int = 0) -> Iterator[Batch]:
        """Return the epoch's batches from a place on; those before it are loaded and discarded, if it cannot skip."""
        self._set_epoch(epoch)
        if epoch != self._next_epoch:  # persistent workers count epochs themselves
            self.close()
        if self.skips and (place or epoch != self._next_epoch):
            dataset: Any = self._given.dataset
            ranks = get_world_size() // (getattr(dataset, "replication", None) or 1)
            size, length = self.loader.batch_size or 1, len(dataset)
            # The last batch of an epoch may have fewer samples; a place behind it is one of a stream that is longer.
            samples = length if length < place * size < length + size else place * size
            dataset.load_state_dict({**dataset.state_dict(samples * ranks, from_beginning=True), "epoch": epoch})
        self._next_epoch = epoch + 1
        self._stream.begin(epoch, place if self.skips else 0)
        return itertools.islice(self._iterate(epoch), 0 if self.skips else place, None)


# A sampler without a length, or with at least this one, is treated as endless: its order cannot be drawn in advance.
_ENDLESS = 2**62
_COMPARED_KEYS = 1000
"""How many of the last keys before a place show whether a sampler has drawn the same order again."""


def _same(batch: Batch) -> Batch:
    return batch


def _is_known(sampler: Any) -> bool:
    """Return whether a sampler is of torch or of this library: its length is exact, and a copy draws its order."""
    if type(sampler) is BatchSampler:
        return _is_known(sampler.sampler)
    return type(sampler) in samplers.ORDERED_BY_SEED


def _generators_of(sampler: Any) -> list[torch.Generator]:
    """Return the generators of a sampler and of the samplers in it."""
    generators = [getattr(part, "generator", None) for part in samplers.with_samplers(sampler)]
    return [generator for generator in generators if isinstance(generator, torch.Generator)]


def _keys_of_epoch(sampler: Any, seed: int, epoch: int) -> Iterable[Any]:
    """Return a sampler's keys for an epoch, which have a length unless there is no end."""
    order_seed = derive_seed(seed, "order", epoch)
    if _is_known(sampler) or type(sampler) is BatchSampler:
        drawing = copy.copy(sampler)
        if type(sampler) is BatchSampler:
            drawing.sampler = _keys_of_epoch(sampler.sampler, seed, epoch)
        else:
            drawing.generator = torch.Generator().manual_seed(order_seed)
        return drawing  # type: ignore[no-any-return]
    length = length_of(sampler)
    if length is None or length >= _ENDLESS:
        return seeding.seeded_batches(lambda: iter(sampler), seed, epoch)
    # An unknown sampler may draw from any generator: the global ones and its own are seeded, and it is read completely
    # before they are restored.
    generators, most = _generators_of(sampler), 4 * length + _COMPARED_KEYS
    states = [generator.get_state() for generator in generators]
    with preserve_rng_state():
        seed_globals(order_seed)
        for generator in generators:
            generator.manual_seed(order_seed)
        keys = list(itertools.islice(sampler, most))
    for generator, state in zip(generators, states, strict=True):
        generator.set_state(state)
    # One without an end may have the length of its data.
    return keys if len(keys) < most else seeding.seeded_batches(lambda: iter(sampler), seed, epoch)


def _shared_order_of(sampler: Any, seed: int | None, epoch: int) -> list[Any]:
    """Return the order of a ``DistributedSampler`` for an epoch that all processes share, as if there were one.

    Without a seed it is the sampler's own.
    """
    drawing = copy.copy(sampler)
    drawing.epoch = epoch
    if seed is not None:
        drawing.seed, drawing.epoch = derive_seed(derive_seed(seed, "order", epoch), sampler.seed), 0
    drawing.num_replicas, drawing.rank, drawing.drop_last = 1, 0, False
    drawing.num_samples = drawing.total_size = len(sampler.dataset)
    return list(drawing)


class _Keys:
    """The remaining keys of a sampler, with its length."""

    def __init__(self, sampler: Any) -> None:
        self._sampler = sampler
        self.next: Iterator[Any] = iter(())

    def __iter__(self) -> Iterator[Any]:
        return self.next

    def __len__(self) -> int:
        return len(self._sampler)
