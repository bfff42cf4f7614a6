"""Any split of a padded batch over microbatches and processes gives the same step.

With ``RESUME_MATRIX=all`` in the environment also in four processes.
"""

import json
import os
import runpy
from pathlib import Path

import pytest

from fixtures.processes import run_processes

PROGRAM = Path(__file__).with_name("split_batches.py")
GROUPS = [(1, "ddp"), (2, "ddp"), (2, "fsdp")]
if os.environ.get("RESUME_MATRIX") == "all":
    GROUPS += [(4, "ddp"), (4, "fsdp")]


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """The results of each process, by the number of processes.

    It takes more than 5 seconds: all processes train once for all tests.
    """
    found = {}
    for number in sorted({number for number, _ in GROUPS}):
        folder = tmp_path_factory.mktemp(f"of_{number}")
        run_processes(PROGRAM, number, folder, timeout=600)
        found[number] = [json.loads(path.read_text()) for path in sorted(folder.iterdir())]
    return found


@pytest.mark.slow
@pytest.mark.parametrize(("processes", "wrapped"), GROUPS)
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
