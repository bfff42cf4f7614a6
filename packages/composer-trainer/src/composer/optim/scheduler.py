"""Schedules: the factor of the learning rate as a function of the run's clock.

A factor is a function of how much of the training is complete *before* the batch that uses it: batch ``k``, counted
from 0, is trained with exactly ``f(k)``. In the formulas ``t`` is the completed part and ``w`` the warm-up.
"""

from __future__ import annotations

import inspect
import itertools
import math
import warnings
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Protocol, runtime_checkable

import attrs
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from composer.core import State, Time, TimeUnit
from composer.core.arguments import NamesArguments
from composer.core.checks import is_flag, number_between
from composer.optim.clock import ClockLR, position

__all__ = [
    "ComposerScheduler",
    "ConstantScheduler",
    "ConstantWithWarmupScheduler",
    "CosineAnnealingScheduler",
    "CosineAnnealingWarmRestartsScheduler",
    "CosineAnnealingWithWarmupScheduler",
    "ExponentialScheduler",
    "LinearScheduler",
    "LinearWithWarmupScheduler",
    "MultiStepScheduler",
    "MultiStepWithWarmupScheduler",
    "PolynomialScheduler",
    "PolynomialWithWarmupScheduler",
    "StepScheduler",
    "compile_composer_scheduler",
]

# 0.07 of 100 batches is 7.000000000000001: without a margin, a step at that time would be a batch late.
_ROUNDING = 1e-9
_WHOLE_TRAINING = Time(1, TimeUnit.DURATION)
_AN_EPOCH = Time(1, TimeUnit.EPOCH)
_FACTOR = number_between(0, meaning="The learning rate is multiplied by it.")
_GAMMA = number_between(0, above=True, meaning="The learning rate is multiplied by it at each step of the schedule.")
_POWER = number_between(0, above=True, meaning="It is the exponent of the decay.")


@runtime_checkable
class ComposerScheduler(Protocol):
    """A schedule: a function from a run's state to the factor that multiplies each learning rate.

    Any function with this signature is a schedule.

    Example:
        >>> def half_after_five_epochs(state, ssr=1.0):
        ...     return 0.5 if state.timestamp >= "5ep" else 1.0
        >>> isinstance(half_after_five_epochs, ComposerScheduler)
        True
    """

    def __call__(self, state: State, ssr: float = 1.0) -> float:
        """Return the factor for the next batch.

        Args:
            state: The run, of which the clock, ``max_duration`` and ``dataloader_len`` are read.
            ssr: The scale schedule ratio, which multiplies all times except durations.
        """
        ...


def compile_composer_scheduler(
    scheduler: ComposerScheduler, state: State, ssr: float = 1.0, optimizer: Optimizer | None = None
) -> LRScheduler:
    """Return a torch scheduler that sets an optimizer's learning rates from the run's clock.

    It has no state of its own: call its ``step()`` after the clock has advanced, once per batch or once per epoch.

    Args:
        scheduler: The schedule.
        state: The run.
        ssr: The scale schedule ratio; ``state.max_duration`` must have been multiplied by it.
        optimizer: The optimizer whose learning rates to set; the only one of ``state.optimizers`` if None.

    Raises:
        ValueError: No optimizer is given and the state has none or several; the schedule does not fit the state; or it
            takes no ``ssr`` and the ratio is not 1.

    Example:
        >>> import torch
        >>> optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
        >>> state = State(model=None, max_duration="4ba", optimizers=optimizer)
        >>> compile_composer_scheduler(LinearScheduler(alpha_f=0.5), state).get_last_lr()
        [0.1]
    """
    if optimizer is None:
        if len(state.optimizers) != 1:
            raise ValueError(
                f"optimizer is required to choose one of the {len(state.optimizers)} optimizers of the state; "
                "it can be omitted only if there is exactly one."
            )
        optimizer = state.optimizers[0]
    if isinstance(scheduler, _WarmsUp):
        _warn_of_endless_warmup(scheduler, state, ssr)
    if "ssr" in inspect.signature(scheduler).parameters:
        return ClockLR(optimizer, partial(scheduler, state, ssr=ssr))
    if ssr != 1:
        raise ValueError(
            f"scale_schedule_ratio must be 1 with {scheduler!r}, which takes no ssr, got {ssr}. "
            "Write it as a function f(state, ssr=1.0) that multiplies its times by ssr."
        )
    return ClockLR(optimizer, partial(scheduler, state))


