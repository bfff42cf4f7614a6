"""Images: train a small residual network on Fashion-MNIST, and measure which methods help.

    python examples/fashion_mnist.py --output runs/fashion_mnist

The data are 60,000 images of 28 by 28 pixels for training, of which the last 10,000 are for validation, on which all
settings in this file were selected (``--study search``), and 10,000 for the test. They are read from the folder
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
    CutMix,
    CutOut,
    GhostBatchNorm,
    GradientClipping,
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
from composer.functional import parameter_groups
from composer.models import ComposerClassifier
from composer.optim import (
    CosineAnnealingWithWarmupScheduler,
    DecoupledAdamW,
    LinearWithWarmupScheduler,
    WarmupStableDecayScheduler,
    muon_with_adamw,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

METRIC = "eval/MulticlassAccuracy"
FOLDERS = [Path("/usr/share/datasets/fashion-mnist"), Path("data/FashionMNIST/raw")]
TRAIN_SIZE = 50_000
EPOCHS = 3
WIDTH = 16
# Without AVX-512, a CPU computes in bfloat16 a hundred times slower than in float32.
PRECISION = "fp32" if torch.backends.cpu.get_cpu_capability() == "AVX2" else "amp_bf16"


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


def augment(*, shift: bool) -> Algorithm:
    """Return random flips of kornia, with or without a small affine transformation of each image."""
    import kornia.augmentation as K  # noqa: N812, PLC0415  (the usual name; it is slow to import)

    shifts = [K.RandomAffine(5.0, translate=(0.07, 0.07))] if shift else []
    return Augment(K.AugmentationSequential(K.RandomHorizontalFlip(), *shifts))


METHODS: dict[str, Callable[[], Algorithm] | Mapping[str, Any]] = {
    "Muon": {"optimizer": "muon", "lr": 3e-2, "momentum": 0.8, "ns_steps": 3},
    "ProgressiveResizing": lambda: ProgressiveResizing(
        initial_scale=20 / 28, finetune_fraction=0.5, delay_fraction=0.2, size_increment=4
    ),
    "LabelSmoothing": lambda: LabelSmoothing(0.05),
    "EMA": lambda: EMA(half_life="30ba"),
    "SWA": lambda: SWA(swa_start="0.75dur", update_interval="10ba"),
    "Flips": lambda: augment(shift=False),
    "Augment": lambda: augment(shift=True),
    "BlurPool": lambda: BlurPool(replace_maxpools=False),
    "CautiousUpdates": {"optimizer": "cautious"},
    "WarmupStableDecay": {"schedule": "stable"},
    "GradientClipping": lambda: GradientClipping("norm", 1.0),
    "MixUp": lambda: MixUp(alpha=0.1),
    "CutMix": lambda: CutMix(alpha=0.5),
    "CutOut": lambda: CutOut(length=0.3),
    "SAM": lambda: SAM(rho=0.05, interval=2),
    "SqueezeExcite": lambda: SqueezeExcite(latent_channels=8, min_channels=32),
    "LayerFreezing": lambda: LayerFreezing(freeze_start=0.0, freeze_level=0.8),
    "SelectiveBackprop": lambda: SelectiveBackprop(start=0.4, end=0.9),
    "RandAugment": lambda: RandAugment(severity=3, depth=1, batch=True),
    "StochasticDepth": lambda: StochasticDepth({Block: RESIDUAL}, drop_rate=0.1),
    "WeightStandardization": WeightStandardization,
    "GhostBatchNorm": lambda: GhostBatchNorm(ghost_batch_size=32),
}
LENGTHS: Mapping[str, Mapping[str, Any]] = {"Length0.45": {"length": 0.45}, "Length0.9": {"length": 0.9}}
"""No methods: the training, and its schedule, end after that part of the images."""
RECIPE = ["Muon", "LabelSmoothing", "Length0.45"]
"""It ends after less than half of the images, with about the baseline's accuracy."""
ACCURATE = ["Muon", "LabelSmoothing", "Length0.9"]
"""A recipe for as much time as the baseline's."""

