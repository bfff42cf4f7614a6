"""Measure the overhead of a training step of the Trainer compared with a plain PyTorch loop.

The model is a tiny MLP (32 → 64 → 10, batches of 8, SGD, one thread), so that the model's work does not hide the
overhead. A shuffled DataLoader yields tensors. The variants run in turns, each in a new process, and the table shows
medians over the rounds:

    loop       a plain PyTorch loop
    trainer    Trainer.fit with its default loggers, without a progress bar and without a training metric
    metric     the same with the default training metric of ComposerClassifier
    in memory  Trainer.fit, the loss of every step logged to an InMemoryLogger
    bar        Trainer.fit with the progress bar, written to a buffer

``--device cuda`` trains on a GPU. The table then also shows how often a step synchronizes with the device, and the
peak of the GPU memory; on a CPU the peak is that of the process. ``--where`` adds a table with the cost of the parts of
a step, each called separately. Other datasets, ``collate_fn`` and workers are variants of ``trainers.py``.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import resource
import statistics
import subprocess
import sys
import time
import timeit
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainers import count_synchronizations

if TYPE_CHECKING:
    from collections.abc import Callable

VARIANTS = ("loop", "trainer", "metric", "in memory", "bar")


def main() -> None:
    """Measure all variants in turns, or one of them in a child process."""
    arguments = parse_arguments()
    if arguments.child:
        print(json.dumps(measure(arguments.child, arguments.steps, arguments.device)))
        return
    measured: dict[str, list[dict[str, float]]] = {variant: [] for variant in ("loop", *arguments.variants)}
    for number in range(arguments.rounds):
        for variant, runs in measured.items():
            runs.append(run_in_subprocess(variant, arguments.steps, arguments.device))
        print(f"round {number + 1} of {arguments.rounds}", file=sys.stderr)
    result = report(measured)
    if arguments.where:
        result["where"] = cost_of_parts()
    if arguments.json:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps(result, indent=2))


def parse_arguments() -> argparse.Namespace:
    """Return the options of the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7, help="number of runs of each variant (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=3000, help="steps of a run (default: %(default)s)")
    parser.add_argument("--variants", nargs="*", default=VARIANTS, choices=VARIANTS, metavar="VARIANT")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu", help="default: %(default)s")
    parser.add_argument("--json", type=Path, help="file to write the figures to")
    parser.add_argument("--where", action="store_true", help="also measure the parts of a step, on the CPU")
    parser.add_argument("--child", choices=VARIANTS, help=argparse.SUPPRESS)
    return parser.parse_args()


def run_in_subprocess(variant: str, steps: int, device: str) -> dict[str, float]:
    """Return the figures of a variant, measured in a new process."""
    command = [sys.executable, __file__, "--child", variant, "--steps", str(steps), "--device", device]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=environment).stdout
    figures: dict[str, float] = json.loads(output.splitlines()[-1])
    return figures


def measure(variant: str, steps: int, device: str) -> dict[str, float]:
    """Return the microseconds and synchronizations of a step after a warm-up, and the peak memory in MiB."""
    import torch  # only in the child process

    torch.set_num_threads(1)
    run = plain_loop(steps, device) if variant == "loop" else with_trainer(variant, steps, device)
    run(steps // 10)
    synchronize = torch.cuda.synchronize if device == "cuda" else lambda: None
    synchronize()
    began = time.perf_counter()
    run(steps)
    synchronize()
    passed = time.perf_counter() - began
    if device == "cuda":
        peak = torch.cuda.max_memory_allocated() / 2**20
    else:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10
    # The difference of two runs leaves out what synchronizes once in a fit.
    few, many = (count_synchronizations(run, count) for count in (10, 30))
    return {"us": passed / steps * 1e6, "synchronizations": (many - few) / 20, "mib": peak}


def make_parts(steps: int, device: str) -> tuple[Any, Any]:
    """Return the network and a loader with enough batches for all runs."""
    import torch
    from torch.utils.data import DataLoader, TensorDataset

    torch.manual_seed(0)
    network = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10)).to(device)
    count = 8 * (2 * steps + 100)
    data = TensorDataset(torch.randn(count, 32), torch.randint(0, 10, (count,)))
    return network, DataLoader(data, batch_size=8, shuffle=True, pin_memory=device == "cuda")


