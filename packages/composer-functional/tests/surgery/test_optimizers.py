"""Optimizers after surgery: replaced parameters and their state."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from composer import functional as cf


def _to_fresh_linear(module: nn.Linear, index: int) -> nn.Module:
    return nn.Linear(module.in_features, module.out_features)


class TestOptimizers:
    @pytest.mark.parametrize("make", [lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), torch.optim.AdamW])
    def test_state_is_moved_by_name_and_shape(self, make):
        """A new parameter with equal name and shape receives the optimizer state, and one step updates all."""
        model = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 1))
        optimizer = make(model.parameters())
        model(torch.rand(4, 2)).sum().backward()
        optimizer.step()
        states = [optimizer.state[parameter] for parameter in model.parameters()]

        cf.replace_module_classes(model, {nn.Linear: _to_fresh_linear}, optimizer)
        before = [parameter.detach().clone() for parameter in model.parameters()]
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()

        assert all(optimizer.state[p] is state for p, state in zip(model.parameters(), states, strict=True))
        assert not any(torch.equal(new, old) for new, old in zip(model.parameters(), before, strict=True))
        in_optimizer = optimizer.param_groups[0]["params"]
        assert all(new is old for new, old in zip(in_optimizer, model.parameters(), strict=True))
        assert len(optimizer.state) == len(in_optimizer)

    def test_other_shapes_have_no_state(self):
        """State of another shape is dropped; the parameters are exchanged."""
        model = nn.Sequential(nn.Linear(2, 3))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        model(torch.rand(1, 2)).sum().backward()
        optimizer.step()

        cf.replace_module_classes(model, {nn.Linear: lambda module, index: nn.Linear(2, 5, bias=False)}, optimizer)

        assert len(optimizer.param_groups[0]["params"]) == 1
        assert optimizer.param_groups[0]["params"][0] is model[0].weight
        assert len(optimizer.state) == 0

    def test_new_parameters_join_the_groups_of_the_old(self):
        """Weights and biases are added to their predecessors' groups, over several optimizers."""
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        weights = torch.optim.SGD([{"params": [model[0].weight]}, {"params": [model[1].weight], "lr": 5.0}], lr=0.1)
        biases = torch.optim.AdamW([model[0].bias, model[1].bias])

        def factorize(module: nn.Linear, index: int) -> nn.Module:
            return nn.Sequential(nn.Linear(2, 1, bias=False), nn.Linear(1, 2))

        cf.replace_module_classes(model, {nn.Linear: factorize}, [weights, biases])

        in_optimizer = [[id(p) for p in group["params"]] for group in (*weights.param_groups, *biases.param_groups)]
        assert in_optimizer == [
            [id(model[0][0].weight), id(model[0][1].weight)],
            [id(model[1][0].weight), id(model[1][1].weight)],
            [id(model[0][1].bias), id(model[1][1].bias)],
        ]
        assert weights.param_groups[1]["lr"] == 5.0

    def test_parameters_without_predecessor_are_added(self):
        """The parameters of a replacement for a layer without any are added to the optimizer."""
        model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
        optimizer = torch.optim.SGD(model.named_parameters(), lr=0.1)

        cf.replace_module_classes(model, {nn.ReLU: lambda module, index: nn.PReLU()}, optimizer)

        assert optimizer.param_groups[0]["param_names"] == ["0.weight", "0.bias", "1.weight"]
        assert optimizer.param_groups[0]["params"][2] is model[1].weight

    def test_untrained_parameters_are_not_added(self):
        """An optimizer of the head does not receive the body's new parameters."""
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        model[1].weight.requires_grad_(False)
        optimizer = torch.optim.SGD([model[1].bias], lr=0.1)

        cf.replace_module_classes(model, {nn.Linear: _to_fresh_linear}, optimizer)

        assert len(optimizer.param_groups[0]["params"]) == 1
        assert optimizer.param_groups[0]["params"][0] is model[1].bias

    def test_tied_parameter_is_preserved(self):
        """A tied weight that is still in use is trained, with its momentum."""
        model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Tanh(), nn.Bilinear(2, 2, 2, bias=False))
        model[1].register_parameter("tied", model[0].weight)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        model[0](torch.rand(1, 2)).sum().backward()
        optimizer.step()
        tied = model[1].tied
        state = optimizer.state[tied]

        cf.replace_module_classes(model, {nn.Linear: _to_fresh_linear}, optimizer)

        in_optimizer = [id(parameter) for parameter in optimizer.param_groups[0]["params"]]
        assert sorted(in_optimizer) == sorted(id(parameter) for parameter in model.parameters())
        assert optimizer.state[tied] is state
        assert model[0].weight not in optimizer.state


class TestUpdateParamsInOptimizer:
    def test_parameters_without_names(self):
        """Plain parameters are exchanged, without state."""
        old, new = nn.Linear(2, 2), nn.Linear(2, 2)
        optimizer = torch.optim.SGD(old.parameters(), lr=0.1, momentum=0.9)
        old(torch.rand(1, 2)).sum().backward()
        optimizer.step()

        cf.update_params_in_optimizer(old.parameters(), new.parameters(), optimizer)

        assert [id(p) for p in optimizer.param_groups[0]["params"]] == [id(p) for p in new.parameters()]
        assert len(optimizer.state) == 0

    def test_named_optimizer_requires_names(self):
        """An optimizer with names raises without them, before anything changes."""
        old, new = nn.Linear(2, 2), nn.Linear(2, 2)
        optimizer = torch.optim.SGD(old.named_parameters(), lr=0.1)

        with pytest.raises(ValueError, match=r"new_params must be pairs \(name, parameter\)"):
            cf.update_params_in_optimizer(old.parameters(), new.parameters(), optimizer)

        assert optimizer.param_groups[0]["params"][0] is old.weight
