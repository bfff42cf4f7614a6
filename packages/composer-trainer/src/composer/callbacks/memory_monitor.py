"""Log the memory usage of a GPU."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import attrs
import torch
from torch import Tensor

from composer.core import Callback, Event, Logger, State, Time, TimeUnit
from composer.core.checks import integer, to_options
from composer.core.saving.components import transient
from composer.distributed import all_gather
from composer.functional.random import send

_KEYS = {
    "allocated_bytes.all.current": "current_allocated_mem",
    "active_bytes.all.current": "current_active_mem",
    "inactive_split_bytes.all.current": "current_inactive_mem",
    "reserved_bytes.all.current": "current_reserved_mem",
    "allocated_bytes.all.peak": "peak_allocated_mem",
    "active_bytes.all.peak": "peak_active_mem",
    "inactive_split_bytes.all.peak": "peak_inactive_mem",
    "reserved_bytes.all.peak": "peak_reserved_mem",
    "num_alloc_retries": "alloc_retries",
}
_GIGABYTE = 1e9


def _to_keys(given: Mapping[str, str] | None) -> dict[str, str]:
    return to_options("memory_keys", _KEYS if given is None else given)


@attrs.define(eq=False)
class MemoryMonitor(Callback):
    """Log the GPU memory in use at every batch, when all of its gradients are computed.

    In gigabytes (1e9 bytes), as torch's allocator counts them:

    - ``memory/current_allocated_mem``, ``…_active_mem``, ``…_inactive_mem`` and ``…_reserved_mem``: now;
    - ``memory/peak_allocated_mem`` and so on: the maximum so far;
    - ``memory/alloc_retries``: how often the allocator had to release its cache to serve an allocation, 0 in a healthy
      run.

    Reading the allocator does not synchronize with the device. On devices other than CUDA the callback warns and logs
    nothing; :class:`SystemMetricsMonitor` logs the memory of the host.

    Args:
        memory_keys: Names to log by key of :func:`torch.cuda.memory_stats`, instead of the above.
        dist_aggregate_batch_interval: Batches between logging the mean, minimum and maximum over all processes as well,
            as ``memory/current_allocated_mem_avg``, ``…_min`` and ``…_max``; never if None.

    Raises:
        ValueError: ``dist_aggregate_batch_interval`` is less than 1.

    Example:
        >>> MemoryMonitor({"allocated_bytes.all.peak": "peak"}, dist_aggregate_batch_interval=100)
        MemoryMonitor(memory_keys={'allocated_bytes.all.peak': 'peak'}, dist_aggregate_batch_interval=100)
    """

    memory_keys: dict[str, str] = attrs.field(default=None, converter=_to_keys)
    dist_aggregate_batch_interval: int | None = integer(None, 1, meaning="It counts batches.")

    _is_on: bool = transient(default=False)

    def intervals(self) -> Mapping[Event | str, Time | str | int]:
        """Gather the numbers of all processes every ``dist_aggregate_batch_interval`` batches."""
        return {Event.BATCH_END: Time(self.dist_aggregate_batch_interval or 0, TimeUnit.BATCH)}

    def init(self, state: State, logger: Logger) -> None:
        """Warn if there is no GPU."""
        self._is_on = state.device.type == "cuda"
        if not self._is_on:
            warnings.warn(
                f"MemoryMonitor logs nothing: it reads CUDA's allocator, and the run is on {state.device}.",
                stacklevel=2,
            )

    def after_train_batch(self, state: State, logger: Logger) -> None:
        """Log the memory of this process."""
        if self._is_on and logger.destinations:
            logger.log_metrics(_named(self._usage(state)))

    def batch_end(self, state: State, logger: Logger) -> None:
        """Log the statistics over all processes."""
        if self._is_on:
            # At the step of this batch's other metrics, which were logged before the clock counted it.
            usage = over_processes(self._usage(state), state.device)
            logger.log_metrics(_named(usage), step=int(state.timestamp.count(TimeUnit.BATCH)) - 1)

    def _usage(self, state: State) -> dict[str, float]:
        return in_gigabytes(torch.cuda.memory_stats(state.device), self.memory_keys)


def in_gigabytes(stats: Mapping[str, Any], keys: Mapping[str, str]) -> dict[str, float]:
    """Return the selected statistics of an allocator by their new names, with bytes converted to gigabytes.

    Example:
        >>> in_gigabytes({"a_bytes": 2_500_000_000, "num_retries": 3}, {"a_bytes": "a", "num_retries": "retries"})
        {'a': 2.5, 'retries': 3}
    """
    return {
        name: stats[key] / _GIGABYTE if "bytes" in key else stats[key] for key, name in keys.items() if key in stats
    }


def over_processes(usage: Mapping[str, float], device: torch.device) -> dict[str, Tensor]:
    """Return the mean, minimum and maximum of each number over all processes, on the device.

    Every process must call this with the same names.

    Example:
        >>> over_processes({"peak": 2.0}, torch.device("cpu"))
        {'peak_avg': tensor(2.), 'peak_min': tensor(2.), 'peak_max': tensor(2.)}
    """
    own = send(torch.tensor(list(usage.values()), dtype=torch.float32), device)
    gathered = torch.stack(all_gather(own))
    statistics = {"avg": gathered.mean(dim=0), "min": gathered.amin(dim=0), "max": gathered.amax(dim=0)}
    return {f"{name}_{kind}": values[place] for place, name in enumerate(usage) for kind, values in statistics.items()}


def _named(usage: Mapping[str, Any]) -> dict[str, Any]:
    return {f"memory/{name}": value for name, value in usage.items()}
