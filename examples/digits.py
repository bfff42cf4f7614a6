"""Learn handwritten digits from 10 labelled images of each, with and without a recipe of methods.

The task, the network and the recipe are those of ``few_labels.py``, which measures each method separately. For each
seed, the same small network is trained once as a baseline and once with the recipe, with the same labelled images. The
output folder then contains:

    settings.json               the settings and the versions
    <run>-seed<n>.jsonl         the metrics of each run, one JSON object per line
    results.json                the numbers of the table
    curves.png                  errors over the time of training, and the errors of each seed
"""

from __future__ import annotations

import argparse
import inspect
import json
import platform
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import NoReturn

import attrs
import matplotlib as mpl
import sklearn
import torch
from few_labels import METHODS, RECIPE, construct, make_trainer
from matplotlib import pyplot as plt
from matplotlib.ticker import FuncFormatter, NullLocator
from rich.console import Console
from rich.table import Table

from composer import Callback, Logger, State
from composer.ablation.statistics import paired_difference
from composer.loggers import FileLogger
from composer.trainer.reproducibility import seed_all

COLOURS = {"baseline": "#8a8f98", "recipe": "#d1495b"}
NEXT = """What to do next:
- Try other methods:               python examples/digits.py --methods Augment,MixUp
- Measure each method separately:  python examples/few_labels.py
- Measure them on your own task:   copy examples/few_labels.py, and replace its network and its data."""


def main() -> None:
    """Train with one seed after the other; report the results after the first and at the end."""
    began = time.perf_counter()
    options = parse_options()
    recipes = {"baseline": [], "recipe": options.methods} if options.methods else {"baseline": []}
    write_settings(options)

    results: dict[str, list[Result]] = {name: [] for name in recipes}
    num_seeds = 0
    while options.seeds is None or num_seeds < options.seeds:
        for name, methods in recipes.items():
            run, plan = train(name, methods, num_seeds, options.epochs, options.output)
            print(
                f"{name}, seed {num_seeds}: {run.errors:.1f} % errors after {run.seconds:.1f} s of training", flush=True
            )
            results[name].append(run)
        num_seeds += 1
        spent = time.perf_counter() - began
        if options.seeds is None and spent + spent / num_seeds > options.seconds:
            break
        if num_seeds == 1 and options.seeds != 1:
            report(results, options.output)
            print("More seeds follow, to distinguish the effect from chance.\n")
    report(results, options.output)
    if options.methods:
        print(f"{plan}\n")
    draw_curves(results, options.output / "curves.png")
    print(f"Metrics, settings and curves.png are in {options.output}.\n\n{NEXT}")


@attrs.frozen
class Result:
    """The results of one run.

    Args:
        seconds: Spent on training, evaluations not included.
        steps: Training steps.
        curve: The seconds of training and the errors on the test images in percent, at each evaluation.
    """

    seconds: float
    steps: int
    curve: list[tuple[float, float]]

    @property
    def errors(self) -> float:
        """The errors on the test images at the end, in percent."""
        return self.curve[-1][1]


def train(name: str, methods: list[str], seed: int, epochs: int | None, output: Path) -> tuple[Result, str]:
    """Train one network with a seed and return its results, and what its algorithms did at which event."""
    seed_all(seed)
    curve = Curve()
    algorithms, arguments = construct(methods)
    with make_trainer(
        algorithms,
        seed,
        **(arguments if epochs is None else arguments | {"epochs": epochs}),
        callbacks=curve,
        loggers=FileLogger(str(output / f"{name}-seed{seed}.jsonl"), overwrite=True),
        run_name=f"{name}, seed {seed}",
        progress_bar=False,
    ) as trainer:
        trainer.fit()
        clock = trainer.state.timestamp
        return Result(clock.total_wct.total_seconds(), int(clock.batch), curve.points), trainer.engine.explain()


