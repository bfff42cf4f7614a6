"""Tests of composer.models.Initializer."""

import math

import pytest
import torch
from torch import nn

from composer.models import Initializer

SEED = 0


@pytest.fixture
def model():
    """Layers of every kind with all parameters set to 7."""
    model = nn.Sequential(
        nn.Conv2d(8, 64, 3), nn.BatchNorm2d(64), nn.ReLU(), nn.Linear(400, 300), nn.LayerNorm(300), nn.Embedding(9, 3)
    )
    for parameter in model.parameters():
        nn.init.constant_(parameter, 7.0)
    torch.manual_seed(SEED)
    return model


def _changed(model):
    return {
        name
        for name, parameter in model.named_parameters()
        if not torch.equal(parameter, 7 * torch.ones_like(parameter))
    }


class TestInitializer:
    @pytest.mark.parametrize(
        ("name", "deviation", "is_uniform"),
        [
            ("kaiming_normal", lambda fan_in, fan_out: math.sqrt(2 / fan_in), False),
            ("kaiming_uniform", lambda fan_in, fan_out: math.sqrt(2 / fan_in), True),
            ("xavier_normal", lambda fan_in, fan_out: math.sqrt(2 / (fan_in + fan_out)), False),
            ("xavier_uniform", lambda fan_in, fan_out: math.sqrt(2 / (fan_in + fan_out)), True),
        ],
    )
    def test_weights_of_linear_and_convolution_layers(self, model, name, deviation, is_uniform):
        """Mean 0, the papers' standard deviation, and for uniform ones the range sqrt(3) times that."""
        model.apply(Initializer(name).get_initializer())

        assert _changed(model) == {"0.weight", "3.weight"}
        for weight, fans in [(model[0].weight, (8 * 9, 64 * 9)), (model[3].weight, (400, 300))]:
            expected = deviation(*fans)
            assert weight.mean().item() == pytest.approx(0, abs=4 * expected / math.sqrt(weight.numel()))
            assert weight.std().item() == pytest.approx(expected, rel=0.05)
            largest = weight.abs().max().item() / expected
            assert (1.7 < largest < math.sqrt(3) + 1e-5) == is_uniform

    def test_batch_norm_ones(self, model):
        """Scales are 1 and shifts 0."""
        model.apply(Initializer.BN_ONES.get_initializer())

        assert _changed(model) == {"1.weight", "1.bias"}
        assert torch.equal(model[1].weight, torch.ones(64))
        assert torch.equal(model[1].bias, torch.zeros(64))

    def test_batch_norm_uniform(self):
        """Scales are uniform in [0, 1), shifts are 0."""
        norm = nn.BatchNorm1d(10_000)

        norm.apply(Initializer.BN_UNIFORM.get_initializer())

        fractions = torch.histc(norm.weight, bins=10, min=0, max=1) / 10_000
        assert norm.weight.min() >= 0
        assert norm.weight.max() < 1
        torch.testing.assert_close(fractions, torch.full((10,), 0.1), atol=0.015, rtol=0)
        assert torch.equal(norm.bias, torch.zeros(10_000))

    @pytest.mark.parametrize("name", ["kaiming_normal", "bn_uniform", "xavier_uniform"])
    def test_depends_on_the_seed(self, name):
        """Equal seeds give equal weights, other seeds do not."""
        layers = []
        for seed in [1, 1, 2]:
            torch.manual_seed(seed)
            layers.append(nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)).apply(Initializer(name).get_initializer()))

        drawn = [torch.cat([layer[0].weight.flatten(), layer[1].weight]) for layer in layers]
        assert torch.equal(drawn[0], drawn[1])
        assert not torch.equal(drawn[0], drawn[2])

    def test_unknown_name(self):
        """The error states the unknown name."""
        with pytest.raises(ValueError, match="'kaiming' is not a valid Initializer"):
            Initializer("kaiming")