def _time(name: str, given: Time | str) -> Time:
    time = Time.from_input(given, name=name)
    if time.value < 0:
        raise ValueError(f"{name} must not be negative, got {time}.")
    return time


def _length(name: str, given: Time | str) -> Time:
    time = _time(name, given)
    if not time.value:
        raise ValueError(f"{name} must be longer than 0, got {time}.")
    return time


# One per field: type checkers infer a converter's argument only from a named function.
def _to_t_warmup(given: Time | str) -> Time:
    return _time("t_warmup", given)


def _to_t_max(given: Time | str) -> Time:
    return _length("t_max", given)


def _to_t_0(given: Time | str) -> Time:
    return _length("t_0", given)


def _to_decay_period(given: Time | str) -> Time:
    return _length("decay_period", given)


def _to_step_size(given: Time | str) -> Time:
    return _length("step_size", given)


def _to_milestones(given: Time | str | Sequence[Time | str]) -> tuple[Time, ...]:
    several = given if isinstance(given, Iterable) and not isinstance(given, str) else [given]
    times = tuple(_length("milestones", one) for one in several)
    for earlier, later in itertools.pairwise(times):
        if earlier.unit is later.unit and later < earlier:
            raise ValueError(f"milestones must be in ascending order, got {later} after {earlier}.")
    return times


def _check_some(_: object, __: object, milestones: Sequence[Time]) -> None:
    if not milestones:
        raise ValueError("milestones must be one or several times, such as ['30ep', '60ep'], got none.")


def _fraction(done: float, length: float) -> float:
    """Return the completed fraction of ``length``, at most 1."""
    return min(done / length, 1.0) if length > 0 else 1.0


def _cosine(fraction: float, alpha_f: float) -> float:
    return alpha_f + (1 - alpha_f) * (1 + math.cos(math.pi * fraction)) / 2


def _line(fraction: float, first: float, last: float) -> float:
    return first + (last - first) * fraction


def _power(fraction: float, power: float, alpha_f: float) -> float:
    return float(alpha_f + (1 - alpha_f) * (1 - fraction) ** power)


@runtime_checkable
class _WarmsUp(Protocol):
    """A schedule that starts with a warm-up."""

    @property
    def t_warmup(self) -> Time: ...
    @property
    def scale_warmup(self) -> bool: ...


def _warmup(schedule: _WarmsUp, ssr: float) -> tuple[Time, float]:
    """Return the warm-up, with the ratio that stretches it."""
    return schedule.t_warmup, ssr if schedule.scale_warmup else 1.0


def _end(state: State, t_max: Time, ssr: float) -> tuple[Time, float]:
    """Return the end of a schedule, with the ratio that stretches it."""
    if ssr == 1 or t_max.unit is TimeUnit.DURATION:
        return t_max, 1.0
    # The trainer truncates max_duration to a whole number of its unit; a schedule of the same length ends with it.
    whole = t_max * ssr
    return (whole, 1.0) if whole == state.max_duration else (t_max, ssr)


def _done(state: State, t_max: Time, ssr: float) -> float:
    """Return the completed fraction of a schedule."""
    done, (whole,) = position(state, _end(state, t_max, ssr))
    return _fraction(done, whole)


def _after_warmup(schedule: _WarmsUp, state: State, ssr: float, t_max: Time | None = None) -> tuple[float, float]:
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
            return 1.0, _fraction(done - warmup, whole - warmup)
    return (done / warmup if done < warmup else 1.0), 0.0


def _warn_of_endless_warmup(schedule: _WarmsUp, state: State, ssr: float) -> None:
    """Warn if the training ends before the warm-up does, provided that the two can be compared."""
    try:
        _, (warmup, whole) = position(state, _warmup(schedule, ssr), (_WHOLE_TRAINING, 1.0))
    except ValueError:
        return
    if warmup > whole:
        warnings.warn(
            f"t_warmup={schedule.t_warmup} is longer than the training of {state.max_duration}: the learning rate "
            "never reaches its full value. Shorten the warm-up, or pass a fraction of the training: t_warmup='0.1dur'.",
            UserWarning,
            stacklevel=4,
        )


