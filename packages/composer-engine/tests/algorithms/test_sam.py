"""SAM: every optimizer is wrapped once, and its saved state does not depend on it."""

import copy
import warnings

import pytest
import torch
from torch.nn.functional import cross_entropy

from composer import functional as cf
from composer.algorithms import SAM
from composer.core import Engine, State


def reference_sam_step(model, inputs, targets, rate, rho):
    """The paper's formula: the gradient at the weights plus rho times the normalized gradient."""
    weights = [parameter.detach().clone() for parameter in model.parameters()]
    gradients = torch.autograd.grad(cross_entropy(model(inputs), targets), list(model.parameters()))
    norm = torch.sqrt(sum(gradient.square().sum() for gradient in gradients))
    with torch.no_grad():
        for parameter, gradient in zip(model.parameters(), gradients, strict=True):
            parameter.add_(rho * gradient / norm)
    gradients = torch.autograd.grad(cross_entropy(model(inputs), targets), list(model.parameters()))
    return [weight - rate * gradient for weight, gradient in zip(weights, gradients, strict=True)]


def closure_of(model, optimizer, batch):
    """Return a closure that computes loss and gradients."""

    def compute():
        optimizer.zero_grad()
        loss = cross_entropy(model(batch[0]), batch[1])
        loss.backward()
        return loss

    return compute


def test_step_matches_the_formula(batch):
    """One step with the wrapped optimizer equals the worked-out formula."""
    model = torch.nn.Linear(8, 3).double()
    inputs, targets = batch[0].double(), batch[1]
    expected = reference_sam_step(copy.deepcopy(model), inputs, targets, rate=0.1, rho=0.5)
    state = State(model=model, optimizers=torch.optim.SGD(model.parameters(), lr=0.1))

    Engine(state, algorithms=SAM(rho=0.5)).run_event("after_load")
    (optimizer,) = state.optimizers
    optimizer.step(closure_of(model, optimizer, (inputs, targets)))

    assert all(torch.allclose(new, old) for new, old in zip(model.parameters(), expected, strict=True))


def test_optimizers_are_wrapped_once():
    """All optimizers are wrapped, and not again by a second fit or load."""
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    optimizers = [torch.optim.SGD(layer.parameters(), lr=0.1) for layer in model]
    state = State(model=model, optimizers=optimizers)
    engine = Engine(state, algorithms=SAM())

    engine.run_event("after_load")
    wrapped = state.optimizers
    engine.run_event("after_load")

    assert [each.base_optimizer for each in wrapped] == optimizers
    assert all(isinstance(each, cf.SAMOptimizer) for each in wrapped)
    assert state.optimizers == wrapped


def test_state_is_independent_of_wrapping(batch):
    """The wrapped and the plain optimizer load each other's state."""
    model = torch.nn.Linear(8, 3)
    plain = torch.optim.Adam(model.parameters())
    state = State(model=model, optimizers=plain)
    Engine(state, algorithms=SAM(interval=2)).run_event("after_load")
    (optimizer,) = state.optimizers
    optimizer.step(closure_of(model, optimizer, batch))

    saved = copy.deepcopy(optimizer.state_dict())
    other = torch.optim.Adam(torch.nn.Linear(8, 3).parameters())
    other.load_state_dict(saved)

    assert saved["state"].keys() == plain.state_dict()["state"].keys()
    assert torch.equal(other.state_dict()["state"][0]["exp_avg"], saved["state"][0]["exp_avg"])


@pytest.mark.parametrize("is_taken_early", [False, True])
def test_loop_that_steps_a_wrapped_optimizer_warns(batch, is_taken_early):
    """A loop that steps an optimizer which SAM has wrapped gives a warning at its end, a correct loop none."""
    model = torch.nn.Linear(8, 3)
    early = torch.optim.SGD(model.parameters(), lr=0.1)
    state = State(model=model, optimizers=early)
    engine = Engine(state, algorithms=SAM())
    for event in ("init", "before_load", "after_load", "fit_start", "before_forward"):
        engine.run_event(event)
    optimizer = early if is_taken_early else state.optimizers[0]
    optimizer.step(closure_of(model, optimizer, batch))
    state.timestamp = state.timestamp.to_next_batch()

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        engine.run_event("fit_end")

    about_sam = [one for one in caught if "SAM has not acted in this training. The loop has" in str(one.message)]
    assert len(about_sam) == is_taken_early