def plain_loop(steps: int, device: str) -> Callable[[int], None]:
    """Return a function that runs a number of steps of a plain PyTorch loop."""
    import torch
    from torch.nn import functional

    model, loader = make_parts(steps, device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    batches = iter(loader)

    def run(count: int) -> None:
        for _ in range(count):
            inputs, targets = next(batches)
            if device == "cuda":
                inputs, targets = inputs.to(device, non_blocking=True), targets.to(device, non_blocking=True)
            optimizer.zero_grad()
            loss = functional.cross_entropy(model(inputs), targets)
            loss.backward()
            optimizer.step()

    return run


def with_trainer(variant: str, steps: int, device: str) -> Callable[[int], None]:
    """Return a function that runs a number of steps of ``Trainer.fit``."""
    import torch

    from composer import Trainer
    from composer.loggers import InMemoryLogger
    from composer.models import ComposerClassifier

    network, loader = make_parts(steps, device)
    model = ComposerClassifier(network, num_classes=10, train_metrics=None if variant == "metric" else [])
    trainer = Trainer(
        model=model,
        train_dataloader=loader,
        optimizers=torch.optim.SGD(model.parameters(), lr=0.01),
        loggers=[InMemoryLogger()] if variant == "in memory" else None,
        progress_bar=variant == "bar",
        console_stream=io.StringIO(),
        precision="fp32",
        device="gpu" if device == "cuda" else device,
        seed=0,
    )
    return lambda count: trainer.fit(duration=f"{count}ba")


def report(measured: dict[str, list[dict[str, float]]]) -> dict[str, Any]:
    """Print the table and return it as data."""
    rows = []
    header = f"{'variant':<12} {'µs a step':>10} {'above the loop':>15} {'spread':>16}"
    print(f"\n{header} {'syncs a step':>13} {'MiB above':>10}")
    for variant, runs in measured.items():
        # Differences are computed within a round, in which the load of the machine was similar.
        pairs = list(zip(runs, measured["loop"], strict=True))
        times = [run["us"] for run in runs]
        row = {
            "variant": variant,
            "us_per_step": statistics.median(times),
            "us_above_loop": statistics.median(run["us"] - loop["us"] for run, loop in pairs),
            "synchronizations": max(run["synchronizations"] for run in runs),
            "mib_above_loop": statistics.median(run["mib"] - loop["mib"] for run, loop in pairs),
            "all": times,
        }
        print(
            f"{variant:<12} {row['us_per_step']:>10.1f} {row['us_above_loop']:>15.1f} "
            f"{min(times):>8.1f}…{max(times):<7.1f} {row['synchronizations']:>13.2f} {row['mib_above_loop']:>10.1f}"
        )
        rows.append(row)
    return {"rows": rows}


def cost_of_parts() -> dict[str, float]:
    """Print and return the microseconds of the parts of a step, each called separately on the CPU."""
    import datetime

    import torch
    from torch.nn import functional

    from composer import Trainer
    from composer.core.data.batches import count_samples, count_tokens
    from composer.models import ComposerClassifier

    torch.set_num_threads(1)
    network, loader = make_parts(100, "cpu")
    model = ComposerClassifier(network, num_classes=10, train_metrics=[])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    trainer = Trainer(model=model, train_dataloader=loader, optimizers=optimizer, progress_bar=False, device="cpu")
    trainer.fit(duration="10ba")
    batch = next(iter(loader))
    inputs, targets = batch
    outputs = network(inputs)
    state, calls = trainer.state, trainer.engine.calls
    passed = datetime.timedelta(seconds=0.001)

    def run_events() -> None:
        for _ in range(13):
            for call in calls["batch_start"]:
                call()

    def difference(ours: Callable[[], object], plain: Callable[[], object]) -> float:
        return cost(ours) - cost(plain)

    parts = {
        "thirteen events without a registered component": cost(run_events),
        "the model's wrapper, forward": difference(lambda: model(batch), lambda: network(inputs)),
        "the model's wrapper, loss": difference(
            lambda: model.loss(outputs, batch), lambda: functional.cross_entropy(outputs, targets)
        ),
        "counting samples and tokens": cost(lambda: (count_samples(batch), count_tokens(batch))),
        "the clock": cost(lambda: state.timestamp.to_next_batch(8, 0, passed)),
    }
    print("\nparts of a step, µs")
    for name, microseconds in parts.items():
        print(f"{microseconds:>7.2f}  {name}")
    return parts


def cost(call: Callable[[], object], number: int = 2000) -> float:
    """Return the microseconds of one call, the minimum over several repetitions."""
    return min(timeit.repeat(call, number=number, repeat=7)) / number * 1e6


if __name__ == "__main__":
    main()
