"""What stops a training by a metric: rules that know no run, and the callback that asks one."""

from __future__ import annotations

import abc
import math
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import attrs
import torch
from torch import Tensor

from composer.core import Callback, Logger, State, Time, Timestamp, TimeUnit
from composer.core.checks import nearest
from composer.core.serialization import reset_fields

__all__ = ["Comparison", "MetricStopper", "Patience", "check_comparison", "comparison"]

Comparison: TypeAlias = Callable[[Any, Any], Any] | str | None
"""``f(value, other)``, which tells whether the value is better; ``"less"``, ``"greater"``; or by the metric's name."""

_BY_NAME = {"less": torch.less, "lt": torch.less, "greater": torch.greater, "gt": torch.greater}
_LESS_IS_BETTER = ("loss", "error", "perplexity", "crossentropy")


def check_comparison(_: object, field: attrs.Attribute[Any], comp: object) -> None:
    """Raise a ValueError if ``comp`` compares nothing."""
    if comp is not None and not callable(comp) and comp not in _BY_NAME:
        raise ValueError(
            f"{field.name} must be 'less', 'greater', a function such as torch.less, or None to go by the metric's "
            f"name, got {comp!r}."
        )


def comparison(comp: Comparison, monitor: str) -> Callable[[float, float], bool]:
    """Return what tells whether the first of two values of a metric is better.

    Args:
        comp: How to compare. If None, less is better where the name has ``loss``, ``error``, ``perplexity`` or
            ``crossentropy`` in it, and else more.
        monitor: The metric's name.

    Example:
        >>> comparison(None, "LanguageCrossEntropy")(0.5, 0.6), comparison("greater", "LanguageCrossEntropy")(0.5, 0.6)
        (True, False)
    """
    if comp is None:
        comp = "less" if any(word in monitor.lower() for word in _LESS_IS_BETTER) else "greater"
    function = _BY_NAME[comp] if isinstance(comp, str) else comp
    # Tensors, as people hand in torch's functions.
    return lambda one, other: bool(
        function(torch.tensor(one, dtype=torch.float64), torch.tensor(other, dtype=torch.float64))
    )


@attrs.frozen
class Patience:
    """Decides whether a value has not got better for too long. It knows neither a run nor what the value is.

    Args:
        better: Tells whether the first of two values is better.
        min_delta: By how much at least.
        patience: How long a value may stay as it is.

    Example:
        >>> rule = Patience(comparison("less", ""), min_delta=0.1, patience=Time(2, "ep"))
        >>> best = rule.best_of(None, 0.9, Timestamp(epoch=1))
        >>> best = rule.best_of(best, 0.85, Timestamp(epoch=2))
        >>> best[0], rule.is_over(best[1], Timestamp(epoch=3)), rule.is_over(best[1], Timestamp(epoch=4))
        (0.9, False, True)
    """

    better: Callable[[float, float], bool]
    min_delta: float
    patience: Time

    def best_of(
        self, best: tuple[float | None, Timestamp] | None, value: float, now: Timestamp
    ) -> tuple[float | None, Timestamp]:
        """Return the best value so far, and when it was. What is not a number is never better than anything."""
        if best is None:
            return (None if math.isnan(value) else value, now)
        before = best[0]
        if math.isnan(value):
            return best
        if before is None or (self.better(value, before) and abs(value - before) > self.min_delta):
            return value, now
        return best

    def is_over(self, since: Timestamp, now: Timestamp, max_duration: Time | None = None) -> bool:
        """Return whether more than the patience has passed since the best value.

        Args:
            since: When the best value was.
            now: The clock.
            max_duration: The whole training, of which a patience in ``"dur"`` is a fraction.

        Raises:
            ValueError: The patience is a fraction of a training that has no length.
        """
        length, unit = self.patience.value, self.patience.unit
        if unit is TimeUnit.DURATION:
            if max_duration is None:
                raise ValueError(f"patience={self.patience} is a fraction of the training, which has no length.")
            length, unit = length * max_duration.value, max_duration.unit
        return now.count(unit) - since.count(unit) > length


