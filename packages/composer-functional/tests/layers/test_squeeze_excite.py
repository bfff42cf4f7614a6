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

    def test_worked_example(self):
        """The first of two channels determines the weight of the second."""
        layer = cf.SqueezeExcite2d(2, 1)
        layer.reduce.weight.data = torch.tensor([[1.0, 0.0]])
        layer.expand.weight.data = torch.tensor([[0.0], [2.0]])
        images = torch.tensor([[[[1.0, 3.0]], [[4.0, 8.0]]], [[[-1.0, -3.0]], [[4.0, 8.0]]]])

        weighed = layer(images)

        gate = torch.tensor(4.0).sigmoid()
        expected = torch.tensor([[[[0.5, 1.5]], [[4.0, 8.0]]], [[[-0.5, -1.5]], [[2.0, 4.0]]]])
        expected[0, 1] *= gate
        torch.testing.assert_close(weighed, expected)

    def test_unbatched_image(self):
        """Three-dimensional input is supported, as in a convolution."""
        layer, image = cf.SqueezeExcite2d(4, 2), torch.rand(4, 5, 5)

        torch.testing.assert_close(layer(image), layer(image[None])[0])

    def test_gradient(self):
        """Analytical and numerical gradients agree."""
        layer = cf.SqueezeExcite2d(3, 2).double()
        images = torch.randn(2, 3, 3, 4, dtype=torch.float64, requires_grad=True)

        assert torch.autograd.gradcheck(layer, images)

    @pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
    def test_dtype_is_preserved(self, dtype: torch.dtype, device: torch.device):
        """The output has the input's dtype."""
        layer = cf.SqueezeExcite2d(4, 2).to(device=device, dtype=dtype)

        assert layer(torch.rand(2, 4, 5, 5, device=device, dtype=dtype)).dtype == dtype

    @given(features=st.integers(1, 64), fraction=st.floats(0.001, 0.999))
    @settings(deadline=None)
    def test_fraction_refers_to_the_channels(self, features: int, fraction: float):
        """The width is rounded down, and at least 1."""
        layer = cf.SqueezeExcite2d(features, fraction)

        assert layer.reduce.out_features == max(1, int(features * fraction))

    def test_empty_batch(self):
        """An empty batch gives an empty output."""
        assert cf.SqueezeExcite2d(4, 2)(torch.rand(0, 4, 5, 5)).shape == (0, 4, 5, 5)

    def test_compiles_to_one_graph(self):
        """The layer compiles to one graph."""
        layer, images = cf.SqueezeExcite2d(4, 2), torch.rand(2, 4, 5, 5)

        compiled = torch.compile(layer, fullgraph=True, backend="eager")

        torch.testing.assert_close(compiled(images), layer(images))

    @pytest.mark.parametrize("latent", [0, -1, 0.0, 1.0, 2.5, float("nan"), "8", None])
    def test_bad_width_raises(self, latent: object):
        """The value is neither a number of channels nor a fraction."""
        with pytest.raises(ValueError, match="latent_channels must be a whole number of at least 1, or a fraction"):
            cf.SqueezeExcite2d(8, latent)

    def test_zero_channels_raise(self):
        """At least one channel is required."""
        with pytest.raises(ValueError, match="num_features must be at least 1, got 0"):
            cf.SqueezeExcite2d(0)

    @pytest.mark.parametrize("shape", [(2, 3, 5, 5), (4, 5), (1, 2, 4, 5, 5)])
    def test_bad_shape_raises(self, shape: tuple[int, ...]):
        """The error states the number of channels."""
        with pytest.raises(ValueError, match=r"input must have shape \(N, 4, H, W\) or \(4, H, W\), got"):
            cf.SqueezeExcite2d(4)(torch.rand(shape))


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

    @pytest.mark.parametrize(
        "make",
        [lambda: cf.BlurConv2d(3, 8, 3, stride=2), lambda: cf.FactorizedConv2d(3, 8, 3)],
        ids=["blurred", "factorized"],
    )
    def test_wraps_surgery_layers(self, make):
        """The number of channels is that of the inner convolution."""
        conv = make()
        images = torch.rand(1, 3, 9, 9)

        layer = cf.SqueezeExciteConv2d(conv=conv, latent_channels=2)

        assert torch.equal(layer(images), layer.se(conv(images)))

    def test_convolution_and_arguments_raise(self):
        """Only one of them may be passed."""
        with pytest.raises(TypeError, match="conv must come without arguments for a new convolution, got both"):
            cf.SqueezeExciteConv2d(3, 8, 3, conv=nn.Conv2d(3, 8, 3))

    @pytest.mark.parametrize("layer", [nn.Linear(3, 8), nn.ConvTranspose2d(3, 8, 3)])
    def test_other_layers_raise(self, layer: nn.Module):
        """The error states the supported layers and the remedy."""
        with pytest.raises(TypeError, match=r"conv must be a torch.nn.Conv2d, BlurConv2d or FactorizedConv2d, got"):
            cf.SqueezeExciteConv2d(conv=layer)
