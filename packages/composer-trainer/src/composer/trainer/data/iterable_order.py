"""The order of batches that ``Batches`` iterates over, and those of loaders that are not torch's ``DataLoader``.

:class:`DataOrder` states what an order has to offer, and is that of a list of batches. :class:`StatefulOrder` owns the
state of a loader that saves itself. ``data/order.py`` contains those of ``DataLoader``, and chooses one for a loader.
"""

from __future__ import annotations

import copy
import itertools
import math
from types import GeneratorType
from typing import TYPE_CHECKING, Any

from composer.checkpoint.saved_place import SavedObjects, SavedPlace
from composer.core.data_spec import length_of
from composer.core.serialization import equal, plain
from composer.distributed import ScheduledBatchSampler
from composer.distributed.samplers import END, set_epoch
from composer.trainer.data.seeding import seeded_batches
from composer.trainer.resume.contract import load_objects

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from composer.core import Batch, Timestamp

__all__ = ["DataOrder", "OpaqueOrder", "StatefulOrder"]


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
        limit: The most batches of an epoch, if it has a part of the data. ``Batches`` sets it.

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
    limit: float = math.inf

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
    or first ends. A resumed run therefore repeats the last step of the uninterrupted one, from the state before:

    - The step from one epoch to the next: it iterates over the loader up to the end of the former epoch, and then once
      more. Of an epoch with a part of the data, the state before its last batch is saved for this.
    - The last batch of an epoch that has begun, if the loader's ``__iter__`` is a generator function. The start of the
      function runs with its first batch, and what it draws would change the draws of the batch to continue with.

    Attributes:
        _loaded: The saved place, from :meth:`load` until the loader is iterated over.
        _before: The state before the last batch, whether the loader had ended then, and the epoch and number of the
            batch that follows; empty if it is not needed.
    """

    def __init__(self, loader: Iterable[Batch], seed: int) -> None:
        super().__init__(loader, seed)
        self._loaded: SavedPlace | None = None
        self._before: dict[str, Any] = {}

    def save(self, *, in_epoch: bool) -> tuple[Any, dict[str, Any]]:
        """Return the state of the loader, and that before its last batch if it is needed; ``load`` gets both."""
        if self._loaded is not None:
            return self._loaded.loader, self._loaded.objects.states
        if self._before and not in_epoch and not self.has_ended:
            before = dict(self._before)
            return before.pop("state"), {"before": before}
        return self._copied_state(), {"before": self._before} if in_epoch and self._before else {}

    def load(self, saved: SavedPlace) -> None:
        """Load a state into the loader; the next call of :meth:`begin` continues from it."""
        load_objects(SavedObjects({"train_dataloader": saved.loader}), {"train_dataloader": self.loader})
        self._loaded = saved

    def begin(self, epoch: int, place: int = 0) -> Iterator[Batch]:
        """Return the batches from a place on, which is 0 or that of the loaded state."""
        set_epoch(self.loader, epoch)
        saved, self._loaded = self._loaded, None
        if saved is None:
            return self._iterate(epoch)
        before = saved.objects.states.get("before")
        if not place:
            end = {"state": saved.loader, **(before or {}), "has_ended": saved.is_over or saved.has_ended}
            return self._next_epoch(epoch, end)
        if before:
            self.loader.load_state_dict(before["state"])
            # The generator's start draws as in the uninterrupted run, where it ran with the first batch.
            repeated = {"number": place - 1, "seed": 0}
            batches = self._next_epoch(epoch, before) if place == 1 else self._iterate(epoch, before, **repeated)
            next(batches, None)
            if equal(plain(self.loader.state_dict(), mappings=True), saved.loader):
                return batches
            self.loader.load_state_dict(saved.loader)  # the state depends on draws
        at_place = {"state": saved.loader, "has_ended": False, "epoch": epoch, "number": place}
        return self._iterate(epoch, at_place, place)

    def _next_epoch(self, epoch: int, before: dict[str, Any]) -> Iterator[Batch]:
        """Return the batches of an epoch; ``before`` has the loaded state, which may be one of the epoch before."""
        if before["has_ended"]:
            batches = self._iterate(epoch, before)
            first = next(batches, END)
            if first is not END:  # it has begun the epoch
                return itertools.chain([first], batches)
        else:
            next(self._iterate(before.get("epoch", epoch), before, before.get("number", 0)), END)
        return self._iterate(epoch, before)

    def _iterate(self, epoch: int, before: Any = None, number: int = 0, seed: int | None = None) -> Iterator[Batch]:
        """Iterate from the batch with a number on, which is also the number of its seed unless that is given."""
        seeds = itertools.chain([number if seed is None else seed], itertools.count(number + 1))
        return seeded_batches(lambda: self._open(before, epoch, number), self.seed, epoch, seeds)

    def _open(self, before: Any, epoch: int, number: int) -> Iterator[Batch]:
        """Iterate over the loader; ``before`` is the state that it begins with, if it is not its present one."""
        batches = iter(self.loader)
        if not isinstance(batches, GeneratorType):
            return self._follow(batches, {}, epoch, number, keeps=False)
        if not before:
            start = {"state": self._copied_state(), "has_ended": self.has_ended, "epoch": epoch, "number": number}
            before = self._before if self._before and not self.has_ended else start
        return self._follow(batches, before, epoch, number, keeps=True)

    def _follow(
        self, batches: Iterator[Batch], before: dict[str, Any], epoch: int, first: int, *, keeps: bool
    ) -> Iterator[Batch]:
        """Yield the batches, and keep the state before each, or only before the last."""
        self.has_ended = False
        for number in itertools.count(first):
            if not before and (keeps or number >= self.limit - 1):
                before = {"state": self._copied_state(), "has_ended": False, "epoch": epoch, "number": number}
            batch = next(batches, END)
            if batch is END:
                self.has_ended = True
                return
            self._before, before = before, {}
            yield batch

    def _copied_state(self) -> Any:
        """Return a copy of the loader's state, because a loader may change it in place."""
        return _copied(self.loader.state_dict())


_ATOMS = frozenset((bool, int, float, str, bytes, type(None)))


def _copied(value: Any) -> Any:
    """Return a deep copy; of long lists of numbers in a tenth of the time, as a state may be copied in each step.

    A checkpoint can be saved after any step, by ``Trainer.save_checkpoint`` too.
    """
    if type(value) is dict:
        return {name: _copied(one) for name, one in value.items()}
    is_flat = type(value) is list and _ATOMS.issuperset(map(type, value))
    return value.copy() if is_flat else copy.deepcopy(value)
