"""How fast a run is, and what it spends its time on."""

from __future__ import annotations

import time
from collections import deque
from typing import Any, Literal

import attrs
import torch
from attrs.validators import ge, in_

from composer.core import Callback, Logger, State, TimeUnit

__all__ = ["SpeedMonitor"]

_SECONDS = {"seconds": 1, "minutes": 60, "hours": 3600, "days": 86400}


@attrs.frozen
class _Reading:
    train_seconds: float
    batches: int
    samples: int
    tokens: int


@attrs.define(eq=False)
class SpeedMonitor(Callback):
    """Log at every batch how many batches, samples and tokens a second are trained on, and the time spent so far.

    - ``throughput/batches_per_sec``, ``throughput/samples_per_sec`` and, if the batches have tokens,
      ``throughput/tokens_per_sec``: over the last ``window_size`` batches, or as many as there are; by all processes.
      Time spent on evaluation is left out. ``throughput/device/…`` is the same for each process.
    - ``time/train``, ``time/val`` and their sum, ``time/total``, in ``time_unit``. They go on when a run is resumed.

    Args:
        window_size: Batches to average over.
        time_unit: ``"seconds"``, ``"minutes"``, ``"hours"`` or ``"days"``.

    Raises:
        ValueError: One of them is out of range.

    Example:
        >>> SpeedMonitor(window_size=50, time_unit="minutes")
        SpeedMonitor(window_size=50, time_unit='minutes')
    """

    window_size: int = attrs.field(default=100, validator=ge(1))
    time_unit: Literal["seconds", "minutes", "hours", "days"] = attrs.field(default="hours", validator=in_(_SECONDS))

    _readings: deque[_Reading] = attrs.field(init=False, repr=False)
    _train_seconds: float = attrs.field(default=0.0, init=False, repr=False)
    _val_seconds: float = attrs.field(default=0.0, init=False, repr=False)
    _counted_until: float = attrs.field(default=0.0, init=False, repr=False)
    _is_fitting: bool = attrs.field(default=False, init=False, repr=False)

    @_readings.default
    def _no_readings(self) -> deque[_Reading]:
        return deque(maxlen=self.window_size + 1)

    def state_dict(self) -> dict[str, Any]:
        """Return the seconds spent so far."""
        return {"train_seconds": self._train_seconds, "val_seconds": self._val_seconds}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on counting from the seconds that were spent; throughput is measured anew."""
        self._train_seconds, self._val_seconds = state["train_seconds"], state["val_seconds"]
        self._readings.clear()

    def fit_start(self, state: State, logger: Logger) -> None:
        """Begin to count."""
        del logger
        self._is_fitting = True
        self._counted_until = time.perf_counter()
        self._take_reading(state)

    def batch_end(self, state: State, logger: Logger) -> None:
        """Count the batch and log."""
        self._count_training()
        self._take_reading(state)
        if logger.destinations:
            logger.log_metrics(self._throughput() | self._times())

    def fit_end(self, state: State, logger: Logger) -> None:
        """Count what came after the last batch."""
        del state, logger
        self._count_training()
        self._is_fitting = False

    def eval_before_all(self, state: State, logger: Logger) -> None:
        """Stop counting training and begin to count evaluation."""
        del state, logger
        self._count_training()

    def eval_after_all(self, state: State, logger: Logger) -> None:
        """Count the evaluation and log."""
        del state
        self._val_seconds += self._since_counted()
        logger.log_metrics(self._times())

    def _since_counted(self) -> float:
        before, self._counted_until = self._counted_until, time.perf_counter()
        return self._counted_until - before

    def _count_training(self) -> None:
        seconds = self._since_counted()
        if self._is_fitting:
            self._train_seconds += seconds

    def _take_reading(self, state: State) -> None:
        clock = state.timestamp
        self._readings.append(
            _Reading(
                self._train_seconds,
                int(clock.count(TimeUnit.BATCH)),
                int(clock.count(TimeUnit.SAMPLE)),
                int(clock.count(TimeUnit.TOKEN)),
            )
        )

    def _throughput(self) -> dict[str, float]:
        first, last = self._readings[0], self._readings[-1]
        seconds = last.train_seconds - first.train_seconds
        if seconds <= 0:
            return {}
        rates = {
            "batches_per_sec": (last.batches - first.batches) / seconds,
            "samples_per_sec": (last.samples - first.samples) / seconds,
        }
        if last.tokens > first.tokens:
            rates["tokens_per_sec"] = (last.tokens - first.tokens) / seconds
        processes = _world_size()
        return {f"throughput/{name}": rate for name, rate in rates.items()} | {
            f"throughput/device/{name}": rate / processes for name, rate in rates.items()
        }

    def _times(self) -> dict[str, float]:
        train, val = self._train_seconds, self._val_seconds
        unit = _SECONDS[self.time_unit]
        return {"time/train": train / unit, "time/val": val / unit, "time/total": (train + val) / unit}


def _world_size() -> int:
    distributed = torch.distributed
    return distributed.get_world_size() if distributed.is_available() and distributed.is_initialized() else 1
