"""The blurring layers compared with worked-out sums and with the layers that they replace."""

from __future__ import annotations

import copy
import itertools

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import nn

from composer import functional as cf


def _reference_blur(images: torch.Tensor, stride: tuple[int, int]) -> torch.Tensor:
    """Add nine shifted copies of the zero-padded images, then take every stride-th pixel."""
    rows, columns = images.shape[-2:]
    padded = torch.zeros(*images.shape[:-2], rows + 2, columns + 2, dtype=images.dtype)
    padded[..., 1:-1, 1:-1] = images
    blurred = torch.zeros_like(images)
    for row, column in itertools.product(range(3), range(3)):
        weight = (1, 2, 1)[row] * (1, 2, 1)[column] / 16
        blurred += weight * padded[..., row : row + rows, column : column + columns]
    return blurred[..., :: stride[0], :: stride[1]]


class TestBlur2d:
    @pytest.mark.parametrize("stride", [1, 2, (1, 3)])
    @pytest.mark.parametrize("size", [(3, 5), (5, 1)])
    @pytest.mark.parametrize("filters", [1, 3])
    def test_any_filter(self, filters: int, size: tuple[int, int], stride: int | tuple[int, int]):
        """Each channel is convolved by scipy's correlation, with one filter for all channels or one of each."""
        from scipy.ndimage import correlate

        images, filter = torch.randn(2, 3, 6, 7).double(), torch.randn(filters, 1, *size).double()

        blurred = cf.blur_2d(images, 3, stride, filter)

        rows, columns = stride if isinstance(stride, tuple) else (stride, stride)
        expected = [
            [
                correlate(plane, filter[channel % filters, 0].numpy(), mode="constant")
                for channel, plane in enumerate(image)
            ]
            for image in images.numpy()
        ]
        torch.testing.assert_close(blurred, torch.from_numpy(np.array(expected))[..., ::rows, ::columns])


class TestBlurPool2d:
    @pytest.mark.parametrize("stride", [1, 2, 3, (1, 2)])
    @pytest.mark.parametrize("size", [(1, 1), (5, 6), (8, 8)])
    def test_matches_the_formula(self, stride: int | tuple[int, int], size: tuple[int, int]):
        """Each output is the binomially weighted sum of nine neighbours, with zero padding."""
        images = torch.randn(2, 3, *size, dtype=torch.float64)

        blurred = cf.BlurPool2d(stride=stride).double()(images)

        pair = stride if isinstance(stride, tuple) else (stride, stride)
        torch.testing.assert_close(blurred, _reference_blur(images, pair))

    def test_has_no_parameters_or_buffers_to_save(self):
        """The state dict of a blurred model equals the plain one's."""
        layer = cf.BlurPool2d()

        assert list(layer.parameters()) == []
        assert layer.state_dict() == {}


