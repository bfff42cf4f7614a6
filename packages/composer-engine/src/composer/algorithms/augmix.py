"""AugMix: blend an image with several augmented versions of itself."""

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

__all__ = ["AugMix"]


@attrs.define(eq=False)
class AugMix(Algorithm):
    """Blend every image with ``width`` chains of augmentations of itself (arXiv:1912.02781).

    See :func:`composer.functional.augmix_image` and :func:`composer.functional.augmix_batch`. The paper's consistency
    loss is not part of it.

    Args:
        severity: How strong, from 0 to 10.
        depth: Operations in a chain; -1 draws one to three for each.
        width: How many chains.
        alpha: The parameter of the Dirichlet and Beta distributions that the weights are drawn from.
        augmentation_set: The operations to draw from: ``"all"``, ``"safe"`` or ``"original"``.
        batch: Work on whole batches, on their device, after they are loaded; images are floating point in ``[0, 1]`` or
            uint8 then. Otherwise the training dataset's ``transform`` does it, in the loader's workers,
            where it draws from torch's generator.
        input_key: Where the images lie in a batch, for ``batch=True``.

    Raises:
        TypeError: A value is no number.
        ValueError: A value is out of range, or ``augmentation_set`` does not exist.

    Example:
        >>> AugMix(width=2, batch=True).runs_at_events()
        {<Event.AFTER_DATALOADER: 'after_dataloader'>: <Stage.AUGMENT: 30>}
    """

    severity: float = attrs.field(default=3, validator=number_between(0, 10, meaning="It is how strong to augment."))
    depth: int = attrs.field(default=-1, validator=whole_number_from(-1, meaning="It is the length of a chain."))
    width: int = attrs.field(default=3, validator=whole_number_from(1, meaning="It is the number of chains."))
    alpha: float = attrs.field(
        default=1.0, validator=number_between(0, above=True, meaning="It is what the chains' weights are drawn by.")
    )
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
        settings = (self.severity, self.depth, self.width, self.alpha, self.augmentation_set)
        if event is Event.FIT_START:
            if self._transform is None:
                self._transform = cf.augmix(*settings)
            add_transform(self, self._transform, state)
            return
        images = state.batch_get_item(self.input_key)
        state.batch_set_item(self.input_key, cf.augmix_batch(images, *settings, generator=state.generator(self)))
