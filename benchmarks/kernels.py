"""Compare each kernel with the same work in the cheapest calls of torch, and with other libraries.

A case has a reference, the kernel, and sometimes another library or the kernel including its random draws. The variants
run in turns in one process with one thread. A figure is the median over the rounds of the ratio to the time of the
reference in the same round: of processor time on the CPU, where other programs may be running. ``limit`` is the target
for the kernel. Before the cases with a ``tolerance`` are timed, the results of all variants are compared.

    python benchmarks/kernels.py                 all cases
    python benchmarks/kernels.py cutmix cutout   the cases whose names start with these
    python benchmarks/kernels.py --device cuda   the cases that run on a GPU, with the device synchronized around calls
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from _kernel_cases import CASES

if TYPE_CHECKING:
    from collections.abc import Callable

    from _kernel_cases import Case


def main() -> None:
    """Measure the selected cases and print a table."""
    arguments = parse_arguments()
    torch.set_num_threads(1)
    cases = [case for case in CASES if case.runs_on_gpu or arguments.device == "cpu"]
    selected = [case for case in cases if not arguments.names or case.name.startswith(tuple(arguments.names))]
    if not selected:
        sys.exit(
            f"No case starts with {' or '.join(arguments.names)}. Cases: {', '.join(case.name for case in cases)}."
        )
    print(f"{'case':<52}{'reference':>12}{'ratio':>8}{'limit':>7}   variant")
    figures = []
    for case in selected:
        figures += measure(case, arguments.rounds, arguments.block, arguments.device)
    if arguments.json:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps(figures, indent=2))


def parse_arguments() -> argparse.Namespace:
    """Return the options of the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", help="starts of the cases' names (default: all)")
    parser.add_argument("--rounds", type=int, default=9, help="number of runs of each variant (default: %(default)s)")
    parser.add_argument("--block", type=float, default=0.1, help="minimum seconds of a round (default: %(default)s)")
    parser.add_argument("--json", type=Path, help="file to write the figures to")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu", help="default: %(default)s")
    return parser.parse_args()


def measure(case: Case, rounds: int, block: float, device: str) -> list[dict[str, object]]:
    """Print and return the ratio of the time of each variant to that of the reference."""
    torch.manual_seed(0)
    with torch.device(device):  # the tensors and models of the case
        reference, *variants = case.variants()
    expected = reference[1]()
    calls = {}
    for _, call in (reference, *variants):
        output = call()  # the warm-up
        if case.tolerance is not None:
            torch.testing.assert_close(output, expected, atol=case.tolerance, rtol=0)
        calls[call] = max(1, round(block / seconds(call, 1)))
    times: dict[str, list[float]] = {name: [] for name, _ in (reference, *variants)}
    for _ in range(rounds):
        for name, call in (reference, *variants):
            times[name].append(seconds(call, calls[call]))
    base = times[reference[0]]
    figures: list[dict[str, object]] = []
    for number, (name, _) in enumerate(variants):
        ratio = statistics.median(own / other for own, other in zip(times[name], base, strict=True))
        limit = case.limit if number == 0 else None
        shown = f"{limit:>7.2f}" if limit else f"{'-':>7}"
        microseconds = statistics.median(base) * 1e6
        print(f"{case.name:<52}{microseconds:>9.0f} µs{ratio:>8.2f}{shown}   {name}", flush=True)
        figures.append(
            {"case": case.name, "reference": reference[0], "reference_us": microseconds, "variant": name}
            | {"ratio": ratio, "limit": limit}
        )
    return figures


def seconds(call: Callable[[], object], times: int) -> float:
    """Return the seconds of one of several calls: processor time, or with a GPU the time until it has finished."""
    is_cuda = torch.cuda.is_initialized()
    synchronize = torch.cuda.synchronize if is_cuda else lambda: None
    clock = time.perf_counter if is_cuda else time.process_time
    synchronize()
    began = clock()
    for _ in range(times):
        call()
    synchronize()
    return (clock() - began) / times


if __name__ == "__main__":
    main()
