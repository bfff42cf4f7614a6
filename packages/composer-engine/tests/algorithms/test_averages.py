"""Averages of a model's weights, of which EMA and SWA compute theirs."""

import copy

import pytest
import torch
from torch import nn
from torch.nn.utils.parametrizations import spectral_norm

from composer.algorithms._averages import AveragedWeights
from composer.core import Event


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_weights_of_16_bits_are_averaged_in_32(dtype):
    """Updates that 16 bits cannot represent count, also with evaluations between them, and after a resume."""

    def fill(value):
        for parameter in model.parameters():
            nn.init.constant_(parameter, value)

    model, averages = nn.Linear(4, 4).to(dtype), AveragedWeights("EMA")
    fill(1.0)
    averages.begin(model)
    fill(1.5)

    for update in range(3000):
        averages.update(model, 2 ** (-1 / 1000))
        if update % 100 == 0:
            with averages.in_model(model):
                assert model.weight.dtype == dtype
        if update == 1500:
            saved, averages = averages.state_dict(), AveragedWeights("EMA")
            averages.load_state_dict(saved)
            averages.check(model, training=True)

    expected = 1.5 - 0.5 / 8
    assert averages.state_dict()["averaged_weights"]["weight"].mean().item() == pytest.approx(expected, rel=1e-4)
    with averages.in_model(model):
        assert torch.equal(model.weight, torch.full_like(model.weight, expected))
    assert torch.equal(model.weight, torch.full_like(model.weight, 1.5))


def spectral_model():
    torch.manual_seed(0)
    return nn.Sequential(spectral_norm(nn.Linear(8, 32)), nn.BatchNorm1d(32))


def train(model, seed):
    """Change the weights, and update the vectors of the spectral norm and the statistics."""
    torch.manual_seed(seed)
    with torch.no_grad():
        for weight in model.parameters():
            weight.normal_()
        model.train()(torch.randn(4, 8))


def largest_singular_value(model):
    return torch.linalg.matrix_norm(model.eval()[0].weight, 2).item()


class TestBuffers:
    def test_vectors_of_a_spectral_norm(self):
        """In an evaluation with averages the vectors have norm 1, and the largest singular value is not enlarged."""
        model, averages = spectral_model(), AveragedWeights("EMA")
        averages.begin(model)
        for seed in range(6):
            train(model, seed)
            averages.update(model, 0.9)

        buffers = dict(model.named_buffers())
        before = {name: buffer.clone() for name, buffer in buffers.items()}
        with averages.in_model(model):
            within = {name: buffer.clone() for name, buffer in model.named_buffers()}
            assert largest_singular_value(model) < 10

        for name, value in within.items():
            assert torch.equal(value, before[name]) is ("running" not in name), name
        assert all(torch.equal(buffers[name], value) for name, value in before.items())

    @pytest.mark.parametrize("evaluating", [False, True])
    def test_copies_are_saved(self, evaluating):
        """A resumed run evaluates with the copies of the last update, and trains with its own buffers, bit for bit."""

        def end(model, averages):
            with averages.in_model(model):
                within = copy.deepcopy(model.state_dict())
            averages.restore()
            return [*within.values(), *model.state_dict().values()]

        model, averages = spectral_model(), AveragedWeights("EMA")
        averages.begin(model)
        train(model, 1)
        averages.update(model, 0.9)
        train(model, 2)
        averages.swap(Event.EVAL_START) if evaluating else None
        resumed, loaded = copy.deepcopy(model), AveragedWeights("EMA")
        loaded.load_state_dict(copy.deepcopy(averages.state_dict()))
        loaded.check(resumed, training=False)

        pairs = zip(end(resumed, loaded), end(model, averages), strict=True)

        assert all(torch.equal(own, expected) for own, expected in pairs)

    def test_low_precision(self):
        """Copies of buffers in 16 bits are exact."""
        model, averages = nn.BatchNorm1d(3).bfloat16(), AveragedWeights("EMA")
        model.register_buffer("rates", torch.ones(3, dtype=torch.bfloat16))
        averages.begin(model)
        model.rates.fill_(0.1)
        averages.update(model, 0.9)
        model.rates.fill_(0.2)

        with averages.in_model(model):
            assert torch.equal(model.rates, torch.full((3,), 0.1, dtype=torch.bfloat16))
        assert torch.equal(model.rates, torch.full((3,), 0.2, dtype=torch.bfloat16))
