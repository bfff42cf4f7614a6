"""The order of batches that ``Batches`` iterates over, and those of loaders that are not torch's ``DataLoader``.

:class:`DataOrder` states what an order has to offer, and is that of a list of batches. :class:`StatefulOrder` owns the
state of a loader that saves itself. ``data/order.py`` contains those of ``DataLoader``, and chooses one for a loader.
"""

from __future__ import annotations

import copy
import itertools
from types import GeneratorType
from typing import TYPE_CHECKING, Any

from composer.checkpoint.contents import SavedObjects, SavedPlace
from composer.core.data_spec import length_of
from composer.core.serialization import equal, plain
from composer.distributed import ScheduledBatchSampler
from composer.distributed.samplers import END, set_epoch
from composer.trainer.data.seeding import seeded_batches
from composer.trainer.resume.contract import load_objects, save_objects

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from composer.core import Batch, Timestamp

__all__ = ["OWN_STATES", "DataOrder", "OpaqueOrder", "StatefulOrder"]

OWN_STATES = ("before", "generators")
"""The names in ``SavedPlace.objects.states`` that :class:`StatefulOrder` saves; the others are objects of the user."""


class DataOrder:
    """Iterates over any epoch of a loader, from any place on; here of a list of batches.

    An order keeps no count: it is called with epoch and place, which ``Batches`` and ``EpochPosition`` have. A place is
    a number of batches. Only with a ``DistributedSampler``, which gives each process a part of one order, is it the
    number of samples before it in this order; it is then the same for any number of processes.

    Args:
        loader: The loader.
        seed: The run's seed, from which all seeds are derived.

    Attributes:
        skips: Whether an epoch can start in its middle without loading the batches before.
        place_distance: The distance between the places of two batches.
        usual_samples: The number of samples in nearly all batches of this process; None if it is not known.
        is_exact: Whether every batch that ends before the data does certainly has ``usual_samples`` in each process.
        global_batch_size: The number of samples in a batch of all processes, if a place is a number of samples;
            otherwise None.
        is_scheduled: Whether a place is a number of batches of all processes, whose sizes depend on the clock.
        as_sampler: Whether a ``DistributedSampler`` gives its own order, without the run's seed.
        has_ended: Whether the last iteration, or none yet, has reached the end of the data.
        last_requests: The numbers of requests that may end an epoch: that for the last batch of a subset, and the
            number of batches that the loader announces, as this request finds the end. ``Batches`` sets them.

    Example:
        >>> order = DataOrder([1, 2, 3], seed=17)
        >>> list(order.begin(epoch=0, place=1)), order.end(place=1)
        ([2, 3], 3)
    """

    skips = True
    place_distance = 1
    usual_samples: int | None = None
    is_exact = False
    global_batch_size: int | None = None
    is_scheduled = False
    as_sampler = False
    has_ended = True
    last_requests: tuple[float, ...] = ()

    def __init__(self, loader: Iterable[Batch], seed: int) -> None:
        self.loader, self.seed = loader, seed

    def begin(self, epoch: int, place: int = 0) -> Iterator[Batch]:
        """Return the batches of an epoch from a place on."""
        del epoch
        return iter(itertools.islice(self.loader, place, None)) if place else iter(self.loader)

    def end(self, place: int) -> int | None:
        """Return the place where an epoch that passes ``place`` ends; None if only the loader can show it."""
        del place
        return length_of(self.loader) if self.skips else None

    def rewind(self, clock: Timestamp) -> None:
        """Forget the order of an epoch, as another one begins, at a time of the training."""

    def save(self, *, in_epoch: bool) -> tuple[Any, dict[str, Any]]:
        """Return the state of a loader that saves itself, and more states by name; else None and nothing."""
        del in_epoch
        return None, {}

    def close(self) -> None:
        """Stop the workers that the order has started."""

    def fingerprint(self, place: int) -> str | None:
        """Return a digest of the current epoch's order up to a place if it may differ in a resumed run; else None."""
        del place
        return None

    def sizes(self) -> dict[str, int]:
        """Return the known sizes on which the contents of the batches depend.

        Example:
            >>> from torch.utils.data import DataLoader
            >>> DataOrder(DataLoader(range(10), batch_size=4), seed=17).sizes()
            {'samples a batch': 4, 'samples': 10}
        """
        loader: Any = self.loader
        size = getattr(loader, "batch_size", None) or getattr(getattr(loader, "batch_sampler", None), "batch_size", 0)
        dataset: Any = getattr(loader, "dataset", None)
        found = {"samples a batch": size, "samples": length_of(dataset)}
        return {name: number for name, number in found.items() if type(number) is int and number}


