"""The place in an epoch of the data, and where the epoch ends; whether a saved place fits this data.

A place is a number in the order of an epoch, in the unit of its ``DataOrder``: samples of all processes, or batches.
:class:`EpochPosition` lives as long as its ``Batches``, which moves it; ``Run`` and the loop read it. It never reads
data. The epoch ends at the first of two places: where ``train_subset_num_batches`` ends, and where the data ends
(``data_end``). What is known of the latter changes in an epoch:

- known from the start, of a list or of a sampler of torch: ``DataOrder.end``;
- known when the order has been drawn and processes have exchanged their ends: :meth:`~EpochPosition.set_end`;
- never known, of a stream: at the length that its loader announces, ``Batches`` loads a batch ahead, and calls
  :meth:`~EpochPosition.extend` if there is one, or else :meth:`~EpochPosition.exhaust`.
"""

from __future__ import annotations

import math
import warnings
from typing import TYPE_CHECKING, Any

import attrs
from attrs.validators import ge, optional

from composer.distributed import get_data_rank
from composer.trainer.resume.contract import SavedObjects  # noqa: TC001  (fields are looked up at run time)

if TYPE_CHECKING:
    from collections.abc import Mapping

    from composer.core import DataSpec
    from composer.trainer.data.order import DataOrder

__all__ = ["EpochPosition", "SavedPlace"]


@attrs.frozen
class SavedPlace:
    """The data of :meth:`Batches.state_dict`.

    Attributes:
        epoch: The number of the epoch.
        place: The place of the next batch in it.
        global_batch_size: The number of samples in a batch of all processes, if the place is a number of samples.
        sizes: The known sizes of the data.
        order: A digest of the order up to the place, if it may be another in a resumed run.
        loader: The state of a loader that saves itself.
        objects: The objects that the loader consists of: as they were at the start of the epoch, if it has begun.
        has_ended: Whether this process has trained on all of its own batches of the epoch, and others have not.
        is_over: Whether all data has been taken: see :attr:`EpochPosition.took_all`.
        as_sampler: Whether the order is the sampler's own, as in a checkpoint of MosaicML Composer.
    """

    epoch: int = attrs.field(validator=ge(0))
    place: int = attrs.field(validator=ge(0))
    global_batch_size: int | None = attrs.field(validator=optional(ge(1)))
    sizes: dict[str, int]
    order: str | None
    loader: Any
    objects: SavedObjects
    has_ended: bool
    is_over: bool
    as_sampler: bool = False


