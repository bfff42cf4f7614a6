"""What ``gpu.py`` trains: ResNet-50 and GPT-2 by a plain loop, and in turns with it by the Trainer with each method."""

from __future__ import annotations

import dataclasses
import functools
import gc
import itertools
import statistics
import sys
import time
import traceback
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._pytree import tree_map_only
from torch.utils.data import DataLoader
from torch.utils.flop_counter import FlopCounterMode
from trainers import Batches, Turns

import composer.algorithms as al
from composer import Callback, Trainer
from composer import functional as cf
from composer.callbacks._flops import peak_flops
from composer.core import Algorithm, Precision, pack_sequences
from composer.core.step import is_out_of_memory
from composer.models import ComposerClassifier, HuggingFaceModel

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Iterable, Iterator

    from torch import Tensor, nn

    Options = argparse.Namespace
    Row = dict[str, Any]
    Method = Callable[[], Algorithm]

__all__ = ["SIZES", "attempt", "fastest", "gpt", "make_clock", "make_resnet", "measure_peak", "packing", "resnet50"]

RATIO = "relative to the plain loop"
REHEARSED: Any = "eager"
"""The backend of torch.compile with tiny sizes: a rehearsal does not wait for the compiler."""


@dataclass(frozen=True)
class Size:
    """The sizes of all parts."""

    images: tuple[int, int]  # of a batch, and their side
    rows: tuple[int, int]  # of a batch, and their tokens
    resnet: dict[str, Any]
    gpt: dict[str, int]
    loss: dict[str, int]
    chunks: list[int]  # their rows, beside those of the default
    steps: int  # of the overhead
    block: float  # seconds of a block of steps
    kernels: str  # the starts of the names of the cases


SIZES = {
    "full": Size(
        images=(128, 224),
        rows=(16, 1024),
        resnet={"layers": [3, 4, 6, 3]},
        gpt={},
        loss={"tokens": 8192, "classes": 128_000, "width": 4096},
        chunks=[2048, 4096],
        steps=1000,
        block=0.25,
        kernels="",
    ),
    "tiny": Size(
        images=(4, 32),
        rows=(4, 16),
        resnet={"layers": [1, 1, 1, 1], "width_per_group": 8},
        gpt={"n_layer": 2, "n_embd": 32, "n_head": 2, "vocab_size": 64, "bos_token_id": 0, "eos_token_id": 0},
        loss={"tokens": 16, "classes": 64, "width": 8},
        chunks=[4],
        steps=150,
        block=0.0,
        kernels="cutout_batch, 128 of 32",
    ),
}

FOR_IMAGES: dict[str, Method] = {
    "ActivationCheckpointing": lambda: al.ActivationCheckpointing("Bottleneck"),
    "AugMix": lambda: al.AugMix(batch=True),
    "BlurPool": al.BlurPool,
    "ChannelsLast": al.ChannelsLast,
    "ColOut": al.ColOut,
    "CutMix": al.CutMix,
    "CutOut": al.CutOut,
    "Distillation, ResNet-18 as teacher": lambda: al.Distillation(make_teacher()),
    "EMA": lambda: al.EMA("100ba"),
    "Factorize": al.Factorize,
    "GhostBatchNorm": lambda: al.GhostBatchNorm(2),
    "GradientClipping, adaptive": lambda: al.GradientClipping("adaptive", 0.01),
    "GradientClipping, norm": lambda: al.GradientClipping("norm", 1.0),
    "LabelSmoothing": lambda: al.LabelSmoothing(0.1),
    "MixUp": al.MixUp,
    "ProgressiveResizing, half of the side": lambda: al.ProgressiveResizing("resize", 0.5, 0.0, 1.0),
    "RandAugment": lambda: al.RandAugment(batch=True),
    "SAM": al.SAM,
    "SWA": lambda: al.SWA("1ba", "1dur", "1ba"),
    "SelectiveBackprop": lambda: al.SelectiveBackprop(0.0, 1.0),
    "SkipSpikes": al.SkipSpikes,
    "SqueezeExcite": al.SqueezeExcite,
    "StochasticDepth": lambda: al.StochasticDepth("ResNetBottleneck"),
    "WeightStandardization": al.WeightStandardization,
}
FOR_TEXT: dict[str, Method] = {
    "ActivationCheckpointing": al.ActivationCheckpointing,
    "ActivationCheckpointing, products stored": lambda: al.ActivationCheckpointing(policy="matmuls"),
    "Alibi": lambda: al.Alibi(1024),
    "ChunkedCrossEntropy": al.ChunkedCrossEntropy,
    "EMA": lambda: al.EMA("100ba"),
    "GatedLinearUnits": al.GatedLinearUnits,
    "GradientClipping, norm": lambda: al.GradientClipping("norm", 1.0),
    "GyroDropout": lambda: al.GyroDropout(sigma=4, tau=2),
    "LabelSmoothing": lambda: al.LabelSmoothing(0.1, target_key="labels"),
    "LowPrecisionLayerNorm": al.LowPrecisionLayerNorm,
    "NEFTune": al.NEFTune,
    "SAM": al.SAM,
    "SeqLengthWarmup": lambda: al.SeqLengthWarmup(1.0, 8, 1024),
    "SkipSpikes": al.SkipSpikes,
}
OF_LOSS: dict[str, Method] = {"ChunkedCrossEntropy": al.ChunkedCrossEntropy}


