"""Schedules: the factor of the learning rate as a function of the run's clock.

A factor is a function of how much of the training is complete *before* the batch that uses it: batch ``k``, counted
from 0, is trained with exactly ``f(k)``. In the formulas ``t`` is the completed part and ``w`` the warm-up.
"""

from __future__ import annotations

import inspect
import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Protocol, runtime_checkable

import attrs
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from composer.core import State, Time, TimeUnit
from composer.core.checks import NamesArguments, is_flag, number, number_between, one_of
from composer.optim.clock import (
    ROUNDING,
    WHOLE_TRAINING,
    ClockLR,
    WarmsUp,
    after_warmup,
    before_decay,
    completed,
    fraction_of,
    position,
    to_decay_period,
    to_length,
    to_step_size,
    to_t_0,
    to_t_decay,
    to_t_max,
    to_t_scale,
    to_t_warmup,
    warn_of_endless_warmup,
)

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
    if isinstance(scheduler, WarmsUp):
        warn_of_endless_warmup(scheduler, state, ssr)
    if "ssr" in inspect.signature(scheduler).parameters:
        return ClockLR(optimizer, partial(_factor, scheduler, state, ssr=ssr))
    if ssr != 1:
        raise ValueError(
            f"scale_schedule_ratio must be 1 with {scheduler!r}, which takes no ssr, got {ssr}. "
            "Write it as a function f(state, ssr=1.0) that multiplies its times by ssr."
        )
    return ClockLR(optimizer, partial(_factor, scheduler, state))


def _factor(scheduler: ComposerScheduler, state: State, **ssr: float) -> float:
    try:
        return scheduler(state, **ssr)
    except Exception as error:
        if not type(scheduler).__module__.startswith("composer."):
            error.add_note(_NO_STEP)
        raise


_NO_STEP = (
    "A function in schedulers is called with the State: its step is int(state.timestamp.batch). For a function of the "
    "step, use torch.optim.lr_scheduler.LambdaLR(optimizer, f) and step_schedulers_every_batch=True."
)


def _to_milestones(given: Time | str | Sequence[Time | str]) -> tuple[Time, ...]:
    several = given if isinstance(given, Iterable) and not isinstance(given, str) else [given]
    times = tuple(to_length("milestones", one) for one in several)
    for earlier, later in itertools.pairwise(times):
        if earlier.unit is later.unit and later < earlier:
            raise ValueError(f"milestones must be in ascending order, got {later} after {earlier}.")
    return times


def _check_some(_: object, __: object, milestones: Sequence[Time]) -> None:
    if not milestones:
        raise ValueError("milestones must be one or several times, such as ['30ep', '60ep'], got none.")


def _cosine(fraction: float, alpha_f: float) -> float:
    return alpha_f + (1 - alpha_f) * (1 + math.cos(math.pi * fraction)) / 2


_DECAYS: Mapping[str, Callable[[float], float]] = {
    "1-sqrt": lambda fraction: 1 - math.sqrt(fraction),
    "linear": lambda fraction: 1 - fraction,
    "cosine": lambda fraction: _cosine(fraction, 0.0),
}


def _line(fraction: float, first: float, last: float) -> float:
    return first + (last - first) * fraction


def _power(fraction: float, power: float, alpha_f: float) -> float:
    return float(alpha_f + (1 - alpha_f) * (1 - fraction) ** power)


@attrs.frozen
class ConstantScheduler(NamesArguments):
    """``alpha`` until ``t_max``, then 1.

    Example:
        >>> ConstantScheduler(alpha=0.5)(State(model=None, max_duration="4ba"))
        0.5
    """

    alpha: float = attrs.field(validator=_FACTOR, default=1.0)
    t_max: Time = attrs.field(default=WHOLE_TRAINING, converter=to_t_max)

    def __call__(self, state: State, ssr: float = 1.0) -> float:
        """Return the factor for the next batch."""
        return self.alpha if completed(state, self.t_max, ssr) < 1 else 1.0


