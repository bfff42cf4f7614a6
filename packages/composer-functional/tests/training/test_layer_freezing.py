"""Layer freezing: which layers, when, and their effect on optimizers."""

from __future__ import annotations

import copy

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from composer import functional as cf

FRACTIONS = st.floats(0, 1)


def _network() -> nn.Sequential:
    """Five layers with parameters, of which four are frozen at the end."""
    return nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Sequential(nn.Conv2d(4, 4, 1), nn.Flatten()),
        nn.Linear(36, 4), nn.Linear(4, 2),
    )  # fmt: skip


def _trained(model: nn.Module) -> list[str]:
    return [name for name, parameter in model.named_parameters() if parameter.requires_grad]


def _train(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    model(torch.randn(2, 3, 5, 5)).square().sum().backward()
    optimizer.step()


class TestCountLayersToFreeze:
    @pytest.mark.parametrize(
        ("duration", "start", "level", "expected"),
        [
            (0.0, 0.5, 1.0, 0),
            (0.5, 0.5, 1.0, 0),
            (0.75, 0.5, 1.0, 5),
            (0.7499, 0.5, 1.0, 4),
            (1.0, 0.5, 1.0, 10),
            (1.0, 0.5, 0.5, 5),
            (0.6, 0.0, 0.5, 3),
            (0.0, 0.0, 1.0, 0),
            (1.0, 1.0, 1.0, 0),
            (1.0, 0.0, 0.0, 0),
            (0.3, 0.0, 1.0, 3),
            (0.1 + 0.2 - 1e-16, 0.0, 1.0, 3),
        ],
    )
    def test_worked_example(self, duration: float, start: float, level: float, expected: int):
        """Of eleven layers, ten may be frozen."""
        assert cf.count_layers_to_freeze(11, duration, start, level) == expected

    @given(num_layers=st.integers(0, 200), a=FRACTIONS, b=FRACTIONS, start=FRACTIONS, level=FRACTIONS)
    def test_never_shrinks_and_spares_the_last(self, num_layers: int, a: float, b: float, start: float, level: float):
        """The number does not decrease with time, and the last layer is never frozen."""
        early, late = sorted((a, b))

        counts = [cf.count_layers_to_freeze(num_layers, each, start, level) for each in (early, late)]

        assert 0 <= counts[0] <= counts[1] <= max(num_layers - 1, 0)

    @given(num_layers=st.integers(1, 200), start=st.floats(0, 0.99))
    def test_all_but_the_last_are_frozen_at_the_end(self, num_layers: int, start: float):
        """This holds for any start."""
        assert cf.count_layers_to_freeze(num_layers, 1.0, start) == num_layers - 1


class TestFreezeLayers:
    @pytest.mark.parametrize(("duration", "depth"), [(0.5, 0), (0.63, 1), (0.75, 2), (0.9, 3), (1.0, 4)])
    def test_freezes_the_first_layers(self, duration: float, depth: int):
        """Layers are frozen in the model's order, also within blocks."""
        model = _network()
        layers = ["0", "1", "3.0", "4", "5"]

        result = cf.freeze_layers(model, None, duration)

        assert result == (depth, depth / 5)
        assert _trained(model) == [f"{layer}.{kind}" for layer in layers[depth:] for kind in ("weight", "bias")]

    @pytest.mark.parametrize(
        "make",
        [
            lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.1),
            lambda p: torch.optim.AdamW(p, lr=0.1, weight_decay=0.1),
            lambda p: torch.optim.RMSprop(p, lr=0.1, momentum=0.9, foreach=True),
        ],
    )
    def test_optimizers_do_not_change_frozen_layers(self, make):
        """Neither momentum nor weight decay changes them; groups and state are preserved."""
        model = _network()
        optimizer = make(model.parameters())
        _train(model, optimizer)
        before, state = copy.deepcopy(dict(model.named_parameters())), copy.deepcopy(optimizer.state_dict())

        cf.freeze_layers(model, optimizer, 0.75)
        _train(model, optimizer)

        moved = [name for name, parameter in model.named_parameters() if not torch.equal(parameter, before[name])]
        assert moved == ["3.0.weight", "3.0.bias", "4.weight", "4.bias", "5.weight", "5.bias"]
        after = optimizer.state_dict()
        assert after["param_groups"] == state["param_groups"]
        assert after["state"].keys() == state["state"].keys()
        for name, value in state["state"][0].items():
            assert torch.equal(torch.as_tensor(after["state"][0][name]), torch.as_tensor(value))

    def test_gradients_are_cleared(self):
        """A step before the next backward pass does not use old gradients."""
        model = _network()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model(torch.randn(2, 3, 5, 5)).sum().backward()
        before = model[0].weight.detach().clone()

        cf.freeze_layers(model, [optimizer], 0.75)
        optimizer.step()

        assert model[0].weight.grad is None
        assert torch.equal(model[0].weight, before)

    def test_unfreezes_when_fewer_are_frozen(self):
        """This happens, for example, after extending the training."""
        model = _network()
        cf.freeze_layers(model, None, 1.0)

        depth, _ = cf.freeze_layers(model, None, 0.75)

        assert depth == 2
        assert _trained(model) == ["3.0.weight", "3.0.bias", "4.weight", "4.bias", "5.weight", "5.bias"]

    def test_user_frozen_parameters_stay_frozen(self):
        """They are never unfrozen."""
        model = _network()
        model[0].bias.requires_grad_(False)
        model[5].weight.requires_grad_(False)
        before = _trained(model)

        for duration in (0.75, 1.0, 0.9, 0.2):
            cf.freeze_layers(model, None, duration)

        assert _trained(model) == before

    def test_shared_weights_of_trained_layers_are_not_frozen(self):
        """An embedding that is the last layer's weight is trained; the state dict does not change."""
        model = nn.Sequential(nn.Embedding(5, 3), nn.Linear(3, 3), nn.Linear(3, 5, bias=False))
        model[2].weight = model[0].weight
        keys = model.state_dict().keys()

        cf.freeze_layers(model, None, 1.0)

        assert _trained(model) == ["0.weight"]
        assert model.state_dict().keys() == keys

    def test_parameters_next_to_children(self):
        """Attention has parameters and a child with parameters: both are layers."""
        model = nn.Sequential(nn.MultiheadAttention(4, 2), nn.Linear(4, 1))

        assert cf.freeze_layers(model, None, 1.0) == (2, 2 / 3)

        assert _trained(model) == ["1.weight", "1.bias"]

    @pytest.mark.parametrize("bias", [True, False])
    def test_parametrized_layer_is_one_layer(self, bias: bool):
        """The parameters of a parametrization belong to its layer."""
        model = nn.Sequential(nn.Conv2d(3, 4, 3, bias=bias), nn.Conv2d(4, 2, 3, bias=bias))
        cf.apply_weight_standardization(model)
        nn.utils.parametrizations.weight_norm(model[0])

        assert cf.freeze_layers(model, None, 1.0) == (1, 0.5)
        assert not _trained(model[0])
        assert all(parameter.requires_grad for parameter in model[1].parameters())
        assert cf.unfreeze_layers(model) == len(list(model[0].parameters()))
        assert all(parameter.requires_grad for parameter in model.parameters())


class TestUnfreezeLayers:
    def test_unfreezes_all_frozen_parameters(self):
        """The number is returned; a second call returns zero."""
        model = _network()
        model[1].requires_grad_(False)
        cf.freeze_layers(model, None, 1.0)

        assert cf.unfreeze_layers(model) == 6
        assert cf.unfreeze_layers(model) == 0
        assert len(_trained(model)) == 8