class OpaqueOrder(DataOrder):
    """An iterable of unknown type."""

    skips = False
    loader: Any

    def __init__(self, loader: Iterable[Batch], seed: int) -> None:
        if isinstance(getattr(loader, "batch_sampler", None), ScheduledBatchSampler):
            raise TypeError(
                f"A ScheduledBatchSampler requires the clock, which a {type(loader).__name__} would not give it: use "
                "torch.utils.data.DataLoader, which resumes exactly, too."
            )
        super().__init__(loader, seed)

    def begin(self, epoch: int, place: int = 0) -> Iterator[Batch]:
        """Return the batches from a place on; those before it are loaded."""
        set_epoch(self.loader, epoch)
        return itertools.islice(seeded_batches(lambda: iter(self.loader), self.seed, epoch), place, None)


class StatefulOrder(OpaqueOrder):
    """A loader that saves its own state, with the life of that state: what is saved of it, and how it resumes.

    A loaded state takes effect when the loader is iterated over, and it depends on the loader whether it then continues
    or first ends. A resumed run therefore repeats the last requests for a batch, from the state before them:

    - Those that ended an epoch, before it begins the next one. A loader may count its epochs with the last of them; if
      its iterator is no generator, and its announced length is missing or wrong, it then counts this one twice.
    - The last ones in an epoch, if the loader's ``__iter__`` is a generator function. The start of the function runs
      with the first batch, and what it draws would change the draws of the batch to continue with.

    ================  =============================  =======================================
    saved             ``SavedPlace.loader``          ``SavedPlace.objects.states["before"]``
    ================  =============================  =======================================
    within an epoch   the present state              all of ``_before``, if not empty
    between epochs    ``_before["state"]``           ``_before`` without ``state``
    nothing repeated  the present state              missing
    ================  =============================  =======================================

    Generators of the loader and its samplers have their states at the start of the epoch when it is iterated over, and
    then those that were saved, unless the loader restores them itself.

    Attributes:
        _loaded: The saved place, from :meth:`load` until the loader is iterated over.
        _before: What a resumed run repeats: requests for batches, and the state before them. Empty if nothing is.
            ``state`` and ``generators`` are those before the first of these requests, ``epoch`` and ``number`` its
            epoch and number. Without a number, ``state`` is that at the start of the first epoch, or at the end of the
            epoch before a load. ``requests`` counts them, and ``has_ended`` is whether the last found the end of the
            data. Before the first request of an epoch of a generator function, these are still the requests that ended
            the former epoch: place 1 is resumed by beginning the epoch again.
        _at_start: The states of the generators at the start of the epoch.
    """

    def __init__(self, loader: Iterable[Batch], seed: int) -> None:
        super().__init__(loader, seed)
        self._loaded: SavedPlace | None = None
        self._before: dict[str, Any] = {}
        parts = {name: getattr(loader, name, None) for name in ("batch_sampler", "sampler")}
        self._parts = {"loader": loader, **{name: one for name, one in parts.items() if one is not None}}
        self._at_start = self._generators()

    def save(self, *, in_epoch: bool) -> tuple[Any, dict[str, Any]]:
        """Return the state of the loader, and what a resumed run needs besides; ``load`` gets both."""
        if self._loaded is not None:
            return self._loaded.loader, self._loaded.objects.states
        states: dict[str, Any] = {}
        if now := self._generators():
            states["generators"] = {"start": self._at_start if in_epoch else now, "now": now}
        if not self._before:
            return self._copied_state(), states
        before = dict(self._before)
        if in_epoch:
            return self._copied_state(), {"before": before, **states}
        state = before.pop("state")  # begin() inserts it again
        return state, {"before": before, **states}

    def load(self, saved: SavedPlace) -> None:
        """Load a state into the loader; the next call of :meth:`begin` continues from it."""
        load_objects(SavedObjects({"train_dataloader": saved.loader}), {"train_dataloader": self.loader})
        self._loaded = saved

    def begin(self, epoch: int, place: int = 0) -> Iterator[Batch]:
        """Return the batches from a place on, which is 0 or that of the loaded state."""
        set_epoch(self.loader, epoch)
        saved, self._loaded = self._loaded, None
        if saved is None:
            self._at_start = self._generators()
            return self._iterate(epoch)
        before = saved.objects.states.get("before", {})
        generators = saved.objects.states.get("generators", {})
        now = generators.get("now", {})
        # Another epoch begins with the states that were saved, also if this process had ended before the others.
        self._at_start = generators.get("start", {}) if place else now
        if not place:  # between epochs: repeat what ended the former one
            return self._next_epoch(epoch, {"state": saved.loader, "generators": now, **before})
        if before:  # within an epoch of a generator function: repeat from the last copy
            # The function's start draws as in the uninterrupted run, where it ran with the first request, of number 0.
            batches = self._next_epoch(epoch, before) if place == 1 else self._repeat(before, seed=0)[0]
            if place == 1:
                next(batches, None)
            # Only if this has reached the saved state; otherwise the loader's own state decides.
            if equal(plain(self.loader.state_dict(), mappings=True), saved.loader):
                self._set(now)
                return batches
        self._load(saved.loader, now)  # again, if the state depends on draws
        at_place = {"state": saved.loader, "generators": now, "epoch": epoch, "number": place, "requests": 0}
        return self._iterate(epoch, at_place, place)

    def _next_epoch(self, epoch: int, before: dict[str, Any]) -> Iterator[Batch]:
        """Return the batches of an epoch, from a state before requests of the one before, or from that after them."""
        if "number" in before:
            last = self._repeat(before)[1]
            if (last is END) is not before.get("has_ended", False):
                # A batch came where the run got the end, or the reverse: the state alone begins the next epoch.
                self.loader.load_state_dict(before["state"])
        else:
            self._load(before["state"], before.get("generators", {}))
            batches = self._iterate(epoch, before)
            first = next(batches, END)
            if first is not END:  # it has begun the epoch
                return itertools.chain([first], batches)
        self._set(self._at_start)
        return self._iterate(epoch, before)

    def _repeat(self, before: dict[str, Any], seed: int | None = None) -> tuple[Iterator[Batch], Batch]:
        """Repeat requests from the state before them; return the iterator, and what it has returned last."""
        self._load(before["state"], before.get("generators", {}))
        batches, last = self._iterate(before["epoch"], before, before["number"], seed), END
        for _ in range(before["requests"]):
            last = next(batches, END)
        return batches, last

    def _iterate(self, epoch: int, before: Any = None, number: int = 0, seed: int | None = None) -> Iterator[Batch]:
        """Iterate from the batch with a number on, which is also the number of its seed unless that is given."""
        seeds = itertools.chain([number if seed is None else seed], itertools.count(number + 1))
        return seeded_batches(lambda: self._open(before, epoch, number), self.seed, epoch, seeds)

    def _open(self, before: Any, epoch: int, number: int) -> Iterator[Batch]:
        """Iterate over the loader; ``before`` is the state that it begins with, if it is not its present one."""
        former = self._generators()
        batches = iter(self.loader)
        if not isinstance(batches, GeneratorType):
            if before and number:
                self._set(before.get("generators", {}))
            return self._follow(batches, {}, epoch, number, copies=False)
        if not before:
            before = self._before or {"state": self._copied_state(), "generators": former}
        return self._follow(batches, before, epoch, number, copies=True)

    def _follow(
        self, batches: Iterator[Batch], before: dict[str, Any], epoch: int, first: int, *, copies: bool
    ) -> Iterator[Batch]:
        """Yield the batches, and keep the state before some of them, or only before the last request."""
        self.has_ended = False
        for number in itertools.count(first):
            is_copied = (copies and number % _COPY_EVERY == 1) or number in self.last_requests
            if is_copied:
                state, generators = self._copied_state(), self._generators()
                before = {"state": state, "generators": generators, "epoch": epoch, "number": number, "requests": 0}
            if before and (number or is_copied):  # without a copy, those at number 0 belong to the former epoch
                before = {**before, "requests": before.get("requests", 0) + 1}
            batch = next(batches, END)
            if batch is END:
                self.has_ended = True
                self._before = {**before, "has_ended": True} if before else {}
                return
            self._before = before
            yield batch
            if not copies:
                before = {}

    def _generators(self) -> dict[str, Any]:
        """Return the states of the generators that are attributes of the loader or of its samplers."""
        return save_objects({}, self._parts).generators

    def _set(self, generators: dict[str, Any]) -> None:
        load_objects(SavedObjects({}, generators), {}, self._parts)

    def _load(self, state: Any, generators: dict[str, Any]) -> None:
        """Load a state, and the generators' states at the start of the epoch, unless the loader restores its own."""
        self.loader.load_state_dict(state)
        if not equal(self._generators(), generators):
            self._set(self._at_start)

    def _copied_state(self) -> Any:
        """Return a copy of the loader's state, because a loader may change it in place."""
        return _copied(self.loader.state_dict())


_COPY_EVERY = 8
"""Of how many batches one is preceded by a copy of the state, from which a resumed run repeats the others: a checkpoint
can be saved after any step, by ``Trainer.save_checkpoint`` too."""

_ATOMS = frozenset((bool, int, float, str, bytes, type(None)))


def _copied(value: Any) -> Any:
    """Return a deep copy; of long lists of numbers in a tenth of the time, as a state is copied often."""
    if type(value) is dict:
        return {name: _copied(one) for name, one in value.items()}
    is_flat = type(value) is list and _ATOMS.issuperset(map(type, value))
    return value.copy() if is_flat else copy.deepcopy(value)