def attempt(name: str, call: Callable[[], Iterable[Row]], options: Options) -> Iterator[Row]:
    """Yield rows with a name, or why there are none: no time is left, a library is not installed, or an error."""
    if name in options.done:
        return
    if time.time() > options.deadline:
        yield {"name": name, "skipped": "not measured: no time was left"}
        return
    try:
        for row in call():
            yield {"name": name, **row}
    except Exception as error:  # noqa: BLE001  (the other parts and variants are measured)
        traceback.print_exc()
        if isinstance(error, ImportError) and not (error.name or "composer").startswith("composer"):
            yield {"name": name, "skipped": f"not measured: {error}"}
        else:
            yield {"name": name, "error": " ".join(f"{type(error).__name__}: {error}".split())[:200]}
    else:
        return
    try:
        free(options)  # without the frames of the error, which have references to tensors
    except RuntimeError as error:
        sys.exit(f"The GPU cannot be used any more: {error}")


def free(options: Options) -> None:
    """Free the memory of what is not used any more, also in cycles."""
    gc.collect()
    if options.device == "cuda":
        torch.cuda.synchronize()  # raises the error again after which CUDA needs a new process
        torch.cuda.empty_cache()


def measure_peak(call: Callable[[], object], options: Options) -> float:
    """Return the MiB that a call has allocated on a GPU, at most, above what was allocated before."""
    before = allocated(options)
    if options.device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    call()
    return (torch.cuda.max_memory_allocated() - before) / 2**20 if options.device == "cuda" else 0.0


def make_clock(options: Options) -> Callable[[], float]:
    """Return a function that waits for a GPU and returns the time in seconds."""
    synchronize = torch.cuda.synchronize if options.device == "cuda" else lambda: None

    def clock() -> float:
        synchronize()
        return time.perf_counter()

    return clock


@dataclass(frozen=True)
class Task:
    """What is trained, on batches in the memory of the host."""

    unit: str
    amount: float  # of units in a batch, on average
    batches: list[Any]
    network: Callable[[], nn.Module]
    loss: Callable[[nn.Module, Any], Tensor]
    wrap: Callable[[nn.Module], nn.Module]
    optimizer: Callable[..., torch.optim.Optimizer]
    compile_config: dict[str, Any] | None = None


def make_resnet(size: str) -> nn.Module:
    """Return torchvision's ResNet-50, or one with narrow blocks, one in each stage."""
    from torchvision.models.resnet import Bottleneck, ResNet

    return ResNet(Bottleneck, **SIZES[size].resnet)  # type: ignore[no-any-return]


