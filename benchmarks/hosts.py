"""Measure what algorithms add to a step of Lightning, Transformers, Accelerate and Ignite.

The model is the MLP of ``engine.py`` (32 → 64 → 10, batches of 8, SGD, one thread). For each host:

    alone    the host without algorithms
    idle     with five algorithms that run at two events of a step and do nothing
    active   with CutOut, MixUp, LabelSmoothing, GradientClipping, EMA and ChannelsLast
    kernels  with the kernels of these six, called in the user's own functions, callbacks and hooks of the host

The table shows microseconds of a step alone, microseconds that the idle algorithms add, and the ratio of active to
kernels. All four run in turns, in one process for each host. A run has the median of its steps; figures are medians of
the differences and ratios within a round, and in brackets the quartiles of the rounds. Memory is the growth of the
process in the runs with active algorithms.
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
from typing import Any

import torch
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, Dataset

HOSTS = ["lightning", "fabric", "transformers", "accelerate", "ignite"]
LIMITS = {"above": 40.0, "ratio": 1.15}


def main() -> None:
    """Measure all hosts, or one of them in a child process."""
    arguments = parse_arguments()
    if arguments.child:
        print(json.dumps(measure(arguments.child, arguments.steps, arguments.rounds)))
        return
    figures = {}
    print(f"{'host':<14} {'µs alone':>9} {'idle, µs above':>26} {'active / kernels':>24} {'MiB active':>11}")
    print(f"{'limit':<14} {'':>9} {LIMITS['above']:>26.1f} {LIMITS['ratio']:>24.3f}")
    for host in arguments.hosts:
        options = [f"--steps={arguments.steps}", f"--rounds={arguments.rounds}"]
        # -P: other programs in this folder have names of packages that are imported.
        command = [sys.executable, "-P", __file__, "--child", host, *options]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
        done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=environment)
        one = figures[host] = json.loads(done.stdout.splitlines()[-1])
        above, ratio = summary(one["above"], 1), summary(one["ratio"], 3)
        print(f"{host:<14} {statistics.median(one['alone']):>9.1f} {above:>26} {ratio:>24} {one['mib']:>11.1f}")
    if arguments.json:
        arguments.json.write_text(json.dumps(figures, indent=2))


def summary(values: list[float], digits: int) -> str:
    """Return the median and the quartiles as a string."""
    low, middle, high = (f"{value:.{digits}f}" for value in statistics.quantiles(values, n=4, method="inclusive"))
    return f"{middle} ({low} to {high})"


def parse_arguments() -> argparse.Namespace:
    """Return the options of the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--rounds", type=int, default=20, help="number of runs of each variant, at least 2 (default: %(default)s)"
    )
    parser.add_argument("--steps", type=int, default=250, help="steps of a run (default: %(default)s)")
    parser.add_argument("--hosts", nargs="*", default=HOSTS, choices=HOSTS, metavar="HOST", help=", ".join(HOSTS))
    parser.add_argument("--json", type=Path, help="file to write the figures to")
    parser.add_argument("--child", choices=HOSTS, help=argparse.SUPPRESS)
    return parser.parse_args()


