"""A small model with its loss, data and optimizer, for tests of hosts."""

import json
import os
from pathlib import Path

import torch
from comparison import SEED, weights_of
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

from composer import Trainer
from composer import functional as cf
from composer.core import Algorithm, Event, Stage
from composer.core.testing import seeded
from composer.models import ComposerModel
from fixtures.processes import run_processes

__all__ = ["Net", "Replaces", "image_loss", "make_loader", "make_net", "run_in_two_processes", "sgd", "train_ours"]


class Net(nn.Module):
    """A network with pooling, called with images."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.MaxPool2d(2, 2), nn.Flatten(), nn.Linear(72, 3))

    def forward(self, images):
        return self.layers(images)


def image_loss(outputs, batch, reduction="mean"):
    return cross_entropy(outputs, batch[1], reduction=reduction)


def make_net():
    with seeded("net"):
        return Net()


def make_loader(samples=16, shuffle=False, batch_size=2):
    generator = torch.Generator().manual_seed(0)
    data = [(torch.rand(3, 8, 8, generator=generator), place % 3) for place in range(samples)]
    return DataLoader(data, batch_size=batch_size, shuffle=shuffle)


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


class _Ours(ComposerModel):
    """The network for our Trainer."""

    def __init__(self):
        super().__init__()
        self.net = make_net()

    def forward(self, batch):
        return self.net(batch[0])

    def loss(self, outputs, batch):
        return image_loss(outputs, batch)


def train_ours(algorithms, batch_size=2, **options):
    """Train the network for two epochs by our Trainer, and return the weights and the clock."""
    model = _Ours()
    trainer = Trainer(
        model=model,
        train_dataloader=make_loader(batch_size=batch_size),
        optimizers=sgd(model),
        algorithms=algorithms,
        max_duration="2ep",
        device="cpu",
        seed=SEED,
        progress_bar=False,
        **options,
    )
    trainer.fit()
    weights, clock = weights_of(trainer.state, model.net), trainer.state.timestamp
    trainer.close()
    return weights, clock


class Replaces(Algorithm):
    """Replaces the model object, which no host serves."""

    runs_at = {Event.INIT: Stage.ARCHITECTURE}
    reads = writes = frozenset({"model", "optimizers"})

    def apply(self, event, state, logger):
        former, state.model = state.model, make_net()
        cf.update_params_in_optimizer(former.parameters(), state.model.parameters(), state.optimizers[0])


def write_and_exit(folder, rank, result):
    """Write a result of :func:`run_in_two_processes`, and end the process without the interpreter's shutdown.

    A thread of gloo that releases the last exchange's objects while the interpreter shuts down aborts the program: it
    waits for the interpreter's lock, and its thread is ended inside of C++ code (3 of 10 runs on a busy machine).
    """
    (Path(folder) / f"{rank}.json").write_text(json.dumps(result))
    os._exit(0)


def run_in_two_processes(program, folder):
    """Run a program of this folder, and return what each process wrote into `folder`, its argument."""
    run_processes(Path(__file__).with_name(program), 2, folder)
    return [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]
