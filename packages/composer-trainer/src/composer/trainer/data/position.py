"""The place in an epoch of the data, and where the epoch ends.

:class:`EpochPosition` counts; it never reads data. ``Batches`` creates and moves it, ``Run`` and the loop read it. What
a saved place means in other data is in ``data/saved_place.py``.
"""

from __future__ import annotations

import math
import warnings
from typing import TYPE_CHECKING

from composer.distributed import get_data_rank

if TYPE_CHECKING:
    from composer.core import DataSpec
    from composer.trainer.data.iterable_order import DataOrder

__all__ = ["EpochPosition"]


class EpochPosition:
    """The place of the next batch in an epoch, and the places where the data and the epoch end.

    A place is a number in the order of an epoch, in the unit of its :class:`DataOrder`: samples of all processes, or
    batches. Each batch advances it by ``place_distance``; ``length`` and ``num_batches`` are numbers of batches. The
    epoch ends at the first of two places: where ``subset_num_batches`` ends, and where the data ends (``data_end``).
    What is known of the latter changes in an epoch:

    - known from the start, of a list or of a sampler of torch: ``DataOrder.end``;
    - known when the order has been drawn and processes have exchanged their ends: :meth:`set_end`;
    - never known, of a stream: at the length that its loader announces, ``Batches`` loads a batch ahead, and calls
      :meth:`extend` if there is one, or else :meth:`exhaust`.

    Args:
        spec: The loader.
        order: Its order.
        subset_num_batches: The number of batches in an epoch, if fewer than the loader has; -1 for all.

    Attributes:
        place: The place of the next batch.
        place_distance: The distance between the places of two batches.
        length: The number of batches in the epoch, as far as it is known: the loader's length until more are found.
        limit: The most batches of an epoch, infinite without a subset.
        data_end: The place where the data ends; None while only the loader can show it.
        last_is_copy: Whether the last batch only kept this process in step with others, as its own have ended.

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
        ...     print(position.place, position.num_batches, position.last_batch_is_full, position.epoch_is_over)
        4 1 True False
        8 2 True False
        12 3 False True
    """

    def __init__(self, spec: DataSpec, order: DataOrder, subset_num_batches: int) -> None:
        self._spec, self._order, self.place_distance = spec, order, order.place_distance
        self.limit = math.inf if subset_num_batches == -1 else subset_num_batches
        self._counts_samples = order.global_batch_size is not None
        self._rank = get_data_rank() if self._counts_samples else 0
        self.place, self._has_warned, self._took_all_before = 0, False, True
        end = order.end(0)
        length = spec.length if end is None else math.ceil(end / self.place_distance)
        if subset_num_batches != -1:
            length = subset_num_batches if length is None else min(length, subset_num_batches)
        self.expect(length)

    def expect(self, length: int | None) -> None:
        """Set the number of batches that an epoch has as long as no other is found; None if it is not known."""
        self._expected_length = length
        self.move_to(self.place)

    def move_to(self, place: int) -> None:
        """Set the place of the next batch, which the loader has not returned yet."""
        self.place, self.last_is_copy = place, False
        self.set_end(self._order.end(place))

    def rewind(self) -> None:
        """Move to the start of the next epoch."""
        self._took_all_before = self.took_all
        self.move_to(0)

    def restore(self, place: int, *, took_all: bool) -> None:
        """Move to a saved place; ``took_all`` is what the property was there."""
        self._took_all_before = took_all
        self.move_to(place)
        if place and self.data_end is None and took_all:
            self._end_here()

    def advance(self, *, is_own: bool = True) -> None:
        """Move on by a batch; ``is_own`` is False for a copy that only keeps this process in step with others."""
        self.place += self.place_distance
        self.last_is_copy = not is_own

    def set_end(self, end: int | None, own: int | None = None) -> None:
        """Set the place where the data ends, and that of this process if others have more; None if it is not known."""
        self.data_end = end
        # Continued by another number of processes, an epoch may end between the places of two batches.
        self._epoch_end = min(self.limit * self.place_distance, math.inf if end is None else end)
        self.length = self._expected_length
        if end is not None and not self._counts_samples:
            self.length = int(self._epoch_end)
            if self._spec.length not in (None, end, own):
                self._warn_of_length(f"{end}")

    def extend(self) -> None:
        """Extend the epoch by a batch that the loader has beyond its length."""
        self.length = self.num_batches + 1
        self._warn_of_length("more")

    def exhaust(self) -> None:
        """End the data here, as the loader has no further batch."""
        self._end_here()
        if self.length is not None and self.num_batches < self.length:
            self._warn_of_length(f"only {self.num_batches}")

    def _end_here(self) -> None:
        self.data_end = self._epoch_end = self.place

    def _warn_of_length(self, found: str) -> None:
        """Warn, once, that an epoch has another number of batches than the loader's length."""
        if not self._has_warned:
            warnings.warn(
                f"train_dataloader has a length of {self._spec.length} batches and returned {found} in an epoch, which "
                "are trained on. Schedules and intervals count an epoch by the length: correct __len__ of the loader, "
                "its sampler or its data set. An epoch also ends if a data set raises StopIteration.",
                UserWarning,
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
        return self.place >= self._epoch_end

    @property
    def is_in_epoch(self) -> bool:
        """Whether an epoch has begun and is not over."""
        return self.place > 0 and not self.epoch_is_over

    @property
    def may_end_here(self) -> bool:
        """Whether the epoch has its expected length, and only the loader can show if it has more batches."""
        if self.data_end is not None or self.length is None:
            return False
        return self.num_batches >= self.length and not self.epoch_is_over

    @property
    def took_all(self) -> bool:
        """Whether the data, and not only the chosen number of batches, has ended: at a start, in the epoch before.

        A loader that saves itself is then at the end of its data, and begins again.
        """
        if not self.place:
            return self._took_all_before
        return self.data_end is not None and self.place >= self.data_end

    @property
    def last_batch_counts(self) -> bool:
        """Whether the last batch has a sample that no other process counts; else its weight is 0."""
        first = self.place - self.place_distance + self._rank  # the first sample of this process in the batch
        return not self.last_is_copy and (self.data_end is None or first < self.data_end)

    @property
    def last_batch_is_full(self) -> bool:
        """Whether the last batch ends before the data does, so that it has all samples of a batch."""
        return self.place <= (self.data_end or 0)
