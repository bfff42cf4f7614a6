"""EMA: evaluate with a moving average of the weights."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import attrs

from composer import functional as cf
from composer.algorithms._averages import EVALUATION_WEIGHTS, SWAPS, AveragedWeights
from composer.algorithms._checks import to_time, warn_if_idle
from composer.core import Algorithm, Event, Logger, Stage, State, Time, Timestamp, TimeUnit
from composer.core.checks import number_between

if TYPE_CHECKING:
    from collections.abc import Mapping
    from contextlib import AbstractContextManager

    from torch import nn

__all__ = ["EMA"]


def _to_half_life(given: Time | str | int | None) -> Time | None:
    return None if given is None else to_time(given, "half_life")


def _to_ema_start(given: Time | str | int) -> Time:
    return to_time(given, "ema_start")


def _to_update_interval(given: Time | str | int | None) -> Time | None:
    return None if given is None else to_time(given, "update_interval")


@attrs.define(eq=False)
class EMA(Algorithm):
    """Keep an exponential moving average of the weights and evaluate with it; training goes on with its own weights.

    See :func:`composer.functional.update_averages`. Parameters and buffers are averaged.

    Args:
        half_life: After how long a weight's influence has halved, in any unit; a whole number counts batches. Where
            epochs are counted between their ends, ``State.dataloader_len`` says how long they are; without it, they
            count when they are over.
        smoothing: The weight of the old average in an update, in ``[0, 1)``, instead of ``half_life=None``.
        ema_start: When averaging begins.
        update_interval: How often the average is updated, in batches or epochs; None is every epoch if ``half_life`` is
            in epochs, else every batch.

    Raises:
        TypeError: A value is no time or no number.
        ValueError: Both or none of ``half_life`` and ``smoothing`` are given, or a value is out of range.

    Example:
        >>> EMA(half_life="2ep")
        EMA(half_life=Time(2, 'ep'), smoothing=None, ema_start=Time(0.0, 'dur'), update_interval=Time(1, 'ep'))
    """

    half_life: Time | None = attrs.field(default=Time(1000, "ba"), converter=_to_half_life)
    smoothing: float | None = attrs.field(
        default=None,
        validator=attrs.validators.optional(
            number_between(0, 1, below=True, meaning="It is the weight of the old average.")
        ),
    )
    ema_start: Time = attrs.field(default=Time(0.0, "dur"), converter=_to_ema_start)
    update_interval: Time | None = attrs.field(default=None, converter=_to_update_interval)

    _averages: AveragedWeights = attrs.field(factory=lambda: AveragedWeights("EMA"), init=False, repr=False)
    _updated_at: Timestamp = attrs.field(factory=Timestamp, init=False, repr=False)

    runs_at: ClassVar = dict.fromkeys(
        (Event.FIT_START, Event.BATCH_END, Event.EPOCH_END, Event.FIT_END, *sorted(SWAPS)), Stage.WEIGHTS
    )
    reads: ClassVar = {"model", "timestamp", "max_duration", "dataloader_len"}
    writes: ClassVar = {"model"}
    owns: ClassVar = {EVALUATION_WEIGHTS}

    def __attrs_post_init__(self) -> None:
        if (self.half_life is None) == (self.smoothing is None):
            raise ValueError(
                f"EMA needs either half_life or smoothing, got half_life={self.half_life} and "
                f"smoothing={self.smoothing}. To give smoothing, say half_life=None."
            )
        if self.half_life is not None and self.half_life.value <= 0:
            raise ValueError(f"half_life must be more than 0, got {self.half_life}.")
        if self.ema_start.value < 0 or (self.ema_start.unit is TimeUnit.DURATION and self.ema_start.value > 1):
            raise ValueError(f"ema_start must be within the training, got {self.ema_start}: e.g. '0ba', '0.5dur'.")
        if self.update_interval is None:
            slow = self.half_life is not None and self.half_life.unit in {TimeUnit.EPOCH, TimeUnit.ITERATION}
            self.update_interval = Time(1, TimeUnit.EPOCH if slow else TimeUnit.BATCH)
        if self.update_interval.unit not in {TimeUnit.BATCH, TimeUnit.EPOCH} or self.update_interval.value < 1:
            raise ValueError(f"update_interval must be at least one batch or epoch, got {self.update_interval}.")
        warn_if_idle(self, smoothing=self.smoothing == 0, ema_start=self.ema_start == Time(1, TimeUnit.DURATION))

    def runs_at_events(self) -> Mapping[Event, Stage]:
        """Return where it runs: updates come at the end of batches or of epochs."""
        assert self.update_interval is not None
        unused = Event.EPOCH_END if self.update_interval.unit is TimeUnit.BATCH else Event.BATCH_END
        return {event: stage for event, stage in self.runs_at.items() if event is not unused}

    def apply(self, event: Event, state: State, logger: Logger) -> None:
        """Update the average, or exchange it with the training weights around an evaluation."""
        del logger
        if event is Event.FIT_START:
            if self._averages.begin_fit(state):
                self._updated_at = Timestamp()
            return
        self._averages.check(state.model, training=event not in SWAPS)
        if event in SWAPS:
            self._averages.swap(event)
        elif event is Event.FIT_END:
            self._averages.warn_if_empty(self, self.ema_start)
        elif self._is_due(state):
            self._update(state)

    def evaluation_weights(self, state: State) -> AbstractContextManager[None] | None:
        """Return a context in which the model has the averages; None while there are none."""
        return self._averages.in_model(state.model)

    def restore(self, state: State) -> None:
        """Put the training weights back."""
        del state
        self._averages.restore()

    def get_ema_model(self, model: nn.Module) -> nn.Module:
        """Return a copy of ``model`` with the averaged weights.

        Raises:
            RuntimeError: Nothing has been averaged yet.
        """
        if not self._averages:
            raise RuntimeError(f"EMA has not averaged anything yet: it begins at {self.ema_start}.")
        return self._averages.copy_into(model, averaged=True)

    def get_training_model(self, model: nn.Module) -> nn.Module:
        """Return a copy of ``model`` with the weights that are trained, also while the averaged ones are in it."""
        return self._averages.copy_into(model, averaged=False)

    def state_dict(self) -> dict[str, Any]:
        """Return the averaged weights (the training ones, while the model holds the averages), and their time."""
        return {**self._averages.state_dict(), "updated_at": self._updated_at.state_dict()}

    def check_state_dict(self, state: dict[str, Any]) -> None:
        """Refuse what :meth:`state_dict` does not return.

        Raises:
            ValueError: A key is missing or unknown, or a value is of another type.
        """
        self._averages.check_state_dict(state, updated_at=Timestamp)

    def ensure_compatible_state_dict(self, state: dict[str, Any]) -> None:
        """Do as :meth:`check_state_dict`, by the name that it has elsewhere."""
        self.check_state_dict(state)

    def load_state_dict(self, state: dict[str, Any], strict: bool = False) -> None:
        """Go on from what :meth:`state_dict` returned; it has to fit, whatever ``strict`` says."""
        del strict
        self.check_state_dict(state)
        self._averages.load_state_dict(state)
        self._updated_at = Timestamp.from_state_dict(state["updated_at"])

    def _is_due(self, state: State) -> bool:
        assert self.update_interval is not None
        done = state.timestamp.count(self.update_interval.unit)
        if done % self.update_interval.value:
            return False
        # The start of a training whose length is not known is known all the same.
        return bool(self._averages or not self.ema_start.value or state.has_reached(self.ema_start))

    def _update(self, state: State) -> None:
        if not self._averages:
            self._averages.begin(state.model)
        else:
            smoothing = 0.5 ** self._half_lives_passed(state) if self.smoothing is None else self.smoothing
            averages, weights = self._averages.tensors()
            cf.update_averages(averages, weights, smoothing)
        self._updated_at = state.timestamp

    def _half_lives_passed(self, state: State) -> float:
        assert self.half_life is not None
        length, unit = self.half_life.value, self.half_life.unit
        if unit is TimeUnit.DURATION:
            whole = state.max_duration
            if whole is None:
                raise ValueError(
                    f"EMA's half_life, {self.half_life}, is a fraction of State.max_duration, which is not set; "
                    "say e.g. half_life='1000ba'."
                )
            length, unit = length * whole.value, whole.unit
        batches = state.dataloader_len if unit is TimeUnit.EPOCH else None
        passed = _position(state.timestamp, unit, batches) - _position(self._updated_at, unit, batches)
        return max(passed, 0) / length


def _position(timestamp: Timestamp, unit: TimeUnit, batches_per_epoch: int | None) -> float:
    """Return where the training stands in ``unit``; in epochs with the part of the last one, if its length is known."""
    done = timestamp.count(unit)
    return done + timestamp.count(TimeUnit.BATCH, in_epoch=True) / batches_per_epoch if batches_per_epoch else done
