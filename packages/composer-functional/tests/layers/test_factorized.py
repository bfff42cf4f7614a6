"""Factors compared with scipy's SVD and least squares, and the factorized layers."""

from __future__ import annotations

import math

import numpy as np
import pytest
import scipy.linalg
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from composer import functional as cf


def _least_error(matrix: torch.Tensor, rank: int) -> float:
    """The distance to the nearest matrix of a rank, by Eckart and Young, from scipy's singular values."""
    return math.sqrt((scipy.linalg.svdvals(matrix.numpy())[rank:] ** 2).sum())


class TestFactorizeMatrix:
    @given(rows=st.integers(1, 12), columns=st.integers(1, 12), data=st.data())
    @settings(deadline=None)
    def test_nearest_to_the_weight(self, rows: int, columns: int, data: st.DataObject):
        """No matrix of the rank is closer."""
        rank = data.draw(st.integers(1, min(rows, columns)))
        weight = torch.randn(rows, columns, dtype=torch.float64)

        first, second = cf.factorize_matrix(weight, rank)

        assert first.shape == (rank, columns)
        assert second.shape == (rows, rank)
        error = torch.linalg.matrix_norm(second @ first - weight).item()
        assert error == pytest.approx(_least_error(weight, rank), abs=1e-9)

    def test_full_rank_is_exact(self):
        """With full rank the product is exact."""
        weight = torch.randn(4, 6, dtype=torch.float64)

        first, second = cf.factorize_matrix(weight, 4)

        torch.testing.assert_close(second @ first, weight)

    @given(rank=st.integers(1, 5), rows=st.integers(1, 40))
    @settings(deadline=None)
    def test_nearest_outputs_for_inputs(self, rank: int, rows: int):
        """No weight of the rank gives outputs closer to the layer's."""
        weight = torch.randn(5, 6, dtype=torch.float64)
        inputs = torch.randn(rows, 6, dtype=torch.float64) @ torch.diag(torch.logspace(-2, 1, 6, dtype=torch.float64))

        first, second = cf.factorize_matrix(weight, rank, inputs=inputs)

        outputs = inputs @ weight.T
        error = torch.linalg.matrix_norm(inputs @ (second @ first).T - outputs).item()
        assert error == pytest.approx(_least_error(outputs, rank), abs=1e-8)

    @given(rank=st.integers(1, 5))
    @settings(deadline=None)
    def test_best_prediction_of_targets(self, rank: int):
        """With targets the error is that of scipy's least squares plus the truncation of its predictions."""
        weight = torch.randn(5, 6, dtype=torch.float64)
        inputs = torch.randn(30, 6, dtype=torch.float64)
        targets = inputs @ torch.randn(6, 5, dtype=torch.float64) + 0.5 * torch.randn(30, 5, dtype=torch.float64)

        first, second = cf.factorize_matrix(weight, rank, inputs=inputs, targets=targets)

        solution = torch.from_numpy(scipy.linalg.lstsq(inputs.numpy(), targets.numpy())[0])
        predictions = inputs @ solution
        least = math.hypot((targets - predictions).norm().item(), _least_error(predictions, rank))
        assert (inputs @ (second @ first).T - targets).norm().item() == pytest.approx(least)

    @pytest.mark.parametrize("with_targets", [False, True])
    def test_directions_without_inputs_are_unchanged(self, with_targets: bool):
        """With few inputs the weight does not change in all other directions."""
        weight = torch.randn(5, 6, dtype=torch.float64)
        inputs = torch.zeros(2, 6, dtype=torch.float64)
        inputs[:, :2] = torch.randn(2, 2, dtype=torch.float64)
        targets = torch.randn(2, 5, dtype=torch.float64) if with_targets else None

        first, second = cf.factorize_matrix(weight, 5, inputs=inputs, targets=targets)

        torch.testing.assert_close((second @ first)[:, 2:], weight[:, 2:])
        torch.testing.assert_close(inputs @ (second @ first).T, targets if with_targets else inputs @ weight.T)

    @pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
    def test_dtype_and_device_are_preserved(self, dtype: torch.dtype, device: torch.device):
        """Half precision is computed in float32; gradients do not flow; rows are contiguous."""
        weight = torch.randn(6, 5, device=device).to(dtype).requires_grad_()
        inputs = torch.randn(9, 5, device=device).to(dtype)

        for data in (None, inputs):
            factors = cf.factorize_matrix(weight, 5, inputs=data)

            assert {factor.dtype for factor in factors} == {dtype}
            assert not any(factor.requires_grad for factor in factors)
            assert all(factor.is_contiguous() for factor in factors)
            torch.testing.assert_close(factors[1] @ factors[0], weight.detach(), atol=0.05, rtol=0.05)


