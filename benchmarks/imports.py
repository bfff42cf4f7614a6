"""Compare the time of imports with ``import torch``: new processes, in turns, the median of the ratios."""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from pathlib import Path

STATEMENTS = (
    "import torch",
    "import composer.functional",
    "import composer.core",
    "import composer",
    "from composer import Trainer",
)
PROGRAM = "import time; began = time.perf_counter(); {}; print(time.perf_counter() - began)"


def seconds(statement: str) -> float:
    """Return the seconds of an import statement in a new process."""
    command = [sys.executable, "-c", PROGRAM.format(statement)]
    return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def main() -> None:
    """Measure and print the figures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=9, help="number of runs of each statement (default: %(default)s)")
    parser.add_argument("--json", type=Path, help="file to write the figures to")
    arguments = parser.parse_args()

    for statement in STATEMENTS:
        seconds(statement)  # the first run also reads the files from the disk
    times: dict[str, list[float]] = {statement: [] for statement in STATEMENTS}
    for _ in range(arguments.rounds):
        for statement in STATEMENTS:
            times[statement].append(seconds(statement))
    figures = {}
    for statement, measured in times.items():
        ratio = statistics.median(one / base for one, base in zip(measured, times["import torch"], strict=True))
        figures[statement] = {"seconds": statistics.median(measured), "ratio": ratio}
        print(f"{statement:<28} {figures[statement]['seconds']:>6.2f} s  {ratio:>5.2f} x")
    if arguments.json:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps(figures, indent=2))


if __name__ == "__main__":
    main()