def measure(host: str, steps: int, rounds: int) -> dict[str, Any]:
    """Return the figures of a host for each round, measured in this process."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    times: dict[str, list[float]] = {variant: [] for variant in VARIANTS}
    mib = 0.0
    for number in range(rounds + 1):
        # Each variant is the first one as often as the last one.
        for variant in list(VARIANTS)[:: 1 if number % 2 else -1]:
            batches = Batches(steps)
            torch.manual_seed(0)
            before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            network = make_network()
            RUNS[host](network, batches, VARIANTS[variant](network))
            if number:  # the first round imports and allocates
                times[variant].append(batches.microseconds())
            if number and variant == "active":
                mib += (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    return {
        **times,
        "above": [idle - alone for alone, idle in zip(times["alone"], times["idle"], strict=True)],
        "ratio": [active / kernels for kernels, active in zip(times["kernels"], times["active"], strict=True)],
        "mib": mib,
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


def idle_algorithms(_: torch.nn.Module) -> list[Any]:
    """Return five algorithms that do nothing."""
    from composer.core import Algorithm, Event, Stage

    class Idle(Algorithm):
        runs_at = {Event.BATCH_START: Stage.ARCHITECTURE, Event.BATCH_END: Stage.WEIGHTS}

        def apply(self, event: Any, state: Any, logger: Any) -> None:
            pass

    return [Idle() for _ in range(5)]


def active_algorithms(_: torch.nn.Module) -> list[Any]:
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


class Kernels:
    """The kernels of the six algorithms, as users call them in their own functions of a host.

    The draws are those of one generator, which is seeded once.
    """

    def __init__(self, network: torch.nn.Module) -> None:
        from composer import functional

        functional.apply_channels_last(network)
        self._functional, self._network, self._average = functional, network, copy.deepcopy(network)
        self._generator = torch.Generator().manual_seed(0)

    def mix(self, images: Any, labels: Any) -> tuple[Any, Any]:
        """Return mixed images and their targets: CutOut and MixUp."""
        cf, generator = self._functional, self._generator
        images = cf.cutout_batch(images, 1, 0.5, generator=generator)
        return cf.mixup(images, labels, alpha=0.2, num_classes=10, generator=generator)

    def loss(self, outputs: Any, targets: Any) -> Any:
        """Return the loss: LabelSmoothing."""
        return cross_entropy(outputs, self._functional.smooth_labels(outputs, targets, 0.1))

    def clip(self, *_: Any) -> None:
        """Clip the gradients, also as a hook of an optimizer."""
        self._functional.apply_gradient_clipping(self._network, "norm", 1.0)

    def update_average(self, *_: Any) -> None:
        """Update EMA's average, also as a handler of Ignite."""
        self._functional.compute_ema(self._network, self._average, 0.99)


def run_lightning(network: Any, batches: Batches, changes: Kernels | list[Any] | None) -> None:
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

    class WithKernels(Module):
        def training_step(self, batch: Any, _: int) -> Any:
            images, targets = changes.mix(*batch)
            return changes.loss(self.network(images), targets)

    class AroundSteps(lightning.Callback):
        def on_before_optimizer_step(self, *_: Any) -> None:
            changes.clip()

        def on_train_batch_end(self, *_: Any) -> None:
            changes.update_average()

    callbacks: list[Any] = []
    if isinstance(changes, Kernels):
        callbacks = [AroundSteps()]
    elif changes is not None:
        from composer.integrations.lightning import ComposerCallback

        callbacks = [ComposerCallback(changes)]
    lightning.Trainer(
        max_epochs=1,
        accelerator="cpu",
        logger=False,
        callbacks=callbacks,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    ).fit(WithKernels() if isinstance(changes, Kernels) else Module(), batches.loader())


def run_fabric(network: Any, batches: Batches, changes: Kernels | list[Any] | None) -> None:
    """Train in a loop with Fabric."""
    from lightning.fabric import Fabric

    fabric, optimizer = Fabric(accelerator="cpu"), make_optimizer(network)
    if not isinstance(changes, list):
        network, optimizer = fabric.setup(network, optimizer)
        for batch in fabric.setup_dataloaders(batches.loader()):
            optimizer.zero_grad()
            if changes:
                images, targets = changes.mix(*batch)
                fabric.backward(changes.loss(network(images), targets))
                changes.clip()
                optimizer.step()
                changes.update_average()
            else:
                fabric.backward(loss_of(network(batch[0]), batch))
                optimizer.step()
        return
    from composer.integrations.lightning import FabricAlgorithms

    loader = fabric.setup_dataloaders(batches.loader())
    wrapped = FabricAlgorithms(fabric, network, optimizer, changes, loss_of)
    wrapped.begin_fit(max_duration="1ep", train_dataloader=loader)
    wrapped.begin_epoch()
    for batch in loader:
        wrapped.step(batch)


