"""Connecting processes: errors without waiting, and the errors of processes for torchrun."""

import json

import pytest
import torch

from composer import distributed as cd
from composer.distributed import process_group

VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
MEETING = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}


@pytest.fixture(autouse=True)
def clean(monkeypatch):
    for variable in VARIABLES:
        monkeypatch.delenv(variable, raising=False)


@pytest.fixture
def foreign_group():
    """A process group that was created outside the library."""
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield torch.distributed.group.WORLD
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


class TestInitialize:
    @pytest.mark.parametrize("device", ["cpu", "gpu", "mps", torch.device("cuda:0")])
    def test_one_process_creates_no_group(self, device):
        """A single process creates no group, on any device."""
        cd.initialize_dist(device)

        assert not cd.is_initialized()

    def test_torchrun_with_one_process_needs_no_group(self, monkeypatch):
        """A world size of 1 is a single process too."""
        monkeypatch.setenv("RANK", "0")
        monkeypatch.setenv("WORLD_SIZE", "1")

        cd.initialize_dist("cpu")

        assert not cd.is_initialized()

    @pytest.mark.parametrize(
        ("variables", "message"),
        [
            ({"WORLD_SIZE": "2"}, "environment variable RANK expected"),
            ({"RANK": "0", "WORLD_SIZE": "2"}, "environment variable MASTER_ADDR expected"),
        ],
    )
    def test_incomplete_environment_raises(self, monkeypatch, variables, message):
        """The error states the variable, without waiting for other processes."""
        for name, value in variables.items():
            monkeypatch.setenv(name, value)

        with pytest.raises(ValueError, match=message):
            cd.initialize_dist("cpu")

    def test_unsupported_device_raises(self, monkeypatch):
        """Several processes train on CPUs or CUDA devices."""
        for name, value in ({"RANK": "0", "WORLD_SIZE": "2"} | MEETING).items():
            monkeypatch.setenv(name, value)

        with pytest.raises(ValueError, match="Several processes train on 'cpu' or 'gpu', got device='mps'"):
            cd.initialize_dist("mps")

    @pytest.mark.skipif(torch.cuda.is_available(), reason="says what happens without a GPU")
    def test_missing_gpu_raises(self, monkeypatch):
        """A missing CUDA device raises without waiting."""
        for name, value in ({"RANK": "0", "WORLD_SIZE": "2"} | MEETING).items():
            monkeypatch.setenv(name, value)

        with pytest.raises(ValueError, match="there is no CUDA device"):
            cd.initialize_dist("gpu")

    def test_existing_group_is_not_destroyed(self, foreign_group):
        """A group created by the user is used and not destroyed."""
        cd.initialize_dist("cpu")
        cd.close_dist()

        assert torch.distributed.group.WORLD is foreign_group


@pytest.fixture
def count_devices(monkeypatch):
    """Return a function that sets the number of CUDA devices."""
    return lambda count: monkeypatch.setattr(torch.cuda, "device_count", lambda: count)


class Begun(Exception):
    """The processes begin to connect."""


def test_device_and_timeout_of_nccl(monkeypatch, count_devices):
    """The device of the process is chosen before the group is created, which gets the timeout for both backends."""
    calls = []

    def connect(backend, *, timeout):
        calls.append((backend, timeout.total_seconds()))
        raise Begun

    count_devices(2)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: calls.append(str(device)))
    monkeypatch.setattr(torch.distributed, "init_process_group", connect)
    for name, value in ({"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2"} | MEETING).items():
        monkeypatch.setenv(name, value)

    with pytest.raises(Begun):
        cd.initialize_dist("gpu", timeout=77)

    assert calls == ["cuda:1", ("cpu:gloo,cuda:nccl", 77.0)]


class TestDeviceOfProcess:
    @pytest.mark.parametrize("device", ["cpu", "gpu", "cuda:1"])
    def test_single_process_uses_the_given_device(self, device):
        """One process uses the given device."""
        expected = torch.device("cuda" if device == "gpu" else device)

        assert cd.device_of_process(device) == expected

    def test_device_is_that_of_the_local_rank(self, monkeypatch, count_devices):
        """Each of several processes uses its own device."""
        monkeypatch.setenv("RANK", "5")
        monkeypatch.setenv("WORLD_SIZE", "8")
        monkeypatch.setenv("LOCAL_RANK", "1")
        count_devices(4)

        devices = cd.device_of_process("gpu"), cd.device_of_process("cuda:1"), cd.device_of_process("cpu")

        assert devices == (torch.device("cuda:1"), torch.device("cuda:1"), torch.device("cpu"))

    def test_more_processes_than_devices_raise(self, monkeypatch, count_devices):
        """Each process needs its own device."""
        monkeypatch.setenv("RANK", "1")
        monkeypatch.setenv("WORLD_SIZE", "2")
        count_devices(1)

        with pytest.raises(ValueError, match="local rank 1, and the machine has 1 CUDA devices"):
            cd.device_of_process("gpu")


def run_pairs(start_pair, tmp_path_factory, *ways):
    """Return how the first of two processes ended, both outputs and their folder, for each behavior of the second."""
    folders = {how: tmp_path_factory.mktemp("lost") for how in ways}
    pairs = {how: start_pair("dying_process.py", how, str(folder)) for how, folder in folders.items()}
    ends = {}
    for how, (first, second) in pairs.items():
        try:
            output, errors = first.communicate(timeout=240)
        finally:
            for process in (first, second):
                process.kill()
        ends[how] = (first.returncode, output, errors, second.communicate()[0], folders[how])
    return ends


@pytest.fixture(scope="module")
def lost(start_pair, tmp_path_factory):
    """The results of three pairs, at most two at a time."""
    return run_pairs(start_pair, tmp_path_factory, "dies", "hangs") | run_pairs(start_pair, tmp_path_factory, "fails")


@pytest.mark.slow
@pytest.mark.parametrize("how", ["dies", "hangs", "fails"])
def test_lost_process_ends_the_others(lost, how):
    """A process that dies, fails or hangs ends the other with an error within the timeout."""
    code, output, errors, of_the_lost, _ = lost[how]

    assert code == 1
    assert output == of_the_lost == "step 0\nstep 1\n"
    assert "RuntimeError" in errors or "DistBackendError" in errors


class TestErrorFile:
    def test_failed_process_writes_the_file(self, lost):
        """It contains the traceback, as with torchrun's decorator."""
        [message] = json.loads((lost["fails"][-1] / "error1.json").read_text()).values()

        assert message["message"] == "KeyError: 'the labels'"
        assert "dying_process.py" in message["extraInfo"]["py_callstack"]

    def test_timeout_is_written(self, lost):
        """If no process is lost, the timeout is the first error."""
        [message] = json.loads((lost["hangs"][-1] / "error0.json").read_text()).values()

        assert "RuntimeError" in message["message"]

    def test_existing_file_is_preserved(self, monkeypatch, tmp_path):
        """A file that torchrun's decorator has written is not overwritten."""
        path = tmp_path / "error.json"
        path.write_text("{}")
        monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(path))

        process_group._report(ValueError("wrong"))

        assert path.read_text() == "{}"

    def test_missing_folder_is_ignored(self, monkeypatch, tmp_path):
        """The original error is raised, also if the report fails."""
        monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "gone" / "error.json"))

        process_group._report(ValueError("wrong"))

        assert list(tmp_path.iterdir()) == []
