"""Images of any kind are converted to a common format."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from composer.loggers.images import to_images


@pytest.mark.parametrize(
    ("shape", "channels_last", "shapes"),
    [
        ((8, 6), False, [(8, 6, 1)]),
        ((3, 8, 6), False, [(8, 6, 3)]),
        ((1, 8, 6), False, [(8, 6, 1)]),
        ((8, 6, 4), True, [(8, 6, 4)]),
        ((2, 3, 8, 6), False, [(8, 6, 3)] * 2),
        ((2, 8, 6, 3), True, [(8, 6, 3)] * 2),
    ],
)
def test_shapes(shape, channels_last, shapes):
    """All image shapes are converted to height, width, channels."""
    images = to_images(torch.rand(shape), channels_last=channels_last)

    assert [tuple(image.shape) for image in images] == shapes
    assert all(image.dtype is torch.uint8 and image.is_contiguous() for image in images)


def test_lists_and_arrays():
    """Images of different sizes and arrays are accepted."""
    images = to_images([torch.rand(3, 4, 5).numpy(), [torch.rand(2, 1, 6, 7)]])

    assert [tuple(image.shape) for image in images] == [(4, 5, 3), (6, 7, 1), (6, 7, 1)]


@given(st.binary(min_size=12, max_size=12))
@settings(deadline=None)
def test_bytes_and_floats(values):
    """Bytes, and floats in [0, 1], give the same image."""
    pixels = torch.tensor(list(values), dtype=torch.uint8).reshape(3, 2, 2)

    (as_bytes,), (as_floats,) = to_images(pixels), to_images(pixels / 255)

    assert torch.equal(as_bytes, pixels.permute(1, 2, 0))
    assert torch.equal(as_floats, as_bytes)


@pytest.mark.parametrize("shape", [(2, 8, 6), (5, 8, 6), (7,), (1, 1, 1, 1, 1)])
def test_invalid_shape_raises(shape):
    """An invalid shape raises."""
    with pytest.raises(ValueError, match=r"images must be \(H, W\), \(C, H, W\) .* channels_last"):
        to_images(torch.zeros(shape))
