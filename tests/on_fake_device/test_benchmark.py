"""The benchmark for a GPU: each part with tiny sizes on the device."""

import importlib
import time
from argparse import Namespace
from pathlib import Path

import pytest
import transformers  # noqa: F401  (before a package of the name "kernels" is found, which it would import)

FOLDER = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def gpu(monkeypatch):
    """Return the program; the methods have tests of their own."""
    monkeypatch.syspath_prepend(FOLDER)
    training = importlib.import_module("_gpu_training")
    monkeypatch.setattr(training, "FOR_IMAGES", {})
    monkeypatch.setattr(training, "FOR_TEXT", {})
    return importlib.import_module("gpu")


@pytest.mark.parametrize("part", ["resnet50", "gpt", "fastest", "packing", "loss", "checkpoint", "kernels"])
def test_part(gpu, part):
    """All variants have figures, also for the memory of the device."""
    options = Namespace(device="cuda", size="tiny", precision="amp_bf16", rounds=1, deadline=time.time() + 600, done=[])

    rows = [*gpu.measure(part, options)]

    assert [row.get("error") or row.get("skipped") for row in rows] == [None] * len(rows)
    assert len(rows) >= 2
    assert not [row for row in rows if any(name.startswith("peak") and row[name] is None for name in row)]


@pytest.mark.filterwarnings("ignore")  # those of other libraries
@pytest.mark.parametrize("case", ["loop", "ours", "fabric", "accelerate", "lightning"])
def test_overhead(gpu, case):
    """Each trainer trains on the device, and its synchronizations are counted; a step of composer has none."""
    pytest.importorskip("lightning" if case == "fabric" else {"loop": "torch", "ours": "composer"}.get(case, case))

    figures = gpu.trainers.measure(case, "bare", 150, "mlp", "cuda")

    assert figures["us"] > 0
    assert figures["synchronizations"] == 0 or case not in ("loop", "ours")
