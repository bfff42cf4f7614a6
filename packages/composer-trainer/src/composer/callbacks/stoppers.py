"""End a training when a metric no longer improves, or is good enough."""

from __future__ import annotations

import abc
import math
import warnings
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import attrs
import torch
from torch import Tensor

from composer.core import Callback, Logger, State, Time, Timestamp, TimeUnit, saved
from composer.core.checks import is_flag, number
from composer.core.evaluator import more_is_better, unknown_metric
from composer.core.saving.components import reset_fields, transient

Comparison: TypeAlias = Callable[[Any, Any], Any] | str | None
"""``f(value, other)`` that returns whether the value is better, ``"less"``, ``"greater"``, or None for the default."""

_BY_NAME = {"less": torch.less, "lt": torch.less, "greater": torch.greater, "gt": torch.greater}


def _check_comparison(_: object, field: attrs.Attribute[Any], comp: object) -> None:
    if comp is not None and not callable(comp) and comp not in _BY_NAME:
        raise ValueError(
            f"{field.name} must be 'less', 'greater', a function such as torch.less, or None to use what the metric "
            f"declares, got {comp!r}."
        )


@attrs.define(eq=False)
class MetricCallback(Callback, abc.ABC):
    """Call :meth:`use` with the value of a metric, which is read once per evaluation or epoch.

    Attributes:
        monitor: The metric's name.
        dataloader_label: Label of the evaluator, or of the training data; empty for the only evaluator with the metric.
        comp: How to compare two values; None uses the metric's ``higher_is_better``.
        is_fitting: Whether a fit is running; evaluations outside of a fit are ignored.
    """

    monitor: str
    dataloader_label: str = ""
    comp: Comparison = attrs.field(default=None, kw_only=True, validator=_check_comparison)
    is_fitting: bool = transient(default=False)
    _found: str = transient(default="")

    @abc.abstractmethod
    def use(self, value: float, state: State) -> None:
        """Use the metric's latest value."""

    def __attrs_post_init__(self) -> None:
        """Split ``"eval/Accuracy"`` into label and name."""
        name = self.monitor.removeprefix("metrics/")
        if "/" in name and not self.dataloader_label:
            self.dataloader_label = name.partition("/")[0]
        self.monitor = name.removeprefix(f"{self.dataloader_label}/")

    @property
    def label(self) -> str:
        """The label that is monitored: the setting, or that of the only evaluator that has the metric."""
        return self.dataloader_label or self._found

    @property
    def monitored_metric(self) -> str:
        """The name under which the metric is logged."""
        return f"metrics/{self.label}/{self.monitor}"

    def is_better(self, value: float, other: float, state: State) -> bool:
        """Return whether the first of two values of the metric is better.

        Raises:
            ValueError: ``comp`` is None, and the metric does not declare whether more is better.
        """
        comp = self.comp
        if comp is None:
            declared = more_is_better(_metrics_of(state).get(self.label, {}), self.monitor)
            if declared is None:
                raise ValueError(
                    f"{type(self).__name__}: {self.monitor!r} does not declare whether more is better (its "
                    f"higher_is_better is None). Set comp='greater' or comp='less'."
                )
            comp = "greater" if declared else "less"
        function = _BY_NAME[comp] if isinstance(comp, str) else comp
        # Tensors, so that torch's functions can be passed.
        return bool(function(torch.tensor(value, dtype=torch.float64), torch.tensor(other, dtype=torch.float64)))

    def init(self, state: State, logger: Logger) -> None:
        """Reset the state of an earlier run."""
        reset_fields(self)
        self._find_label(state)  # for the judgement of a loaded value

    def fit_start(self, state: State, logger: Logger) -> None:
        """Check that the metric exists.

        Raises:
            ValueError: The data with this label have no such metric, or nothing defines whether more is better.
        """
        if not state.timestamp.count(TimeUnit.BATCH):
            reset_fields(self)
        self.is_fitting = True
        metrics = _metrics_of(state)
        self._find_label(state)
        if self.label not in {"", "loss", *metrics}:  # "loss/train/total" is logged, and no metric
            warnings.warn(f"The callback has no effect. {self._no_such_metric(metrics)}", stacklevel=2)
        elif not _has(metrics.get(self.label, {}), self.monitor):
            raise self._no_such_metric(metrics)
        else:
            self.is_better(0.0, 0.0, state)

    def _find_label(self, state: State) -> None:
        labels = [label for label, own in state.eval_metrics.items() if _has(own, self.monitor)]
        self._found = labels[0] if len(labels) == 1 else ""

    def fit_end(self, state: State, logger: Logger) -> None:
        """Ignore evaluations after training."""
        self.is_fitting = False

    def eval_end(self, state: State, logger: Logger) -> None:
        """Read the metric of an evaluation with the monitored label."""
        if self.is_fitting and state.dataloader_label == self.label:
            values = state.eval_metric_values  # a custom loop may have set them by name only
            self.look(state, values.get(self.label, values))

    def epoch_end(self, state: State, logger: Logger) -> None:
        """Read the training metric of the epoch, if the training data are monitored."""
        if state.dataloader_label == self.label:
            self.look(state, state.train_metric_values)

    def look(self, state: State, values: Mapping[str, Any]) -> None:
        """Read the metric, and use its value.

        Raises:
            ValueError: The metric is missing, or is not a single number.
        """
        if self.monitor not in values:
            raise self._no_such_metric({self.label: values})
        value = values[self.monitor]
        if isinstance(value, Tensor) and value.numel() != 1:
            raise ValueError(
                f"{type(self).__name__}: {self.monitor!r} must be a single number, got a tensor of shape "
                f"{tuple(value.shape)}. Configure the metric to average over classes."
            )
        self.use(float(value), state)

    def _no_such_metric(self, metrics: Mapping[str, Mapping[str, Any]]) -> ValueError:
        known = [f"{label}/{name}" for label, own in metrics.items() for name in own]
        given = f"{self.label}/{self.monitor}".removeprefix("/")
        missing = ""
        if self.label not in {"", "loss", *metrics}:
            missing = (
                f" there is no evaluator labelled {self.label!r}: pass eval_dataloader= (an Evaluator for a "
                f"label other than 'eval'), or monitor '{next(iter(metrics))}/...'."
            )
        return unknown_metric(f"{type(self).__name__}:{missing} monitor", given, known)


