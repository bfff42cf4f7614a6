"""Few labels: learn handwritten digits from 10 labelled images of each, and measure which methods help.

    python examples/few_labels.py --output runs/few_labels

The data are the 1,797 images of 8x8 pixels that scikit-learn includes. Half of them, always the same, are the test set.
Each seed draws its own 100 labelled images from the other half; the rest of that half is for validation, on which all
settings in this file were selected (``--images validation``). The folder of the output then contains:

    results.jsonl               the settings, the versions and the result of each run, one JSON object per line
    study.png                   accuracy and time of each combination of methods

Running the command again continues a study that was interrupted.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from composer import Algorithm, Trainer
from composer.ablation import ablate
from composer.algorithms import EMA, SAM, Augment, BlurPool, CutOut, LabelSmoothing, MixUp
from composer.models import ComposerClassifier
from composer.optim import CosineAnnealingWithWarmupScheduler

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

METRIC = "eval/MulticlassAccuracy"
EPOCHS = 60
BATCH_SIZE = 25
LEARNING_RATE = 5e-3
WEIGHT_DECAY = 0.05
TRAIN_SIZE = 100
TEST_SIZE = 899


def make_augment() -> Algorithm:
    """Rotate, shift and scale half of the images a little, with kornia."""
    from kornia.augmentation import RandomAffine  # noqa: PLC0415  (imports slowly, and only this method needs it)

    return Augment(RandomAffine(degrees=10, translate=(0.1, 0.1), scale=(0.9, 1.1), p=0.5))


METHODS: dict[str, Callable[[], Algorithm]] = {
    "Augment": make_augment,
    "BlurPool": BlurPool,
    "LabelSmoothing": lambda: LabelSmoothing(smoothing=0.1),
    "MixUp": lambda: MixUp(alpha=0.2),
    "CutOut": lambda: CutOut(length=0.25),
    "EMA": lambda: EMA(half_life="10ba"),
    "SAM": lambda: SAM(rho=0.05),
}
RECIPE = ["Augment", "BlurPool", "LabelSmoothing"]


def make_trainer(
    algorithms: Sequence[Algorithm],
    seed: int,
    *,
    epochs: int = EPOCHS,
    images: Literal["validation", "test"] = "test",
    **options: Any,
) -> Trainer:
    """Return a trainer with a new model, whose initial weights depend only on torch's seed, and its data."""
    torch.set_num_threads(1)  # more threads are slower for a network of this size
    train_data, eval_data = load_images(seed, images)
    model = ComposerClassifier(make_network(), num_classes=10)
    return Trainer(
        model=model,
        train_dataloader=DataLoader(train_data, batch_size=BATCH_SIZE, shuffle=True),
        eval_dataloader=DataLoader(eval_data, batch_size=len(eval_data)),
        eval_interval="8ep",
        optimizers=torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY),
        schedulers=CosineAnnealingWithWarmupScheduler(t_warmup="0.1dur"),
        algorithms=algorithms,
        max_duration=f"{epochs}ep",
        device="cpu",
        seed=seed,
        **options,
    )


def make_network(width: int = 32) -> nn.Module:
    """Return a small convolutional network for images of 8x8 pixels."""

    def block(inputs: int, outputs: int) -> nn.Sequential:
        convolution = nn.Conv2d(inputs, outputs, kernel_size=3, padding=1, bias=False)
        return nn.Sequential(convolution, nn.BatchNorm2d(outputs), nn.ReLU(inplace=True))

    return nn.Sequential(
        block(1, width),
        block(width, 2 * width),
        nn.MaxPool2d(2),
        block(2 * width, 4 * width),
        block(4 * width, 4 * width),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(4 * width, 10),
    )


def load_images(seed: int, images: Literal["validation", "test"]) -> tuple[TensorDataset, TensorDataset]:
    """Return the labelled images of a seed and the images for evaluation, ``(1, 8, 8)`` in ``[0, 1]``, with labels."""
    pixels, labels = load_digits(return_X_y=True)
    pool, test = train_test_split(range(len(labels)), test_size=TEST_SIZE, random_state=0, stratify=labels)
    labelled, validation = train_test_split(pool, train_size=TRAIN_SIZE, random_state=seed, stratify=labels[pool])
    inputs, targets = torch.tensor(pixels, dtype=torch.float32).view(-1, 1, 8, 8) / 16, torch.tensor(labels)
    parts = labelled, {"validation": validation, "test": test}[images]
    return tuple(TensorDataset(inputs[part], targets[part]) for part in parts)


def main() -> None:
    """Run the study and show its results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", choices=["validation", "test"], default="test", help="default: %(default)s")
    parser.add_argument("--seeds", type=int, default=10, metavar="N", help="number of seeds (default: %(default)s)")
    parser.add_argument("--processes", type=int, default=2, metavar="N", help="runs at a time (default: %(default)s)")
    parser.add_argument("--output", type=Path, default=Path("runs/few_labels"), help="folder (default: %(default)s)")
    options = parser.parse_args()

    def make(algorithms: Sequence[Algorithm], seed: int) -> Trainer:
        return make_trainer(algorithms, seed, images=options.images, progress_bar=False)

    study = ablate(
        make,
        METHODS,
        metric=METRIC,
        arms=["baseline", RECIPE, "each"],
        seeds=options.seeds,
        processes=options.processes,
        folder=options.output,
    )
    print(study)
    study.plot(options.output / "study.png")


if __name__ == "__main__":
    main()
