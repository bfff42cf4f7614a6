"""The order of a loader that saves its own state, such as torchdata's ``StatefulDataLoader``.

A loader continues when it has loaded its state and is iterated over. Two things can then differ from the run that
stopped:

- A state of the end of an epoch: some loaders begin the next epoch with it, and others end first. One that counts its
  epochs where they end would count this one twice.
- What a generator function draws at its start, such as an order. If the iterator is a generator, its function starts
  with the first request for a batch. The draws would come from the seed of that batch, and change the batch itself.

So :class:`StatefulOrder` also copies the state before some earlier requests: each that may end an epoch and, if the
iterator is a generator, every eighth one. A resumed run loads the last copy, and repeats the requests since then. With
``train_subset_num_batches=11``, these requests are preceded by a copy::

    epoch               0                                   1
    request             0  1  2  3  4  5  6  7  8  9  10    0  1  2
    to a generator      |  |                       |  |        |
    to other iterators                                |

===========================  ===================================  ==============================
the run stopped              requests that a generator repeats    requests that others repeat
===========================  ===================================  ==============================
before request 5 of epoch 0  1 to 4 of epoch 0                    none
between the epochs           10 of epoch 0                        10 of epoch 0
before request 1 of epoch 1  10 of epoch 0, and 0 of epoch 1      none
===========================  ===================================  ==============================

The state at the place where the run stopped is loaded instead, and no request is repeated, if there is no copy, or if
the repeated requests did not lead to this place: within an epoch, if the loader has another state, as one that depends
on the draws of batches; between two epochs, if the last request found the end of the data and did not in the run that
stopped, or the reverse.

Random generators that are attributes of the loader or of its samplers are saved besides, as its state need not contain
them. When the loader is iterated over, they have their states at the start of the epoch, because it may draw the order
then; when the next batch is requested, those at the place where the run stopped.
"""

from __future__ import annotations

import copy
import itertools
import warnings
from types import GeneratorType
from typing import TYPE_CHECKING, Any

import attrs

from composer.checkpoint.contents import SavedObjects
from composer.core.data_spec import length_of
from composer.core.plain_data import equal, plain
from composer.distributed.samplers import END, set_epoch
from composer.trainer.data.iterable_order import OpaqueOrder
from composer.trainer.data.seeding import seeded_batches
from composer.trainer.resume.contract import load_objects, save_objects

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from composer.checkpoint.contents import SavedPlace
    from composer.core import Batch

STATES = ("earlier", "generators")
"""The names in ``SavedPlace.objects.states`` that :class:`StatefulOrder` saves; the others are objects of the user."""

_COPY_EVERY = 8
"""Of how many requests to a generator one is preceded by a copy: a checkpoint can be saved after any step."""

_ATOMS = frozenset((bool, int, float, str, bytes, type(None)))


@attrs.define
class _Requests:
    """Consecutive requests for batches to one iterator of the loader.

    Attributes:
        epoch: Their epoch.
        first: The number of the first one in the epoch.
        generators: The states of the random generators at the start of the epoch.
        count: How many there are.
        has_ended: Whether the last one found the end of the data.
    """

    epoch: int
    first: int
    generators: dict[str, Any]
    count: int = 0
    has_ended: bool = False


@attrs.define
class _Earlier:
    """A copy of the loader's state, and the requests since then, which a resumed run repeats.

    Attributes:
        state: The copy.
        requests: The requests to each iterator since then.
    """

    state: Any
    requests: list[_Requests]

    def save(self) -> dict[str, Any]:
        """Return what :meth:`load` needs."""
        return {"state": self.state, "requests": [attrs.asdict(requests, recurse=False) for requests in self.requests]}

    @classmethod
    def load(cls, saved: dict[str, Any]) -> _Earlier:
        """Return what was saved."""
        return cls(saved["state"], [_Requests(**requests) for requests in saved["requests"]])


