"""The place in an epoch of the data, where the epoch ends, and what a saved place means in other data.

:class:`EpochPosition` counts; it never reads data. ``Batches`` creates and moves it, ``Run`` and the loop read it.
:class:`PlaceReader` compares saved places with the data of a resumed run and changes nothing: ``ResumeState`` lets it
check a checkpoint, and ``Batches`` lets it read the place to continue at.
"""

from __future__ import annotations

import math
import warnings
from typing import TYPE_CHECKING

from composer.distributed import get_data_rank

if TYPE_CHECKING:
    from composer.checkpoint.contents import SavedPlace
    from composer.core import DataSpec
    from composer.trainer.data.order import DataOrder


class EpochPosition:
    """The place of the next batch in an epoch, and the places where the data and the epoch end.

    A place is a number in the order of an epoch, in the unit of its :class:`DataOrder`: samples of all processes, or
    batches. Each batch advances it by ``place_distance``; ``length`` and ``num_batches`` are numbers of batches. The
    epoch ends at the first of two places: after ``max_batches``, which never changes, and where the data ends
    (``data_end``). The end of a list, and of a sampler of torch, is known from the start. That of a sampler of the user
    is known when it has drawn the order of the epoch, and that of a stream or a loader of the user when there is no
    further batch: ``Batches`` calls :meth:`set_end` then. Until then, the length is the announced one, or one more than
    the batches that were found beyond it.

    Args:
        spec: The loader.
        order: Its order.
        subset_num_batches: The number of batches in an epoch, if fewer than the loader has; -1 for all.

    Attributes:
        place: The place of the next batch.
        place_distance: The distance between the places of two batches.
        announced: The number of batches that the loader announces, or the longest one of several processes, which have
            agreed on it; None if it does not announce any.
        length: The number of batches in the epoch, as far as it is known; None if it is not.
        max_batches: The most batches of an epoch, infinite without a subset.
        data_end: The place where the data ends; None while only the loader can show it.
        last_is_own: Whether the last batch was one of this process, and no copy that keeps it in step with others.
        last_is_counted: Whether it has a sample that no other process counts; else its weight is 0.

    Example:
        Of 10 samples, each of two processes takes 2 in a batch. Batches begin at the places 0, 4 and 8. The last one
        has only the samples 8 and 9, one for each process, so that the place after it, 12, is behind the end.

        >>> from torch.utils.data import DataLoader
        >>> from composer.core import DataSpec
        >>> from composer.distributed import get_sampler
        >>> from composer.trainer.data.order import make_order
        >>> loader = DataLoader(range(10), batch_size=2, sampler=get_sampler(range(10), num_replicas=2, rank=0))
        >>> position = EpochPosition(DataSpec(loader), make_order(loader, seed=17), -1)
        >>> position.place_distance, position.data_end, position.length
        (4, 10, 3)
        >>> for _ in range(3):
        ...     position.advance()
        ...     print(position.place, position.num_batches, position.epoch_is_over)
        4 1 False
        8 2 False
        12 3 True
    """

    def __init__(self, spec: DataSpec, order: DataOrder, subset_num_batches: int) -> None:
        self._spec, self._order, self.place_distance = spec, order, order.place_distance
        self.max_batches = math.inf if subset_num_batches == -1 else subset_num_batches
        self._rank = 0 if order.global_batch_size is None else get_data_rank()
        self._has_warned = False
        end = order.end(0)
        length = spec.length if end is None else math.ceil(end / self.place_distance)
        if subset_num_batches != -1:
            length = subset_num_batches if length is None else min(length, subset_num_batches)
        self.announced = length
        self.move_to(0)

    def move_to(self, place: int, *, is_own: bool = True) -> None:
        """Set the place of the next batch, and ``last_is_own``; an end that was set before is forgotten."""
        self.place, self.last_is_own, self.last_is_counted = place, is_own, is_own
        self.data_end, self.length = self._order.end(place), self.announced
        if self.data_end is None and self.announced is not None and self.num_batches > self.announced:
            self.length = self.num_batches + 1

    def advance(self, *, is_own: bool = True) -> None:
        """Move on by a batch; ``is_own`` is False for a copy that only keeps this process in step with others."""
        self.last_is_own = is_own
        # The first sample of this process in the batch is that at its rank.
        self.last_is_counted = is_own and (self.data_end is None or self.place + self._rank < self.data_end)
        self.place += self.place_distance
        if self.data_end is None and self.announced is not None and self.num_batches > self.announced:
            self.length = self.num_batches + 1
            self._warn_of_length("more")

    def set_end(self, end: int) -> None:
        """End the data at a place, which only the sampler of the epoch, or the end of the loader, has shown."""
        self.data_end = end
        found = min(math.ceil(end / self.place_distance), self.max_batches)
        # A sampler may have another length in each epoch.
        if self.length is not None and found not in {self.length, self._spec.length}:
            self._warn_of_length(f"only {found}" if found < self.length else f"{found}")
        self.length = int(found)

    def _warn_of_length(self, found: str) -> None:
        """Warn, once, that an epoch has another number of batches than announced."""
        if not self._has_warned:
            announced = f"train_dataloader has a length of {self.announced} batches and"
            if self.announced == self.max_batches:
                announced = f"train_subset_num_batches is {self.announced}, and train_dataloader"
            warnings.warn(
                f"{announced} returned {found} in an epoch, which are trained on. Schedules and intervals count an "
                "epoch by the former: correct it, or __len__ of the loader, its sampler or its data set. An epoch also "
                "ends if a data set raises StopIteration.",
                stacklevel=4,
            )
        self._has_warned = True

    @property
    def num_batches(self) -> int:
        """The number of batches before the place."""
        return math.ceil(self.place / self.place_distance)

    @property
    def epoch_is_over(self) -> bool:
        """Whether the epoch has no batch left; False while only the loader can show it."""
        # Continued by another number of processes, an epoch may end between the places of two batches.
        place, end = self.place, self.data_end
        return place >= self.max_batches * self.place_distance or (end is not None and place >= end)


