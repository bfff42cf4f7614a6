"""The order of a loader that saves its own state, such as torchdata's ``StatefulDataLoader``.

A loader continues when it has loaded its state and is iterated over. Two things can then differ from the run that
stopped:

- If the state was saved at the end of an epoch, some loaders start the next epoch, and others return no batch from
  their first iterator. One that counts its epochs at their ends would count this one twice. If it loads an earlier
  state and the last request is repeated, it reaches the end itself.
- If ``__iter__`` is a generator function, its code before the first ``yield`` runs with the first request for a batch.
  In the resumed run, that is a later batch. What is drawn there, such as an order, would be drawn with its seed instead
  of that of batch 0, and change the draws of the batch itself.

So :class:`StatefulOrder` also keeps a copy of an earlier state. It makes one before each request that may end an epoch.
With a generator function, it also makes one where the run starts, and before the requests 1, 9, 17 and so on. With
``train_subset_num_batches=11``, these requests are preceded by a copy::

    epoch                       0                                   1
    request                     0  1  2  3  4  5  6  7  8  9  10    0  1  2
    with a generator function   |  |                       |  |        |
    without                                                   |

A resumed run loads the last copy, and repeats the requests since then. The first request that is repeated to an
iterator gets the seed with which that iterator was opened.

===========================  =======================================  ==============================
the run stopped              requests repeated with a generator       requests repeated without
                             function
===========================  =======================================  ==============================
before request 5 of epoch 0  1 to 4 of epoch 0                        none
between the epochs           10 of epoch 0                            10 of epoch 0
before request 1 of epoch 1  10 of epoch 0, and 0 of epoch 1          none
===========================  =======================================  ==============================

If the loader then has the state that was saved where the run stopped, it continues. Otherwise, or if there is no copy,
it loads this state, and no request is repeated. The states can differ if they depend on random draws of the first
repeated request, whose seed was changed. Only at the end of a subset of one batch, where the copy precedes request 0,
another state is accepted if the request found the end of the data as in the run that stopped: some loaders start at
their beginning there in a run, and continue from the copy when it is loaded.

Random generators that are attributes of the loader or of its samplers are saved separately, as its state may not
contain them. They get their states at the start of the epoch before the loader is iterated over, because it may draw
the order then, and those at the place where the run stopped before the next batch is requested.
"""

from __future__ import annotations

import copy
import itertools
import warnings
from types import GeneratorType
from typing import TYPE_CHECKING, Any

import attrs
from torch.utils.data import IterableDataset

from composer.checkpoint.contents import SavedObjects
from composer.core.checks import caller_level
from composer.core.data.spec import length_of
from composer.core.saving.codec import equal, plain
from composer.distributed.samplers import END, set_epoch
from composer.trainer.data.iterable_order import OpaqueOrder
from composer.trainer.data.seeding import draws_nothing, seeded_batches
from composer.trainer.data.workers import iterate
from composer.trainer.resume.contract import create_generators, load_objects, save_objects

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from composer.checkpoint.contents import SavedPlace
    from composer.core import Batch

STATES = ("earlier", "generators")
"""The names in ``SavedPlace.objects.states`` that :class:`StatefulOrder` saves; the others are objects of the user."""

_COPY_EVERY = 8
"""Of how many requests to a generator function one is preceded by a copy, because a checkpoint may follow any."""

_ATOMS = frozenset((bool, int, float, str, type(None)))


@attrs.define
class _Iteration:
    """The requests for batches to one iterator of the loader, or the last ones of them.

    Attributes:
        epoch: Their epoch.
        first: The number of the first one in the epoch.
        states_at_start: The states of the random generators at the start of the epoch.
        opening_number: The number of the request with whose seed the iterator was opened.
        requests: How many there are.
    """

    epoch: int
    first: int
    states_at_start: dict[str, Any]
    opening_number: int = 0
    requests: int = 0


