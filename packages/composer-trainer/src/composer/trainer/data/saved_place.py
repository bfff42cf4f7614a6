"""A saved place in the data, and the place in the data of the resumed run that it means.

``Batches.state_dict`` returns the data of a :class:`SavedPlace`, which a checkpoint contains for each process.
:class:`PlaceReader` belongs to the ``Batches`` of the resumed run. It compares saved places with its data and changes
nothing: ``ResumeState`` lets it check a checkpoint, and ``Batches`` lets it read the place to continue at.
"""

from __future__ import annotations

import math
import warnings
from typing import TYPE_CHECKING, Any

import attrs
from attrs.validators import ge, optional

from composer.trainer.resume.contract import SavedObjects  # noqa: TC001  (fields are looked up at run time)

if TYPE_CHECKING:
    from collections.abc import Mapping

    from composer.core import DataSpec
    from composer.trainer.data.iterable_order import DataOrder

__all__ = ["PlaceReader", "SavedPlace"]


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

        >>> from composer.core import DataSpec
        >>> from composer.trainer.data.order import make_order
        >>> reader = PlaceReader(DataSpec([1, 2, 3, 4, 5]), make_order([1, 2, 3, 4, 5], seed=17))
        >>> reader.place_here({"place": 24, "global_batch_size": 6, "sizes": {"samples": 30}})
        4
    """

    def __init__(self, spec: DataSpec, order: DataOrder) -> None:
        self._order = order
        self.sizes = ({} if spec.length is None or order.is_scheduled else {"batches": spec.length}) | order.sizes()

    def is_of_same_order(self, saved: Mapping[str, Any]) -> bool:
        """Return whether a saved place is one in this data for any number of processes, and the order is the same."""
        samples = saved["sizes"].get("samples")
        if self._order.is_scheduled:
            is_same = saved["global_batch_size"] is None and samples == self.sizes.get("samples")
            return is_same and saved["order"] in (None, self._order.fingerprint(saved["place"]))
        is_shared = None not in (saved["global_batch_size"], self._order.global_batch_size, samples)
        return is_shared and samples == self.sizes.get("samples")

    def place_here(self, saved: Mapping[str, Any]) -> int:
        """Return a saved place as a place in this data."""
        place: int = saved["place"]
        if self.is_of_same_order(saved):
            return place
        return math.ceil(place / (saved["global_batch_size"] or 1)) * self._order.place_distance

    def problems(self, saved: Mapping[str, Any], length: int | None, limit: float) -> list[str]:
        """Return why this data does not have a saved place, a valid :class:`SavedPlace`.

        Args:
            saved: The place.
            length: The number of batches in an epoch of this data, as far as it is known.
            limit: The number in an epoch of this run, infinite for all.
        """
        done = self.place_here(saved) // self._order.place_distance
        # The same data may have had more batches than its length.
        most = limit if saved["sizes"].get("batches") == self.sizes.get("batches") else length
        # That of scheduled batches depends on the clock, which is not loaded yet.
        if most is None or done <= most or self._order.is_scheduled or self.is_of_same_order(saved):
            return []
        problem = f"data: {done} batches of the epoch were done, and train_dataloader has {length}."
        return [f"{problem} Is it the same data, with the same batch size?"]

    def warn_of_other_sizes(self, saved: Mapping[str, Any], batches: int, before: int | None, now: int | None) -> None:
        """Warn if sizes show that the data has changed.

        Args:
            saved: The place.
            batches: The number of batches before it.
            before: The number of samples in these batches when it was saved, if it is known.
            now: The same number in this data.
        """
        if self.is_of_same_order(saved):
            return
        counted = f"samples in the first {batches} batches"
        former, sizes = {**saved["sizes"], counted: before}, {**self.sizes, counted: now}
        changed = [one for one in sizes if None not in (sizes[one], former.get(one)) and sizes[one] != former[one]]
        if changed:
            warnings.warn(
                f"train_dataloader had {former[changed[0]]} {changed[0]} when the run stopped in an epoch, and has "
                f"{sizes[changed[0]]}, so some samples of this epoch may come twice and others not at all. Is it the "
                "same data, with the same batch size and number of workers?",
                UserWarning,
                stacklevel=3,
            )

    def warn_of_other_order(self, saved: Mapping[str, Any], place: int) -> None:
        """Warn if the order of the current epoch up to a place differs from that of a saved place, if it is known."""
        if saved["order"] not in (None, self._order.fingerprint(place)):
            warnings.warn(
                "train_dataloader's sampler gives another order than before the run stopped, so some samples are "
                "repeated and others skipped, and the run differs from an uninterrupted one. Let the sampler draw from "
                "the global generators of torch, NumPy or Python or from one that is its attribute, or give it "
                "state_dict() and load_state_dict(). A ScheduledBatchSampler needs the same sizes up to this place.",
                UserWarning,
                stacklevel=3,
            )
