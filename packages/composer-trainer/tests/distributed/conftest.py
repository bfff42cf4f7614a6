"""Programs in several processes."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from composer.distributed.environment import set_tensor_parallel_size
from fixtures.processes import run_processes

FOLDER = Path(__file__).parent
VARIABLES = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "GROUP_RANK",
    "NODE_RANK",
    "MASTER_ADDR",
    "MASTER_PORT",
)


@pytest.fixture(scope="session")
def environment():
    """The environment of processes of torchrun: one thread each, and no variables of torchrun."""
    return {name: value for name, value in os.environ.items() if name not in VARIABLES} | {"OMP_NUM_THREADS": "1"}


def launch(program, count, folder, *arguments):
    """Run a program in several processes and return their results by rank."""
    run_processes(FOLDER / program, count, folder, *arguments)
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(count)]


@pytest.fixture(scope="session")
def two_processes(tmp_path_factory):
    """Results of two processes by rank, started once for all tests."""
    return launch("two_processes.py", 2, tmp_path_factory.mktemp("two_processes"))


@pytest.fixture(scope="session")
def four_processes(tmp_path_factory):
    """Results of four processes by rank, started once for all tests."""
    return launch("four_processes.py", 4, tmp_path_factory.mktemp("four_processes"))


@pytest.fixture(scope="session")
def plain_loaders(tmp_path_factory):
    """Results of two processes with loaders without a sampler, by rank."""
    return launch("plain_loaders_program.py", 2, tmp_path_factory.mktemp("plain_loaders"))


@pytest.fixture(scope="session")
def four_muons(tmp_path_factory):
    """Results of four processes that step Muon on sharded weights, by rank."""
    return launch("muon_program.py", 4, tmp_path_factory.mktemp("muon"))


@pytest.fixture(scope="session")
def two_generations(tmp_path_factory):
    """What two processes have generated, by rank."""
    return launch("generation_program.py", 2, tmp_path_factory.mktemp("generations"))


@pytest.fixture
def start_sync_batchnorm(tmp_path, environment):
    """Return a function that trains with DDP or FSDP2 in two processes with GPUs and returns their results by rank."""

    def start(kind):
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
        command = [*torchrun, str(FOLDER / "sync_batchnorm_program.py"), str(tmp_path), kind]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
        assert done.returncode == 0, done.stderr
        return [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)]

    return start


@pytest.fixture(scope="session")
def start_pair(environment):
    """Return a function that starts a program as ranks 0 and 1 and returns the two processes."""

    def start(program, *arguments):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        meeting = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        return [
            subprocess.Popen(
                [sys.executable, str(FOLDER / program), *arguments],
                env=environment | meeting | {"RANK": str(rank)},
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for rank in (0, 1)
        ]

    return start


@pytest.fixture
def four_unconnected(monkeypatch):
    """There are four processes, of which this is the last, and they are not connected."""
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("WORLD_SIZE", "4")
    yield
    set_tensor_parallel_size(1)
