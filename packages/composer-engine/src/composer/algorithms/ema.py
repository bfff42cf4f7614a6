"""EMA: evaluate with a moving average of the weights."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any, ClassVar

import attrs
import torch
from torch import Tensor, nn

from composer import functional as cf
from composer.core import Algorithm, Event, Logger, Stage, State, Time, TimeUnit

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["EMA"]

_SWAP_IN = frozenset({Event.EVAL_START, Event.PREDICT_START})
_SWAP_OUT = frozenset({Event.EVAL_END, Event.PREDICT_END})


def _to_time(given: Time | str | int) -> Time:
    return Time.from_input(given, TimeUnit.BATCH)


def _to_time_or_none(given: Time | str | int | None) -> Time | None:
    return None if given is None else _to_time(given)


@attrs.define(eq=False)
class EMA(Algorithm):
    """Keep an exponential moving average of the weights and evaluate with it; training goes on with its own weights.

    See :func:`composer.functional.update_averages`. Parameters and buffers are averaged.

    Args:
        half_life: After how long a weight's influence has halved, in any unit; a whole number counts batches.
        smoothing: The weight of the old average in an update, in ``[0, 1)``, instead of ``half_life=None``.
        ema_start: When averaging begins.
        update_interval: How often the average is updated, in batches or epochs; None is every epoch if ``half_life`` is
            in epochs, else every batch.

    Raises:
        ValueError: Both or none of ``half_life`` and ``smoothing`` are given, or a value is out of range.

    Example:
        >>> EMA(half_life="2ep")
        EMA(half_life=Time(2, 'ep'), smoothing=None, ema_start=Time(0.0, 'dur'), update_interval=Time(1, 'ep'))
    """

    half_life: Time | None = attrs.field(default=Time(1000, "ba"), converter=_to_time_or_none)
    smoothing: float | None = None
    ema_start: Time = attrs.field(default=Time(0.0, "dur"), converter=_to_time)
    update_interval: Time | None = attrs.field(default=None, converter=_to_time_or_none)

    _averages: dict[str, Tensor] = attrs.field(factory=dict, init=False, repr=False)
    _weights: list[Tensor] = attrs.field(factory=list, init=False, repr=False)
    _updated_at: float = attrs.field(default=0.0, init=False, repr=False)
    _is_in_model: bool = attrs.field(default=False, init=False, repr=False)

    runs_at: ClassVar = dict.fromkeys(
        (Event.BATCH_END, Event.EPOCH_END, *sorted(_SWAP_IN), *sorted(_SWAP_OUT)), Stage.WEIGHTS
    )
    reads: ClassVar = {"model", "timestamp", "max_duration"}
    writes: ClassVar = {"model"}
    owns: ClassVar = {"the weights used for evaluation"}

    def __attrs_post_init__(self) -> None:
        if (self.half_life is None) == (self.smoothing is None):
            raise ValueError(
                f"EMA needs either half_life or smoothing, got half_life={self.half_life} and "
                f"smoothing={self.smoothing}. To give smoothing, say half_life=None."
            )
        if self.half_life is not None and self.half_life.value <= 0:
            raise ValueError(f"half_life must be more than 0, got {self.half_life}.")
        if self.smoothing is not None and not 0 <= self.smoothing < 1:
            raise ValueError(f"smoothing must be in [0, 1), got {self.smoothing}.")
        if self.update_interval is None:
            slow = self.half_life is not None and self.half_life.unit in {TimeUnit.EPOCH, TimeUnit.ITERATION}
            self.update_interval = Time(1, TimeUnit.EPOCH if slow else TimeUnit.BATCH)
        if self.update_interval.unit not in {TimeUnit.BATCH, TimeUnit.EPOCH} or self.update_interval.value < 1:
            raise ValueError(f"update_interval must be at least one batch or epoch, got {self.update_interval}.")

    def places(self) -> Mapping[Event, Stage]:
        """Return where it runs: updates come at the end of batches or of epochs."""
        assert self.update_interval is not None
        unused = Event.EPOCH_END if self.update_interval.unit is TimeUnit.BATCH else Event.BATCH_END
        return {event: stage for event, stage in self.runs_at.items() if event is not unused}

    def apply(self, event: Event, state: State, logger: Logger) -> None:
        """Update the average, or exchange it with the training weights around an evaluation."""
        del logger
        if event in _SWAP_IN:
            self._exchange(into_model=True)
        elif event in _SWAP_OUT:
            self._exchange(into_model=False)
        elif self._is_due(state):
            self._update(state)

    def restore(self, state: State) -> None:
        """Put the training weights back."""
        del state
        self._exchange(into_model=False)

    def get_ema_model(self, model: nn.Module) -> nn.Module:
        """Return a copy of ``model`` with the averaged weights.

        Raises:
            RuntimeError: Nothing has been averaged yet.
        """
        return self._copy(model, averaged=True)

    def get_training_model(self, model: nn.Module) -> nn.Module:
        """Return a copy of ``model`` with the weights that are trained, also while the averaged ones are in it."""
        return self._copy(model, averaged=False)

    def _is_due(self, state: State) -> bool:
        assert self.update_interval is not None
        done = state.timestamp.count(self.update_interval.unit)
        return done % self.update_interval.value == 0 and (bool(self._averages) or state.reached(self.ema_start))

    def _update(self, state: State) -> None:
        if not self._averages:
            self._begin(state)
            return
        smoothing = self.smoothing
        if self.half_life is not None:
            now = _position(state, self.half_life.unit)
            smoothing = 0.5 ** ((now - self._updated_at) / self.half_life.value)
            self._updated_at = now
        assert smoothing is not None
        cf.update_averages(list(self._averages.values()), self._weights, smoothing)

    def _begin(self, state: State) -> None:
        named = {**dict(state.model.named_parameters()), **dict(state.model.named_buffers())}
        self._weights = [tensor.detach() for tensor in named.values()]
        self._averages = {name: weight.clone() for name, weight in zip(named, self._weights, strict=True)}
        if self.half_life is not None:
            self._updated_at = _position(state, self.half_life.unit)

    def _exchange(self, *, into_model: bool) -> None:
        if self._is_in_model is into_model or not self._averages:
            return
        averages = list(self._averages.values())
        held = [weight.clone() for weight in self._weights]
        torch._foreach_copy_(self._weights, averages)
        torch._foreach_copy_(averages, held)
        self._is_in_model = into_model

    def _copy(self, model: nn.Module, *, averaged: bool) -> nn.Module:
        if not self._averages:
            raise RuntimeError(f"EMA has not averaged anything yet: it begins at {self.ema_start}.")
        copied = copy.deepcopy(model)
        if averaged is not self._is_in_model:
            own: dict[str, Any] = {**dict(copied.named_parameters()), **dict(copied.named_buffers())}
            with torch.no_grad():
                for name, average in self._averages.items():
                    own[name].copy_(average)
        return copied


def _position(state: State, unit: TimeUnit) -> float:
    """Return where the training stands in ``unit``; in durations, the fraction that is done."""
    if unit is not TimeUnit.DURATION:
        return state.timestamp.count(unit)
    elapsed = state.get_elapsed_duration()
    if elapsed is None:
        raise ValueError(
            "EMA's half_life is a fraction of State.max_duration, which is not set; say e.g. half_life='1000ba'."
        )
    return float(elapsed)