class Curve(Callback):
    """Stores the seconds of training and the errors on the test images at each evaluation."""

    def __init__(self) -> None:
        self.points: list[tuple[float, float]] = []

    def eval_after_all(self, state: State, logger: Logger) -> None:
        """Store a point of the curve."""
        accuracy = float(state.eval_metric_values["MulticlassAccuracy"])
        self.points.append((state.timestamp.total_wct.total_seconds(), 100 * (1 - accuracy)))


def report(results: dict[str, list[Result]], output: Path) -> None:
    """Print the table and write its numbers to ``results.json``."""
    baseline = [run.errors for run in results["baseline"]]
    several = len(baseline) > 1
    table = Table(title=f"Digits with 10 labels a class: errors on the test images, {count(len(baseline))}")
    fewer_title = "fewer errors" + several * "\n(95 % interval)"
    for column in ("", "errors", *several * ["range"], fewer_title, "seconds\na run", "steps a\nsecond"):
        table.add_column(column, justify="right" if column else "left", no_wrap=True)
    rows = {}
    for name, runs in results.items():
        errors = [run.errors for run in runs]
        seconds = statistics.mean(run.seconds for run in runs)
        fewer = None if name == "baseline" else fewer_errors(baseline, errors)
        rows[name] = {
            "errors_mean": statistics.mean(errors),
            "errors_spread": statistics.stdev(errors) if len(errors) > 1 else 0.0,
            "errors": errors,
            "fewer_errors": fewer,
            "seconds": seconds,
            "steps_per_second": runs[0].steps / seconds,
        }
        table.add_row(
            name,
            f"{statistics.mean(errors):.2f} %",
            *several * [f"{min(errors):.1f} to {max(errors):.1f} %"],
            "" if fewer is None else show(**fewer),
            f"{seconds:.1f}",
            f"{runs[0].steps / seconds:.0f}",
        )
    (output / "results.json").write_text(json.dumps(rows, indent=2))
    Console().print(table)


def fewer_errors(baseline: list[float], recipe: list[float]) -> dict[str, float | None]:
    """Return how many of the baseline's errors the recipe avoids in percent, with its 95 % interval if available."""
    difference = paired_difference(dict(enumerate(baseline)), dict(enumerate(recipe)))
    assert difference is not None
    percent = 100 / statistics.mean(baseline) if any(baseline) else 0.0
    ends = {"mean": difference.mean, "low": difference.low, "high": difference.high}
    return {name: None if end is None else percent * end for name, end in ends.items()}


def show(mean: float, low: float | None, high: float | None) -> str:
    """Return a reduction of errors as a string."""
    return f"{mean:.0f} %" if low is None else f"{mean:.0f} % ({low:.0f} to {high:.0f} %)"


def count(seeds: int) -> str:
    """Return a number of seeds as a string."""
    return "one seed" if seeds == 1 else f"{seeds} seeds"


