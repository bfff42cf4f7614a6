"""Any split of a padded batch over microbatches and processes gives the same step."""

import json
import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).with_name("split_batches.py")


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """The results of each process, by the number of processes.

    It takes more than 5 seconds: seven processes import Transformers and train once for all tests.
    """
    found = {}
    for number in (1, 2, 4):
        folder = tmp_path_factory.mktemp(f"of_{number}")
        torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(number)]
        command = [sys.executable, *torchrun, str(PROGRAM), str(folder)]
        settings = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        done = subprocess.run(command, env=settings, capture_output=True, text=True, timeout=600, check=False)
        assert done.returncode == 0, done.stderr
        found[number] = [json.loads(path.read_text()) for path in sorted(folder.iterdir())]
    return found


@pytest.mark.parametrize(("processes", "wrapped"), [(1, "ddp"), (2, "ddp"), (2, "fsdp"), (4, "ddp"), (4, "fsdp")])
@pytest.mark.parametrize("kind", runpy.run_path(str(PROGRAM))["KINDS"])
def test_same_step(results, kind, processes, wrapped):
    """Weights and losses are those of one process with complete batches, also if a part has no label."""
    expected = results[1][0][f"{kind}, ddp, complete"]

    for result in results[processes]:
        splits = [found for name, found in result.items() if name.startswith(f"{kind}, {wrapped}, ")]
        assert len(splits) >= 3
        for found in splits:
            assert found["weights"] == pytest.approx(expected["weights"], rel=1e-12, abs=1e-12)
            assert found["loss"] == pytest.approx(expected["loss"], rel=1e-6)  # causal models compute it in float32
