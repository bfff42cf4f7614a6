"""Averages of a model's weights, of which EMA and SWA compute theirs."""

import pytest
import torch
from torch import nn

from composer.algorithms._averages import AveragedWeights


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