class PlaceReader:
    """Reads saved places as places in the data of this run.

    A place in an order that all processes share is the same place for any number of processes and any batch size. In
    all other data only the number of batches before it is comparable.

    Args:
        spec: The loader.
        order: Its order.

    Attributes:
        sizes: The known sizes of the data.

    Example:
        The place after 24 samples, saved by processes with 6 samples in a batch together, is that after 4 batches here.

        >>> from composer.checkpoint.contents import SavedPlace
        >>> from composer.core import DataSpec
        >>> from composer.trainer.data.order import make_order
        >>> reader = PlaceReader(DataSpec([1, 2, 3, 4, 5]), make_order([1, 2, 3, 4, 5], seed=17))
        >>> reader.place_here(SavedPlace(epoch=0, place=24, global_batch_size=6, sizes={"samples": 30}))
        4
    """

    def __init__(self, spec: DataSpec, order: DataOrder) -> None:
        self._order = order
        self.sizes = ({} if spec.length is None else {"batches": spec.length}) | order.sizes()

    def is_of_same_order(self, saved: SavedPlace) -> bool:
        """Return whether a saved place is one in this data for any number of processes, and the order is the same."""
        samples = saved.sizes.get("samples")
        is_shared = None not in (saved.global_batch_size, self._order.global_batch_size, samples)
        return is_shared and samples == self.sizes.get("samples")

    def place_here(self, saved: SavedPlace) -> int:
        """Return a saved place as a place in this data."""
        if self.is_of_same_order(saved):
            return saved.place
        return math.ceil(saved.place / (saved.global_batch_size or 1)) * self._order.place_distance

    def problems(self, saved: SavedPlace, position: EpochPosition) -> list[str]:
        """Return why this data, of which ``position`` has the length, does not have a saved place."""
        length = position.length
        done = self.place_here(saved) // self._order.place_distance
        # The same data may have had more batches than its length.
        most = position.max_batches if saved.sizes.get("batches") == self.sizes.get("batches") else length
        if most is None or done <= most or self.is_of_same_order(saved):
            return []
        problem = f"data: {done} batches of the epoch were done, and train_dataloader has {length}."
        return [f"{problem} Is it the same data, with the same batch size?"]

    def warn_of_other_order(self, saved: SavedPlace, place: int) -> None:
        """Warn if the order of the current epoch up to a place differs from that of a saved place, if it is known."""
        if saved.order not in (None, self._order.fingerprint(place)):
            warnings.warn(
                "train_dataloader's sampler gives another order than before the run stopped, so some samples are "
                "repeated and others skipped. Let it draw from the global generators of torch, NumPy or Python or from "
                "one that is its attribute, or give it state_dict() and load_state_dict().",
                stacklevel=3,
            )
