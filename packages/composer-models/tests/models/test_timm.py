"""Tests of composer.models.composer_timm."""

import sys

import pytest
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F

from composer.models import ComposerClassifier, composer_timm

timm = pytest.importorskip("timm")


@pytest.fixture(autouse=True)
def same_draws():
    """Seed every test."""
    torch.manual_seed(0)


@pytest.mark.parametrize(
    ("name", "rate", "settings"),
    [("resnet10t", 2e-3, {}), ("vit_tiny_patch16_224", 1e-4, {"img_size": 32, "patch_size": 8, "depth": 2})],
)
def test_learns_digits(name, rate, settings):
    """A small ResNet and a small vision transformer learn 64 handwritten digits in a few steps."""
    digits = load_digits()
    images = torch.tensor(digits.images[:64], dtype=torch.float)[:, None].expand(-1, 3, -1, -1) / 16
    batch = F.interpolate(images, size=32), torch.tensor(digits.target[:64])
    model = composer_timm(name, num_classes=10, **settings)
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
    losses = []

    for _ in range(12):
        loss = model.loss(model(batch), batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())

    assert isinstance(model, ComposerClassifier)
    assert losses[-1] < 0.85 * losses[0]


def test_arguments_are_passed_on():
    """Arguments of create_model are passed to timm, others to ComposerClassifier."""
    model = composer_timm(
        "resnet10t", num_classes=3, drop_rate=0.25, in_chans=1, train_metrics=[], loss_fn=F.cross_entropy
    )

    assert model.module.drop_rate == 0.25
    assert model.module.get_classifier().out_features == 3
    assert model((torch.rand(2, 1, 64, 64), None)).shape == (2, 3)
    assert (model.get_metrics(is_train=True), model.loss_fn) == ({}, F.cross_entropy)


def test_one_score():
    """One score distinguishes two classes."""
    model = composer_timm("resnet10t", num_classes=1, loss_fn=nn.BCEWithLogitsLoss())

    assert model((torch.rand(2, 3, 64, 64), None)).shape == (2, 1)
    assert (model.num_classes, model.get_metrics(is_train=True)["MulticlassAccuracy"].num_classes) == (2, 2)


def test_weights_from_a_folder(tmp_path):
    """Weights in a file are loaded by timm."""
    saved = timm.create_model("resnet10t", num_classes=3)
    torch.save(saved.state_dict(), tmp_path / "weights.pth")

    model = composer_timm("resnet10t", num_classes=3, checkpoint_path=tmp_path / "weights.pth")

    torch.testing.assert_close(model.module.state_dict(), saved.state_dict(), rtol=0, atol=0)


@pytest.mark.parametrize(
    ("name", "suggested"), [("resnet-50", "'resnet50"), ("vit_tiny_patch16_24.augreg", "'vit_tiny_")]
)
def test_unknown_names(name, suggested):
    """The error suggests similar names."""
    with pytest.raises(ValueError, match=rf"timm has no model '{name}'\. Did you mean {suggested}"):
        composer_timm(name)


def test_without_timm(monkeypatch):
    """Without timm the error states how to install it."""
    monkeypatch.setitem(sys.modules, "timm", None)

    with pytest.raises(ModuleNotFoundError, match=r'composer_timm needs timm: pip install "composer-models\[timm\]"'):
        composer_timm("resnet10t")
