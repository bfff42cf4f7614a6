"""The loops in ``examples/`` train, and agree with each other."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path

import pytest
import torch

EXAMPLES = Path(__file__).parents[1] / "examples"


@pytest.fixture
def loops(monkeypatch):
    """Both examples as modules."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    names = ("plain_loop", "accumulation_and_amp")
    yield tuple(importlib.import_module(name) for name in names)
    for name in names:
        del sys.modules[name]


def weights(model):
    """Return all values of a model."""
    return torch.cat([tensor.flatten().double() for tensor in model.state_dict().values()])


@pytest.mark.parametrize("name", ["plain_loop", "accumulation_and_amp"])
def test_examples_run_as_programs(name):
    """Each is a program that prints the decreasing loss, without a warning."""
    command = [sys.executable, "-W", "error", str(EXAMPLES / f"{name}.py")]

    run = subprocess.run(command, capture_output=True, text=True, check=False)

    assert run.returncode == 0, run.stderr
    assert run.stdout.startswith("loss ")


def test_loss_decreases(loops):
    """Both loops learn the task."""
    losses = [loop.train()[1] for loop in loops]

    assert all(sum(each[-4:]) < 0.8 * sum(each[:4]) for each in losses)


def test_one_microbatch_in_full_precision_equals_the_plain_loop(loops):
    """Without microbatches and mixed precision both loops give bit-identical weights and losses."""
    plain, other = loops

    expected, expected_losses = plain.train()
    model, losses = other.train(microbatch_size=None, precision="fp32")

    assert losses == expected_losses
    assert torch.equal(weights(model), weights(expected))


@pytest.mark.filterwarnings("ignore:MixUp (changes nothing|has not acted)")
def test_microbatches_do_not_change_weights(loops):
    """Without MixUp, which draws per microbatch, microbatches of unequal size give the same weights."""
    plain, other = loops

    expected, _ = plain.train(epochs=1, alpha=0)
    model, _ = other.train(epochs=1, alpha=0, microbatch_size=12, precision="fp32")

    assert torch.allclose(weights(model), weights(expected), atol=1e-5)
