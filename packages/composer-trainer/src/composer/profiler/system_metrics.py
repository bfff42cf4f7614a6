"""Record the load of the machine while batches are profiled."""

from __future__ import annotations

import threading
import time
import warnings
from functools import partial
from typing import TYPE_CHECKING, Any

from composer.core.background import Task
from composer.functional.checks import check_flags, check_numbers
from composer.loggers.products import import_product, require_product

if TYPE_CHECKING:
    from collections.abc import Mapping

    from composer.profiler.recording import Recording

__all__ = ["SystemMetrics"]

_MIB = 2**20
_SECONDS_TO_END = 30.0


class SystemMetrics:
    """Record counters of the machine in a thread: at the start, every ``interval`` seconds, and at the stop.

    Args:
        cpu: Whether to record the CPU usage of the machine and of this process, in percent (of one CPU).
        memory: Whether to record the memory in use, of the machine and of this process, in MiB.
        disk: Whether to record disk reads and writes, in MiB per second.
        net: Whether to record network traffic received and sent, in MiB per second.
        interval: Seconds between two records.

    Raises:
        ModuleNotFoundError: psutil is not installed.
        ValueError: ``interval`` is not more than 0.

    Example:
        >>> from composer.profiler.recording import Recording
        >>> metrics, recording = SystemMetrics(cpu=False, memory=True, disk=False, net=False), Recording()
        >>> metrics.start(recording)
        >>> metrics.stop()
        >>> {event.name for event in recording.finished()}
        {'system/memory, MiB'}
    """

    def __init__(self, *, cpu: bool, memory: bool, disk: bool, net: bool, interval: float = 0.5) -> None:
        check_flags(sys_prof_cpu=cpu, sys_prof_memory=memory, sys_prof_disk=disk, sys_prof_net=net)
        check_numbers(sys_prof_stats_thread_interval_seconds=interval)
        if not interval > 0:
            raise ValueError(
                f"sys_prof_stats_thread_interval_seconds must be a number of seconds above 0, got {interval!r}."
            )
        self.cpu, self.memory, self.disk, self.net, self.interval = cpu, memory, disk, net, interval
        if self.is_wanted:
            require_product("psutil", "system")
        self._task: Task[None] | None = None
        self._is_over = threading.Event()

    @property
    def is_wanted(self) -> bool:
        """Whether any counter is recorded."""
        return self.cpu or self.memory or self.disk or self.net

    def start(self, recording: Recording) -> None:
        """Start recording.

        Raises:
            ThreadError: No thread can be started.
        """
        if not self.is_wanted:
            return
        self._is_over.clear()
        self._task = Task(partial(self._record, recording))

    def stop(self) -> None:
        """Record a last time, and wait up to 30 seconds for the thread to end; do nothing without a thread."""
        task, self._task = self._task, None
        if task is None:
            return
        self._is_over.set()
        problem = "" if task.wait(_SECONDS_TO_END) else "the thread did not end within 30 seconds"
        try:
            problem or task.result()
        except Exception as error:  # noqa: BLE001  (whatever a driver raises)
            problem = f"{type(error).__name__}: {error}"
        if problem:
            warnings.warn(
                f"The profiler could not record all of the system's metrics: {problem}", RuntimeWarning, stacklevel=2
            )

    def _record(self, recording: Recording) -> None:
        psutil = import_product("psutil", "system")
        process = psutil.Process()
        transferred, since = self._transferred(psutil), time.perf_counter()
        if self.cpu:  # the first call returns 0
            psutil.cpu_percent()
            process.cpu_percent()
        is_over = False
        while True:
            if self.memory:
                recording.add_counter("system/memory, MiB", ("system",), _memory(psutil, process))
            if is_over:
                return
            is_over = self._is_over.wait(self.interval)
            now, later = time.perf_counter(), self._transferred(psutil)
            if self.cpu:
                used = {"machine": psutil.cpu_percent(), "process": process.cpu_percent()}
                recording.add_counter("system/CPU, %", ("system",), used)
            for name, values in later.items():
                rates = {what: (values[what] - transferred[name][what]) / (now - since) / _MIB for what in values}
                recording.add_counter(f"system/{name}, MiB per second", ("system",), rates)
            transferred, since = later, now

    def _transferred(self, psutil: Any) -> Mapping[str, Mapping[str, int]]:
        """Return the bytes transferred by disks and networks, if the machine counts them."""
        disk = psutil.disk_io_counters() if self.disk else None
        net = psutil.net_io_counters() if self.net else None
        transferred = {}
        if disk is not None:
            transferred["disk"] = {"read": disk.read_bytes, "written": disk.write_bytes}
        if net is not None:
            transferred["net"] = {"received": net.bytes_recv, "sent": net.bytes_sent}
        return transferred


def _memory(psutil: Any, process: Any) -> Mapping[str, float]:
    return {"machine": psutil.virtual_memory().used / _MIB, "process": process.memory_info().rss / _MIB}
