"""Compare the overhead of a training step of several trainers with a plain PyTorch loop.

The model is a tiny MLP (32 → 64 → 10, batches of 8, SGD, one thread), so that the model's work does not hide the
overhead, or a ResNet-18 on images of 64 by 64. Variants: ``bare``; ``callbacks``, five callbacks with two empty hooks
each; ``logged``, the loss of every step stored in memory by the trainer's logger; and only for this library: ``bar``,
the progress bar written to a file, ``metric``, the accuracy of the training, and ``algorithms``, six of them, above a
loop that calls their kernels. They train from a shuffled ``DataLoader`` of a map-style dataset with a user's
``collate_fn``. The other variants are bare: ``list`` trains on a list of batches, ``dataset`` with the default
``collate_fn``, ``dataset_128`` and ``collate_128`` in batches of 128, and ``workers`` with two worker processes.

Every case runs in new processes, each trainer in its own environment. The trainer and a plain loop, with its own
network and loader, run alternating blocks of steps, so that both run under the same load of the machine. The first
steps of a block are not counted. The table shows medians over the rounds of the medians of the differences between
neighbouring blocks. The case ``loop`` compares the plain loop with itself.

``--install FOLDER`` creates the environments with uv, ``--environments FOLDER`` uses them. ``--device cuda`` compares
some of the trainers on a GPU, also how often a step synchronizes with it, and the peak of its memory.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import json
import os
import resource
import statistics
import subprocess
import sys
import time
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

ROOT = Path(__file__).parent.parent
PACKAGES = {
    "ours": [str(folder) for folder in sorted(ROOT.glob("packages/composer-*"))],
    "composer": ["mosaicml==0.32.1"],
    "lightning": ["lightning>=2.6"],
    "fabric": ["lightning>=2.6"],
    "accelerate": ["accelerate"],
    "hf_trainer": ["transformers", "accelerate"],
    "ignite": ["pytorch-ignite"],
    "torchtnt": ["torchtnt", "setuptools<80"],
}
CASES = ["loop", *PACKAGES]
LOADERS: dict[str, dict[str, Any]] = {
    "dataset": {"batch_size": 8},
    "dataset_128": {"batch_size": 128},
    "collate_128": {"batch_size": 128, "collate": True},
    "workers": {"batch_size": 8, "num_workers": 2},
}
USUAL = {"batch_size": 8, "collate": True}
VARIANTS = ["bare", "callbacks", "logged", "bar", "metric", "algorithms", "list", *LOADERS]
ON_GPU = ["loop", "ours", "lightning", "fabric", "accelerate"]
ONLY = {
    **{variant: ["loop", "ours"] for variant in ("bar", "metric", "algorithms")},
    "callbacks": [case for case in CASES if case != "accelerate"],
}


def main() -> None:
    """Measure all cases in turns, or one of them in a child process."""
    arguments = parse_arguments()
    if arguments.child:
        print(json.dumps(measure(*arguments.child, arguments.steps, arguments.model, arguments.device)))
    elif arguments.device == "cuda" and (others := sorted({*arguments.cases} - {*ON_GPU})):
        sys.exit(f"--cases must be some of {', '.join(ON_GPU)} on a GPU, got also {', '.join(others)}.")
    elif arguments.install:
        install(arguments.install, arguments.cases)
    else:
        compare(arguments)


def parse_arguments() -> argparse.Namespace:
    """Return the options of the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5, help="number of runs of each case (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=3000, help="steps of a run (default: %(default)s)")
    parser.add_argument("--model", choices=["mlp", "resnet18"], default="mlp")
    parser.add_argument("--cases", nargs="*", default=CASES, choices=CASES, metavar="CASE", help=", ".join(CASES))
    parser.add_argument("--variants", nargs="*", default=VARIANTS, choices=VARIANTS, metavar="VARIANT")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu", help="default: %(default)s")
    parser.add_argument("--environments", type=Path, help="folder that --install created")
    parser.add_argument("--install", type=Path, metavar="FOLDER", help="create the environments there and exit")
    parser.add_argument("--json", type=Path, help="file to write the figures to")
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    return parser.parse_args()


