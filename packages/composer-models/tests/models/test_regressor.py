"""Tests of composer.models.ComposerRegressor."""

import pytest
import torch
from torch import nn
from torchmetrics import MeanAbsoluteError, R2Score

from composer.models import ComposerRegressor


def regressor(num_outputs=1, **settings):
    return ComposerRegressor(nn.Linear(4, num_outputs), **settings)


class TestLoss:
    def test_mean_squared_error(self):
        """The loss is the mean of the squared differences over samples and numbers."""
        model, batch = regressor(3), (torch.randn(5, 4), torch.randn(5, 3))

        loss = model.loss(model(batch), batch)

        torch.testing.assert_close(loss, (model.module(batch[0]) - batch[1]).square().sum() / 15)

    @pytest.mark.parametrize(("outputs", "target"), [((5, 1), (5,)), ((5,), (5, 1)), ((5,), (5,)), ((5, 1), (5, 1))])
    def test_one_number_with_and_without_a_dimension(self, outputs, target):
        """Predictions of one number are compared sample by sample, not each with every target."""
        predicted, expected = torch.randn(outputs), torch.randn(target)

        loss = regressor().loss(predicted, (None, expected))

        torch.testing.assert_close(loss, (predicted.view(5) - expected.view(5)).square().mean())

    @pytest.mark.parametrize("dtype", [torch.float64, torch.int64, torch.bfloat16])
    def test_types_of_targets(self, dtype):
        """Targets of any type, such as NumPy's float64, have a gradient in the type of the weights."""
        model, batch = regressor(), (torch.randn(5, 4), torch.arange(5).to(dtype))

        model.loss(model(batch), batch).backward()

        expected = 2 / 5 * ((model(batch).view(5) - torch.arange(5.0)) @ batch[0])
        torch.testing.assert_close(model.module.weight.grad, expected.view(1, 4))

    @pytest.mark.parametrize("options", [{}, {"loss_fn": nn.MSELoss()}, {"loss_fn": nn.L1Loss()}])
    def test_other_shapes_are_an_error(self, options):
        """Shapes that torch would broadcast raise an error that states both."""
        with pytest.raises(ValueError, match=r"shape \(5, 3\) of the outputs, got \(5, 1\)"):
            regressor(**options).loss(torch.zeros(5, 3), (None, torch.zeros(5, 1)))


class TestMetrics:
    def test_default_metrics(self):
        """The errors of two batches of different sizes are those of all samples."""
        model = regressor()
        outputs, target = torch.randn(7, 1), torch.randn(7)

        values = {}
        for name, metric in model.get_metrics(is_train=False).items():
            for part in (slice(5), slice(5, 7)):
                model.update_metric((None, target[part]), outputs[part], metric)
            values[name] = metric.compute()

        error = outputs.view(7) - target
        torch.testing.assert_close(values["MeanAbsoluteError"], error.abs().mean())
        torch.testing.assert_close(values["MeanSquaredError"], error.square().mean())
        assert list(model.get_metrics(is_train=True)) == ["MeanAbsoluteError"]

    def test_given_metrics(self):
        """Given metrics replace the defaults of their phase, and each phase has its own."""
        metric = R2Score()

        model = regressor(train_metrics=metric, val_metrics=[metric])

        assert model.get_metrics(is_train=True)["R2Score"] is not model.get_metrics(is_train=False)["R2Score"]
        assert list(regressor(val_metrics=MeanAbsoluteError()).get_metrics()) == ["MeanAbsoluteError"]


class TestBatches:
    @pytest.mark.parametrize("form", [lambda rows: rows, lambda rows: [rows]])
    def test_batches_without_targets(self, form):
        """The forward pass needs no targets, the loss does."""
        model, input = regressor(), torch.rand(2, 4)

        assert torch.equal(model(form(input)), model.module(input))
        with pytest.raises(TypeError, match=r"takes batches \(input, target\), got"):
            model.loss(torch.zeros(2, 1), form(input))

    def test_batch_that_is_no_pair(self):
        """The error states what a batch has to be."""
        with pytest.raises(TypeError, match=r"ComposerRegressor takes batches \(input, target\), got dict with keys"):
            regressor()({"input": torch.zeros(2, 4)})

    def test_bad_arguments(self):
        """The module and the loss are checked at construction."""
        with pytest.raises(TypeError, match="module"):
            ComposerRegressor(torch.sin)
        with pytest.raises(TypeError, match="loss_fn"):
            regressor(loss_fn="mse")


@pytest.mark.parametrize(("outputs", "target"), [((torch.rand(2), torch.rand(2)), torch.rand(2)), (torch.rand(2), {})])
def test_several_heads(outputs, target):
    """The error for several outputs or targets states what to do."""
    model = ComposerRegressor(nn.Identity())

    with pytest.raises(TypeError, match=r"takes one tensor of (outputs, got tuple|targets, got dict).*torch\.cat"):
        model.loss(outputs, (None, target))
