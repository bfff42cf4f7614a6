"""What each kernel costs beside the same work in the cheapest stock calls of torch, and beside a library that does it.

Every case has a reference, ours, and sometimes a library or ours with its draws made on the way. They run in turns in
one process with one thread; a figure is the median over the rounds of the ratio to the reference's time in the same
round. ``limit`` is what we hold ourselves to.

    python benchmarks/kernels.py                 all cases
    python benchmarks/kernels.py cutmix cutout   those whose names begin so
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
    """Measure the chosen cases and print a table."""
    arguments = parse_arguments()
    torch.set_num_threads(1)
    chosen = [case for case in CASES if not arguments.names or case.name.startswith(tuple(arguments.names))]
    if not chosen:
        sys.exit(f"There is no such case. Choose of: {', '.join(case.name for case in CASES)}.")
    print(f"{'case':<52}{'reference':>12}{'ratio':>8}{'limit':>7}   variant")
    figures = []
    for case in chosen:
        figures += measure(case, arguments.rounds, arguments.block)
    if arguments.json:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps(figures, indent=2))


def parse_arguments() -> argparse.Namespace:
    """Return the command line's options."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", help="beginnings of the cases' names (default: all)")
    parser.add_argument("--rounds", type=int, default=9, help="how often each variant runs (default: %(default)s)")
    parser.add_argument("--block", type=float, default=0.1, help="seconds of a round at least (default: %(default)s)")
    parser.add_argument("--json", type=Path, help="where to write the figures")
    return parser.parse_args()


def measure(case: Case, rounds: int, block: float) -> list[dict[str, object]]:
    """Return for each variant the ratio of its time to the reference's, and print it."""
    torch.manual_seed(0)
    reference, *variants = case.variants()
    calls = {call: how_often(call, block) for _, call in (reference, *variants)}
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


def how_often(call: Callable[[], object], block: float) -> int:
    """Warm up, and return how many calls make a block of time."""
    call()
    began = time.perf_counter()
    call()
    return max(1, round(block / (time.perf_counter() - began)))


def seconds(call: Callable[[], object], times: int) -> float:
    """Return what a call takes."""
    began = time.perf_counter()
    for _ in range(times):
        call()
    return (time.perf_counter() - began) / times


if __name__ == "__main__":
    main()
