"""Configuration of all tests."""

import contextlib
import importlib.util
import os
import re
import sys
from collections import Counter
from pathlib import Path

import pytest

# The programs that tests start import the fixtures, too.
os.environ["PYTHONPATH"] = os.pathsep.join(
    [str(Path(__file__).with_name("tests")), *filter(None, [os.environ.get("PYTHONPATH")])]
)

pytest.register_assert_rewrite("fixtures")

with contextlib.suppress(ImportError):  # the environment for MMDetection has no hypothesis
    from hypothesis import settings

    # The default deadline of 200 ms per example fails on a busy machine.
    settings.register_profile("composer", deadline=None)
    settings.load_profile("composer")


class Skipped(pytest.Module):
    """A file of tests that is skipped without being imported."""

    missing: list[str]

    def collect(self):
        """Skip it."""
        pytest.skip(f"needs {', '.join(self.missing)}", allow_module_level=True)


def pytest_ignore_collect(collection_path, config):
    """With ``-m gpu``, ignore files without such tests, which takes less time and needs fewer libraries."""
    if config.option.markexpr == "gpu" and collection_path.match("test_*.py"):
        return not re.search(r"mark\.gpu|device: torch\.device", collection_path.read_text()) or None
    return None


def pytest_pycollect_makemodule(module_path, parent):
    """With ``-m gpu``, skip files that import a library that is not installed."""
    if parent.config.option.markexpr == "gpu":
        imported = re.findall(r"^(?:import|from) (\w+)", module_path.read_text(), re.MULTILINE)
        if missing := sorted(name for name in {*imported} if importlib.util.find_spec(name) is None):
            module = Skipped.from_parent(parent, path=module_path)
            module.missing = missing
            return module
    return None


def pytest_collection_modifyitems(items):
    """Put files with slow tests first, then those with many, and skip tests marked ``gpu`` without a CUDA device.

    A process of pytest that starts a slow file at the end would run it while the other has nothing to do.
    """
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    tests = Counter(item.path for item in items)
    items.sort(key=lambda item: (item.path not in slow, -tests[item.path]))
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if not marked:
        return
    import torch  # noqa: PLC0415  (not imported for packages without GPU tests)

    if not torch.cuda.is_available():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture(autouse=True)
def _close_runs():
    """Close the trainers of a test."""
    yield
    if "fixtures" in sys.modules:  # not imported for tests without torch
        sys.modules["fixtures"].close_runs()


@pytest.fixture(autouse=True, scope="module")
def _leave_no_group():
    """Fail if the tests of a file leave a process group, which those of the next file would use."""
    yield
    if "torch.distributed" in sys.modules:
        assert not sys.modules["torch.distributed"].is_initialized(), "Call close_dist() after the tests of this file."


@pytest.fixture
def clock(monkeypatch):
    """Return a manual clock that replaces ``time.perf_counter``."""
    from fixtures import ManualClock  # noqa: PLC0415  (it imports torch)

    manual_clock = ManualClock()
    monkeypatch.setattr("time.perf_counter", manual_clock)
    return manual_clock


@pytest.fixture
def set_gpu_name(monkeypatch):
    """Return a function that sets the name of the CUDA devices."""
    return lambda name: monkeypatch.setattr("torch.cuda.get_device_name", lambda *_: name)


@pytest.fixture
def before_each_file(monkeypatch):
    """Return a function that sets what is called before each file of a checkpoint is written."""
    from composer.checkpoint import folders  # noqa: PLC0415  (it imports torch)

    write = folders._write_file  # noqa: SLF001

    def set_call(call):
        monkeypatch.setattr(folders, "_write_file", lambda path, pieces: (call(), write(path, pieces)))

    return set_call


@pytest.fixture
def set_command(monkeypatch):
    """Return a function that sets the command line of this process: a program and its arguments."""
    return lambda *command: monkeypatch.setattr(sys, "argv", [*map(str, command)])


@pytest.fixture(scope="session")
def s3():
    """Return the URL of a bucket on a local S3 server."""
    server = pytest.importorskip("moto.server", reason="moto is in the test group; without it there is no S3 server")
    pytest.importorskip("s3fs", reason="s3fs is in the test group")
    import fsspec  # noqa: PLC0415  (comes with s3fs)

    running = server.ThreadedMotoServer(port=0)
    running.start()
    host, port = running.get_host_and_port()
    settings = {
        "AWS_ENDPOINT_URL": f"http://{host}:{port}",
        "AWS_ACCESS_KEY_ID": "key",
        "AWS_SECRET_ACCESS_KEY": "secret",
        "AWS_DEFAULT_REGION": "us-east-1",
    }
    before = {name: os.environ.get(name) for name in settings}
    os.environ |= settings
    fsspec.filesystem("s3").mkdir("bucket")
    yield "s3://bucket"
    for name, value in before.items():
        os.environ.pop(name) if value is None else os.environ.__setitem__(name, value)
    running.stop()
