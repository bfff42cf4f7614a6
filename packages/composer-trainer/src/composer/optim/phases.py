"""The phases of a schedule: their lengths as settings, and how much of each a run has completed."""

from __future__ import annotations

import warnings
from typing import Protocol, runtime_checkable

from composer.core import State, Time, TimeUnit
from composer.optim.clock import position

__all__ = [
    "ROUNDING",
    "WHOLE_TRAINING",
    "WarmsUp",
    "after_warmup",
    "before_decay",
    "completed",
    "fraction_of",
    "to_decay_period",
    "to_length",
    "to_step_size",
    "to_t_0",
    "to_t_decay",
    "to_t_max",
    "to_t_scale",
    "to_t_warmup",
    "warn_of_endless_warmup",
]

# 0.07 of 100 batches is 7.000000000000001: without a margin, a step at that time would be a batch late.
ROUNDING = 1e-9
WHOLE_TRAINING = Time(1, TimeUnit.DURATION)


def _time(name: str, given: Time | str) -> Time:
    time = Time.from_input(given, name=name)
    if time.value < 0:
        raise ValueError(f"{name} must not be negative, got {time}.")
    return time


def to_length(name: str, given: Time | str) -> Time:
    """Return a time of more than 0; errors call it ``name``."""
    time = _time(name, given)
    if not time.value:
        raise ValueError(f"{name} must be longer than 0, got {time}.")
    return time


# One per field: type checkers infer a converter's argument only from a named function.
def to_t_decay(given: Time | str) -> Time:
    """Return ``t_decay`` as a time of 0 or more."""
    return _time("t_decay", given)


def to_t_warmup(given: Time | str) -> Time:
    """Return ``t_warmup`` as a time of 0 or more."""
    return _time("t_warmup", given)


def to_t_max(given: Time | str) -> Time:
    """Return ``t_max`` as a time of more than 0."""
    return to_length("t_max", given)


def to_t_0(given: Time | str) -> Time:
    """Return ``t_0`` as a time of more than 0."""
    return to_length("t_0", given)


def to_decay_period(given: Time | str) -> Time:
    """Return ``decay_period`` as a time of more than 0."""
    return to_length("decay_period", given)


def to_step_size(given: Time | str) -> Time:
    """Return ``step_size`` as a time of more than 0."""
    return to_length("step_size", given)


def to_t_scale(given: Time | str | None) -> Time | None:
    """Return ``t_scale`` as a time of more than 0, or None."""
    return None if given is None else to_length("t_scale", given)


def fraction_of(done: float, length: float) -> float:
    """Return the completed fraction of ``length``, at most 1."""
    return min(done / length, 1.0) if length > 0 else 1.0


@runtime_checkable
class WarmsUp(Protocol):
    """A schedule that starts with a warm-up."""

    @property
    def t_warmup(self) -> Time:
        """The length of the warm-up."""

    @property
    def scale_warmup(self) -> bool:
        """Whether the scale schedule ratio also stretches it."""


def _warmup(schedule: WarmsUp, ssr: float) -> tuple[Time, float]:
    """Return the warm-up, with the ratio that stretches it."""
    return schedule.t_warmup, ssr if schedule.scale_warmup else 1.0


def _end(state: State, t_max: Time, ssr: float) -> tuple[Time, float]:
    """Return the end of a schedule, with the ratio that stretches it."""
    if ssr == 1 or t_max.unit is TimeUnit.DURATION:
        return t_max, 1.0
    # The trainer truncates max_duration to a whole number of its unit; a schedule of the same length ends with it.
    whole = t_max * ssr
    return (whole, 1.0) if whole == state.max_duration else (t_max, ssr)


def completed(state: State, t_max: Time, ssr: float) -> float:
    """Return the completed fraction of a schedule."""
    done, (whole,) = position(state, _end(state, t_max, ssr))
    return fraction_of(done, whole)


def after_warmup(schedule: WarmsUp, state: State, ssr: float, t_max: Time | None = None) -> tuple[float, float]:
    """Return the completed fractions of the warm-up and of the rest of ``t_max``; the rest is 0 without ``t_max``.

    Raises:
        ValueError: The warm-up is longer than ``t_max``.
    """
    ends = () if t_max is None else (_end(state, t_max, ssr),)
    done, (warmup, *wholes) = position(state, _warmup(schedule, ssr), *ends)
    for whole in wholes:
        if warmup > whole:
            raise ValueError(
                f"t_warmup must not be longer than t_max, which includes it; got t_warmup={schedule.t_warmup} and "
                f"t_max={t_max} in a training of {state.max_duration} with a scale schedule ratio of {ssr}."
            )
        if done >= warmup:
            return 1.0, fraction_of(done - warmup, whole - warmup)
    return (done / warmup if done < warmup else 1.0), 0.0


def before_decay(schedule: WarmsUp, t_decay: Time, state: State, ssr: float) -> tuple[float, float]:
    """Return the completed fractions of the warm-up and of ``t_decay``, which is the end of the training.

    Raises:
        ValueError: Both together are longer than the training.
    """
    done, (warmup, decay, whole) = position(state, _warmup(schedule, ssr), (t_decay, ssr), (WHOLE_TRAINING, 1.0))
    if warmup + decay > whole * (1 + ROUNDING):
        raise ValueError(
            f"t_warmup and t_decay together must not be longer than the training, got t_warmup={schedule.t_warmup} and "
            f"t_decay={t_decay} in a training of {state.max_duration} with a scale schedule ratio of {ssr}. Shorten "
            "them, or pass fractions of the training: t_decay='0.2dur'."
        )
    return fraction_of(done, warmup), max(fraction_of(done - (whole - decay), decay), 0.0)


def warn_of_endless_warmup(schedule: WarmsUp, state: State, ssr: float) -> None:
    """Warn if the training ends before the warm-up does, provided that the two can be compared."""
    try:
        _, (warmup, whole) = position(state, _warmup(schedule, ssr), (WHOLE_TRAINING, 1.0))
    except ValueError:
        return
    if warmup > whole:
        warnings.warn(
            f"t_warmup={schedule.t_warmup} is longer than the training of {state.max_duration}: the learning rate "
            "never reaches its full value. Shorten the warm-up, or pass a fraction of the training: t_warmup='0.1dur'.",
            stacklevel=4,
        )
