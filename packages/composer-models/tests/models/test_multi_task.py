"""Tests of composer.models.ComposerMultiTask."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torchmetrics import MeanAbsoluteError, R2Score

from composer.loss import DiceLoss
from composer.models import ComposerClassifier, ComposerMultiTask, ComposerRegressor

BATCH = (
    torch.randn(6, 4, generator=torch.Generator().manual_seed(0)),
    {"age": torch.arange(6.0), "kind": torch.tensor([0, 1, 2, 2, 1, 0])},
)


@pytest.fixture(autouse=True)
def same_draws():
    """Seed every test."""
    torch.manual_seed(0)


def two_heads(**settings):
    tasks = {"age": ComposerRegressor(nn.Linear(8, 1)), "kind": ComposerClassifier(nn.Linear(8, 3))}
    return ComposerMultiTask(nn.Linear(4, 8), tasks, **settings)


class TestLoss:
    def test_each_head_has_its_weighted_loss(self):
        """Losses are those of torch for the outputs of each head, times the weights; others have the weight 1."""
        model = two_heads(weights={"kind": 0.25})

        losses = model.loss(model(BATCH), BATCH)

        features = model.module(BATCH[0])
        age, kind = (model.tasks[name].module(features) for name in ("age", "kind"))
        torch.testing.assert_close(losses["age"], F.mse_loss(age[:, 0], BATCH[1]["age"]))
        torch.testing.assert_close(losses["kind"], 0.25 * F.cross_entropy(kind, BATCH[1]["kind"]))

    def test_module_with_heads(self):
        """Outputs that the module returns by task are passed on, and inputs without targets are predicted."""

        class Heads(nn.Module):
            def forward(self, input):
                return {"age": input[:, :1], "kind": input[:, 1:], "other": input}

        tasks = {"age": ComposerRegressor(nn.Identity()), "kind": ComposerClassifier(nn.Identity(), 3)}
        model = ComposerMultiTask(Heads(), tasks)

        for batch in (BATCH, BATCH[0], (BATCH[0],)):
            outputs = model(batch)
            assert outputs.keys() == tasks.keys()
            assert torch.equal(outputs["kind"], BATCH[0][:, 1:])

    def test_splits(self):
        """Losses that are no means over samples are declared."""
        model = two_heads()
        assert not model.loss_needs_whole_batch
        assert not model.loss_is_sum

        model.tasks["age"].loss_fn = nn.MSELoss(reduction="sum")
        assert model.loss_needs_whole_batch
        model.tasks["kind"].loss_fn = nn.CrossEntropyLoss(reduction="sum")
        assert model.loss_is_sum
        assert not model.loss_needs_whole_batch
        model.tasks["age"].loss_fn = DiceLoss(batch=True)
        assert model.loss_needs_whole_batch

    def test_targets_that_do_not_count(self, recwarn):
        """Ignored targets and weights of classes are warned of once, in training; other targets are not."""
        model = two_heads()
        model.count_loss_terms(BATCH)
        kinds = torch.tensor([0, 1, -100, 2, 1, 0])
        batch = BATCH[0], {**BATCH[1], "kind": kinds}
        model.eval().count_loss_terms(batch)
        assert not recwarn.list

        model.train()
        assert [model.count_loss_terms(batch) for _ in range(3)] == [None] * 3
        (warned,) = recwarn.list
        assert "task 'kind' is no mean over samples" in str(warned.message)

        weighted = two_heads()
        weighted.tasks["kind"].loss_fn = nn.CrossEntropyLoss(torch.tensor([1.0, 2.0, 3.0]))
        weighted.count_loss_terms(BATCH)
        assert len(recwarn.list) == 2


class TestMetrics:
    def test_each_head_has_its_metrics(self):
        """Metrics have the names of the tasks, and are updated with their outputs, also if tasks share them."""
        shared = [MeanAbsoluteError(), R2Score()]
        tasks = {name: ComposerRegressor(nn.Linear(8, 1), [], shared) for name in ("first", "second")}
        model = ComposerMultiTask(nn.Linear(4, 8), tasks)
        batch = BATCH[0], {"first": torch.randn(6), "second": torch.randn(6)}
        outputs = model.eval_forward(batch)

        metrics = model.get_metrics(is_train=False)
        for metric in metrics.values():
            model.update_metric(batch, outputs, metric)

        assert not model.get_metrics(is_train=True)
        for name in tasks:
            error = outputs[name][:, 0] - batch[1][name]
            deviation = batch[1][name] - batch[1][name].mean()
            torch.testing.assert_close(metrics[f"{name}/MeanAbsoluteError"].compute(), error.abs().mean())
            expected = 1 - error.square().sum() / deviation.square().sum()
            torch.testing.assert_close(metrics[f"{name}/R2Score"].compute(), expected)

    def test_metric_of_no_task(self):
        """The error names the place of a metric."""
        model = two_heads()

        with pytest.raises(ValueError, match=r"MeanAbsoluteError belongs to none of the tasks \['age', 'kind'\]"):
            model.update_metric(BATCH, model(BATCH), MeanAbsoluteError())


class TestErrors:
    def test_arguments(self):
        """Errors name the task, or the weight without one."""
        head = ComposerRegressor(nn.Linear(8, 1))
        with pytest.raises(ValueError, match=r"got the tasks \['age'\] and the weights \['ages'\]"):
            ComposerMultiTask(nn.Identity(), {"age": head}, weights={"ages": 1.0})
        with pytest.raises(ValueError, match="must have a model for each task"):
            ComposerMultiTask(nn.Identity(), {})
        with pytest.raises(TypeError, match=r"tasks\['age'\] must be a torch\.nn\.Module"):
            ComposerMultiTask(nn.Identity(), {"age": "regressor"})

    def test_targets(self):
        """Errors name the tasks that the targets must have."""
        model = two_heads()
        with pytest.raises(ValueError, match=r"with the tasks \['age', 'kind'\], got the targets \['age'\]"):
            model.loss(model(BATCH), (BATCH[0], {"age": torch.zeros(6)}))
        with pytest.raises(TypeError, match=r"with the tasks \['age', 'kind'\], got Tensor"):
            model.loss(model(BATCH), (BATCH[0], torch.zeros(6)))
