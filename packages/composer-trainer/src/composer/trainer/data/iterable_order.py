"""The order of batches that ``Batches`` iterates over, and those of loaders that are not torch's ``DataLoader``.

:class:`DataOrder` states what an order has to offer, and is that of a list of batches. ``data/order.py`` contains those
of ``DataLoader``, and chooses one for a loader.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

from composer.core.data_spec import length_of
from composer.distributed import ScheduledBatchSampler
from composer.distributed.samplers import set_epoch
from composer.trainer.data.seeding import seeded_batches
from composer.trainer.resume.contract import has_state

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from composer.core import Batch, Timestamp

__all__ = ["DataOrder", "OpaqueOrder"]


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
    """A loader that stores its position itself, or an iterable of unknown type."""

    skips = False  # a stateful loader only by its own state, which is missing if another loader was saved

    def __init__(self, loader: Iterable[Batch], seed: int) -> None:
        if isinstance(getattr(loader, "batch_sampler", None), ScheduledBatchSampler):
            raise TypeError(
                f"A ScheduledBatchSampler requires the clock, which a {type(loader).__name__} would not give it: use "
                "torch.utils.data.DataLoader, which resumes exactly, too."
            )
        super().__init__(loader, seed)

    def begin(self, epoch: int, place: int = 0) -> Iterator[Batch]:
        """Return the batches from a place on; those before it are loaded unless the loader restored its position."""
        set_epoch(self.loader, epoch)
        is_there = has_state(self.loader)
        batches = seeded_batches(lambda: iter(self.loader), self.seed, epoch, first=place if is_there else 0)
        return batches if is_there else itertools.islice(batches, place, None)
