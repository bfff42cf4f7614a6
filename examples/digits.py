"""Train on handwritten digits, with and without a recipe of five algorithms.

The data are the 1,797 images of 8x8 pixels that scikit-learn includes; a fifth of them is the test set. For each seed,
the same small network is trained once as a baseline and once with the recipe. The output folder then contains:

    settings.json               the settings and the versions
    <run>-seed<n>.jsonl         the metrics of each run, one JSON object per line
    results.json                the numbers of the table
    curves.png                  accuracy and loss over the epochs
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import attrs
import matplotlib as mpl
import sklearn
import torch
from matplotlib import pyplot as plt
from matplotlib.ticker import MaxNLocator
from rich.console import Console
from rich.table import Table
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from composer import Algorithm, Callback, Logger, State, Trainer
from composer.algorithms import EMA, BlurPool, ChannelsLast, LabelSmoothing, MixUp
from composer.loggers import FileLogger
from composer.models import ComposerClassifier
from composer.optim import CosineAnnealingWithWarmupScheduler
from composer.trainer.reproducibility import seed_all

if TYPE_CHECKING:
    from collections.abc import Callable

BATCH_SIZE = 64
LEARNING_RATE = 6e-3
WEIGHT_DECAY = 0.05

# Selected by cross-validation on the training images; the test images were not used.
RECIPE: dict[str, Callable[[], Algorithm]] = {
    "BlurPool": BlurPool,
    "LabelSmoothing": lambda: LabelSmoothing(smoothing=0.1),
    "MixUp": lambda: MixUp(alpha=0.1),
    "EMA": lambda: EMA(half_life="10ba"),
    "ChannelsLast": ChannelsLast,
}


def main() -> None:
    """Train all networks and report the results."""
    options = parse_options()
    recipes = {"baseline": [], "recipe": options.algorithms} if options.algorithms else {"baseline": []}
    write_settings(options)

    results: dict[str, list[Result]] = {name: [] for name in recipes}
    for seed in range(options.seeds):
        for name, algorithms in recipes.items():
            explain = seed == 0 and bool(algorithms)
            results[name].append(train(name, algorithms, seed, options.epochs, options.output, explain=explain))
    report(results, options.output)
    draw_curves(results, options.output / "curves.png")
    print(f"Metrics, settings and curves.png are in {options.output}.")


@attrs.frozen
class Result:
    """The results of one run.

    Args:
        accuracy: On the test images at the end, in percent.
        seconds: Spent on training, evaluations not included.
        steps: Training steps.
        accuracies: On the test images after each epoch, in percent.
        losses: The mean training loss of each epoch.
    """

    accuracy: float
    seconds: float
    steps: int
    accuracies: list[float]
    losses: list[float]


def train(name: str, algorithms: list[str], seed: int, epochs: int, output: Path, *, explain: bool = False) -> Result:
    """Train one network with a seed and return its results."""
    seed_all(seed)
    model = ComposerClassifier(make_network(), num_classes=10)
    train_loader, test_loader = make_loaders(*load_images())
    curves = Curves()
    with Trainer(
        model=model,
        train_dataloader=train_loader,
        eval_dataloader=test_loader,
        optimizers=torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY),
        schedulers=CosineAnnealingWithWarmupScheduler(t_warmup="0.1dur"),
        algorithms=[RECIPE[algorithm]() for algorithm in algorithms],
        callbacks=curves,
        loggers=FileLogger(str(output / f"{name}-seed{seed}.jsonl"), overwrite=True),
        max_duration=f"{epochs}ep",
        run_name=f"{name}, seed {seed}",
        device="cpu",
        seed=seed,
    ) as trainer:
        if explain:
            print(trainer.engine.explain(), end="\n\n")
        trainer.fit()
        clock = trainer.state.timestamp
    return Result(
        accuracy=curves.accuracies[-1],
        seconds=clock.total_wct.total_seconds(),
        steps=int(clock.batch),
        accuracies=curves.accuracies,
        losses=curves.losses,
    )


class Curves(Callback):
    """Stores the values that :func:`draw_curves` plots."""

    def __init__(self) -> None:
        self.accuracies: list[float] = []
        self.losses: list[float] = []
        self._batch_losses: list[Tensor] = []

    def batch_end(self, state: State, logger: Logger) -> None:
        """Store the batch's loss without synchronizing with the device."""
        self._batch_losses.append(state.total_loss)

    def epoch_end(self, state: State, logger: Logger) -> None:
        """Keep the epoch's mean loss."""
        self.losses.append(torch.stack(self._batch_losses).mean().item())
        self._batch_losses.clear()

    def eval_after_all(self, state: State, logger: Logger) -> None:
        """Keep the test accuracy."""
        self.accuracies.append(100 * float(state.eval_metric_values["MulticlassAccuracy"]))


def make_network() -> nn.Module:
    """Return a small convolutional network for images of 8x8 pixels."""

    def block(inputs: int, outputs: int, stride: int = 1) -> nn.Sequential:
        convolution = nn.Conv2d(inputs, outputs, kernel_size=3, stride=stride, padding=1, bias=False)
        return nn.Sequential(convolution, nn.BatchNorm2d(outputs), nn.ReLU(inplace=True))

    return nn.Sequential(
        block(1, 32),
        block(32, 64),
        block(64, 128, stride=2),
        block(128, 128),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(128, 10),
    )


