"""The order of a loader that saves its own state, such as torchdata's ``StatefulDataLoader``.

A loaded state takes effect when the loader is iterated over, and it depends on the loader whether it then continues, or
ends first. :class:`StatefulOrder` therefore does not only load a state. It also repeats requests for batches, from an
earlier state on:

- Those that ended an epoch, before it begins the next one. A loader may count its epochs with the last of them.
- The last ones in an epoch, if the iterator of the loader is a generator. The start of its function runs with the
  first request, and its draws would change the draws of the batch to continue with.

If an epoch has 11 batches, because of ``train_subset_num_batches``, these are the requests, and the earlier states that
are copied before them::

    epoch       0                                   1
    request     0  1  2  3  4  5  6  7  8  9  10    0  1  2
    generator   |  |                       |  |        |
    iterator                                  |

A run that is resumed before request 5 of a generator repeats the requests 1 to 4. One that is resumed before request 0
of epoch 1, or in a generator before request 1, repeats request 10 of epoch 0 and begins epoch 1.

A state is restored in this order, in which generators are those that are attributes of the loader or its samplers:

1. The loader loads it. If its generators then have their saved states, it restores them itself, and step 2 is left out.
2. The generators get their states at the start of the epoch, from which ``iter()`` may draw an order.
3. ``iter()`` is called, and requests are repeated.
4. The generators get their states at the place to continue at.
"""

from __future__ import annotations

import copy
import itertools
import warnings
from types import GeneratorType
from typing import TYPE_CHECKING, Any

import attrs

from composer.checkpoint.contents import SavedObjects
from composer.core.plain_data import equal, plain
from composer.distributed.samplers import END, set_epoch
from composer.trainer.data.iterable_order import OpaqueOrder
from composer.trainer.data.seeding import seeded_batches
from composer.trainer.resume.contract import load_objects, save_objects

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from composer.checkpoint.contents import SavedPlace
    from composer.core import Batch

STATES = ("before", "generators")
"""The names in ``SavedPlace.objects.states`` that :class:`StatefulOrder` saves; the others are objects of the user."""

_COPY_EVERY = 8
"""Of how many requests to a generator the state is copied before one: a checkpoint can be saved after any step."""

_ATOMS = frozenset((bool, int, float, str, bytes, type(None)))


@attrs.define
class _Earlier:
    """A state of the loader, and the requests for batches since then, which a resumed run repeats.

    Attributes:
        state: A copy of the state.
        generators: The states of the generators of the loader and its samplers at the same time.
        epoch: The epoch of the requests; None for a state between two epochs, which no request follows.
        number: The number of the first request in its epoch.
        requests: How many requests followed.
        has_ended: Whether the last of them found the end of the data.
    """

    state: Any
    generators: dict[str, Any] = attrs.field(factory=dict)
    epoch: int | None = None
    number: int = 0
    requests: int = 0
    has_ended: bool = False

    def count(self, batch: Batch) -> None:
        """Count a request that returned ``batch``, or ``END``."""
        self.requests += 1
        self.has_ended = batch is END


