"""What a step of the trainer costs above the same step in a loop written by hand.

A tiny MLP (32 → 64 → 10, batches of 8, SGD, one thread), so that nothing hides behind the model's own work. Every
variant runs in fresh processes, in turns, and the table shows the median over the rounds:

    loop       the loop written by hand
    trainer    Trainer.fit with its default loggers, without a progress bar and without a training metric
    metric     the same with the default training metric of ComposerClassifier
    in memory  Trainer.fit, every step's loss logged to an InMemoryLogger
    bar        Trainer.fit with the progress bar, drawn into a file

These train on tensors, which a DataLoader shuffles. Each of the following runs the loop and the trainer with a shuffled
DataLoader of a dataset with ``__getitem__``:

    dataset, dataset 128    the default collate_fn, batches of 8 and of 128
    collate, collate 128    a collate_fn of the user's
    workers                 two worker processes, batches of 8

With ``--where`` a last table says where the time goes: the parts of a step, each called by itself.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
import timeit
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

LOADERS: dict[str, dict[str, Any]] = {
    "dataset": {"batch_size": 8},
    "dataset 128": {"batch_size": 128},
    "collate": {"batch_size": 8, "collate": True},
    "collate 128": {"batch_size": 128, "collate": True},
    "workers": {"batch_size": 8, "num_workers": 2},
}
WITH_LOADERS = [f"{who}, {loader}" for loader in LOADERS for who in ("loop", "trainer")]
VARIANTS = ("loop", "trainer", "metric", "in memory", "bar", *WITH_LOADERS)


def main() -> None:
    """Measure all variants in turns, or, as a child, one."""
    arguments = parse_arguments()
    if arguments.child:
        print(json.dumps(measure(arguments.child, arguments.steps)))
        return
    times: dict[str, list[float]] = {variant: [] for variant in arguments.variants}
    for number in range(arguments.rounds):
        for variant in arguments.variants:
            times[variant].append(in_fresh_process(variant, arguments.steps))
        print(f"round {number + 1} of {arguments.rounds}", file=sys.stderr)
    result = report(times)
    if arguments.where:
        result["where"] = where_the_time_goes()
    if arguments.json:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps(result, indent=2))


def parse_arguments() -> argparse.Namespace:
    """Return the command line's options."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7, help="how often each variant runs (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=3000, help="steps of a run (default: %(default)s)")
    parser.add_argument("--variants", nargs="*", default=VARIANTS, choices=VARIANTS, metavar="VARIANT")
    parser.add_argument("--json", type=Path, help="where to write the figures")
    parser.add_argument("--where", action="store_true", help="also show what the parts of a step cost")
    parser.add_argument("--child", choices=VARIANTS, help=argparse.SUPPRESS)
    return parser.parse_args()


def in_fresh_process(variant: str, steps: int) -> float:
    """Return the microseconds a step takes in a process of its own."""
    command = [sys.executable, __file__, "--child", variant, "--steps", str(steps)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    output = subprocess.run(command, check=True, capture_output=True, text=True, env=environment).stdout
    return float(json.loads(output.splitlines()[-1]))


def measure(variant: str, steps: int) -> float:
    """Return the microseconds that one of ``steps`` steps takes, after a warm-up."""
    import torch  # in the child only

    torch.set_num_threads(1)
    who, _, loader = variant.partition(", ")
    run = hand_written(steps, loader) if who == "loop" else with_trainer(who, steps, loader)
    run(steps // 10)
    began = time.perf_counter()
    run(steps)
    return (time.perf_counter() - began) / steps * 1e6


def make_parts(steps: int, name: str = "") -> tuple[Any, Any]:
    """Return the network and a loader with more than enough batches: of tensors, or the one of that name."""
    import torch
    from torch.utils.data import DataLoader, Dataset, TensorDataset

    torch.manual_seed(0)
    network = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10))
    options = LOADERS.get(name, {"batch_size": 8})
    count = options["batch_size"] * 2 * steps
    if not name:
        data = TensorDataset(torch.randn(count, 32), torch.randint(0, 10, (count,)))
        return network, DataLoader(data, batch_size=8, shuffle=True)

    class Samples(Dataset[Any]):
        def __init__(self) -> None:
            self.some = [(torch.randn(32), number % 10) for number in range(256)]

        def __len__(self) -> int:
            return count  # type: ignore[no-any-return]

        def __getitem__(self, index: int) -> Any:
            return self.some[index % 256]

    def collate(samples: list[Any]) -> Any:
        return torch.stack([inputs for inputs, _ in samples]), torch.tensor([target for _, target in samples])

    return network, DataLoader(
        Samples(),
        batch_size=options["batch_size"],
        shuffle=True,
        num_workers=options.get("num_workers", 0),
        collate_fn=collate if options.get("collate") else None,
    )


