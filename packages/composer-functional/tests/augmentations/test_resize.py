"""Resizing and cropping compared with ramps, slices and computed nearest pixels."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from composer import functional as cf
from fixtures import seeded

FLOATS = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


class TestResize:
    @pytest.mark.parametrize(
        ("scale", "size"), [(0.5, (6, 10)), (0.75, (9, 15)), (0.3, (3, 6)), (0.7, (8, 14)), (0.01, (1, 1))]
    )
    def test_size_is_rounded(self, scale: float, size: tuple[int, int]):
        """Height and width are scaled, rounded down to pixels, and at least 1."""
        for mode in ("resize", "crop"):
            images, _ = cf.resize_batch(torch.rand(2, 3, 12, 20), None, scale, mode)

            assert images.shape == (2, 3, *size)

    def test_linear_ramp(self):
        """A pixel has the value of a linear ramp at its center, (i + 1/2) * old / new - 1/2, along both dimensions."""
        rows, columns = torch.arange(12.0)[:, None], torch.arange(20.0)
        images = (3 * rows + columns).view(1, 1, 12, 20)

        output, _ = cf.resize_batch(images, None, 0.75)

        row, column = (torch.arange(9) + 0.5) * 12 / 9 - 0.5, (torch.arange(15) + 0.5) * 20 / 15 - 0.5
        torch.testing.assert_close(output[0, 0], 3 * row[:, None] + column)

    @given(scale=st.floats(0.05, 1), height=st.integers(1, 12), width=st.integers(1, 12))
    def test_integer_masks_use_nearest_pixels(self, scale: float, height: int, width: int):
        """Integer masks have the value of the pixel that contains the new one's center."""
        masks = torch.arange(height * width, dtype=torch.int32).view(1, height, width)

        images, smaller = cf.resize_batch(torch.rand(1, 1, height, width), masks, scale, resize_targets=True)

        rows, columns = (
            [int(Fraction(2 * i + 1, 2) * old / new) for i in range(new)]
            for old, new in zip((height, width), images.shape[2:], strict=True)
        )
        assert smaller[0].tolist() == [[row * width + column for column in columns] for row in rows]

    @pytest.mark.parametrize("dtype", [torch.int64, torch.uint8, torch.bool, torch.bfloat16, torch.float32])
    @pytest.mark.parametrize("shape", [(2, 8, 12), (2, 4, 8, 12)])
    def test_masks_have_the_images_size(self, shape: tuple[int, ...], dtype: torch.dtype):
        """Masks with and without channels, of any dtype, keep their dtype and are resized to the images' size."""
        masks = torch.ones(shape).to(dtype)

        images, smaller = cf.resize_batch(torch.rand(2, 3, 8, 12), masks, 0.75, resize_targets=True)

        assert images.shape == (2, 3, 6, 9)
        assert smaller.shape == (*shape[:-2], 6, 9)
        assert smaller.dtype == dtype
        torch.testing.assert_close(smaller, torch.ones_like(smaller))

    @pytest.mark.parametrize("shape", [(2, 8, 12), (2, 3, 8, 12)])
    def test_soft_masks_are_interpolated(self, shape: tuple[int, ...]):
        """Probabilities are interpolated like images."""
        masks = torch.rand(shape)
        images = masks if masks.ndim == 4 else masks[:, None]

        smaller_images, smaller = cf.resize_batch(images, masks, 0.75, resize_targets=True)

        assert torch.equal(smaller.view_as(smaller_images), smaller_images)
        assert smaller.unique().numel() > masks.unique().numel() // 2