class StatefulOrder(OpaqueOrder):
    """A loader that saves its own state; the module states how it resumes.

    =======================================  ==================================================================
    saved in                                 what
    =======================================  ==================================================================
    ``SavedPlace.loader``                    the state where the run stopped
    ``SavedPlace.objects.states``:
    ``"earlier"``                            the last copy and the requests since then, if any are repeated
    ``"generators"``                         if the loader or its samplers have random generators: their states
                                             at the ``"start"`` of the epoch, and ``"now"``
    =======================================  ==================================================================

    If the iterator is no generator, no copy precedes an end of the data that the length does not announce. A loader
    that then counts an epoch twice, because it ends first when it has loaded the state of the end, causes a warning.

    Args:
        loader: The loader.
        seed: The run's seed.
        subset_num_batches: The number of batches in an epoch, if fewer than the loader has; -1 for all.

    Attributes:
        _loaded: The saved place, from :meth:`load` until the loader is iterated over.
        _earlier: The last copy and the requests since then; None if a run that is resumed here repeats none.
        _requests: The last requests, or those that come next.
    """

    def __init__(self, loader: Iterable[Batch], seed: int, subset_num_batches: int = -1) -> None:
        super().__init__(loader, seed)
        self._subset_num_batches = subset_num_batches
        self._parts = {"loader": loader, **{name: getattr(loader, name, None) for name in ("batch_sampler", "sampler")}}
        self._loaded: SavedPlace | None = None
        self._earlier: _Earlier | None = None
        self._requests = _Requests(0, 0, self._generators())

    def save(self, *, in_epoch: bool) -> tuple[Any, dict[str, Any]]:
        """Return the state of the loader, and what a resumed run needs besides; ``load`` gets both."""
        if self._loaded is not None:
            return self._loaded.loader, self._loaded.objects.states
        states: dict[str, Any] = {}
        if now := self._generators():
            # Between two epochs, this is the start of the next one.
            states["generators"] = {"start": self._requests.generators if in_epoch else now, "now": now}
        if self._earlier is not None:
            states["earlier"] = self._earlier.save()
        return _copied(self.loader.state_dict()), states

    def load(self, saved: SavedPlace) -> None:
        """Load a state into the loader; the next call of :meth:`begin` continues from it."""
        load_objects(SavedObjects({"train_dataloader": _copied(saved.loader)}), {"train_dataloader": self.loader})
        self._loaded = saved

    def begin(self, epoch: int, place: int = 0) -> Iterator[Batch]:
        """Return the batches of an epoch from a place on, which is 0 or that of the loaded state."""
        batches = self._begin_epoch(epoch) if self._loaded is None else self._resume(self._loaded, epoch, place)
        self._loaded = None  # only now: until then, a save contains it
        return batches

    def _resume(self, saved: SavedPlace, epoch: int, place: int) -> Iterator[Batch]:
        """Return the batches of an epoch from the saved place on, or from its start if the place is between two."""
        states = saved.objects.states
        generators = states.get("generators", {"start": {}, "now": {}})
        if "earlier" in states:
            earlier = _Earlier.load(states["earlier"])
            batches, has_ended = self._repeat(earlier, in_epoch=place > 0)
            leads_there = self._has_state(saved.loader) if place else has_ended is earlier.requests[-1].has_ended
            if leads_there:
                self._set(generators["now"])
                return batches if place else self._begin_epoch(epoch)
        self._earlier = None
        if not place:
            self._load(saved.loader, generators["now"])
            return self._begin_epoch(epoch, loaded=saved.loader)
        self._load(saved.loader, generators["start"])
        set_epoch(self.loader, epoch)
        requests = _Requests(epoch, place, generators["start"])
        return self._iterate(requests, seed=place, generators=generators["now"])

    def _begin_epoch(self, epoch: int, loaded: Any = None) -> Iterator[Batch]:
        """Return the batches of an epoch.

        If the former epoch ended exactly where the data does, an iteration may have no batch, and the next one begins
        with the first.

        Args:
            epoch: The number of the epoch.
            loaded: The state that was just loaded, if no request was repeated since then.
        """
        set_epoch(self.loader, epoch)
        generators = self._generators()
        batches = self._iterate(_Requests(epoch, 0, generators), seed=0)
        if (first := next(batches, END)) is not END:
            return itertools.chain([first], batches)
        if loaded is not None and not self._has_state(loaded):
            warnings.warn(
                "train_dataloader ended and changed its state when it had loaded that of the end of an epoch, so it "
                "may count this epoch twice. Let its __len__ return the number of its batches, or yield in __iter__.",
                stacklevel=2,
            )
        self._set(generators)
        return self._iterate(_Requests(epoch, 0, generators), seed=0)

    def _repeat(self, earlier: _Earlier, *, in_epoch: bool) -> tuple[Iterator[Batch], bool]:
        """Load the state of a copy and repeat the requests since then.

        Args:
            earlier: The copy.
            in_epoch: Whether the run continues in the epoch of the last request, and not in the next one.

        Returns:
            The batches after the requests, and whether the last request found the end of the data.
        """
        self._earlier = _Earlier(earlier.state, [])
        self._load(earlier.state, earlier.requests[0].generators)
        for number, requests in enumerate(earlier.requests):
            if number:
                self._set(requests.generators)
            set_epoch(self.loader, requests.epoch)
            # With the seed of request 0, the function of a generator draws at its start as in the run. Between two
            # epochs these draws no longer matter, and the state may depend on those of the batches.
            batches = self._iterate(attrs.evolve(requests, count=0), seed=0 if in_epoch else requests.first)
            for _ in range(requests.count):
                last = next(batches, END)
        return batches, last is END

    def _load(self, state: Any, generators: dict[str, Any]) -> None:
        """Load a state of the loader, after those of its generators, as it may contain other ones of them."""
        self._set(generators)
        self.loader.load_state_dict(_copied(state))

    def _iterate(self, requests: _Requests, *, seed: int, generators: dict[str, Any] | None = None) -> Iterator[Batch]:
        """Return the batches of the requests to an iterator.

        Args:
            requests: The requests; those that are made are counted in it.
            seed: The number of the seed of the first one; later ones have the seeds of their own numbers.
            generators: The states of the generators to set after ``iter()``; None leaves them.
        """

        def open_loader() -> Iterator[Batch]:
            batches = iter(self.loader)
            if generators is not None:
                self._set(generators)
            return self._follow(batches, requests)

        self._requests = requests
        seeds = itertools.chain([seed], itertools.count(requests.first + 1))
        return seeded_batches(open_loader, self.seed, requests.epoch, seeds)

    def _follow(self, batches: Iterator[Batch], requests: _Requests) -> Iterator[Batch]:
        """Yield the batches, count the requests, and copy the state before some of them."""
        is_generator = isinstance(batches, GeneratorType)
        last_numbers = (self._subset_num_batches - 1, length_of(self.loader))  # request 5 finds the end of 5 batches
        earlier = None
        if is_generator:
            earlier = self._earlier or _Earlier(_copied(self.loader.state_dict()), [])
            earlier.requests.append(requests)
        for number in itertools.count(requests.first):
            if number in last_numbers or (is_generator and number % _COPY_EVERY == 1):
                requests = _Requests(requests.epoch, number, requests.generators)
                earlier = _Earlier(_copied(self.loader.state_dict()), [requests])
            batch = next(batches, END)
            requests.count, requests.has_ended = requests.count + 1, batch is END
            self._earlier, self._requests = earlier, requests
            if batch is END:
                return
            yield batch
            if not is_generator:  # its state is enough, unless the last request ended the epoch
                earlier = None

    def _has_state(self, state: Any) -> bool:
        return equal(plain(self.loader.state_dict(), mappings=True), state)

    def _generators(self) -> dict[str, Any]:
        """Return the states of the random generators that are attributes of the loader or of its samplers."""
        return save_objects({}, self._parts).generators

    def _set(self, generators: dict[str, Any]) -> None:
        load_objects(SavedObjects({}, generators), {}, self._parts)


def _copied(value: Any) -> Any:
    """Return a deep copy, as a loader may change its state in place; of a long list of numbers in little time."""
    if type(value) is dict:
        return {name: _copied(inner) for name, inner in value.items()}
    is_flat = type(value) is list and _ATOMS.issuperset(map(type, value))
    return value.copy() if is_flat else copy.deepcopy(value)
