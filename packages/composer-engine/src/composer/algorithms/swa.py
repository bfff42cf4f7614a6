"""SWA: average the weights of the last part of the training."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import ClassVar

import attrs
from torch import nn

from composer.algorithms._averages import SWAPS, AveragedWeights, WeightAveraging, to_moment, to_update_interval
from composer.algorithms._idle import warn_at_end, warn_if_idle
from composer.core import Event, Logger, Stage, State, Time, TimeUnit, saved
from composer.core.checks import integer, is_flag, number, one_of
from composer.core.optimizers import set_rate
from composer.core.saving.components import transient


def _to_swa_start(value: Time | str | int) -> Time:
    return to_moment(value, "swa_start")


def _to_swa_end(value: Time | str | int) -> Time:
    return to_moment(value, "swa_end")


@attrs.define(eq=False)
class SWA(WeightAveraging):
    """Average the weights over a part of the training, and continue with the average (arXiv:1803.05407).

    See :func:`composer.functional.compute_swa`. Parameters that are trained and the running means and variances of
    norms are averaged with equal weight; other buffers are copied, and frozen parameters keep their values. Meanwhile
    the averages are used for evaluation. At ``swa_end`` they become the weights of the model; in the rest of the
    training the running statistics of its norms adapt to them.

    Args:
        swa_start: When averaging starts.
        swa_end: When averaging ends, and the model continues from the averages.
        update_interval: The interval of updates, in batches or epochs.
        schedule_swa_lr: Whether to anneal the learning rates to ``swa_lr`` from ``swa_start`` on, and keep them until
            the end of the training, instead of the schedulers.
        anneal_strategy: The annealing, ``"linear"`` or ``"cos"``.
        anneal_steps: The number of updates of the annealing.
        swa_lr: The final learning rate; None keeps the learning rates at ``swa_start``.

    Raises:
        TypeError: A value is not a time or not a number.
        ValueError: A value is out of range, or ``swa_end`` does not come after ``swa_start``.

    Example:
        >>> SWA(swa_start="6ep", swa_end="9ep").update_interval
        Time(1, TimeUnit.EPOCH)
    """

    swa_start: Time = attrs.field(default="0.7dur", converter=_to_swa_start)
    swa_end: Time = attrs.field(default="0.97dur", converter=_to_swa_end)
    update_interval: Time = attrs.field(default="1ep", converter=to_update_interval)
    schedule_swa_lr: bool = attrs.field(default=False, validator=is_flag)
    anneal_strategy: str = attrs.field(default="linear", validator=one_of("linear", "cos"))
    anneal_steps: int = integer(10, 0, meaning="It is a number of updates.")
    swa_lr: float | None = number(None, 0, meaning="It is a learning rate.")

    _averages: AveragedWeights = transient(factory=lambda: AveragedWeights("SWA"))
    _num_averaged: int = saved(default=0)
    _is_over: bool = saved(default=False)
    _first_lrs: list[list[float]] | None = saved(default=None)

    runs_at: ClassVar = {**WeightAveraging.runs_at, Event.ITERATION_END: Stage.WEIGHTS}
    reads: ClassVar = {"model", "optimizers", "timestamp", "max_duration", "dataloader_len"}
    writes: ClassVar = {"model", "optimizers"}

    def __attrs_post_init__(self) -> None:
        if self.swa_start.unit is self.swa_end.unit and self.swa_end <= self.swa_start:
            raise ValueError(f"swa_end must come after swa_start, got {self.swa_end} and {self.swa_start}.")
        warn_if_idle(self, swa_start=self.swa_start == Time(1, TimeUnit.DURATION))

    def runs_at_events(self) -> Mapping[Event, Stage]:
        """Return the events at which it runs: updates are at the end of batches or of epochs."""
        # With schedule_swa_lr at all events before which schedulers step, so that it is the last to set the rates.
        return self.runs_at if self.schedule_swa_lr else super().runs_at_events()

    def apply(self, event: Event, state: State, logger: Logger) -> None:
        """Update the average, or exchange it with the training weights around an evaluation."""
        if event is Event.FIT_START:
            restarts = self._averages.begin_fit(state)
            if restarts or (self._is_over and not state.has_reached(self.swa_start)):
                self._is_over, self._num_averaged, self._first_lrs = False, 0, None
            elif not self._averages and not self._is_over:  # outdated ones are discarded, and not saved
                self._num_averaged = 0
        else:
            self._average(event, state)
        if self.schedule_swa_lr and self._first_lrs is not None:
            self._set_learning_rates(state, self._first_lrs)

    def begin_again(self) -> None:
        """Discard the averages, as the model has got other weights."""
        super().begin_again()
        self._num_averaged = 0

    def _average(self, event: Event, state: State) -> None:
        if event is Event.FIT_END and self._num_averaged == 1:
            self._warn_of_one_update(state)
        if self._is_over:
            return
        self._averages.check(state.model, training=event not in SWAPS)
        if event in SWAPS:
            self._averages.swap(event)
        elif event is Event.FIT_END:
            self._averages.end_fit()
            self._averages.warn_if_empty(self, self.swa_start, state)
        else:
            self._advance(event, state)

    def get_swa_model(self, model: nn.Module) -> nn.Module:
        """Return a copy of ``model`` with the averaged weights.

        Raises:
            RuntimeError: There are no averages yet.
        """
        if not self._averages and not self._is_over:
            raise RuntimeError(f"SWA has not averaged anything yet: it begins at {self.swa_start}.")
        return self._averages.copy_into(model, averaged=True)

    def _advance(self, event: Event, state: State) -> None:
        if self._first_lrs is None:
            if not state.has_reached(self.swa_start):
                return
            # Saved, because in a resumed run the groups already have annealed learning rates.
            self._first_lrs = [[float(group["lr"]) for group in each.param_groups] for each in state.optimizers]
        if self.is_update_due(event, state):
            # The mean of n + 1 values from that of n, as in Algorithm 1 of the paper.
            self._averages.update(state.model, self._num_averaged / (self._num_averaged + 1))
            self._num_averaged += 1
            self.acted += 1
        if self._averages and state.has_reached(self.swa_end):
            self._averages.keep_in_model()
            self._is_over = True

    def _warn_of_one_update(self, state: State) -> None:
        warn_at_end(
            state,
            f"{self!r} has averaged only one state of the weights, so its averages are the weights of that time. "
            "Choose a shorter update_interval, or a longer time from swa_start to swa_end.",
        )

    def _set_learning_rates(self, state: State, first_lrs: list[list[float]]) -> None:
        done = min(1.0, self._num_averaged / self.anneal_steps) if self.anneal_steps else 1.0
        if self.anneal_strategy == "cos":
            done = (1 - math.cos(math.pi * done)) / 2
        for optimizer, first in zip(state.optimizers, first_lrs, strict=True):
            for group, rate in zip(optimizer.param_groups, first, strict=True):
                goal = rate if self.swa_lr is None else self.swa_lr
                set_rate(group, rate + (goal - rate) * done)
