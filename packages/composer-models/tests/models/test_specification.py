"""The code blocks of the specification's page on models run."""

import pytest
import torch
import torch.nn.functional as F
import torchmetrics
import torchvision
from torchmetrics.collections import MetricCollection

from composer.models import ComposerModel


class ResNet18(ComposerModel):
    """The page's first model, with few classes for a quick test."""

    def __init__(self):
        super().__init__()
        self.model = torchvision.models.resnet18(num_classes=10)

    def forward(self, batch):
        inputs, _ = batch
        return self.model(inputs)

    def loss(self, outputs, batch):
        _, targets = batch
        return F.cross_entropy(outputs, targets)


class ResNet18WithMetrics(ResNet18):
    """The page's model with metrics, and the task argument that torchmetrics requires."""

    def __init__(self):
        super().__init__()
        self.train_accuracy = torchmetrics.Accuracy(task="multiclass", num_classes=10)
        self.val_accuracy = torchmetrics.Accuracy(task="multiclass", num_classes=10)

    def eval_forward(self, batch, outputs=None):
        if outputs is not None:
            return outputs
        inputs, _ = batch
        return self.model(inputs)

    def update_metric(self, batch, outputs, metric):
        _, targets = batch
        metric.update(outputs, targets)

    def get_metrics(self, is_train=False):
        return {"Accuracy": self.train_accuracy} if is_train else {"Accuracy": self.val_accuracy}


@pytest.fixture
def batch():
    """Two small images of two classes."""
    return torch.rand(2, 3, 32, 32, generator=torch.Generator().manual_seed(0)), torch.tensor([3, 7])


def test_custom_model(batch):
    """A few steps on one batch lower the loss."""
    torch.manual_seed(0)
    model = ResNet18()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.0001)
    losses = []

    for _ in range(3):
        optimizer.zero_grad()
        loss = model.loss(model(batch), batch)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())

    assert losses[-1] < losses[0]


@torch.no_grad()
def test_validation_loop(batch):
    """The page's validation loop gives the accuracy of each of its metrics."""
    model = ResNet18WithMetrics().eval()
    metrics = model.get_metrics(is_train=False)

    for _ in range(2):
        outputs = model.eval_forward(batch)
        for m in metrics.values():
            model.update_metric(batch, outputs, m)

    hits = (model(batch).argmax(1) == batch[1]).double().mean()
    assert metrics["Accuracy"].compute() == hits
    assert not model.train_accuracy.update_called


def test_metric_collection(batch):
    """A collection is a submodule of the model and can be returned from get_metrics."""

    class WithCollection(ResNet18WithMetrics):
        def __init__(self):
            super().__init__()
            self.train_metrics = MetricCollection([self.train_accuracy, torchmetrics.MeanMetric()])

        def get_metrics(self, is_train=False):
            return self.train_metrics if is_train else super().get_metrics()

    assert set(WithCollection().get_metrics(is_train=True).keys()) == {"MulticlassAccuracy", "MeanMetric"}
