"""EMA: evaluate with a moving average of the weights."""

from __future__ import annotations

import math
import warnings
from typing import Any, ClassVar

import attrs
from torch import nn

from composer.algorithms._averages import (
    SWAPS,
    AveragedWeights,
    WeightAveraging,
    to_moment,
    to_time,
    to_update_interval,
)
from composer.algorithms._idle import warn_at_end, warn_if_idle
from composer.core import Event, Logger, State, Time, Timestamp, TimeUnit, saved
from composer.core.checks import caller_level, number
from composer.core.saving.components import transient

_TRIAL = 10  # batches; a shorter training only shows that everything runs


def _to_half_life(value: Time | str | int | None) -> Time | None:
    return None if value is None else to_time(value, "half_life")


def _to_ema_start(value: Time | str | int) -> Time:
    return to_moment(value, "ema_start")


@attrs.define(eq=False)
class EMA(WeightAveraging):
    """Keep an exponential moving average of the weights and evaluate with it; training weights do not change.

    See :func:`composer.functional.update_averages`. Parameters that are trained and the running means and
    variances of norms are averaged; other buffers are copied. Frozen parameters keep their present values.

    Args:
        half_life: The time in which the influence of a weight halves, in any unit; an int is a number of batches.
            Fractions of epochs need ``State.dataloader_len``; without it, only complete epochs count.
        smoothing: The weight of the old average in an update, in ``[0, 1)``; requires ``half_life=None``.
        ema_start: When averaging starts.
        update_interval: The interval of updates, in batches or epochs; if None, every epoch for a ``half_life`` in
            epochs, else every batch.

    Raises:
        TypeError: A value is not a time or not a number.
        ValueError: Both or neither of ``half_life`` and ``smoothing`` are set, or a value is out of range.

    Example:
        >>> average = EMA(half_life="2ep")
        >>> average.half_life, average.update_interval
        (Time(2, TimeUnit.EPOCH), Time(1, TimeUnit.EPOCH))
    """

    half_life: Time | None = attrs.field(default="1000ba", converter=_to_half_life)  # type: ignore[assignment]  # mypy overlooks the converter
    smoothing: float | None = number(None, 0, 1, below=True, meaning="It is the weight of the old average.")
    ema_start: Time = attrs.field(default="0.0dur", converter=_to_ema_start)
    update_interval: Time | None = attrs.field(default=None, converter=attrs.converters.optional(to_update_interval))

    _averages: AveragedWeights = transient(factory=lambda: AveragedWeights("EMA"))
    _updated_at: Timestamp = saved(factory=Timestamp)
    _has_warned: bool = transient(default=False)

    reads: ClassVar = {"model", "timestamp", "max_duration", "dataloader_len"}
    writes: ClassVar = {"model"}

    def __attrs_post_init__(self) -> None:
        if (self.half_life is None) == (self.smoothing is None):
            raise ValueError(
                f"EMA needs either half_life or smoothing, got half_life={self.half_life} and "
                f"smoothing={self.smoothing}. To use smoothing, pass half_life=None."
            )
        if self.half_life is not None and self.half_life.value <= 0:
            raise ValueError(f"half_life must be more than 0, got {self.half_life}.")
        if self.update_interval is None:
            slow = self.half_life is not None and self.half_life.unit in {TimeUnit.EPOCH, TimeUnit.ITERATION}
            self.update_interval = Time(1, TimeUnit.EPOCH if slow else TimeUnit.BATCH)
        warn_if_idle(self, smoothing=self.smoothing == 0, ema_start=self.ema_start == Time(1, TimeUnit.DURATION))

    def apply(self, event: Event, state: State, logger: Logger) -> None:
        """Update the average, or exchange it with the training weights around an evaluation."""
        if event is Event.FIT_START:
            if self._averages.begin_fit(state):
                self._updated_at = Timestamp()
            self._warn_of_slow_average(state)
            return
        self._averages.check(state.model, training=event not in SWAPS)
        if event in SWAPS:
            self._averages.swap(event)
            if event is Event.EVAL_START:
                self._warn_of_slow_average(state, is_evaluation=True)
        elif event is Event.FIT_END:
            self._averages.end_fit()
            self._averages.warn_if_empty(self, self.ema_start, state)
            if self._averages and not self._updated_at.counts.batch:
                warn_at_end(
                    state,
                    f"{self!r} has never updated its averages, which are the weights that averaging began with: the "
                    "fit ended before an update_interval. Choose a shorter one.",
                )
        else:
            is_due = self.is_update_due(event, state)
            if self._averages:
                if is_due:
                    self._update(state)
            # An ema_start of 0 needs no length of the training.
            elif not self.ema_start.value or state.has_reached(self.ema_start):
                self._averages.begin(state.model)
            if is_due:  # also before averaging begins, so that the first update has the share of an interval
                self._updated_at = state.timestamp

    def get_ema_model(self, model: nn.Module) -> nn.Module:
        """Return a copy of ``model`` with the averaged weights.

        Raises:
            RuntimeError: There are no averages yet.
        """
        if not self._averages:
            raise RuntimeError(f"EMA has not averaged anything yet: it begins at {self.ema_start}.")
        return self._averages.copy_into(model, averaged=True)

    def get_training_model(self, model: nn.Module) -> nn.Module:
        """Return a copy of ``model`` with the training weights, also while the averages are in it."""
        return self._averages.copy_into(model, averaged=False)

    def ensure_compatible_state_dict(self, state: dict[str, Any]) -> None:
        """Call ``check_state_dict``; the name is that of MosaicML Composer."""
        self.check_state_dict(state)

    def _update(self, state: State) -> None:
        # By the time since the last update, so that the half-life does not depend on the interval of updates.
        smoothing = 0.5 ** self._half_lives_passed(state) if self.smoothing is None else self.smoothing
        self._averages.update(state.model, smoothing)
        self.acted += 1

    def _warn_of_slow_average(self, state: State, *, is_evaluation: bool = False) -> None:
        """Warn if the first weights are more than half of the averages, until the training ends or in an evaluation."""
        length = float(state.timestamp.batch) if is_evaluation else _in_batches(state.max_duration, state)
        start, interval = _in_batches(self.ema_start, state), _in_batches(self.update_interval, state)
        if self.smoothing is None:
            half_life = _in_batches(self.half_life, state)
        else:
            # From smoothing ** (half_life / interval) = 0.5.
            half_life = interval and self.smoothing and interval * math.log(0.5) / math.log(self.smoothing)
        averaged = None if length is None or start is None else max(0, length - start)
        if self._has_warned or averaged is None or not half_life or not _TRIAL <= averaged < half_life:
            return
        self._has_warned = True
        if is_evaluation:
            problem, remedy = f"these metrics are of averages over {averaged:.0f}", ""
        else:
            problem = f"the fit averages over {averaged:.0f}"
            remedy = f"Choose a shorter half_life, such as '{int(averaged) // 10}ba'. "
        warnings.warn(
            f"The averages of EMA are mostly the weights that averaging begins with: their influence halves in "
            f"{half_life:.0f} batches, and {problem}. {remedy}In the Trainer, Evaluator(..., training_weights=True) "
            "logs the metrics of the training weights, too.",
            stacklevel=caller_level(),
        )

    def _half_lives_passed(self, state: State) -> float:
        assert self.half_life is not None
        length, unit = self.half_life.value, self.half_life.unit
        if unit is TimeUnit.DURATION:
            duration = state.max_duration
            if duration is None:
                raise ValueError(
                    f"EMA's half_life, {self.half_life}, is a fraction of State.max_duration, which is not set; "
                    "use e.g. half_life='1000ba'."
                )
            length, unit = length * duration.value, duration.unit
        batches = state.dataloader_len if unit is TimeUnit.EPOCH else None
        passed = _position(state.timestamp, unit, batches) - _position(self._updated_at, unit, batches)
        return max(passed, 0) / length


def _in_batches(time: Time | None, state: State) -> float | None:
    """Return a length of time in batches; None if it has another unit, or the length of an epoch is unknown."""
    if time is None:
        return None
    if time.unit is TimeUnit.DURATION:
        duration = _in_batches(state.max_duration, state)
        return None if duration is None else time.value * duration
    if time.unit is TimeUnit.EPOCH and state.dataloader_len is not None:
        return time.value * int(state.dataloader_len)
    return time.value if time.unit is TimeUnit.BATCH else None


def _position(timestamp: Timestamp, unit: TimeUnit, batches_per_epoch: int | None) -> float:
    """Return the progress in ``unit``; with the fraction of the current epoch, if its length is known."""
    done = timestamp.count(unit)
    return done + timestamp.count(TimeUnit.BATCH, in_epoch=True) / batches_per_epoch if batches_per_epoch else done