BEFORE_SEARCH: Mapping[str, Any] = {"lr": 1e-2, "batch_size": 128}
"""Settings of the baseline that the search has changed."""
SETTINGS: Mapping[str, Mapping[str, Any]] = {
    f"{name}={value}": {name: value}
    for name, values in {
        "lr": [5e-3, 1e-2, 1.5e-2, 2e-2, 3e-2, 4e-2, 0.1],
        "weight_decay": [5e-4, 0.02, 0.1],
        "batch_size": [32, 64, 128, 256],
        "beta1": [0.8, 0.95],
        "beta2": [0.95, 0.99],
        "warmup": ["0.05dur", "0.2dur"],
        "schedule": ["linear", "stable"],
        "optimizer": ["sgd"],
        "precision": ["fp32"],
        "length": [0.4, 0.45, 0.5, 0.55, 0.6, 0.67, 0.7, 0.9, 1.0, 1.2],
        "adamw_lr": [5e-3, 1e-2, 4e-2],
        "momentum": [0.7, 0.8, 0.9],
        "ns_steps": [2, 3, 4],
        "cautious": [True],
    }.items()
    for value in values
}
VARIANTS: Mapping[str, Callable[[], Algorithm]] = {
    "ProgressiveResizing late": lambda: ProgressiveResizing("resize", 20 / 28, 0.3, 0.3, 4),
    "ProgressiveResizing small": lambda: ProgressiveResizing("resize", 16 / 28, 0.4, 0.2, 4),
    "LabelSmoothing 0.1": lambda: LabelSmoothing(0.1),
    "LayerFreezing 0.4": lambda: LayerFreezing(0.0, 0.4),
    "LayerFreezing 0.8": lambda: LayerFreezing(0.0, 0.8),
}
SMALL = "batch_size=64"
ADAMW = [SMALL, "lr=0.02", "schedule=linear"]
MUON = [SMALL, "Muon", "lr=0.02", "LabelSmoothing"]
RESIZED = [*MUON, "ProgressiveResizing", "length=0.6"]
TRIALS: list[list[str]] = [
    *([name] for name in ("lr=0.005", "lr=0.02", SMALL, "batch_size=256")),
    *([name] for name in ("warmup=0.2dur", "schedule=linear", "precision=fp32")),
    *([SMALL, lr] for lr in ("lr=0.005", "lr=0.02")),
    ["batch_size=32", "lr=0.005"],
    [SMALL, "optimizer=sgd", "weight_decay=0.0005", "schedule=linear", "lr=0.1"],
    *([*ADAMW, *more] for more in ([], ["Flips"], ["weight_decay=0.1"], ["beta2=0.99"])),
    *([SMALL, "Muon", lr] for lr in ("lr=0.01", "lr=0.02")),
    *([*one, "schedule=linear", "length=0.5"] for one in ([SMALL, "Muon", "lr=0.02"], MUON, ["Muon", "lr=0.04"])),
    *([*MUON, length] for length in ("length=0.6", "length=0.9")),
    *([*MUON, "length=0.6", name] for name in VARIANTS if name != "LabelSmoothing 0.1"),
    *([*MUON, "length=0.6", name] for name in ("BlurPool", "WeightStandardization")),
    *([*RESIZED, *more] for more in ([], ["EMA"], ["SqueezeExcite"], ["LabelSmoothing 0.1"], ["LayerFreezing 0.8"])),
    *([*RESIZED, name] for name in ("adamw_lr=0.005", "schedule=linear", "warmup=0.2dur", "beta2=0.95")),
    [SMALL, "Muon", "lr=0.04", "LabelSmoothing", "ProgressiveResizing", "length=0.6"],
    [*RESIZED, "weight_decay=0.1"],
    [*MUON, "ProgressiveResizing", "length=0.7"],
    [*MUON, "ProgressiveResizing", "LayerFreezing 0.8", "length=0.67"],
    [*MUON, "LayerFreezing 0.8", "length=0.55"],
    *([*MUON, *more] for more in (["LayerFreezing 0.8", "length=1.2"], ["LayerFreezing 0.4", "length=1.0"])),
]
"""What the search compares; the first are trials of the baseline."""
SHORT = ["Muon", "LabelSmoothing", "momentum=0.8", "ns_steps=3"]
REFINED: list[list[str]] = [
    *([name] for name in ("beta1=0.8", "beta1=0.95", "lr=0.015", "lr=0.03", "weight_decay=0.02", "weight_decay=0.1")),
    *([*SHORT, length] for length in ("length=0.4", "length=0.45", "length=0.5")),
    *([*SHORT[:2], *more, "length=0.45"] for more in ([], ["ns_steps=3"], ["momentum=0.8"])),
    *([*SHORT[:2], *more, "length=0.45"] for more in (["momentum=0.9", "ns_steps=3"], ["momentum=0.8", "ns_steps=2"])),
    *([*SHORT[:2], *more, "length=0.45"] for more in (["momentum=0.7", "ns_steps=3"], ["momentum=0.8", "ns_steps=4"])),
    *([*SHORT, one, "length=0.45"] for one in ("schedule=linear", "schedule=stable", "warmup=0.05dur")),
    *([*SHORT, one, "length=0.45"] for one in ("lr=0.015", "lr=0.03", "weight_decay=0.1", "cautious=True")),
    *([*SHORT, one, "length=0.45"] for one in ("adamw_lr=0.01", "adamw_lr=0.04", "LabelSmoothing 0.1", "EMA")),
    *([*SHORT, *more, "length=0.45"] for more in (["batch_size=128", "lr=0.03"], ["batch_size=32"])),
    *([*SHORT, one, "length=0.5"] for one in ("cautious=True", "LayerFreezing 0.4", "LayerFreezing 0.8")),
    *([*SHORT, one, "length=0.55"] for one in ("LayerFreezing 0.8", "ProgressiveResizing")),
    *([*SHORT, length] for length in ("length=0.9", "length=1.0")),
    [*SHORT, "cautious=True", "length=0.9"],
    [*SHORT[:2], "length=0.9"],
]
"""The second search, from the settings that the first has selected."""
LAST = (
    [["beta1=0.8"], ["beta1=0.8", "lr=0.015"]]
    + [
        [*SHORT[:2], *more, "ns_steps=3", "length=0.45"]
        for more in (["momentum=0.8"], ["momentum=0.8", "lr=0.03"], ["momentum=0.9"], ["momentum=0.9", "lr=0.03"])
    ]
    + [[*SHORT, "adamw_lr=0.04", "length=0.45"]]
)
"""The last search, with three seeds."""


