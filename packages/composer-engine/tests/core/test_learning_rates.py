"""Learning rates of parameter groups: what a schedule has set, and what the user assigns."""

import pytest
import torch

from composer.core.learning_rates import base_rate, set_rate

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