@attrs.define(eq=False)
class MetricStopper(MetricCallback, abc.ABC):
    """End a training when :meth:`judge` returns True for a metric.

    Attributes:
        stopped_at: The batch after which training ended; saved.
    """

    stopped_at: int | None = saved(default=None)
    _is_judged: bool = transient(default=True)

    @abc.abstractmethod
    def judge(self, value: float, state: State) -> bool:
        """Return whether to end the training, given the metric's latest value."""

    @abc.abstractmethod
    def reason(self) -> str:
        """Return why the training ended, given that :meth:`judge` returned True."""

    @abc.abstractmethod
    def judge_again(self, state: State) -> bool:
        """Return the result of :meth:`judge` for the last value with the current settings."""

    def after_load(self, state: State, logger: Logger) -> None:
        """End a resumed training that had ended here, unless the settings have changed."""
        # A checkpoint of an earlier batch was saved before the stop, so its training continues.
        if self.stopped_at == state.timestamp.count(TimeUnit.BATCH):
            self._is_judged = self.label in _metrics_of(state)
            if self._is_judged and self.judge_again(state):
                state.stop_training(self.reason())

    def fit_start(self, state: State, logger: Logger) -> None:
        """Check that the metric exists, and judge now if the data were not there when the state was loaded."""
        MetricCallback.fit_start(self, state, logger)
        if not self._is_judged:
            self.after_load(state, logger)

    def use(self, value: float, state: State) -> None:
        """End the training if :meth:`judge` returns True."""
        if self.judge(value, state):
            self.stopped_at = int(state.timestamp.count(TimeUnit.BATCH))
            state.stop_training(self.reason())


def _has(metrics: Mapping[str, Any], name: str) -> bool:
    return any(name == one or name.startswith(f"{one}/") for one in metrics)


def _metrics_of(state: State) -> dict[str, dict[str, Any]]:
    return {str(state.dataloader_label): state.train_metrics, **state.eval_metrics}


def _to_patience(given: Time | str | int) -> Time:
    patience = Time.from_input(given, TimeUnit.EPOCH, name="patience")
    if patience.value < 0:
        raise ValueError(f"patience must not be negative, got {patience}.")
    return patience