@attrs.define
class _Earlier:
    """A copy of the loader's state, and the requests since then, which a resumed run repeats.

    Attributes:
        state: The copy.
        iterations: The requests, by iterator.
        found_end: Whether the last request found the end of the data; for a subset of one batch.
    """

    state: Any
    iterations: list[_Iteration]
    found_end: bool = False

    def save(self) -> dict[str, Any]:
        """Return what :meth:`from_saved` needs."""
        iterations = [attrs.asdict(iteration, recurse=False) for iteration in self.iterations]
        state = plain(self.state, "train_dataloader")
        return {"state": state, "iterations": iterations, "found_end": self.found_end}

    @classmethod
    def from_saved(cls, saved: dict[str, Any]) -> _Earlier:
        """Return what was saved."""
        iterations = [_Iteration(**iteration) for iteration in saved["iterations"]]
        return cls(saved["state"], iterations, saved["found_end"])


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

    Without a generator function, no copy precedes an end of the data that the length does not announce. If the loader
    then returns no batch first in a resumed run and changes its state, a warning states that it may count one twice.

    Args:
        loader: The loader.
        seed: The run's seed.
        subset_num_batches: The number of batches in an epoch, if fewer than the loader has; -1 for all.

    Attributes:
        _loaded: The saved place, from :meth:`load` until the loader is iterated over; in a process without further
            batches in this epoch, until the next one begins.
        _earlier: The last copy and the requests since then; None if a run that is resumed here repeats none.
        _random_states_at_start: The states of the random generators at the start of the epoch.
    """

    def __init__(self, loader: Iterable[Batch], seed: int, subset_num_batches: int = -1) -> None:
        super().__init__(loader, seed)
        self._subset_num_batches = subset_num_batches
        names = ("batch_sampler", "sampler", "dataset", "collate_fn")
        self._parts = {"loader": loader, **{name: getattr(loader, name, None) for name in names}}
        self._loaded: SavedPlace | None = None
        self._earlier: _Earlier | None = None
        self._random_states_at_start = self._random_states()

    def save(self, *, in_epoch: bool) -> tuple[Any, dict[str, Any]]:
        """Return the state of the loader, and what a resumed run needs besides; ``load`` gets both.

        Raises:
            NotSerializableError: The state contains something that is neither data nor a tensor.
        """
        if self._loaded is not None:
            return self._loaded.loader, self._loaded.objects.states
        states: dict[str, Any] = {}
        if now := self._random_states():
            # Between two epochs, this is the start of the next one.
            states["generators"] = {"start": self._random_states_at_start if in_epoch else now, "now": now}
        if self._earlier is not None:
            states["earlier"] = self._earlier.save()
        return save_objects({"train_dataloader": self.loader}).states["train_dataloader"], states

    def load(self, saved: SavedPlace) -> None:
        """Check that the loader accepts the state of a saved place, where the next call of :meth:`begin` continues.

        It is loaded again there, or an earlier one. Until then, :meth:`save` returns what was saved.
        """
        load_objects(SavedObjects({"train_dataloader": _copied(saved.loader)}), {"train_dataloader": self.loader})
        self._loaded = saved

    def begin(self, epoch: int, place: int = 0) -> Iterator[Batch]:
        """Return the batches of an epoch from a place on, which is 0 or that of the loaded state.

        At the start of an epoch, its first batch is loaded now.
        """
        if self._loaded is None:
            return self._begin_epoch(epoch)
        state, states = self._loaded.loader, self._loaded.objects.states
        earlier = _Earlier.from_saved(states["earlier"]) if "earlier" in states else None
        random_states = states.get("generators", {"start": {}, "now": {}})
        batches = seeded_batches(lambda: iter(self.loader), self.seed, epoch)
        create_generators(random_states["now"], self._parts, lambda: next(batches, END))
        if place:
            opening = _Iteration(epoch, place, random_states["start"], opening_number=place)
            batches = self._resume_in_epoch(state, earlier, opening, random_states["now"])
        else:
            batches = self._resume_between(state, earlier, epoch, random_states["now"])
        self._loaded = None
        return batches

    def _resume_in_epoch(
        self, state: Any, earlier: _Earlier | None, opening: _Iteration, states_now: dict[str, Any]
    ) -> Iterator[Batch]:
        """Return the batches from the saved place on, which is the first request of ``opening``."""
        if earlier is not None:
            batches, _ = self._repeat(earlier)
            if self._has_state(state):
                self._set_random_states(states_now)
                return batches
            del batches  # the iterator ends before the loader gets another state
        self._set_state(state, opening.states_at_start)
        set_epoch(self.loader, opening.epoch)
        return self._iterate(opening, after_iter=states_now)

    def _resume_between(
        self, state: Any, earlier: _Earlier | None, epoch: int, states_now: dict[str, Any]
    ) -> Iterator[Batch]:
        """Return the batches of an epoch after the saved place, which is the end of the former one."""
        if earlier is not None:
            batches, found_end = self._repeat(earlier)
            is_there = self._has_state(state)
            del batches  # the iterator ends before that of the next epoch is created, as in a run
            # The copy precedes request 0 only in a subset of one batch.
            if is_there or (earlier.iterations[-1].first == 0 and found_end is earlier.found_end):
                self._set_random_states(states_now)
                return self._begin_epoch(epoch)
        self._set_state(state, states_now)
        return self._begin_epoch(epoch, loaded=state)

    def _begin_epoch(self, epoch: int, loaded: Any = None) -> Iterator[Batch]:
        """Return the batches of an epoch.

        If the former epoch ended at the end of the data, the first iterator may have no batch. Then a second one is
        created.

        Args:
            epoch: The number of the epoch.
            loaded: The state that was just loaded, if no request was repeated since then.
        """
        set_epoch(self.loader, epoch)
        opening = _Iteration(epoch, 0, self._random_states())
        batches = self._iterate(opening)
        if (first := next(batches, END)) is not END:
            return itertools.chain([first], batches)
        if loaded is not None and not self._has_state(loaded):
            warnings.warn(
                "train_dataloader ended and changed its state when it had loaded that of the end of an epoch, so it "
                "may count this epoch twice. Let its __len__ return the number of its batches, or yield in __iter__.",
                stacklevel=2,
            )
        self._set_random_states(opening.states_at_start)
        return self._iterate(opening)

    def _repeat(self, earlier: _Earlier) -> tuple[Iterator[Batch], bool]:
        """Load the state of a copy and repeat the requests since then.

        Returns:
            The batches after the requests, and whether the last request found the end of the data.
        """
        self._set_state(earlier.state, earlier.iterations[0].states_at_start)
        self._earlier = _Earlier(earlier.state, [])  # to which the requests are added again
        for number, iteration in enumerate(earlier.iterations):
            batches: Iterator[Batch] = iter(())  # the former iterator ends before the next is created, as in a run
            if number:
                self._set_random_states(iteration.states_at_start)
            set_epoch(self.loader, iteration.epoch)
            batches = self._iterate(iteration)
            for _ in range(iteration.requests):
                last = next(batches, END)
        return batches, last is END

    def _set_state(self, state: Any, random_states: dict[str, Any]) -> None:
        """Load a state of the loader, and forget the earlier one.

        The random generators get their states before, because that of the loader may contain them, too.
        """
        self._earlier = None
        self._set_random_states(random_states)
        self.loader.load_state_dict(_copied(state))

    def _iterate(self, opening: _Iteration, after_iter: dict[str, Any] | None = None) -> Iterator[Batch]:
        """Return the batches of a new iterator.

        Its requests are added to those of ``_earlier`` when they are made, if they are to a generator function.

        Args:
            opening: The epoch, first request and seed of the iterator; it does not change.
            after_iter: The states of the random generators to set after ``iter()``; None leaves them.
        """

        def open_loader() -> Iterator[Batch]:
            batches = iterate(self.loader)
            if after_iter is not None:
                self._set_random_states(after_iter)
            return self._follow(batches, opening)

        self._random_states_at_start = opening.states_at_start
        seeds = itertools.chain([opening.opening_number], itertools.count(opening.first + 1))
        return seeded_batches(open_loader, self.seed, opening.epoch, seeds)

    def _follow(self, batches: Iterator[Batch], opening: _Iteration) -> Iterator[Batch]:
        """Yield the batches, count the requests, and copy the state before some of them.

        The requests to a generator function are added to those since the former copy, until a new one is made: before
        request 1, because all draws before the first ``yield`` have been made then, and before 9, 17 and so on.
        """
        of_function = isinstance(batches, GeneratorType)
        # That of the last batch of a subset, and the one that finds the announced end of the data, if they are given.
        numbers_that_may_end = (self._subset_num_batches - 1, length_of(self.loader))
        # The last of the iterations in ``pending``, if there is a copy.
        counted, pending = attrs.evolve(opening, requests=0), None
        if of_function:
            former = self._earlier or _Earlier(_copied(self.loader.state_dict()), [])
            pending = _Earlier(former.state, [*former.iterations, counted])
        for number in itertools.count(opening.first):
            if not of_function:  # the state is enough, unless the last request ended the epoch
                pending = None
            if number in numbers_that_may_end or (of_function and number % _COPY_EVERY == 1):
                counted = attrs.evolve(opening, first=number, requests=0)
                pending = _Earlier(_copied(self.loader.state_dict()), [counted])
            batch = next(batches, END)
            counted.requests += 1
            if pending is not None:
                pending.found_end = batch is END
            self._earlier = pending  # only now, so that no save contains a request that is not made yet
            if batch is END:
                return
            yield batch

    def _has_state(self, state: Any) -> bool:
        return equal(plain(self.loader.state_dict()), state)

    def _random_states(self) -> dict[str, Any]:
        """Return the states of the random generators that are attributes of the loader or of its samplers."""
        return save_objects({}, self._parts).generators

    def _set_random_states(self, states: dict[str, Any]) -> None:
        load_objects(SavedObjects({}, states), {}, self._parts)


def warn_if_not_exact(loader: Any) -> None:
    """Warn if a loader that saves its own state is known not to resume exactly with its data."""
    dataset = getattr(loader, "dataset", None)
    stream = getattr(dataset, "_ex_iterable", None)  # of Hugging Face's IterableDataset
    while stream is not None and not hasattr(stream, "buffer_size"):
        stream = getattr(stream, "ex_iterable", None)
    if stream is not None:
        what = (
            "the samples in the buffer of dataset.shuffle() are left out after a resume within an epoch. Use a "
            "torch.utils.data.DataLoader, which loads the samples again"
        )
    elif getattr(loader, "num_workers", 0) and not (isinstance(dataset, IterableDataset) or draws_nothing(dataset)):
        what = (
            "random numbers that the data set draws in workers are others after a resume within an epoch. If it draws "
            "any, use a torch.utils.data.DataLoader, whose workers are seeded for each batch"
        )
    else:
        return
    name = type(loader).__name__
    warnings.warn(f"train_dataloader, a {name}, may not resume exactly: {what}.", stacklevel=caller_level())


def _copied(value: Any) -> Any:
    """Return a deep copy, as a loader may change its state in place; flat lists are copied without a call per item."""
    if type(value) is dict:
        return {name: _copied(inner) for name, inner in value.items()}
    is_flat = type(value) is list and _ATOMS.issuperset(map(type, value))
    return value.copy() if is_flat else copy.deepcopy(value)
