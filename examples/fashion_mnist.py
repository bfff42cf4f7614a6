"""Images: train a small residual network on Fashion-MNIST, and measure which methods help.

    python examples/fashion_mnist.py --output runs/fashion_mnist

The data are 60,000 images of 28 by 28 pixels for training, of which the last 10,000 are for validation, on which all
settings in this file were selected (``--images validation``), and 10,000 for the test. They are read from the folder
``--data``; Debian's package ``dataset-fashion-mnist`` has them, and so has torchvision, after
``torchvision.datasets.FashionMNIST("data", download=True)``. The folder of the output then contains:

    results.jsonl               the settings, the versions and the result of each run, one JSON object per line
    study.png                   test accuracy and time of each combination of methods

Running the command again continues a study that was interrupted.
"""

from __future__ import annotations

import argparse
import gzip
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from composer import Algorithm, Trainer
from composer import functional as cf
from composer.ablation import ablate
from composer.algorithms import (
    EMA,
    SAM,
    SWA,
    Augment,
    BlurPool,
    ChannelsLast,
    CutMix,
    CutOut,
    GhostBatchNorm,
    LabelSmoothing,
    LayerFreezing,
    MixUp,
    ProgressiveResizing,
    RandAugment,
    SelectiveBackprop,
    SqueezeExcite,
    StochasticDepth,
    WeightStandardization,
)
from composer.models import ComposerClassifier
from composer.optim import CosineAnnealingWithWarmupScheduler

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

METRIC = "eval/MulticlassAccuracy"
FOLDERS = [Path("/usr/share/datasets/fashion-mnist"), Path("data/FashionMNIST/raw")]
TRAIN_SIZE = 50_000
EPOCHS = 3
BATCH_SIZE = 128
LEARNING_RATE = 1e-2
WEIGHT_DECAY = 0.05
WIDTH = 16


