"""LabelSmoothing: distribute a part of each label over all classes."""

from __future__ import annotations

from typing import Any, ClassVar

import attrs
from torch import Tensor

from composer import functional as cf
from composer.algorithms._idle import warn_if_idle
from composer.algorithms._scores import class_scores, is_one_score
from composer.core import Algorithm, BatchKey, Event, Logger, Stage, State
from composer.core.checks import number
from composer.core.saving.components import transient


@attrs.define(eq=False)
class LabelSmoothing(Algorithm):
    """Distribute a part of each label uniformly over all classes for the loss (arXiv:1512.00567).

    See :func:`composer.functional.smooth_labels`. After the loss the original labels are restored. If the outputs are a
    dictionary, as with models of Transformers, it uses ``"logits"``, or else the tensor of a fitting shape; use
    ``target_key="labels"`` for the labels of Transformers.

    A model whose attribute ``loss_label_smoothing`` is a number smooths class ids in its own cross entropy, with class
    weights and ignored ids as in torch, and needs no probabilities of the size of the logits. Other targets need two
    scores per sample or more.

    Args:
        smoothing: The part to distribute, in ``[0, 1]``.
        target_key: The key of the labels in a batch.

    Raises:
        TypeError: ``smoothing`` is not a number.
        ValueError: ``smoothing`` is out of range, or the targets to change belong to one score per sample.

    Example:
        >>> LabelSmoothing(smoothing=0.05)
        LabelSmoothing(smoothing=0.05, target_key=1)
    """

    smoothing: float = number(0.1, 0, 1, meaning="It is the part of each label to distribute.")
    target_key: BatchKey = 1
    _target: Any = transient(default=None)
    _is_left_to_model: bool = transient(default=False)

    runs_at: ClassVar = {Event.BEFORE_LOSS: Stage.LABEL, Event.AFTER_LOSS: Stage.LABEL}
    reads: ClassVar = {"batch.target", "model", "outputs"}
    writes: ClassVar = {"batch.target"}

    def __attrs_post_init__(self) -> None:
        warn_if_idle(self, smoothing=self.smoothing == 0)

    def apply(self, event: Event, state: State, logger: Logger) -> None:
        """Smooth the labels before the loss and restore them after it."""
        model: Any = state.model
        if event is Event.BEFORE_LOSS:
            target = state.batch_get_item(self.target_key)
            # A model's own cross entropy of ids needs no probabilities, which have the size of the logits. It smooths
            # once; a second LabelSmoothing changes the labels.
            is_free = self._is_left_to_model or getattr(model, "loss_label_smoothing", None) == 0
            self._is_left_to_model = is_free and isinstance(target, Tensor) and not target.is_floating_point()
            if self._is_left_to_model:
                model.loss_label_smoothing = self.smoothing
            else:
                self._target = target
                state.batch_set_item(self.target_key, self._smoothed(state.outputs, target))
        elif self._is_left_to_model:
            model.loss_label_smoothing, self._is_left_to_model = 0.0, False
        else:
            state.batch_set_item(self.target_key, self._target)
            self._target = None

    def _smoothed(self, outputs: Any, target: Any) -> Any:
        if not isinstance(target, Tensor):
            raise TypeError(
                f"LabelSmoothing changes one target for each sample, got {type(target).__name__}. For several, set "
                "label_smoothing in the loss of each, as in nn.CrossEntropyLoss(label_smoothing=0.1)."
            )
        scores, is_last = class_scores(outputs, target)
        if is_one_score(scores):
            raise ValueError(
                "LabelSmoothing distributes labels over several scores of a sample, got one, in shape "
                f"{tuple(scores.shape)}. Let the model return two scores, as nn.Linear(..., 2) does. For integer class "
                "ids, ComposerClassifier smooths one score, too, in its default loss."
            )
        if not is_last:
            return cf.smooth_labels(scores, target, self.smoothing)
        probabilities = target.movedim(-1, 1) if target.is_floating_point() else target
        return cf.smooth_labels(scores, probabilities, self.smoothing).movedim(1, -1)