def load_images() -> tuple[TensorDataset, TensorDataset]:
    """Return training and test images, ``(1, 8, 8)`` in ``[0, 1]``, with their labels; always the same split."""
    pixels, labels = load_digits(return_X_y=True)
    parts = train_test_split(pixels, labels, test_size=0.2, random_state=0, stratify=labels)
    train_pixels, test_pixels = (torch.tensor(part, dtype=torch.float32).view(-1, 1, 8, 8) / 16 for part in parts[:2])
    train_labels, test_labels = (torch.tensor(part) for part in parts[2:])
    return TensorDataset(train_pixels, train_labels), TensorDataset(test_pixels, test_labels)


def make_loaders(train_data: TensorDataset, test_data: TensorDataset) -> tuple[DataLoader, DataLoader]:
    """Return the loaders for training and test."""
    return (
        DataLoader(train_data, batch_size=BATCH_SIZE, shuffle=True, drop_last=True),
        DataLoader(test_data, batch_size=len(test_data)),
    )


def report(results: dict[str, list[Result]], output: Path) -> None:
    """Print the table and write its numbers to ``results.json``."""
    table = Table(title="Digits: accuracy on the test images")
    for column in ("", "accuracy", "range", "seconds a run", "steps a second"):
        table.add_column(column, justify="left" if not column else "right")
    rows = {}
    for name, runs in results.items():
        accuracies = [run.accuracy for run in runs]
        spread = statistics.stdev(accuracies) if len(runs) > 1 else 0.0
        seconds = statistics.mean(run.seconds for run in runs)
        rows[name] = {
            "accuracy_mean": statistics.mean(accuracies),
            "accuracy_spread": spread,
            "accuracies": accuracies,
            "seconds": seconds,
            "steps_per_second": runs[0].steps / seconds,
        }
        table.add_row(
            name,
            f"{statistics.mean(accuracies):.2f} % ± {spread:.2f}",
            f"{min(accuracies):.2f} to {max(accuracies):.2f} %",
            f"{seconds:.1f}",
            f"{runs[0].steps / seconds:.0f}",
        )
    (output / "results.json").write_text(json.dumps(rows, indent=2))
    Console().print(table)


def draw_curves(results: dict[str, list[Result]], path: Path) -> None:
    """Plot test accuracy and training loss over the epochs: a line for the mean, a band from lowest to highest."""
    mpl.use("Agg")  # requires no display
    colours = {"baseline": "#8a8f98", "recipe": "#d1495b"}
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.2), layout="constrained")
    for name, runs in results.items():
        for axes, values in ((left, [run.accuracies for run in runs]), (right, [run.losses for run in runs])):
            curves = torch.tensor(values)
            epochs = range(1, curves.shape[1] + 1)
            label = f"{name}, {statistics.mean(run.accuracy for run in runs):.2f} % in the end"
            axes.plot(epochs, curves.mean(dim=0), color=colours[name], label=label, linewidth=2)
            axes.fill_between(
                epochs, curves.amin(dim=0), curves.amax(dim=0), color=colours[name], alpha=0.18, linewidth=0
            )
    left.set(title="Accuracy on the test images", xlabel="epoch", ylabel="percent")
    best = max(max(run.accuracies) for runs in results.values() for run in runs)
    bottom = max(0, min(95, best - 5))
    left.set_ylim(bottom=bottom, top=100 + (100 - bottom) / 25)
    right.set(title="Training loss (the recipe's is of mixed, smoothed labels)", xlabel="epoch", yscale="log")
    for axes in (left, right):
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    left.legend(loc="lower right", frameon=False)
    count = len(next(iter(results.values())))
    figure.suptitle(f"8x8 digits, {count} seed{'s' if count > 1 else ''}: mean, and lowest to highest", fontsize=11)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def write_settings(options: argparse.Namespace) -> None:
    """Write the settings and the versions to ``settings.json``."""
    settings = {
        "seeds": options.seeds,
        "epochs": options.epochs,
        "algorithms": {name: {k: str(v) for k, v in RECIPE[name]().settings().items()} for name in options.algorithms},
        "batch_size": BATCH_SIZE,
        "optimizer": {"name": "AdamW", "lr": LEARNING_RATE, "weight_decay": WEIGHT_DECAY},
        "schedule": "cosine with a warm-up over the first tenth",
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "scikit-learn": sklearn.__version__,
        },
        "threads": torch.get_num_threads(),
    }
    (options.output / "settings.json").write_text(json.dumps(settings, indent=2))


class OneSentence(argparse.ArgumentParser):
    """A parser whose error message is one sentence."""

    def error(self, message: str) -> NoReturn:
        """Print the message and exit."""
        self.exit(2, f"{Path(sys.argv[0]).name}: {message}; see --help.\n")


def parse_options() -> argparse.Namespace:
    """Return the options of the command line."""
    parser = OneSentence(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--seeds", type=at_least_one, default=5, metavar="N", help="number of seeds (default: %(default)s)"
    )
    parser.add_argument(
        "--epochs", type=at_least_one, default=20, metavar="N", help="epochs of each run (default: %(default)s)"
    )
    parser.add_argument(
        "--algorithms",
        type=known_algorithms,
        default=list(RECIPE),
        metavar="NAMES",
        help=f"the recipe, separated by commas; 'none' runs only the baseline (default: {','.join(RECIPE)})",
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


def known_algorithms(text: str) -> list[str]:
    """Return the names between the commas."""
    names = [] if text == "none" else [name.strip() for name in text.split(",")]
    for name in names:
        if name not in RECIPE:
            raise argparse.ArgumentTypeError(f"unknown algorithm {name!r}, choose from {', '.join(RECIPE)}, or none")
        if names.count(name) > 1:
            raise argparse.ArgumentTypeError(f"{name!r} is listed twice")
    return names


if __name__ == "__main__":
    main()
