"""The load of the machine is recorded in a thread."""

import importlib.util
import sys
import threading

import pytest

from composer.profiler import Profiler, cyclic_schedule, system_metrics
from composer.profiler.recording import Recording
from composer.profiler.system_metrics import SystemMetrics

needs_psutil = pytest.mark.skipif(importlib.util.find_spec("psutil") is None, reason="the extra is not installed")
NOTHING = {"cpu": False, "memory": False, "disk": False, "net": False}


@needs_psutil
@pytest.mark.parametrize(
    ("kind", "names"),
    [
        ("cpu", {"system/CPU, %"}),
        ("memory", {"system/memory, MiB"}),
        ("disk", {"system/disk, MiB per second"}),
        ("net", {"system/net, MiB per second"}),
    ],
)
def test_requested_counters(kind, names):
    """Only what is requested is recorded, at least at the start and the end."""
    metrics, recording = SystemMetrics(**NOTHING | {kind: True}), Recording()

    metrics.start(recording)
    metrics.stop()

    recorded = recording.finished()
    assert {event.name for event in recorded} == names
    assert {event.kind for event in recorded} == {"counter"}


def test_nothing_requested():
    """Without counters there is no thread, and psutil is not needed."""
    metrics, recording = SystemMetrics(**NOTHING), Recording()

    metrics.start(recording)
    metrics.stop()

    assert list(recording.finished()) == []


@needs_psutil
@pytest.mark.parametrize(
    ("answer", "problem"),
    [(OSError("driver is gone"), "OSError: driver is gone"), (None, "did not end within 30 seconds")],
)
def test_failing_counters(monkeypatch, answer, problem):
    """The end of recording waits at most half a minute, and reports the thread's error."""
    go = threading.Event()

    def look(*_):
        if answer is not None:
            raise answer
        assert go.wait(60)

    monkeypatch.setattr(system_metrics, "_memory", look)
    monkeypatch.setattr(system_metrics, "_SECONDS_TO_END", 0.05)
    metrics = SystemMetrics(cpu=False, memory=True, disk=False, net=False)
    metrics.start(Recording())

    with pytest.warns(RuntimeWarning, match=problem):
        metrics.stop()

    go.set()


def test_psutil_missing(monkeypatch):
    """Without psutil the error states how to install it."""
    monkeypatch.setitem(sys.modules, "psutil", None)

    with pytest.raises(ModuleNotFoundError, match=r'psutil is not installed.*pip install "composer-trainer\['):
        Profiler(cyclic_schedule(), [])


def test_nonpositive_interval():
    """The interval must be positive."""
    with pytest.raises(ValueError, match="sys_prof_stats_thread_interval_seconds must be a number of seconds"):
        SystemMetrics(**NOTHING, interval=0)
