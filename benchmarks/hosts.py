"""Measure what algorithms add to a step of Lightning, Transformers, Accelerate and Ignite.

The model is the MLP of ``engine.py`` (32 → 64 → 10, batches of 8, SGD, one thread). For each host:

    alone    the host without algorithms
    idle     with five algorithms that run at two events of a step and do nothing
    active   with CutOut, MixUp, LabelSmoothing, GradientClipping, EMA and ChannelsLast

Beside them run a plain loop and one with the kernels of the six algorithms. The table shows microseconds of a step
alone, microseconds that the idle algorithms add, and the ratio of active to the host alone plus the kernels. All five
run in turns in one process for each host; figures are medians over the rounds of the medians of the steps. Memory is
the growth of the process in the round with active algorithms, after one without.
"""

from __future__ import annotations

import argparse
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

import torch
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, Dataset

if TYPE_CHECKING:
    from collections.abc import Iterator

HOSTS = ["lightning", "fabric", "transformers", "accelerate", "ignite"]


def main() -> None:
    """Measure all hosts, or one of them in a child process."""
    arguments = parse_arguments()
    if arguments.child:
        print(json.dumps(measure(arguments.child, arguments.steps, arguments.rounds)))
        return
    figures = {}
    print(f"{'host':<14} {'µs alone':>9} {'idle above':>11} {'active / kernels':>17} {'MiB active':>11}")
    for host in arguments.hosts:
        options = [f"--steps={arguments.steps}", f"--rounds={arguments.rounds}"]
        # -P: other programs in this folder have names of packages that are imported.
        command = [sys.executable, "-P", __file__, "--child", host, *options]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
        done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=environment)
        one = figures[host] = json.loads(done.stdout.splitlines()[-1])
        print(f"{host:<14} {one['alone']:>9.1f} {one['above']:>11.1f} {one['ratio']:>17.3f} {one['mib']:>11.1f}")
    if arguments.json:
        arguments.json.write_text(json.dumps(figures, indent=2))


def parse_arguments() -> argparse.Namespace:
    """Return the options of the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7, help="number of runs of each variant (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=1000, help="steps of a run (default: %(default)s)")
    parser.add_argument("--hosts", nargs="*", default=HOSTS, choices=HOSTS, metavar="HOST", help=", ".join(HOSTS))
    parser.add_argument("--json", type=Path, help="file to write the figures to")
    parser.add_argument("--child", choices=HOSTS, help=argparse.SUPPRESS)
    return parser.parse_args()


def measure(host: str, steps: int, rounds: int) -> dict[str, float]:
    """Return the figures of a host, measured in this process."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    run = RUNS[host]
    times: dict[str, list[float]] = {}
    memory = []
    for _ in range(rounds):
        times.setdefault("loop", []).append(time_loop(steps, kernels=False))
        times.setdefault("kernels", []).append(time_loop(steps, kernels=True))
        for variant, algorithms in (("alone", None), ("idle", idle_algorithms()), ("active", active_algorithms())):
            batches = Batches(steps)
            torch.manual_seed(0)
            before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            run(make_network(), batches, algorithms)
            times.setdefault(variant, []).append(batches.microseconds())
            if variant == "active":
                memory.append((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024)
    pairs = list(zip(*(times[name] for name in ("loop", "kernels", "alone", "idle", "active")), strict=True))
    return {
        "alone": statistics.median(times["alone"]),
        "above": statistics.median(idle - alone for _, _, alone, idle, _ in pairs),
        "ratio": statistics.median(active / (alone + kernels - loop) for loop, kernels, alone, _, active in pairs),
        "mib": sum(memory),
        **{f"{name} µs": statistics.median(each) for name, each in times.items()},
    }


class Batches(Dataset[Any]):
    """Batches of images (8, 1, 4, 8) and labels, with the times at which they are taken."""

    def __init__(self, count: int) -> None:
        generator = torch.Generator().manual_seed(0)
        self._some = [
            (torch.randn(8, 1, 4, 8, generator=generator), torch.randint(10, (8,), generator=generator))
            for _ in range(200)
        ]
        self._count = count
        self._taken: list[float] = []

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, place: int) -> Any:
        self._taken.append(time.perf_counter())
        return self._some[place % len(self._some)]

    def loader(self) -> DataLoader[Any]:
        """Return a loader of the batches in their order."""
        return DataLoader(self, batch_size=None)

    def microseconds(self) -> float:
        """Return the median time from one batch to the next, without the first fifth."""
        taken = self._taken[len(self._taken) // 5 :]
        return statistics.median(later - sooner for sooner, later in itertools.pairwise(taken)) * 1e6


def make_network() -> torch.nn.Module:
    """Return the MLP."""
    return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(32, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10))


