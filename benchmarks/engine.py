"""Measure algorithms in an engine, compared with direct calls of the kernels and with MosaicML Composer 0.32.1.

    event      one event without a registered component, with 25 algorithms and 25 callbacks at other events
    match all  one event with an algorithm whose ``match`` returns True and whose ``apply`` is empty
    kernels    a step of a tiny MLP (32 → 64 → 10, batches of 8, SGD) with six kernels called in the loop:
               CutOut, MixUp, LabelSmoothing, GradientClipping, EMA; ChannelsLast before it
    engine     the same step with the events of a loop and the six algorithms in an engine

The variants run in turns, each in a new process; the table shows medians over the rounds. ``--composer PYTHON`` is the
Python of an environment with MosaicML Composer (which needs torch 2.7). It runs the same program in turns with this
library, because the names are the same.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import statistics
import subprocess
import sys
import time
import timeit
import warnings
from pathlib import Path
from typing import Any

VARIANTS = ("event", "match all", "kernels", "engine")
STEPS = 2000


def main() -> None:
    """Measure all variants in turns, or one of them in a child process."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7, help="number of runs of each variant (default: %(default)s)")
    parser.add_argument("--composer", help="the Python of an environment with MosaicML Composer")
    parser.add_argument("--json", type=Path, help="file to write the figures to")
    parser.add_argument("--child", choices=VARIANTS, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        print(json.dumps(measure(arguments.child)))
        return
    pythons = {"ours": sys.executable} | ({"Composer": arguments.composer} if arguments.composer else {})
    times: dict[str, dict[str, list[float]]] = {who: {variant: [] for variant in VARIANTS} for who in pythons}
    for number in range(arguments.rounds):
        for variant in VARIANTS:
            for who, python in pythons.items():
                times[who][variant].append(run_in_subprocess(python, variant))
        print(f"round {number + 1} of {arguments.rounds}", file=sys.stderr)
    figures = {who: {name: statistics.median(each) for name, each in rounds.items()} for who, rounds in times.items()}
    report(figures)
    if arguments.json:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps(figures, indent=2))


def report(figures: dict[str, dict[str, float]]) -> None:
    """Print microseconds, and the ratio of the engine to the kernels."""
    print(f"{'µs':<12}" + "".join(f"{who:>12}" for who in figures))
    for variant in VARIANTS:
        print(f"{variant:<12}" + "".join(f"{each[variant]:>12.2f}" for each in figures.values()))
    ratios = [each["engine"] / each["kernels"] for each in figures.values()]
    print(f"{'engine / kernels':<12}" + "".join(f"{ratio:>12.2f}" for ratio in ratios)[4:])


def run_in_subprocess(python: str, variant: str) -> float:
    """Return the microseconds of a variant, measured in a new process."""
    command = [python, "-W", "ignore", __file__, "--child", variant]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    output = subprocess.run(command, check=True, capture_output=True, text=True, env=environment).stdout
    return float(json.loads(output.splitlines()[-1]))


