"""Few labels: learn handwritten digits from 10 labelled images of each, and measure which methods help.

    python examples/few_labels.py --output runs/few_labels

The data are the 1,797 images of 8x8 pixels that scikit-learn includes. Half of them, always the same, are the test set.
Each seed draws its own 100 labelled images from the other half; the rest of that half is for validation, on which all
settings in this file were selected (``--study search``). The folder of the output then contains:

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
from composer.algorithms import (
    EMA,
    SAM,
    SWA,
    Augment,
    AugMix,
    BlurPool,
    ChannelsLast,
    ColOut,
    CutMix,
    CutOut,
    Factorize,
    GhostBatchNorm,
    GradientClipping,
    LabelSmoothing,
    LayerFreezing,
    MixUp,
    ProgressiveResizing,
    RandAugment,
    SelectiveBackprop,
    SkipSpikes,
    SqueezeExcite,
    WeightStandardization,
)
from composer.models import ComposerClassifier
from composer.optim import (
    CosineAnnealingWithWarmupScheduler,
    DecoupledAdamW,
    WarmupStableDecayScheduler,
    muon_with_adamw,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

METRIC = "eval/MulticlassAccuracy"
TRAIN_SIZE = 100
TEST_SIZE = 899


def make_augment(degrees: float = 10, shift: float = 0.1, scale: float = 0.1, p: float = 0.5) -> Algorithm:
    """Rotate, shift and scale a part of the images a little, with kornia."""
    from kornia.augmentation import RandomAffine  # noqa: PLC0415  (imports slowly, and only this method needs it)

    return Augment(RandomAffine(degrees, translate=(shift, shift), scale=(1 - scale, 1 + scale), p=p))


METHODS: dict[str, Callable[[], Algorithm] | Mapping[str, Any]] = {
    "Augment": make_augment,
    "BlurPool": BlurPool,
    "LabelSmoothing": lambda: LabelSmoothing(smoothing=0.1),
    "Muon": {"optimizer": "muon"},
    "CautiousUpdates": {"optimizer": "cautious"},
    "WarmupStableDecay": {"schedule": "stable"},
    "MixUp": lambda: MixUp(alpha=0.2),
    "CutMix": lambda: CutMix(alpha=0.2),
    "CutOut": lambda: CutOut(length=0.25),
    "ColOut": lambda: ColOut(p_row=0.1, p_col=0.1),
    "RandAugment": lambda: RandAugment(severity=2, depth=1, batch=True),
    "AugMix": lambda: AugMix(severity=2, depth=1, batch=True),
    "EMA": lambda: EMA(half_life="10ba"),
    "SWA": lambda: SWA(swa_start="0.8dur", update_interval="4ba"),
    "SAM": lambda: SAM(rho=0.05),
    "GradientClipping": lambda: GradientClipping("norm", 1.0),
    "GhostBatchNorm": lambda: GhostBatchNorm(ghost_batch_size=12),
    "SqueezeExcite": lambda: SqueezeExcite(latent_channels=8, min_channels=64),
    "WeightStandardization": WeightStandardization,
    "SelectiveBackprop": lambda: SelectiveBackprop(start=0.4, end=0.9),
    "LayerFreezing": LayerFreezing,
    "ProgressiveResizing": lambda: ProgressiveResizing(initial_scale=0.5, finetune_fraction=0.5, size_increment=2),
    "Factorize": lambda: Factorize(min_channels=64, latent_channels=0.5),
    "ChannelsLast": ChannelsLast,
    "SkipSpikes": SkipSpikes,
    "FewerEpochs": {"epochs": 45},
}
RECIPE = ["Augment", "BlurPool", "LabelSmoothing", "Muon", "ChannelsLast", "FewerEpochs"]
"""The last is no method: three quarters of the epochs, for at most 1.3 times the time of the baseline."""

BEFORE_SEARCH: Mapping[str, Any] = {"weight_decay": 0.05}
"""Settings of the baseline that the search has changed."""

SETTINGS: Mapping[str, Mapping[str, Any]] = {
    f"{name}={value}": {name: value}
    for name, values in {
        "lr": [2e-3, 1e-2, 2e-2],
        "weight_decay": [0.01, 0.2],
        "batch_size": [12, 50],
        "epochs": [40, 45, 90],
        "warmup": ["0.02dur", "0.3dur"],
    }.items()
    for value in values
}
AUGMENTS: Mapping[str, Callable[[], Algorithm]] = {
    "Augment all": lambda: make_augment(p=1.0),
    "Augment more": lambda: make_augment(degrees=15, shift=0.12, scale=0.15),
}
FIRST = ["Augment", "BlurPool", "LabelSmoothing"]
TRIALS = [
    *([name] for name in SETTINGS),
    ["weight_decay=0.2", "lr=0.01"],
    ["weight_decay=0.2", "epochs=90"],
    *([name] for name in METHODS if name != "FewerEpochs"),
    FIRST,
    *([name, "BlurPool", "LabelSmoothing"] for name in AUGMENTS),
    *(
        ["Muon", *FIRST, *more]
        for more in (
            [],
            ["lr=0.01"],
            ["lr=0.02"],
            ["lr=0.01", "EMA"],
            ["lr=0.01", "epochs=45"],
            ["lr=0.01", "epochs=40"],
        )
    ),
    *(["Muon", *FIRST, "ChannelsLast", "epochs=45", *more] for more in ([], ["weight_decay=0.2"], ["SqueezeExcite"])),
    ["Muon", "Augment more", "BlurPool", "LabelSmoothing", "ChannelsLast", "epochs=45"],
]
"""What the search compares; the first are trials of the baseline."""


def construct(names: Sequence[str]) -> tuple[list[Algorithm], dict[str, Any]]:
    """Return new algorithms and the arguments of ``make_trainer`` for methods by their names.

    Raises:
        ValueError: Two methods set the same argument.
    """
    methods = [METHODS[name] for name in names]
    arguments: dict[str, Any] = {}
    for method in methods:
        if not callable(method):
            if shared := arguments.keys() & method.keys():
                raise ValueError(f"methods must set different arguments, got {', '.join(names)} with {shared} twice.")
            arguments |= method
    return [method() for method in methods if callable(method)], arguments


def make_trainer(
    algorithms: Sequence[Algorithm],
    seed: int,
    *,
    optimizer: Literal["adamw", "cautious", "muon"] = "adamw",
    lr: float = 5e-3,
    weight_decay: float = 0.2,
    batch_size: int = 25,
    epochs: int = 60,
    warmup: str = "0.1dur",
    schedule: Literal["cosine", "stable"] = "cosine",
    images: Literal["validation", "test"] = "test",
    **options: Any,
) -> Trainer:
    """Return a trainer with a new model, whose initial weights depend only on torch's seed, and its data."""
    torch.set_num_threads(1)  # more threads are slower for a network of this size
    train_data, eval_data = load_images(seed, images)
    model = ComposerClassifier(make_network(), num_classes=10)
    if optimizer == "muon":
        chosen: torch.optim.Optimizer = muon_with_adamw(model, lr=lr, weight_decay=weight_decay)
    elif optimizer == "cautious":
        decay = weight_decay * lr
        chosen = DecoupledAdamW(
            model.parameters(), lr, weight_decay=decay, cautious_update=True, cautious_weight_decay=True
        )
    else:
        chosen = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=weight_decay)
    return Trainer(
        model=model,
        train_dataloader=DataLoader(train_data, batch_size=batch_size, shuffle=True),
        eval_dataloader=DataLoader(eval_data, batch_size=len(eval_data)),
        eval_interval="8ep",
        optimizers=chosen,
        schedulers=WarmupStableDecayScheduler(warmup, "0.3dur")
        if schedule == "stable"
        else CosineAnnealingWithWarmupScheduler(t_warmup=warmup),
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
    """Run a study and show its results."""
    left_out = [[name for name in RECIPE if name != one] for one in RECIPE]
    studies: dict[str, list[str | list[str]]] = {
        "methods": [RECIPE, *left_out, "each"],
        "recipe": [RECIPE],
        "search": [*TRIALS],
    }
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--study", choices=studies, default="methods", help="default: %(default)s")
    parser.add_argument("--seeds", type=int, default=20, metavar="N", help="number of seeds (default: %(default)s)")
    parser.add_argument("--first-seed", type=int, default=0, metavar="N", help="(default: %(default)s)")
    parser.add_argument("--processes", type=int, default=1, metavar="N", help="runs at a time (default: %(default)s)")
    parser.add_argument("--clock", choices=["wall", "processor"], default="wall", help="default: %(default)s")
    parser.add_argument("--output", type=Path, default=Path("runs/few_labels"), help="folder (default: %(default)s)")
    options = parser.parse_args()
    search = options.study == "search"

    def make(algorithms: Sequence[Algorithm], seed: int, **settings: Any) -> Trainer:
        if search:
            settings = {**BEFORE_SEARCH, "images": "validation", **settings}
        return make_trainer(algorithms, seed, progress_bar=False, **settings)

    study = ablate(
        make,
        {**METHODS, **SETTINGS, **AUGMENTS} if search else METHODS,
        metric=METRIC,
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
