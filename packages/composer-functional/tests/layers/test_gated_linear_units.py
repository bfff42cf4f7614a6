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