@attrs.frozen
class ConstantScheduler(NamesArguments):
    """``alpha`` until ``t_max``, then 0.

    Example:
        >>> ConstantScheduler(alpha=0.5)(State(model=None, max_duration="4ba"))
        0.5
    """

    alpha: float = attrs.field(validator=_FACTOR, default=1.0)
    t_max: Time = attrs.field(default=_WHOLE_TRAINING, converter=_to_t_max)

    def __call__(self, state: State, ssr: float = 1.0) -> float:
        """Return the factor for the next batch."""
        return self.alpha if _done(state, self.t_max, ssr) < 1 else 0.0


@attrs.frozen
class ConstantWithWarmupScheduler(NamesArguments):
    """From 0 to ``alpha`` in ``t_warmup``, ``alpha`` until ``t_max``, then 0.

    Args:
        t_warmup: Length of the warm-up, which is included in ``t_max``.
        alpha: The factor.
        t_max: Length of the schedule.
        scale_warmup: Whether the scale schedule ratio also stretches the warm-up.

    Raises:
        ValueError: A value is out of range.

    Example:
        >>> ConstantWithWarmupScheduler("2ba")(State(model=None, max_duration="4ba"))
        0.0
    """

    t_warmup: Time = attrs.field(converter=_to_t_warmup)
    alpha: float = attrs.field(validator=_FACTOR, default=1.0)
    t_max: Time = attrs.field(default=_WHOLE_TRAINING, converter=_to_t_max)
    scale_warmup: bool = attrs.field(default=False, validator=is_flag)

    def __call__(self, state: State, ssr: float = 1.0) -> float:
        """Return the factor for the next batch."""
        warm, rest = _after_warmup(self, state, ssr, self.t_max)
        return self.alpha * warm if rest < 1 else 0.0


@attrs.frozen
class LinearScheduler(NamesArguments):
    """Linear from ``alpha_i`` to ``alpha_f`` at ``t_max``: ``alpha_i + (alpha_f - alpha_i) * t / t_max``.

    Example:
        >>> LinearScheduler(alpha_i=1.0, alpha_f=0.5)(State(model=None, max_duration="4ba"))
        1.0
    """

    alpha_i: float = attrs.field(validator=_FACTOR, default=1.0)
    alpha_f: float = attrs.field(validator=_FACTOR, default=0.0)
    t_max: Time = attrs.field(default=_WHOLE_TRAINING, converter=_to_t_max)

    def __call__(self, state: State, ssr: float = 1.0) -> float:
        """Return the factor for the next batch."""
        return _line(_done(state, self.t_max, ssr), self.alpha_i, self.alpha_f)


@attrs.frozen
class LinearWithWarmupScheduler(NamesArguments):
    """From 0 to ``alpha_i`` in ``t_warmup``, then a line to ``alpha_f`` at ``t_max``.

    Args:
        t_warmup: Length of the warm-up, which is included in ``t_max``.
        alpha_i: The factor after the warm-up.
        alpha_f: The factor at the end.
        t_max: Length of the schedule.
        scale_warmup: Whether the scale schedule ratio also stretches the warm-up.

    Raises:
        ValueError: A value is out of range.

    Example:
        >>> LinearWithWarmupScheduler("2ba")(State(model=None, max_duration="4ba"))
        0.0
    """

    t_warmup: Time = attrs.field(converter=_to_t_warmup)
    alpha_i: float = attrs.field(validator=_FACTOR, default=1.0)
    alpha_f: float = attrs.field(validator=_FACTOR, default=0.0)
    t_max: Time = attrs.field(default=_WHOLE_TRAINING, converter=_to_t_max)
    scale_warmup: bool = attrs.field(default=False, validator=is_flag)

    def __call__(self, state: State, ssr: float = 1.0) -> float:
        """Return the factor for the next batch."""
        warm, rest = _after_warmup(self, state, ssr, self.t_max)
        return self.alpha_i * warm if warm < 1 else _line(rest, self.alpha_i, self.alpha_f)


@attrs.frozen
class CosineAnnealingScheduler(NamesArguments):
    """Half a cosine from 1 to ``alpha_f`` at ``t_max`` (Loshchilov & Hutter 2016, arXiv:1608.03983).

    ``alpha_f + (1 - alpha_f) * (1 + cos(pi * t / t_max)) / 2``

    Example:
        >>> CosineAnnealingScheduler()(State(model=None, max_duration="4ba"))
        1.0
    """

    t_max: Time = attrs.field(default=_WHOLE_TRAINING, converter=_to_t_max)
    alpha_f: float = attrs.field(validator=_FACTOR, default=0.0)

    def __call__(self, state: State, ssr: float = 1.0) -> float:
        """Return the factor for the next batch."""
        return _cosine(_done(state, self.t_max, ssr), self.alpha_f)