def make_optimizer(network: torch.nn.Module) -> torch.optim.Optimizer:
    """Return SGD."""
    return torch.optim.SGD(network.parameters(), lr=0.01)


def loss_of(outputs: Any, batch: Any) -> Any:
    """Return the cross entropy of the outputs."""
    return cross_entropy(outputs, batch[1])


def idle_algorithms() -> list[Any]:
    """Return five algorithms that do nothing."""
    from composer.core import Algorithm, Event, Stage

    class Idle(Algorithm):
        runs_at = {Event.BATCH_START: Stage.ARCHITECTURE, Event.BATCH_END: Stage.WEIGHTS}

        def apply(self, event: Any, state: Any, logger: Any) -> None:
            pass

    return [Idle() for _ in range(5)]


def active_algorithms() -> list[Any]:
    """Return six algorithms."""
    from composer import algorithms as al

    return [
        al.CutOut(),
        al.MixUp(),
        al.LabelSmoothing(),
        al.GradientClipping("norm", 1.0),
        al.EMA("100ba"),
        al.ChannelsLast(),
    ]


def time_loop(steps: int, *, kernels: bool) -> float:
    """Return the microseconds of a step of the plain loop, or of the one with kernels."""
    batches = Batches(steps)
    for _ in with_kernels(batches) if kernels else plain(batches):
        pass
    return batches.microseconds()


def plain(batches: Batches) -> Iterator[None]:
    """Yield after each step of a plain loop."""
    network = make_network()
    optimizer = make_optimizer(network)
    for batch in batches.loader():
        optimizer.zero_grad()
        loss_of(network(batch[0]), batch).backward()
        optimizer.step()
        yield


def with_kernels(batches: Batches) -> Iterator[None]:
    """Yield after each step of a loop that calls the kernels of the six algorithms."""
    import copy

    from composer import functional as cf

    network = make_network()
    optimizer = make_optimizer(network)
    cf.apply_channels_last(network)
    average = copy.deepcopy(network)
    for images, labels in batches.loader():
        optimizer.zero_grad()
        mixed, partners, mixing = cf.mixup_batch(cf.cutout_batch(images, 1, 0.5), labels, alpha=0.2)
        outputs = network(mixed)
        own, others = (torch.nn.functional.one_hot(ids, 10).float() for ids in (labels, partners))
        targets = cf.smooth_labels(outputs, torch.lerp(own, others, mixing), 0.1)
        cross_entropy(outputs, targets).backward()
        cf.apply_gradient_clipping(network, "norm", 1.0, fsdp_enabled=False)
        optimizer.step()
        cf.compute_ema(network, average, 0.99)
        yield


def run_lightning(network: Any, batches: Batches, algorithms: list[Any] | None) -> None:
    """Train with Lightning's Trainer."""
    import logging

    import lightning

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.network = network

        def training_step(self, batch: Any, _: int) -> Any:
            return loss_of(self.network(batch[0]), batch)

        def configure_optimizers(self) -> Any:
            return make_optimizer(self)

    callbacks: list[Any] = []
    if algorithms is not None:
        from composer.integrations.lightning import ComposerCallback

        callbacks = [ComposerCallback(algorithms)]
    lightning.Trainer(
        max_epochs=1,
        accelerator="cpu",
        logger=False,
        callbacks=callbacks,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    ).fit(Module(), batches.loader())


