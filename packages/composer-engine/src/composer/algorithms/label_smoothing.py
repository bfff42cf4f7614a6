"""LabelSmoothing: distribute a part of each label over all classes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import attrs

from composer import functional as cf
from composer.algorithms._idle import warn_if_idle
from composer.core import Algorithm, BatchKey, Event, Logger, Stage, State
from composer.core.checks import number_between
from composer.core.serializable import transient

__all__ = ["LabelSmoothing"]


@attrs.define(eq=False)
class LabelSmoothing(Algorithm):
    """Distribute a part of each label uniformly over all classes for the loss (arXiv:1512.00567).

    See :func:`composer.functional.smooth_labels`. After the loss the original labels are restored. If the outputs are a
    dictionary, as with models of Transformers, it uses ``"logits"``; use ``target_key="labels"`` for their labels.

    Args:
        smoothing: The part to distribute, in ``[0, 1]``.
        target_key: The key of the labels in a batch.

    Raises:
        TypeError: ``smoothing`` is not a number.
        ValueError: ``smoothing`` is out of range.

    Example:
        >>> LabelSmoothing(smoothing=0.05)
        LabelSmoothing(smoothing=0.05, target_key=1)
    """

    smoothing: float = attrs.field(
        default=0.1, validator=number_between(0, 1, meaning="It is the part of each label to distribute.")
    )
    target_key: BatchKey = 1
    _target: Any = transient(default=None)

    runs_at: ClassVar = {Event.BEFORE_LOSS: Stage.LABEL, Event.AFTER_LOSS: Stage.LABEL}
    reads: ClassVar = {"batch.target", "outputs"}
    writes: ClassVar = {"batch.target"}

    def __attrs_post_init__(self) -> None:
        warn_if_idle(self, smoothing=self.smoothing == 0)

    def apply(self, event: Event, state: State, logger: Logger) -> None:
        """Smooth the labels before the loss and restore them after it."""
        if event is Event.BEFORE_LOSS:
            self._target = state.batch_get_item(self.target_key)
            state.batch_set_item(self.target_key, self._smoothed(state.outputs, self._target))
        else:
            state.batch_set_item(self.target_key, self._target)
            self._target = None

    def _smoothed(self, outputs: Any, target: Any) -> Any:
        scores = outputs["logits"] if isinstance(outputs, Mapping) else outputs
        if scores is outputs or scores.ndim == 2:
            return cf.smooth_labels(scores, target, self.smoothing)
        # If a model returns a dictionary, the classes are the last dimension, also with a label per token.
        return cf.smooth_labels(scores.movedim(-1, 1), target, self.smoothing).movedim(1, -1)
