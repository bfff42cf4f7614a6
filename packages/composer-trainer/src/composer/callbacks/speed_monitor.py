"""Log the throughput of a run, and the time spent on training and evaluation."""

from __future__ import annotations

import time
import warnings
from collections import deque
from typing import Literal

import attrs
import torch
from attrs.validators import ge

from composer.callbacks._flops import FlopCounter, HasFlops, flops_per_batch, peak_flops
from composer.core import Callback, Logger, State, saved
from composer.core.checks import integer, is_flag, number, one_of
from composer.core.saving.components import reset_fields, transient
from composer.distributed import get_world_size

SECONDS_OF_UNIT = {"seconds": 1, "minutes": 60, "hours": 3600, "days": 86400}


@attrs.frozen
class _Reading:
    train_seconds: float
    batches: int
    samples: int
    tokens: int
    flops: float


@attrs.define(eq=False)
class SpeedMonitor(Callback):
    """Log the throughput and the time spent so far at every batch.

    - ``throughput/batches_per_sec``, ``throughput/samples_per_sec`` and, if the batches have tokens,
      ``throughput/tokens_per_sec``: over the last ``window_size`` batches, or as many as there are, summed over all
      processes. Time spent on evaluation is excluded. ``throughput/device/…`` is the same per process.
    - ``throughput/flops_per_sec`` and ``throughput/device/flops_per_sec``: floating-point operations, if known: from
      ``model.flops_per_batch``, a number or a function of the batch, or counted with ``count_flops``.
    - ``throughput/device/mfu``: their fraction of the device's peak (model FLOPs utilization), if that is known as
      well: for common GPUs, in the run's precision.
    - ``time/train``, ``time/val`` and their sum, ``time/total``, in ``time_unit``. A resumed run continues them.

    Args:
        window_size: Batches to average over.
        gpu_flops_available: The device's peak operations per second; the manufacturer's figure if None.
        time_unit: ``"seconds"``, ``"minutes"``, ``"hours"`` or ``"days"``.
        count_flops: Whether to count the operations of the first batch, forward and backward, if the model has no
            ``flops_per_batch``. The count per sample is used for all samples and processes; the first batch is slower
            and excluded from the throughput. Operations in compiled code or custom kernels may not be counted.

    Raises:
        ValueError: An argument is out of range.

    Example:
        >>> SpeedMonitor(window_size=50, time_unit="minutes")
        SpeedMonitor(window_size=50, gpu_flops_available=None, time_unit='minutes', count_flops=False)
    """

    window_size: int = integer(100, 1, meaning="It is the number of batches to average over.")
    gpu_flops_available: float | None = number(None, 0, above=True, meaning="It counts operations per second.")
    time_unit: Literal["seconds", "minutes", "hours", "days"] = attrs.field(
        default="hours", validator=one_of(*SECONDS_OF_UNIT)
    )
    count_flops: bool = attrs.field(default=False, kw_only=True, validator=is_flag)

    _readings: deque[_Reading] = transient(factory=deque)
    _train_seconds: float = saved(default=0.0, validator=ge(0))
    _val_seconds: float = saved(default=0.0, validator=ge(0))
    _counted_until: float = transient(default=0.0)
    _is_fitting: bool = transient(default=False)
    _flops: float = transient(default=0.0)
    _peak: float | None = transient(default=None)
    _counter: FlopCounter | None = transient(default=None)
    _model_has_flops: bool = transient(default=False)
    _flops_per_sample: float | None = transient(default=None)
    _has_warned: bool = transient(default=False)

    def __attrs_post_init__(self) -> None:
        # One more than batches, because throughput is a difference of readings. Not a default of the field, which would
        # be computed before the validation.
        self._readings = deque(maxlen=self.window_size + 1)

    @property
    def history_samples(self) -> list[int]:
        """The samples of the training at the last readings, one more than batches of the window."""
        return [one.samples for one in self._readings]

    @property
    def history_tokens(self) -> list[int]:
        """The tokens of the training at the last readings."""
        return [one.tokens for one in self._readings]

    @property
    def history_wct(self) -> list[float]:
        """The seconds of the training at the last readings."""
        return [one.train_seconds for one in self._readings]

    def init(self, state: State, logger: Logger) -> None:
        """Reset the state of an earlier run."""
        self._forget()

    def fit_start(self, state: State, logger: Logger) -> None:
        """Start counting."""
        if not state.timestamp.counts.batch:
            self._forget()
        self._is_fitting = True
        self._counted_until = time.perf_counter()
        if self._readings and state.timestamp.counts.batch != self._readings[-1].batches:
            self._readings.clear()  # a state was loaded, or the clock was set: differences of readings are meaningless
        self._take_reading(state)
        self._model_has_flops = isinstance(state.model, HasFlops)
        if self.count_flops and not self._model_has_flops and self._flops_per_sample is None:
            self._counter = FlopCounter()
        if self._model_has_flops or self.count_flops:
            self._find_peak(state)

    def before_train_batch(self, state: State, logger: Logger) -> None:
        """Start counting the operations of the first batch."""
        if self._counter is not None:
            self._counter.begin()

    def after_train_batch(self, state: State, logger: Logger) -> None:
        """Stop counting operations."""
        if self._counter is not None:
            self._counter.end()

    close = after_train_batch

    def batch_end(self, state: State, logger: Logger) -> None:
        """Count the batch and log."""
        self._count_training()
        self._add_flops(state)
        self._take_reading(state)
        if logger.destinations:
            logger.log_metrics(self._throughput() | self._times())

    def fit_end(self, state: State, logger: Logger) -> None:
        """Count the time after the last batch."""
        self._count_training()
        self._is_fitting = False

    def eval_before_all(self, state: State, logger: Logger) -> None:
        """Stop counting training and start counting evaluation."""
        self._count_training()

    def eval_after_all(self, state: State, logger: Logger) -> None:
        """Count the evaluation and log."""
        self._val_seconds += self._since_counted()
        logger.log_metrics(self._times())

    def _forget(self) -> None:
        """Reset the state of an earlier training, but not state that was loaded before the first one."""
        if self._readings:  # there is none before the first training, when loaded state must be kept
            has_warned = self._has_warned
            reset_fields(self)
            self._has_warned = has_warned

    def _since_counted(self) -> float:
        before, self._counted_until = self._counted_until, time.perf_counter()
        return self._counted_until - before

    def _count_training(self) -> None:
        seconds = self._since_counted()
        if self._is_fitting:
            self._train_seconds += seconds

    def _take_reading(self, state: State) -> None:
        done = state.timestamp.counts
        self._readings.append(_Reading(self._train_seconds, done.batch, done.sample, done.token, self._flops))

    def _find_peak(self, state: State) -> None:
        """Set the device's peak, and warn once if it is unknown."""
        self._peak = self.gpu_flops_available
        if self._peak is not None or state.device.type != "cuda":
            return
        name = torch.cuda.get_device_name(state.device)
        self._peak = peak_flops(name, state.precision)
        if self._peak is None and not self._has_warned:
            self._has_warned = True
            warnings.warn(
                f"SpeedMonitor has no peak performance for {name!r} in {state.precision.value}, so it logs no "
                "throughput/device/mfu. Set it: SpeedMonitor(gpu_flops_available=312e12).",
                stacklevel=2,
            )

    def _add_flops(self, state: State) -> None:
        """Add the batch's operations; all processes are assumed to have the same number."""
        samples = state.timestamp.counts.sample - self._readings[-1].samples if self._readings else 0
        if self._counter is not None and samples:
            self._take_count(self._counter.total * get_world_size() / samples)
        elif self._flops_per_sample is not None:
            self._flops += self._flops_per_sample * samples
        elif self._model_has_flops:
            self._flops += flops_per_batch(state.model, state.batch) * get_world_size()

    def _take_count(self, flops_per_sample: float) -> None:
        """Store the operations per sample of the first batch, and discard the time that it took."""
        self._counter, self._flops_per_sample = None, flops_per_sample
        self._readings.clear()
        if not flops_per_sample:
            warnings.warn(
                "SpeedMonitor(count_flops=True) found no countable operation in the first batch, so it logs no "
                "throughput/flops_per_sec. Define flops_per_batch on the model.",
                stacklevel=2,
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
        processes, share = get_world_size(), {}
        if last.flops > first.flops:
            rates["flops_per_sec"] = (last.flops - first.flops) / seconds
            if self._peak is not None:
                share = {"throughput/device/mfu": rates["flops_per_sec"] / processes / self._peak}
        return (
            share
            | {f"throughput/{name}": rate for name, rate in rates.items()}
            | {f"throughput/device/{name}": rate / processes for name, rate in rates.items()}
        )

    def _times(self) -> dict[str, float]:
        train, val = self._train_seconds, self._val_seconds
        unit = SECONDS_OF_UNIT[self.time_unit]
        return {"time/train": train / unit, "time/val": val / unit, "time/total": (train + val) / unit}