class TestCrop:
    @pytest.mark.parametrize("format", [torch.contiguous_format, torch.channels_last])
    @pytest.mark.parametrize("dtype", [*FLOATS, torch.uint8])
    def test_crops_images_and_masks_alike(self, dtype: torch.dtype, format: torch.memory_format, device: torch.device):
        """Images and masks are cropped at the same position, to new memory of the same format."""
        images = torch.randint(0, 99, (2, 3, 6, 8), device=device).to(dtype).contiguous(memory_format=format)
        masks = torch.randint(0, 99, (2, 6, 8), device=device)

        output, smaller = cf.resize_batch(images, masks, 0.5, "crop", True, corner=(1, 4))

        assert torch.equal(output, images[:, :, 1:4, 4:8])
        assert torch.equal(smaller, masks[:, 1:4, 4:8])
        assert output.dtype == dtype
        assert output.is_contiguous(memory_format=format)

    @given(seed=st.integers(0, 2**40), scale=st.floats(0.05, 0.99))
    def test_draws_can_be_passed_in(self, seed: int, scale: float):
        """The same generator gives the same crop, at the position of draw_corner."""
        images = torch.arange(10 * 14).view(1, 1, 10, 14)

        first, mask = cf.resize_batch(images, images, scale, "crop", True, generator=seeded(seed))
        second, _ = cf.resize_batch(images, None, scale, "crop", generator=seeded(seed))
        corner = cf.draw_corner((10, 14), tuple(first.shape[2:]), generator=seeded(seed))

        assert torch.equal(first, second)
        assert torch.equal(first, mask)
        assert divmod(int(first[0, 0, 0, 0]), 14) == corner

    def test_positions_are_uniform(self):
        """Each position within the image is equally likely."""
        counts: dict[tuple[int, int], int] = {}
        for seed in range(1200):
            corner = cf.draw_corner((4, 6), (3, 4), generator=seeded(seed))
            counts[corner] = counts.get(corner, 0) + 1

        assert set(counts) == {(row, column) for row in range(2) for column in range(3)}
        assert min(counts.values()) > 200 - 4.5 * math.sqrt(200)


class TestBoth:
    @pytest.mark.parametrize("mode", ["resize", "crop"])
    @pytest.mark.parametrize("scale", [1, 1.0, 1 - 1e-9])
    def test_unchanged_size_is_the_identity(self, mode: str, scale: float):
        """If the size does not change, images and targets are returned themselves."""
        images, masks = torch.rand(2, 3, 8, 8), torch.zeros(2, 8, 8)

        output, passed = cf.resize_batch(images, masks, scale, mode, resize_targets=True)

        assert output is images
        assert passed is masks

    @pytest.mark.parametrize("mode", ["resize", "crop"])
    @pytest.mark.parametrize("target", [torch.arange(2), torch.rand(2, 8, 8), {"boxes": 1}, None])
    def test_targets_are_unchanged_by_default(self, mode: str, target: object):
        """Unless asked for, no target is changed."""
        images = torch.rand(2, 3, 8, 8)
        before = images.clone()

        output, passed = cf.resize_batch(images, target, 0.5, mode)

        assert passed is target
        assert output.shape == (2, 3, 4, 4)
        assert torch.equal(images, before)

    @pytest.mark.parametrize("mode", ["resize", "crop"])
    @pytest.mark.parametrize("side", [22, 44, 45, 199])
    def test_whole_sizes_are_exact(self, mode: str, side: int):
        """A scale that is a fraction of pixels gives this number of pixels, despite rounding errors."""
        for size in range(1, side):
            assert cf.resize_batch(torch.zeros(1, 1, side, 1), None, size / side, mode)[0].shape[2] == size

    @pytest.mark.parametrize(("row", "column"), [(0, 0), (8, 4), (3, 6)])
    def test_masks_of_half_the_size_are_cropped_at_the_same_place(self, row: int, column: int):
        """Each pixel of a cropped mask is one of those in the crop of the images."""
        images = torch.arange(16 * 24.0).view(1, 1, 16, 24)

        crop, masks = cf.resize_batch(images, images[..., ::2, ::2], 0.5, "crop", True, corner=(row, column))

        first = (round(row / 2), round(column / 2))
        assert crop.shape == (1, 1, 8, 12)
        assert torch.equal(masks, images[..., 2 * first[0] :: 2, 2 * first[1] :: 2][..., :4, :6])

    @pytest.mark.parametrize("shape", [(2, 4, 6), (2, 5, 4, 6), (2, 16, 24)])
    @pytest.mark.parametrize("mode", ["resize", "crop"])
    def test_masks_of_another_size(self, mode: str, shape: tuple[int, ...]):
        """Masks of another size than the images are scaled by the same factor."""
        images, masks = cf.resize_batch(torch.rand(2, 3, 8, 12), torch.ones(shape), 0.5, mode, resize_targets=True)

        assert images.shape == (2, 3, 4, 6)
        assert masks.shape == (*shape[:-2], shape[-2] // 2, shape[-1] // 2)
