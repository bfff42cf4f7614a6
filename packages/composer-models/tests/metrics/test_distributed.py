"""Metrics with their own counters compute over two processes what one process computes for all data."""

import json
import subprocess
import sys

import pytest
from torch.nn import functional as F

from composer.metrics import (
    BinaryF1Score,
    CrossEntropy,
    LanguageCrossEntropy,
    LanguagePerplexity,
    LossMetric,
    MaskedAccuracy,
)

# Two processes with unequal shares, the last batch of one padded with samples that do not count.
DATA = """
import torch
from torch.nn import functional as F
from composer.metrics import *

generator = torch.Generator().manual_seed(3)
logits, tokens = torch.randn(7, 5, 9, generator=generator), torch.randint(9, (7, 5), generator=generator)
tokens[2, 3:] = tokens[6, 1:] = -100
classes = torch.tensor([0, 1, 1, 0, 1, 1, 0])
metrics = {
    "LanguageCrossEntropy": (LanguageCrossEntropy(), logits, tokens),
    "LanguagePerplexity": (LanguagePerplexity(), logits, tokens),
    "MaskedAccuracy": (MaskedAccuracy(), logits, tokens),
    "CrossEntropy": (CrossEntropy(), logits[:, 0], tokens[:, 0]),
    "BinaryF1Score": (BinaryF1Score(), logits[:, 0, :2], classes),
    "LossMetric": (LossMetric(F.cross_entropy), logits[:, 0], tokens[:, 0]),
}
"""
PROGRAM = (
    DATA
    + """
import json, os, sys, time
from pathlib import Path
import torch.distributed as dist

rank = int(sys.argv[1])
dist.init_process_group("gloo", init_method="file://" + sys.argv[2], rank=rank, world_size=2)
values = {}
for name, (metric, scores, targets) in metrics.items():
    for rows in ([0, 1], [2, 3], [4]) if rank == 0 else ([5, 6],):
        metric.update(scores[rows], targets[rows])
    if rank == 1:
        metric.update(scores[:1], torch.full_like(targets[:1], -100))
    values[name] = metric.compute().item()
print(json.dumps(values), flush=True)
# With torch 2.7 destroy_process_group() now and then waits for ever for a process that is gone already.
Path(sys.argv[2] + str(rank)).touch()
while not Path(sys.argv[2] + str(1 - rank)).exists():
    time.sleep(0.01)
os._exit(0)
"""
)


@pytest.fixture(scope="module")
def values(tmp_path_factory):
    """Return the values of two processes that count rows 0 to 4, and 5, 6 and a padded row."""
    rendezvous = tmp_path_factory.mktemp("gloo") / "rendezvous"
    command = [sys.executable, "-c", PROGRAM]
    processes = [
        subprocess.Popen([*command, str(rank), str(rendezvous)], stdout=subprocess.PIPE, text=True) for rank in (0, 1)
    ]
    try:
        said = [process.communicate(timeout=300)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0, 0]
    return [json.loads(text) for text in said]


@pytest.fixture(scope="module")
def data():
    """Return each metric's scores and targets by its name."""
    namespace = {}
    exec(DATA, namespace)
    return {name: (scores, targets) for name, (_, scores, targets) in namespace["metrics"].items()}


def test_processes_have_equal_values(values):
    """Both processes have the value over all data."""
    assert values[0] == values[1]


@pytest.mark.parametrize("kind", [LanguageCrossEntropy, LanguagePerplexity, CrossEntropy, LossMetric])
def test_losses(kind, values, data):
    """The mean is over the tokens of both processes; padding is ignored."""
    scores, targets = data[kind.__name__]

    expected = F.cross_entropy(scores.flatten(0, -2).double(), targets.flatten())

    if kind is LanguagePerplexity:
        expected = expected.exp()
    assert values[0][kind.__name__] == pytest.approx(expected.item(), rel=1e-5)


def test_masked_accuracy(values, data):
    """Correct predictions and targets of both processes are counted."""
    scores, targets = data[MaskedAccuracy.__name__]

    right = (scores.argmax(-1) == targets).sum().item()

    assert values[0]["MaskedAccuracy"] == pytest.approx(right / (targets != -100).sum().item())


def test_binary_f1(values, data):
    """True and false positives of both processes are summed before the division."""
    scores, targets = data[BinaryF1Score.__name__]

    guesses = scores.argmax(-1)

    hits, misses = ((guesses == 1) & (targets == 1)).sum(), (guesses != targets).sum()
    assert values[0]["BinaryF1Score"] == pytest.approx((2 * hits / (2 * hits + misses)).item())
    assert 0 < values[0]["BinaryF1Score"] < 1