class EpochPosition:
    """The place in an epoch, and the places where its data and the epoch end.

    Places are counted as :class:`DataOrder` does; only ``length`` and ``num_batches`` are numbers of batches.

    Args:
        spec: The loader.
        order: Its order.
        subset_num_batches: The number of batches in an epoch, if fewer than the loader has; -1 for all.

    Attributes:
        place: The place of the next batch.
        place_distance: The distance between the places of two batches.
        length: The number of batches in the epoch, as far as it is known: the loader's length until more are found.
        announced_length: The number at the start of an epoch; None if it is not known.
        sizes: The known sizes of the data, by which a saved place is compared with it.
        data_end: The place where the data ends; None while only the loader can show it.
        last_is_copy: Whether the last batch only kept this process in step with others, as its own have ended.

    Example:
        >>> from composer.core import DataSpec
        >>> from composer.trainer.data.order import make_order
        >>> position = EpochPosition(DataSpec([1, 2]), make_order([1, 2], seed=17), -1)
        >>> position.advance()
        >>> position.length, position.num_batches, position.epoch_is_over
        (2, 1, False)
    """

    def __init__(self, spec: DataSpec, order: DataOrder, subset_num_batches: int) -> None:
        self._spec, self._order, self.place_distance = spec, order, order.place_distance
        self._limit = math.inf if subset_num_batches == -1 else subset_num_batches
        self._is_shared = order.global_batch_size is not None
        self._rank = get_data_rank() if self._is_shared else 0
        self.sizes = ({} if spec.length is None or order.is_scheduled else {"batches": spec.length}) | order.sizes()
        self.place, self._has_warned, self._took_all_before = 0, False, True
        end = order.end(0)
        # Rounded up, because the last batch may have fewer samples.
        length = spec.length if end is None else -(-end // self.place_distance)
        if subset_num_batches != -1:
            length = subset_num_batches if length is None else min(length, subset_num_batches)
        self.announce(length)

    def announce(self, length: int | None, *, has_usual_batches: bool = False) -> None:
        """Set the number of batches at the start of an epoch.

        Args:
            length: The number; None if it is not known.
            has_usual_batches: Whether all batches but the last have the usual number of samples in each process.
        """
        self.announced_length, self._has_usual_batches = length, has_usual_batches
        self.move_to(self.place)

    def move_to(self, place: int) -> None:
        """Set the place of the next batch, which the loader has not returned yet."""
        self.place, self.last_is_copy = place, False
        self.set_end(self._order.end(place))

    def rewind(self) -> None:
        """Move to the start of the next epoch."""
        self._took_all_before = self.took_all
        self.move_to(0)

    def restore(self, state: Mapping[str, Any]) -> None:
        """Move to a saved place."""
        self._took_all_before = state["is_over"]
        self.move_to(self.place_of(state))
        if self.place and self.data_end is None and state["is_over"]:
            self._end_here()

    def advance(self, *, is_own: bool = True) -> None:
        """Move on by a batch; ``is_own`` is False for a copy that only keeps this process in step with others."""
        self.place += self.place_distance
        self.last_is_copy = not is_own

    def set_end(self, end: int | None, own: int | None = None) -> None:
        """Set the place where the data ends, and that of this process if others have more; None if it is not known."""
        self.data_end = end
        # Continued by another number of processes, an epoch may end between the places of two batches.
        self._epoch_end = min(self._limit * self.place_distance, math.inf if end is None else end)
        self.length = self.announced_length
        if end is not None and not self._is_shared:
            self.length = int(self._epoch_end)
            if self._spec.length not in (None, end, own):
                self._warn_of_length(f"{end}")

    def _end_here(self) -> None:
        self.data_end = self._epoch_end = self.place

    def extend(self) -> None:
        """Extend the epoch by a batch that the loader has beyond its length."""
        self.length = self.num_batches + 1
        self._warn_of_length("more")

    def exhaust(self) -> None:
        """End the data here, as the loader has no further batch."""
        self._end_here()
        if self.length is not None and self.num_batches < self.length:
            self._warn_of_length(f"only {self.num_batches}")

    @property
    def last_batch_counts(self) -> bool:
        """Whether the last batch has a sample that no other process counts; else its weight is 0."""
        first = self.place - self.place_distance + self._rank  # the first sample of this process in the batch
        return not self.last_is_copy and (self.data_end is None or first < self.data_end)

    @property
    def last_batch_is_full(self) -> bool:
        """Whether it is certain that the last batch has the usual number of samples in each process."""
        return self._has_usual_batches and self._is_shared and self.place <= (self.data_end or 0)

    @property
    def took_all(self) -> bool:
        """Whether the data, and not only the chosen number of batches, has ended: at a start, in the epoch before.

        A loader that saves itself is then at the end of its data, and begins again.
        """
        if not self.place:
            return self._took_all_before
        return self.data_end is not None and self.place >= self.data_end

    @property
    def epoch_is_over(self) -> bool:
        """Whether the epoch has no batch left; False while only the loader can show it."""
        return self.place >= self._epoch_end

    @property
    def may_end_here(self) -> bool:
        """Whether the epoch is at its announced length, and only the loader can show if it has more batches."""
        if self.data_end is not None or self.length is None:
            return False
        return self.num_batches >= self.length and not self.epoch_is_over

    @property
    def is_in_epoch(self) -> bool:
        """Whether an epoch has begun and is not over."""
        return self.place > 0 and not self.epoch_is_over

    @property
    def num_batches(self) -> int:
        """The number of batches before the place."""
        return -(-self.place // self.place_distance)

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

    def is_of_same_order(self, state: Mapping[str, Any]) -> bool:
        """Return whether a saved place is one in this data for any number of processes, and the order is the same."""
        samples = state["sizes"].get("samples")
        if self._order.is_scheduled:
            is_same = state["global_batch_size"] is None and samples == self.sizes.get("samples")
            return is_same and state["order"] in (None, self._order.fingerprint(state["place"]))
        is_shared = None not in (state["global_batch_size"], self._order.global_batch_size, samples)
        return is_shared and samples == self.sizes.get("samples")

    def place_of(self, state: Mapping[str, Any]) -> int:
        """Return a saved place as a place in this data."""
        place: int = state["place"]
        if self.is_of_same_order(state):
            return place
        # The data has another size or another split, and only the number of batches is comparable.
        return -(-place // (state["global_batch_size"] or 1)) * self.place_distance

    def check_state_dict(self, state: Mapping[str, Any]) -> list[str]:
        """Return the problems of a saved place, a valid :class:`SavedPlace`, that does not fit this data."""
        given = self.place_of(state) // self.place_distance
        # The same data may have had more batches than its length.
        most = self._limit if state["sizes"].get("batches") == self.sizes.get("batches") else self.length
        # That of scheduled batches depends on the clock, which is not loaded yet.
        if most is None or given <= most or self._order.is_scheduled or self.is_of_same_order(state):
            return []
        problem = f"data: {given} batches of the epoch were done, and train_dataloader has {self.length}."
        return [f"{problem} Is it the same data, with the same batch size?"]

    def warn_of_other_sizes(self, state: Mapping[str, Any], before: int | None, now: int | None) -> None:
        """Warn if sizes show that the data has changed.

        Args:
            state: The saved place.
            before: The number of samples in the batches before the place when it was saved, if it is known.
            now: The same number in this data.
        """
        if self.is_of_same_order(state):
            return
        counted = f"samples in the first {self.num_batches} batches"
        saved, sizes = {**state["sizes"], counted: before}, {**self.sizes, counted: now}
        changed = [one for one in sizes if None not in (sizes[one], saved.get(one)) and sizes[one] != saved[one]]
        if changed:
            warnings.warn(
                f"train_dataloader had {saved[changed[0]]} {changed[0]} when the run stopped in an epoch, and has "
                f"{sizes[changed[0]]}, so some samples of this epoch may come twice and others not at all. Is it the "
                "same data, with the same batch size and number of workers?",
                UserWarning,
                stacklevel=3,
            )

    def warn_of_other_order(self, fingerprint: str | None) -> None:
        """Warn if the order of the current epoch up to the place differs from the saved one, if that is known."""
        if fingerprint not in (None, self._order.fingerprint(self.place)):
            warnings.warn(
                "train_dataloader's sampler gives another order than before the run stopped, so some samples are "
                "repeated and others skipped, and the run differs from an uninterrupted one. Let the sampler draw from "
                "the global generators of torch, NumPy or Python or from one that is its attribute, or give it "
                "state_dict() and load_state_dict(). A ScheduledBatchSampler needs the same sizes up to this place.",
                UserWarning,
                stacklevel=3,
            )
