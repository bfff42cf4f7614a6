"""Norms that compute in 16 bits."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.nn.functional import group_norm, layer_norm

from composer import functional as cf

LOW = [torch.bfloat16, torch.float16]


def _make(kind: str, precision: torch.dtype | None) -> nn.Module:
    norm = (
        cf.LowPrecisionLayerNorm(8, 1e-3, precision=precision)
        if kind == "layer"
        else cf.LowPrecisionGroupNorm(2, 8, 1e-3, precision=precision)
    )
    nn.init.normal_(norm.weight)
    nn.init.normal_(norm.bias)
    return norm


def _reference(norm: nn.Module, x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    weight, bias = norm.weight.to(dtype), norm.bias.to(dtype)
    if isinstance(norm, nn.LayerNorm):
        return layer_norm(x.to(dtype), (8,), weight, bias, 1e-3)
    return group_norm(x.to(dtype), 2, weight, bias, 1e-3)


@pytest.mark.parametrize("kind", ["layer", "group"])
class TestLowPrecisionNorms:
    @pytest.mark.parametrize("dtype", LOW)
    def test_computes_in_low_precision_without_autocast(self, kind: str, dtype: torch.dtype, device: torch.device):
        """Input and parameters are rounded as by explicit casts; the output has the input's dtype."""
        norm = _make(kind, dtype).to(device)
        x = torch.randn(4, 8, device=device)

        output = norm(x)

        assert output.dtype == torch.float32
        assert torch.equal(output, _reference(norm, x, dtype).float())
        assert not torch.equal(output, _reference(norm, x, torch.float32))

    @pytest.mark.parametrize("dtype", LOW)
    @pytest.mark.parametrize("value", [True, False])
    def test_computes_in_low_precision_under_autocast(
        self, kind: str, dtype: torch.dtype, value: bool, device: torch.device
    ):
        """The output has the configured precision, or else autocast's, for any input dtype."""
        norm = _make(kind, dtype if value else None).to(device)
        for x in (torch.randn(4, 8, device=device), torch.randn(4, 8, device=device).to(dtype)):
            with torch.autocast(device.type, dtype=dtype):
                output = norm(x)

            assert output.dtype == dtype
            assert torch.equal(output, _reference(norm, x, dtype))

    @pytest.mark.parametrize("autocast", [torch.autocast("cpu", dtype=torch.bfloat16, enabled=False), nullcontext()])
    def test_default_is_the_plain_norm(self, kind: str, autocast):
        """Without a precision and autocast the plain norm is computed."""
        norm = _make(kind, None)
        x = torch.randn(4, 8)

        with autocast:
            output = norm(x)

        assert torch.equal(output, _reference(norm, x, torch.float32))

    @pytest.mark.parametrize("dtype", LOW)
    def test_gradients_match_the_reference(self, kind: str, dtype: torch.dtype):
        """Gradients flow through the casts and have the dtype of their tensor."""
        norm = _make(kind, dtype)
        x = torch.randn(4, 8, requires_grad=True)
        expected = torch.autograd.grad(_reference(norm, x, dtype).float().square().sum(), [x, *norm.parameters()])

        norm(x).square().sum().backward()

        for tensor, gradient in zip([x, *norm.parameters()], expected, strict=True):
            assert tensor.grad.dtype == torch.float32
            assert torch.equal(tensor.grad, gradient)

    @pytest.mark.parametrize(("precision", "is_finite"), [(torch.float16, False), (torch.bfloat16, True)])
    def test_range_is_that_of_the_precision(self, kind: str, precision: torch.dtype, is_finite: bool):
        """Inputs beyond 65504, the largest number in float16, give NaN in float16 only, as the cards state."""
        x = torch.randn(4, 8)
        x[0, 0] = 70_000.0

        output = _make(kind, precision)(x)

        assert bool(output[0, :4].isfinite().all()) is is_finite
        assert output[1:].isfinite().all()


@pytest.mark.parametrize(("affine", "bias"), [(False, False), (True, False)])
def test_layer_norm_without_parameters(affine: bool, bias: bool):
    """A layer norm without bias, or without parameters, is supported."""
    x = torch.randn(3, 2, 4)

    output = cf.LowPrecisionLayerNorm([2, 4], 1e-5, affine, bias, torch.bfloat16)(x)

    assert torch.equal(output, layer_norm(x.bfloat16(), (2, 4)).float())
