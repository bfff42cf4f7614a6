"""``python -m composer.ablation``: run a study from the command line, and show its results."""

from __future__ import annotations

import argparse
import os
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from composer.ablation.experiment import ablate
from composer.ablation.runs import RUN_VARIABLE
from composer.ablation.study import Study
from composer.core.checks import printable

_SETTINGS = ("metric", "mode", "arms", "seeds", "folder", "processes", "target", "clock", "held_out")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return the exit code: 0; 1 if it failed; 2 for wrong arguments."""
    parser = argparse.ArgumentParser(prog="python -m composer.ablation", description="Measure what algorithms improve.")
    commands = parser.add_subparsers(dest="command", required=True)
    run = commands.add_parser("run", help="run or continue a study")
    run.add_argument(
        "study", type=Path, help="a file with make_trainer, algorithms, and arguments of ablate as variables"
    )
    run.add_argument("--metric", help="the name of the metric, such as eval/MulticlassAccuracy")
    run.add_argument("--mode", choices=["max", "min"], help="whether larger or smaller values are better")
    run.add_argument("--arms", nargs="+", help="baseline, each, all, leave_one_out, greedy, or names joined by '+'")
    run.add_argument("--seeds", type=int, help="the number of seeds")
    run.add_argument("--held-out", type=int, nargs="+", help="the seeds for the proposal of a greedy search")
    run.add_argument("--folder", help="the folder of the results")
    run.add_argument("--processes", type=int, help="the number of runs at a time")
    run.add_argument("--clock", choices=["wall", "processor"], help="the time to measure")
    run.add_argument("--target", type=float, help="the quality to reach")
    show = commands.add_parser("show", help="print the results, also while a study is running")
    show.add_argument("folder", help="the folder of the results")
    show.add_argument("--format", choices=["text", "markdown", "json"], default="text", help="the format of the table")
    for command in (run, show):
        command.add_argument("--plot", help="the picture to write")
        command.add_argument("--report", help="the page in Markdown to write, with a picture beside it")
    chosen = parser.parse_args(arguments)
    try:
        study = _run(chosen) if chosen.command == "run" else Study.load(chosen.folder)
        if chosen.plot is not None:
            study.plot(chosen.plot)
        if chosen.report is not None:
            study.report(chosen.report)
    except (ImportError, OSError, RuntimeError, TypeError, ValueError) as error:
        print(printable(str(error)), file=sys.stderr)  # noqa: T201
        return 1
    forms = {"text": study.__str__, "markdown": study.to_markdown, "json": study.to_json}
    print(printable(forms[getattr(chosen, "format", "text")]()))  # noqa: T201
    return 0


def _run(chosen: argparse.Namespace) -> Study:
    sys.path.insert(0, str(chosen.study.parent.absolute()))  # as where the file is run itself
    os.environ[RUN_VARIABLE] = "1"  # the file must not call ablate itself
    try:
        defined = runpy.run_path(str(chosen.study), run_name="study")
    finally:
        del os.environ[RUN_VARIABLE]
    for name in ("make_trainer", "algorithms"):
        if name not in defined:
            raise ValueError(f"{chosen.study} must define {name}; see composer.ablation.ablate.")
    settings: dict[str, Any] = {name: defined[name] for name in _SETTINGS if name in defined}
    settings |= {name: value for name in _SETTINGS if (value := getattr(chosen, name)) is not None}
    if "metric" not in settings:
        raise ValueError(f"metric must be given: as --metric, or as a variable in {chosen.study}.")
    if chosen.arms is not None:
        settings["arms"] = [
            arm.split("+") if "+" in arm or arm in defined["algorithms"] else arm for arm in chosen.arms
        ]
    return ablate(defined["make_trainer"], defined["algorithms"], **settings)


if __name__ == "__main__":
    sys.exit(main())
