"""Predict a number from a table of numbers and categories, with early stopping and the best checkpoint.

    python -m pip install scikit-learn
    python examples/tabular.py
    python examples/tabular.py --csv houses.csv --target price --categories city kind

Without ``--csv`` the table is scikit-learn's diabetes data: nine measurements and a category of 442 patients, and the
progression of their disease after a year. The baseline is a linear model, which is hard to beat on so few rows.
"""

from __future__ import annotations

import argparse
import csv
from pathlib import Path

import numpy as np
import torch
from sklearn.datasets import load_diabetes
from sklearn.linear_model import LinearRegression
from torch import Tensor, nn
from torch.utils.data import DataLoader, StackDataset, Subset, TensorDataset, random_split

from composer import Trainer
from composer.callbacks import EarlyStopper
from composer.models import ComposerRegressor

METRIC = "eval/MeanAbsoluteError"


def read_table(path: str | None = None) -> dict[str, np.ndarray]:
    """Return the columns of a CSV file with a header, without missing values, or of the diabetes data, by name."""
    if path is None:
        data = load_diabetes(scaled=False)
        return {**dict(zip(data.feature_names, data.data.T, strict=True)), "progression": data.target}
    with Path(path).open(newline="") as file:
        names, *rows = csv.reader(file)
    return dict(zip(names, np.array(rows).T, strict=True))


def split_table(table: dict[str, np.ndarray], target: str, categories: list[str]) -> tuple[list[Subset], list[int]]:
    """Return 60 % of the samples ``((numbers, ids), target)``, 20 % and 20 %, and the number of ids per category."""
    numbers = np.stack([column for name, column in table.items() if name not in [target, *categories]], axis=1)
    targets = torch.tensor(table[target].astype(np.float32))
    parts = random_split(range(len(targets)), [0.6, 0.2, 0.2], generator=torch.Generator().manual_seed(0))
    ids, sizes = torch.zeros(len(targets), len(categories), dtype=torch.long), []
    for place, name in enumerate(categories):
        known = {value: id for id, value in enumerate(np.unique(table[name][parts[0].indices]), start=1)}
        ids[:, place] = torch.tensor([known.get(value, 0) for value in table[name]])  # 0: not in the training data
        sizes.append(len(known) + 1)
    samples = StackDataset(TensorDataset(torch.tensor(numbers.astype(np.float32)), ids), targets)
    return [Subset(samples, part.indices) for part in parts], sizes


class Network(nn.Module):
    """Two hidden layers after the numbers and an embedding of each category.

    Means and deviations of the training data are buffers, so that a checkpoint has them.
    """

    def __init__(self, numbers: Tensor, targets: Tensor, sizes: list[int], width: int = 64) -> None:
        super().__init__()
        for name, values in {"input": numbers, "output": targets}.items():
            self.register_buffer(f"{name}_mean", values.mean(dim=0))
            self.register_buffer(f"{name}_std", values.std(dim=0) + 1e-6)
        self.embeddings = nn.ModuleList(nn.Embedding(size, 4) for size in sizes)
        inputs = numbers.shape[1] + 4 * len(sizes)
        hidden = [nn.Linear(inputs, width), nn.ReLU(), nn.Dropout(0.3), nn.Linear(width, width), nn.ReLU()]
        self.layers = nn.Sequential(*hidden, nn.Dropout(0.3), nn.Linear(width, 1))

    def forward(self, input: tuple[Tensor, Tensor]) -> Tensor:
        """Return predictions ``(N, 1)`` for numbers ``(N, F)`` and ids ``(N, C)``."""
        numbers, ids = input
        embedded = [embed(ids[:, place]) for place, embed in enumerate(self.embeddings)]
        scaled = (numbers - self.input_mean) / self.input_std
        return self.layers(torch.cat([scaled, *embedded], dim=1)) * self.output_std + self.output_mean


def run(parts: list[Subset], sizes: list[int], duration: str = "300ep", folder: str = "runs/tabular") -> dict:
    """Train, load the best checkpoint, and return its error, and predictions for the last part with their targets."""
    (numbers, _), targets = next(iter(DataLoader(parts[0], batch_size=len(parts[0]))))
    eval_data, test_data = (DataLoader(part, batch_size=256) for part in parts[1:])
    torch.manual_seed(0)
    model, stopper = ComposerRegressor(Network(numbers, targets, sizes)), EarlyStopper(METRIC, patience="30ep")
    with Trainer(
        model=model,
        train_dataloader=DataLoader(parts[0], batch_size=32, shuffle=True),
        eval_dataloader=eval_data,
        optimizers=torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.1),
        callbacks=stopper,
        max_duration=duration,
        save_folder=folder,
        save_best=METRIC,
        save_num_checkpoints_to_keep=1,
        save_overwrite=True,
        seed=0,
        progress_bar=False,
    ) as trainer:
        print(trainer.fit())

    model = ComposerRegressor(Network(numbers, targets, sizes))  # as in another program, later
    best = Trainer(model=model, load_path=trainer.best_checkpoint, load_weights_only=True, progress_bar=False)
    reloaded = best.eval(eval_data)["eval"]["MeanAbsoluteError"].item()
    predictions, truth = best.predict(test_data, join=True, with_targets=True)
    return {"best": stopper.best, "reloaded": reloaded, "predictions": predictions.squeeze(1), "targets": truth}


def predict_linearly(parts: list[Subset], sizes: list[int]) -> Tensor:
    """Return the predictions of the baseline for the last part."""

    def table_of(part: Subset) -> tuple[Tensor, Tensor]:
        (numbers, ids), targets = next(iter(DataLoader(part, batch_size=len(part))))
        kinds = [nn.functional.one_hot(ids[:, place], size) for place, size in enumerate(sizes)]
        return torch.cat([numbers, *kinds], dim=1), targets

    return torch.tensor(LinearRegression().fit(*table_of(parts[0])).predict(table_of(parts[2])[0]))


def main() -> None:
    """Train on a table and print the errors."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--csv", metavar="FILE", help="a table with a header (default: the diabetes data)")
    parser.add_argument("--target", default="progression", help="the column to predict (default: %(default)s)")
    parser.add_argument("--categories", nargs="*", default=["sex"], help="columns of categories (default: sex)")
    parser.add_argument("--duration", default="300ep", help="at most (default: %(default)s)")
    options = parser.parse_args()
    parts, sizes = split_table(read_table(options.csv), options.target, options.categories)
    result = run(parts, sizes, options.duration)
    print(f"\nMean absolute error of the best checkpoint: {result['best']:.3f}, loaded again {result['reloaded']:.3f}")
    for name, predicted in {"network": result["predictions"], "linear model": predict_linearly(parts, sizes)}.items():
        print(f"Error in rows that no choice has used, {name}: {(predicted - result['targets']).abs().mean():.2f}")


if __name__ == "__main__":
    main()
