"""Draw the picture of the tutorial on image classifiers: the errors of its four programs, with ten seeds.

    python docs/tutorials/pictures.py

The programs are the Python blocks of the page.
"""

from __future__ import annotations

import re
import statistics
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("agg")
from matplotlib import pyplot as plt

FOLDER = Path(__file__).parent
SEEDS, EPOCHS = 10, 60
PROGRAMS = {
    "train_plain": "plain loop",
    "train_with_functions": "+ BlurPool, LabelSmoothing\nas functions",
    "train_with_engine": "+ Augment\nwith the engine",
    "train_with_trainer": "the same\nwith the trainer",
}


def read_programs() -> dict[str, Any]:
    """Run the blocks of the page, with one epoch, and return its functions; set the number of epochs afterwards."""
    page = (FOLDER / "image_classifier.md").read_text()
    blocks = re.findall(r"^```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    programs: dict[str, Any] = {}
    exec("\n".join(blocks).replace("EPOCHS = 10", "EPOCHS = 1"), programs)  # noqa: S102
    programs["EPOCHS"] = EPOCHS
    return programs


def main() -> None:
    """Train with each program and seed, and draw the errors."""
    programs = read_programs()
    errors = {label: [100 * programs[name](seed) for seed in range(SEEDS)] for name, label in PROGRAMS.items()}
    figure, axes = plt.subplots(figsize=(8, 4.5), layout="constrained")
    for place, values in enumerate(errors.values()):
        mean = statistics.mean(values)
        axes.scatter([place] * SEEDS, values, s=24, color="tab:blue", alpha=0.5)
        axes.plot([place - 0.25, place + 0.25], [mean, mean], color="black", linewidth=2)
        axes.annotate(f"{mean:.1f} %", (place + 0.28, mean), va="center")
    axes.set_xticks(range(len(errors)), list(errors))
    axes.set_xlim(-0.5, len(errors) - 0.3)
    axes.set_ylim(bottom=0)
    axes.set_ylabel("errors on the test images (%)")
    axes.set_title(f"100 labelled digits, {EPOCHS} epochs: {SEEDS} seeds and their mean")
    axes.spines[["top", "right"]].set_visible(False)
    (FOLDER / "pictures").mkdir(exist_ok=True)
    figure.savefig(FOLDER / "pictures" / "image_classifier.png", dpi=110, metadata={"Software": None})


if __name__ == "__main__":
    main()
