"""ModelLoss: the mean of a model's own loss over samples, in total and by part."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from composer.metrics import ModelLoss
from composer.models import ComposerModel


class Line(ComposerModel):
    """A model with a loss, and no metrics."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 2)

    def forward(self, batch):
        return self.layer(batch["x"])

    def loss(self, outputs, batch):
        return F.mse_loss(outputs, batch["y"])


class Sums(Line):
    """A loss that is a sum."""

    loss_is_sum = True

    def loss(self, outputs, batch):
        return F.mse_loss(outputs, batch["y"], reduction="sum") / 2


class Terms(Line):
    """A loss that is a mean over some of the samples, in two parts of which one is the total."""

    def loss(self, outputs, batch):
        errors = (outputs - batch["y"]).square().mean(1)[batch["is_used"]]
        return {"total": errors.mean(), "largest": errors.mean() * 3}

    def count_loss_terms(self, batch):
        return batch["is_used"].sum()


class Sequence(Line):
    """Several losses without names."""

    def loss(self, outputs, batch):
        return [super().loss(outputs, batch), outputs.square().mean()]


def batches():
    """Three batches of unequal sizes; no sample of the last one is used."""
    parts = [torch.randn(count, 3) for count in (5, 2, 4)]
    used = [torch.arange(5) % 2 == 0, torch.tensor([True, False]), torch.zeros(4, dtype=torch.bool)]
    return [{"x": x, "y": torch.randn(len(x), 2), "is_used": each} for x, each in zip(parts, used, strict=True)]


def measured(model, data):
    """The values of the metrics that the model has by default."""
    metrics = model.get_metrics(is_train=False)
    for batch in data:
        for metric in metrics.values():
            model.update_metric(batch, model.eval_forward(batch), metric)
    return metrics["loss"].compute()


def errors_of(model, data):
    """The squared errors of all samples, and which are used."""
    x, y, used = (torch.cat([one[name] for one in data]) for name in ("x", "y", "is_used"))
    return (model.layer(x) - y).square().mean(1).detach(), used


@pytest.mark.parametrize("kind", [Line, Sums])
def test_mean_over_samples(kind):
    """Each sample has the same weight, also if the loss is a sum."""
    model, data = kind(), batches()

    torch.testing.assert_close(measured(model, data), errors_of(model, data)[0].mean())


def test_mean_over_terms():
    """The loss is the mean over what the model counts, and a batch without any does not count."""
    model, data = Terms(), batches()
    errors, used = errors_of(model, data)

    values = measured(model, data)

    torch.testing.assert_close(values, {"": errors[used].mean(), "largest": 3 * errors[used].mean()})


def test_parts_without_names():
    """Losses of a sequence have the names under which the training logs them."""
    model, data = Sequence(), batches()

    values = measured(model, data)

    assert values.keys() == {"", "loss0", "loss1"}
    torch.testing.assert_close(values["loss0"], errors_of(model, data)[0].mean())


def test_reset():
    """A second evaluation begins with nothing, whose mean is nan."""
    metric = ModelLoss()
    metric.update({"a": torch.ones(()), "b": torch.ones(())}, 2)
    assert metric.compute()[""] == 2

    metric.reset()

    with pytest.warns(UserWarning, match="before the ``update`` method"):
        assert all(value.isnan() for value in metric.compute().values())


def test_16_bit_outputs():
    """Outputs of 16-bit autocast fit the layers that a loss calls, which have the type of the weights."""
    model, batch = Line(), {"x": torch.rand(4, 3), "y": torch.rand(4, 2)}
    model.loss = lambda outputs, batch: F.mse_loss(F.linear(outputs, model.layer.weight[:, :2]), batch["y"])

    model.update_metric(batch, model(batch).bfloat16(), metric := ModelLoss())

    assert metric.compute().isfinite()


def test_only_models_that_can():
    """A model that updates metrics or evaluates in its own way gets no metric that it does not know."""

    class Updates(Line):
        def update_metric(self, batch, outputs, metric):
            metric.update(outputs, batch["y"])

    class Generates(Line):
        def eval_forward(self, batch, outputs=None):
            return "text"

    class Adds(Updates):
        def get_metrics(self, is_train):
            return {**super().get_metrics(is_train), "other": None}

    assert not Updates().get_metrics(is_train=False)
    assert not Generates().get_metrics(is_train=False)
    assert not Line().get_metrics(is_train=True)
    assert list(Adds().get_metrics(is_train=False)) == ["loss", "other"]


def test_samples_that_cannot_be_counted():
    """Batches of unknown structure raise an error with the method to define."""
    model, batch = Line(), {"x": torch.rand(4, 3), "y": torch.rand(4, 2), "note": torch.rand(7)}

    with pytest.raises(ValueError, match=r"the lengths \[4, 7\]. Define count_loss_terms"):
        model.update_metric(batch, model(batch), ModelLoss())
