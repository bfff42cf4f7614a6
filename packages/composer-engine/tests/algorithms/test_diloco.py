"""DiLoCo in one process: outer steps by their formula."""

import pytest
import torch
from torch import nn

from composer.algorithms import DiLoCo
from fixtures.models import WithLoss
from fixtures.surgery import start


@pytest.mark.parametrize("nesterov", [False, True])
def test_outer_steps(nesterov):
    """Every second batch, SGD with momentum steps along the change of the weights since the last outer step."""
    engine = start(WithLoss(nn.Sequential(nn.Linear(2, 1, bias=False))), DiLoCo("2ba", 0.7, 0.9, nesterov=nesterov))
    state = engine.state
    weight = state.model.network[0].weight
    expected, momentum, found = weight.detach().double().clone(), torch.zeros(1, 2).double(), []
    outer = expected.clone()
    for batch in range(4):
        engine.run_event("batch_start")
        change = torch.tensor([[0.25, -0.5]]) * (batch + 1)
        with torch.no_grad():
            weight.add_(change)
        expected += change
        state.timestamp = state.timestamp.to_next_batch(4)
        engine.run_event("batch_end")
        if batch % 2:
            gradient = outer - expected
            momentum = 0.9 * momentum + gradient
            outer = outer - 0.7 * (gradient + 0.9 * momentum if nesterov else momentum)
            expected = outer.clone()
        found.append((weight.detach().double(), expected.clone()))

    for weights, formula in found:
        torch.testing.assert_close(weights, formula, rtol=1e-6, atol=1e-6)
    assert state.algorithms[0].acted == 2
