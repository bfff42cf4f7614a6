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


def test_does_not_warn_if_layers_were_frozen(deep, make_engine, step, batch, end_epoch):
    """There is no warning if layers were frozen for one epoch."""
    engine = make_engine(deep(), LayerFreezing(), max_duration="4ep")
    for _ in range(4):
        step(engine, batch)
        end_epoch(engine)

    engine.run_event("fit_end")

    assert sum(frozen_layers(engine)) == 4


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


def test_resume_within_an_epoch(deep, make_engine, step, batch, end_epoch):
    """After a resume the layers frozen at the last EPOCH_END are frozen, and the final weights are bit-identical."""
    torch.manual_seed(1)
    model = deep()
    start = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    complete = make_engine(model, LayerFreezing(), max_duration="4ep")
    saved = {}
    for epoch in range(4):
        for number in range(2):
            step(complete, batch)
            if (epoch, number) == (3, 0):
                saved = {
                    "algorithm": complete.state.algorithms[0].state_dict(),
                    "model": {name: tensor.clone() for name, tensor in model.state_dict().items()},
                    "timestamp": complete.state.timestamp,
                    "frozen": frozen_layers(complete),
                    "momentum": [
                        complete.state.optimizers[0].state[each].get("momentum_buffer") for each in model.parameters()
                    ],
                }
                saved["momentum"] = [None if each is None else each.clone() for each in saved["momentum"]]
        end_epoch(complete)

    other = deep()
    other.load_state_dict(saved["model"])
    resumed = make_engine(other, LayerFreezing(), max_duration="4ep", start=False)
    resumed.state.timestamp = saved["timestamp"]
    for parameter, momentum in zip(other.parameters(), saved["momentum"], strict=True):
        resumed.state.optimizers[0].state[parameter]["momentum_buffer"] = momentum
    resumed.state.algorithms[0].load_state_dict(saved["algorithm"])
    resumed.run_event("fit_start")
    frozen = frozen_layers(resumed)
    step(resumed, batch)

    assert frozen == saved["frozen"]
    assert sum(frozen) > 0
    assert all(torch.equal(one, two) for one, two in zip(other.parameters(), model.parameters(), strict=True))
    assert not torch.equal(start["layers.4.weight"], other.layers[4].weight)


def test_loading_an_earlier_state_unfreezes(deep, make_engine, step, batch, end_epoch):
    """Loading a state from before any freezing unfreezes all layers."""
    engine = make_engine(deep(), LayerFreezing(freeze_start=0.0), max_duration="4ep")
    before = engine.state.algorithms[0].state_dict()
    for _ in range(3):
        step(engine, batch)
        end_epoch(engine)
    frozen = sum(frozen_layers(engine))

    engine.state.algorithms[0].load_state_dict(before)
    engine.run_event("fit_start")

    assert frozen > 0
    assert sum(frozen_layers(engine)) == 0


def test_reports_unused_parameters():
    """find_unused_parameters is set for distributed training."""
    assert LayerFreezing().find_unused_parameters


def test_the_last_batch_exceeds_the_duration(deep, make_engine, step, batch, end_epoch):
    """If the last batch has more samples than are left of the duration, the training is complete and not more."""
    samples = len(batch[0])
    engine = make_engine(deep(), LayerFreezing(freeze_start=0.0), max_duration=f"{2 * samples - 1}sp")

    for _ in range(2):
        step(engine, batch)
    end_epoch(engine)

    assert frozen_layers(engine) == [True, True, True, True, False]


def test_missing_max_duration_raises(deep, make_engine, end_epoch):
    """Fractions without a max_duration raise."""
    engine = make_engine(deep(), LayerFreezing())

    with pytest.raises(ValueError, match="max_duration"):
        end_epoch(engine)


@pytest.mark.parametrize("settings", [{"freeze_start": 1.5}, {"freeze_level": -0.1}, {"freeze_start": "late"}])
def test_bad_settings(settings):
    """Settings out of range raise, with their names."""
    with pytest.raises((TypeError, ValueError), match=next(iter(settings))):
        LayerFreezing(**settings)