class StatefulOrder(OpaqueOrder):
    """A loader that saves its own state; the module states how it resumes.

    =======================================  =============================================================
    saved in                                 what
    =======================================  =============================================================
    ``SavedPlace.loader``                    the present state
    ``SavedPlace.objects.states``:
    ``"before"``                             the earlier state, if there is one
    ``"generators"``                         if the loader or its samplers have generators as attributes:
                                             their states at the ``"start"`` of the epoch, and ``"now"``
    =======================================  =============================================================

    A loader whose iterator is no generator has no earlier state at an end that its length does not announce. If it then
    ends at once when the present state is loaded, and counts an epoch with it, a warning asks for the length.

    Attributes:
        last_requests: The numbers of the requests that may end an epoch: that for the last batch of a subset, and that
            after as many batches as the loader announces, which finds the end. ``Batches`` sets them.
        _loaded: The saved place, from :meth:`load` until the loader is iterated over.
        _earlier: The earlier state that a save would contain. Before request 1 of a generator it is still one of the
            former epoch, from which a resumed run begins the epoch again.
        _at_start: The states of the generators at the start of the epoch.
    """

    def __init__(self, loader: Iterable[Batch], seed: int) -> None:
        super().__init__(loader, seed)
        self.last_requests: tuple[float | None, ...] = ()
        self._loaded: SavedPlace | None = None
        self._earlier: _Earlier | None = None
        self._parts = {"loader": loader, **{name: getattr(loader, name, None) for name in ("batch_sampler", "sampler")}}
        self._at_start = self._generators()

    def save(self, *, in_epoch: bool) -> tuple[Any, dict[str, Any]]:
        """Return the state of the loader, and what a resumed run needs besides; ``load`` gets both."""
        if self._loaded is not None:
            return self._loaded.loader, self._loaded.objects.states
        states: dict[str, Any] = {}
        if generators := self._generators():
            states["generators"] = {"start": self._at_start if in_epoch else generators, "now": generators}
        if self._earlier is not None:
            states["before"] = attrs.asdict(self._earlier, recurse=False)
        return _copied(self.loader.state_dict()), states

    def load(self, saved: SavedPlace) -> None:
        """Load a state into the loader; the next call of :meth:`begin` continues from it."""
        load_objects(SavedObjects({"train_dataloader": _copied(saved.loader)}), {"train_dataloader": self.loader})
        self._loaded = saved

    def begin(self, epoch: int, place: int = 0) -> Iterator[Batch]:
        """Return the batches from a place on, which is 0 or that of the loaded state."""
        set_epoch(self.loader, epoch)
        saved, self._loaded = self._loaded, None
        if saved is None:
            self._at_start = self._generators()
            return self._begin_epoch(epoch)
        generators = saved.objects.states.get("generators", {})
        earlier = _Earlier(**before) if (before := saved.objects.states.get("before")) else None
        present = _Earlier(saved.loader, generators.get("now", {}), epoch, place)
        # Not the saved start before an epoch: a process that had ended before others saved that of its last epoch.
        self._at_start = generators.get("start", {}) if place else present.generators
        if not place:
            return self._begin_after(earlier or attrs.evolve(present, epoch=None), epoch)
        if earlier is not None:
            batches = self._continue_from(earlier, epoch)
            if self._has_state(saved.loader):
                self._set(present.generators)
                return batches
        # There is no earlier state, or repeated requests lead to another one, as it depends on what the loader draws.
        self._load(present)
        return self._iterate(epoch, place)

    def _continue_from(self, earlier: _Earlier, epoch: int) -> Iterator[Batch]:
        """Return the batches of an epoch after the requests that follow an earlier state."""
        if earlier.epoch == epoch:
            # The start of the function draws as in the run, where it ran with the first request, of number 0.
            return self._repeat(earlier, epoch, seed=0)[0]
        batches = self._begin_after(earlier, epoch)  # the place is before request 1 of a generator
        next(batches, None)
        return batches

    def _begin_epoch(self, epoch: int, loaded: Any = None) -> Iterator[Batch]:
        """Return the batches of an epoch, from the present state on; ``loaded`` is that state, if it was just loaded.

        If the former epoch, or a loaded state, ended exactly where the data does, an iteration may have no batch, and
        the next one begins with the first.
        """
        batches = self._iterate(epoch)
        if (first := next(batches, END)) is not END:
            return itertools.chain([first], batches)
        if loaded is not None and not self._has_state(loaded):
            warnings.warn(
                "train_dataloader ended and changed its state when it had loaded that of the end of an epoch, so it "
                "may count this epoch twice. Let its __len__ return the number of its batches, or yield in __iter__.",
                stacklevel=2,
            )
        self._set(self._at_start)
        return self._iterate(epoch)

    def _begin_after(self, earlier: _Earlier, epoch: int) -> Iterator[Batch]:
        """Return the batches of an epoch that begins after an earlier state and the requests that follow it, if any."""
        if earlier.epoch is None:
            self._load(earlier)
            set_epoch(self.loader, epoch)  # the state may have another one
            return self._begin_epoch(epoch, plain(self.loader.state_dict(), mappings=True))
        had_ended = earlier.has_ended
        set_epoch(self.loader, earlier.epoch)
        _, last = self._repeat(earlier, earlier.epoch)
        if (last is END) is not had_ended:
            # The loader ends where it continued in the run, or the reverse: its state alone begins the next epoch.
            self.loader.load_state_dict(_copied(earlier.state))
        set_epoch(self.loader, epoch)
        self._set(self._at_start)
        return self._begin_epoch(epoch)

    def _repeat(self, earlier: _Earlier, epoch: int, seed: int | None = None) -> tuple[Iterator[Batch], Batch]:
        """Repeat the requests after an earlier state; return the iterator, and what it has returned last."""
        self._load(earlier)
        requests, earlier.requests, earlier.has_ended = earlier.requests, 0, False  # which are counted again
        batches, last = self._iterate(epoch, earlier.number, seed), END
        for _ in range(requests):
            last = next(batches, END)
        return batches, last

    def _iterate(self, epoch: int, number: int = 0, seed: int | None = None) -> Iterator[Batch]:
        """Iterate from the batch with a number on, which is also the number of its seed unless that is given."""
        seeds = itertools.chain([number if seed is None else seed], itertools.count(number + 1))
        return seeded_batches(lambda: self._open(epoch, number), self.seed, epoch, seeds)

    def _open(self, epoch: int, number: int) -> Iterator[Batch]:
        generators = self._generators()
        batches = iter(self.loader)
        if isinstance(batches, GeneratorType):
            self._earlier = self._earlier or _Earlier(_copied(self.loader.state_dict()), generators)
        elif number and self._earlier is not None:  # iter() may have drawn an order from the states at the start
            self._set(self._earlier.generators)
        return self._follow(batches, epoch, number)

    def _follow(self, batches: Iterator[Batch], epoch: int, first: int) -> Iterator[Batch]:
        """Yield the batches, copy the state before some of them, and count the requests since then."""
        is_generator = isinstance(batches, GeneratorType)
        earlier = self._earlier if is_generator else None
        for number in itertools.count(first):
            if (is_generator and number % _COPY_EVERY == 1) or number in self.last_requests:
                earlier = _Earlier(_copied(self.loader.state_dict()), self._generators(), epoch, number)
            batch = next(batches, END)
            if earlier is not None and earlier.epoch == epoch:  # request 0 of a generator begins the epoch again
                earlier.count(batch)
            self._earlier = earlier
            if batch is END:
                return
            yield batch
            if not is_generator:  # its state is enough, unless the last request ended the epoch
                earlier = None

    def _has_state(self, state: Any) -> bool:
        return equal(plain(self.loader.state_dict(), mappings=True), state)

    def _generators(self) -> dict[str, Any]:
        """Return the states of the generators that are attributes of the loader or of its samplers."""
        return save_objects({}, self._parts).generators

    def _set(self, generators: dict[str, Any]) -> None:
        load_objects(SavedObjects({}, generators), {}, self._parts)

    def _load(self, earlier: _Earlier) -> None:
        """Load a state of the loader, steps 1 and 2 of the module."""
        self._earlier = earlier
        self.loader.load_state_dict(_copied(earlier.state))
        if not equal(self._generators(), earlier.generators):
            self._set(self._at_start)


def _copied(value: Any) -> Any:
    """Return a deep copy, as a loader may change its state in place; of a long list of numbers in little time."""
    if type(value) is dict:
        return {name: _copied(inner) for name, inner in value.items()}
    is_flat = type(value) is list and _ATOMS.issuperset(map(type, value))
    return value.copy() if is_flat else copy.deepcopy(value)
