"""Fine-tune a pretrained network with learning rates by depth and gradual unfreezing.

    python -m pip install scikit-learn
    python examples/fine_tuning.py

A ResNet of torchvision is pretrained here on scikit-learn's digits 0 to 4, so that nothing is downloaded, and
fine-tuned on ten images of each of the digits 5 to 9. Baselines are the same network from random weights, and a new
head on the frozen network. For weights of torchvision replace ``pretrain`` by ``composer_torchvision("resnet18", 5,
weights="DEFAULT")``, whose head is new already.
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Sequence

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.optim import AdamW, Optimizer
from torch.utils.data import DataLoader, TensorDataset

from composer import Callback, Trainer
from composer import functional as cf
from composer.callbacks import GradualUnfreezing
from composer.models import ComposerClassifier, composer_torchvision
from composer.optim import LinearWithWarmupScheduler

LEARNING_RATE = 2e-3


def load_data(digits: range, count: int | None = None) -> tuple[TensorDataset, TensorDataset]:
    """Return ``count`` images ``(3, 16, 16)`` of each digit, or three quarters, and the others; labels begin at 0."""
    pixels, labels = (torch.tensor(array) for array in load_digits(return_X_y=True))
    images = nn.functional.interpolate(pixels.float().view(-1, 1, 8, 8) / 16, scale_factor=2.0, mode="bilinear")
    places = [(labels == digit).nonzero().squeeze(1) for digit in digits]
    counts = [len(one) * 3 // 4 if count is None else count for one in places]
    parts = zip(*((one[:number], one[number:]) for one, number in zip(places, counts, strict=True)), strict=True)
    train, test = (torch.cat(part) for part in parts)
    images = images.expand(-1, 3, -1, -1)
    return tuple(TensorDataset(images[part], labels[part] - digits[0]) for part in (train, test))


def train(
    model: ComposerClassifier,
    data: tuple[TensorDataset, TensorDataset],
    optimizer: Optimizer,
    duration: str,
    callbacks: Sequence[Callback] = (),
) -> float:
    """Train a model and return its accuracy on the second part of the data."""
    with Trainer(
        model=model,
        train_dataloader=DataLoader(data[0], batch_size=10 if len(data[0]) < 100 else 50, shuffle=True),
        eval_dataloader=DataLoader(data[1], batch_size=256),
        eval_interval="1dur",
        optimizers=optimizer,
        schedulers=LinearWithWarmupScheduler(t_warmup="0.1dur"),  # multiplies the rates of all groups
        callbacks=callbacks,
        max_duration=duration,
        seed=0,
        progress_bar=False,
    ) as trainer:
        trainer.fit()
    return float(trainer.state.eval_metric_values["MulticlassAccuracy"])


def pretrain(duration: str = "4ep") -> nn.Module:
    """Return a ResNet-18 that distinguishes the digits 0 to 4."""
    torch.manual_seed(0)
    model = composer_torchvision("resnet18", num_classes=5)
    train(model, load_data(range(5)), AdamW(model.parameters(), lr=LEARNING_RATE), duration)
    return model.module


def with_new_head(network: nn.Module) -> ComposerClassifier:
    """Return a copy of a network with random weights in the last layer."""
    torch.manual_seed(0)
    network = copy.deepcopy(network)
    network.fc = nn.Linear(network.fc.in_features, 5)
    return ComposerClassifier(network, num_classes=5)


def fine_tune(network: nn.Module, duration: str = "12ep") -> dict[str, float]:
    """Return the accuracies for the digits 5 to 9 of several ways to use a pretrained network."""
    data, results = load_data(range(5, 10), count=10), {}
    torch.manual_seed(0)
    model = composer_torchvision("resnet18", num_classes=5)
    results["from random weights"] = train(model, data, AdamW(model.parameters(), lr=LEARNING_RATE), duration)

    model = with_new_head(network)
    model.module.requires_grad_(False).fc.requires_grad_(True)
    results["new head only"] = train(model, data, AdamW(model.module.fc.parameters(), lr=LEARNING_RATE), duration)

    model = with_new_head(network)
    results["all layers, one rate"] = train(model, data, AdamW(model.parameters(), lr=LEARNING_RATE), duration)

    for name, callbacks in {"rates by depth": [], "and gradual unfreezing": [GradualUnfreezing()]}.items():
        model = with_new_head(network)
        # Each residual block has 0.7 times the learning rate of the next one.
        groups = cf.parameter_groups(model, lr=LEARNING_RATE, weight_decay=0.01, layer_decay=0.7)
        results[name] = train(model, data, AdamW(groups), duration, callbacks)
    return results


def main() -> None:
    """Pretrain, fine-tune and print the accuracies."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--duration", default="12ep", help="of each fine-tuning (default: %(default)s)")
    for name, accuracy in fine_tune(pretrain(), parser.parse_args().duration).items():
        print(f"{name:24} {accuracy:.3f}")


if __name__ == "__main__":
    main()
