"""Reduce the learning rate when a metric no longer improves."""

from __future__ import annotations

import math

import attrs

from composer.callbacks.stoppers import MetricCallback
from composer.core import Logger, State, saved
from composer.core.checks import integer, number
from composer.core.optimizers import base_rate, set_rate
from composer.optim.clock import ClockLR
from composer.optim.decoupled_weight_decay import DecoupledAdamW, DecoupledSGDW


@attrs.define(eq=False)
class ReduceLROnPlateau(MetricCallback):
    """Multiply the learning rates by a factor when a metric has not improved for ``patience`` values.

    The metric is read at the end of each evaluation, or of each epoch if it is a training metric. A value improves if
    it is better than the best one by more than ``threshold`` times the best; NaN never does. Values are counted as by
    ``torch.optim.lr_scheduler.ReduceLROnPlateau``. The best value and the counts are saved, so that a resumed training
    has the rates of an uninterrupted one. Beside a schedule of ``composer.optim``, the factor applies to the rates that
    the schedule multiplies. The weight decay of ``DecoupledAdamW`` and ``DecoupledSGDW`` is reduced with the rate.

    Args:
        monitor: The metric's name, such as ``"MulticlassAccuracy"``, or label and name: ``"eval/MulticlassAccuracy"``;
            ``"eval/loss/kl"`` for a part of the model's loss.
        dataloader_label: Label of an evaluator (``"eval"``) or of the training data (``"train"``), unless ``monitor``
            begins with it. By default the only evaluator that has the metric.
        factor: What the learning rates are multiplied by, more than 0 and less than 1.
        patience: How many values without an improvement are accepted; the next one reduces the rates.
        threshold: The smallest relative change that counts as an improvement.
        cooldown: How many values are not counted after a reduction.
        min_lr: The lowest learning rate.
        comp: How to compare a value with the best: ``"less"``, ``"greater"`` or a function of two tensors such as
            ``torch.less``. If None, the metric's ``higher_is_better`` decides.

    Raises:
        ValueError: A value is out of range. When training starts: the metric or the label does not exist, or a
            scheduler of torch sets the learning rates.

    Example:
        >>> ReduceLROnPlateau("eval/MulticlassAccuracy", factor=0.5, patience=2).monitored_metric
        'metrics/eval/MulticlassAccuracy'
    """

    factor: float = number(0.1, 0, 1, above=True, below=True, meaning="The learning rates are multiplied by it.")
    patience: int = integer(10, 0, meaning="It counts values of the metric.")
    threshold: float = number(1e-4, 0, meaning="It is the smallest relative change that counts.")
    cooldown: int = integer(0, 0, meaning="It counts values of the metric.")
    min_lr: float = number(0.0, 0, meaning="It is the lowest learning rate.")

    best: float | None = saved(default=None)
    """The best value so far."""
    num_bad: int = saved(default=0)
    """How many values in succession have not improved on it."""
    cooldown_left: int = saved(default=0)
    """How many of the next values are not counted."""

    def fit_start(self, state: State, logger: Logger) -> None:
        """Check that the metric exists, and that no scheduler of torch sets the learning rates."""
        MetricCallback.fit_start(self, state, logger)
        others = [type(one).__name__ for one in state.schedulers if not isinstance(one, ClockLR)]
        if others:
            raise ValueError(
                f"ReduceLROnPlateau: {others[0]} of torch sets the learning rates itself. Omit one of them, or use a "
                "schedule of composer.optim."
            )

    def use(self, value: float, state: State) -> None:
        """Count a value, and reduce the rates if there are too many without an improvement."""
        best = self.best
        is_first = best is None and not math.isnan(value)
        if is_first or (best is not None and self._improves(value, best, state)):
            self.best, self.num_bad = value, 0
        else:
            self.num_bad += 1
        if self.cooldown_left:
            self.cooldown_left, self.num_bad = self.cooldown_left - 1, 0
        if self.num_bad > self.patience:
            self.num_bad, self.cooldown_left = 0, self.cooldown
            for optimizer, group in [(each, group) for each in state.optimizers for group in each.param_groups]:
                rate, base = group["lr"], base_rate(group)
                if base > self.min_lr:
                    new = max(base * self.factor, self.min_lr)
                    set_rate(group, new if rate == base else rate * new / base)
                    group["initial_lr"] = new
                    if isinstance(optimizer, (DecoupledAdamW, DecoupledSGDW)):  # relative to initial_lr
                        group["weight_decay"] *= new / base

    def _improves(self, value: float, best: float, state: State) -> bool:
        return self.is_better(value, best, state) and abs(value - best) > self.threshold * abs(best)