@attrs.frozen
class CosineAnnealingWithWarmupScheduler(NamesArguments):
    """From 0 to 1 in ``t_warmup``, then half a cosine to ``alpha_f`` at ``t_max``.

    ``t / w`` while ``t < w``, then ``alpha_f + (1 - alpha_f) * (1 + cos(pi * (t - w) / (t_max - w))) / 2``

    Args:
        t_warmup: Length of the warm-up, which is included in ``t_max``; ``"0ba"`` for none.
        t_max: Length of the schedule.
        alpha_f: The factor at the end.
        scale_warmup: Whether the scale schedule ratio also stretches the warm-up.

    Raises:
        ValueError: A value is out of range.

    Example:
        >>> CosineAnnealingWithWarmupScheduler("1ep", alpha_f=0.01)(State(model=None, max_duration="4ep"))
        0.0
    """

    t_warmup: Time = attrs.field(converter=_to_t_warmup)
    t_max: Time = attrs.field(default=_WHOLE_TRAINING, converter=_to_t_max)
    alpha_f: float = attrs.field(validator=_FACTOR, default=0.0)
    scale_warmup: bool = attrs.field(default=False, validator=is_flag)

    def __call__(self, state: State, ssr: float = 1.0) -> float:
        """Return the factor for the next batch."""
        warm, rest = _after_warmup(self, state, ssr, self.t_max)
        return warm if warm < 1 else _cosine(rest, self.alpha_f)


@attrs.frozen
class CosineAnnealingWarmRestartsScheduler(NamesArguments):
    """Half cosines from 1 to ``alpha_f`` (arXiv:1608.03983), the first ``t_0`` long, each next ``t_mult`` times longer.

    Example:
        >>> CosineAnnealingWarmRestartsScheduler("10ba", t_mult=2.0)(State(model=None))
        1.0
    """

    t_0: Time = attrs.field(converter=_to_t_0)
    t_mult: float = attrs.field(
        default=1.0, validator=number_between(1, meaning="Each cycle is this many times as long as the one before.")
    )
    alpha_f: float = attrs.field(validator=_FACTOR, default=0.0)

    def __call__(self, state: State, ssr: float = 1.0) -> float:
        """Return the factor for the next batch."""
        done, (length,) = position(state, (self.t_0, ssr))
        if self.t_mult == 1:
            cosines = done / length
            # With the margin, the position in the cosine may be slightly negative.
            return _cosine(max(0.0, cosines - math.floor(cosines + _ROUNDING)), self.alpha_f)
        # The first n cosines take t_0 * (t_mult**n - 1) / (t_mult - 1).
        finished = math.floor(math.log(1 + done / length * (self.t_mult - 1), self.t_mult) + _ROUNDING)
        begin = length * (self.t_mult**finished - 1) / (self.t_mult - 1)
        return _cosine(max(0.0, _fraction(done - begin, length * self.t_mult**finished)), self.alpha_f)


@attrs.frozen
class ExponentialScheduler(NamesArguments):
    """``gamma ** (t / decay_period)``, updated with every batch.

    Example:
        >>> ExponentialScheduler(gamma=0.9)(State(model=None))
        1.0
    """

    gamma: float = attrs.field(validator=_GAMMA)
    decay_period: Time = attrs.field(default=_AN_EPOCH, converter=_to_decay_period)

    def __call__(self, state: State, ssr: float = 1.0) -> float:
        """Return the factor for the next batch."""
        done, (period,) = position(state, (self.decay_period, ssr))
        return float(self.gamma ** (done / period))


@attrs.frozen
class StepScheduler(NamesArguments):
    """``gamma ** floor(t / step_size)``.

    Example:
        >>> StepScheduler("30ep")(State(model=None))
        1.0
    """

    step_size: Time = attrs.field(converter=_to_step_size)
    gamma: float = attrs.field(validator=_GAMMA, default=0.1)

    def __call__(self, state: State, ssr: float = 1.0) -> float:
        """Return the factor for the next batch."""
        done, (step,) = position(state, (self.step_size, ssr))
        return float(self.gamma ** math.floor(done / step + _ROUNDING))


