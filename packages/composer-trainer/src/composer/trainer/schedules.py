"""The duration and the learning rate schedulers of a run, and when each scheduler steps."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, TypeAlias

import attrs
from attrs.validators import optional
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from composer.core import State, Time, TimeUnit
from composer.core.checks import as_list, caller_level, is_flag, own_arguments, shortened
from composer.functional.checks import check_interval
from composer.optim import ComposerScheduler, compile_composer_scheduler
from composer.optim.clock import ClockLR, WarmsUp

SchedulerLike: TypeAlias = LRScheduler | ComposerScheduler


_RISES = 1.01
"""How many times the rate before a prolonged training is exceeded if this is reported."""


@attrs.frozen
class SteppedSchedulers:
    """A run's schedulers, by when they step.

    Args:
        every_batch: Those that step after each batch.
        every_epoch: Those that step after each epoch.
        by_clock: Those of them that depend only on the run's clock.
    """

    every_batch: tuple[LRScheduler, ...] = ()
    every_epoch: tuple[LRScheduler, ...] = ()
    by_clock: tuple[LRScheduler, ...] = ()

    def follow_clock(self, state: State) -> None:
        """Recompute the learning rates that depend on the clock, because the duration may have changed.

        Those that change after each epoch are kept until its end, as they depend on the clock at its beginning. A rate
        that rises within a training gives a warning, and so does a rate of 0 for all of the first epoch.
        """
        clock = state.timestamp
        is_in_epoch = clock.count(TimeUnit.BATCH, in_epoch=True) > 0
        for scheduler in self.by_clock:
            if not is_in_epoch or scheduler in self.every_batch:
                group, before = scheduler.optimizer.param_groups[0], scheduler.get_last_lr()[0]
                base = group.get("initial_lr")
                scheduler.step()
                if group.get("initial_lr") is base:  # else it was assigned
                    _warn_of_rise(before, scheduler.get_last_lr()[0], state)
        for scheduler in self.every_epoch if not clock.batch.value else ():
            _warn_of_lost_epoch(scheduler)


def _warn_of_lost_epoch(scheduler: LRScheduler) -> None:
    """Warn if the rates that a schedule begins with train nothing. Rates in tensors are not read."""
    rates = scheduler.get_last_lr()
    has_rates = any(group.get("initial_lr") for group in scheduler.optimizer.param_groups)
    if has_rates and not any(isinstance(rate, Tensor) or rate for rate in rates):
        warnings.warn(
            f"The learning rate is 0 until the first epoch has ended, which trains nothing, because "
            f"{type(scheduler).__name__} steps after each epoch: begin with a higher rate, or give "
            "step_schedulers_every_batch=True if its steps are batches.",
            stacklevel=caller_level(),
        )


def _warn_of_rise(before: float | Tensor, rate: float | Tensor, state: State) -> None:
    """Warn, within a training, if a schedule gives a higher rate than before its end was moved.

    Rates in tensors are not compared, for which the host would wait for the device.
    """
    if isinstance(before, Tensor) or isinstance(rate, Tensor) or not state.timestamp.batch.value:
        return
    if rate > before * _RISES:
        warnings.warn(
            f"The learning rate rises from {before:.3g} to {rate:.3g} at batch {int(state.timestamp.batch)}, as its "
            f"schedule decays to the end of the training, which is now max_duration='{state.max_duration}'. To train "
            "longer, load a checkpoint from before the decay, or use a schedule with a stable phase, such as "
            "WarmupStableDecayScheduler, and end it by fit(cooldown=...).",
            stacklevel=caller_level(),
        )


def check_schedulers(schedulers: SchedulerLike | Sequence[SchedulerLike] | None) -> list[SchedulerLike]:
    """Return the schedulers as a list.

    Raises:
        TypeError: A scheduler is neither a torch scheduler nor a function.
    """
    given: list[SchedulerLike] = as_list(schedulers)
    for scheduler in given:
        if isinstance(scheduler, ReduceLROnPlateau):
            raise TypeError(
                "schedulers cannot hold ReduceLROnPlateau of torch: use composer.callbacks.ReduceLROnPlateau(monitor)."
            )
        if isinstance(scheduler, type) or not (isinstance(scheduler, LRScheduler) or callable(scheduler)):
            raise TypeError(
                "schedulers must be torch schedulers or functions f(state, ssr), such as CosineAnnealingScheduler(), "
                f"got {shortened(scheduler)}."
            )
    return given


def pair_functions(
    schedulers: Sequence[SchedulerLike], optimizers: Sequence[Optimizer]
) -> list[tuple[ComposerScheduler, Optimizer]]:
    """Return the functions with their optimizers: those without a torch scheduler, in their order, or all for one.

    Raises:
        ValueError: There is no such optimizer, or there are several functions and not as many optimizers.
    """
    # Compared by their groups, because algorithms may wrap optimizers.
    scheduled = {id(one.optimizer.param_groups) for one in schedulers if isinstance(one, LRScheduler)}
    functions = [one for one in schedulers if not isinstance(one, LRScheduler)]
    free = [optimizer for optimizer in optimizers if id(optimizer.param_groups) not in scheduled]
    if functions and optimizers and not free:
        raise ValueError(
            "schedulers has a function and torch schedulers for all optimizers, so the function would change no "
            "learning rate: remove it or a torch scheduler, or give one function that returns the product."
        )
    if len(functions) > 1 and len(functions) != len(free):
        raise ValueError(
            f"schedulers holds {len(functions)} schedules that are no torch schedulers, for {len(free)} of the "
            "optimizers: give one for each, in their order, or one for all. For one optimizer, multiply them: "
            "lambda state, ssr=1.0: first(state, ssr) * second(state, ssr)."
        )
    return list(zip(functions if len(functions) > 1 else functions * len(free), free, strict=False))


def check_optimizers_of(schedulers: Sequence[SchedulerLike], optimizers: Sequence[Optimizer]) -> None:
    """Raise a ValueError if a torch scheduler belongs to none of the optimizers, or functions do not fit them."""
    pair_functions(schedulers, optimizers)
    groups = [optimizer.param_groups for optimizer in optimizers]
    for scheduler in schedulers:
        if isinstance(scheduler, LRScheduler) and not any(one is scheduler.optimizer.param_groups for one in groups):
            raise ValueError(
                f"schedulers: {type(scheduler).__name__} belongs to another optimizer than those of the training, so "
                f"it would change nothing. Make it from the optimizer that is given as optimizers=."
            )


def check_ratio(ratio: float) -> float:
    """Return a ratio by which a schedule is scaled.

    Raises:
        TypeError: The ratio is not a number.
        ValueError: The ratio is not finite and greater than 0.
    """
    meaning = "0.5 trains half as long, and the schedule takes half as long."
    check_interval("scale_schedule_ratio", ratio, 0, math.inf, meaning, open_low=True, open_high=True)
    return float(ratio)


def scaled(duration: int | str | Time, ratio: float, name: str = "max_duration") -> Time:
    """Return a duration times ``ratio``; errors call it ``name``.

    Raises:
        ValueError: The duration is a fraction, or not greater than 0.

    Example:
        >>> scaled("10ep", 0.5)
        Time(5, TimeUnit.EPOCH)
    """
    whole = Time.from_input(duration, TimeUnit.EPOCH, name=name)
    if whole.unit is TimeUnit.DURATION:
        raise ValueError(f"{name} cannot be a fraction of itself, got {whole}; pass e.g. '10ep'.")
    stretched = whole * check_ratio(ratio)
    if stretched.value <= 0:
        raise ValueError(f"{name} must be more than 0, got {whole} times scale_schedule_ratio={ratio}.")
    return stretched


@attrs.define
class TrainingSchedule:
    """The duration of a run and its schedulers.

    Args:
        max_duration: The duration before it is scaled; None if it is given to ``fit``. The attribute is scaled.
        schedulers: The schedulers.
        scale_schedule_ratio: The factor by which both are scaled.
        step_schedulers_every_batch: Whether all schedulers step after each batch; if None, torch's own do each epoch.

    Attributes:
        end_of_part: The end that the last ``fit(duration=...)`` has set.

    Raises:
        TypeError: A scheduler is neither a torch scheduler nor a function.
        ValueError: A value is out of range.
    """

    _max_duration: int | str | Time | None
    schedulers: list[SchedulerLike] = attrs.field(converter=check_schedulers)
    ratio: float = attrs.field(alias="scale_schedule_ratio", converter=check_ratio)
    step_every_batch: bool | None = attrs.field(alias="step_schedulers_every_batch", validator=optional(is_flag))
    max_duration: Time | None = attrs.field(init=False)
    stepped: SteppedSchedulers | None = attrs.field(default=None, init=False)
    end_of_part: Time | None = attrs.field(default=None, init=False)

    @max_duration.default
    def _scale(self) -> Time | None:
        return None if self._max_duration is None else scaled(self._max_duration, self.ratio)

    def changed(self, given: Mapping[str, Any], duration: Time | None) -> TrainingSchedule:
        """Return the schedule with its arguments among those of ``fit`` that are not None, for a duration of its own.

        Raises:
            TypeError: A scheduler is neither a torch scheduler nor a function.
            ValueError: There is nothing to scale.
        """
        new = own_arguments(TrainingSchedule, given, without_none=True)
        ratio = new.pop("scale_schedule_ratio")
        if ratio != 1 and duration is None and "schedulers" not in new:
            raise ValueError(
                f"scale_schedule_ratio={ratio} scales the duration and the schedulers of this call, and neither is "
                "given: give duration or schedulers, too, or give the ratio to the Trainer."
            )
        # The duration was scaled at construction: the ratio of this call is that of its schedulers.
        new |= {"scale_schedule_ratio": ratio} if "schedulers" in new else {}
        changed = attrs.evolve(self, max_duration=None, **new) if new else self
        changed.max_duration, changed.end_of_part = self.max_duration, self.end_of_part
        return changed

    def check_phases(self, state: State, end: Time | None) -> None:
        """Raise a ValueError if the phases of a schedule exceed the training until ``end``; None is not known yet.

        ``state`` is a copy of that of the run, whose ``max_duration`` is set to ``end``.
        """
        state.max_duration = end
        if end is not None and not state.has_reached(end) and state.train_data_spec is not None:
            for schedule in self.schedulers:
                if isinstance(schedule, WarmsUp) and not isinstance(schedule, LRScheduler):
                    schedule(state, self.ratio)

    def end(self, state: State, duration: Time | None) -> Time:
        """Return the clock after ``duration`` more, or at the end of the training; after a part, of all of it.

        A part that a signal has stopped is completed if it ends after the training.

        Raises:
            ValueError: There is neither a duration nor a ``max_duration``.
        """
        if duration is not None:
            return state.timestamp.get(duration.unit) + duration
        # After a part that nothing has ended early, the training continues to its own end.
        end, own = state.max_duration, self.max_duration
        end = own if end is self.end_of_part and own is not None and not state.has_reached(own) else end
        if end is None:
            raise ValueError("There is no duration: give max_duration to the Trainer or duration to fit().")
        return end

    def prepare_schedulers(self, state: State) -> None:
        """Create the schedulers, so that their saved states can be loaded.

        Until all that functions depend on is known, schedulers that change nothing stand for them.
        """
        if state.max_duration is not None and state.train_data_spec is not None:
            self.take_schedulers(state)
        else:
            pairs = pair_functions(self.schedulers, state.optimizers)
            ready = [scheduler for scheduler in self.schedulers if isinstance(scheduler, LRScheduler)]
            state.schedulers = [*ready, *(ClockLR(optimizer, lambda: 1.0) for _, optimizer in pairs)]

    def take_schedulers(self, state: State) -> SteppedSchedulers:
        """Return the schedulers, and make them those of the state; compiled again for other optimizers."""
        # Compared by their groups, because algorithms may wrap optimizers.
        held = {id(one.param_groups) for one in state.optimizers}
        if self.stepped is None or not {id(one.optimizer.param_groups) for one in self.stepped.by_clock} <= held:
            self.stepped = self._compile(state)
        state.schedulers = (*self.stepped.every_batch, *self.stepped.every_epoch)
        return self.stepped

    def _compile(self, state: State) -> SteppedSchedulers:
        ready = [scheduler for scheduler in self.schedulers if isinstance(scheduler, LRScheduler)]
        by_clock = [
            compile_composer_scheduler(function, state, self.ratio, optimizer)
            for function, optimizer in pair_functions(self.schedulers, state.optimizers)
        ]
        every_batch = [*(ready if self.step_every_batch else []), *([] if self.step_every_batch is False else by_clock)]
        every_epoch = [scheduler for scheduler in [*ready, *by_clock] if scheduler not in every_batch]
        for scheduler in ready if self.step_every_batch is not False else ():
            _warn_of_steps(scheduler, self.max_duration or state.max_duration, state, bool(self.step_every_batch))
        return SteppedSchedulers(tuple(every_batch), tuple(every_epoch), tuple(by_clock))


def known_steps(scheduler: LRScheduler) -> int:
    """Return the number of steps after which a scheduler has ended; 0 if it is not known."""
    parts = getattr(scheduler, "_schedulers", ())
    starts = [0, *getattr(scheduler, "_milestones", [0] * len(parts))]
    steps: list[int] = [start + known_steps(part) for start, part in zip(starts, parts, strict=False)]
    for keywords in _of_transformers(scheduler):
        parts_of_wsd = (keywords.get(f"num_{part}_steps") or 0 for part in ("warmup", "stable", "decay"))
        steps.append(keywords.get("num_training_steps") or sum(parts_of_wsd))
    steps += [getattr(scheduler, name, 0) for name in ("total_steps", "total_iters", "T_max")]
    return max(*steps, *getattr(scheduler, "milestones", ()))


def _of_transformers(scheduler: LRScheduler) -> list[Mapping[str, Any]]:
    """Return the arguments of Transformers' functions, whose steps are batches."""
    functions = getattr(scheduler, "lr_lambdas", None) or ()
    return [one.keywords for one in functions if isinstance(one, partial) and "num_warmup_steps" in one.keywords]


