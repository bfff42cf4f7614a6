"""DepthStacking: when the model grows, and what is added to the algorithms."""

import contextlib

import pytest
import torch
from torch import nn

from composer.algorithms import DepthStacking
from composer.core import NoEffectWarning
from fixtures.models import WithLoss
from fixtures.surgery import start


def blocks():
    """Return a model with a list of two equal blocks."""
    return WithLoss(nn.Sequential(nn.Flatten(), nn.Linear(192, 4), nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))))


def test_grows_at_its_time():
    """Before the second batch, and once; the growth is an algorithm of its own, with which a checkpoint is loaded."""
    engine = start(blocks(), DepthStacking("1ba", 3, blocks="network.2"))
    depths = []
    for _ in range(3):
        engine.run_event("batch_start")
        depths.append(len(engine.state.model.network[2]))
        engine.state.timestamp = engine.state.timestamp.to_next_batch(4)

    assert depths == [2, 6, 6]
    assert [one.at is None for one in engine.state.algorithms] == [False, True]
    assert [one.required_on_load() for one in engine.state.algorithms] == [False, True]


def test_grows_at_construction():
    """With at=None it is like other surgery."""
    engine = start(blocks(), DepthStacking(None, blocks="network.2"))

    assert len(engine.state.model.network[2]) == 4


class Counted(nn.Module):
    """Applies as many blocks as it has counted, under a name of its own, or all."""

    def __init__(self, *, counts, trains=True):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.first = nn.Linear(4, 4)
        self.repeats = 2 if counts else None
        self.requires_grad_(trains).first.requires_grad_(True)

    def forward(self, inputs):
        inputs = self.first(inputs)
        for layer in self.layers[: self.repeats]:
            inputs = layer(inputs)
        return inputs


@pytest.mark.parametrize("at", [None, "1ba"])
@pytest.mark.parametrize("order", ["stack", "interleave"])
@pytest.mark.parametrize(("options", "warns"), [({"counts": True}, True), ({"counts": False}, False),
                                                ({"counts": True, "trains": False}, False)])  # fmt: skip
def test_copies_that_are_not_called(at, order, options, warns):
    """The first batch that none of the last blocks have taken part in raises a warning, once; frozen ones do not."""
    model = Counted(**options)
    engine = start(WithLoss(model), DepthStacking(at, order=order, blocks="network.layers"))

    for batch in range(4):
        engine.run_event("batch_start")
        model.zero_grad()
        model(torch.ones(1, 4)).sum().backward()
        engine.state.timestamp = engine.state.timestamp.to_next_batch(4)
        is_due = warns and batch == (0 if at is None else 1)
        with pytest.warns(NoEffectWarning, match="uses none of") if is_due else contextlib.nullcontext():
            engine.run_event("batch_end")


@pytest.mark.parametrize("others", [[], [None]])
def test_grown_model_in_a_new_training(others):
    """A model that has grown, and would grow again in a training that begins, raises a warning; two growths do not."""
    engine = start(blocks(), *(DepthStacking(at, blocks="network.2") for at in [*others, "1ba"]))
    depth = len(engine.state.model.network[2])
    engine.state.timestamp = engine.state.timestamp.to_next_batch(4)
    engine.run_event("fit_start")
    engine.run_event("batch_start")
    assert len(engine.state.model.network[2]) == 2 * depth

    engine.run_event("fit_start")
    engine.state.timestamp = type(engine.state.timestamp)()
    with pytest.warns(UserWarning, match=r"made deeper before, by .*None.* will grow again"):
        engine.run_event("fit_start")
