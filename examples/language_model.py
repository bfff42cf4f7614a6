"""A language model: train a small GPT on the source of Python's standard library, and measure which methods help.

    python examples/language_model.py --output runs/language_model

Modules of the standard library are the data: of ten, eight are trained on, one is for validation, on which all settings
in this file were selected (``--modules validation``), and one is for the test. Tokens are bytes. The folder of the
output then contains:

    results.jsonl               the settings, the versions and the result of each run, one JSON object per line
    study.png                   test loss and time of each combination of methods

Running the command again continues a study that was interrupted.
"""

from __future__ import annotations

import argparse
import sys
import sysconfig
import zlib
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.data import DataLoader, Dataset

from composer import Algorithm, Trainer
from composer import functional as cf
from composer.ablation import ablate
from composer.algorithms import EMA, Alibi, GatedLinearUnits, GradientClipping, LabelSmoothing, SeqLengthWarmup
from composer.metrics import LanguageCrossEntropy
from composer.models import ComposerModel
from composer.optim import CosineAnnealingWithWarmupScheduler

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

METRIC = "eval/LanguageCrossEntropy"
CONTEXT = 256
BATCH_SIZE = 2
STEPS = 1000
LEARNING_RATE = 2e-3
WEIGHT_DECAY = 0.1
INITIAL_STD = 0.06
EVAL_SAMPLES = 256
"""Samples of an evaluation, spread evenly over the modules."""

WIDTH = 128
NUM_HEADS = 4
NUM_LAYERS = 5


class Attention(nn.Module):
    """Causal self-attention."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Attend to earlier tokens; Alibi replaces this method."""
        return scaled_dot_product_attention(query, key, value, is_causal=True)

    def forward(self, hidden: Tensor) -> Tensor:
        """Mix each byte with earlier ones, shape ``(N, L, WIDTH)``."""
        heads = (part.unflatten(-1, (NUM_HEADS, -1)).transpose(1, 2) for part in self.qkv(hidden).chunk(3, dim=-1))
        return self.out(self.attend(*heads).transpose(1, 2).flatten(2))


