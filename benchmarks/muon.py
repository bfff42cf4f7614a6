"""Compare a step of ``composer.optim.Muon`` with one of ``torch.optim.Muon``: both in turns, the median of the ratios.

The weights are the matrices of the layers of a transformer: four of width x width, one of 4 width x width and one of
width x 4 width in each. torch orthogonalizes one matrix after the other. Before anything is measured, the weights after
a step of both are compared: bit for bit on a CPU, and within roundings of 16 bits on a GPU and on a CPU without
AVX-512, where ``composer.optim.Muon`` computes in float32.

With ``--processes 2``, steps with ``divide_work=True`` are compared with undivided ones in so many processes with gloo,
after their weights, bit for bit. The times are those of the processor, of the process that needs most: elapsed times
would show nothing on a machine with fewer cores than processes.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing
from torch import nn

from composer.functional.training.orthogonalization import product_dtype
from composer.optim import Muon, muon


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


def compare_divided(rank: int, processes: int, folder: Path, layers: int, width: int, rounds: int) -> None:
    """Write the seconds of undivided and divided steps of a process to a file, and the matrices it orthogonalizes."""
    torch.set_num_threads(1)
    store = f"file://{folder / 'store'}"
    torch.distributed.init_process_group("gloo", init_method=store, rank=rank, world_size=processes)
    weights = {name: make_weights(layers, width, "cpu") for name in ("undivided", "divided")}
    optimizers = {name: Muon(each, lr=0.02, divide_work=name == "divided") for name, each in weights.items()}
    counts = dict.fromkeys(optimizers, 0)
    orthogonalize = muon.orthogonalize
    for name, optimizer in optimizers.items():

        def counted(matrices: torch.Tensor, *settings: Any, name: str = name) -> torch.Tensor:
            counts[name] += len(matrices)
            return orthogonalize(matrices, *settings)

        muon.orthogonalize = counted  # type: ignore[attr-defined]
        optimizer.step()
    muon.orthogonalize = orthogonalize  # type: ignore[attr-defined]
    assert all(map(torch.equal, *weights.values()))
    times: dict[str, list[float]] = {name: [] for name in optimizers}
    for number in range(rounds):
        for name in sorted(optimizers, reverse=bool(number % 2)):
            torch.distributed.barrier()
            times[name].append(seconds(optimizers[name], "cpu"))
    medians = {name: statistics.median(each) for name, each in times.items()}
    (folder / f"{rank}.json").write_text(json.dumps({"seconds": medians, "matrices": counts}))
    torch.distributed.destroy_process_group()


def in_processes(processes: int, layers: int, width: int, rounds: int) -> dict[str, dict[str, float]]:
    """Return the seconds and the matrices of undivided and divided steps, of the process that needs most."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        torch.multiprocessing.spawn(compare_divided, (processes, folder, layers, width, rounds), processes)
        found = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(processes)]
    return {what: {kind: max(one[what][kind] for one in found) for kind in found[0][what]} for what in found[0]}


def main() -> None:
    """Measure and print the figures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=12, help="number of layers (default: %(default)s)")
    parser.add_argument("--width", type=int, default=512, help="width of the layers (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=9, help="steps of each optimizer (default: %(default)s)")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--processes", type=int, default=1, help="compare divided work in several processes on CPUs")
    parser.add_argument("--json", type=Path, help="file to write the figures to")
    arguments = parser.parse_args()
    if arguments.processes > 1:
        divided = in_processes(arguments.processes, arguments.layers, arguments.width, arguments.rounds)
        for kind in ("undivided", "divided"):
            print(f"{kind:<9} {divided['seconds'][kind] * 1e3:>9.1f} ms {divided['matrices'][kind]:>6} matrices")
        return
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