@attrs.define(eq=False)
class EarlyStopper(MetricStopper):
    """Early stopping: end the training when a metric has not improved for more than ``patience``.

    The metric is read at the end of each evaluation, or of each epoch if it is a training metric. NaN is never better.
    The best value and its time are saved, so that a resumed training ends at the same batch as an uninterrupted one. A
    training that has ended does not continue when it is resumed.

    Args:
        monitor: The metric's name, such as ``"MulticlassAccuracy"``, or label and name as in ``save_best``:
            ``"eval/MulticlassAccuracy"``; ``"eval/loss/kl"`` for a part of the model's loss.
        dataloader_label: Label of an evaluator (``"eval"``) or of the training data (``"train"``), unless ``monitor``
            begins with it. By default the only evaluator that has the metric.
        comp: How to compare a value with the best: ``"less"``, ``"greater"`` or a function of two tensors such as
            ``torch.less``. If None, the metric's ``higher_is_better`` decides.
        min_delta: Smallest change that counts as an improvement, at least 0.
        patience: How long to wait for an improvement: a time, a string (``"500ba"``, ``"0.1dur"``) or a number of
            epochs. The training ends when more than this has passed since the best value: with ``"10ep"``, and a value
            after each epoch, in the eleventh epoch without an improvement, as in MosaicML Composer.

    Raises:
        TypeError: ``patience`` is not a length of time.
        ValueError: A value is out of range. When training starts: the metric or the label does not exist.

    Example:
        >>> EarlyStopper("MulticlassAccuracy", "eval", patience="3ep").patience
        Time(3, TimeUnit.EPOCH)
    """

    comp: Comparison = attrs.field(default=None, validator=_check_comparison)
    min_delta: float = number(0.0, 0, meaning="It is the smallest change that counts as an improvement.")
    patience: Time = attrs.field(default=Time(1, TimeUnit.EPOCH), converter=_to_patience)

    best: float | None = saved(default=None)
    """The best value so far."""
    best_occurred: Timestamp | None = saved(default=None)
    """When it occurred; before the first number, when the first value was read."""
    waited: Time | None = transient(default=None)
    """How long it was at the last value since then, in the unit of the patience."""

    def judge(self, value: float, state: State) -> bool:
        """Return whether the metric has not improved for too long, given its latest value."""
        best = self.best
        if not math.isnan(value) and (
            best is None or (self.is_better(value, best, state) and abs(value - best) > self.min_delta)
        ):
            self.best, self.best_occurred = value, state.timestamp
        elif self.best_occurred is None:
            self.best_occurred = state.timestamp
        return self.judge_again(state)

    def judge_again(self, state: State) -> bool:
        """Return whether more than the patience has passed since the best value.

        Raises:
            ValueError: The patience is a fraction of a training without a length.
        """
        if self.best_occurred is None:
            return False
        length, unit, whole = self.patience.value, self.patience.unit, state.max_duration
        if unit is TimeUnit.DURATION:
            if whole is None:
                raise ValueError(f"patience={self.patience} is a fraction of the training, which has no length.")
            length, unit = length * whole.value, whole.unit
        self.waited = Time(state.timestamp.count(unit) - self.best_occurred.count(unit), unit)
        return self.waited.value > length

    def reason(self) -> str:
        """Return the metric, its best value and the patience."""
        best = "NaN" if self.best is None else f"{self.best:.4g}"
        batch = 0 if self.best_occurred is None else self.best_occurred.count(TimeUnit.BATCH)
        return (
            f"EarlyStopper: {self.label}/{self.monitor} has not improved on {best} (batch {batch}) for "
            f"{self.waited}, more than patience='{self.patience}'"
        )


@attrs.define(eq=False)
class ThresholdStopper(MetricStopper):
    """End the training as soon as a metric is better than a threshold.

    The metric is read at the end of each evaluation, or of each epoch if it is a training metric. NaN is never better.
    A training that has ended does not continue when it is resumed.

    Args:
        monitor: The metric's name, such as ``"MulticlassAccuracy"``, or label and name as in ``save_best``:
            ``"eval/MulticlassAccuracy"``; ``"eval/loss/kl"`` for a part of the model's loss.
        dataloader_label: Label of an evaluator (``"eval"``) or of the training data (``"train"``), unless ``monitor``
            begins with it. By default the only evaluator that has the metric.
        threshold: The value to compare the metric with; a finite number.
        comp: How to compare a value with the threshold: ``"less"``, ``"greater"`` or a function of two tensors such as
            ``torch.less``. If None, the metric's ``higher_is_better`` decides.
        stop_on_batch: Whether to read a training metric also after each batch: its value over the epoch so far.
            This computes the metric and synchronizes with the device at every batch.

    Raises:
        ValueError: A value is out of range. When training starts: the metric or the label does not exist.

    Example:
        >>> ThresholdStopper("MulticlassAccuracy", "eval", threshold=0.9).threshold
        0.9
    """

    threshold: float = attrs.field(default=math.nan)  # not given: an error, as it is not finite
    stop_on_batch: bool = attrs.field(default=False, kw_only=True, validator=is_flag)

    last: float | None = saved(default=None)
    """The last value that was read."""

    @threshold.validator
    def _check_threshold(self, _: object, threshold: Any) -> None:
        if isinstance(threshold, bool) or not isinstance(threshold, (int, float)) or not math.isfinite(threshold):
            raise ValueError(f"threshold must be a finite number, got {threshold!r}.")

    def fit_start(self, state: State, logger: Logger) -> None:
        """Check that the metric exists, and that it is a training metric if ``stop_on_batch`` is True.

        Raises:
            ValueError: The label or the metric does not exist, or it is not a training metric.
        """
        MetricStopper.fit_start(self, state, logger)
        if self.stop_on_batch and self.label != state.dataloader_label:
            raise ValueError(
                f"stop_on_batch=True reads training metrics, and {self.label!r} is an evaluator. "
                f"Set dataloader_label={state.dataloader_label!r}, or evaluate more often."
            )

    def batch_end(self, state: State, logger: Logger) -> None:
        """Read the training metric if ``stop_on_batch`` is True."""
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
        value = self.last
        return value is not None and not math.isnan(value) and self.is_better(value, self.threshold, state)

    def reason(self) -> str:
        """Return the metric, its last value and the threshold."""
        name = f"{self.label}/{self.monitor}"
        return f"ThresholdStopper: {name}={self.last:.4g} is better than threshold={self.threshold:g}"
