"""Search for hyperparameters with Optuna, which ends trials whose evaluations are worse than those of others.

    python -m pip install optuna scikit-learn
    python examples/optuna_search.py --trials 20

The task is scikit-learn's digits. ``Pruner`` is a callback for any training: it reports a metric after each evaluation.
"""

from __future__ import annotations

import argparse

import optuna
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, random_split

from composer import Callback, Logger, State, Trainer
from composer.algorithms import LabelSmoothing
from composer.models import ComposerClassifier
from composer.optim import CosineAnnealingWithWarmupScheduler

METRIC = "eval/MulticlassAccuracy"


class Pruner(Callback):
    """Report a metric to a trial of Optuna after each evaluation, and end the training if it is to be pruned.

    Args:
        trial: The trial.
        metric: The label of the evaluation and the name of the metric: ``"eval/MulticlassAccuracy"``.
    """

    def __init__(self, trial: optuna.Trial, metric: str) -> None:
        self.trial = trial
        self.label, _, self.name = metric.partition("/")

    def eval_after_all(self, state: State, logger: Logger) -> None:
        """Report the value, at the step that is the batch."""
        values = state.eval_metric_values[self.label]
        self.trial.report(float(values[self.name]), step=int(state.timestamp.batch))
        if self.trial.should_prune():
            raise optuna.TrialPruned


def load_data() -> tuple[TensorDataset, TensorDataset]:
    """Return the images to train on and to evaluate on."""
    pixels, labels = load_digits(return_X_y=True)
    data = TensorDataset(torch.tensor(pixels, dtype=torch.float32) / 16, torch.tensor(labels))
    return random_split(data, [1500, 297], generator=torch.Generator().manual_seed(0))


def make_trainer(trial: optuna.Trial, duration: str) -> Trainer:
    """Return the trainer of a trial, which suggests its hyperparameters."""
    width = trial.suggest_categorical("width", [32, 64, 128])
    learning_rate = trial.suggest_float("lr", 1e-4, 1e-1, log=True)
    smoothing = trial.suggest_float("smoothing", 0.0, 0.2)
    torch.manual_seed(0)  # the same initial weights for each trial of the same width
    model = ComposerClassifier(nn.Sequential(nn.Linear(64, width), nn.ReLU(), nn.Linear(width, 10)), num_classes=10)
    train_data, eval_data = load_data()
    return Trainer(
        model=model,
        train_dataloader=DataLoader(train_data, batch_size=64, shuffle=True),
        eval_dataloader=DataLoader(eval_data, batch_size=297),
        optimizers=torch.optim.AdamW(model.parameters(), lr=learning_rate),
        schedulers=CosineAnnealingWithWarmupScheduler("0.1dur"),
        algorithms=LabelSmoothing(smoothing),
        callbacks=Pruner(trial, METRIC),
        max_duration=duration,
        seed=0,
        device="cpu",
        progress_bar=False,
    )


def search(trials: int, duration: str) -> optuna.Study:
    """Return a study of trials that have ended."""

    def objective(trial: optuna.Trial) -> float:
        label, name = METRIC.split("/")
        with make_trainer(trial, duration) as trainer:
            trainer.fit()
            return float(trainer.state.eval_metric_values[label][name])

    study = optuna.create_study(
        direction="maximize",
        sampler=optuna.samplers.TPESampler(seed=0),
        pruner=optuna.pruners.MedianPruner(n_startup_trials=3),
    )
    study.optimize(objective, n_trials=trials)
    return study


def main() -> None:
    """Search, and print the best trial."""
    parser = argparse.ArgumentParser(description="Search for hyperparameters of a network for digits with Optuna.")
    parser.add_argument("--trials", type=int, default=20, help="number of trainings, of which some end early")
    parser.add_argument("--duration", default="10ep", help="length of a complete training")
    options = parser.parse_args()
    study = search(options.trials, options.duration)
    pruned = study.get_trials(states=[optuna.trial.TrialState.PRUNED])
    print(f"{len(study.trials)} trials, of which {len(pruned)} ended early")
    print(f"accuracy {study.best_value:.4f} with {study.best_params}")


if __name__ == "__main__":
    main()