def make_teacher() -> nn.Module:
    """Return torchvision's ResNet-18."""
    from torchvision.models import resnet18

    return resnet18()  # type: ignore[no-any-return]


def images(options: Options) -> Task:
    """Return the classification of random images."""
    count, side = SIZES[options.size].images
    return Task(
        unit="images",
        amount=count,
        batches=[(torch.rand(count, 3, side, side), torch.randint(1000, (count,))) for _ in range(2)],
        network=functools.partial(make_resnet, options.size),
        loss=lambda network, batch: functional.cross_entropy(network(batch[0]), batch[1]),
        wrap=functools.partial(ComposerClassifier, num_classes=1000, train_metrics=[]),
        # Not fused, for which StochasticDepth would have to compute each block in the first step.
        optimizer=functools.partial(torch.optim.SGD, lr=0.01, momentum=0.9),
    )


def texts(options: Options, batches: list[Any] | None = None, amount: float = 0.0) -> Task:
    """Return the prediction of the next token of random rows by GPT-2, which has 124 million parameters."""
    from transformers import GPT2Config, GPT2LMHeadModel

    count, length = SIZES[options.size].rows
    config = GPT2Config(n_positions=length, use_cache=False, **SIZES[options.size].gpt)
    if batches is None:
        batches = [dict.fromkeys(("input_ids", "labels"), torch.randint(config.vocab_size, (count, length)))]
    return Task(
        unit="tokens",
        amount=amount or count * length,
        batches=batches,
        network=lambda: GPT2LMHeadModel(config),
        loss=lambda network, batch: network(**batch).loss,
        wrap=functools.partial(HuggingFaceModel, metrics=[]),
        optimizer=functools.partial(torch.optim.AdamW, lr=1e-4, fused=options.device == "cuda"),
    )


def resnet50(options: Options) -> Iterator[Row]:
    """Train ResNet-50 on random images, with the Trainer without a method and with each method for images."""
    return train(options, images(options), FOR_IMAGES)


def gpt(options: Options) -> Iterator[Row]:
    """Train GPT-2 on random tokens, with the Trainer without a method and with each method for texts."""
    return train(options, texts(options), FOR_TEXT)


