"""Measure the load of the machine in a thread."""

from __future__ import annotations

import contextlib
import threading
import warnings
from collections.abc import Callable

from composer.loggers.products import import_product

_SECONDS_TO_END = 30.0


class Sampler:
    """Call a function periodically in a thread, also once at the end, and store its last result.

    Args:
        read: Function that returns numbers by name.
        seconds: Seconds between two calls; the first is immediate.

    Example:
        >>> sampler = Sampler(lambda: {"answer": 42.0}, seconds=60)
        >>> sampler.stop()
        >>> sampler.latest()
        {'answer': 42.0}
    """

    def __init__(self, read: Callable[[], dict[str, float]], seconds: float) -> None:
        self._read, self._seconds = read, seconds
        self._latest: dict[str, float] = {}
        self._error: Exception | None = None
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._work, daemon=True)
        self._thread.start()

    def latest(self) -> dict[str, float]:
        """Return the latest numbers; none before the first call has returned. Warn once of an error in the thread."""
        error, self._error = self._error, None
        if error is not None:
            warnings.warn(
                f"The load of the machine can no longer be read: {type(error).__name__}: {error}",
                RuntimeWarning,
                stacklevel=3,
            )
        return self._latest

    def stop(self) -> None:
        """Stop the thread, and wait up to 30 seconds for it to end."""
        self._is_over.set()
        self._thread.join(_SECONDS_TO_END)
        if self._thread.is_alive():
            self._error = TimeoutError(f"a measurement did not end within {_SECONDS_TO_END:g} seconds")

    def _work(self) -> None:
        try:
            self._latest = self._read()
            is_over = False
            while not is_over:
                is_over = self._is_over.wait(self._seconds)
                self._latest = self._read()
        except Exception as error:  # noqa: BLE001  (errors of drivers are reported in the training's thread)
            self._latest, self._error = {}, error


def read_machine() -> dict[str, float]:
    """Return the load of this machine by name, as measured by psutil: percentages, bytes, and bytes since it started.

    Raises:
        ModuleNotFoundError: psutil is not installed.

    Example:
        >>> sorted(read_machine())[:2]
        ['cpu_memory_available', 'cpu_memory_percent']
    """
    psutil = import_product("psutil", "system")
    memory, disk = psutil.virtual_memory(), psutil.disk_usage(".")
    counted: dict[str, float] = {}  # a container may count neither, and a sandbox may not know the disks
    with contextlib.suppress(NotImplementedError):
        if (transferred := psutil.disk_io_counters()) is not None:
            counted = {"disk_bytes_read": transferred.read_bytes, "disk_bytes_written": transferred.write_bytes}
    if (network := psutil.net_io_counters()) is not None:
        counted |= {"network_bytes_sent": network.bytes_sent, "network_bytes_recv": network.bytes_recv}
    return {
        # Since the last call; the first call returns 0.
        "cpu_percentage": psutil.cpu_percent() or psutil.cpu_percent(interval=0.1),
        "cpu_memory_percent": memory.percent,
        "cpu_memory_used": memory.used,
        "cpu_memory_available": memory.available,
        "cpu_memory_total": memory.total,
        "process_memory_rss": psutil.Process().memory_info().rss,
        "disk_memory_percent": disk.percent,
        "disk_memory_used": disk.used,
        "disk_memory_free": disk.free,
        "disk_memory_total": disk.total,
        **counted,
    }
