"""Tables: train a transformer on synthetic tables to classify the rows of real ones, and measure which methods help.

    python examples/tables.py --output runs/tables

The network is a prior-fitted one (arXiv:2207.01848, arXiv:2511.03634): it receives the rows of a table, some with their
classes, and predicts those of the others in one forward pass, without training on the table. It is trained on
tables that are drawn at random, each by a network with random weights. Real tables, which scikit-learn includes, are
the data of evaluations: half of the rows of each are the test, the other half is for validation, on which all settings
in this file were selected (``--study search``). The folder of the output then contains:

    results.jsonl               the settings, the versions and the result of each run, one JSON object per line
    study.png                   ROC AUC and time of each combination of methods

Running the command again continues a study that was interrupted.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from sklearn.datasets import load_breast_cancer, load_diabetes, load_digits, load_iris, load_wine
from sklearn.metrics import roc_auc_score
from sklearn.model_selection import train_test_split
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, pad, scaled_dot_product_attention
from torch.optim import AdamW
from torch.utils.data import DataLoader, Dataset
from torchmetrics import MeanMetric

from composer import Algorithm, Trainer
from composer.ablation import ablate
from composer.algorithms import EMA, SWA, GatedLinearUnits, GradientClipping, LabelSmoothing, StochasticDepth
from composer.functional import parameter_groups
from composer.models import ComposerModel
from composer.optim import CosineAnnealingWithWarmupScheduler, WarmupStableDecayScheduler, muon_with_adamw

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

METRIC = "eval/RocAuc"
TABLES = 4096
"""Drawn tables that a run trains on."""
ROWS = 64
MOST_FEATURES = 8
MOST_CLASSES = 10
KNOWN_ROWS = 32
"""Rows of a real table whose classes the network receives; of a drawn one it is their mean number."""
MOST_QUERIES = 128
# Without AVX-512, a CPU computes in bfloat16 a hundred times slower than in float32.
PRECISION = "fp32" if torch.backends.cpu.get_cpu_capability() == "AVX2" else "amp_bf16"
SPLITS = 8
"""Random splits of each real table into such rows and those whose classes are predicted."""

WIDTH = 64
NUM_HEADS = 2
NUM_LAYERS = 3


class Attention(nn.Module):
    """Attention of the cells of a column to those of known rows, or of the cells of a row to each other."""

    def __init__(self, *, of_rows: bool) -> None:
        super().__init__()
        self.of_rows = of_rows
        self.query, self.key_value = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, cells: Tensor, known: int) -> Tensor:
        """Return what is added to the cells, shape ``(N, rows, features, WIDTH)``."""
        cells = cells.transpose(1, 2) if self.of_rows else cells
        sources = cells[:, :, :known] if self.of_rows else cells
        parts = (self.query(cells), *self.key_value(sources).chunk(2, dim=-1))
        query, key, value = (part.unflatten(-1, (NUM_HEADS, -1)).transpose(2, 3) for part in parts)
        mixed = self.out(scaled_dot_product_attention(query, key, value).transpose(2, 3).flatten(3))
        return mixed.transpose(1, 2) if self.of_rows else mixed


class FeedForward(nn.Module):
    """The feed-forward block; GatedLinearUnits replaces ``up`` and ``activation``."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.activation, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, cells: Tensor, known: int) -> Tensor:
        """Process each cell separately."""
        return self.down(self.activation(self.up(cells)))


class Residual(nn.Module):
    """Adds the output of a layer to its input, which is normalized for the layer."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.norm, self.layer = nn.LayerNorm(WIDTH), layer

    def forward(self, cells: Tensor, known: int) -> Tensor:
        """Add the layer's output."""
        return cells + self.layer(self.norm(cells), known)