@attrs.frozen
class ConstantWithWarmupScheduler(NamesArguments):
    """From 0 to ``alpha`` in ``t_warmup``, then ``alpha``.

    Args:
        t_warmup: Length of the warm-up.
        alpha: The factor.
        t_max: Ignored.
        scale_warmup: Whether the scale schedule ratio also stretches the warm-up.

    Raises:
        ValueError: A value is out of range.

    Example:
        >>> ConstantWithWarmupScheduler("2ba")(State(model=None, max_duration="4ba"))
        0.0
    """

    t_warmup: Time = attrs.field(converter=to_t_warmup)
    alpha: float = attrs.field(validator=_FACTOR, default=1.0)
    t_max: Time = attrs.field(default=WHOLE_TRAINING, converter=to_t_max)
    scale_warmup: bool = attrs.field(default=False, validator=is_flag)

    def __call__(self, state: State, ssr: float = 1.0) -> float:
        """Return the factor for the next batch."""
        return self.alpha * after_warmup(self, state, ssr)[0]


@attrs.frozen
class LinearScheduler(NamesArguments):
    """Linear from ``alpha_i`` to ``alpha_f`` at ``t_max``: ``alpha_i + (alpha_f - alpha_i) * t / t_max``.

    Example:
        >>> LinearScheduler(alpha_i=1.0, alpha_f=0.5)(State(model=None, max_duration="4ba"))
        1.0
    """

    alpha_i: float = attrs.field(validator=_FACTOR, default=1.0)
    alpha_f: float = attrs.field(validator=_FACTOR, default=0.0)
    t_max: Time = attrs.field(default=WHOLE_TRAINING, converter=to_t_max)

    def __call__(self, state: State, ssr: float = 1.0) -> float:
        """Return the factor for the next batch."""
        return _line(completed(state, self.t_max, ssr), self.alpha_i, self.alpha_f)


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

    t_warmup: Time = attrs.field(converter=to_t_warmup)
    alpha_i: float = attrs.field(validator=_FACTOR, default=1.0)
    alpha_f: float = attrs.field(validator=_FACTOR, default=0.0)
    t_max: Time = attrs.field(default=WHOLE_TRAINING, converter=to_t_max)
    scale_warmup: bool = attrs.field(default=False, validator=is_flag)

    def __call__(self, state: State, ssr: float = 1.0) -> float:
        """Return the factor for the next batch."""
        warm, rest = after_warmup(self, state, ssr, self.t_max)
        return self.alpha_i * warm if warm < 1 else _line(rest, self.alpha_i, self.alpha_f)


@attrs.frozen
class CosineAnnealingScheduler(NamesArguments):
    """Half a cosine from 1 to ``alpha_f`` at ``t_max`` (Loshchilov & Hutter 2016, arXiv:1608.03983).

    ``alpha_f + (1 - alpha_f) * (1 + cos(pi * t / t_max)) / 2``

    Example:
        >>> CosineAnnealingScheduler()(State(model=None, max_duration="4ba"))
        1.0
    """

    t_max: Time = attrs.field(default=WHOLE_TRAINING, converter=to_t_max)
    alpha_f: float = attrs.field(validator=_FACTOR, default=0.0)

    def __call__(self, state: State, ssr: float = 1.0) -> float:
        """Return the factor for the next batch."""
        return _cosine(completed(state, self.t_max, ssr), self.alpha_f)


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

    t_warmup: Time = attrs.field(converter=to_t_warmup)
    t_max: Time = attrs.field(default=WHOLE_TRAINING, converter=to_t_max)
    alpha_f: float = attrs.field(validator=_FACTOR, default=0.0)
    scale_warmup: bool = attrs.field(default=False, validator=is_flag)

    def __call__(self, state: State, ssr: float = 1.0) -> float:
        """Return the factor for the next batch."""
        warm, rest = after_warmup(self, state, ssr, self.t_max)
        return warm if warm < 1 else _cosine(rest, self.alpha_f)