class MetricStopper(Callback, abc.ABC):
    """Ends a training when :meth:`judge` says so of a metric, read once per evaluation or epoch.

    Attributes:
        monitor: The metric's name.
        dataloader_label: Whose: an evaluator's label, or that of the training data.
        stopped_at: The batch after which training was ended; saved.
        is_fitting: Whether training goes on; what is evaluated by itself is none of its evaluations.
    """

    monitor: str
    dataloader_label: str
    stopped_at: int | None
    is_fitting: bool

    @abc.abstractmethod
    def judge(self, value: float, state: State) -> bool:
        """Return whether to end the training, having seen the metric's latest value."""

    @abc.abstractmethod
    def judge_again(self, state: State) -> bool:
        """Return what :meth:`judge` would now say of the last value that it has seen."""

    def init(self, state: State, logger: Logger) -> None:
        """Forget an earlier run."""
        del state, logger
        reset_fields(self)

    def after_load(self, state: State, logger: Logger) -> None:
        """End a training that was ended here before it was saved, if the settings still say so."""
        del logger
        if self.stopped_at == state.timestamp.count(TimeUnit.BATCH) and self.judge_again(state):
            state.stop_training()

    def fit_start(self, state: State, logger: Logger) -> None:
        """Check that there is such a metric.

        Raises:
            ValueError: There is no such data or metric.
        """
        del logger
        if not state.timestamp.count(TimeUnit.BATCH):
            reset_fields(self)
        self.is_fitting = True
        metrics: dict[str, dict[str, Any]] = {str(state.dataloader_label): state.train_metrics, **state.eval_metrics}
        name, label = type(self).__name__, self.dataloader_label
        if label not in metrics:
            raise ValueError(
                f"{name}: dataloader_label must be one of {list(metrics)}, got {label!r}{nearest(label, metrics)}"
            )
        if not any(self.monitor == one or self.monitor.startswith(f"{one}/") for one in metrics[label]):
            hint = nearest(self.monitor, metrics[label])
            raise ValueError(
                f"{name}: monitor must be a metric of {label!r}, which has {list(metrics[label])}, got "
                f"{self.monitor!r}{hint}"
            )

    def fit_end(self, state: State, logger: Logger) -> None:
        """Leave alone what is evaluated after training."""
        del state, logger
        self.is_fitting = False

    def eval_end(self, state: State, logger: Logger) -> None:
        """Look at the evaluation's metric, if it is the one."""
        del logger
        if self.is_fitting and state.dataloader_label == self.dataloader_label:
            values = state.eval_metric_values  # a loop of the user's may have set them by name only
            self.look(state, values.get(self.dataloader_label, values))

    def epoch_end(self, state: State, logger: Logger) -> None:
        """Look at the epoch's training metric, if it is the one."""
        del logger
        if state.dataloader_label == self.dataloader_label:
            self.look(state, state.train_metric_values)

    def look(self, state: State, values: Mapping[str, Any]) -> None:
        """Read the metric, and end the training if it is time to.

        Raises:
            ValueError: The metric is not there, or is not one number.
        """
        if self.monitor not in values:
            raise ValueError(
                f"{type(self).__name__}: monitor must be a metric of {self.dataloader_label!r}, which has "
                f"{list(values)}, got {self.monitor!r}{nearest(self.monitor, values)}"
            )
        value = values[self.monitor]
        if isinstance(value, Tensor) and value.numel() != 1:
            raise ValueError(
                f"{type(self).__name__}: {self.monitor!r} must be one number, got a tensor of shape "
                f"{tuple(value.shape)}. Let the metric average over classes."
            )
        if self.judge(float(value), state):
            self.stopped_at = int(state.timestamp.count(TimeUnit.BATCH))
            state.stop_training()
