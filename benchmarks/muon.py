"""Compare a step of ``composer.optim.Muon`` with one of ``torch.optim.Muon``: both in turns, the median of the ratios.

The weights are the matrices of the layers of a transformer: four of width x width, one of 4 width x width and one of
width x 4 width in each. torch orthogonalizes one matrix after the other. Before anything is measured, the weights after
a step of both are compared: bit for bit on a CPU, and within roundings of 16 bits on a GPU and on a CPU without
AVX-512, where ``composer.optim.Muon`` computes in float32.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path

import torch
from torch import nn

from composer.functional.training.orthogonalization import product_dtype
from composer.optim import Muon


def make_weights(layers: int, width: int, device: str) -> list[nn.Parameter]:
    """Return the matrices of a transformer with gradients."""
    torch.manual_seed(0)
    shapes = [*[(width, width)] * 4, (4 * width, width), (width, 4 * width)] * layers
    weights = [nn.Parameter(torch.randn(shape, device=device)) for shape in shapes]
    for weight in weights:
        weight.grad = torch.randn_like(weight)
    return weights


def seconds(optimizer: torch.optim.Optimizer, device: str) -> float:
    """Return the processor time of a step on a CPU, or its elapsed time on a GPU."""
    clock = time.process_time if device == "cpu" else time.perf_counter
    if device == "cuda":
        torch.cuda.synchronize()
    began = clock()
    optimizer.step()
    if device == "cuda":
        torch.cuda.synchronize()
    return clock() - began


def compare(layers: int, width: int, device: str, rounds: int) -> dict[str, float]:
    """Return the median seconds of both, and the median and quartiles of their ratios."""
    ours, theirs = (make_weights(layers, width, device) for _ in range(2))
    optimizers = {
        "composer": Muon(ours, lr=0.02, adjust_lr_fn="original"),
        "torch": torch.optim.Muon(theirs, lr=0.02),
    }
    for optimizer in optimizers.values():
        optimizer.step()
    tolerance = 0.0 if device == "cpu" and product_dtype(torch.device(device)) is torch.bfloat16 else 1e-3
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=tolerance)
    times: dict[str, list[float]] = {name: [] for name in optimizers}
    for number in range(rounds):
        for name in sorted(optimizers, reverse=bool(number % 2)):
            times[name].append(seconds(optimizers[name], device))
    low, middle, high = statistics.quantiles(
        one / other for one, other in zip(times["composer"], times["torch"], strict=True)
    )
    return {name: statistics.median(each) for name, each in times.items()} | {"ratio": middle, "low": low, "high": high}


def main() -> None:
    """Measure and print the figures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=12, help="number of layers (default: %(default)s)")
    parser.add_argument("--width", type=int, default=512, help="width of the layers (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=9, help="steps of each optimizer (default: %(default)s)")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--json", type=Path, help="file to write the figures to")
    arguments = parser.parse_args()
    if not hasattr(torch.optim, "Muon"):
        parser.error(f"torch.optim.Muon is in torch 2.9 and later, this is {torch.__version__}.")

    figures = compare(arguments.layers, arguments.width, arguments.device, arguments.rounds)
    for name in ("composer", "torch"):
        print(f"{name:<9} {figures[name] * 1e3:>9.1f} ms")
    print(f"ratio     {figures['ratio']:>9.3f}    quartiles {figures['low']:.3f} to {figures['high']:.3f}")
    if arguments.json:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps(figures, indent=2))


if __name__ == "__main__":
    main()