def draw_curves(results: dict[str, list[Result]], path: Path) -> None:
    """Plot the errors over the time of training, and the errors of each seed at the end."""
    mpl.use("Agg")  # requires no display
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.2), width_ratios=(3, 2), layout="constrained")
    for name, runs in results.items():
        curves = torch.tensor([run.curve for run in runs])
        seconds, errors = curves[:, :, 0].mean(dim=0), curves[:, :, 1]
        label = f"{name}: {errors[:, -1].mean():.2f} % at the end"
        left.plot(seconds, errors.mean(dim=0), color=COLOURS[name], label=label, linewidth=2, marker="o", markersize=4)
        left.fill_between(seconds, errors.amin(dim=0), errors.amax(dim=0), color=COLOURS[name], alpha=0.18, linewidth=0)
        right.scatter([name] * len(runs), errors[:, -1], color=COLOURS[name], zorder=2)
    num_seeds = len(results["baseline"])
    for runs in zip(*results.values(), strict=True) if num_seeds > 1 else ():
        right.plot(list(results), [run.errors for run in runs], color="#c9ccd1", linewidth=1, zorder=1)
    band = "" if num_seeds == 1 else ": mean, and lowest to highest"
    left.set(title=f"During training{band}", xlabel="seconds of training", ylabel="errors on the test images")
    left.set(yscale="log", yticks=[1, 2, 5, 10, 20, 50, 100])
    left.yaxis.set_minor_locator(NullLocator())
    left.set_xlim(left=0)
    left.legend(loc="upper right", frameon=False)
    right.set(title="At the end" if num_seeds == 1 else "At the end: a line for each seed")
    right.set_ylim(bottom=0)
    right.margins(x=0.3)
    for axes in (left, right):
        axes.yaxis.set_major_formatter(FuncFormatter(lambda percent, _: f"{percent:g} %"))
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    figure.suptitle(f"Digits with 10 labels a class, {count(num_seeds)}", fontsize=11)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def write_settings(options: argparse.Namespace) -> None:
    """Write the settings and the versions to ``settings.json``."""
    settings = {
        "seeds": options.seeds,
        "epochs": options.epochs,
        "methods": {name: describe(name) for name in options.methods},
        "baseline": {
            name: one.default
            for name, one in inspect.signature(make_trainer).parameters.items()
            if one.kind is one.KEYWORD_ONLY
        },
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "scikit-learn": sklearn.__version__,
        },
        "threads": torch.get_num_threads(),
    }
    (options.output / "settings.json").write_text(json.dumps(settings, indent=2))


def describe(name: str) -> dict[str, str]:
    """Return the settings of a method as strings."""
    algorithms, arguments = construct([name])
    settings = {**arguments, **(algorithms[0].settings() if algorithms else {})}
    return {key: str(value) for key, value in settings.items()}


class OneSentence(argparse.ArgumentParser):
    """A parser whose error message is one sentence."""

    def error(self, message: str) -> NoReturn:
        """Print the message and exit."""
        self.exit(2, f"{Path(sys.argv[0]).name}: {message}; see --help.\n")


def parse_options() -> argparse.Namespace:
    """Return the options of the command line."""
    parser = OneSentence(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--seeds",
        type=at_least_one,
        metavar="N",
        help="number of seeds (default: as many as finish within --seconds, at least 1)",
    )
    parser.add_argument(
        "--seconds",
        type=at_least_one,
        default=60,
        metavar="N",
        help="start no seed that would not finish within this time (default: %(default)s)",
    )
    parser.add_argument("--epochs", type=at_least_one, metavar="N", help="epochs of each run (default: its own)")
    parser.add_argument(
        "--methods",
        type=known_methods,
        default=RECIPE,
        metavar="NAMES",
        help=f"the recipe: of {', '.join(METHODS)}, separated by commas; 'none' runs only the baseline "
        f"(default: {','.join(RECIPE)})",
    )
    parser.add_argument(
        "--output",
        type=Path,
        default=Path("runs/digits"),
        metavar="FOLDER",
        help="folder for the results (default: %(default)s)",
    )
    options = parser.parse_args()
    try:
        options.output.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=options.output).close()
    except OSError as error:
        parser.error(f"argument --output: cannot write into {options.output} ({error.strerror})")
    return options


def at_least_one(text: str) -> int:
    """Return an integer of at least 1."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be an integer of at least 1, got {text!r}")
    return int(text)


def known_methods(text: str) -> list[str]:
    """Return the names between the commas."""
    names = [] if text == "none" else [name.strip() for name in text.split(",")]
    for name in names:
        if name not in METHODS:
            raise argparse.ArgumentTypeError(f"unknown method {name!r}, choose from {', '.join(METHODS)}, or none")
        if names.count(name) > 1:
            raise argparse.ArgumentTypeError(f"{name!r} is listed twice")
    try:
        algorithms, arguments = construct(names)
        make_trainer(algorithms, seed=0, progress_bar=False, **arguments).close()
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return names


if __name__ == "__main__":
    main()
