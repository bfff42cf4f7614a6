"""Squeeze-and-excitation compared with torchvision, and around convolutions."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from composer import functional as cf


class TestSqueezeExcite2d:
    @pytest.mark.parametrize("format", [torch.contiguous_format, torch.channels_last])
    def test_equals_torchvision(self, format: torch.memory_format):
        """With the same weights and no bias it equals torchvision's layer, in the input's memory format."""
        from torchvision.ops import SqueezeExcitation

        layer, expected = cf.SqueezeExcite2d(8, 3).double(), SqueezeExcitation(8, 3).double()
        for convolution, linear in ((expected.fc1, layer.reduce), (expected.fc2, layer.expand)):
            convolution.weight.data = linear.weight.data[:, :, None, None]
            convolution.bias.data.zero_()
        images = torch.randn(2, 8, 5, 6, dtype=torch.float64).contiguous(memory_format=format)

        weighed = layer(images)

        torch.testing.assert_close(weighed, expected(images))
        assert weighed.is_contiguous(memory_format=format)

    @given(features=st.integers(1, 64), fraction=st.floats(0.001, 0.999))
    @settings(deadline=None)
    def test_fraction_refers_to_the_channels(self, features: int, fraction: float):
        """The width is rounded down, and at least 1."""
        layer = cf.SqueezeExcite2d(features, fraction)

        assert layer.reduce.out_features == max(1, int(features * fraction))


class TestSqueezeExciteConv2d:
    def test_is_a_convolution_and_then_the_layer(self):
        """Arguments are those of torch's convolution; a fraction refers to its output channels."""
        layer = cf.SqueezeExciteConv2d(3, 16, 3, stride=2, padding=1, bias=False)
        images = torch.rand(2, 3, 8, 8)

        assert torch.equal(layer(images), layer.se(layer.conv(images)))
        assert layer.conv.bias is None
        assert layer.se.reduce.out_features == 2
        assert layer(images).shape == (2, 16, 4, 4)

    def test_wraps_a_convolution(self):
        """An existing convolution is used itself."""
        conv = nn.Conv2d(3, 8, 3)

        layer = cf.SqueezeExciteConv2d.from_conv2d(conv, 0, latent_channels=4)

        assert layer.conv is conv
        assert layer.se.reduce.weight.shape == (4, 8)
