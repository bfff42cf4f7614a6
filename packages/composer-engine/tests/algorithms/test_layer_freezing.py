"""LayerFreezing: the first layers are frozen, the optimizer's state is preserved, and runs resume exactly."""

import pytest
import torch
from torch import nn

from composer.algorithms import LayerFreezing
from composer.core import NoEffectWarning


@pytest.fixture
def deep(watch):
    """Return a function that creates a model of five linear layers."""
    return lambda: watch(nn.Sequential(nn.Linear(8, 8), *(nn.Linear(8, 8) for _ in range(3)), nn.Linear(8, 3)))


def frozen_layers(engine):
    """Return for each layer whether it is frozen."""
    return [not layer.weight.requires_grad for layer in engine.state.model.layers]


def test_layers_are_frozen_progressively(deep, make_engine, step, batch, end_epoch):
    """From half of the training on, layers are frozen in proportion to time; the last one never is."""
    engine, frozen = make_engine(deep(), LayerFreezing(), max_duration="10ep"), []

    for _ in range(10):
        step(engine, batch)
        end_epoch(engine)
        frozen.append(sum(frozen_layers(engine)))

    # floor((elapsed - 0.5) / 0.5 * 4) at the epochs' ends.
    assert frozen == [0, 0, 0, 0, 0, 0, 1, 2, 3, 4]
    assert frozen_layers(engine) == [True, True, True, True, False]


@pytest.mark.parametrize(("layers", "epochs"), [(5, 1), (1, 10), (2, 10)])
def test_warns_if_nothing_was_frozen(watch, make_engine, step, batch, end_epoch, layers, epochs):
    """Too few epochs or layers give a warning at the end of the training."""
    model = watch(nn.Sequential(*(nn.Linear(8, 8) for _ in range(layers - 1)), nn.Linear(8, 3)))
    engine = make_engine(model, LayerFreezing(), max_duration=f"{epochs}ep")
    for _ in range(epochs):
        step(engine, batch)
        end_epoch(engine)

    with pytest.warns(
        NoEffectWarning, match=rf"LayerFreezing.* has frozen no layer before the fit ended at {epochs}ep"
    ):
        engine.run_event("fit_end")


def test_frozen_layers_do_not_change(deep, make_engine, step, batch, end_epoch):
    """Neither momentum nor weight decay changes a frozen layer; its momentum is preserved."""
    engine = make_engine(deep(), LayerFreezing(freeze_start=0.0), max_duration="4ep")
    optimizer = engine.state.optimizers[0]
    optimizer.param_groups[0]["weight_decay"] = 0.1
    for _ in range(2):
        step(engine, batch)
        end_epoch(engine)
    first = engine.state.model.layers[0].weight
    before, momentum = first.detach().clone(), optimizer.state[first]["momentum_buffer"].clone()

    step(engine, batch)

    assert torch.equal(first, before)
    assert torch.equal(optimizer.state[first]["momentum_buffer"], momentum)
    assert len(optimizer.param_groups[0]["params"]) == 10


def test_reports_unused_parameters():
    """find_unused_parameters is set for distributed training."""
    assert LayerFreezing().find_unused_parameters


def test_missing_max_duration_raises(deep, make_engine, end_epoch):
    """Fractions without a max_duration raise."""
    engine = make_engine(deep(), LayerFreezing())

    with pytest.raises(ValueError, match="max_duration"):
        end_epoch(engine)


@pytest.mark.parametrize("in_epoch", [0, 1])
def test_a_longer_fit_begins_with_the_present_fraction(deep, make_engine, step, batch, end_epoch, in_epoch):
    """Layers that were frozen at the end of a fit are trained again if the next one is longer, from its start on."""
    engine = make_engine(deep(), LayerFreezing(), max_duration="4ep")
    for _ in range(4):
        step(engine, batch)
        end_epoch(engine)
    for _ in range(in_epoch):
        step(engine, batch)
    assert frozen_layers(engine) == [True, True, True, True, False]

    engine.run_event("fit_start")
    assert frozen_layers(engine) == [True, True, True, True, False]
    engine.state.max_duration = "16ep"
    engine.run_event("fit_start")

    assert frozen_layers(engine) == [False] * 5
