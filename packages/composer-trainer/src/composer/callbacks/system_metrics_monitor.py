"""Log the load of the machine: processors, memory, disk, network and GPUs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import torch
from torch import Tensor

from composer.callbacks._system_metrics import Sampler, read_machine
from composer.core import Callback, Event, Interval, Logger, State, Time, TimeUnit
from composer.core.checks import is_flag, number_between
from composer.core.saving.components import transient
from composer.distributed import is_initialized
from composer.loggers.products import require_product

_GPU_METRICS = ("gpu_percentage", "memory_percentage", "gpu_temperature_C", "gpu_power_usage_W")


def _to_time(given: Time | str | int) -> Time:
    return Interval.named("every", given).every


@attrs.define(eq=False)
class SystemMetricsMonitor(Callback):
    """Log the load of the machine, measured by a separate thread, so that training does not wait.

    For the machine of the process of rank 0, with psutil:

    - ``cpu_percentage``, over all processors since the last sample;
    - ``cpu_memory_percent``, ``cpu_memory_used``, ``cpu_memory_available``, ``cpu_memory_total`` and
      ``process_memory_rss``, of this process, in bytes;
    - ``disk_memory_percent``, ``disk_memory_used``, ``disk_memory_free`` and ``disk_memory_total``, in bytes, of the
      disk of the working directory;
    - ``disk_bytes_read``, ``disk_bytes_written``, ``network_bytes_sent`` and ``network_bytes_recv``, since the machine
      started.

    For the processes' NVIDIA GPUs, with NVML, the minimum and maximum with their rank, as in
    ``max_gpu_temperature_C_rank_3``; with ``log_all_data`` the values of all ranks, as in ``gpu_temperature_C_rank_3``:

    - ``gpu_percentage`` and ``memory_percentage``: percentage of time in which a kernel ran, or memory was accessed;
    - ``gpu_temperature_C`` and ``gpu_power_usage_W``.

    In a distributed run the logged values of GPUs are those of the previous time.

    Args:
        log_all_data: Whether to log the GPUs of all processes.
        every: How often to log, in batches, samples, tokens, seconds or as a fraction of the training.
        sample_seconds: Seconds between two samples.

    Raises:
        ModuleNotFoundError: psutil is not installed: ``pip install "composer-trainer[system]"``.
        ValueError: ``every`` is not a length of time, or ``sample_seconds`` is not more than 0.

    Example:
        >>> SystemMetricsMonitor(every="100ba")
        SystemMetricsMonitor(log_all_data=False, every=Time(100, TimeUnit.BATCH), sample_seconds=10.0)
    """

    log_all_data: bool = attrs.field(default=False, validator=is_flag)
    every: Time = attrs.field(default=Time(10, TimeUnit.BATCH), converter=_to_time, kw_only=True)
    sample_seconds: float = attrs.field(
        default=10.0,
        validator=number_between(0, above=True, meaning="It is the time between two samples."),
        kw_only=True,
    )

    _sampler: Sampler | None = transient(default=None)
    _group: Any = transient(default=None)
    _gathering: tuple[Any, list[Tensor]] | None = transient(default=None)

    def __attrs_post_init__(self) -> None:
        require_product("psutil", "system")

    def intervals(self) -> Mapping[Event | str, Time | str | int]:
        """Log every ``every``."""
        return {Event.BATCH_END: self.every}

    def init(self, state: State, logger: Logger) -> None:
        """Start sampling."""
        self._group = self._gathering = None
        if state.device.type == "cuda":
            require_product("pynvml", "system")
        if is_initialized():
            # On the CPU, so that no process synchronizes with its device.
            self._group = torch.distributed.new_group(backend="gloo")
        self._sampler = Sampler(lambda: read_machine() | _read_gpu(state.device), self.sample_seconds)

    def batch_end(self, state: State, logger: Logger) -> None:
        """Log the latest sample."""
        assert self._sampler is not None
        sample = self._sampler.latest()
        gpus = self._over_processes([sample.get(name, math.nan) for name in _GPU_METRICS])
        if logger.destinations:
            metrics = {name: value for name, value in sample.items() if name not in _GPU_METRICS}
            step = int(state.timestamp.count(TimeUnit.BATCH)) - 1
            logger.log_metrics(metrics | _of_gpus(gpus, log_all_data=self.log_all_data), step=step)

    def close(self, state: State, logger: Logger) -> None:
        """Stop sampling."""
        if self._sampler is not None:
            self._sampler.stop()

    def _over_processes(self, own: list[float]) -> list[list[float]]:
        """Return a row for each process; with several processes, the rows of the previous call."""
        if self._group is None:
            return [own]
        rows: list[list[float]] = []
        if self._gathering is not None:
            work, gathered = self._gathering
            work.wait()
            rows = [one.tolist() for one in gathered]
        row = torch.tensor(own, dtype=torch.float64, device="cpu")
        gathered = [torch.empty_like(row) for _ in range(torch.distributed.get_world_size())]
        # Read at the next call, so that no process waits for a slower one.
        self._gathering = torch.distributed.all_gather(gathered, row, group=self._group, async_op=True), gathered
        return rows


def _read_gpu(device: torch.device) -> dict[str, float]:
    if device.type != "cuda":
        return {}
    return {
        "gpu_percentage": torch.cuda.utilization(device),
        "memory_percentage": torch.cuda.memory_usage(device),
        "gpu_temperature_C": torch.cuda.temperature(device),
        "gpu_power_usage_W": torch.cuda.power_draw(device) / 1000,
    }


def _of_gpus(rows: Sequence[Sequence[float]], *, log_all_data: bool) -> dict[str, float]:
    """Return the metrics of the GPUs' numbers, given one row per rank; NaN is an unknown value.

    Example:
        >>> _of_gpus([[50.0] * 4, [75.0] * 4], log_all_data=False)["max_gpu_percentage_rank_1"]
        75.0
    """
    metrics: dict[str, float] = {}
    for place, name in enumerate(_GPU_METRICS):
        known = [(row[place], rank) for rank, row in enumerate(rows) if not math.isnan(row[place])]
        if log_all_data:
            metrics |= {f"{name}_rank_{rank}": value for value, rank in known}
        elif known:
            (lowest, lowest_rank), (highest, highest_rank) = min(known), max(known)
            metrics[f"min_{name}_rank_{lowest_rank}"] = lowest
            metrics[f"max_{name}_rank_{highest_rank}"] = highest
    return metrics
