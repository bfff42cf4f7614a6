"""GradientClipping: the complete gradients of a batch are clipped."""

import warnings

import pytest
import torch

from composer.algorithms import GradientClipping


def gradients(model):
    """Return all gradients as one vector."""
    return torch.cat([parameter.grad.flatten() for parameter in model.parameters()])


def test_norm(watch, make_engine, step, batch):
    """The norm of all gradients equals the threshold, and their direction does not change."""
    free, clipped = watch(), watch()
    clipped.load_state_dict(free.state_dict())

    step(make_engine(free), batch)
    step(make_engine(clipped, GradientClipping("norm", 0.01)), batch)

    assert gradients(clipped).norm().item() == pytest.approx(0.01, rel=1e-4)
    assert torch.allclose(gradients(clipped) / 0.01, gradients(free) / gradients(free).norm(), atol=1e-3)


def test_gradients_that_no_optimizer_sets_to_zero_do_not_count(watch, make_engine, step, batch):
    """Those of a part that is not trained grow from step to step; the trained part is clipped by its own norm."""
    model = watch()
    trained, *others = model.parameters()
    engine = make_engine(model, GradientClipping("norm", 0.01))
    engine.state.optimizers = torch.optim.SGD([trained], lr=0.0)
    for one in others:
        one.grad = torch.full_like(one, 100.0)

    step(engine, batch)

    assert trained.grad.norm().item() == pytest.approx(0.01, rel=1e-4)
    assert all(one.grad.abs().max() > 50 for one in others)


def test_warns_beside_muon(watch, make_engine, step, batch):
    """Clipping by norm warns once beside an optimizer whose updates have one size; by value it does not."""

    class Muon(torch.optim.SGD):
        """Any library's class of this name."""

    model = watch()
    for kind, expected in (("value", 0), ("norm", 1)):
        engine = make_engine(model, GradientClipping(kind, 1.0))
        engine.state.optimizers = Muon(model.parameters(), lr=0.1)

        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            step(engine, batch)
            step(engine, batch)

        assert [one.message.args[0].partition(", ")[0] for one in caught] == [
            "GradientClipping by norm has little effect on Muon"
        ] * expected