class TestFactorizeConv2d:
    @pytest.mark.parametrize("format", [torch.contiguous_format, torch.channels_last])
    def test_nearest_to_the_weight(self, format: torch.memory_format):
        """The two kernels give the truncated SVD of the weight matrix, in its memory format."""
        weight = torch.randn(8, 5, 3, 2, dtype=torch.float64).contiguous(memory_format=format)
        left, values, right = scipy.linalg.svd(weight.reshape(8, 30).numpy(), full_matrices=False)

        first, second = cf.factorize_conv2d(weight, 4)

        assert first.shape == (4, 5, 3, 2)
        assert second.shape == (8, 4, 1, 1)
        assert first.is_contiguous(memory_format=format)
        expected = torch.from_numpy((left[:, :4] * values[:4]) @ right[:4])
        torch.testing.assert_close(second.flatten(1) @ first.reshape(4, 30), expected)

    @pytest.mark.parametrize("rank", [1, 3, 6])
    def test_nearest_outputs_for_images(self, rank: int):
        """No two convolutions of the rank give outputs closer to the convolution's, for any settings."""
        where = {"stride": (2, 1), "padding": (1, 2), "dilation": (1, 2)}
        weight = torch.randn(6, 3, 3, 2, dtype=torch.float64)
        images = torch.randn(4, 3, 9, 8, dtype=torch.float64).cumsum(-1)
        outputs = nn.functional.conv2d(images, weight, **where)

        first, second = cf.factorize_conv2d(weight, rank, inputs=images, **where)

        approximate = nn.functional.conv2d(nn.functional.conv2d(images, first, **where), second)
        least = _least_error(outputs.transpose(0, 1).flatten(1), rank)
        assert (approximate - outputs).norm().item() == pytest.approx(least, abs=1e-8)

    def test_best_prediction_of_targets(self):
        """With targets and full rank it is least squares over all positions of all images."""
        weight = torch.randn(4, 3, 2, 2, dtype=torch.float64)
        images = torch.randn(3, 3, 7, 7, dtype=torch.float64)
        targets = nn.functional.conv2d(images, torch.randn(4, 3, 2, 2, dtype=torch.float64), padding=1)

        first, second = cf.factorize_conv2d(weight, 4, inputs=images, targets=targets, padding=1)

        approximate = nn.functional.conv2d(nn.functional.conv2d(images, first, padding=1), second)
        torch.testing.assert_close(approximate, targets)


class TestFactorizedLinear:
    def test_is_two_layers(self):
        """A fraction refers to the smaller size; the second layer has the bias."""
        layer = cf.FactorizedLinear(12, 8, latent_features=0.5)
        inputs = torch.rand(2, 3, 12)

        assert layer.latent_features == 4
        assert layer.first.bias is None
        assert torch.equal(layer(inputs), layer.second(layer.first(inputs)))
        assert cf.FactorizedLinear(12, 8, bias=False).second.bias is None

    def test_from_linear(self):
        """The factors are optimal, the bias is the layer's; no random numbers are drawn."""
        linear = nn.Linear(12, 8, dtype=torch.float64)
        state = torch.get_rng_state()

        layer = cf.FactorizedLinear.from_linear(linear, 0, latent_features=3)

        error = np.linalg.norm((layer.weight - linear.weight).detach().numpy())
        assert error == pytest.approx(_least_error(linear.weight.detach(), 3))
        assert layer.bias is linear.bias
        assert torch.equal(torch.get_rng_state(), state)


CONVOLUTIONS = {
    "plain": {"kernel_size": 3},
    "stride": {"kernel_size": 3, "stride": (2, 1), "padding": 1},
    "same": {"kernel_size": 3, "padding": "same", "dilation": 2},
    "reflection": {"kernel_size": (3, 1), "padding": (1, 0), "padding_mode": "reflect", "bias": False},
    "pointwise": {"kernel_size": 1},
}


def test_autocast_changes_no_factor():
    """Autocast computes no factor in 16 bits."""
    data = torch.randn(5, 6), 2
    options = {"inputs": torch.randn(30, 6), "targets": torch.randn(30, 5)}
    expected = cf.factorize_matrix(*data, **options)

    with torch.autocast("cpu", torch.bfloat16):
        found = cf.factorize_matrix(*data, **options)

    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_fraction_is_not_rounded_down():
    """A fraction of 0.29 of 100 features is 29, although ``0.29 * 100`` is less in floating point."""
    assert cf.FactorizedLinear(100, 100, latent_features=0.29).latent_features == 29


