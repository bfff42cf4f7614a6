"""A language model: train a small GPT on the source of Python's standard library, and measure which methods help.

    python examples/language_model.py --output runs/language_model

Modules of the standard library are the data: of ten, eight are trained on, one is for validation, on which all
settings in this file were selected (``--study search``), and one is for the test. Tokens are bytes. The folder of the
output then contains:

    results.jsonl               the settings, the versions and the result of each run, one JSON object per line
    study.png                   loss and time of each combination of methods

Running the command again continues a study that was interrupted.
"""

from __future__ import annotations

import argparse
import sys
import sysconfig
import zlib
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention
from torch.optim import AdamW
from torch.utils.data import DataLoader, Dataset

from composer import Algorithm, Trainer
from composer.ablation import ablate
from composer.algorithms import (
    EMA,
    SAM,
    SWA,
    ActivationCheckpointing,
    ChunkedCrossEntropy,
    Factorize,
    GatedAttention,
    GatedLinearUnits,
    GradientClipping,
    LabelSmoothing,
    NEFTune,
    QKNorm,
    SeqLengthWarmup,
    SkipSpikes,
    StochasticDepth,
)
from composer.functional import AttentionLayout, ResidualRule, parameter_groups
from composer.metrics import LanguageCrossEntropy
from composer.models import ComposerModel
from composer.optim import (
    CosineAnnealingWithWarmupScheduler,
    DecoupledAdamW,
    WarmupStableDecayScheduler,
    muon_with_adamw,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

METRIC = "eval/LanguageCrossEntropy"
CONTEXT = 256
BYTES = 2**20
"""Bytes that a run trains on."""
EVAL_SAMPLES = 256
"""Samples of an evaluation, spread evenly over the modules."""

WIDTH = 128
NUM_HEADS = 4
NUM_LAYERS = 5
# Without AVX-512, a CPU computes in bfloat16 a hundred times slower than in float32.
PRECISION = "fp32" if torch.backends.cpu.get_cpu_capability() == "AVX2" else "amp_bf16"


class Attention(nn.Module):
    """Causal self-attention with rotary positions (arXiv:2104.09864)."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        size = WIDTH // NUM_HEADS
        angles = torch.outer(torch.arange(CONTEXT), 10000.0 ** (-torch.arange(0, size, 2) / size))
        self.register_buffer("cosines", angles.cos(), persistent=False)
        self.register_buffer("sines", angles.sin(), persistent=False)

    def rotate(self, heads: Tensor) -> Tensor:
        """Rotate pairs of features by angles that are proportional to the position, shape ``(N, heads, L, size)``."""
        first, second = heads.chunk(2, dim=-1)
        cosines, sines = self.cosines[: heads.shape[-2]], self.sines[: heads.shape[-2]]
        return torch.cat([first * cosines - second * sines, second * cosines + first * sines], dim=-1)

    def forward(self, hidden: Tensor) -> Tensor:
        """Mix each byte with earlier ones, shape ``(N, L, WIDTH)``."""
        heads = (part.unflatten(-1, (NUM_HEADS, -1)).transpose(1, 2) for part in self.qkv(hidden).chunk(3, dim=-1))
        query, key, value = heads
        mixed = scaled_dot_product_attention(self.rotate(query), self.rotate(key), value, is_causal=True)
        return self.out(mixed.transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    """The feed-forward block; GatedLinearUnits replaces ``up`` and ``activation``."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.activation = nn.Linear(WIDTH, 4 * WIDTH, bias=False), nn.GELU()
        self.down = nn.Linear(4 * WIDTH, WIDTH, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        """Process each byte separately."""
        return self.down(self.activation(self.up(hidden)))


class Residual(nn.Module):
    """Adds the output of a layer to its input, which is normalized for the layer."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.norm, self.layer = nn.RMSNorm(WIDTH), layer

    def forward(self, hidden: Tensor) -> Tensor:
        """Add the layer's output."""
        return hidden + self.layer(self.norm(hidden))


RESIDUAL = ResidualRule(
    branch=lambda block, hidden: block.layer(block.norm(hidden)),
    shortcut=lambda _, hidden: hidden,
)
"""The parts of a layer, for StochasticDepth."""
LAYOUT = AttentionLayout(Attention, WIDTH // NUM_HEADS, "qkv", "qkv", "qkv", output=("out",))
"""The parts of an attention, for QKNorm."""


class GPT(ComposerModel):
    """A decoder of bytes.

    Args:
        std: The standard deviation of the initial weights.
    """

    def __init__(self, std: float) -> None:
        super().__init__()
        self.tokens = nn.Embedding(256, WIDTH)
        layers = [Residual(make()) for _ in range(NUM_LAYERS) for make in (Attention, FeedForward)]
        self.layers, self.head = nn.Sequential(*layers, nn.RMSNorm(WIDTH)), nn.Linear(WIDTH, 256, bias=False)
        for name, weight in self.named_parameters():
            if weight.ndim == 2:
                ends_residual = name.endswith(("out.weight", "down.weight"))
                nn.init.normal_(weight, std=std / (2 * NUM_LAYERS) ** 0.5 if ends_residual else std)
        self.metric = LanguageCrossEntropy()

    def forward(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return the logits of the next bytes, shape ``(N, L, 256)``."""
        return {"logits": self.head(self.layers(self.tokens(batch["input_ids"])))}

    def loss(self, outputs: dict[str, Tensor], batch: dict[str, Tensor]) -> Tensor:
        """Return the mean cross entropy; LabelSmoothing replaces ids by probabilities."""
        return cross_entropy(outputs["logits"].flatten(0, 1).float(), batch["labels"].flatten(0, 1))

    def get_metrics(self, is_train: bool = False) -> dict[str, LanguageCrossEntropy]:
        """Return the metric of evaluations."""
        return {} if is_train else {"LanguageCrossEntropy": self.metric}

    def update_metric(self, batch: dict[str, Tensor], outputs: Any, metric: LanguageCrossEntropy) -> None:
        """Update it with a batch."""
        metric.update(outputs, batch["labels"])


class Samples(Dataset[dict[str, Tensor]]):
    """Pieces of source code, of ``CONTEXT`` bytes each; the label of a byte is the next one."""

    def __init__(self, text: bytes, limit: int | None = None) -> None:
        data = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
        count = (len(data) - 1) // CONTEXT
        step = max(1, count // limit) if limit else 1
        self.ids = data[: count * CONTEXT].view(count, CONTEXT)[::step][:limit]
        self.labels = data[1 : count * CONTEXT + 1].view(count, CONTEXT)[::step][:limit]

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": self.ids[index], "labels": self.labels[index]}


def read_sources(part: Literal["train", "validation", "test"]) -> bytes:
    """Return the sources of a part of the standard library's modules; a module belongs to one part."""
    root, parts = Path(sysconfig.get_path("stdlib")), {0: "validation", 1: "test"}
    texts = []
    for name in sorted(sys.stdlib_module_names - {"idlelib", "lib2to3", "pydoc_data", "test", "this", "turtledemo"}):
        if parts.get(zlib.crc32(name.encode()) % 10, "train") == part:
            paths = [root / f"{name}.py", *sorted((root / name).rglob("*.py"))]
            texts += [path.read_bytes() for path in paths if path.exists() and not {"test", "tests"} & {*path.parts}]
    return b"".join(texts)


METHODS: dict[str, Callable[[], Algorithm] | Mapping[str, Any]] = {
    "Muon": {"optimizer": "muon", "lr": 6e-3},
    "SeqLengthWarmup": lambda: SeqLengthWarmup(duration=0.6, min_seq_length=32, max_seq_length=CONTEXT, step_size=32),
    "GatedLinearUnits": lambda: GatedLinearUnits(
        feed_forward_module=FeedForward, first_layer_attribute="up", activation_attribute="activation"
    ),
    "CautiousUpdates": {"optimizer": "cautious"},
    "GradientClipping": lambda: GradientClipping("norm", 1.0),
    "EMA": lambda: EMA(half_life="20ba"),
    "SWA": lambda: SWA(swa_start="0.9dur", update_interval="5ba"),
    "SkipSpikes": SkipSpikes,
    "NEFTune": lambda: NEFTune(alpha=1.0),
    "LabelSmoothing": lambda: LabelSmoothing(0.02, target_key="labels"),
    "StochasticDepth": lambda: StochasticDepth({Residual: RESIDUAL}, drop_rate=0.05),
    "SAM": lambda: SAM(rho=0.05, interval=4),
    "Factorize": lambda: Factorize(min_features=128, latent_features=0.5),
    "ActivationCheckpointing": lambda: ActivationCheckpointing(modules=[Residual]),
    "ChunkedCrossEntropy": lambda: ChunkedCrossEntropy(head="head"),
    "FewerBytes": {"length": 0.8},
}
RECIPE = ["Muon", "SeqLengthWarmup", "FewerBytes"]
"""The last is no method: the training ends after 0.8 of the bytes, with about the baseline's loss."""

BEFORE_SEARCH: Mapping[str, Any] = {"weight_decay": 0.1, "warmup": "0.1dur", "schedule": "cosine", "decay": "0.2dur"}
"""Settings of the baseline that the search has changed."""
SETTINGS: Mapping[str, Mapping[str, Any]] = {
    **{
        f"{name}={value}": {name: value}
        for name, values in {
            "lr": [1e-3, 2e-3, 4e-3, 6e-3, 1.2e-2],
            "weight_decay": [0.0, 0.3],
            "batch_size": [2, 8],
            "std": [0.04, 0.12],
            "beta2": [0.9, 0.99],
            "warmup": ["0.02dur", "0.2dur", "0.3dur", "0.4dur"],
            "precision": ["fp32"],
            "decay": ["0.4dur", "0.7dur"],
            "adamw_lr": [3e-3, 1.2e-2],
        }.items()
        for value in values
    },
    "WarmupStableDecay": {"schedule": "stable"},
    "SixTenths": {"length": 0.6},
    "SevenTenths": {"length": 0.7},
    "EightTenths": {"length": 0.8},
    "Muon": {"optimizer": "muon"},
}
LENGTHS: Mapping[str, Callable[[], Algorithm]] = {
    f"SeqLengthWarmup {name}": partial(SeqLengthWarmup, duration, least, CONTEXT, least)
    for name, duration, least in [("mild", 0.4, 64), ("long", 0.8, 32)]
}
DECAYED = ["weight_decay=0.3", "warmup=0.3dur"]
STABLE = ["Muon", "lr=0.006", "WarmupStableDecay"]
TRIALS = [
    *([name] for name in SETTINGS if "=" in name and not name.startswith(("decay", "adamw_lr"))),
    *([*DECAYED, *more] for more in ([], ["lr=0.004"], ["lr=0.002"], ["WarmupStableDecay"])),
    *(
        [*DECAYED, "WarmupStableDecay", *more]
        for more in (["decay=0.4dur"], ["decay=0.7dur"], ["decay=0.4dur", "lr=0.004"])
    ),
    *(["Muon", f"lr={lr}"] for lr in (0.001, 0.002, 0.006, 0.012)),
    *(["Muon", name] for name in ("weight_decay=0.0", "weight_decay=0.3", "batch_size=2", "batch_size=8")),
    *(["Muon", name] for name in ("SeqLengthWarmup", "GatedLinearUnits", "WarmupStableDecay")),
    *(["Muon", name] for name in ("StochasticDepth", "SkipSpikes")),
    ["Muon"],
    ["Muon", "SeqLengthWarmup", "GatedLinearUnits", "SixTenths"],
    *([*STABLE, *more] for more in ([], ["warmup=0.3dur"])),
    *([*STABLE, "SixTenths", *more] for more in ([], ["GatedLinearUnits"])),
    *(
        [*STABLE, "decay=0.4dur", *more]
        for more in (
            [],
            ["SixTenths"],
            ["SixTenths", "warmup=0.02dur"],
            ["SeqLengthWarmup"],
            ["SeqLengthWarmup mild"],
            *(
                ["SeqLengthWarmup", "EightTenths", *one]
                for one in ([], ["warmup=0.02dur"], ["adamw_lr=0.003"], ["adamw_lr=0.012"])
            ),
            ["SeqLengthWarmup mild", "EightTenths"],
            ["SeqLengthWarmup mild", "SevenTenths"],
            ["SeqLengthWarmup long", "EightTenths"],
        )
    ),
]
"""What the search compares; the first are trials of the baseline."""
SHORTER: Mapping[str, Callable[[], Algorithm] | Mapping[str, Any]] = {
    **{f"length={value}": {"length": value} for value in (0.6, 0.7)},
    **{f"Muon, lr={lr}": {"optimizer": "muon", "lr": lr} for lr in (0.009, 0.012)},
    "ns_steps=3": {"ns_steps": 3},
    "row_beta=0.95": {"row_beta": 0.95},
    "warmup=0.05dur": {"warmup": "0.05dur"},
    "QKNorm": lambda: QKNorm(layout=LAYOUT),
    "GatedAttention": lambda: GatedAttention(layout=LAYOUT),
}
SHORT = ["Muon", "SeqLengthWarmup"]
NEWER = ["SeqLengthWarmup", "row_beta=0.95", "QKNorm", "warmup=0.05dur"]
REFINED = [
    *([*SHORT, length] for length in ("length=0.6", "length=0.7")),
    *([*SHORT, "length=0.6", one] for one in ("ns_steps=3", "row_beta=0.95", "QKNorm")),
    *([muon, *NEWER, "length=0.6"] for muon in ("Muon", "Muon, lr=0.009", "Muon, lr=0.012")),
]
"""What the second search compares, from the settings that the first has selected."""
FASTEST = ["Muon, lr=0.009", "SeqLengthWarmup", "row_beta=0.95", "warmup=0.05dur", "length=0.6"]
LAST = [[*FASTEST, *more] for more in ([], ["GatedAttention"])]
"""What the last search compares: the best of the second one without norms, and with gates instead."""


def make_trainer(
    algorithms: Sequence[Algorithm],
    seed: int,
    *,
    optimizer: Literal["adamw", "cautious", "muon"] = "adamw",
    lr: float = 3e-3,
    weight_decay: float = 0.3,
    batch_size: int = 4,
    std: float = 0.08,
    beta2: float = 0.95,
    warmup: str = "0.3dur",
    schedule: Literal["cosine", "stable"] = "stable",
    decay: str = "0.4dur",
    adamw_lr: float | None = None,
    ns_steps: int = 5,
    row_beta: float | None = None,
    precision: str = PRECISION,
    length: float = 1.0,
    data_bytes: int = BYTES,
    evaluations: int = 10,
    modules: Literal["validation", "test"] = "test",
    **options: Any,
) -> Trainer:
    """Return a trainer with a new model, whose initial weights depend only on torch's seed, and its data."""
    torch.set_num_threads(1)  # more threads gain little for a model of this size
    train_data, eval_data = Samples(read_sources("train")), Samples(read_sources(modules), limit=EVAL_SAMPLES)
    model, count, betas = GPT(std), int(data_bytes * length) // CONTEXT, (0.9, beta2)
    loader = DataLoader(train_data, batch_size=batch_size, shuffle=True, drop_last=True)
    if optimizer == "muon":
        chosen: torch.optim.Optimizer = muon_with_adamw(
            model,
            lr=lr,
            adamw_lr=adamw_lr,
            weight_decay=weight_decay,
            betas=betas,
            ns_steps=ns_steps,
            row_beta=row_beta,
        )
    elif optimizer == "cautious":
        groups = parameter_groups(model, weight_decay=weight_decay * lr)
        chosen = DecoupledAdamW(groups, lr=lr, betas=betas, cautious_update=True, cautious_weight_decay=True)
    else:
        chosen = AdamW(parameter_groups(model, weight_decay=weight_decay), lr=lr, betas=betas)
    return Trainer(
        model=model,
        train_dataloader=loader,
        eval_dataloader=DataLoader(eval_data, batch_size=32),
        eval_interval=f"{1 / evaluations}dur",
        optimizers=chosen,
        schedulers=WarmupStableDecayScheduler(warmup, decay)
        if schedule == "stable"
        else CosineAnnealingWithWarmupScheduler(warmup),
        algorithms=algorithms,
        max_duration=f"{count}sp",
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
        "refine": [*REFINED],
        "last": [*LAST],
    }
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--study", choices=studies, default="recipe", help="default: %(default)s")
    parser.add_argument("--seeds", type=int, default=5, metavar="N", help="number of seeds (default: %(default)s)")
    parser.add_argument("--first-seed", type=int, default=0, metavar="N", help="(default: %(default)s)")
    parser.add_argument("--processes", type=int, default=1, metavar="N", help="runs at a time (default: %(default)s)")
    parser.add_argument("--clock", choices=["wall", "processor"], default="wall", help="default: %(default)s")
    parser.add_argument(
        "--output", type=Path, default=Path("runs/language_model"), help="folder (default: %(default)s)"
    )
    options = parser.parse_args()
    shorter = {**METHODS, **SHORTER}
    known = {"search": {**METHODS, **SETTINGS, **LENGTHS}, "refine": shorter, "last": shorter}

    def make(algorithms: Sequence[Algorithm], seed: int, **settings: Any) -> Trainer:
        if options.study in known:
            settings = {"modules": "validation", "evaluations": 1, **settings}
        if options.study == "search":
            settings = {**BEFORE_SEARCH, **settings}
        return make_trainer(algorithms, seed, progress_bar=False, **settings)

    study = ablate(
        make,
        known.get(options.study, METHODS),
        metric=METRIC,
        mode="min",
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
