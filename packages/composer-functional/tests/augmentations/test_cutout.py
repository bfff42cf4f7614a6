"""CutOut compared with its definition: holes and their distribution."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torchvision.transforms.v2.functional import pil_to_tensor, to_pil_image

from composer import functional as cf
from fixtures import seeded

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.uint8, torch.int64, torch.bool]


class TestCutoutBatch:
    @pytest.mark.parametrize("mode", ["RGB", "L", "RGBA", "1"])
    def test_pil_images(self, mode: str):
        """A PIL image keeps its mode, and its pixels equal those of the tensor with the same holes."""
        picture = to_pil_image(torch.full((3, 7, 9), 255, dtype=torch.uint8)).convert(mode)

        output = cf.cutout_batch(picture, 2, 0.5, generator=seeded(3))

        expected = cf.cutout_batch(pil_to_tensor(picture), 2, 0.5, generator=seeded(3))
        assert output.mode == mode
        assert torch.equal(pil_to_tensor(output), expected)
        assert pil_to_tensor(picture).all()

    @pytest.mark.parametrize("dtype", DTYPES)
    def test_zeros_only_the_boxes(self, dtype: torch.dtype, device: torch.device):
        """Pixels in a box are zero in every image and channel, others do not change."""
        images = torch.randint(1, 9, (2, 3, 5, 7), device=device).to(dtype)

        output = cf.cutout_batch(images, boxes=[(1, 0, 3, 2), (2, 5, 5, 7)])

        expected = images.clone()
        for row in range(5):
            for column in range(7):
                if (1 <= row < 3 and column < 2) or (row >= 2 and column >= 5):
                    expected[:, :, row, column] = 0
        assert torch.equal(output, expected)
        assert output.dtype == dtype

    @pytest.mark.parametrize(
        ("shape", "length", "side"), [((20, 30), 0.5, 10), ((30, 20), 0.26, 5), ((9, 7), 0.5, 4), ((8, 8), 0.75, 6)]
    )
    def test_length_is_a_fraction_of_the_shorter_side(self, shape: tuple[int, int], length: float, side: int):
        """The hole is a square with its side rounded to pixels."""
        images = torch.ones(1, 1, *shape)

        areas = {int((cf.cutout_batch(images, length=length, generator=seeded(i)) == 0).sum()) for i in range(60)}

        assert max(areas) == side**2

    @given(seed=st.integers(0, 2**40), holes=st.integers(0, 4), length=st.floats(0, 1), uniform=st.booleans())
    def test_draws_can_be_passed_in(self, seed: int, holes: int, length: float, uniform: bool):
        """The same generator gives the same holes, those of draw_holes."""
        images = torch.ones(2, 1, 9, 12)

        first = cf.cutout_batch(images, holes, length, uniform, generator=seeded(seed))
        second = cf.cutout_batch(images, holes, length, uniform, generator=seeded(seed))
        boxes = cf.draw_holes((9, 12), holes, length, uniform, generator=seeded(seed))

        assert len(boxes) == holes
        assert torch.equal(first, second)
        assert torch.equal(first, cf.cutout_batch(images, boxes=boxes))
        assert (first[0] == 0).sum() <= holes * round(9 * length) ** 2

    @pytest.mark.parametrize("format", [torch.contiguous_format, torch.channels_last])
    def test_preserves_memory_format_and_input(self, format: torch.memory_format):
        """The output has the input's memory format; the input is not modified."""
        images = torch.rand(4, 3, 6, 5).contiguous(memory_format=format)
        before = images.clone()

        output = cf.cutout_batch(images, length=0.8)

        assert output.is_contiguous(memory_format=format)
        assert output.shape == images.shape
        assert torch.equal(images, before)


class TestDrawHoles:
    @pytest.mark.parametrize("uniform", [False, True])
    def test_holes_are_drawn_one_after_the_other(self, uniform: bool):
        """Holes are squares drawn one after the other, with the selected sampling."""
        generator = seeded(5)

        holes = cf.draw_holes((9, 12), 20, 0.5, uniform, generator=seeded(5))

        assert holes == [cf.draw_box((9, 12), (4, 4), uniform, generator=generator) for _ in range(20)]
        assert len(set(holes)) > 5


class TestDrawBox:
    def test_centre_is_uniform(self):
        """By default every pixel is the center of a box with equal probability; boxes are clipped at the border."""
        counts = torch.zeros(5, 4)

        for seed in range(4000):
            x1, y1, x2, y2 = cf.draw_box((5, 4), (1, 1), generator=seeded(seed))
            assert (x2 - x1, y2 - y1) == (1, 1)
            counts[x1, y1] += 1

        assert counts.min() > 200 - 4 * math.sqrt(200)
        assert counts.max() < 200 + 4 * math.sqrt(200)

    def test_uniform_sampling_covers_each_pixel_equally_often(self):
        """A pixel is covered with probability side / (size + side - 1)."""
        covered = torch.zeros(5, 4)
        draws = 6000

        for seed in range(draws):
            x1, y1, x2, y2 = cf.draw_box((5, 4), (3, 2), uniform_sampling=True, generator=seeded(seed))
            covered[x1:x2, y1:y2] += 1

        fraction = 3 / 7 * 2 / 5
        spread = math.sqrt(fraction * (1 - fraction) / draws)
        assert (covered / draws - fraction).abs().max() < 4.5 * spread

    @given(
        height=st.integers(1, 9),
        width=st.integers(1, 9),
        rows=st.integers(0, 12),
        columns=st.integers(0, 12),
        uniform=st.booleans(),
        seed=st.integers(0, 2**40),
    )
    def test_lies_within_the_image(self, height: int, width: int, rows: int, columns: int, uniform: bool, seed: int):
        """For any sizes, the box lies within the image and has at most the requested side."""
        x1, y1, x2, y2 = cf.draw_box((height, width), (rows, columns), uniform, generator=seeded(seed))

        assert 0 <= x1 <= x2 <= height
        assert 0 <= y1 <= y2 <= width
        assert min(1, rows) <= x2 - x1 <= rows
        assert min(1, columns) <= y2 - y1 <= columns
