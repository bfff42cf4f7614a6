"""The order of a loader that saves its own state, such as torchdata's ``StatefulDataLoader``.

A resumed run loads the state and iterates over the loader, which continues where the state was saved; that this is
exact is the promise of the loader. Random draws outside of its state are seeded for each batch.

Random generators that are attributes of the loader or of its samplers are saved separately, as its state may not
contain them. They get their states at the start of the epoch before the loader is iterated over, because it may draw
the order then, and those at the place where the run stopped before the next batch is requested.
"""

from __future__ import annotations

import copy
import itertools
import warnings
from typing import TYPE_CHECKING, Any

from torch.utils.data import IterableDataset

from composer.checkpoint.contents import SavedObjects
from composer.core.checks import caller_level
from composer.distributed.samplers import END, set_epoch
from composer.trainer.data.iterable_order import OpaqueOrder
from composer.trainer.data.seeding import draws_nothing, seeded_batches
from composer.trainer.data.workers import iterate
from composer.trainer.resume.contract import create_generators, load_objects, save_objects

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from composer.core import Batch


class StatefulOrder(OpaqueOrder):
    """A loader that saves its own state.

    An epoch that is a part of the data leaves its iterator before the end. Some loaders then begin the next epoch at
    their start and, when they have loaded the same state, where the iterator was left. So a resumed run leaves an
    iterator, too.

    Attributes:
        _loaded: What :meth:`load` got, until the loader is iterated over; in a process without further batches in this
            epoch, until the next one begins.
        _left: Whether the last iterator has not reached its end.
        _at_start: The states of the random generators at the start of the epoch.
    """

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
        set_epoch(self.loader, epoch)
        if loaded is not None:
            # At the end of the data, the first iterator has no batch.
            both = itertools.chain(self._iterate(epoch), self._iterate(epoch))
            create_generators(loaded["now"], self._parts, lambda: next(both, END))
            self._at_start = loaded["at_start"]
            self._set_generators(self._at_start)  # before the state of the loader, which may contain them, too
            self._load_state(loaded["state"])
            if place:
                return self._iterate(epoch, place, loaded["now"])
            if loaded["left"]:
                next(self._iterate(epoch), END)  # its iterator may be a generator, which a request begins
                self._set_generators(loaded["now"])
        self._at_start = self._generators()
        batches = self._iterate(epoch)
        if (first := next(batches, END)) is not END:
            return itertools.chain([first], batches)
        # The former epoch ended at the end of the data, where the first iterator of some loaders has no batch.
        self._set_generators(self._at_start)
        return self._iterate(epoch)

    def _iterate(self, epoch: int, place: int = 0, generators: dict[str, Any] | None = None) -> Iterator[Batch]:
        """Yield the batches of a new iterator from a place on; generators get these states when it is open."""

        def open_loader() -> Iterator[Batch]:
            batches = iterate(self.loader)
            self._set_generators(generators or {})
            return batches

        self._left = True
        yield from seeded_batches(open_loader, self.seed, epoch, itertools.count(place))
        self._left = False

    def _load_state(self, state: Any) -> None:
        state = copy.deepcopy(state)  # which a loader may change in place
        load_objects(SavedObjects({"train_dataloader": state}), {"train_dataloader": self.loader})

    def _generators(self) -> dict[str, Any]:
        """Return the states of the random generators that are attributes of the loader or of its samplers."""
        return save_objects({}, self._parts).generators

    def _set_generators(self, states: dict[str, Any]) -> None:
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
