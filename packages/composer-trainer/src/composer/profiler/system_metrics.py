"""How busy the machine is while batches are recorded."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Any

from composer.loggers.products import import_product, require_product

if TYPE_CHECKING:
    from collections.abc import Mapping

    from composer.profiler.recording import Recording

__all__ = ["SystemMetrics"]

_MIB = 2**20


class SystemMetrics:
    """Records counters of the machine in a thread of its own: when it starts, every so often, and when it stops.

    Args:
        cpu: Whether to record the use of the CPUs, of the machine and of this process, in percent (of one CPU).
        memory: Whether to record the memory in use, of the machine and of this process, in MiB.
        disk: Whether to record what is read and written, in MiB a second.
        net: Whether to record what is received and sent, in MiB a second.
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
        if not interval > 0:
            raise ValueError(
                f"sys_prof_stats_thread_interval_seconds must be a number of seconds above 0, got {interval!r}."
            )
        self.cpu, self.memory, self.disk, self.net, self.interval = cpu, memory, disk, net, interval
        if self.is_wanted:
            require_product("psutil", "system")
        self._thread: threading.Thread | None = None
        self._is_over = threading.Event()

    @property
    def is_wanted(self) -> bool:
        """Whether there is anything to record."""
        return self.cpu or self.memory or self.disk or self.net

    def start(self, recording: Recording) -> None:
        """Begin to record."""
        if not self.is_wanted:
            return
        self._is_over.clear()
        self._thread = threading.Thread(
            target=self._record, args=(recording,), name="composer system metrics", daemon=True
        )
        self._thread.start()

    def stop(self) -> None:
        """Record a last time and wait for the thread to end; if there is none, do nothing."""
        thread, self._thread = self._thread, None
        if thread is not None:
            self._is_over.set()
            thread.join()

    def _record(self, recording: Recording) -> None:
        psutil = import_product("psutil", "system")
        process = psutil.Process()
        transferred, since = self._transferred(psutil), time.perf_counter()
        if self.cpu:  # the first answer is that since nothing
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
        """Return the bytes that have gone to and from disks and nets, of machines that tell."""
        disk = psutil.disk_io_counters() if self.disk else None
        net = psutil.net_io_counters() if self.net else None
        found = {}
        if disk is not None:
            found["disk"] = {"read": disk.read_bytes, "written": disk.write_bytes}
        if net is not None:
            found["net"] = {"received": net.bytes_recv, "sent": net.bytes_sent}
        return found


def _memory(psutil: Any, process: Any) -> Mapping[str, float]:
    return {"machine": psutil.virtual_memory().used / _MIB, "process": process.memory_info().rss / _MIB}
