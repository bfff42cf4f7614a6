"""Factorization applied to models."""

from __future__ import annotations

import math

import pytest
import scipy.linalg
import torch
from torch import nn
from torch.nn.utils import prune

from composer import functional as cf


def _network() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(3, 16, 3),
        nn.ReLU(),
        nn.Sequential(nn.Conv2d(16, 24, 3, stride=2, padding=1), nn.Conv2d(24, 24, 3, groups=2)),
        nn.ConvTranspose2d(24, 24, 2),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(24, 32),
        nn.ReLU(),
        nn.Linear(32, 4),
    )


SMALL = {"min_channels": 16, "min_features": 24}


class TestApplyFactorization:
    @pytest.mark.parametrize(
        ("arguments", "paths"),
        [
            (SMALL, ["2.0", "6"]),
            (SMALL | {"factorize_convs": False}, ["6"]),
            (SMALL | {"factorize_linears": False}, ["2.0"]),
            (SMALL | {"min_channels": 3}, ["0", "2.0", "6"]),
            (SMALL | {"min_channels": 17}, ["6"]),
            (SMALL | {"min_features": 4, "latent_features": 1}, ["2.0", "6", "8"]),
            (SMALL | {"min_features": 25}, ["2.0"]),
            ({}, []),
        ],
    )
    def test_arguments_select_layers(self, arguments: dict[str, float], paths: list[str]):
        """Ungrouped convolutions and linear layers are replaced if they are large enough on both sides."""
        report = cf.apply_factorization(_network(), **arguments)

        assert [path for entry in report for path in entry.paths] == paths

    @pytest.mark.filterwarnings("ignore:.*weight_norm.* is deprecated")
    @pytest.mark.parametrize(
        "touch",
        [lambda layer: prune.l1_unstructured(layer, "weight", 0.5), nn.utils.weight_norm, nn.utils.spectral_norm],
    )
    def test_layers_with_computed_weight_are_unchanged(self, touch):
        """Pruning and old normalizations compute the weight in hooks."""
        model = nn.Sequential(touch(nn.Conv2d(24, 24, 3)), touch(nn.Linear(32, 32)))

        assert not cf.apply_factorization(model, **SMALL)

    @pytest.mark.parametrize(("latent", "width"), [(5, 5), (0.5, 8)])
    def test_widths(self, latent: float, width: int):
        """A number, or a fraction of the smaller side."""
        model = _network()

        cf.apply_factorization(model, **SMALL, latent_channels=latent, latent_features=latent)

        assert model[2][0].latent_channels == width
        assert model[6].latent_features == (5 if width == 5 else 12)

    @pytest.mark.parametrize(("latent", "replaced"), [(12, True), (13, True), (14, False), (24, False)])
    def test_linears_are_replaced_only_if_cheaper(self, latent: int, replaced: bool):
        """24 * 32 = 768 multiplications against 56 per latent feature: up to 13 are cheaper."""
        report = cf.apply_factorization(nn.Sequential(nn.Linear(24, 32)), min_features=1, latent_features=latent)

        assert bool(report) == replaced

    @pytest.mark.parametrize(("latent", "replaced"), [(8, True), (9, False)])
    def test_convs_are_replaced_only_if_cheaper(self, latent: int, replaced: bool):
        """10 * 2 * 3 * 10 = 600 multiplications against 60 + 10 = 70 per latent channel."""
        model = nn.Sequential(nn.Conv2d(10, 10, (2, 3), stride=2))

        assert bool(cf.apply_factorization(model, min_channels=1, latent_channels=latent)) == replaced

    def test_weights_are_optimal_for_their_rank(self):
        """Errors equal those of scipy's truncated SVD."""
        model = _network().double()
        old = {path: model.get_submodule(path).weight.detach().flatten(1) for path in ("2.0", "6")}

        cf.apply_factorization(model, **SMALL, latent_channels=6, latent_features=6)

        for path, weight in old.items():
            new = model.get_submodule(path).weight.flatten(1)
            least = math.sqrt((scipy.linalg.svdvals(weight.numpy())[6:] ** 2).sum())
            assert (new - weight).norm().item() == pytest.approx(least)

    def test_tied_weights_are_unchanged(self):
        """A head with the embedding's weight does not change."""
        model = nn.Sequential(nn.Embedding(64, 32), nn.Linear(32, 64), nn.Linear(32, 64))
        model[1].weight = model[0].weight

        report = cf.apply_factorization(model, min_features=32)

        assert [entry.paths for entry in report] == [("2",)]
        assert model[1].weight is model[0].weight

    def test_subclasses_are_unchanged(self):
        """Parametrized and lazy layers, and the output layer of attention, do not change."""
        model = nn.Sequential(
            nn.utils.parametrizations.weight_norm(nn.Linear(24, 24)),
            nn.LazyLinear(24),
            nn.LazyConv2d(24, 3),
            nn.MultiheadAttention(24, 2),
        )

        assert not cf.apply_factorization(model, min_features=1, min_channels=1, latent_features=1, latent_channels=1)

    @pytest.mark.parametrize("training", [True, False])
    def test_transformer_layers_of_torch(self, training: bool):
        """The encoder layer, which reads its linear layers' weights in evaluation, still works."""
        layer = nn.TransformerEncoderLayer(32, 4, dim_feedforward=64, dropout=0.0, batch_first=True).train(training)
        tokens = torch.rand(2, 5, 32)
        for linear in (layer.linear1, layer.linear2):
            linear.weight.data = torch.outer(torch.rand(linear.out_features), torch.rand(linear.in_features))
        with torch.no_grad():
            expected = layer(tokens)

        report = cf.apply_factorization(layer, min_features=32)

        assert len(report) == 2
        with torch.no_grad():
            torch.testing.assert_close(layer(tokens), expected)


def test_base_layers_of_adapters_stay():
    """An adapter that is merged into the weight of its base layer is not lost."""

    class Adapted(nn.Module):
        def __init__(self):
            super().__init__()
            self.base_layer, self.added = nn.Linear(64, 64), nn.Parameter(torch.randn(64, 64))

    model = nn.Sequential(Adapted(), nn.Linear(64, 64))

    cf.apply_factorization(model, min_features=32)

    assert type(model[0].base_layer) is nn.Linear
    assert type(model[1]) is not nn.Linear


class TestWithOtherSurgery:
    @pytest.mark.parametrize("blur_first", [True, False])
    def test_inside_a_blur(self, blur_first: bool):
        """A blurred convolution is factorized inside its blur."""
        model = nn.Sequential(nn.Conv2d(16, 16, 3, stride=2, padding=1)).double()
        images = torch.randn(2, 16, 9, 9, dtype=torch.float64)
        cf.apply_blurpool(model, blur_first=blur_first)
        model[0].conv.weight.data = torch.einsum("o,ikl->oikl", torch.rand(16), torch.rand(16, 3, 3)).double()
        expected = model(images)

        report = cf.apply_factorization(model, min_channels=16)

        assert [entry.paths for entry in report] == [("0.conv",)]
        torch.testing.assert_close(model(images), expected)

    def test_standardized_weights_are_unchanged(self):
        """Two factors would not be the standardized weight; in the other order both are standardized."""
        model = nn.Sequential(nn.Conv2d(16, 16, 3))
        cf.apply_weight_standardization(model)

        assert not cf.apply_factorization(model, min_channels=16)

        model = nn.Sequential(nn.Conv2d(16, 16, 3))
        cf.apply_factorization(model, min_channels=16)

        assert [entry.paths for entry in cf.apply_weight_standardization(model)] == [("0.first",), ("0.second",)]
