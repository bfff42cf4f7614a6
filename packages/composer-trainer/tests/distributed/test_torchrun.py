"""Torchrun ends all processes when one fails, reports the failed one, and restarted runs end in the same weights.

Each test starts processes of torchrun, and takes more than 5 seconds; with ``-s`` it prints how long it took from the
failure to the end. With ``FAULTS=all`` in the environment 20 runs
are restarted three times each, otherwise one.
"""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

SEEDS = range(20 if os.environ.get("FAULTS") == "all" else 1)
LONGEST = 25.0  # about 5 seconds on a machine without other work; after 30, torchrun kills what has not ended
KILLED = "forcefully exiting via"  # what torchrun logs of a process that has not ended 30 seconds after its SIGTERM


def seconds_after_failure(ended, folder):
    """Return, and print, how long after the failure all processes had ended."""
    seconds = ended - float((folder / "failed").read_text())
    print(f"all processes ended {seconds:.1f} seconds after the failure")
    return seconds


def run(environment, folder, how, *options, count=2, **variables):
    """Run the program in processes of torchrun, and return the completed process and its time of ending."""
    program = Path(__file__).with_name("failing_training.py")
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={count}", *options]
    command = [*launcher, str(program), how, str(folder)]
    done = subprocess.run(
        command, env=environment | variables, capture_output=True, text=True, timeout=300, check=False
    )
    return done, time.time()


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="which processes run is read from /proc")
class TestFailure:
    @pytest.mark.parametrize(
        ("how", "count", "summary"),
        [
            ("raises", 2, ["rank      : 1 (local_rank: 1)", "host      : ", "KeyError: 'the labels'"]),
            ("dies", 4, ["rank      : 3 (local_rank: 3)", "host      : ", "Signal 9 (SIGKILL) received by PID"]),
        ],
    )
    def test_all_processes_end(self, environment, tmp_path, how, count, summary):
        """They end soon after the failure, and the root cause names the rank, the host and the error."""
        done, ended = run(environment, tmp_path, how, count=count)

        assert done.returncode == 1
        assert seconds_after_failure(ended, tmp_path) < LONGEST
        assert KILLED not in done.stderr
        cause = done.stderr.partition("Root Cause (first observed failure):")[2]
        assert [line for line in summary if line not in cause] == []

    def test_signal_to_one_process_stops_all(self, environment, tmp_path):
        """All end after the same batch, and the others return from fit, although none of them logs a loss."""
        done, _ = run(environment, tmp_path, "signalled")

        assert done.returncode == 1
        assert "Signal 15 (SIGTERM)" in done.stderr or "exitcode  : 143" in done.stderr
        assert (tmp_path / "reason 0").read_text() == "stopped by SIGTERM"

    def test_signal_to_a_second_process_at_the_end(self, environment, tmp_path):
        """A process that receives its own signal after all have stopped still gives the same reason as the others."""
        done, _ = run(environment, tmp_path, "signalled-twice")

        assert done.returncode == 0, done.stderr
        assert [(tmp_path / f"reason {rank}").read_text() for rank in (0, 1)] == ["stopped by SIGTERM"] * 2

    @pytest.mark.gpu
    @pytest.mark.skipif(torch.cuda.device_count() < 2, reason="NCCL needs a GPU for each process")
    @pytest.mark.parametrize("how", ["raises", "dies"])
    def test_processes_with_gpus_end(self, environment, tmp_path, how):
        """NCCL aborts its collectives when a process fails."""
        done, ended = run(environment | {"DEVICE": "gpu"}, tmp_path, how)

        assert done.returncode == 1
        assert seconds_after_failure(ended, tmp_path) < LONGEST


@pytest.fixture(scope="module")
def uninterrupted(environment, tmp_path_factory):
    """The weights of a training that is not interrupted."""
    folder = tmp_path_factory.mktemp("uninterrupted")
    done, _ = run(environment, folder, "trains")
    assert done.returncode == 0, done.stderr
    return torch.load(folder / "weights.pt")


@pytest.mark.parametrize("seed", SEEDS)
def test_restarted_runs_end_in_the_same_weights(environment, tmp_path, uninterrupted, seed):
    """Killed three times at random moments, a run that torchrun restarts has bit-identical weights."""
    done, _ = run(environment, tmp_path, "restarts", "--max-restarts=3", FAILING_SEED=str(seed))

    assert done.returncode == 0, done.stderr
    weights = torch.load(tmp_path / "weights.pt")
    assert all(torch.equal(weights[name], one) for name, one in uninterrupted.items())