def install(folder: Path, cases: list[str]) -> None:
    """Create an environment for each case, with the torch version of this process if the package supports it."""
    import torch  # only for its version

    for case in cases:
        if case in PACKAGES:
            python = str(folder / case / "bin" / "python")
            subprocess.run(["uv", "venv", "--quiet", f"--python={sys.executable}", str(folder / case)], check=True)
            same = [] if case == "composer" else [f"torch=={torch.__version__.partition('+')[0]}", "torchvision"]
            command = ["uv", "pip", "install", "--quiet", f"--python={python}", *PACKAGES[case], *same]
            done = subprocess.run(command, check=False, capture_output=True, text=True)
            print(f"{case}: {'installed' if done.returncode == 0 else done.stderr.strip().splitlines()[-1]}")


def compare(arguments: argparse.Namespace) -> None:
    """Run all cases in turns and print the tables."""
    found: dict[str, dict[str, list[dict[str, Any]]]] = {}
    failed: dict[str, str] = {}
    for number in range(arguments.rounds):
        for variant in arguments.variants:
            for case in dict.fromkeys(["loop", *arguments.cases]):
                if case in ONLY.get(variant, CASES) and f"{case} {variant}" not in failed:
                    try:
                        found.setdefault(variant, {}).setdefault(case, []).append(run_child(case, variant, arguments))
                    except subprocess.CalledProcessError as error:
                        failed[f"{case} {variant}"] = error.stderr.strip().splitlines()[-1]
        print(f"round {number + 1} of {arguments.rounds}", file=sys.stderr)
    rows = [row for variant, cases in found.items() for row in table(variant, cases, failed)]
    for what, why in failed.items():
        print(f"{what}: {why}")
    if arguments.json:
        arguments.json.write_text(json.dumps({"model": arguments.model, "rows": rows, "failed": failed}, indent=2))


def run_child(case: str, variant: str, arguments: argparse.Namespace, timeout: float | None = None) -> dict[str, Any]:
    """Return the figures that a new process measures; it is killed after some seconds."""
    python = sys.executable
    if arguments.environments and (arguments.environments / case).is_dir():
        python = str(arguments.environments / case / "bin" / "python")
    # -P: other programs in this folder have names of packages that are imported.
    command = [
        python,
        "-P",
        __file__,
        "--child",
        case,
        variant,
        "--steps",
        str(arguments.steps),
        "--model",
        arguments.model,
        "--device",
        arguments.device,
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "WANDB_MODE": "disabled"}
    if arguments.device == "cpu":
        environment["CUDA_VISIBLE_DEVICES"] = ""
    done = subprocess.run(command, check=True, capture_output=True, text=True, env=environment, timeout=timeout)
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def table(variant: str, cases: dict[str, list[dict[str, Any]]], failed: dict[str, str]) -> list[dict[str, Any]]:
    """Print the figures of a variant and return them."""
    rows = []
    print(f"\n{variant:<12} {'µs a step':>10} {'above the loop':>15} {'ratio':>7} {'MiB above':>10}  versions")
    for case, runs in cases.items():
        if f"{case} {variant}" in failed:
            continue
        pairs = list(zip(runs, cases["loop"], strict=False))
        row = {
            "variant": variant,
            "case": case,
            **{figure: statistics.median(run[figure] for run in runs) for figure in ("us", "above", "ratio")},
            "mib": statistics.median(run["mib"] - loop["mib"] for run, loop in pairs),
            "versions": runs[0]["versions"],
        }
        rows.append(row)
        print(
            f"{case:<12} {row['us']:>10.1f} {row['above']:>15.1f} {row['ratio']:>7.3f} {row['mib']:>10.0f}  "
            f"{row['versions']}"
        )
    return rows


class Batches(list):  # type: ignore[type-arg]  # Lightning treats the items of a plain list as loaders
    """Batches as a data set that every trainer can iterate over."""


