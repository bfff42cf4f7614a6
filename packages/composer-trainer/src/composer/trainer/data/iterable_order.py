"""The order of batches that ``Batches`` iterates over, and that of an iterable of unknown type.

:class:`DataOrder` states what an order has to offer, and is that of a list of batches. ``data/stateful_order.py``
contains that of a loader that saves its own state, and ``data/order.py`` those of ``DataLoader``, and the choice.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any, NamedTuple

from composer.core.data.spec import length_of
from composer.distributed.samplers import set_epoch
from composer.trainer.data.seeding import seed_of_rank, seeded_batches
from composer.trainer.data.workers import iterate

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from composer.core import Batch


class UsualCount(NamedTuple):
    """The number of samples in nearly all batches of a process.

    Attributes:
        samples: The number; None if it is not known.
        is_exact: Whether every full batch is guaranteed to have this number in each process.
    """

    samples: int | None = None
    is_exact: bool = False


class DataOrder:
    """Iterates over any epoch of a loader, from any place on; here of a list of batches.

    It is called with the epoch and the place, which ``Batches`` and ``EpochPosition`` count. A place is a number of
    batches. Only with a ``DistributedSampler``, which gives each process a part of one order, is it the number of
    samples before it in this order; it is then the same for any number of processes.

    Args:
        loader: The loader.
        seed: The run's seed, from which all seeds are derived.

    Attributes:
        skips: Whether an epoch can start in its middle without loading the batches before.
        place_distance: The distance between the places of two batches.
        usual: The number of samples in nearly all batches of this process.
        global_batch_size: The number of samples in a batch of all processes, if a place is a number of samples;
            otherwise None.
        as_sampler: Whether a ``DistributedSampler`` gives its own order, without the run's seed, as in MosaicML
            Composer; from the saved place.

    Example:
        >>> order = DataOrder([1, 2, 3], seed=17)
        >>> list(order.begin(epoch=0, place=1)), order.end(place=1)
        ([2, 3], 3)
    """

    skips = True
    place_distance = 1
    usual = UsualCount()
    global_batch_size: int | None = None
    as_sampler = False

    def __init__(self, loader: Iterable[Batch], seed: int) -> None:
        self.loader, self.seed = loader, seed

    def begin(self, epoch: int, place: int = 0) -> Iterator[Batch]:
        """Return the batches of an epoch from a place on."""
        del epoch
        return iter(itertools.islice(self.loader, place, None)) if place else iter(self.loader)

    def end(self, place: int) -> int | None:
        """Return the place where an epoch that passes ``place`` ends; None if only the loader can show it."""
        del place
        return length_of(self.loader)

    def rewind(self) -> None:
        """Forget the order of an epoch, as another one begins now, or one continues at a saved place."""

    def save(self, *, in_epoch: bool) -> Any:
        """Return what a loader that saves itself continues from; else None."""
        del in_epoch

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
        sizes = {"samples a batch": size, "samples": length_of(getattr(loader, "dataset", None))}
        return {name: number for name, number in sizes.items() if type(number) is int and number}


class OpaqueOrder(DataOrder):
    """An iterable of unknown type."""

    skips = False
    loader: Any

    def __init__(self, loader: Iterable[Batch], seed: int) -> None:
        super().__init__(loader, seed_of_rank(seed))

    def end(self, place: int) -> int | None:
        """Return None, as only the loader can show its end."""

    def begin(self, epoch: int, place: int = 0) -> Iterator[Batch]:
        """Return the batches from a place on; those before it are loaded."""
        set_epoch(self.loader, epoch)
        return itertools.islice(seeded_batches(lambda: iterate(self.loader), self.seed, epoch), place, None)