class TestBlurMaxPool2d:
    @given(
        rows=st.integers(4, 12),
        columns=st.integers(4, 12),
        kernel_size=st.integers(1, 4),
        stride=st.integers(1, 4),
        padding=st.integers(0, 2),
        dilation=st.integers(1, 2),
        ceil_mode=st.booleans(),
    )
    def test_size_equals_max_pooling(
        self, rows: int, columns: int, kernel_size: int, stride: int, padding: int, dilation: int, ceil_mode: bool
    ):
        """For any arguments, the output is finite and has the size of torch's."""
        assume(padding <= kernel_size // 2)
        assume(min(rows, columns) + 2 * padding >= dilation * (kernel_size - 1) + 1)
        images = torch.rand(1, 2, rows, columns)
        arguments = (kernel_size, stride, padding, dilation)

        pooled = cf.BlurMaxPool2d(*arguments, ceil_mode)(images)

        assert pooled.shape == nn.MaxPool2d(*arguments, ceil_mode=ceil_mode)(images).shape
        assert pooled.isfinite().all()

    @pytest.mark.parametrize("format", [torch.contiguous_format, torch.channels_last])
    def test_is_a_blur_of_maxima(self, format: torch.memory_format):
        """Dense maxima are blurred with the stride, in the input's memory format."""
        images = torch.randn(2, 3, 9, 8, dtype=torch.float64).contiguous(memory_format=format)

        pooled = cf.BlurMaxPool2d(3, 2, 1).double()(images)

        torch.testing.assert_close(pooled, _reference_blur(nn.MaxPool2d(3, 1, 1)(images), (2, 2)))
        assert pooled.is_contiguous(memory_format=format)

    def test_from_maxpool2d(self):
        """The layer has the settings of the max pooling."""
        pool = nn.MaxPool2d((3, 2), (2, 3), (1, 0), (1, 2), ceil_mode=True)
        images = torch.rand(1, 2, 11, 12)

        layer = cf.BlurMaxPool2d.from_maxpool2d(pool)

        assert layer(images).shape == pool(images).shape
        assert repr(layer) == repr(cf.BlurMaxPool2d((3, 2), (2, 3), (1, 0), (1, 2), True))


CONVOLUTIONS = {
    "plain": {"kernel_size": 3, "stride": 2, "padding": 1},
    "large kernel": {"kernel_size": 7, "stride": 2, "padding": 3},
    "large stride": {"kernel_size": 4, "stride": 4},
    "one direction": {"kernel_size": 3, "stride": (1, 2), "padding": 1},
    "groups": {"kernel_size": 3, "stride": 2, "groups": 4},
    "dilation": {"kernel_size": 3, "stride": 2, "dilation": 2, "padding": 2},
    "reflection": {"kernel_size": 3, "stride": 2, "padding": 1, "padding_mode": "reflect"},
    "valid": {"kernel_size": 3, "stride": 2, "padding": "valid"},
    "pointwise": {"kernel_size": 1, "stride": 2, "bias": False},
    "pointwise, valid": {"kernel_size": 1, "stride": 2, "padding": "valid"},
    "pointwise, padded": {"kernel_size": 1, "stride": 2, "padding": 1},
}


@pytest.mark.parametrize("name", CONVOLUTIONS)
@pytest.mark.parametrize("size", [(8, 8), (9, 11)])
class TestBlurConv2d:
    def test_blur_first(self, name: str, size: tuple[int, int]):
        """The output is the convolution of blurred images, with the same size as without blur."""
        conv = nn.Conv2d(4, 8, **CONVOLUTIONS[name], dtype=torch.float64)
        images = torch.randn(2, 4, *size, dtype=torch.float64)
        expected = conv(_reference_blur(images, (1, 1)))

        blurred = cf.BlurConv2d.from_conv2d(conv).double()(images)

        torch.testing.assert_close(blurred, expected)

    def test_blur_last(self, name: str, size: tuple[int, int]):
        """The output is the blurred convolution without a stride, with the same size as without blur."""
        conv = nn.Conv2d(4, 8, **CONVOLUTIONS[name], dtype=torch.float64)
        images = torch.randn(2, 4, *size, dtype=torch.float64)
        complete = copy.deepcopy(conv)
        complete.stride = (1, 1)
        expected = _reference_blur(complete(images), conv.stride)

        blurred = cf.BlurConv2d.from_conv2d(conv, blur_first=False).double()(images)

        assert blurred.shape == nn.Conv2d(4, 8, **CONVOLUTIONS[name])(images.float()).shape
        torch.testing.assert_close(blurred, expected)


@pytest.mark.parametrize("blur_first", [True, False])
def test_new_convolution(blur_first: bool):
    """With the arguments of a convolution the layer equals the one around such a convolution."""
    torch.manual_seed(3)
    layer = cf.BlurConv2d(4, 8, 3, stride=2, padding=1, blur_first=blur_first)
    torch.manual_seed(3)
    conv = nn.Conv2d(4, 8, 3, stride=2, padding=1)
    images = torch.rand(2, 4, 9, 9)

    expected = cf.BlurConv2d.from_conv2d(conv, -1, blur_first)(images)

    assert torch.equal(layer(images), expected)
    assert layer.conv.stride == conv.stride
