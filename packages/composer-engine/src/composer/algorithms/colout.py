"""ColOut: leave out rows and columns of the images."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import attrs

from composer import functional as cf
from composer.algorithms._checks import warn_if_idle
from composer.algorithms._dataset import add_transform
from composer.core import Algorithm, BatchKey, Event, FieldsByEvent, Logger, Stage, State
from composer.core.checks import number_between, true_or_false

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["ColOut"]

_PART = "It is the fraction that is left out."


def _bool_or_auto(_: object, field: attrs.Attribute[Any], value: object) -> None:
    if not isinstance(value, bool) and value != "auto":
        raise ValueError(f"{field.name} must be True, False or 'auto', got {value!r}.")


@attrs.define(eq=False)
class ColOut(Algorithm):
    """Leave out random rows and columns, which makes images smaller and training faster.

    See :func:`composer.functional.colout_batch`.

    Args:
        p_row: The fraction of rows that is left out, in ``[0, 1)``.
        p_col: The fraction of columns that is left out, in ``[0, 1)``.
        batch: Leave out the same ones of a whole batch, after it is loaded. Otherwise the training dataset's
            ``transform`` does it for every image by itself, in the loader's workers.
        resize_target: Whether targets lose the same rows and columns; ``"auto"``: those with the images' size do.
        input_key: Where the images lie in a batch, for ``batch=True``.
        target_key: Where the targets lie in a batch, for ``batch=True``.

    Raises:
        TypeError: A fraction is no number.
        ValueError: A fraction is out of range, or ``resize_target`` none of the three.

    Example:
        >>> ColOut(p_row=0.1, p_col=0.1).batch
        True
    """

    p_row: float = attrs.field(default=0.15, validator=number_between(0, 1, below=True, meaning=_PART))
    p_col: float = attrs.field(default=0.15, validator=number_between(0, 1, below=True, meaning=_PART))
    batch: bool = attrs.field(default=True, validator=true_or_false)
    resize_target: bool | str = attrs.field(default="auto", validator=_bool_or_auto)
    input_key: BatchKey = 0
    target_key: BatchKey = 1
    _transform: Any = attrs.field(default=None, init=False, repr=False)

    runs_at: ClassVar = {Event.FIT_START: Stage.RESHAPE, Event.AFTER_DATALOADER: Stage.RESHAPE}
    reads: ClassVar = FieldsByEvent(
        {Event.FIT_START: {"train_dataloader", "evaluators"}, Event.AFTER_DATALOADER: {"batch.input", "batch.target"}}
    )
    writes: ClassVar = FieldsByEvent(
        {Event.FIT_START: {"train_dataloader"}, Event.AFTER_DATALOADER: {"batch.input", "batch.target"}}
    )

    def __attrs_post_init__(self) -> None:
        is_idle = self.p_row == self.p_col == 0
        warn_if_idle(self, p_row=is_idle, p_col=is_idle)

    def runs_at_events(self) -> Mapping[Event, Stage]:
        """Return where it runs: after each batch is loaded, or once for the dataset."""
        return {Event.AFTER_DATALOADER if self.batch else Event.FIT_START: Stage.RESHAPE}

    def apply(self, event: Event, state: State, logger: Logger) -> None:
        """Leave out rows and columns of the batch, or see to it that the dataset does."""
        del logger
        if event is Event.FIT_START:
            if self._transform is None:
                self._transform = cf.colout(self.p_row, self.p_col, self.resize_target)
            add_transform(self, self._transform, state)
            return
        sample = (state.batch_get_item(self.input_key), state.batch_get_item(self.target_key))
        input, target = cf.colout_batch(
            sample, self.p_row, self.p_col, self.resize_target, generator=state.generator(self)
        )
        state.batch_set_item(self.input_key, input)
        if target is not sample[1]:
            state.batch_set_item(self.target_key, target)