def _warn_of_steps(scheduler: LRScheduler, end: Time | None, state: State, every_batch: bool) -> None:
    """Warn if a scheduler that steps after each epoch has about as many steps as the training has batches.

    Those of Transformers step after each batch there, so that more steps than epochs suffice. Also warn if one that
    steps after each batch has about as many as the training would have if ``split_data`` had not split the loader.
    """
    steps, length, split = known_steps(scheduler), state.dataloader_len, getattr(state.dataloader, "split_over", 1)
    if end is None or length is None or end.unit not in (TimeUnit.EPOCH, TimeUnit.BATCH):
        return
    epochs, batches = (end.value, end.value * length) if end.unit is TimeUnit.EPOCH else (end.value / length, end.value)
    if every_batch:
        if split > 1 and abs(steps - split * batches) < batches / 2:
            warnings.warn(
                f"{type(scheduler).__name__} has {steps} steps, and a training of '{end}' makes {int(batches)} of "
                f"them, as the loader is split over {split} processes: divide the number of steps by "
                "composer.distributed.get_world_size().",
                stacklevel=caller_level(),
            )
        return
    is_too_long = steps > epochs and bool(_of_transformers(scheduler))
    if is_too_long or any(abs(steps - one) < min(steps - epochs, one / 2) for one in (batches, split * batches)):
        warnings.warn(
            f"{type(scheduler).__name__} has {steps} steps, and steps after each epoch: a training of '{end}' makes "
            f"{math.ceil(epochs)} steps of it, in {int(batches)} batches. For a step after each batch, give "
            "step_schedulers_every_batch=True; False confirms the present choice.",
            stacklevel=caller_level(),
        )
