"""How much of a GPU's memory is used."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

import attrs
import torch
from attrs.validators import optional

from composer.core import Callback, Event, Logger, State, Time, TimeUnit
from composer.core.checks import to_options, whole_number_from

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

__all__ = ["MemoryMonitor"]

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
    """Log at every batch how much memory of the GPU is used, when all of the batch's gradients are there.

    In gigabytes (1e9 bytes), as torch's allocator counts them:

    - ``memory/current_allocated_mem``, ``…_active_mem``, ``…_inactive_mem`` and ``…_reserved_mem``: now;
    - ``memory/peak_allocated_mem`` and so on: the most there has been;
    - ``memory/alloc_retries``: how often the allocator had to give its cache back to get what it was asked for, a
      number that is 0 in a healthy run.

    Asking the allocator does not wait for the device. On other devices than CUDA it says so and logs nothing; what the
    process needs of the machine's memory is in :class:`SystemMetricsMonitor`.

    Args:
        memory_keys: What to log by what name, instead of the above: of :func:`torch.cuda.memory_stats`.
        dist_aggregate_batch_interval: Every how many batches to log the mean, the least and the greatest over all
            processes, too, as ``memory/current_allocated_mem_avg``, ``…_min`` and ``…_max``; never if None.

    Raises:
        ValueError: ``dist_aggregate_batch_interval`` is less than 1.

    Example:
        >>> MemoryMonitor({"allocated_bytes.all.peak": "peak"}, dist_aggregate_batch_interval=100)
        MemoryMonitor(memory_keys={'allocated_bytes.all.peak': 'peak'}, dist_aggregate_batch_interval=100)
    """

    memory_keys: dict[str, str] = attrs.field(default=None, converter=_to_keys)
    dist_aggregate_batch_interval: int | None = attrs.field(
        default=None, validator=optional(whole_number_from(1, meaning="It counts batches."))
    )

    _is_on: bool = attrs.field(default=False, init=False, repr=False)

    def intervals(self) -> Mapping[Event | str, Time | str | int]:
        """Ask the other processes every ``dist_aggregate_batch_interval``."""
        return {Event.BATCH_END: Time(self.dist_aggregate_batch_interval or 0, TimeUnit.BATCH)}

    def init(self, state: State, logger: Logger) -> None:
        """Say so if there is no GPU."""
        del logger
        self._is_on = state.device.type == "cuda"
        if not self._is_on:
            warnings.warn(
                f"MemoryMonitor logs nothing: it asks the allocator of CUDA devices, and the run is on {state.device}.",
                UserWarning,
                stacklevel=2,
            )

    def after_train_batch(self, state: State, logger: Logger) -> None:
        """Log what this process uses."""
        if self._is_on and logger.destinations:
            logger.log_metrics(_named(self._usage(state)))

    def batch_end(self, state: State, logger: Logger) -> None:
        """Log what all processes use."""
        if self._is_on:
            usage = over_processes(self._usage(state), state.device)
            logger.log_metrics(_named(usage), step=int(state.timestamp.count(TimeUnit.BATCH)) - 1)

    def _usage(self, state: State) -> dict[str, float]:
        return in_gigabytes(torch.cuda.memory_stats(state.device), self.memory_keys)


def in_gigabytes(stats: Mapping[str, Any], keys: Mapping[str, str]) -> dict[str, float]:
    """Return of an allocator's statistics those that are asked for, by their new names; bytes as gigabytes.

    Example:
        >>> in_gigabytes({"a_bytes": 2_500_000_000, "num_retries": 3}, {"a_bytes": "a", "num_retries": "retries"})
        {'a': 2.5, 'retries': 3}
    """
    return {
        name: stats[key] / _GIGABYTE if "bytes" in key else stats[key] for key, name in keys.items() if key in stats
    }


def over_processes(usage: Mapping[str, float], device: torch.device) -> dict[str, Tensor]:
    """Return the mean, the least and the greatest of each number over all processes, on the device.

    Every process must ask, for the same names.

    Example:
        >>> over_processes({"peak": 2.0}, torch.device("cpu"))
        {'peak_avg': tensor(2.), 'peak_min': tensor(2.), 'peak_max': tensor(2.)}
    """
    own = torch.tensor(list(usage.values()), dtype=torch.float32, device=device)
    everyone = own.unsqueeze(0)
    distributed = torch.distributed
    if distributed.is_available() and distributed.is_initialized():
        gathered = [torch.empty_like(own) for _ in range(distributed.get_world_size())]
        distributed.all_gather(gathered, own)
        everyone = torch.stack(gathered)
    found = {"avg": everyone.mean(dim=0), "min": everyone.amin(dim=0), "max": everyone.amax(dim=0)}
    return {f"{name}_{which}": values[place] for place, name in enumerate(usage) for which, values in found.items()}


def _named(usage: Mapping[str, Any]) -> dict[str, Any]:
    return {f"memory/{name}": value for name, value in usage.items()}