@attrs.frozen
class MultiStepScheduler(NamesArguments):
    """``gamma`` to the power of the number of ``milestones`` that have been reached.

    Example:
        >>> MultiStepScheduler(["30ep", "0.8dur"])(State(model=None, max_duration="90ep"))
        1.0
    """

    milestones: tuple[Time, ...] = attrs.field(converter=_to_milestones, validator=_check_some)
    gamma: float = attrs.field(validator=_GAMMA, default=0.1)

    def __call__(self, state: State, ssr: float = 1.0) -> float:
        """Return the factor for the next batch."""
        return _steps(state, self.milestones, self.gamma, ssr)


@attrs.frozen
class MultiStepWithWarmupScheduler(NamesArguments):
    """From 0 to 1 in ``t_warmup``, then ``gamma`` to the power of the number of ``milestones`` that have been reached.

    Args:
        t_warmup: Length of the warm-up.
        milestones: When the factor is multiplied by ``gamma``, counted from the beginning of the training. One within
            the warm-up takes effect when the warm-up ends. An empty list only warms up.
        gamma: The factor of each step.
        scale_warmup: Whether the scale schedule ratio also stretches the warm-up.

    Raises:
        ValueError: A value is out of range.

    Example:
        >>> MultiStepWithWarmupScheduler("5ep", ["30ep", "60ep"])(State(model=None))
        0.0
    """

    t_warmup: Time = attrs.field(converter=_to_t_warmup)
    milestones: tuple[Time, ...] = attrs.field(converter=_to_milestones)
    gamma: float = attrs.field(validator=_GAMMA, default=0.1)
    scale_warmup: bool = attrs.field(default=False, validator=is_flag)

    def __call__(self, state: State, ssr: float = 1.0) -> float:
        """Return the factor for the next batch."""
        warm, _ = _after_warmup(self, state, ssr)
        return warm if warm < 1 else _steps(state, self.milestones, self.gamma, ssr)


def _steps(state: State, milestones: Sequence[Time], gamma: float, ssr: float) -> float:
    reached = 0
    for milestone in milestones:
        done, (length,) = position(state, (milestone, ssr))
        reached += done >= length - _ROUNDING
    return float(gamma**reached)


@attrs.frozen
class PolynomialScheduler(NamesArguments):
    """``alpha_f + (1 - alpha_f) * (1 - t / t_max) ** power``.

    Example:
        >>> PolynomialScheduler(power=2.0)(State(model=None, max_duration="4ba"))
        1.0
    """

    power: float = attrs.field(validator=_POWER)
    t_max: Time = attrs.field(default=_WHOLE_TRAINING, converter=_to_t_max)
    alpha_f: float = attrs.field(validator=_FACTOR, default=0.0)

    def __call__(self, state: State, ssr: float = 1.0) -> float:
        """Return the factor for the next batch."""
        return _power(_done(state, self.t_max, ssr), self.power, self.alpha_f)


@attrs.frozen
class PolynomialWithWarmupScheduler(NamesArguments):
    """From 0 to 1 in ``t_warmup``, then ``alpha_f + (1 - alpha_f) * (1 - (t - w) / (t_max - w)) ** power``.

    Args:
        t_warmup: Length of the warm-up, which is included in ``t_max``.
        power: The exponent.
        t_max: Length of the schedule.
        alpha_f: The factor at the end.
        scale_warmup: Whether the scale schedule ratio also stretches the warm-up.

    Raises:
        ValueError: A value is out of range.

    Example:
        >>> PolynomialWithWarmupScheduler("2ba")(State(model=None, max_duration="4ba"))
        0.0
    """

    t_warmup: Time = attrs.field(converter=_to_t_warmup)
    power: float = attrs.field(validator=_POWER, default=2.0)
    t_max: Time = attrs.field(default=_WHOLE_TRAINING, converter=_to_t_max)
    alpha_f: float = attrs.field(validator=_FACTOR, default=0.0)
    scale_warmup: bool = attrs.field(default=False, validator=is_flag)

    def __call__(self, state: State, ssr: float = 1.0) -> float:
        """Return the factor for the next batch."""
        warm, rest = _after_warmup(self, state, ssr, self.t_max)
        return warm if warm < 1 else _power(rest, self.power, self.alpha_f)
