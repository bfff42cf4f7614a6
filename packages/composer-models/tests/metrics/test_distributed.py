"""Metrics compute over two processes with unequal parts of the data what one process computes for all of it."""

import json
import subprocess
import sys

import pytest

# Rows 0 to 4, and 5 and 6 with a row that does not count.
DATA = """
import torch
from torch.nn import functional as F
from composer.metrics import *

generator = torch.Generator().manual_seed(3)
logits, tokens = torch.randn(7, 5, 9, generator=generator), torch.randint(9, (7, 5), generator=generator)
tokens[2, 3:] = tokens[6, 1:] = -100
classes = torch.tensor([0, 1, 1, 0, 1, 1, 0])
images, masks = torch.randn(7, 3, 5, 5, generator=generator), torch.randint(3, (7, 5, 5), generator=generator)
ignoring = masks.clone()
ignoring[0, :2] = ignoring[6] = -1
targets = [{"boxes": torch.tensor([[0.0, 0, 10, 10 + n]]), "labels": torch.tensor([n % 2])} for n in range(7)]
boxes = [one | {"boxes": one["boxes"] + n, "scores": torch.tensor([0.9 - n / 10])} for n, one in enumerate(targets)]
DATA = {
    "LanguageCrossEntropy": (LanguageCrossEntropy, logits, tokens),
    "LanguagePerplexity": (LanguagePerplexity, logits, tokens),
    "MaskedAccuracy": (MaskedAccuracy, logits, tokens),
    "CrossEntropy": (CrossEntropy, logits[:, 0], tokens[:, 0]),
    "BinaryF1Score": (BinaryF1Score, logits[:, 0, :2], classes),
    "LossMetric": (lambda: LossMetric(F.cross_entropy), logits[:, 0], tokens[:, 0]),
    "MIoU": (lambda: MIoU(3), images, ignoring),
    "Dice": (lambda: Dice(3), images, masks),
    "MAP": (MAP, boxes, targets),
}


def compute(batches, padded):
    values = {}
    for name, (make, scores, targets) in DATA.items():
        metric = make()
        for first, end in batches:
            metric.update(scores[first:end], targets[first:end])
        if padded and name.startswith(("L", "Masked", "Cross")):
            metric.update(scores[:1], torch.full_like(targets[:1], -100))
        value = metric.compute()
        values[name] = float(value["map"] if isinstance(value, dict) else value)
    return values
"""
PROGRAM = (
    DATA
    + """
import json, os, sys, time
from pathlib import Path
import torch.distributed as dist

rank = int(sys.argv[1])
dist.init_process_group("gloo", init_method="file://" + sys.argv[2], rank=rank, world_size=2)
print(json.dumps(compute([(0, 2), (2, 4), (4, 5)] if rank == 0 else [(5, 7)], padded=rank == 1)), flush=True)
# With torch 2.7 destroy_process_group() now and then waits for ever for a process that is gone already.
Path(sys.argv[2] + str(rank)).touch()
while not Path(sys.argv[2] + str(1 - rank)).exists():
    time.sleep(0.01)
os._exit(0)
"""
)


def test_unequal_parts(tmp_path):
    """Both processes have the value over all data."""
    pytest.importorskip("pycocotools", reason="MAP is computed by pycocotools")
    namespace = {}
    exec(DATA, namespace)
    expected = namespace["compute"]([(0, 7)], padded=False)

    command = [sys.executable, "-c", PROGRAM]
    places = [(str(rank), str(tmp_path / "rendezvous")) for rank in (0, 1)]
    processes = [subprocess.Popen([*command, *place], stdout=subprocess.PIPE, text=True) for place in places]
    try:
        values = [json.loads(process.communicate(timeout=300)[0]) for process in processes]
    finally:
        for process in processes:
            process.kill()

    assert values == [pytest.approx(expected, rel=1e-5)] * 2
    assert 0 < expected["MAP"] < 1
