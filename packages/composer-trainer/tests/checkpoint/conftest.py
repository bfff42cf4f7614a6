"""Small runs to save and load."""

import json
import os
from pathlib import Path

import attrs
import pytest
import torch
from torch import nn
from xxhash import xxh3_128_hexdigest

from composer.checkpoint import Manifest, save_checkpoint
from composer.checkpoint.manifest import FileRecord
from composer.core import State, Timestamp
from fixtures.processes import run_processes


def make_state(seed=0, batch=5, steps=3, **options):
    """Return a run of a small model after some steps; equal seeds give equal runs."""
    torch.manual_seed(seed)
    model = options.pop("model", None) or nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
    optimizer = options.pop("optimizer", torch.optim.Adam)(model.parameters(), lr=0.01)
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(6, 4)).square().sum().backward()
        optimizer.step()
    state = State(model, optimizers=optimizer, **{"run_name": "blur", "rank_zero_seed": 17, **options})
    state.timestamp = Timestamp(epoch=1, batch=batch, sample=4 * batch)
    return state


def same_tensors(one, other):
    """Return whether two dictionaries have bit-identical tensors."""
    return one.keys() == other.keys() and all(
        value.dtype == other[name].dtype and torch.equal(value, other[name]) for name, value in one.items()
    )


def same_run(one, other):
    """Return whether two runs have the same weights, optimizer state and clock."""
    first, second = one.optimizers[0].state_dict(), other.optimizers[0].state_dict()
    return (
        same_tensors(one.model.state_dict(), other.model.state_dict())
        and first["param_groups"] == second["param_groups"]
        and all(same_tensors(state, second["state"][number]) for number, state in first["state"].items())
        and one.timestamp == other.timestamp
        and one.rank_zero_seed == other.rank_zero_seed
    )


def sign(checkpoint):
    """Rewrite a checkpoint's manifest to match changed files."""
    path = Path(checkpoint)
    manifest = Manifest.from_bytes((path / "manifest.json").read_bytes(), path)
    contents = {file.name: file.read_bytes() for file in path.iterdir() if file.name != "manifest.json"}
    records = {name: FileRecord(len(content), xxh3_128_hexdigest(content)) for name, content in contents.items()}
    manifest.files.clear()
    manifest.files.update(records)
    (path / "manifest.json").write_bytes(manifest.to_bytes())


class Runs:
    make, same, same_tensors, sign = map(staticmethod, (make_state, same_run, same_tensors, sign))

    @staticmethod
    def rename(checkpoint, run_name):
        """Change the run's name in the manifest."""
        path = Path(checkpoint) / "manifest.json"
        manifest = Manifest.from_bytes(path.read_bytes(), path)
        path.write_bytes(attrs.evolve(manifest, run_name=run_name).to_bytes())

    @staticmethod
    def edit(checkpoint, change):
        """Change state.json and rewrite the manifest."""
        path = Path(checkpoint) / "state.json"
        data = json.loads(path.read_text())
        change(data)
        path.write_text(json.dumps(data))
        sign(checkpoint)


@pytest.fixture
def runs():
    """Return functions that create, compare and damage runs: ``make``, ``same``, ``sign``, ``rename`` and ``edit``."""
    return Runs


@pytest.fixture
def saved(tmp_path):
    """Return the path of a checkpoint."""
    return Path(save_checkpoint(make_state(), tmp_path / "ep1-ba5", extra={"data": {"position": 7}}))


@pytest.fixture
def break_call(monkeypatch):
    """Return a function that lets a function of ``os`` fail, such as ``break_call("fsync", errno.EIO)``.

    ``monkeypatch.undo()`` repairs it.
    """

    def set_error(name, number):
        def fail(*args, **options):
            raise OSError(number, os.strerror(number))

        monkeypatch.setattr(os, name, fail)

    return set_error


@pytest.fixture(scope="session")
def run_program():
    """Return a function that runs a program of this folder, whose argument is a folder for its results."""
    return lambda name, folder: run_processes(Path(__file__).with_name(name), 1, folder)
