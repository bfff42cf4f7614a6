"""Compare the cross entropy of a language model's head in chunks with that of all logits: peak memory and time.

A call computes the loss and its gradients by the inputs of the head and by its weight, from random numbers. The peak is
that above the inputs, in a new process for each variant: of the resident memory on the CPU, of the allocated memory on
a GPU. The variants then run in turns in one process with one thread; a figure is the median over the rounds of the
ratio to the time of all logits in the same round: of processor time on the CPU, where other programs may be running.

    python benchmarks/losses.py
    python benchmarks/losses.py --device cuda --tokens 8192 --width 4096 --dtype bfloat16
"""

from __future__ import annotations

import argparse
import importlib
import resource
import statistics
import subprocess
import sys
import time
from typing import TYPE_CHECKING

import torch
from torch.nn import functional

from composer import functional as cf

if TYPE_CHECKING:
    from torch import Tensor

Loss = "Callable[[Tensor, Tensor, Tensor], Tensor]"
PEAK_LIMIT, TIME_LIMIT = 0.15, 1.25


def main() -> None:
    """Measure each variant and print a table."""
    options = parse_arguments()
    torch.set_num_threads(1)
    if options.child:
        print(measure_peak(variants(options.chunk_sizes)[options.child], options))
        return
    print(
        f"{options.tokens} tokens, {options.classes} classes, width {options.width}, {options.dtype}, {options.device}"
    )
    print(f"{'':<24}{'peak, MiB':>12}{'ratio':>8}{'seconds':>10}{'ratio':>8}")
    peaks = {name: run_child(name) for name in variants(options.chunk_sizes)}
    times = measure_times(options)
    for name in variants(options.chunk_sizes):
        of_time = statistics.median(one / first for one, first in zip(times[name], times["all logits"], strict=True))
        of_peak = peaks[name] / peaks["all logits"]
        print(f"{name:<24}{peaks[name]:>12.0f}{of_peak:>8.3f}{statistics.median(times[name]):>10.3f}{of_time:>8.2f}")
    print(f"limits of the chunks: {PEAK_LIMIT} of the peak, {TIME_LIMIT} of the time")


def parse_arguments() -> argparse.Namespace:
    """Return the options of the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=2048, help="default: %(default)s")
    parser.add_argument("--classes", type=int, default=128_000, help="default: %(default)s")
    parser.add_argument("--width", type=int, default=512, help="default: %(default)s")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32", help="default: %(default)s")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu", help="default: %(default)s")
    parser.add_argument("--chunk-sizes", type=int, nargs="*", default=[], help="other sizes of chunks to measure")
    parser.add_argument("--rounds", type=int, default=3, help="number of runs of each variant (default: %(default)s)")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    return parser.parse_args()


def variants(chunk_sizes: list[int], backend: str | None = None) -> dict[str, Loss]:
    """Return the losses by name, one of them compiled if there is a backend for it."""
    chosen: dict[str, Loss] = {
        "all logits": lambda hidden, weight, ids: functional.cross_entropy(hidden @ weight.T, ids)
    }
    chosen["chunks"] = cf.linear_cross_entropy
    for size in chunk_sizes:
        chosen[f"chunks of {size}"] = lambda *tensors, size=size: cf.linear_cross_entropy(*tensors, chunk_size=size)
    if backend is not None:
        chosen["chunks, compiled"] = with_compiled_chunks(backend)
    chosen["chunks, each loss"] = lambda *tensors: cf.linear_cross_entropy(*tensors, reduction="none").mean()
    if hasattr(functional, "linear_cross_entropy"):
        chosen["torch's chunks"] = lambda *tensors: functional.linear_cross_entropy(
            *tensors, options=torch.nn.LinearCrossEntropyOptions()
        )
    return chosen


def with_compiled_chunks(backend: str) -> Loss:
    """Return the loss in chunks, of which the operations between the matrix products are compiled."""
    module = importlib.import_module("composer.functional.linear_cross_entropy")
    plain = module._losses_of
    compiled = torch.compile(plain, backend=backend)

    def loss(*tensors: Tensor) -> Tensor:
        module._losses_of = compiled
        try:
            return cf.linear_cross_entropy(*tensors)
        finally:
            module._losses_of = plain

    return loss


def make_tensors(options: argparse.Namespace) -> tuple[Tensor, Tensor, Tensor]:
    """Return inputs, weight and class ids."""
    torch.manual_seed(0)
    kind = {"dtype": getattr(torch, options.dtype), "device": options.device}
    hidden, weight = (
        torch.empty(options.tokens, options.width, **kind),
        torch.empty(options.classes, options.width, **kind),
    )
    ids = torch.randint(options.classes, (options.tokens,), device=options.device)
    return hidden.normal_().requires_grad_(), weight.normal_(std=0.02).requires_grad_(), ids


def run(loss: Loss, tensors: tuple[Tensor, Tensor, Tensor]) -> None:
    """Compute loss and gradients."""
    hidden, weight, _ = tensors
    hidden.grad = weight.grad = None
    loss(*tensors).backward()


def run_child(name: str) -> float:
    """Return the peak of a variant in MiB, from a new process."""
    done = subprocess.run([*sys.orig_argv, "--child", name], check=True, capture_output=True, text=True)
    return float(done.stdout)


def measure_peak(loss: Loss, options: argparse.Namespace) -> float:
    """Return the memory of a call above that of its inputs, in MiB."""
    few = argparse.Namespace(**{**vars(options), "tokens": 2, "classes": 8})
    run(loss, make_tensors(few))  # loads what the first call loads
    tensors = make_tensors(options)
    if options.device == "cuda":
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        run(loss, tensors)
        return (torch.cuda.max_memory_allocated() - before) / 2**20
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    run(loss, tensors)
    return (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 2**10


def measure_times(options: argparse.Namespace) -> dict[str, list[float]]:
    """Return the seconds of each variant in each round."""
    tensors = make_tensors(options)
    times: dict[str, list[float]] = {name: [] for name in variants(options.chunk_sizes)}
    clock = time.process_time if options.device == "cpu" else time.perf_counter
    for is_first in [True] + [False] * options.rounds:
        for name, loss in variants(options.chunk_sizes).items():
            if options.device == "cuda":
                torch.cuda.synchronize()
            start = clock()
            run(loss, tensors)
            if options.device == "cuda":
                torch.cuda.synchronize()
            if not is_first:
                times[name].append(clock() - start)
    return times


if __name__ == "__main__":
    main()