class TestSetRank:
    @pytest.mark.parametrize("bias", [True, False])
    def test_linear_outputs_are_the_best_of_their_rank(self, bias: bool):
        """The error of the outputs is the one of their truncated SVD, without the bias."""
        layer = cf.FactorizedLinear(12, 8, bias=bias, latent_features=6).double()
        inputs = torch.randn(40, 12, dtype=torch.float64)
        before = layer(inputs).detach()
        outputs = before - layer.bias.detach() if bias else before

        layer.set_rank(inputs, 3)

        error = np.linalg.norm((layer(inputs) - before).detach().numpy())
        assert error == pytest.approx(_least_error(outputs, 3))
        assert (layer.latent_features, layer.module0, layer.module1) == (3, layer.first, layer.second)
        assert layer.module0.out_features == layer.module1.in_features == 3

    @pytest.mark.parametrize("name", CONVOLUTIONS)
    def test_convolution_outputs_are_the_best_of_their_rank(self, name: str):
        """With any stride and padding, the error is the one of the truncated SVD of the pixels' channels."""
        layer = cf.FactorizedConv2d(6, 5, latent_channels=4, **CONVOLUTIONS[name]).double()
        images = torch.randn(3, 6, 9, 8, dtype=torch.float64)
        before = layer(images).detach()
        outputs = before if layer.bias is None else before - layer.bias.detach()[:, None, None]

        layer.set_rank(images, 2)

        error = np.linalg.norm((layer(images) - before).detach().numpy())
        assert error == pytest.approx(_least_error(outputs.movedim(1, -1).flatten(0, -2), 2))
        assert layer.first.weight.shape == (2, 6, *layer.first.kernel_size)
        assert layer.latent_channels == layer.module0.out_channels == layer.module1.in_channels == 2

    def test_autocast_keeps_the_dtype(self):
        """Under autocast both weights stay in 32 bits."""
        layer = cf.FactorizedLinear(12, 8, latent_features=6)

        with torch.autocast("cpu", torch.bfloat16):
            layer.set_rank(torch.randn(40, 12), 3)

        assert {weight.dtype for weight in layer.parameters()} == {torch.float32}

    def test_current_rank_changes_nothing(self):
        """With the current rank the weights are the same parameters."""
        layer = cf.FactorizedLinear(12, 8, latent_features=4)
        weights = layer.first.weight, layer.second.weight

        layer.set_rank(torch.rand(20, 12), 4)

        assert layer.first.weight is weights[0]
        assert layer.second.weight is weights[1]


class TestFactorizedConv2d:
    @pytest.mark.parametrize("name", CONVOLUTIONS)
    def test_full_rank_equals_the_convolution(self, name: str):
        """With full rank, outputs are the convolution's."""
        conv = nn.Conv2d(4, 4, **CONVOLUTIONS[name], dtype=torch.float64)
        images = torch.randn(2, 4, 7, 6, dtype=torch.float64)

        layer = cf.FactorizedConv2d.from_conv2d(conv, 0, latent_channels=4)

        torch.testing.assert_close(layer(images), conv(images))
        torch.testing.assert_close(layer.weight, conv.weight)
        assert layer.bias is conv.bias

    @pytest.mark.parametrize("name", CONVOLUTIONS)
    def test_weight_and_bias_properties(self, name: str):
        """Weight and bias are those of the equivalent single convolution."""
        layer = cf.FactorizedConv2d(6, 4, **CONVOLUTIONS[name], latent_channels=2).double()
        conv = nn.Conv2d(6, 4, **CONVOLUTIONS[name]).double()
        images = torch.randn(2, 6, 7, 6, dtype=torch.float64)

        conv.weight.data = layer.weight.data
        if conv.bias is not None:
            conv.bias.data = layer.bias.data

        torch.testing.assert_close(conv(images), layer(images))

    def test_fraction_refers_to_the_smaller_size(self):
        """It is rounded down, and at least 1."""
        assert cf.FactorizedConv2d(9, 20, 3, latent_channels=0.5).first.weight.shape == (4, 9, 3, 3)
        assert cf.FactorizedConv2d(20, 9, 3, latent_channels=0.01).second.weight.shape == (9, 1, 1, 1)