def hand_written(steps: int, name: str = "") -> Callable[[int], None]:
    """Return a function that runs so many steps of the loop that anybody would write."""
    import torch
    from torch.nn import functional

    model, loader = make_parts(steps, name)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    batches = iter(loader)

    def run(count: int) -> None:
        for _ in range(count):
            inputs, targets = next(batches)
            optimizer.zero_grad()
            loss = functional.cross_entropy(model(inputs), targets)
            loss.backward()
            optimizer.step()

    return run


def with_trainer(variant: str, steps: int, name: str = "") -> Callable[[int], None]:
    """Return a function that runs so many steps of ``Trainer.fit``."""
    import torch

    from composer import Trainer
    from composer.loggers import InMemoryLogger
    from composer.models import ComposerClassifier

    network, loader = make_parts(steps, name)
    model = ComposerClassifier(network, num_classes=10, train_metrics=None if variant == "metric" else [])
    trainer = Trainer(
        model=model,
        train_dataloader=loader,
        optimizers=torch.optim.SGD(model.parameters(), lr=0.01),
        loggers=[InMemoryLogger()] if variant == "in memory" else None,
        progress_bar=variant == "bar",
        device="cpu",
        seed=0,
    )
    return lambda count: trainer.fit(duration=f"{count}ba")


def report(times: dict[str, list[float]]) -> dict[str, Any]:
    """Print the table and return it as data."""
    rows = []
    print(f"\n{'variant':<20} {'µs a step':>10} {'above the loop':>15} {'spread':>16}")
    for variant, measured in times.items():
        median = statistics.median(measured)
        # The difference is taken within a round, where the machine was about as busy for both.
        loop = times[variant.replace(variant.partition(", ")[0], "loop")]
        above = statistics.median(one - base for one, base in zip(measured, loop, strict=True))
        print(f"{variant:<20} {median:>10.1f} {above:>15.1f} {min(measured):>7.1f}…{max(measured):.1f}")
        rows.append({"variant": variant, "us_per_step": median, "us_above_loop": above, "all": measured})
    return {"rows": rows}


def where_the_time_goes() -> dict[str, float]:
    """Print what the parts of a step cost when called by themselves, in microseconds, and return them."""
    import datetime

    import torch
    from torch.nn import functional

    from composer import Trainer
    from composer.core.data_spec import count_samples, count_tokens
    from composer.models import ComposerClassifier
    from composer.trainer.microbatching import scaled_losses

    torch.set_num_threads(1)
    network, loader = make_parts(100)
    model = ComposerClassifier(network, num_classes=10, train_metrics=[])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    trainer = Trainer(model=model, train_dataloader=loader, optimizers=optimizer, progress_bar=False, device="cpu")
    trainer.fit(duration="10ba")
    batch = next(iter(loader))
    inputs, targets = batch
    outputs = network(inputs)
    loss = functional.cross_entropy(outputs, targets)
    state, run_event = trainer.state, trainer.engine.run_event
    passed = datetime.timedelta(seconds=0.001)

    def difference(ours: Callable[[], object], plain: Callable[[], object]) -> float:
        return cost(ours) - cost(plain)

    parts = {
        "thirteen events that nobody listens to": 13 * cost(lambda: run_event("batch_start")),
        "the model's wrapper, forward": difference(lambda: model(batch), lambda: network(inputs)),
        "the model's wrapper, loss": difference(
            lambda: model.loss(outputs, batch), lambda: functional.cross_entropy(outputs, targets)
        ),
        "counting samples and tokens": cost(lambda: (count_samples(batch), count_tokens(batch))),
        "the clock": cost(lambda: state.timestamp.to_next_batch(8, 0, passed)),
        "keeping the loss for loggers": cost(lambda: scaled_losses(loss, 1.0)),
    }
    print("\nwhere the time goes, µs a step")
    for name, microseconds in parts.items():
        print(f"{microseconds:>7.2f}  {name}")
    return parts


def cost(call: Callable[[], object], number: int = 2000) -> float:
    """Return the microseconds of one call, the best of several tries."""
    return min(timeit.repeat(call, number=number, repeat=7)) / number * 1e6


if __name__ == "__main__":
    main()
