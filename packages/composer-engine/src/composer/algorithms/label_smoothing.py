"""LabelSmoothing: be a little less sure than the labels."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import attrs

from composer import functional as cf
from composer.algorithms._checks import warn_if_idle
from composer.core import Algorithm, BatchKey, Event, Logger, Stage, State
from composer.core.checks import number_between

__all__ = ["LabelSmoothing"]


@attrs.define(eq=False)
class LabelSmoothing(Algorithm):
    """Spread a part of each label evenly over all classes while the loss is computed (arXiv:1512.00567).

    See :func:`composer.functional.smooth_labels`. After the loss the batch has its own labels again. Of outputs in a
    dictionary, as of models of Transformers, it takes ``"logits"``; their labels are at ``target_key="labels"``.

    Args:
        smoothing: The part that is spread, in ``[0, 1]``.
        target_key: Where the labels lie in a batch.

    Raises:
        TypeError: ``smoothing`` is no number.
        ValueError: ``smoothing`` is out of range.

    Example:
        >>> LabelSmoothing(smoothing=0.05)
        LabelSmoothing(smoothing=0.05, target_key=1)
    """

    smoothing: float = attrs.field(
        default=0.1, validator=number_between(0, 1, meaning="It is the part of each label that is spread.")
    )
    target_key: BatchKey = 1
    _target: Any = attrs.field(default=None, init=False, repr=False)

    runs_at: ClassVar = {Event.BEFORE_LOSS: Stage.LABEL, Event.AFTER_LOSS: Stage.LABEL}
    reads: ClassVar = {"batch.target", "outputs"}
    writes: ClassVar = {"batch.target"}

    def __attrs_post_init__(self) -> None:
        warn_if_idle(self, smoothing=self.smoothing == 0)

    def apply(self, event: Event, state: State, logger: Logger) -> None:
        """Smooth the labels before the loss and put the former ones back after it."""
        del logger
        if event is Event.BEFORE_LOSS:
            self._target = state.batch_get_item(self.target_key)
            state.batch_set_item(self.target_key, self._smoothed(state.outputs, self._target))
        else:
            state.batch_set_item(self.target_key, self._target)
            self._target = None

    def _smoothed(self, outputs: Any, target: Any) -> Any:
        if not isinstance(outputs, Mapping):
            return cf.smooth_labels(outputs, target, self.smoothing)
        # Of models that return a dictionary the classes come last, also where each token has a label.
        return cf.smooth_labels(outputs["logits"].movedim(-1, 1), target, self.smoothing).movedim(1, -1)
