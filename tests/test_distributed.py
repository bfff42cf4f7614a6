"""The Trainer in two processes that torchrun has started comes to what it comes to in one."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).with_name("distributed_training.py")
VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT")
RUNS = [
    "ddp",
    "microbatches",
    "forced",
    "multi",
    "fsdp",
    "fsdp, microbatches",
    "algorithms",
    "fsdp, algorithms",
    "SWA",
    "fsdp, SWA",
    "freezing",
]


def launch(folder, *launcher):
    """Run the program and return what each of its processes has written."""
    settings = {name: value for name, value in os.environ.items() if name not in VARIABLES} | {"OMP_NUM_THREADS": "1"}
    command = [sys.executable, *launcher, str(PROGRAM), str(folder)]
    done = subprocess.run(command, env=settings, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    return [json.loads(path.read_text()) for path in sorted(folder.iterdir())]


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """What one process comes to with whole batches."""
    [result] = launch(tmp_path_factory.mktemp("alone"))
    return result


@pytest.fixture(scope="module")
def together(tmp_path_factory):
    """What two processes come to with half of each batch."""
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    return launch(tmp_path_factory.mktemp("together"), *torchrun)


class TestTwoProcesses:
    @pytest.mark.parametrize("run", RUNS)
    def test_weights_are_those_of_one(self, alone, together, run):
        """To rounding, although each had weights of its own at first; and both have the same bits."""
        assert together[0][run]["weights"] == pytest.approx(alone[run]["weights"], rel=1e-12, abs=1e-14)
        assert together[0][run]["weights"] == together[1][run]["weights"]

    @pytest.mark.parametrize("run", RUNS)
    def test_losses_and_clocks_are_those_of_one(self, alone, together, run):
        """What is logged, and how many batches and samples are counted, is that of all processes together."""
        for result in together:
            assert result[run]["losses"] == pytest.approx(alone[run]["losses"], rel=1e-12)
            assert result[run]["clock"] == alone[run]["clock"] == [9, 36]

    @pytest.mark.parametrize("run", RUNS)
    def test_metrics_are_those_of_one(self, alone, together, run):
        """Seven samples are evaluated on, of which two processes get one twice and count it once."""
        for result in together:
            assert result[run]["train metric"] == pytest.approx(alone[run]["train metric"])
            assert result[run]["eval metrics"] == pytest.approx(alone[run]["eval metrics"], rel=1e-5)

    def test_every_run_is_tested(self, alone):
        """What the program trains is what is looked at here, and no two come to the same by accident."""
        assert list(alone) == RUNS
        assert alone["freezing"]["weights"] != alone["ddp"]["weights"] != alone["algorithms"]["weights"]

    def test_one_stops_all(self, together):
        """A SIGTERM to one process in the third batch: both stop after the next, of which they can agree."""
        assert [result["stopped"] for result in together] == [4, 4]

    def test_clocks_agree(self, together):
        """A training of two seconds ends after the same batch, by the same clock."""
        first, second = (result["by time"] for result in together)

        assert first == second
        assert first[1] >= 2

    def test_goes_on_to_the_same_bits(self, together):
        """From a checkpoint within an epoch, each process with its own draws, metrics and place in the data."""
        for result in together:
            whole, again = result["gone on"]
            assert again == whole
            assert whole["saved"] == "ep3"
