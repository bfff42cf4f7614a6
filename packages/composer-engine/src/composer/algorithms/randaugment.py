"""RandAugment: a few random operations on every image."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import attrs

from composer import functional as cf
from composer.algorithms._checks import warn_if_idle
from composer.algorithms._dataset import add_transform
from composer.core import Algorithm, BatchKey, Event, FieldsByEvent, Logger, Stage, State
from composer.core.checks import number_between, one_of, true_or_false, whole_number_from

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["RandAugment"]


@attrs.define(eq=False)
class RandAugment(Algorithm):
    """Apply ``depth`` operations, drawn for each image, at one severity (arXiv:1909.13719).

    See :func:`composer.functional.randaugment_image` and :func:`composer.functional.randaugment_batch`.

    Args:
        severity: How strong, from 0 to 10.
        depth: How many operations one after the other.
        augmentation_set: The operations to draw from: ``"all"``, ``"safe"`` or ``"original"``.
        batch: Work on whole batches, on their device, after they are loaded; images are floating point in ``[0, 1]`` or
            uint8 then. Otherwise the training dataset's ``transform`` does it, in the loader's workers,
            where it draws from torch's generator.
        input_key: Where the images lie in a batch, for ``batch=True``.

    Raises:
        TypeError: A value is no number.
        ValueError: A value is out of range, or ``augmentation_set`` does not exist.

    Example:
        >>> RandAugment(severity=5, batch=True).runs_at_events()
        {<Event.AFTER_DATALOADER: 'after_dataloader'>: <Stage.AUGMENT: 30>}
    """

    severity: float = attrs.field(default=9, validator=number_between(0, 10, meaning="It is how strong to augment."))
    depth: int = attrs.field(default=2, validator=whole_number_from(0, meaning="It is how many operations to apply."))
    augmentation_set: str = attrs.field(default="all", validator=one_of("all", "safe", "original"))
    batch: bool = attrs.field(default=False, validator=true_or_false)
    input_key: BatchKey = 0
    _transform: Any = attrs.field(default=None, init=False, repr=False)

    runs_at: ClassVar = {Event.FIT_START: Stage.AUGMENT, Event.AFTER_DATALOADER: Stage.AUGMENT}
    reads: ClassVar = FieldsByEvent(
        {Event.FIT_START: {"train_dataloader", "evaluators"}, Event.AFTER_DATALOADER: {"batch.input"}}
    )
    writes: ClassVar = FieldsByEvent({Event.FIT_START: {"train_dataloader"}, Event.AFTER_DATALOADER: {"batch.input"}})

    def __attrs_post_init__(self) -> None:
        warn_if_idle(self, depth=self.depth == 0)

    def runs_at_events(self) -> Mapping[Event, Stage]:
        """Return where it runs: after each batch is loaded, or once for the dataset."""
        return {Event.AFTER_DATALOADER if self.batch else Event.FIT_START: Stage.AUGMENT}

    def apply(self, event: Event, state: State, logger: Logger) -> None:
        """Augment the batch, or see to it that the dataset does."""
        del logger
        if event is Event.FIT_START:
            if self._transform is None:
                self._transform = cf.randaugment(self.severity, self.depth, self.augmentation_set)
            add_transform(self, self._transform, state)
            return
        images = state.batch_get_item(self.input_key)
        augmented = cf.randaugment_batch(
            images, self.severity, self.depth, self.augmentation_set, generator=state.generator(self)
        )
        state.batch_set_item(self.input_key, augmented)
