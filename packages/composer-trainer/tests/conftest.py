"""Small real models and data for the trainer's tests."""

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from composer.models import ComposerClassifier
from composer.trainer import Trainer


def make_model(seed=0, train_metrics=None):
    """Return a classifier of 4 numbers into 3 classes; equal seeds give equal weights."""
    torch.manual_seed(seed)
    network = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
    return ComposerClassifier(network, num_classes=3, train_metrics=train_metrics)


def make_loader(samples=20, batch_size=4, shuffle=False, seed=0):
    """Return a loader of random samples whose class can be learned."""
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(samples, 4, generator=generator)
    targets = inputs[:, :3].argmax(dim=1)
    return DataLoader(TensorDataset(inputs, targets), batch_size=batch_size, shuffle=shuffle)


@pytest.fixture
def make_trainer():
    """Return a function that builds a trainer on the CPU, with SGD and without a progress bar; it is closed at the end.

    What it is built of stands beside it: ``make_trainer.model()``, ``make_trainer.loader()``, ``make_trainer.weights``.
    """
    trainers = []

    def make(**options):
        model = options.pop("model", None) or make_model(train_metrics=options.pop("train_metrics", []))
        settings = {
            "model": model,
            "train_dataloader": make_loader(),
            "optimizers": torch.optim.SGD(model.parameters(), lr=0.1),
            "progress_bar": False,
            "device": "cpu",
            "seed": 7,
            **options,
        }
        trainers.append(Trainer(**settings))
        return trainers[-1]

    make.model, make.loader, make.weights = make_model, make_loader, weights
    yield make
    for trainer in trainers:
        trainer.close()


def weights(trainer):
    """Return all of a model's weights as one vector."""
    return torch.cat([parameter.detach().flatten().clone() for parameter in trainer.state.model.parameters()])