class Block(nn.Module):
    """Two convolutions beside a connection that skips them."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False),
            nn.BatchNorm2d(outputs),
            nn.ReLU(),
            nn.Conv2d(outputs, outputs, 3, padding=1, bias=False),
            nn.BatchNorm2d(outputs),
        )
        self.skip = nn.Identity() if inputs == outputs else nn.Conv2d(inputs, outputs, 1, stride, bias=False)

    def forward(self, images: Tensor) -> Tensor:
        """Return the features, at ``1 / stride`` of the resolution."""
        return nn.functional.relu(self.layers(images) + self.skip(images))


RESIDUAL = cf.ResidualRule(
    branch=lambda block, images: block.layers(images),
    shortcut=lambda block, images: block.skip(images),
    activation=lambda _, features: nn.functional.relu(features),
)
"""The parts of a block, for StochasticDepth."""


def make_network() -> nn.Module:
    """Return a residual network for images of one channel and any size."""
    return nn.Sequential(
        nn.Conv2d(1, WIDTH, 3, padding=1, bias=False),
        nn.BatchNorm2d(WIDTH),
        nn.ReLU(),
        Block(WIDTH, WIDTH, stride=1),
        Block(WIDTH, 2 * WIDTH, stride=2),
        Block(2 * WIDTH, 4 * WIDTH, stride=2),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(4 * WIDTH, 10),
    )


def read_images(kind: Literal["train", "t10k"], folder: Path | None = None) -> tuple[Tensor, Tensor]:
    """Return images from 0 to 1, shape ``(N, 1, 28, 28)``, and labels, shape ``(N,)``.

    Raises:
        FileNotFoundError: The data are not installed.
    """
    arrays = []
    for name, header in [(f"{kind}-images-idx3-ubyte", 16), (f"{kind}-labels-idx1-ubyte", 8)]:
        places = [place / (name + suffix) for place in ([folder] if folder else FOLDERS) for suffix in ("", ".gz")]
        found = next((path for path in places if path.exists()), None)
        if found is None:
            raise FileNotFoundError(
                f"Fashion-MNIST was not found in {', '.join(str(place.parent) for place in places[::2])}: install "
                "Debian's package dataset-fashion-mnist, or run torchvision.datasets.FashionMNIST('data', "
                "download=True)."
            )
        content = found.read_bytes()
        content = gzip.decompress(content) if found.suffix == ".gz" else content
        arrays.append(torch.frombuffer(bytearray(content[header:]), dtype=torch.uint8))
    images, labels = arrays
    return images.view(-1, 1, 28, 28).float() / 255, labels.long()


def random_shift() -> Algorithm:
    """Return a pipeline of kornia: a flip and a small affine transformation of each image."""
    import kornia.augmentation as K  # noqa: N812, PLC0415  (the usual name; it is slow to import)

    return Augment(K.AugmentationSequential(K.RandomHorizontalFlip(), K.RandomAffine(5.0, translate=(0.07, 0.07))))


METHODS: dict[str, Callable[[], Algorithm]] = {
    "ChannelsLast": ChannelsLast,
    "ProgressiveResizing": lambda: ProgressiveResizing(
        initial_scale=0.5, finetune_fraction=0.25, delay_fraction=0.4, size_increment=4
    ),
    "EMA": lambda: EMA(half_life="30ba"),
    "SWA": lambda: SWA(swa_start="0.75dur", update_interval="10ba"),
    "BlurPool": lambda: BlurPool(replace_maxpools=False),
    "LabelSmoothing": lambda: LabelSmoothing(0.05),
    "MixUp": lambda: MixUp(alpha=0.1),
    "CutMix": lambda: CutMix(alpha=0.5),
    "CutOut": lambda: CutOut(length=0.3),
    "SAM": lambda: SAM(rho=0.05, interval=2),
    "SqueezeExcite": lambda: SqueezeExcite(latent_channels=8, min_channels=32),
    "LayerFreezing": LayerFreezing,
    "SelectiveBackprop": lambda: SelectiveBackprop(start=0.4, end=0.9),
    "Augment": random_shift,
    "RandAugment": lambda: RandAugment(severity=3, depth=1, batch=True),
    "StochasticDepth": lambda: StochasticDepth({Block: RESIDUAL}, drop_rate=0.1),
    "WeightStandardization": WeightStandardization,
    "GhostBatchNorm": lambda: GhostBatchNorm(ghost_batch_size=32),
}
RECIPE: dict[str, Callable[[], Algorithm]] = {
    "ChannelsLast": ChannelsLast,
    "ProgressiveResizing": lambda: ProgressiveResizing(
        initial_scale=20 / 28, finetune_fraction=0.5, delay_fraction=0.2, size_increment=4
    ),
    "EMA": lambda: EMA(half_life="30ba"),
    "LabelSmoothing": lambda: LabelSmoothing(0.05),
}
"""With settings selected for the complete training."""


def make_trainer(
    algorithms: Sequence[Algorithm],
    seed: int,
    *,
    epochs: int = EPOCHS,
    train_size: int = TRAIN_SIZE,
    evaluations: int = 20,
    images: Literal["validation", "test"] = "test",
    data: Path | None = None,
    **options: Any,
) -> Trainer:
    """Return a trainer with a new network, whose initial weights depend only on torch's seed, and its data."""
    torch.set_num_threads(1)
    samples, labels = read_images("train", data)
    if images == "test":
        eval_samples, eval_labels = read_images("t10k", data)
    else:
        eval_samples, eval_labels = samples[TRAIN_SIZE:], labels[TRAIN_SIZE:]
    train_data = TensorDataset(samples[:TRAIN_SIZE][:train_size], labels[:TRAIN_SIZE][:train_size])
    model = ComposerClassifier(make_network(), num_classes=10, train_metrics=[])
    return Trainer(
        model=model,
        train_dataloader=DataLoader(train_data, BATCH_SIZE, shuffle=True, drop_last=True),
        eval_dataloader=DataLoader(TensorDataset(eval_samples, eval_labels), 500),
        eval_interval=f"{1 / evaluations}dur",
        optimizers=torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY),
        schedulers=CosineAnnealingWithWarmupScheduler(t_warmup="0.1dur"),
        algorithms=algorithms,
        max_duration=f"{epochs}ep",
        device="cpu",
        seed=seed,
        **options,
    )


def main() -> None:
    """Run the study and show its results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", choices=["validation", "test"], default="test", help="default: %(default)s")
    parser.add_argument("--data", type=Path, help=f"folder of the images (default: {' or '.join(map(str, FOLDERS))})")
    parser.add_argument(
        "--epochs", type=int, default=EPOCHS, metavar="N", help="epochs of a run (default: %(default)s)"
    )
    parser.add_argument(
        "--train-size", type=int, default=TRAIN_SIZE, metavar="N", help="images to train on (default: %(default)s)"
    )
    parser.add_argument(
        "--evaluations", type=int, default=20, metavar="N", help="evaluations of a run (default: %(default)s)"
    )
    parser.add_argument("--seeds", type=int, default=5, metavar="N", help="number of seeds (default: %(default)s)")
    parser.add_argument("--processes", type=int, default=1, metavar="N", help="runs at a time (default: %(default)s)")
    parser.add_argument("--each", action="store_true", help="measure each method alone, not the recipe")
    parser.add_argument("--output", type=Path, default=Path("runs/fashion_mnist"), help="folder (default: %(default)s)")
    options = parser.parse_args()
    data = options.data.resolve() if options.data else None

    def make(algorithms: Sequence[Algorithm], seed: int) -> Trainer:
        return make_trainer(
            algorithms,
            seed,
            epochs=options.epochs,
            train_size=options.train_size,
            evaluations=options.evaluations,
            images=options.images,
            data=data,
            progress_bar=False,
        )

    study = ablate(
        make,
        METHODS if options.each else RECIPE,
        metric=METRIC,
        mode="max",
        arms=["baseline", "each" if options.each else "all"],
        seeds=options.seeds,
        processes=options.processes,
        folder=options.output,
    )
    print(study)
    study.plot(options.output / "study.png")


if __name__ == "__main__":
    main()