def run_fabric(network: Any, batches: Batches, algorithms: list[Any] | None) -> None:
    """Train in a loop with Fabric."""
    from lightning.fabric import Fabric

    fabric, optimizer = Fabric(accelerator="cpu"), make_optimizer(network)
    if algorithms is None:
        network, optimizer = fabric.setup(network, optimizer)
        for batch in fabric.setup_dataloaders(batches.loader()):
            optimizer.zero_grad()
            fabric.backward(loss_of(network(batch[0]), batch))
            optimizer.step()
        return
    from composer.integrations.lightning import FabricAlgorithms

    loader = fabric.setup_dataloaders(batches.loader())
    wrapped = FabricAlgorithms(fabric, network, optimizer, algorithms, loss_of)
    wrapped.begin_fit(max_duration="1ep", train_dataloader=loader)
    wrapped.begin_epoch()
    for batch in loader:
        wrapped.step(batch)


def run_transformers(network: Any, batches: Batches, algorithms: list[Any] | None) -> None:
    """Train with the Trainer of Transformers."""
    import tempfile

    from transformers import Trainer, TrainingArguments

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.network = network

        def forward(self, pixel_values: Any, labels: Any = None) -> Any:
            logits = self.network(pixel_values)
            loss = None if labels is None else cross_entropy(logits, labels)
            return {"loss": loss, "logits": logits}

    options: dict[str, Any] = {}
    kind: Any = Trainer
    if algorithms is not None:
        from composer.integrations.transformers import composer_trainer

        kind, options = composer_trainer(Trainer), {"algorithms": algorithms}
    with tempfile.TemporaryDirectory() as folder:
        settings = TrainingArguments(
            folder,
            num_train_epochs=1,
            per_device_train_batch_size=1,
            train_sampling_strategy="sequential",
            use_cpu=True,
            report_to=[],
            disable_tqdm=True,
            save_strategy="no",
            logging_strategy="no",
            optim="sgd",
            max_grad_norm=0.0,
            remove_unused_columns=False,
        )
        kind(
            model=Model(),
            args=settings,
            train_dataset=batches,
            data_collator=lambda items: dict(zip(("pixel_values", "labels"), items[0], strict=True)),
            **options,
        ).train()


def run_accelerate(network: Any, batches: Batches, algorithms: list[Any] | None) -> None:
    """Train in a loop with Accelerate."""
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState, GradientState

    AcceleratorState._reset_state(True)
    GradientState._reset_state()
    accelerator, optimizer, loader = Accelerator(cpu=True), make_optimizer(network), batches.loader()
    compute_loss = None
    if algorithms is not None:
        from composer.integrations.accelerate import accelerate_algorithms

        wrapped = accelerate_algorithms(
            accelerator, network, optimizer, loader, algorithms, loss=loss_of, max_duration="1ep"
        )
        compute_loss = wrapped.compute_loss
    model, optimizer, loader = accelerator.prepare(network, optimizer, loader)
    for batch in loader:
        with accelerator.accumulate(model):
            loss = loss_of(model(batch[0]), batch) if compute_loss is None else compute_loss(batch)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()


def run_ignite(network: Any, batches: Batches, algorithms: list[Any] | None) -> None:
    """Train with an engine of Ignite."""
    from ignite.engine import create_supervised_trainer

    optimizer, loss = make_optimizer(network), torch.nn.CrossEntropyLoss()
    engine = create_supervised_trainer(network, optimizer, loss)
    if algorithms is not None:
        from composer.integrations.ignite import attach_algorithms

        attach_algorithms(engine, network, optimizer, loss, algorithms)
    engine.run(batches.loader(), max_epochs=1)


RUNS = {
    "lightning": run_lightning,
    "fabric": run_fabric,
    "transformers": run_transformers,
    "accelerate": run_accelerate,
    "ignite": run_ignite,
}


if __name__ == "__main__":
    main()
