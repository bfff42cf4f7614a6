"""The times of a schedule: as settings, on a run's clock, and as completed fractions; and learning rates from them."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol, runtime_checkable

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from composer.core import State, Time, TimeUnit
from composer.core.optimizers import base_rate, set_rate

# 0.07 of 100 batches is 7.000000000000001: without a margin, a step at that time would be a batch late.
ROUNDING = 1e-9
WHOLE_TRAINING = Time(1, TimeUnit.DURATION)
_NO_COMMON_UNIT = (
    "{spans} cannot be converted to one unit: pass all of a schedule's times in one unit, or in epochs, batches and "
    "durations with a data loader that has a length; for tokens with batches, also DataSpec(loader, num_tokens=...)."
)


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


def position(state: State, *spans: tuple[Time, float]) -> tuple[float, list[float]]:
    """Return the completed part of the training and the lengths of the spans, all in one unit.

    Durations are fractions of ``state.max_duration``. Epochs are counted in batches if the length of an epoch is known,
    so that a schedule changes with every batch; otherwise only whole epochs count. Batches and epochs are counted in
    tokens beside other spans in tokens, if the data spec has ``num_tokens`` and a length. A span of 0 has any unit.

    Args:
        state: The run.
        spans: Lengths of time, each with the scale schedule ratio that multiplies it unless it is a duration.

    Raises:
        ValueError: A span is a duration and the training has no length, or the spans have units that cannot be
            converted into one another.

    Example:
        >>> state = State(model=None, max_duration="10ep", dataloader_len=50)
        >>> position(state, (Time(20, "ba"), 1.0), (Time(0.5, "dur"), 1.0))
        (0, [20, 250.0])
    """
    parts = [_absolute(span, ratio, state) for span, ratio in spans]
    units_of_spans = [unit for length, unit in parts if length]
    parts = [(n, unit if n or not units_of_spans else units_of_spans[0]) for n, unit in parts]
    is_in_epochs = any(unit is TimeUnit.EPOCH for _, unit in parts)
    spec, batches = state.train_data_spec, state.dataloader_len
    if batches is None and spec is not None:
        batches = spec.length
    if batches is not None:
        parts = [(n * batches, TimeUnit.BATCH) if unit is TimeUnit.EPOCH else (n, unit) for n, unit in parts]
    elif is_in_epochs and any(length != int(length) for length, _ in parts):
        raise ValueError(
            f"{' and '.join(str(span) for span, _ in spans)}: a part of an epoch needs a data loader with a known "
            "length. Define its __len__, or pass max_duration and the schedule's times in batches."
        )
    if spec is not None and spec.num_tokens and spec.length and any(unit is TimeUnit.TOKEN for _, unit in parts):
        tokens = spec.num_tokens / spec.length
        parts = [(round(n * tokens, 9), TimeUnit.TOKEN) if unit is TimeUnit.BATCH else (n, unit) for n, unit in parts]
    lengths, units = [length for length, _ in parts], {unit for _, unit in parts}
    if len(units) > 1:
        raise ValueError(_NO_COMMON_UNIT.format(spans=" and ".join(str(span) for span, _ in spans)))
    (unit,) = units
    if unit is TimeUnit.BATCH and is_in_epochs:
        clock = state.timestamp
        if not clock.count(TimeUnit.SAMPLE):  # a program for Composer may set no other counts
            return clock.count(TimeUnit.BATCH), lengths
        # Not all batches, as earlier epochs may have had another length.
        return clock.count(TimeUnit.EPOCH) * (batches or 0) + clock.count(TimeUnit.BATCH, in_epoch=True), lengths
    return state.timestamp.count(unit), lengths


def convert_time(time: Time | str, state: State, ssr: float = 1.0) -> Time:
    """Return a schedule's time in the unit in which the run counts it: epochs in batches, if their number is known.

    Args:
        time: The time; a duration becomes a part of ``state.max_duration``.
        state: The run.
        ssr: The scale schedule ratio, which multiplies the time unless it is a duration.

    Raises:
        ValueError: The time is a duration, and the training has no length.

    Example:
        >>> convert_time("0.5dur", State(model=None, max_duration="10ep", dataloader_len=50))
        Time(250, TimeUnit.BATCH)
    """
    length, unit = _absolute(Time.from_input(time, name="time"), ssr, state)
    if unit is TimeUnit.EPOCH and state.dataloader_len is not None:
        length, unit = length * state.dataloader_len, TimeUnit.BATCH
    return Time(1, unit) * length


def _absolute(span: Time, ratio: float, state: State) -> tuple[float, TimeUnit]:
    if span.unit is not TimeUnit.DURATION:
        # Without rounding, 0.29 of 100 batches (28.999999999999996) would be reached a batch early.
        return (span.value if ratio == 1 else round(span.value * ratio, 9)), span.unit
    whole = state.max_duration
    if whole is None:
        raise ValueError(f"{span} is a fraction of the training, which has no length; set e.g. max_duration='10ep'.")
    # Without rounding, 0.07 of 100 batches (7.000000000000001) would be reached a batch late.
    length = span.value * whole.value
    return length if isinstance(length, int) else round(length, 9), whole.unit


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
    """Return the completed fractions of the warm-up and of the rest of ``t_max``; the rest is 0 without ``t_max``."""
    ends = () if t_max is None else (_end(state, t_max, ssr),)
    done, (warmup, *wholes) = position(state, _warmup(schedule, ssr), *ends)
    for whole in wholes:
        if done >= warmup:
            return 1.0, fraction_of(done - warmup, whole - warmup) if whole > warmup else 0.0
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
        # A schedule of the user's own may have a string.
        span = to_t_warmup(schedule.t_warmup), ssr if schedule.scale_warmup else 1.0
        _, (warmup, whole) = position(state, span, (WHOLE_TRAINING, 1.0))
    except (TypeError, ValueError):
        return
    unit, spec = _absolute(*span, state)[1], state.train_data_spec
    if warmup and unit is TimeUnit.EPOCH and state.dataloader_len is None and spec is not None and spec.length is None:
        warnings.warn(
            f"t_warmup={schedule.t_warmup} is in epochs of an unknown length: the learning rate is 0 in all of the "
            "first epoch, which trains nothing. Give t_warmup and max_duration in batches, or the data a length.",
            stacklevel=4,
        )
    if warmup > whole:
        warnings.warn(
            f"t_warmup={schedule.t_warmup} is longer than the training of {state.max_duration}: the learning rate "
            "never reaches its full value. Shorten the warm-up, or pass a fraction of the training: t_warmup='0.1dur'.",
            stacklevel=4,
        )


class ClockLR(LRScheduler):
    """Set each learning rate to its initial value times a factor that depends only on the run's clock.

    A rate that is assigned between two steps becomes the initial value; see :mod:`composer.core.optimizers`.

    ``torch.optim.lr_scheduler.LambdaLR`` counts its own steps instead, and warns about the order of steps when a loss
    scaler skips the first step or an algorithm wraps the optimizer.

    Args:
        optimizer: The optimizer.
        factor: Function that returns the current factor.
    """

    def __init__(self, optimizer: Optimizer, factor: Callable[[], float]) -> None:
        self._factor = factor
        super().__init__(optimizer)

    def get_lr(self) -> list[float | Tensor]:
        """Return the learning rates for the current clock."""
        factor = self._factor()
        if type(factor) is not float or not 0 <= factor < math.inf:
            factor = _checked(factor, self._factor)
        return [base_rate(group) * factor for group in self.optimizer.param_groups]

    def step(self, epoch: int | None = None) -> None:
        """Set the learning rates; ``epoch`` is ignored."""
        self._step_count += 1
        self.last_epoch += 1
        self._last_lr = self.get_lr()
        for group, rate in zip(self.optimizer.param_groups, self._last_lr, strict=True):
            set_rate(group, rate)

    def state_dict(self) -> dict[str, Any]:
        """Return the last learning rates, for information: the clock alone determines the next ones."""
        return {"_last_lr": self._last_lr}


def _checked(factor: Any, schedule: Any) -> float:
    """Return the factor as a plain float.

    Raises:
        TypeError: It is not a number.
        ValueError: It is negative, infinite or not a number (NaN).
    """
    try:
        number = math.nan if isinstance(factor, (str, bytes)) else float(factor)
    except (TypeError, ValueError, RuntimeError):
        number = math.nan
    if not 0 <= number < math.inf:
        is_number = isinstance(factor, (int, float))
        while isinstance(schedule, partial):  # of the user's function, or of a function that calls it
            schedule = schedule.args[0] if schedule.args and callable(schedule.args[0]) else schedule.func
        raise (ValueError if is_number else TypeError)(
            f"The schedule {getattr(schedule, '__qualname__', schedule)} must return the factor of the learning rates, "
            f"a finite number of 0 or more, got {factor!r}."
        )
    return number
