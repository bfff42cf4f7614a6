"""Measuring the machine in a thread."""

import threading

import pytest

from composer.callbacks import _system_metrics as system_metrics
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


def test_last_value():
    """A value is read at the start and at the end."""
    values = iter([{"value": 1.0}, {"value": 2.0}])
    sampler = Sampler(lambda: next(values), seconds=60)
    sampler.stop()

    assert sampler.latest() == {"value": 2.0}


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


def test_hanging_driver(monkeypatch):
    """A measurement that does not end delays the end by a limited time, and is reported."""
    monkeypatch.setattr(system_metrics, "_SECONDS_TO_END", 0.05)
    free = threading.Event()
    sampler = Sampler(lambda: {"value": float(free.wait(60))}, seconds=60)

    sampler.stop()

    with pytest.warns(RuntimeWarning, match="did not end within 0.05 seconds"):
        sampler.latest()
    free.set()


def test_machine():
    """Values match psutil's."""
    psutil = pytest.importorskip("psutil")

    values = read_machine()

    assert values["cpu_memory_total"] == psutil.virtual_memory().total
    assert values["disk_memory_total"] == psutil.disk_usage(".").total
    assert 0 < values["process_memory_rss"] < values["cpu_memory_total"]
    assert 0 <= values["cpu_percentage"] <= 100
    assert values["network_bytes_sent"] <= psutil.net_io_counters().bytes_sent


def test_machine_without_counters(monkeypatch):
    """Where disks and networks are not counted, the other values are measured."""
    psutil = pytest.importorskip("psutil")

    def fail():
        raise NotImplementedError("no disks")

    monkeypatch.setattr(psutil, "disk_io_counters", fail)
    monkeypatch.setattr(psutil, "net_io_counters", lambda: None)

    assert {name.split("_")[0] for name in read_machine()} == {"cpu", "process", "disk"}
