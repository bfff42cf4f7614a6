"""The search for hyperparameters with Optuna."""

import sys
from pathlib import Path

import pytest

optuna = pytest.importorskip("optuna", reason="it is an optional product: pip install optuna")
pytest.importorskip("sklearn", reason="it has the data of the example")

sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))
from optuna_search import METRIC, Pruner, make_trainer, search  # noqa: E402

VALUES = {"width": 32, "lr": 0.01, "smoothing": 0.0}


def test_search():
    """The best trial has a value that a training with its parameters reaches again."""
    study = search(trials=3, duration="2ep")

    label, name = METRIC.split("/")
    with make_trainer(optuna.trial.FixedTrial(study.best_params), "2ep") as trainer:
        trainer.fit()
        assert float(trainer.state.eval_metric_values[label][name]) == study.best_value
    assert [*study.best_trial.intermediate_values] == [24, 48]


def test_pruning():
    """A trial that is worse than the others ends after its first evaluation, and the study continues."""
    study = optuna.create_study(direction="maximize", pruner=optuna.pruners.ThresholdPruner(lower=2.0))
    trained = []

    def objective(trial):
        with make_trainer(trial, "3ep") as trainer:
            trained.append(trainer)
            trainer.fit()

    study.optimize(objective, n_trials=1)

    assert study.trials[0].state is optuna.trial.TrialState.PRUNED
    assert [int(trainer.state.timestamp.batch) for trainer in trained] == [24]


def test_metric():
    """The metric is named by the evaluation and its own name."""
    pruner = Pruner(optuna.trial.FixedTrial(VALUES), "eval/loss")

    assert (pruner.label, pruner.name) == ("eval", "loss")
