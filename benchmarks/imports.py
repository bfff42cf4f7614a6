"""What importing costs beside ``import torch``: fresh processes, in turns, the median of the ratios."""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from pathlib import Path

MODULES = ("torch", "composer.functional", "composer.core", "composer")
PROGRAM = "import time; began = time.perf_counter(); import {}; print(time.perf_counter() - began)"


def seconds(module: str) -> float:
    """Return how long a fresh process takes to import a module."""
    command = [sys.executable, "-c", PROGRAM.format(module)]
    return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=9, help="how often each is imported (default: %(default)s)")
    parser.add_argument("--json", type=Path, help="where to write the figures")
    arguments = parser.parse_args()

    for module in MODULES:
        seconds(module)  # the first one also reads the files from the disk
    times: dict[str, list[float]] = {module: [] for module in MODULES}
    for _ in range(arguments.rounds):
        for module in MODULES:
            times[module].append(seconds(module))
    figures = {}
    for module, measured in times.items():
        ratio = statistics.median(one / base for one, base in zip(measured, times["torch"], strict=True))
        figures[module] = {"seconds": statistics.median(measured), "ratio": ratio}
        print(f"{module:<20} {figures[module]['seconds']:>6.2f} s  {ratio:>5.2f} x torch")
    if arguments.json:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps(figures, indent=2))


if __name__ == "__main__":
    main()
