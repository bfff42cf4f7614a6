"""Connecting processes: what is refused before anybody waits, and what happens when one of them is lost."""

import pytest
import torch

from composer import distributed as cd

VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
MEETING = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}


@pytest.fixture(autouse=True)
def clean(monkeypatch):
    for variable in VARIABLES:
        monkeypatch.delenv(variable, raising=False)


@pytest.fixture
def foreign_group():
    """A process group that somebody else has made."""
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield torch.distributed.group.WORLD
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


class TestInitialize:
    @pytest.mark.parametrize("device", ["cpu", "gpu", "mps", torch.device("cuda:0")])
    def test_one_process_needs_no_group(self, device):
        """Alone nothing is made, whatever the device."""
        cd.initialize_dist(device)

        assert not cd.is_initialized()

    def test_torchrun_with_one_process_needs_no_group(self, monkeypatch):
        """A world of one process is alone, too."""
        monkeypatch.setenv("RANK", "0")
        monkeypatch.setenv("WORLD_SIZE", "1")

        cd.initialize_dist("cpu")

        assert not cd.is_initialized()

    @pytest.mark.parametrize(
        ("variables", "message"),
        [
            ({"RANK": "0"}, "has RANK but not WORLD_SIZE"),
            ({"WORLD_SIZE": "2"}, "has WORLD_SIZE but not RANK"),
            ({"RANK": "2", "WORLD_SIZE": "2"} | MEETING, r"RANK must be in \[0, 1\], as WORLD_SIZE=2, got 2"),
            ({"RANK": "0", "WORLD_SIZE": "2"}, "lacks MASTER_ADDR and MASTER_PORT"),
            ({"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "here"}, "lacks MASTER_PORT"),
            ({"RANK": "zero", "WORLD_SIZE": "2"}, "RANK must be a whole number, got 'zero'"),
        ],
    )
    def test_incomplete_environments_are_refused(self, monkeypatch, variables, message):
        """What is missing or wrong is named, and nobody waits for processes that will not come."""
        for name, value in variables.items():
            monkeypatch.setenv(name, value)

        with pytest.raises(ValueError, match=message):
            cd.initialize_dist("cpu")

    @pytest.mark.parametrize("timeout", [0, -1.0, float("nan"), float("inf"), "300", None, True])
    def test_bad_timeouts_are_refused(self, timeout):
        """A timeout is a number of seconds."""
        with pytest.raises(ValueError, match="dist_timeout must be a number of seconds above 0"):
            cd.initialize_dist("cpu", timeout)

    def test_devices_that_cannot_are_refused(self, monkeypatch):
        """Several processes train on a CPU or on CUDA devices."""
        for name, value in ({"RANK": "0", "WORLD_SIZE": "2"} | MEETING).items():
            monkeypatch.setenv(name, value)

        with pytest.raises(ValueError, match="Several processes train on 'cpu' or 'gpu', got device='mps'"):
            cd.initialize_dist("mps")

    @pytest.mark.skipif(torch.cuda.is_available(), reason="says what happens without a GPU")
    def test_a_gpu_that_is_not_there_is_refused(self, monkeypatch):
        """Without a CUDA device nobody waits for one."""
        for name, value in ({"RANK": "0", "WORLD_SIZE": "2"} | MEETING).items():
            monkeypatch.setenv(name, value)

        with pytest.raises(ValueError, match="there is no CUDA device"):
            cd.initialize_dist("gpu")

    def test_a_group_of_others_is_used_and_left(self, foreign_group):
        """Who made a group ends it."""
        cd.initialize_dist("cpu")
        cd.close_dist()

        assert torch.distributed.group.WORLD is foreign_group

    def test_processes_are_connected_once(self, two_processes):
        """Before, a collective says what to call; after the end, that there is no second time."""
        for result in two_processes:
            assert "call composer.distributed.initialize_dist(device) first" in result["not connected"]
            is_initialized, refusal = result["closed"]
            assert not is_initialized
            assert "cannot be made a second time" in refusal


class TestDeviceOfProcess:
    @pytest.mark.parametrize("device", ["cpu", "gpu", "cuda:1"])
    def test_alone_it_is_the_one_asked_for(self, device):
        """One process has the device that it wants."""
        expected = torch.device("cuda" if device == "gpu" else device)

        assert cd.device_of_process(device) == expected

    def test_each_has_that_of_its_local_rank(self, monkeypatch):
        """Of several, each takes its own."""
        monkeypatch.setenv("RANK", "5")
        monkeypatch.setenv("WORLD_SIZE", "8")
        monkeypatch.setenv("LOCAL_RANK", "1")
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)

        devices = cd.device_of_process("gpu"), cd.device_of_process("cuda:1"), cd.device_of_process("cpu")

        assert devices == (torch.device("cuda:1"), torch.device("cuda:1"), torch.device("cpu"))

    def test_one_device_cannot_be_that_of_all(self, monkeypatch):
        """A number is right for one process at most."""
        monkeypatch.setenv("RANK", "0")
        monkeypatch.setenv("WORLD_SIZE", "2")
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)

        with pytest.raises(ValueError, match="device='cuda:1' cannot be that of every process"):
            cd.device_of_process("cuda:1")

    def test_more_processes_than_devices_are_refused(self, monkeypatch):
        """Each needs one of its own."""
        monkeypatch.setenv("RANK", "1")
        monkeypatch.setenv("WORLD_SIZE", "2")
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)

        with pytest.raises(ValueError, match="local rank 1, and the machine has 1 CUDA devices"):
            cd.device_of_process("gpu")


@pytest.fixture(scope="module")
def lost(start_pair, tmp_path_factory):
    """How the first of two processes ended, and what both printed, by what became of the second."""
    pairs = {
        how: start_pair("dying_process.py", how, str(tmp_path_factory.mktemp("lost")))
        for how in ("dies", "stands still")
    }
    ends = {}
    for how, (first, second) in pairs.items():
        try:
            output, errors = first.communicate(timeout=240)
        finally:
            for process in (first, second):
                process.kill()
        ends[how] = (first.returncode, output, errors, second.communicate()[0])
    return ends


@pytest.mark.parametrize("how", ["dies", "stands still"])
def test_a_lost_process_ends_the_others(lost, how):
    """A process that dies, or does nothing any more, makes the other one end with an error, within the timeout."""
    code, output, errors, of_the_lost = lost[how]

    assert code == 1
    assert output == of_the_lost == "step 0\nstep 1\n"
    assert "RuntimeError" in errors or "DistBackendError" in errors
