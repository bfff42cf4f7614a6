"""End a training that is good enough."""

from __future__ import annotations

import math
from typing import Any

import attrs

from composer.callbacks._monitored import Comparison, MetricStopper, check_comparison, comparison
from composer.core import Logger, State, saved
from composer.core.checks import true_or_false

__all__ = ["ThresholdStopper"]


@attrs.define(eq=False)
class ThresholdStopper(MetricStopper):
    """End the training as soon as a metric is better than a threshold.

    The metric is read at the end of each evaluation, or of each epoch if it is one of training. A value that is not a
    number never is. A training that was ended does not go on by itself when it is resumed.

    Args:
        monitor: The metric's name, such as ``"MulticlassAccuracy"``.
        dataloader_label: Whose: an evaluator's label (``"eval"``), or that of the training data (``"train"``).
        threshold: What the metric is compared with; a finite number.
        comp: Tells whether a value is better than the threshold: ``"less"``, ``"greater"`` or a function of two tensors
            such as ``torch.less``. If None, less is better where the name has ``loss``, ``error``, ``perplexity`` or
            ``crossentropy`` in it, and else more.
        stop_on_batch: Whether to look at a training metric after each batch, too: what it is over the epoch so far.
            This computes the metric and waits for the device at every batch.

    Raises:
        ValueError: A value is out of range. When training starts: there is no such metric or label.

    Example:
        >>> ThresholdStopper("MulticlassAccuracy", "eval", threshold=0.9).threshold
        0.9
    """

    monitor: str
    dataloader_label: str
    threshold: float = attrs.field()
    comp: Comparison = attrs.field(default=None, kw_only=True, validator=check_comparison)
    stop_on_batch: bool = attrs.field(default=False, kw_only=True, validator=true_or_false)

    last: float | None = saved(default=None)
    """The value that was looked at last."""
    stopped_at: int | None = saved(default=None)
    is_fitting: bool = attrs.field(default=False, init=False, repr=False)

    @threshold.validator
    def _check_threshold(self, _: object, threshold: Any) -> None:
        if isinstance(threshold, bool) or not isinstance(threshold, (int, float)) or not math.isfinite(threshold):
            raise ValueError(f"threshold must be a finite number, got {threshold!r}.")

    def fit_start(self, state: State, logger: Logger) -> None:
        """Check that there is such a metric, and that it is one of training where batches are to be looked at.

        Raises:
            ValueError: There is no such data or metric, or it is no metric of training.
        """
        MetricStopper.fit_start(self, state, logger)
        if self.stop_on_batch and self.dataloader_label != state.dataloader_label:
            raise ValueError(
                f"stop_on_batch=True looks at metrics of training, and {self.dataloader_label!r} is an evaluator. "
                f"Set dataloader_label={state.dataloader_label!r}, or let the evaluator evaluate more often."
            )

    def batch_end(self, state: State, logger: Logger) -> None:
        """Look at the training metric, if batches are to be looked at."""
        del logger
        if self.stop_on_batch:
            name = self.monitor if self.monitor in state.train_metrics else self.monitor.partition("/")[0]
            value = state.train_metrics[name].compute()
            parts = {f"{name}/{part}": one for part, one in value.items()} if isinstance(value, dict) else {name: value}
            self.look(state, parts)

    def judge(self, value: float, state: State) -> bool:
        """Return whether a value is better than the threshold."""
        self.last = value
        return self.judge_again(state)

    def judge_again(self, state: State) -> bool:
        """Return whether the last value is better than the threshold."""
        del state
        value = self.last
        return (
            value is not None and not math.isnan(value) and comparison(self.comp, self.monitor)(value, self.threshold)
        )