class TableClassifier(ComposerModel):
    """Predicts the classes of the last rows of a table from the classes of the first ones."""

    def __init__(self) -> None:
        super().__init__()
        self.value = nn.Sequential(nn.Linear(1, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH))
        self.label = nn.Embedding(MOST_CLASSES + 1, WIDTH)
        kinds = (lambda: Attention(of_rows=True), lambda: Attention(of_rows=False), FeedForward)
        self.layers = nn.ModuleList(Residual(make()) for _ in range(NUM_LAYERS) for make in kinds)
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, MOST_CLASSES)
        self.metric = MeanMetric()

    def forward(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return the scores of the classes of the other rows, shape ``(N, rows - known, MOST_CLASSES)``.

        A batch has the values, shape ``(N, rows, features)``, and the classes of the first rows, shape ``(N, known)``.
        """
        values, labels = batch["values"], batch["labels"]
        known = labels.shape[1]
        std, mean = torch.std_mean(values[:, :known], dim=1, keepdim=True)
        values = ((values - mean) / (std + 1e-6)).clamp(-10, 10)
        labels = pad(labels, (0, values.shape[1] - known), value=MOST_CLASSES)
        cells = self.value(values[..., None]) + self.label(labels)[:, :, None]
        for layer in self.layers:
            cells = layer(cells, known)
        return {"logits": self.head(self.norm(cells[:, known:].mean(2)))}

    def loss(self, outputs: dict[str, Tensor], batch: dict[str, Tensor]) -> Tensor:
        """Return the mean cross entropy; LabelSmoothing replaces classes by probabilities."""
        return cross_entropy(outputs["logits"].flatten(0, 1).float(), batch["targets"].flatten(0, 1))

    def get_metrics(self, is_train: bool = False) -> dict[str, MeanMetric]:
        """Return the metric of evaluations."""
        return {} if is_train else {"RocAuc": self.metric}

    def update_metric(self, batch: dict[str, Tensor], outputs: dict[str, Tensor], metric: MeanMetric) -> None:
        """Add the ROC AUC of each table: the mean of each class against the others."""
        for scores, targets in zip(outputs["logits"], batch["targets"], strict=True):
            classes = range(int(targets.max()) + 1)
            probabilities = scores[:, : len(classes)].float().softmax(dim=1)
            metric.update([float(roc_auc_score(targets == one, probabilities[:, one])) for one in classes])


class DrawnTables(Dataset[dict[str, Tensor]]):
    """Tables that are drawn at random; of ``group`` after each other, all have the same shape.

    Args:
        count: The number of tables.
        group: A multiple of the size of batches.
        seed: The seed, on which each table depends, and on its index.
        short: The part of the tables, the first ones, that have half of the rows.
    """

    def __init__(self, count: int, group: int, seed: int, short: float = 0.0) -> None:
        self.count, self.group, self.seed, self.short = count, group, seed, short

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        group = index // self.group
        of_group = _generator(self.seed, 0, group)
        rows = ROWS // 2 if group * self.group < self.short * self.count else ROWS
        features, known = _integer(2, MOST_FEATURES, of_group), _integer(rows // 4, 3 * rows // 4, of_group)
        values, labels = draw_table(rows, features, _generator(self.seed, 1, index))
        return {"values": values, "labels": labels[:known], "targets": labels[known:]}


def draw_table(rows: int, features: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Return the values of a random table, shape ``(rows, features)``, and its classes, shape ``(rows,)``.

    A network with random weights, activations and noise computes its units from random causes. Some of its units are
    the features, another one, cut at random values, is the class.
    """
    width, depth = _integer(features + 1, 3 * features + 4, generator), _integer(1, 3, generator)
    hidden = torch.randn(rows, _integer(1, features // 2 + 1, generator), generator=generator)
    noise = 0.3 * torch.rand((), generator=generator) ** 2
    units = []
    for _ in range(depth):
        weights = torch.randn(hidden.shape[1], width, generator=generator) / hidden.shape[1] ** 0.5
        weights *= torch.rand(weights.shape, generator=generator) < 0.5 + 0.5 * torch.rand((), generator=generator)
        activation = ACTIVATIONS[_integer(0, len(ACTIVATIONS) - 1, generator)]
        hidden = activation(hidden @ weights + torch.randn(width, generator=generator))
        hidden = hidden + noise * torch.randn(hidden.shape, generator=generator)
        units.append(hidden)
    values = torch.cat(units, dim=1)
    chosen = torch.randperm(values.shape[1], generator=generator)[: features + 1]
    target, columns = values[:, chosen[0]].contiguous(), values[:, chosen[1:]]
    classes = _integer(2, MOST_CLASSES, generator) if torch.rand((), generator=generator) < 0.5 else 2
    bounds = target[torch.randint(rows, (classes - 1,), generator=generator)].sort().values
    order = torch.randperm(classes, generator=generator)
    return columns, order[torch.bucketize(target, bounds)]


ACTIVATIONS: tuple[Callable[[Tensor], Tensor], ...] = (torch.tanh, torch.relu, torch.abs, torch.sin, torch.clone)


def _integer(low: int, high: int, generator: torch.Generator) -> int:
    return int(torch.randint(low, high + 1, (), generator=generator))


def _generator(*parts: int) -> torch.Generator:
    """Return a generator that depends on all of some numbers."""
    return torch.Generator().manual_seed(int(np.random.SeedSequence(parts).generate_state(1, np.uint64)[0] >> 1))


REAL_TABLES = (load_breast_cancer, load_wine, load_iris, load_digits, load_diabetes)
"""All classification sets that scikit-learn includes, and diabetes above and below its median."""


def real_tables(
    part: Literal["validation", "test"], sets: Sequence[Callable[..., Any]] = REAL_TABLES
) -> list[dict[str, Tensor]]:
    """Return one half of the rows of each real table in ``SPLITS`` random splits, which are the same in all runs."""
    tables = []
    for load in sets:
        values, labels = load(return_X_y=True)
        labels = labels > np.median(labels) if load is load_diabetes else labels
        halves = train_test_split(range(len(labels)), test_size=0.5, random_state=0, stratify=labels)
        rows = np.array(halves[part == "test"])
        values, labels = torch.tensor(values[rows], dtype=torch.float32), torch.tensor(labels[rows]).long()
        for split in range(SPLITS):
            known, queries = train_test_split(
                range(len(rows)), train_size=KNOWN_ROWS, random_state=split, stratify=labels
            )
            queries = queries[:MOST_QUERIES]
            tables.append({"values": values[known + queries], "labels": labels[known], "targets": labels[queries]})
    return tables


METHODS: dict[str, Callable[[], Algorithm] | Mapping[str, Any]] = {
    "Muon": {"optimizer": "muon", "lr": 8e-3, "weight_decay": 0.01, "warmup": "0.1dur"},
    "GatedLinearUnits": lambda: GatedLinearUnits(
        feed_forward_module=FeedForward, first_layer_attribute="up", activation_attribute="activation"
    ),
    "WarmupStableDecay": {"schedule": "stable"},
    "FewRowsFirst": {"short": 0.6},
    "GradientClipping": lambda: GradientClipping("norm", 1.0),
    "EMA": lambda: EMA(half_life="20ba"),
    "SWA": lambda: SWA(swa_start="0.9dur", update_interval="5ba"),
    "LabelSmoothing": lambda: LabelSmoothing(0.02, target_key="targets"),
    "StochasticDepth": lambda: StochasticDepth(Residual, drop_rate=0.05),
    "Half": {"length": 0.5},
}
RECIPE = ["Muon", "Half"]
"""The last is no method: the training ends after half of the tables, where the recipe has about the baseline's AUC."""

BEFORE_SEARCH: Mapping[str, Any] = {"batch_size": 4, "weight_decay": 0.01, "warmup": "0.1dur"}
"""Settings of the baseline that the search has changed."""
SETTINGS: Mapping[str, Mapping[str, Any]] = {
    f"{name}={value}": {name: value}
    for name, values in {
        "lr": [1e-3, 4e-3, 8e-3, 1.6e-2],
        "weight_decay": [0.1, 0.3],
        "batch_size": [8, 16],
        "beta2": [0.99],
        "warmup": ["0.02dur", "0.3dur"],
        "precision": ["fp32"],
    }.items()
    for value in values
}
TRIALS: list[list[str]] = [
    *([f"lr={lr}"] for lr in (0.004, 0.001)),
    *(["batch_size=8", *more] for more in ([], ["lr=0.004"])),
    ["batch_size=16", "lr=0.004"],
    *(["Muon", f"lr={lr}"] for lr in (0.004, 0.008)),
    *(["Muon", "batch_size=8", "lr=0.008", *more] for more in ([], ["WarmupStableDecay", "Half"], ["Half"])),
    ["batch_size=8", "lr=0.001"],
    *(["Muon", "batch_size=8", "lr=0.004", *more] for more in ([], ["Half"], ["Half", "GatedLinearUnits"])),
    ["Muon", "batch_size=8", "lr=0.008", "FewRowsFirst"],
    *(["batch_size=8", name] for name in ("warmup=0.3dur", "weight_decay=0.1", "WarmupStableDecay", "beta2=0.99")),
    *(["Muon", "batch_size=8", "lr=0.004", name] for name in ("EMA", "GradientClipping")),
    *(["batch_size=8", name] for name in ("SWA", "LabelSmoothing", "StochasticDepth", "precision=fp32")),
    *(["batch_size=8", "warmup=0.3dur", *more] for more in (["lr=0.004"], ["weight_decay=0.1"], ["LabelSmoothing"])),
    ["Muon", "batch_size=8", "lr=0.004", "warmup=0.3dur"],
    *(["Muon", "batch_size=8", "lr=0.008", "warmup=0.3dur", *more] for more in ([], ["Half"])),
]
"""What the search compares; the first are trials of the baseline."""


def make_trainer(
    algorithms: Sequence[Algorithm],
    seed: int,
    *,
    optimizer: Literal["adamw", "muon"] = "adamw",
    lr: float = 2e-3,
    weight_decay: float = 0.1,
    batch_size: int = 8,
    short: float = 0.0,
    beta2: float = 0.95,
    warmup: str = "0.3dur",
    schedule: Literal["cosine", "stable"] = "cosine",
    precision: str = PRECISION,
    length: float = 1.0,
    tables: int = TABLES,
    evaluations: int = 5,
    part: Literal["validation", "test"] = "test",
    sets: Sequence[Callable[..., Any]] = REAL_TABLES,
    **options: Any,
) -> Trainer:
    """Return a trainer with a new model, whose initial weights depend only on torch's seed, and its data."""
    torch.set_num_threads(1)  # more threads gain little for a model of this size
    model, count, betas = TableClassifier(), int(tables * length), (0.9, beta2)
    train_data = DrawnTables(count, batch_size, seed, short)
    loader = DataLoader(train_data, batch_size=batch_size)
    return Trainer(
        model=model,
        train_dataloader=loader,
        eval_dataloader=DataLoader(real_tables(part, sets), batch_size=SPLITS),
        eval_interval=f"{1 / evaluations}dur",
        optimizers=muon_with_adamw(model, lr=lr, weight_decay=weight_decay, betas=betas)
        if optimizer == "muon"
        else AdamW(parameter_groups(model, weight_decay=weight_decay), lr=lr, betas=betas),
        schedulers=WarmupStableDecayScheduler(warmup, "0.2dur")
        if schedule == "stable"
        else CosineAnnealingWithWarmupScheduler(warmup),
        algorithms=algorithms,
        max_duration="1ep",
        precision=precision,
        device="cpu",
        seed=seed,
        **options,
    )


def main() -> None:
    """Run a study and show its results."""
    left_out = [[name for name in RECIPE if name != one] for one in RECIPE]
    studies: dict[str, list[str | list[str]]] = {
        "methods": ["each"],
        "recipe": [RECIPE, *left_out],
        "repeat": [RECIPE],
        "search": [*TRIALS],
    }
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--study", choices=studies, default="recipe", help="default: %(default)s")
    parser.add_argument("--seeds", type=int, nargs="+", default=[*range(5)], metavar="N", help="default: 0 to 4")
    parser.add_argument("--processes", type=int, default=1, metavar="N", help="runs at a time (default: %(default)s)")
    parser.add_argument("--clock", choices=["wall", "processor"], default="wall", help="default: %(default)s")
    parser.add_argument("--output", type=Path, default=Path("runs/tables"), help="folder (default: %(default)s)")
    options = parser.parse_args()
    search = options.study == "search"

    def make(algorithms: Sequence[Algorithm], seed: int, **settings: Any) -> Trainer:
        if search:
            settings = {**BEFORE_SEARCH, "part": "validation", "evaluations": 1, **settings}
        return make_trainer(algorithms, seed, progress_bar=False, **settings)

    study = ablate(
        make,
        {**METHODS, **SETTINGS, "Muon": {"optimizer": "muon"}} if search else METHODS,
        metric=METRIC,
        mode="max",
        arms=studies[options.study],
        seeds=options.seeds,
        processes=options.processes,
        clock=options.clock,
        folder=options.output,
    )
    print(study)
    study.plot(options.output / "study.png")


if __name__ == "__main__":
    main()
