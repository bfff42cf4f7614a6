"""Compare the recipe of the quick start with a plain PyTorch loop: accuracy over several seeds, and time.

Network, data, optimizer and schedule are the same. The variants run in turns for each seed:

    loop      a plain PyTorch loop, without any algorithm
    baseline  Trainer without any algorithm
    recipe    Trainer with the recipe

Times include training and one evaluation at its end. The settings were selected by cross-validation on the training
images.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import statistics
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from composer import Trainer
from composer.models import ComposerClassifier
from composer.optim import CosineAnnealingWithWarmupScheduler
from composer.trainer.reproducibility import seed_all

if TYPE_CHECKING:
    from types import ModuleType


def load_example() -> ModuleType:
    """Return the quick start as a module."""
    path = Path(__file__).parents[1] / "examples" / "digits.py"
    specification = importlib.util.spec_from_file_location("digits", path)
    assert specification is not None
    assert specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


digits = load_example()


def plain_loop(seed: int, epochs: int) -> float:
    """Train with a plain loop and return the accuracy in percent."""
    seed_all(seed)
    model = digits.make_network()
    train_loader, test_loader = digits.make_loaders(*digits.load_images())
    seed_all(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=digits.LEARNING_RATE, weight_decay=digits.WEIGHT_DECAY)
    steps = epochs * len(train_loader)
    warmup = 0.1 * steps

    def factor(step: int) -> float:
        if step < warmup:
            return step / warmup
        return (1 + math.cos(math.pi * (step - warmup) / (steps - warmup))) / 2

    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
    for _ in range(epochs):
        for images, labels in train_loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(images), labels).backward()
            optimizer.step()
            schedule.step()
    model.eval()
    images, labels = next(iter(test_loader))
    with torch.no_grad():
        return 100 * (model(images).argmax(dim=1) == labels).float().mean().item()


def run_trainer(seed: int, epochs: int, algorithms: list[str]) -> float:
    """Train with the Trainer and return the accuracy in percent."""
    seed_all(seed)
    model = ComposerClassifier(digits.make_network(), num_classes=10)
    train_loader, test_loader = digits.make_loaders(*digits.load_images())
    with Trainer(
        model=model,
        train_dataloader=train_loader,
        eval_dataloader=test_loader,
        eval_interval=f"{epochs}ep",
        optimizers=torch.optim.AdamW(model.parameters(), lr=digits.LEARNING_RATE, weight_decay=digits.WEIGHT_DECAY),
        schedulers=CosineAnnealingWithWarmupScheduler(t_warmup="0.1dur"),
        algorithms=[digits.RECIPE[name]() for name in algorithms],
        max_duration=f"{epochs}ep",
        progress_bar=False,
        device="cpu",
        seed=seed,
    ) as trainer:
        trainer.fit()
    return 100 * float(trainer.state.eval_metric_values["MulticlassAccuracy"])


def main() -> None:
    """Measure and print the figures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=10, help="number of seeds (default: %(default)s)")
    parser.add_argument("--epochs", type=int, default=20, help="epochs of each run (default: %(default)s)")
    parser.add_argument("--json", type=Path, help="file to write the figures to")
    arguments = parser.parse_args()

    runs = {
        "loop": plain_loop,
        "baseline": lambda seed, epochs: run_trainer(seed, epochs, []),
        "recipe": lambda seed, epochs: run_trainer(seed, epochs, list(digits.RECIPE)),
    }
    plain_loop(0, 1)  # one-time costs of a process are not counted
    measured: dict[str, list[tuple[float, float]]] = {name: [] for name in runs}
    for seed in range(arguments.seeds):
        for name, run in runs.items():
            began = time.perf_counter()
            accuracy = run(seed, arguments.epochs)
            measured[name].append((accuracy, time.perf_counter() - began))
        print(f"seed {seed + 1} of {arguments.seeds}", file=sys.stderr)
    figures = report(measured)
    if arguments.json:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps(figures, indent=2))


def report(measured: dict[str, list[tuple[float, float]]]) -> dict[str, Any]:
    """Print the table and return it as data."""
    figures = {}
    print(f"{'':<10} {'accuracy':>9} {'lowest':>8} {'seconds':>8} {'x loop':>7}")
    for name, pairs in measured.items():
        accuracies, seconds = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
        ratio = statistics.median(own[1] / loop[1] for own, loop in zip(pairs, measured["loop"], strict=True))
        figures[name] = {"accuracies": accuracies, "seconds": seconds, "ratio": ratio}
        print(
            f"{name:<10} {statistics.mean(accuracies):>7.2f} % {min(accuracies):>6.2f} % "
            f"{statistics.median(seconds):>8.2f} {ratio:>7.2f}"
        )
    return figures


if __name__ == "__main__":
    main()