def attend_with_bias(self: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Attend to earlier tokens, with the bias of Alibi, which also masks."""
    bias = self.alibi(query.shape[-2], key.shape[-2], dtype=query.dtype, device=query.device)
    return scaled_dot_product_attention(query, key, value, attn_mask=bias)


class FeedForward(nn.Module):
    """The feed-forward block; GatedLinearUnits replaces ``up`` and ``activation``."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.activation, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, hidden: Tensor) -> Tensor:
        """Process each byte separately."""
        return self.down(self.activation(self.up(hidden)))


class Residual(nn.Module):
    """Adds the output of a layer to its input, which is normalized for the layer."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.norm, self.layer = nn.LayerNorm(WIDTH), layer

    def forward(self, hidden: Tensor) -> Tensor:
        """Add the layer's output."""
        return hidden + self.layer(self.norm(hidden))


class GPT(ComposerModel):
    """A decoder of bytes with learned position embeddings."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(256, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        layers = [Residual(make()) for _ in range(NUM_LAYERS) for make in (Attention, FeedForward)]
        self.layers = nn.Sequential(*layers, nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 256, bias=False))
        for name, weight in self.named_parameters():
            if weight.ndim == 2:
                ends_residual = name.endswith(("out.weight", "down.weight"))
                nn.init.normal_(weight, std=INITIAL_STD / (2 * NUM_LAYERS) ** 0.5 if ends_residual else INITIAL_STD)
        self.metric = LanguageCrossEntropy()

    def forward(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return the logits of the next bytes, shape ``(N, L, 256)``."""
        ids = batch["input_ids"]
        positions = self.positions(torch.arange(ids.shape[1], device=ids.device))
        return {"logits": self.layers(self.tokens(ids) + positions)}

    def loss(self, outputs: dict[str, Tensor], batch: dict[str, Tensor]) -> Tensor:
        """Return the mean cross entropy."""
        logits, labels = outputs["logits"], batch["labels"]  # ids, or probabilities of LabelSmoothing
        return cf.soft_cross_entropy(logits.flatten(0, 1), labels.flatten(0, 1))

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


METHODS: dict[str, Callable[[], Algorithm]] = {
    "Alibi": lambda: Alibi(
        max_sequence_length=CONTEXT,
        train_sequence_length_scaling=1,
        heads_per_layer=NUM_HEADS,
        position_embedding_attribute="positions",
        attention_module=Attention,
        attr_to_replace="attend",
        alibi_attention=attend_with_bias,
        causal=True,
    ),
    "SeqLengthWarmup": lambda: SeqLengthWarmup(duration=0.6, min_seq_length=32, max_seq_length=CONTEXT, step_size=32),
    "GatedLinearUnits": lambda: GatedLinearUnits(
        feed_forward_module=FeedForward, first_layer_attribute="up", activation_attribute="activation"
    ),
    "GradientClipping": lambda: GradientClipping("norm", 1.0),
    "EMA": lambda: EMA(half_life="30ba"),
    "LabelSmoothing": lambda: LabelSmoothing(0.05, target_key="labels"),
}
RECIPE = ["Alibi", "SeqLengthWarmup", "GatedLinearUnits", "GradientClipping"]


def make_trainer(
    algorithms: Sequence[Algorithm],
    seed: int,
    *,
    steps: int = STEPS,
    evaluations: int = 5,
    modules: Literal["validation", "test"] = "test",
    **options: Any,
) -> Trainer:
    """Return a trainer with a new model, whose initial weights depend only on torch's seed, and its data."""
    torch.set_num_threads(1)  # more threads gain little for a model of this size
    train_data, eval_data = Samples(read_sources("train")), Samples(read_sources(modules), limit=EVAL_SAMPLES)
    model = GPT()
    return Trainer(
        model=model,
        train_dataloader=DataLoader(train_data, batch_size=BATCH_SIZE, shuffle=True, drop_last=True),
        eval_dataloader=DataLoader(eval_data, batch_size=32),
        eval_interval=f"{max(1, steps // evaluations)}ba",
        optimizers=torch.optim.AdamW(
            model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.95), weight_decay=WEIGHT_DECAY
        ),
        schedulers=CosineAnnealingWithWarmupScheduler(t_warmup="0.1dur"),
        algorithms=algorithms,
        max_duration=f"{steps}ba",
        device="cpu",
        seed=seed,
        **options,
    )


def main() -> None:
    """Run the study and show its results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--modules", choices=["validation", "test"], default="test", help="default: %(default)s")
    parser.add_argument("--steps", type=int, default=STEPS, metavar="N", help="steps of a run (default: %(default)s)")
    parser.add_argument(
        "--evaluations", type=int, default=5, metavar="N", help="evaluations of a run (default: %(default)s)"
    )
    parser.add_argument("--seeds", type=int, default=5, metavar="N", help="number of seeds (default: %(default)s)")
    parser.add_argument("--processes", type=int, default=1, metavar="N", help="runs at a time (default: %(default)s)")
    parser.add_argument("--each", action="store_true", help="measure each method alone, not the recipe")
    parser.add_argument(
        "--output", type=Path, default=Path("runs/language_model"), help="folder (default: %(default)s)"
    )
    options = parser.parse_args()

    def make(algorithms: Sequence[Algorithm], seed: int) -> Trainer:
        return make_trainer(
            algorithms,
            seed,
            steps=options.steps,
            evaluations=options.evaluations,
            modules=options.modules,
            progress_bar=False,
        )

    study = ablate(
        make,
        METHODS,
        metric=METRIC,
        mode="min",
        arms=["baseline", "each"] if options.each else ["baseline", RECIPE],
        seeds=options.seeds,
        processes=options.processes,
        folder=options.output,
    )
    print(study)
    study.plot(options.output / "study.png")


if __name__ == "__main__":
    main()