@attrs.frozen
class CosineAnnealingWarmRestartsScheduler(NamesArguments):
    """Half cosines from 1 to ``alpha_f`` (arXiv:1608.03983), the first ``t_0`` long, each next ``t_mult`` times longer.

    Example:
        >>> CosineAnnealingWarmRestartsScheduler("10ba", t_mult=2.0)(State(model=None))
        1.0
    """

    t_0: Time = attrs.field(converter=to_t_0)
    t_mult: float = number(1.0, 1, meaning="Each cycle is this many times as long as the one before.")
    alpha_f: float = attrs.field(validator=_FACTOR, default=0.0)

    def __call__(self, state: State, ssr: float = 1.0) -> float:
        """Return the factor for the next batch."""
        done, (length,) = position(state, (self.t_0, ssr))
        if self.t_mult == 1:
            cosines = done / length
            # With the margin, the position in the cosine may be slightly negative.
            return _cosine(max(0.0, cosines - math.floor(cosines + ROUNDING)), self.alpha_f)
        # The first n cosines take t_0 * (t_mult**n - 1) / (t_mult - 1).
        finished = math.floor(math.log(1 + done / length * (self.t_mult - 1), self.t_mult) + ROUNDING)
        begin = length * (self.t_mult**finished - 1) / (self.t_mult - 1)
        return _cosine(max(0.0, fraction_of(done - begin, length * self.t_mult**finished)), self.alpha_f)


@attrs.frozen
class WarmupStableDecayScheduler(NamesArguments):
    """From 0 to 1 in ``t_warmup``, then 1 until a decay to ``alpha_f`` in the last ``t_decay`` of the training.

    ``alpha_f + (1 - alpha_f) * d(x)``, where ``x`` is the completed fraction of ``t_decay`` and ``d(x)`` is
    ``1 - sqrt(x)`` (Hägele et al. 2024, arXiv:2405.18392), ``1 - x`` (arXiv:2502.15938 on decays to zero), or
    ``(1 + cos(pi * x)) / 2``. Nothing before the decay depends on the length of the training, so that one stable phase
    serves trainings of many lengths: ``Trainer(load_path=...).fit(cooldown="2000ba")`` decays from a checkpoint of it.

    Args:
        t_warmup: Length of the warm-up; ``"0ba"`` for none.
        t_decay: Length of the decay; ``"0ba"`` for none.
        decay: Its shape: ``"1-sqrt"``, ``"linear"`` or ``"cosine"``.
        alpha_f: The factor at the end.
        scale_warmup: Whether the scale schedule ratio also stretches the warm-up.

    Raises:
        ValueError: A value is out of range.

    Example:
        >>> schedule = WarmupStableDecayScheduler("10ba", "20ba", decay="linear")
        >>> state = State(model=None, max_duration="100ba")
        >>> for batch in (5, 50, 85):
        ...     state.timestamp = state.timestamp.copy(batch=batch)
        ...     print(schedule(state))
        0.5
        1.0
        0.75
    """

    t_warmup: Time = attrs.field(converter=to_t_warmup)
    t_decay: Time = attrs.field(default=Time(0.2, TimeUnit.DURATION), converter=to_t_decay)
    decay: str = attrs.field(default="1-sqrt", validator=one_of(*_DECAYS))
    alpha_f: float = attrs.field(validator=_FACTOR, default=0.0)
    scale_warmup: bool = attrs.field(default=False, validator=is_flag)

    def __call__(self, state: State, ssr: float = 1.0) -> float:
        """Return the factor for the next batch."""
        if not self.t_decay.value:
            return after_warmup(self, state, ssr)[0]
        warm, decayed = before_decay(self, self.t_decay, state, ssr)
        return warm if warm < 1 else _line(_DECAYS[self.decay](decayed), self.alpha_f, 1.0)


