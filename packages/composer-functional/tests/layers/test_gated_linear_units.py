"""The gated linear unit as a layer."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from composer import functional as cf


class TestGatedLinearUnit:
    @pytest.mark.parametrize("activation", [nn.GELU(), torch.relu])
    def test_formula(self, activation):
        """The activation of one layer times the other."""
        gated, beside = nn.Linear(4, 6), nn.Linear(4, 6, bias=False)
        inputs = torch.randn(3, 5, 4)

        output = cf.GatedLinearUnit(gated, beside, activation)(inputs)

        inner = inputs @ gated.weight.T + gated.bias
        torch.testing.assert_close(output, activation(inner) * (inputs @ beside.weight.T))

    def test_equals_torch_glu(self):
        """With the sigmoid it equals torch's glu of both halves."""
        gated, beside = nn.Linear(4, 6), nn.Linear(4, 6)
        inputs = torch.randn(3, 4)

        output = cf.GatedLinearUnit(gated, beside, nn.Sigmoid())(inputs)

        halves = torch.cat([beside(inputs), gated(inputs)], -1)
        torch.testing.assert_close(output, nn.functional.glu(halves))

    def test_gradients(self):
        """Both layers receive gradients."""
        layer = cf.GatedLinearUnit(nn.Linear(2, 3).double(), nn.Linear(2, 3).double(), nn.Tanh())

        assert torch.autograd.gradcheck(layer, torch.randn(2, 2, dtype=torch.float64, requires_grad=True))
        layer(torch.randn(2, 2, dtype=torch.float64)).sum().backward()
        assert all(parameter.grad.abs().sum() > 0 for parameter in layer.parameters())

    @pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
    def test_dtype_and_device(self, dtype: torch.dtype, device: torch.device):
        """The output has the layers' dtype and device."""
        layer = cf.GatedLinearUnit(nn.Linear(2, 3), nn.Linear(2, 3), nn.SiLU()).to(device, dtype)

        output = layer(torch.randn(2, 2, device=device, dtype=dtype))

        assert output.dtype == dtype
        assert output.device.type == device.type

    def test_compiles_to_one_graph(self):
        """The layer compiles to one graph."""
        layer = cf.GatedLinearUnit(nn.Linear(2, 3), nn.Linear(2, 3), nn.SiLU())
        inputs = torch.randn(4, 2)

        torch.testing.assert_close(torch.compile(layer, fullgraph=True, backend="eager")(inputs), layer(inputs))

    @pytest.mark.parametrize("activation", [nn.ReLU, "relu", None, 1])
    def test_invalid_activation_raises(self, activation: object):
        """A class or a string is not an activation."""
        with pytest.raises(TypeError, match=r"act_fn must be a module or a function of one tensor.*, got"):
            cf.GatedLinearUnit(nn.Linear(2, 3), nn.Linear(2, 3), activation)
