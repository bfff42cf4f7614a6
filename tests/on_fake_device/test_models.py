"""Losses, metrics and wrappers of models on the device."""

import pytest
import torch
from torch import nn

import composer.loss
import composer.metrics
from composer.loss import DiceLoss, binary_cross_entropy_with_logits, soft_cross_entropy
from fixtures.kernels import backward
from on_fake_device.guards import devices

CLASSES = 4
UPDATES = {
    "BinaryF1Score": (composer.metrics.BinaryF1Score, "pairs", "booleans"),
    "CrossEntropy": (composer.metrics.CrossEntropy, "scores", "labels"),
    "CrossEntropy of pixels": (composer.metrics.CrossEntropy, "maps", "masks"),
    "Dice": (lambda: composer.metrics.Dice(CLASSES), "maps", "masks"),
    "LanguageCrossEntropy": (composer.metrics.LanguageCrossEntropy, "tokens", "ids"),
    "LanguagePerplexity": (composer.metrics.LanguagePerplexity, "tokens", "ids"),
    "LossMetric": (lambda: composer.metrics.LossMetric(nn.functional.cross_entropy), "scores", "labels"),
    "MIoU": (lambda: composer.metrics.MIoU(CLASSES), "maps", "masks"),
    "ModelLoss": (composer.metrics.ModelLoss, "loss", "count"),
    "MaskedAccuracy": (composer.metrics.MaskedAccuracy, "tokens", "ids"),
}


def made(dtype=torch.float32):
    """Return scores and targets on the device."""
    values = {
        "pairs": torch.rand(6, 2, dtype=dtype),
        "booleans": torch.arange(6) % 2,
        "scores": torch.rand(6, CLASSES, dtype=dtype),
        "labels": torch.arange(6) % CLASSES,
        "maps": torch.rand(2, CLASSES, 5, 5, dtype=dtype),
        "masks": torch.randint(CLASSES, (2, 5, 5)),
        "tokens": torch.rand(2, 7, CLASSES, dtype=dtype),
        "ids": torch.randint(CLASSES, (2, 7)),
        "loss": torch.rand((), dtype=dtype),
        "count": torch.tensor(6),
        "targets": torch.rand(6, CLASSES, dtype=dtype),
    }
    return {name: value.cuda() for name, value in values.items()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", UPDATES)
def test_metric(name, dtype, step):
    """A metric is updated where the outputs are."""
    (make, *arguments), values = UPDATES[name], made(dtype)
    metric = make().to("cuda")

    with step():
        metric.update(*(values[one] for one in arguments))

    assert devices(metric.metric_state) == {"cuda"}


def test_each_metric_is_here():
    """A new metric has a case. MAP stores boxes on the CPU, one image at a time."""
    assert {name.split()[0] for name in UPDATES} | {"MAP"} == {*composer.metrics.__all__}


LOSSES = {
    "DiceLoss": (DiceLoss, "maps", "masks"),
    "binary_cross_entropy_with_logits": (lambda: binary_cross_entropy_with_logits, "scores", "labels"),
    "binary_cross_entropy_with_logits, soft": (lambda: binary_cross_entropy_with_logits, "scores", "targets"),
    "soft_cross_entropy": (lambda: soft_cross_entropy, "scores", "labels"),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", LOSSES)
def test_loss(name, dtype, step):
    """A loss and its gradients are computed where the outputs are."""
    (make, output, target), values = LOSSES[name], made(dtype)
    values[output].requires_grad_()

    with step():
        backward(make()(values[output], values[target]))

    assert devices(values[output].grad) == {"cuda"}


def test_each_loss_is_here():
    """A new loss has a case. The registry holds these functions by name."""
    assert {name.partition(",")[0] for name in LOSSES} | {"loss_registry"} == {*composer.loss.__all__}
