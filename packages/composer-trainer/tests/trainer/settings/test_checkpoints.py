"""save_best: the best checkpoint by a metric of an evaluator."""

from pathlib import Path

import pytest
import torch
from torch import nn
from torchmetrics import Metric
from torchmetrics.classification import MulticlassConfusionMatrix

from composer.algorithms import EMA, BlurPool
from composer.checkpoint import KeepBest, find_checkpoints
from composer.loggers import InMemoryLogger
from composer.trainer.settings.checkpoints import best_by
from fixtures import make_classifier, make_loader, small_run, trained


class Undirected(Metric):
    """A metric that does not declare whether more is better."""

    def update(self):
        pass

    def compute(self):
        return 0.0


class WithMetrics:
    """A model with one metric."""

    def __init__(self, metric):
        self.metric = metric

    def get_metrics(self, is_train):
        return {"Metric": self.metric}


def evaluated(folder, **options):
    """Train with an evaluation after each epoch, and return the trainer and the accuracy of each checkpoint by name."""
    trainer = small_run(max_duration="4ep", eval_dataloader=make_loader(seed=1), save_folder=str(folder), **options)
    trainer.fit()
    name = "metrics/eval/MulticlassAccuracy"
    return trainer, {one.name: one.manifest.metrics.get(name) for one in find_checkpoints(str(folder))}


def test_best_checkpoint_of_a_training(tmp_path):
    """The link and the trainer name the first checkpoint with the highest accuracy."""
    trainer, accuracies = evaluated(tmp_path, save_best="eval/MulticlassAccuracy")

    best = max(accuracies, key=accuracies.get)
    assert len(accuracies) == 4
    assert Path(trainer.best_checkpoint).name == (tmp_path / "best").resolve().name == best


@pytest.mark.parametrize("save_interval", ["3ba", "1ep", 0, "7ba"])
@pytest.mark.parametrize("algorithms", [list, lambda: [EMA("4ba")]])
def test_best_checkpoint_is_the_one_that_was_measured(tmp_path, save_interval, algorithms):
    """A new best value is saved at once, and the checkpoint's weights have the accuracy that its manifest states."""
    log = InMemoryLogger()
    options = {"save_interval": save_interval, "save_best": "eval/MulticlassAccuracy", "loggers": log}
    trainer, _ = evaluated(tmp_path, eval_interval="4ba", algorithms=algorithms(), **options)
    highest = max(float(value) for _, value in log.data["metrics/eval/MulticlassAccuracy"])

    again = small_run(eval_dataloader=make_loader(seed=1), load_path=trainer.best_checkpoint, algorithms=algorithms())
    assert again.eval()["eval"]["MulticlassAccuracy"].item() == pytest.approx(highest)
    [best] = [one for one in find_checkpoints(str(tmp_path)) if str(tmp_path / one.name) == trainer.best_checkpoint]
    assert best.manifest.metrics["metrics/eval/MulticlassAccuracy"] == pytest.approx(highest)


@pytest.mark.parametrize("again", [list, lambda: [EMA("4ba")]])
def test_weights_of_the_best_checkpoint_are_those_measured(tmp_path, again):
    """The weights alone evaluate to the value that was logged, with and without EMA in the new run."""
    trainer, _ = evaluated(tmp_path, save_best="eval/CrossEntropy", algorithms=EMA("4ba"))
    [best] = [one for one in find_checkpoints(str(tmp_path)) if one.path == trainer.best_checkpoint]
    data = {"eval_dataloader": make_loader(seed=1), "algorithms": again()}

    later = small_run(load_path=trainer.best_checkpoint, load_weights_only=True, **data)

    expected = best.manifest.metrics["metrics/eval/CrossEntropy"]
    assert later.eval()["eval"]["CrossEntropy"].item() == pytest.approx(expected, rel=1e-6)


def test_best_of_a_resumed_run(tmp_path):
    """A resumed run knows the best value of the run before."""
    options = {"save_best": "eval/MulticlassAccuracy", "eval_interval": "1ba", "save_interval": 0, "run_name": "one"}
    complete, _ = evaluated(tmp_path / "complete", **options)
    for duration in ("7ba", "4ep"):
        again = {"eval_dataloader": make_loader(seed=1), "save_folder": str(tmp_path / "parts"), "autoresume": True}
        trainer = small_run(max_duration=duration, **again, **{**options, "save_interval": "7ba"})
        trainer.fit()
        trainer.close()

    assert Path(trainer.best_checkpoint).name == Path(complete.best_checkpoint).name


