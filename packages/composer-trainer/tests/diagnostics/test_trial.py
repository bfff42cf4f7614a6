"""What runs outside of the training is undone."""

import pytest
import torch
from torch import nn

from composer.core import State
from composer.diagnostics.trial import trial
from fixtures import full_copy, same_bits


@pytest.fixture
def state():
    """Return a run with a norm and dropout after one step of Adam."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Dropout(0.5))
    state = State(model, optimizers=torch.optim.Adam(model.parameters(), lr=0.1))
    step(state)
    return state


def step(state):
    state.loss = state.model(torch.rand(4, 4)).square().mean()
    state.loss.backward()
    state.optimizers[0].step()


@pytest.mark.parametrize("error", [None, ZeroDivisionError])
def test_steps_are_undone(state, error):
    """Weights, buffers, gradients, moments, learning rate, modes, draws and fields are those of before."""
    state.model[2].eval()
    model, optimizer = state.model, state.optimizers[0]
    before, moments = full_copy(model), [value["exp_avg"].clone() for value in optimizer.state.values()]
    gradients, loss, drawn = [one.grad for one in model.parameters()], state.loss, torch.get_rng_state()

    try:
        with trial(state, steps=True):
            assert all(one.grad is None for one in model.parameters())
            optimizer.param_groups[0]["lr"] = 0.5
            step(state)
            assert model.training
            assert not same_bits(full_copy(model), before)
            if error is not None:
                raise error
    except ZeroDivisionError:
        pass

    assert same_bits(full_copy(model), before)
    assert all(map(torch.equal, moments, [value["exp_avg"] for value in optimizer.state.values()]))
    assert all(one.grad is gradient for one, gradient in zip(model.parameters(), gradients, strict=True))
    assert optimizer.param_groups[0]["lr"] == 0.1
    assert [module.training for module in model] == [True, True, False]
    assert state.loss is loss
    assert torch.equal(torch.get_rng_state(), drawn)
