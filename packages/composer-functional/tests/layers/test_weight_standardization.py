"""Standardized weights compared with timm's layer and the formula."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from composer import functional as cf


class TestStandardizeWeight:
    @pytest.mark.parametrize("shape", [(5, 4), (5, 4, 3), (5, 4, 3, 2), (5, 4, 3, 2, 2), (5, 1, 3, 3)])
    def test_equals_the_formula(self, shape: tuple[int, ...]):
        """Each filter minus its mean, divided by the square root of its biased variance plus eps."""
        weight = torch.randn(shape, dtype=torch.float64) + 3
        expected = weight.clone()
        for filter in expected:
            filter.copy_((filter - filter.mean()) / (filter.var(correction=0) + 0.01).sqrt())

        standardized = cf.standardize_weight(weight, eps=0.01)

        torch.testing.assert_close(standardized, expected)

    @pytest.mark.parametrize("format", [torch.contiguous_format, torch.channels_last])
    def test_convolution_equals_timm(self, format: torch.memory_format):
        """Outputs and gradients equal those of timm's convolution with the same parameter."""
        from timm.layers import StdConv2d

        reference = StdConv2d(4, 6, 3, padding=0, bias=True, eps=1e-10).double()
        weight = reference.weight.detach().clone().contiguous(memory_format=format).requires_grad_()
        images = torch.randn(2, 4, 5, 5, dtype=torch.float64)

        output = nn.functional.conv2d(images, cf.standardize_weight(weight), reference.bias)
        output.square().sum().backward()
        expected = reference(images)
        expected.square().sum().backward()

        torch.testing.assert_close(output, expected)
        torch.testing.assert_close(weight.grad, reference.weight.grad)

    @given(scale=st.floats(0.1, 100), shift=st.floats(-10, 10))
    @settings(deadline=None)
    def test_scale_and_shift_invariance(self, scale: float, shift: float):
        """A scaled and shifted filter gives the same result."""
        weight = torch.randn(3, 4, 3, 3, dtype=torch.float64)

        moved = cf.standardize_weight(weight * scale + shift)

        torch.testing.assert_close(moved, cf.standardize_weight(weight), atol=1e-3, rtol=1e-3)

    def test_constant_filters_become_zero(self):
        """Filters without variance give no NaN, also in the gradient."""
        weight = torch.full((2, 3, 3, 3), 0.5, requires_grad=True)

        standardized = cf.standardize_weight(weight)
        standardized.square().sum().backward()

        assert torch.equal(standardized, torch.zeros_like(weight))
        assert weight.grad.isfinite().all()

    @pytest.mark.parametrize("scale", [1.0, 1e-3])
    def test_small_weights_have_unit_variance(self, scale: float):
        """By default also weights of large filters, with variances of 1e-6 and less, are not attenuated."""
        weight = scale * torch.randn(4, 8, 3, 3, dtype=torch.float64)

        standardized = cf.standardize_weight(weight)

        expected = (weight - weight.mean((1, 2, 3), keepdim=True)) / weight.std((1, 2, 3), correction=0, keepdim=True)
        torch.testing.assert_close(standardized, expected, rtol=1e-3, atol=0)


class TestWeightStandardizer:
    def test_parametrizes(self):
        """The convolution uses the standardized weight."""
        conv = nn.Conv1d(4, 6, 3)
        expected = cf.standardize_weight(conv.weight, eps=0.1)

        nn.utils.parametrize.register_parametrization(conv, "weight", cf.WeightStandardizer(eps=0.1))

        assert torch.equal(conv.weight, expected)