@attrs.frozen
class InverseSquareRootScheduler(NamesArguments):
    """From 0 to 1 in ``t_warmup``, then ``sqrt(t_scale / (t - w + t_scale))`` (Vaswani et al. 2017, arXiv:1706.03762).

    With ``t_scale`` equal to the warm-up, this is ``sqrt(w / t)``. It does not depend on the length of the training.

    Args:
        t_warmup: Length of the warm-up.
        t_scale: How long after the warm-up the factor has fallen to ``1 / sqrt(2)``; ``t_warmup`` if None.
        scale_warmup: Whether the scale schedule ratio also stretches the warm-up.

    Raises:
        ValueError: A value is out of range, or both times are missing.

    Example:
        >>> state = State(model=None)
        >>> state.timestamp = state.timestamp.copy(batch=400)
        >>> InverseSquareRootScheduler("100ba")(state)
        0.5
    """

    t_warmup: Time = attrs.field(converter=to_t_warmup)
    t_scale: Time | None = attrs.field(default=None, converter=to_t_scale)
    scale_warmup: bool = attrs.field(default=False, validator=is_flag)

    def __attrs_post_init__(self) -> None:
        if self.t_scale is None and not self.t_warmup.value:
            raise ValueError(
                f"t_scale is required without a warm-up, got t_warmup={self.t_warmup}: give t_scale='1000ba', the time "
                "after which the factor has fallen to 1 / sqrt(2)."
            )

    def __call__(self, state: State, ssr: float = 1.0) -> float:
        """Return the factor for the next batch."""
        ratio = ssr if self.scale_warmup else 1.0
        scaled = (self.t_warmup, ratio) if self.t_scale is None else (self.t_scale, ssr)
        done, (warmup, scale) = position(state, (self.t_warmup, ratio), scaled)
        return done / warmup if done < warmup else math.sqrt(scale / (done - warmup + scale))


@attrs.frozen
class ExponentialScheduler(NamesArguments):
    """``gamma ** (t / decay_period)``, updated with every batch.

    Example:
        >>> ExponentialScheduler(gamma=0.9)(State(model=None))
        1.0
    """

    gamma: float = attrs.field(validator=_GAMMA)
    decay_period: Time = attrs.field(default=_AN_EPOCH, converter=to_decay_period)

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

    step_size: Time = attrs.field(converter=to_step_size)
    gamma: float = attrs.field(validator=_GAMMA, default=0.1)

    def __call__(self, state: State, ssr: float = 1.0) -> float:
        """Return the factor for the next batch."""
        done, (step,) = position(state, (self.step_size, ssr))
        return float(self.gamma ** math.floor(done / step + ROUNDING))


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

    t_warmup: Time = attrs.field(converter=to_t_warmup)
    milestones: tuple[Time, ...] = attrs.field(converter=_to_milestones)
    gamma: float = attrs.field(validator=_GAMMA, default=0.1)
    scale_warmup: bool = attrs.field(default=False, validator=is_flag)

    def __call__(self, state: State, ssr: float = 1.0) -> float:
        """Return the factor for the next batch."""
        warm, _ = after_warmup(self, state, ssr)
        return warm if warm < 1 else _steps(state, self.milestones, self.gamma, ssr)


def _steps(state: State, milestones: Sequence[Time], gamma: float, ssr: float) -> float:
    reached = 0
    for milestone in milestones:
        done, (length,) = position(state, (milestone, ssr))
        reached += done >= length - ROUNDING
    return float(gamma**reached)


@attrs.frozen
class PolynomialScheduler(NamesArguments):
    """``alpha_f + (1 - alpha_f) * (1 - t / t_max) ** power``.

    Example:
        >>> PolynomialScheduler(power=2.0)(State(model=None, max_duration="4ba"))
        1.0
    """

    power: float = attrs.field(validator=_POWER)
    t_max: Time = attrs.field(default=WHOLE_TRAINING, converter=to_t_max)
    alpha_f: float = attrs.field(validator=_FACTOR, default=0.0)

    def __call__(self, state: State, ssr: float = 1.0) -> float:
        """Return the factor for the next batch."""
        return _power(completed(state, self.t_max, ssr), self.power, self.alpha_f)


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

    t_warmup: Time = attrs.field(converter=to_t_warmup)
    power: float = attrs.field(validator=_POWER, default=2.0)
    t_max: Time = attrs.field(default=WHOLE_TRAINING, converter=to_t_max)
    alpha_f: float = attrs.field(validator=_FACTOR, default=0.0)
    scale_warmup: bool = attrs.field(default=False, validator=is_flag)

    def __call__(self, state: State, ssr: float = 1.0) -> float:
        """Return the factor for the next batch."""
        warm, rest = after_warmup(self, state, ssr, self.t_max)
        return warm if warm < 1 else _power(rest, self.power, self.alpha_f)
