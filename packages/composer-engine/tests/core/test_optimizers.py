"""Whether optimizers hold the parameters of the model after surgery."""

import pytest
import torch
from torch import nn

from composer.core import Engine, Event, Stage
from composer.core.optimizers import base_rate, set_rate


def surgery(make, act, event=Event.INIT):
    """Return an algorithm that changes the model by ``act(state)``."""
    return make.algorithm("Surgery", {event: Stage.ARCHITECTURE}, apply=lambda self, event, state, logger: act(state))


def replace_layer(state):
    state.model[0] = nn.Linear(4, 3)


def update_optimizer(state):
    replace_layer(state)
    state.optimizers[0].param_groups[0]["params"] = list(state.model.parameters())


def run(state, make, *acts, event=Event.INIT):
    engine = Engine(state, algorithms=[surgery(make, act, event) for act in acts])
    engine.run_event(event)


@pytest.mark.parametrize("event", [Event.INIT, Event.BEFORE_LOAD, Event.AFTER_LOAD, Event.FIT_START])
def test_stale_parameters_raise(state, make, event):
    """The error states the parameter names, the cause and the remedy."""
    with pytest.raises(
        RuntimeError, match=r"^Surgery replaced .* the former '0\.weight', '0\.bias', .*optimizers=state\.optimizers"
    ):
        run(state, make, replace_layer, event=event)


def test_error_names_the_replacing_algorithm(state, make):
    """Of several algorithms, the error names the one that replaced the parameters."""
    with pytest.raises(RuntimeError, match=r"^Surgery\.1 replaced"):
        run(state, make, update_optimizer, replace_layer, update_optimizer)


def test_all_optimizers_and_groups_are_checked(state, make, model):
    """All optimizers and all their groups are checked."""
    one, two = model.parameters().__next__(), list(model.parameters())[1:]
    state.optimizers = [torch.optim.SGD([one], 0.1), torch.optim.SGD([{"params": two[:1]}, {"params": two[1:]}], 0.1)]

    def replace_last(state):
        state.model[1].bias = nn.Parameter(torch.zeros(2))

    with pytest.raises(RuntimeError, match=r"former '1\.bias',"):
        run(state, make, replace_last)


def test_updated_optimizer_passes(state, make):
    """Surgery that updates the optimizer passes."""
    run(state, make, update_optimizer)

    in_optimizer = {id(one) for one in state.optimizers[0].param_groups[0]["params"]}
    assert in_optimizer == {id(one) for one in state.model.parameters()}


def test_missing_parameters_raise(state, make):
    """A layer that is added without updating a complete optimizer raises."""

    def add(state):
        state.model.append(nn.Linear(2, 1))

    with pytest.raises(
        RuntimeError, match=r"Surgery added parameters to the model that no optimizer holds, '2\.weight'"
    ):
        run(state, make, add)


def test_removed_but_not_replaced_parameter_raises(state, make, model):
    """A parameter name the optimizer had must remain in it, also if it has only part of the model."""
    state.optimizers = torch.optim.SGD(model[0].parameters(), lr=0.1)

    def drop_from_optimizer(state):
        replace_layer(state)
        state.optimizers[0].param_groups[0]["params"] = []
        state.optimizers[0].add_param_group({"params": [nn.Parameter(torch.zeros(1))]})

    with pytest.raises(RuntimeError, match=r"no optimizer holds, '0\.weight', '0\.bias'"):
        run(state, make, drop_from_optimizer)


def test_parameters_outside_the_optimizer_may_be_replaced(state, make, model):
    """With an optimizer of the last layer only, the first may be replaced."""
    state.optimizers = torch.optim.SGD(model[1].parameters(), lr=0.1)

    former = model[0]

    run(state, make, replace_layer)

    assert state.model[0] is not former


KINDS = pytest.mark.parametrize("kind", [float, torch.tensor])


@KINDS
def test_scheduled_rates_keep_the_base(kind):
    """A rate that a schedule has set does not become the base, also when it is read twice."""
    group = {"lr": kind(0.5)}

    set_rate(group, 0.25 * base_rate(group))

    assert (group["lr"], base_rate(group), base_rate(group)) == (0.125, 0.5, 0.5)


@KINDS
def test_an_assigned_rate_is_the_base(kind):
    """A rate that differs from the one that was set becomes the base."""
    group = {"lr": kind(0.5)}
    set_rate(group, 0.25 * base_rate(group))

    group["lr"] = kind(2.0)

    assert (base_rate(group), group["initial_lr"]) == (2.0, 2.0)


def test_a_tensor_changed_in_place_is_the_base():
    """A tensor is compared by its value, and the base does not follow the tensor that is set in place."""
    rate = torch.tensor(0.5)
    group = {"lr": rate}
    set_rate(group, 0.25 * base_rate(group))

    rate.fill_(2.0)
    set_rate(group, 0.25 * base_rate(group))

    assert group["lr"] is rate
    assert (rate, base_rate(group)) == (0.5, 2.0)


def test_tensors_are_compared_on_the_device():
    """Neither function reads a value of a tensor, as on a device that would wait for it."""
    group = {"lr": torch.tensor(0.5, device="meta")}

    set_rate(group, 0.25 * base_rate(group))

    assert base_rate(group).device.type == "meta"


def test_an_earlier_schedule_is_kept():
    """Without a record, as in a state saved by another library, the saved base is used."""
    assert base_rate({"lr": 0.05, "initial_lr": 0.5}) == 0.5