def fastest(options: Options) -> Iterator[Row]:
    """Train GPT-2 as fast as possible: compiled, flash attention, no dropout, full rows that fill the device."""
    from transformers import AttentionInterface, GPT2Config, GPT2LMHeadModel
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    count, length = SIZES[options.size].rows
    # Flash attention must get no mask, of which a traced model of Transformers makes one for any rows. Rows of several
    # documents that are kept apart would need it: these are full rows, of one document or of documents that are joined.
    AttentionInterface.register("sdpa_without_mask", sdpa_attention_forward)
    # No dropout, and a number of classes that is a multiple of 64, are faster.
    settings = {"vocab_size": 50304, **dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), 0.0)}
    settings["attn_implementation"] = "sdpa_without_mask"
    config = GPT2Config(n_positions=length, use_cache=False, **settings | SIZES[options.size].gpt)

    def network() -> nn.Module:
        model = GPT2LMHeadModel(config)
        model.loss_type = "ForCausalLM"  # otherwise it prints a warning, which would break the graph
        return model  # type: ignore[no-any-return]

    def task(rows: int) -> Task:
        batches = [dict.fromkeys(("input_ids", "labels"), torch.randint(config.vocab_size, (rows, length)))]
        backend = {"backend": REHEARSED} if options.size == "tiny" else {}
        usual = texts(options, batches, rows * length)
        return dataclasses.replace(usual, network=network, compile_config=backend)

    if options.device == "cuda" and options.size != "tiny":
        # A row takes 1.3 GiB without compilation, and the states of both trainings 4.
        count = max(8, int((torch.cuda.get_device_properties(0).total_memory / 2**30 - 4) / 1.25) // 8 * 8)
    while not fits(task(count), options):
        if count <= 8:
            raise torch.OutOfMemoryError(f"{count} rows do not fit into the memory of the GPU.")
        count = count * 3 // 4 // 8 * 8
    for row in train(options, task(count), OF_LOSS):
        yield {**row, "rows": count}


def fits(task: Task, options: Options) -> bool:
    """Return whether the loop has enough memory while what another training keeps between its steps is there, too."""
    before = allocated(options)
    held: list[Any] = []
    try:
        held.append(PlainLoop(task, options))
        held[0].train(1)
        # Weights, gradients and the state of the optimizer: the loop and the Trainer train in turns.
        held.append(torch.empty(allocated(options) - before, dtype=torch.uint8, device=options.device))
        held[0].train(1)
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        return False
    finally:
        held.clear()
        torch.compiler.reset()
        free(options)
    return True


def packing(options: Options) -> Iterator[Row]:
    """Train GPT-2 on documents, most of them short, in padded and in packed rows; padding is not counted as tokens."""
    count, length = SIZES[options.size].rows
    sizes = (length * torch.rand(16 * count) ** 2).long().clamp_(min=2).tolist()
    documents = [torch.randint(2, 64, (size,)) for size in sizes]

    def pad(rows: list[Tensor]) -> Row:
        ids = torch.stack([functional.pad(row, (0, length - len(row)), value=-100) for row in rows])
        return {"input_ids": ids.clamp(min=0), "labels": ids, "attention_mask": ids.ge(0).long()}

    def task(dataset: Any, collate: Callable[[Any], Row]) -> Task:
        batches = [*DataLoader(dataset, count, collate_fn=collate, drop_last=True)]
        tokens = sum(int(batch["labels"].ne(-100).sum()) for batch in batches)
        return texts(options, batches, tokens / len(batches))

    packed = {
        f"Trainer, packed by {method}": task(pack_sequences(documents, length, method), cf.collate_packed)
        for method in ("in_order", "best_fit")
    }
    return train(options, task(documents, pad), {}, packed)


def train(
    options: Options, task: Task, methods: dict[str, Method], others: dict[str, Task] | None = None
) -> Iterator[Row]:
    """Yield the throughput and the memory of a plain loop, and of the Trainer with each method and with other data."""
    before, clock = allocated(options), make_clock(options)
    loop = PlainLoop(task, options)
    loop.train(3)
    seconds = loop.time(3, clock)
    block = max(2, min(50, round(SIZES[options.size].block / seconds)))
    if options.device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    seconds = statistics.median(loop.time(block, clock) for _ in range(options.rounds))
    peak = torch.cuda.max_memory_allocated() - before if options.device == "cuda" else None
    yield {"name": "plain loop", **figures(loop, task, seconds, 1.0, peak)}
    variants: dict[str, tuple[Task, Method | None]] = {"Trainer": (task, None)}
    variants |= {name: (task, method) for name, method in methods.items()}
    variants |= {name: (other, None) for name, other in (others or {}).items()}
    for name, (trained, method) in variants.items():
        yield from attempt(name, functools.partial(with_trainer, loop, trained, method, options, block), options)


def with_trainer(loop: PlainLoop, task: Task, method: Method | None, options: Options, block: int) -> Iterator[Row]:
    """Yield the figures of the Trainer in turns with the loop."""
    free(options)
    before = allocated(options)
    steps = Steps(Turns(loop.train, block, 1, make_clock(options)), options.device)
    batches = itertools.islice(itertools.cycle(on_host(task, options)), (options.rounds + 1) * block + 1)
    model = task.wrap(task.network().to(options.device))
    with Trainer(
        model=model,
        train_dataloader=Batches(batches),
        optimizers=task.optimizer(model.parameters()),
        algorithms=method() if method else None,
        callbacks=steps,
        max_duration="1ep",
        precision=options.precision,
        device="gpu" if options.device == "cuda" else "cpu",
        compile_config=task.compile_config,
        progress_bar=False,
        seed=0,
    ) as trainer:
        trainer.fit()
    pairs = steps.turns.pairs[1:]
    ratio = statistics.median(plain / own for own, plain in pairs) * task.amount / loop.task.amount
    peak = max(steps.peaks[block:]) - before if options.device == "cuda" else None
    yield figures(loop, task, statistics.median(own for own, _ in pairs) / 1e6, ratio, peak, is_plain=method is None)


def figures(
    loop: PlainLoop, task: Task, seconds: float, ratio: float, peak: int | None, *, is_plain: bool = True
) -> Row:
    """Return the row of a variant; only steps of the plain model have an MFU, as methods change the FLOPs."""
    # In fp32 torch computes convolutions in TF32 and matrix products not, so that there is no single peak.
    is_plain = is_plain and task is loop.task and loop.device == "cuda" and loop.options.precision != "fp32"
    limit = peak_flops(torch.cuda.get_device_name(), Precision(loop.options.precision)) if is_plain else None
    return {
        f"{task.unit}/s": task.amount / seconds,
        RATIO: ratio,
        "MFU": loop.flops / seconds / limit if limit else None,
        "peak, MiB": None if peak is None else peak / 2**20,
    }


class PlainLoop:
    """A plain PyTorch loop, the reference."""

    def __init__(self, task: Task, options: Options) -> None:
        self.task, self.options, self.device = task, options, options.device
        self.network = task.network().to(options.device).train()
        self.flops = count_flops(task, self.network, options.device)
        if task.compile_config is not None:
            self.network.compile(**task.compile_config)
        self.optimizer = task.optimizer(self.network.parameters())
        dtype = torch.float16 if options.precision == "amp_fp16" else torch.bfloat16
        self.autocast = torch.autocast(options.device, dtype, enabled=options.precision != "fp32")
        self.scaler = torch.amp.GradScaler(options.device, enabled=options.precision == "amp_fp16")
        self.batches = itertools.cycle(on_host(task, options))

    def train(self, count: int) -> None:
        """Run a number of steps."""
        for batch in itertools.islice(self.batches, count):
            self.optimizer.zero_grad()
            with self.autocast:
                loss = self.task.loss(self.network, on_device(batch, self.device))
            self.scaler.scale(loss).backward()
            self.scaler.step(self.optimizer)
            self.scaler.update()

    def time(self, count: int, clock: Callable[[], float]) -> float:
        """Run a number of steps, and return the seconds of one."""
        began = clock()
        self.train(count)
        return (clock() - began) / count


class Steps(Callback):
    """Runs a block of the plain loop between blocks of the trainer's steps, and reads the peaks of the latter."""

    def __init__(self, turns: Turns, device: str) -> None:
        self.turns, self.device, self.peaks = turns, device, [0]

    def batch_start(self, state: Any, logger: Any) -> None:
        """Count a step."""
        if self.device == "cuda":
            self.peaks.append(torch.cuda.max_memory_allocated())
        self.turns()
        if self.device == "cuda":
            torch.cuda.reset_peak_memory_stats()


def on_host(task: Task, options: Options) -> list[Any]:
    """Return the batches, in pinned memory for a GPU."""
    pin = torch.Tensor.pin_memory if options.device == "cuda" else torch.clone
    return [tree_map_only(torch.Tensor, pin, batch) for batch in task.batches]


def on_device(batch: Any, device: str) -> Any:
    """Return a batch on the device."""
    return tree_map_only(torch.Tensor, lambda tensor: tensor.to(device, non_blocking=True), batch)


def allocated(options: Options) -> int:
    """Return the bytes that are allocated on a GPU."""
    return torch.cuda.memory_allocated() if options.device == "cuda" else 0


def count_flops(task: Task, network: nn.Module, device: str) -> float:
    """Return the FLOPs of a step, with attention written out: fused kernels compute the scores twice."""
    two = tree_map_only(torch.Tensor, lambda tensor: tensor[:2], on_device(task.batches[0], device))
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        task.loss(network, two).backward()
    network.zero_grad()
    batch = task.batches[0]
    return counter.get_total_flops() * len(batch[0] if isinstance(batch, tuple) else batch["input_ids"]) / 2
