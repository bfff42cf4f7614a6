"""Measuring the machine in a thread."""

import threading

import pytest

from composer.callbacks._system_metrics import Sampler, read_machine


def test_interval():
    """Values are read at the interval in seconds."""
    looks, enough = [], threading.Event()

    def read():
        looks.append(1)
        if len(looks) == 3:
            enough.set()
        return {"looks": float(len(looks))}

    sampler = Sampler(read, seconds=0.001)
    assert enough.wait(60)
    sampler.stop()

    assert sampler.latest()["looks"] >= 3


def test_failing_driver():
    """An error in the thread is reported once in the calling thread, and no stale value is returned."""

    def read():
        raise OSError("driver is gone")

    sampler = Sampler(read, seconds=60)
    sampler.stop()

    with pytest.warns(RuntimeWarning, match="driver is gone") as caught:
        assert sampler.latest() == {}
    assert sampler.latest() == {}
    assert len(caught) == 1


def test_machine():
    """Values match psutil's."""
    psutil = pytest.importorskip("psutil")

    values = read_machine()

    assert values["cpu_memory_total"] == psutil.virtual_memory().total
    assert values["disk_memory_total"] == psutil.disk_usage(".").total
    assert 0 < values["process_memory_rss"] < values["cpu_memory_total"]
    assert 0 <= values["cpu_percentage"] <= 100
    assert values["network_bytes_sent"] <= psutil.net_io_counters().bytes_sent
