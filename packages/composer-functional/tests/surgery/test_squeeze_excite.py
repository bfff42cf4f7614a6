"""Squeeze-and-excitation applied to models."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from composer import functional as cf
from fixtures.models import ResidualBlock


def _network() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1),
        nn.ReLU(),
        ResidualBlock(),
        nn.ConvTranspose2d(24, 24, 2),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(24, 5),
    )


class TestApplySqueezeExcite:
    @pytest.mark.parametrize(
        ("arguments", "paths"),
        [
            ({"min_channels": 16}, ["2.conv", "2.shortcut"]),
            ({"min_channels": 3}, ["0", "2.conv", "2.shortcut"]),
            ({"min_channels": 17}, []),
            ({}, []),
        ],
    )
    def test_arguments_select_layers(self, arguments: dict[str, int], paths: list[str]):
        """Convolutions with enough channels on both sides are wrapped; transposed ones and linear layers are not."""
        report = cf.apply_squeeze_excite(_network(), **arguments)

        assert [path for entry in report for path in entry.paths] == paths
        assert {entry.new for entry in report} <= {"SqueezeExciteConv2d"}

    def test_outputs_equal_torchvision(self):
        """The output equals the convolution followed by torchvision's layer with the same weights."""
        from torchvision.ops import SqueezeExcitation

        conv = nn.Conv2d(4, 8, 3)
        model, images = nn.Sequential(conv), torch.rand(2, 4, 6, 6)
        expected = SqueezeExcitation(8, 3)

        cf.apply_squeeze_excite(model, latent_channels=3, min_channels=4)
        for convolution, linear in ((expected.fc1, model[0].se.reduce), (expected.fc2, model[0].se.expand)):
            convolution.weight.data = linear.weight.data[:, :, None, None]
            convolution.bias.data.zero_()

        assert model[0].conv is conv
        torch.testing.assert_close(model(images), expected(conv(images)))

    def test_named_parameters_of_an_optimizer_are_renamed(self):
        """An optimizer with names has those of the changed model."""
        model = _network()
        optimizer = torch.optim.SGD(model.named_parameters(), lr=0.1)

        cf.apply_squeeze_excite(model, 4, 16, optimizers=optimizer)

        in_optimizer = dict(
            zip(optimizer.param_groups[0]["param_names"], optimizer.param_groups[0]["params"], strict=True)
        )
        assert in_optimizer == dict(model.named_parameters())


OTHERS = {
    "blurpool": cf.apply_blurpool,
    "blurpool, paper's order": lambda model: cf.apply_blurpool(model, blur_first=False),
    "factorization": lambda model: cf.apply_factorization(model, min_channels=16, latent_channels=2),
    "weight standardization": cf.apply_weight_standardization,
}


class TestWithOtherSurgery:
    @pytest.mark.parametrize("name", OTHERS)
    def test_order_does_not_matter(self, name: str):
        """In both orders the model has the same layers and outputs."""
        first, images = _network().double(), torch.rand(2, 3, 16, 16, dtype=torch.float64)
        second = copy.deepcopy(first)

        cf.apply_squeeze_excite(first, 4, 16)
        OTHERS[name](first)
        OTHERS[name](second)
        report = cf.apply_squeeze_excite(second, 4, 16)

        assert [entry.paths for entry in report] == [("2.conv",), ("2.shortcut",)]
        assert str(first) == str(second)
        second.load_state_dict(first.state_dict())
        assert torch.equal(first(images), second(images))

    @pytest.mark.parametrize("name", OTHERS)
    def test_other_surgery_is_inside(self, name: str):
        """The complete output of the other surgery's layer is weighted."""
        model, images = nn.Sequential(nn.Conv2d(16, 16, 3, stride=2)), torch.rand(2, 16, 9, 9)
        OTHERS[name](model)
        other = model[0]

        cf.apply_squeeze_excite(model, 4, 16)

        assert model[0].conv is other
        assert torch.equal(model(images), model[0].se(other(images)))
