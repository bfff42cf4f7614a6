"""What a checkpoint contains of the training data for each process: the place in it, and the states of its objects.

A Trainer saves and loads them. The checkpoints of MosaicML Composer, which contain less, are read as such places, too.
"""

from __future__ import annotations

from typing import Any

import attrs
from attrs.validators import ge, optional

__all__ = ["SavedObjects", "SavedPlace"]


@attrs.frozen
class SavedObjects:
    """The states of objects by name, and those of the generators that are their attributes by path."""

    states: dict[str, Any] = attrs.field(factory=dict)
    generators: dict[str, dict[str, Any]] = attrs.field(factory=dict)


@attrs.frozen
class SavedPlace:
    """The place of a process in the training data, as ``Batches`` of the Trainer saves and loads it.

    Attributes:
        epoch: The number of the epoch.
        place: The place of the next batch in it.
        global_batch_size: The number of samples in a batch of all processes, if the place is a number of samples.
        sizes: The known sizes of the data.
        order: A digest of the order up to the place, if it may be another in a resumed run.
        loader: The state of a loader that saves itself.
        objects: The objects that the loader consists of, as they were at the start of the epoch, if it has begun. Of a
            loader that saves itself, ``"before"`` is its state before the last batch, if a resumed run needs it.
        has_ended: Whether this process has trained on all of its own batches of the epoch, and others have not.
        is_over: Whether all data has been taken, and not only a part of it; at a start, in the epoch before.
        as_sampler: Whether the order is the sampler's own, as in a checkpoint of MosaicML Composer.
    """

    epoch: int = attrs.field(validator=ge(0))
    place: int = attrs.field(validator=ge(0))
    global_batch_size: int | None = attrs.field(default=None, validator=optional(ge(1)))
    sizes: dict[str, int] = attrs.field(factory=dict)
    order: str | None = None
    loader: Any = None
    objects: SavedObjects = attrs.field(factory=SavedObjects)
    has_ended: bool = False
    is_over: bool = False
    as_sampler: bool = False