def test_only_the_last_and_the_best_are_kept(tmp_path):
    """With a number of checkpoints to keep, the best one is kept in addition."""
    options = {"save_num_checkpoints_to_keep": 1, "save_best": "metrics/eval/MulticlassAccuracy"}

    trainer, accuracies = evaluated(tmp_path, **options)

    assert {*accuracies} == {"ep4-ba20", Path(trainer.best_checkpoint).name}
    assert trainer.fit().best_checkpoint == trainer.best_checkpoint


def test_best_checkpoint_can_be_loaded_by_its_link(tmp_path):
    """The link is a path to load."""
    trainer, _ = evaluated(tmp_path, save_best="eval/MulticlassAccuracy")
    trainer.close()

    again = small_run(load_path=str(tmp_path / "best"))

    assert f"ep{int(again.state.timestamp.epoch)}-" in trainer.best_checkpoint


@pytest.mark.parametrize(
    ("save_best", "message"),
    [
        ("eval/MulticlassAcuracy", r"save_best must be one of \[.*did you mean 'eval/MulticlassAccuracy'"),
        ("test/MulticlassAccuracy", r"save_best must be one of \['eval/"),
        ("MulticlassAccuracy", r"save_best must be one of \['eval/.*did you mean 'eval/MulticlassAccuracy'"),
        ("eval/accuracy", "did you mean 'eval/MulticlassAccuracy'"),
        ("eval/loss", r"got 'eval/loss'\. For a loss, add LossMetric\(loss_fn\)"),
        (3, "save_best must be a metric such as 'eval/MulticlassAccuracy' or a KeepBest, got 3"),
    ],
)
def test_bad_value(tmp_path, save_best, message):
    """An unknown metric or label raises at construction, with the known ones."""
    with pytest.raises((TypeError, ValueError), match=message):
        small_run(save_best=save_best, save_folder=str(tmp_path), eval_dataloader=make_loader())


def test_a_matrix_is_no_choice():
    """A metric by which no checkpoint is better than another is not among those of the error."""
    from composer.metrics import CrossEntropy

    model = make_classifier(val_metrics=[CrossEntropy(), MulticlassConfusionMatrix(3)])
    with pytest.raises(ValueError, match=r"must be one of \['eval/CrossEntropy'\], got 'eval/x'"):
        best_by("eval/x", model, ["eval"])


def test_mode_follows_the_metric():
    """A metric that should decrease is minimized; one that declares nothing raises, and a KeepBest is used as it is."""
    from composer.metrics import CrossEntropy

    assert best_by("eval/Metric", WithMetrics(CrossEntropy()), ["eval"]).mode == "min"
    assert best_by(KeepBest("a/b", 3), None, []) == KeepBest("a/b", 3)
    with pytest.raises(ValueError, match="Undirected does not declare whether more is better: give save_best=KeepBest"):
        best_by("eval/Metric", WithMetrics(Undirected()), ["eval"])


def test_newest_checkpoint_is_loaded_with_all_algorithms(tmp_path):
    """``load_exclude_algorithms`` is for the checkpoint of ``load_path``, and not for that of autoresume."""

    def make_network():
        layers = nn.Conv2d(3, 16, 3), nn.Conv2d(16, 16, 3, stride=2), nn.AdaptiveAvgPool2d(1), nn.Flatten()
        return nn.Sequential(*layers, nn.Linear(16, 3))

    options = {
        "train_dataloader": [(torch.rand(3, 3, 8, 8), torch.arange(3))],
        "save_folder": str(tmp_path),
        "run_name": "run",
        "autoresume": True,
        "max_duration": "1ep",
    }
    trained(network=make_network(), algorithms=BlurPool(), **options)

    resumed = small_run(network=make_network(), load_exclude_algorithms="BlurPool", **options)

    assert [type(one) for one in resumed.state.algorithms] == [BlurPool]