def make_trainer(
    algorithms: Sequence[Algorithm],
    seed: int,
    *,
    optimizer: Literal["adamw", "cautious", "muon", "sgd"] = "adamw",
    lr: float = 2e-2,
    weight_decay: float = 0.05,
    batch_size: int = 64,
    beta1: float = 0.9,
    beta2: float = 0.99,
    adamw_lr: float | None = None,
    momentum: float = 0.95,
    ns_steps: int = 5,
    cautious: bool = False,
    warmup: str = "0.1dur",
    schedule: Literal["cosine", "linear", "stable"] = "cosine",
    precision: str = PRECISION,
    length: float = 1.0,
    epochs: int = EPOCHS,
    train_size: int | None = None,
    evaluations: int = 10,
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
    used = slice(train_size or TRAIN_SIZE)
    train_data = TensorDataset(samples[used], labels[used])
    count = int(epochs * length * len(train_data))
    loader = DataLoader(train_data, batch_size, shuffle=True, drop_last=True)
    # The weights of convolutions are stored as the kernels of a CPU read them, which is ChannelsLast.
    model = ComposerClassifier(make_network().to(memory_format=torch.channels_last), num_classes=10, train_metrics=[])
    groups, betas = parameter_groups(model, weight_decay=weight_decay), (beta1, beta2)
    if optimizer == "muon":
        chosen: torch.optim.Optimizer = muon_with_adamw(
            model,
            lr=lr,
            weight_decay=weight_decay,
            momentum=momentum,
            adamw_lr=adamw_lr,
            ns_steps=ns_steps,
            betas=betas,
            cautious_weight_decay=cautious,
            cautious_update=cautious,
        )
    elif optimizer == "cautious":
        groups = parameter_groups(model, weight_decay=weight_decay * lr)
        chosen = DecoupledAdamW(groups, lr=lr, betas=betas, cautious_update=True, cautious_weight_decay=True)
    elif optimizer == "sgd":
        chosen = torch.optim.SGD(groups, lr=lr, momentum=0.9, nesterov=True)
    else:
        chosen = torch.optim.AdamW(groups, lr=lr, betas=betas)
    schedulers = {
        "cosine": CosineAnnealingWithWarmupScheduler(warmup),
        "linear": LinearWithWarmupScheduler(warmup, alpha_f=0.0),
        "stable": WarmupStableDecayScheduler(warmup, "0.4dur"),
    }
    return Trainer(
        model=model,
        train_dataloader=loader,
        eval_dataloader=DataLoader(TensorDataset(eval_samples, eval_labels), 500),
        eval_interval=f"{1 / evaluations}dur",
        optimizers=chosen,
        schedulers=schedulers[schedule],
        algorithms=algorithms,
        max_duration=f"{count}sp",
        precision=precision,
        device="cpu",
        seed=seed,
        **options,
    )


def main() -> None:
    """Run a study and show its results."""
    left_out = [[name for name in RECIPE if name != one] for one in RECIPE[:-1]]
    studies: dict[str, list[str | list[str]]] = {
        "methods": [[name] for name in METHODS],
        "recipe": [RECIPE, ACCURATE, *left_out],
        "repeat": [RECIPE, ACCURATE],
        "search": [*TRIALS],
        "refine": [*REFINED],
        "last": [*LAST],
    }
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--study", choices=studies, default="recipe", help="default: %(default)s")
    parser.add_argument("--data", type=Path, help=f"folder of the images (default: {' or '.join(map(str, FOLDERS))})")
    parser.add_argument("--seeds", type=int, default=5, metavar="N", help="number of seeds (default: %(default)s)")
    parser.add_argument("--first-seed", type=int, default=0, metavar="N", help="(default: %(default)s)")
    parser.add_argument("--images", type=int, default=TRAIN_SIZE, metavar="N", help="trained on, default: %(default)s")
    parser.add_argument("--processes", type=int, default=1, metavar="N", help="runs at a time (default: %(default)s)")
    parser.add_argument("--clock", choices=["wall", "processor"], default="wall", help="default: %(default)s")
    parser.add_argument("--output", type=Path, default=Path("runs/fashion_mnist"), help="folder (default: %(default)s)")
    options = parser.parse_args()
    search = options.study in ("search", "refine", "last")
    data = options.data.resolve() if options.data else None

    def make(algorithms: Sequence[Algorithm], seed: int, **settings: Any) -> Trainer:
        if search:
            settings = {"images": "validation", **settings}
        if options.study == "search":
            settings = {**BEFORE_SEARCH, **settings}
        evaluations = 10 if options.study in ("recipe", "repeat") else 1
        settings = {"evaluations": evaluations, "train_size": options.images, "data": data, **settings}
        return make_trainer(algorithms, seed, progress_bar=False, **settings)

    study = ablate(
        make,
        {**METHODS, **SETTINGS, **VARIANTS, "Muon": {"optimizer": "muon"}} if search else {**METHODS, **LENGTHS},
        metric=METRIC,
        mode="max",
        arms=studies[options.study],
        seeds=range(options.first_seed, options.first_seed + options.seeds),
        processes=options.processes,
        clock=options.clock,
        folder=options.output,
    )
    print(study)
    study.plot(options.output / "study.png")


if __name__ == "__main__":
    main()