def measure(variant: str) -> float:
    """Return the microseconds of an event, or of a step after a warm-up."""
    import torch

    torch.set_num_threads(1)
    torch.manual_seed(0)
    warnings.simplefilter("ignore")
    if variant in {"event", "match all"}:
        engine, event = crowded_engine(overrides_match=variant == "match all")
        run = engine.run_event
        run(event)
        return min(timeit.repeat(lambda: run(event), number=5000, repeat=7)) / 5000 * 1e6
    batches = [(torch.randn(8, 1, 4, 8), torch.randint(10, (8,))) for _ in range(STEPS // 10)]
    run_steps = with_kernels if variant == "kernels" else with_engine
    began = 0.0
    for step in run_steps(batches, STEPS + STEPS // 10):
        if step == STEPS // 10:
            began = time.perf_counter()
    return (time.perf_counter() - began) / STEPS * 1e6


def make_state(model: Any, **parts: Any) -> Any:
    """Return a state; Composer's needs a name, a seed and its own device class."""
    from composer.core import State

    try:
        from composer.devices import DeviceCPU
    except ImportError:
        return State(model=model, max_duration="10ep", **parts)
    parts |= {"dataloader": [], "dataloader_label": "train", "dataloader_len": 1000, "device": DeviceCPU()}
    return State(model=model, max_duration="10ep", rank_zero_seed=0, run_name="run", **parts)


def make_engine(state: Any) -> Any:
    """Return an engine without loggers."""
    from composer.core import Engine
    from composer.loggers import Logger

    return Engine(state, Logger(state))


def crowded_engine(*, overrides_match: bool) -> tuple[Any, Any]:
    """Return an event, and an engine with 50 components at other events or one algorithm that overrides ``match``."""
    import torch

    from composer.core import Algorithm, Callback, Event

    class Elsewhere(Algorithm):
        def match(self, event: Any, state: Any) -> bool:
            return event == Event.FIT_START

        def apply(self, event: Any, state: Any, logger: Any) -> None:
            pass

    if hasattr(Algorithm, "runs_at"):
        from composer.core import Stage

        Elsewhere.runs_at = {Event.FIT_START: Stage.ARCHITECTURE}
        del Elsewhere.match
        Elsewhere.__abstractmethods__ = frozenset()

    class Everywhere(Algorithm):
        def match(self, event: Any, state: Any) -> bool:
            return True

        def apply(self, event: Any, state: Any, logger: Any) -> None:
            pass

    class AtEpochs(Callback):
        def epoch_end(self, state: Any, logger: Any) -> None:
            pass

    algorithms = [Everywhere()] if overrides_match else [Elsewhere() for _ in range(25)]
    callbacks = [] if overrides_match else [AtEpochs() for _ in range(25)]
    state = make_state(torch.nn.Linear(2, 2), algorithms=algorithms, callbacks=callbacks)
    return make_engine(state), Event.BATCH_START


def make_model() -> Any:
    """Return the MLP, with a loss for class probabilities."""
    import torch

    from composer.loss import soft_cross_entropy

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = torch.nn.Sequential(
                torch.nn.Flatten(), torch.nn.Linear(32, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10)
            )

        def forward(self, batch: Any) -> Any:
            return self.layers(batch[0])

        def loss(self, outputs: Any, batch: Any) -> Any:
            return soft_cross_entropy(outputs, batch[1])

    return Model()


def with_kernels(batches: list[Any], steps: int) -> Any:
    """Yield before each step of the loop with six kernels in it."""
    import torch

    from composer import functional as cf
    from composer.loss import soft_cross_entropy
    from composer.loss.utils import ensure_targets_one_hot

    model = make_model()
    layers = model.layers
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    cf.apply_channels_last(model)
    average = copy.deepcopy(model)
    for step in range(steps):
        yield step
        images, labels = batches[step % len(batches)]
        images = cf.cutout_batch(images, 1, 0.5)
        optimizer.zero_grad()
        images, partners, mixing = cf.mixup_batch(images, labels, alpha=0.2)
        outputs = layers(images)
        own, others = ensure_targets_one_hot(outputs, labels), ensure_targets_one_hot(outputs, partners)
        targets = cf.smooth_labels(outputs, torch.lerp(own.float(), others.float(), mixing), 0.1)
        loss = soft_cross_entropy(outputs, targets)
        loss.backward()
        cf.apply_gradient_clipping(model, "norm", 1.0, fsdp_enabled=False)
        optimizer.step()
        cf.compute_ema(model, average, 0.99)


def with_engine(batches: list[Any], steps: int) -> Any:
    """Yield before each step of the loop with an engine's events in it."""
    import torch

    from composer import algorithms as al
    from composer.core import Event

    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    algorithms = [
        al.MixUp(),
        al.LabelSmoothing(),
        al.EMA(half_life="100ba"),
        al.CutOut(),
        al.ChannelsLast(),
        al.GradientClipping("norm", 1.0),
    ]
    state = make_state(model, optimizers=optimizer, algorithms=algorithms)
    event = make_engine(state).run_event
    for once in (Event.INIT, Event.BEFORE_LOAD, Event.AFTER_LOAD, Event.FIT_START, Event.EPOCH_START):
        event(once)
    for step in range(steps):
        yield step
        event(Event.BEFORE_DATALOADER)
        state.batch = batches[step % len(batches)]
        event(Event.AFTER_DATALOADER)
        event(Event.BATCH_START)
        event(Event.BEFORE_TRAIN_BATCH)
        optimizer.zero_grad()
        event(Event.BEFORE_FORWARD)
        state.outputs = model(state.batch)
        event(Event.AFTER_FORWARD)
        event(Event.BEFORE_LOSS)
        state.loss = model.loss(state.outputs, state.batch)
        event(Event.AFTER_LOSS)
        event(Event.BEFORE_BACKWARD)
        state.loss.backward()
        event(Event.AFTER_BACKWARD)
        event(Event.AFTER_TRAIN_BATCH)
        optimizer.step()
        state.timestamp = state.timestamp.to_next_batch(8)
        event(Event.BATCH_END)
        event(Event.BATCH_CHECKPOINT)


if __name__ == "__main__":
    main()