def run_transformers(network: Any, batches: Batches, changes: Kernels | list[Any] | None) -> None:
    """Train with the Trainer of Transformers."""
    import tempfile

    from transformers import PretrainedConfig, PreTrainedModel, Trainer, TrainerCallback, TrainingArguments

    class Model(PreTrainedModel):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__(PretrainedConfig())
            self.network = network

        def forward(self, pixel_values: Any, labels: Any = None) -> Any:
            logits = self.network(pixel_values)
            loss = None if labels is None else cross_entropy(logits, labels)
            return {"loss": loss, "logits": logits}

    class WithKernels(Trainer):  # type: ignore[misc]
        def compute_loss(self, model: Any, inputs: Any, *_: Any, **__: Any) -> Any:
            images, targets = changes.mix(inputs["pixel_values"], inputs["labels"])
            return changes.loss(model(pixel_values=images)["logits"], targets)

    class AroundSteps(TrainerCallback):  # type: ignore[misc]
        def on_pre_optimizer_step(self, *_: Any, **__: Any) -> None:
            changes.clip()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            changes.update_average()

    options: dict[str, Any] = {}
    kind: Any = Trainer
    if isinstance(changes, Kernels):
        kind, options = WithKernels, {"callbacks": [AroundSteps()]}
    elif changes is not None:
        from composer.integrations.transformers import composer_trainer

        kind, options = composer_trainer(Trainer), {"algorithms": changes}
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


def run_accelerate(network: Any, batches: Batches, changes: Kernels | list[Any] | None) -> None:
    """Train in a loop with Accelerate."""
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState, GradientState

    AcceleratorState._reset_state(True)
    GradientState._reset_state()
    accelerator, optimizer, loader = Accelerator(cpu=True), make_optimizer(network), batches.loader()
    kernels = changes if isinstance(changes, Kernels) else None
    wrapped: Any = None
    if isinstance(changes, list):
        from composer.integrations.accelerate import accelerate_algorithms

        wrapped = accelerate_algorithms(
            accelerator, network, optimizer, loader, changes, loss=loss_of, max_duration="1ep"
        )
    model, optimizer, loader = accelerator.prepare(network, optimizer, loader)
    for batch in loader:
        with accelerator.accumulate(model):
            if wrapped:
                accelerator.backward(wrapped.compute_loss(batch))
            elif kernels:
                images, targets = kernels.mix(*batch)
                accelerator.backward(kernels.loss(model(images), targets))
                kernels.clip()
            else:
                accelerator.backward(loss_of(model(batch[0]), batch))
            optimizer.step()
            optimizer.zero_grad()
        if kernels:
            kernels.update_average()


def run_ignite(network: Any, batches: Batches, changes: Kernels | list[Any] | None) -> None:
    """Train with an engine of Ignite."""
    from ignite.engine import Events, create_supervised_trainer

    optimizer, loss = make_optimizer(network), torch.nn.CrossEntropyLoss()
    if isinstance(changes, Kernels):
        engine = create_supervised_trainer(
            network, optimizer, changes.loss, prepare_batch=lambda batch, **_: changes.mix(*batch)
        )
        optimizer.register_step_pre_hook(changes.clip)
        engine.add_event_handler(Events.ITERATION_COMPLETED, changes.update_average)
    else:
        engine = create_supervised_trainer(network, optimizer, loss)
    if isinstance(changes, list):
        from composer.integrations.ignite import attach_algorithms

        attach_algorithms(engine, network, optimizer, loss, changes)
    engine.run(batches.loader(), max_epochs=1)


VARIANTS: dict[str, Any] = {
    "alone": lambda _: None,
    "kernels": Kernels,
    "idle": idle_algorithms,
    "active": active_algorithms,
}
RUNS = {
    "lightning": run_lightning,
    "fabric": run_fabric,
    "transformers": run_transformers,
    "accelerate": run_accelerate,
    "ignite": run_ignite,
}


if __name__ == "__main__":
    main()