class Turns:
    """Runs a block of the plain loop before each block of a trainer's steps, and times both.

    It is a forward pre-hook of the network that the trainer trains.
    """

    def __init__(
        self, train: Callable[[int], None], block: int, settling: int, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self.train, self.block, self.settling, self.clock = train, block, settling, clock
        self.pairs: list[tuple[float, float]] = []
        """Microseconds of a step: in a block of the trainer, and in the block of the plain loop before it."""
        self._place = 0
        self._began = self._loop = 0.0

    def __call__(self, *_: object) -> None:
        """Count a step; between two blocks of the trainer, run a block of the plain loop."""
        counted = (self.block - self.settling) / 1e6
        if self._place == self.block:
            self.pairs.append(((self.clock() - self._began) / counted, self._loop))
            self._place = 0
        if self._place == 0:
            self.train(self.settling)
            began = self.clock()
            self.train(self.block - self.settling)
            self._loop = (self.clock() - began) / counted
        if self._place == self.settling:
            self._began = self.clock()
        self._place += 1


def measure(case: str, variant: str, steps: int, model: str, device: str = "cpu") -> dict[str, Any]:
    """Return the microseconds of a step in this process, its peak memory, and the versions."""
    import torch

    torch.set_num_threads(1)
    torch.manual_seed(0)
    block, settling = (50, 10) if model == "mlp" else (4, 1)
    count = max(steps // block, 3) * block + 1  # complete blocks, of which the first is not counted, and one more step
    loop = Loop(make_network(model, device), make_batches(model, variant, count, device), variant)
    loop.network.register_forward_pre_hook(do_nothing)
    network = make_network(model, device)
    turns = Turns(loop.train, block, settling, time.perf_counter if device == "cpu" else synchronized_clock)
    network.register_forward_pre_hook(turns)
    run: Callable[..., str] = globals()[f"run_{case}"]
    version = run(network, make_batches(model, variant, count, device), variant)
    pairs = turns.pairs[max(len(turns.pairs) // 10, 1) :]
    figures = {
        "us": statistics.median(us for us, _ in pairs),
        "above": statistics.median(us - loop for us, loop in pairs),
        "ratio": statistics.median(us / loop for us, loop in pairs),
        "mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        "versions": f"{version}, torch {torch.__version__}",
    }
    if device == "cuda":

        def train(count: int) -> None:
            run(make_network(model, device), make_batches(model, variant, count, device), variant)

        figures["mib"] = torch.cuda.max_memory_allocated() / 2**20
        # The difference of two runs leaves out what synchronizes once in a run.
        few, many = (count_synchronizations(train, count) for count in (10, 30))
        figures["synchronizations"] = (many - few) / 20
    return figures


def synchronized_clock() -> float:
    """Return the time when the GPU has finished."""
    import torch

    torch.cuda.synchronize()
    return time.perf_counter()


def count_synchronizations(run: Callable[[int], None], steps: int) -> int:
    """Return how often torch reports that a run waits for the GPU."""
    import torch

    has_gpu = torch.cuda.is_initialized()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if has_gpu:
            torch.cuda.set_sync_debug_mode("warn")
        run(steps)
        if has_gpu:
            torch.cuda.set_sync_debug_mode("default")
    return sum("synchronizing CUDA operation" in str(warning.message) for warning in caught)


def do_nothing(*_: object) -> None:
    """Cost as much as an empty hook, as the network of the trainer has one."""


def make_batches(model: str, variant: str, count: int, device: str = "cpu") -> Any:
    """Return a list of batches, or a loader of a dataset that repeats a few samples; in pinned memory for a GPU."""
    import torch
    from torch.utils.data import DataLoader

    loader = LOADERS.get(variant, USUAL)
    shape = (3, 64, 64) if model == "resnet18" else (1, 4, 8) if variant == "algorithms" else (32,)
    if variant == "list":
        batches = [(torch.randn(8, *shape), torch.randint(10, (8,))) for _ in range(8)]
        if device == "cuda":
            batches = [(inputs.pin_memory(), targets.pin_memory()) for inputs, targets in batches]
        return Batches(batches[number % 8] for number in range(count))

    class Samples(torch.utils.data.Dataset[Any]):
        def __init__(self) -> None:
            self.some = [(torch.randn(shape), number % 10) for number in range(256)]

        def __len__(self) -> int:
            return count * loader["batch_size"]  # type: ignore[no-any-return]

        def __getitem__(self, index: int) -> Any:
            return self.some[index % 256]

    def collate(samples: list[Any]) -> Any:
        return torch.stack([image for image, _ in samples]), torch.tensor([label for _, label in samples])

    return DataLoader(
        Samples(),
        batch_size=loader["batch_size"],
        shuffle=True,
        num_workers=loader.get("num_workers", 0),
        collate_fn=collate if loader.get("collate") else None,
        pin_memory=device == "cuda",
    )


def on_device(batches: Iterable[Any], device: Any) -> Iterable[Any]:
    """Return batches whose tensors are copied to the device, for loops that copy them themselves."""
    if device.type == "cpu":
        return batches
    return (tuple(tensor.to(device, non_blocking=True) for tensor in batch) for batch in batches)


def device_of(network: Any) -> Any:
    """Return the device of a network, on which its trainer trains it."""
    return next(network.parameters()).device


def make_network(model: str, device: str = "cpu") -> Any:
    """Return the network that is trained."""
    import torch

    if model == "resnet18":
        from torchvision.models import resnet18

        return resnet18(num_classes=10).to(device)
    layers = torch.nn.Flatten(), torch.nn.Linear(32, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10)
    return torch.nn.Sequential(*layers).to(device)


class Loop:
    """A plain PyTorch loop; it stores losses in the variant ``logged``, and calls kernels in ``algorithms``."""

    def __init__(self, network: Any, batches: Iterable[Any], variant: str) -> None:
        import torch

        self.network, self.variant, self.losses = network, variant, []
        self.batches = iter(on_device(itertools.chain.from_iterable(itertools.repeat(batches)), device_of(network)))
        self.optimizer = torch.optim.SGD(network.parameters(), lr=0.01)

    def train(self, count: int) -> None:
        """Run a number of steps."""
        from torch.nn import functional

        network, optimizer, is_logged, losses = self.network, self.optimizer, self.variant == "logged", self.losses
        if self.variant == "algorithms":
            self._train_with_kernels(count)
            return
        for inputs, targets in itertools.islice(self.batches, count):
            optimizer.zero_grad()
            loss = functional.cross_entropy(network(inputs), targets)
            loss.backward()
            optimizer.step()
            if is_logged:
                losses.append(loss.item())

    def _train_with_kernels(self, count: int) -> None:
        import torch
        from torch.nn import functional

        from composer import functional as kernels

        if not hasattr(self, "average"):
            self.average, self.generator = copy.deepcopy(self.network), torch.Generator().manual_seed(0)
            self.network = self.network.to(memory_format=torch.channels_last)
        network, optimizer, average, generator = self.network, self.optimizer, self.average, self.generator
        for inputs, targets in itertools.islice(self.batches, count):
            images = kernels.cutout_batch(inputs, 1, 0.5, generator=generator)
            images, mixed = kernels.mixup(images, targets, alpha=0.2, num_classes=10, generator=generator)
            optimizer.zero_grad()
            outputs = network(images)
            functional.cross_entropy(outputs, kernels.smooth_labels(outputs, mixed, 0.1)).backward()
            kernels.apply_gradient_clipping(network, "norm", 1.0)
            optimizer.step()
            kernels.compute_ema(network, average, smoothing=0.99)


def run_loop(network: Any, batches: Any, variant: str) -> str:
    """Train with a plain loop."""
    Loop(network, batches, variant).train(len(batches))
    return "plain loop"


def run_ours(network: Any, batches: Any, variant: str) -> str:
    """Train with this library."""
    import torch

    import composer
    from composer import Callback, Trainer, algorithms
    from composer.loggers import InMemoryLogger
    from composer.models import ComposerClassifier

    class Nothing(Callback):
        def batch_start(self, state: Any, logger: Any) -> None:
            pass

        def batch_end(self, state: Any, logger: Any) -> None:
            pass

    metrics = None if variant == "metric" else []
    model = ComposerClassifier(network, num_classes=10, train_metrics=metrics, val_metrics=[])
    six = [
        algorithms.CutOut(),
        algorithms.MixUp(),
        algorithms.LabelSmoothing(),
        algorithms.GradientClipping("norm", 1.0),
        algorithms.EMA("100ba"),
        algorithms.ChannelsLast(),
    ]
    with Path(os.devnull).open("w") as nowhere:
        Trainer(
            model=model,
            train_dataloader=batches,
            optimizers=torch.optim.SGD(model.parameters(), lr=0.01),
            algorithms=six if variant == "algorithms" else None,
            callbacks=[Nothing() for _ in range(5)] if variant == "callbacks" else None,
            loggers=InMemoryLogger() if variant == "logged" else None,
            progress_bar=variant == "bar",
            console_stream=nowhere,
            max_duration="1ep",
            precision="fp32",
            device="cpu" if device_of(network).type == "cpu" else "gpu",
            seed=0,
        ).fit()
    return f"composer {composer.__version__}"


def run_composer(network: Any, batches: Any, variant: str) -> str:
    """Train with MosaicML Composer."""
    import torch

    import composer
    from composer import Callback, Trainer
    from composer.loggers import InMemoryLogger
    from composer.models import ComposerClassifier

    class Nothing(Callback):
        def batch_start(self, state: Any, logger: Any) -> None:
            pass

        def batch_end(self, state: Any, logger: Any) -> None:
            pass

    from torchmetrics import MetricCollection

    none = MetricCollection([])
    model = ComposerClassifier(network, num_classes=10, train_metrics=none, val_metrics=none)
    Trainer(
        model=model,
        train_dataloader=batches,
        optimizers=torch.optim.SGD(model.parameters(), lr=0.01),
        callbacks=[Nothing() for _ in range(5)] if variant == "callbacks" else None,
        loggers=InMemoryLogger() if variant == "logged" else None,
        progress_bar=False,
        max_duration="1ep",
        device="cpu",
        device_train_microbatch_size=LOADERS.get(variant, USUAL)["batch_size"],
        seed=0,
    ).fit()
    return f"mosaicml {composer.__version__}"


def run_lightning(network: Any, batches: Any, variant: str) -> str:
    """Train with Lightning."""
    import lightning
    import torch
    from lightning.pytorch.loggers.logger import DummyLogger
    from torch.nn import functional

    kept = []

    class InMemory(DummyLogger):
        def log_metrics(self, metrics: Any, *_: Any, **__: Any) -> None:
            kept.append(metrics)

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.network = network

        def training_step(self, batch: Any, _: int) -> Any:
            loss = functional.cross_entropy(self.network(batch[0]), batch[1])
            if variant == "logged":
                self.log("loss", loss)
            return loss

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.01)

    class Nothing(lightning.Callback):
        def on_train_batch_start(self, *_: Any) -> None:
            pass

        def on_train_batch_end(self, *_: Any) -> None:
            pass

    lightning.Trainer(
        max_epochs=1,
        accelerator=device_of(network).type,
        devices=1,
        logger=InMemory() if variant == "logged" else False,
        log_every_n_steps=1,
        callbacks=[Nothing() for _ in range(5)] if variant == "callbacks" else None,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    ).fit(Module(), batches)
    return f"lightning {lightning.__version__}"


def run_fabric(network: Any, batches: Any, variant: str) -> str:
    """Train with Lightning's Fabric: a plain loop that calls its functions."""
    import lightning
    import torch
    from lightning.fabric import Fabric
    from lightning.fabric.loggers.logger import Logger
    from torch.nn import functional

    kept = []

    class InMemory(Logger):
        name, version = "memory", 0

        def log_metrics(self, metrics: Any, step: Any = None) -> None:
            kept.append((step, metrics))

        def log_hyperparams(self, *_: Any, **__: Any) -> None:
            pass

    class Nothing:
        def on_train_batch_start(self) -> None:
            pass

        def on_train_batch_end(self) -> None:
            pass

    callbacks = [Nothing() for _ in range(5)] if variant == "callbacks" else []
    memory = InMemory() if variant == "logged" else None
    fabric = Fabric(accelerator=device_of(network).type, devices=1, loggers=memory, callbacks=callbacks)
    model, optimizer = fabric.setup(network, torch.optim.SGD(network.parameters(), lr=0.01))
    batches = fabric.setup_dataloaders(batches) if variant != "list" else batches
    for inputs, targets in batches if variant != "list" else on_device(batches, fabric.device):
        if callbacks:
            fabric.call("on_train_batch_start")
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(inputs), targets)
        fabric.backward(loss)
        optimizer.step()
        if variant == "logged":
            fabric.log("loss", loss)
        if callbacks:
            fabric.call("on_train_batch_end")
    return f"lightning {lightning.__version__}"


def run_accelerate(network: Any, batches: Any, variant: str) -> str:
    """Train with Accelerate: a plain loop that calls its functions."""
    import accelerate
    import torch
    from accelerate.tracking import GeneralTracker
    from torch.nn import functional

    kept = []

    class InMemory(GeneralTracker):
        name, requires_logging_directory, tracker = "memory", False, None

        def __init__(self) -> None:
            super().__init__()

        def store_init_configuration(self, values: Any) -> None:
            pass

        def log(self, values: Any, step: Any = None, **_: Any) -> None:
            kept.append((step, values))

    is_cpu = device_of(network).type == "cpu"
    accelerator = accelerate.Accelerator(cpu=is_cpu, log_with=InMemory() if variant == "logged" else None)
    model, optimizer = accelerator.prepare(network, torch.optim.SGD(network.parameters(), lr=0.01))
    batches = accelerator.prepare(batches) if variant != "list" else batches
    if variant == "logged":
        accelerator.init_trackers("memory")
    for step, (inputs, targets) in enumerate(batches if variant != "list" else on_device(batches, accelerator.device)):
        with accelerator.accumulate(model):
            optimizer.zero_grad()
            loss = functional.cross_entropy(model(inputs), targets)
            accelerator.backward(loss)
            optimizer.step()
        if variant == "logged":
            accelerator.log({"loss": loss.item()}, step=step)
    return f"accelerate {accelerate.__version__}"


def run_hf_trainer(network: Any, batches: Any, variant: str) -> str:
    """Train with Transformers' Trainer."""
    import tempfile

    import torch
    import transformers
    from torch.nn import functional

    kept = []

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.network = network

        def forward(self, inputs: Any, labels: Any) -> Any:
            return {"loss": functional.cross_entropy(self.network(inputs), labels)}

    class Nothing(transformers.TrainerCallback):
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            pass

        def on_step_end(self, *_: Any, **__: Any) -> None:
            pass

    class Keep(transformers.TrainerCallback):
        def on_log(self, *_: Any, logs: Any = None, **__: Any) -> None:
            kept.append(logs)

    class Trainer(transformers.Trainer):
        def get_train_dataloader(self) -> Any:
            return batches

    if variant != "list":
        collate = batches.collate_fn
        batches.collate_fn = lambda samples: dict(zip(("inputs", "labels"), collate(samples), strict=True))
    else:
        batches = [{"inputs": inputs, "labels": labels} for inputs, labels in batches]
    model = Model()
    options = {"logging_strategy": "steps", "logging_steps": 1} if variant == "logged" else {"logging_strategy": "no"}
    trainer = Trainer(
        model=model,
        args=transformers.TrainingArguments(
            output_dir=tempfile.mkdtemp(),
            num_train_epochs=1,
            max_grad_norm=0.0,
            report_to=[],
            save_strategy="no",
            disable_tqdm=True,
            use_cpu=True,
            **options,
        ),
        train_dataset=batches.dataset if variant != "list" else batches,
        callbacks=[Nothing() for _ in range(5)]
        if variant == "callbacks"
        else [Keep()]
        if variant == "logged"
        else None,
        optimizers=(torch.optim.SGD(model.parameters(), lr=0.01), None),
    )
    trainer.train()
    return f"transformers {transformers.__version__}"


def run_ignite(network: Any, batches: Any, variant: str) -> str:
    """Train with Ignite: its engine calls a plain step."""
    import ignite
    import torch
    from ignite.engine import Engine, Events
    from torch.nn import functional

    optimizer = torch.optim.SGD(network.parameters(), lr=0.01)
    kept = []

    def step(_: Any, batch: Any) -> Any:
        optimizer.zero_grad()
        loss = functional.cross_entropy(network(batch[0]), batch[1])
        loss.backward()
        optimizer.step()
        return loss.item() if variant == "logged" else None

    engine = Engine(step)
    if variant == "logged":
        engine.add_event_handler(Events.ITERATION_COMPLETED, lambda engine: kept.append(engine.state.output))
    for _ in range(5 if variant == "callbacks" else 0):
        engine.add_event_handler(Events.ITERATION_STARTED, do_nothing)
        engine.add_event_handler(Events.ITERATION_COMPLETED, do_nothing)
    engine.run(batches, max_epochs=1)
    return f"ignite {ignite.__version__}"


def run_torchtnt(network: Any, batches: Any, variant: str) -> str:
    """Train with torchtnt."""
    from importlib.metadata import version

    import torch
    from torch.nn import functional
    from torchtnt.framework.auto_unit import AutoUnit
    from torchtnt.framework.callback import Callback
    from torchtnt.framework.train import train
    from torchtnt.utils.loggers import InMemoryLogger

    memory = InMemoryLogger()

    class Unit(AutoUnit):  # type: ignore[misc]
        def compute_loss(self, state: Any, data: Any) -> Any:
            outputs = self.module(data[0])
            return functional.cross_entropy(outputs, data[1]), outputs

        def configure_optimizers_and_lr_scheduler(self, module: Any) -> Any:
            return torch.optim.SGD(module.parameters(), lr=0.01), None

        def on_train_step_end(self, state: Any, data: Any, step: int, results: Any) -> None:
            if variant == "logged":
                memory.log("loss", results.loss, step)

    class Nothing(Callback):  # type: ignore[misc]
        def on_train_step_start(self, state: Any, unit: Any) -> None:
            pass

        def on_train_step_end(self, state: Any, unit: Any) -> None:
            pass

    callbacks = [Nothing() for _ in range(5)] if variant == "callbacks" else None
    train(Unit(module=network, device=torch.device("cpu")), batches, max_epochs=1, callbacks=callbacks)
    return f"torchtnt {version('torchtnt')}"


if __name__ == "__main__":
    main()
