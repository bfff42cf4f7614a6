"""CutOut against the definition: what is inside the holes, and how often each pixel is."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from composer import functional as cf

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.uint8, torch.int64, torch.bool]


def _seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


class TestCutoutBatch:
    @pytest.mark.parametrize("dtype", DTYPES)
    def test_blanks_the_boxes_and_nothing_else(self, dtype: torch.dtype, device: torch.device):
        """A pixel is zero if it lies in a box, rows first, and as before otherwise; in every image and channel."""
        images = torch.randint(1, 9, (2, 3, 5, 7), device=device).to(dtype)

        output = cf.cutout_batch(images, boxes=[(1, 0, 3, 2), (2, 5, 5, 7)])

        expected = images.clone()
        for row in range(5):
            for column in range(7):
                if (1 <= row < 3 and column < 2) or (row >= 2 and column >= 5):
                    expected[:, :, row, column] = 0
        assert torch.equal(output, expected)
        assert output.dtype == dtype

    def test_takes_a_single_image(self):
        """Without a batch dimension, it is the same."""
        image = torch.rand(3, 6, 8)
        boxes = [(0, 2, 3, 8)]

        output = cf.cutout_batch(image, boxes=boxes)

        assert torch.equal(output, cf.cutout_batch(image[None], boxes=boxes)[0])

    @pytest.mark.parametrize(
        ("shape", "length", "side"), [((20, 30), 0.5, 10), ((30, 20), 0.26, 5), ((9, 7), 0.5, 4), ((8, 8), 0.75, 6)]
    )
    def test_side_is_a_share_of_the_shorter_one(self, shape: tuple[int, int], length: float, side: int):
        """The hole is a square, its side rounded to pixels; a hole that is not cut off has side² pixels."""
        images = torch.ones(1, 1, *shape)

        areas = {int((cf.cutout_batch(images, length=length, generator=_seeded(i)) == 0).sum()) for i in range(60)}

        assert max(areas) == side**2

    @given(seed=st.integers(0, 2**40), holes=st.integers(0, 4), length=st.floats(0, 1), uniform=st.booleans())
    def test_draws_what_can_be_handed_in(self, seed: int, holes: int, length: float, uniform: bool):
        """The same generator gives the same holes, those of draw_holes, and one hole is at most as large as asked."""
        images = torch.ones(2, 1, 9, 12)

        first = cf.cutout_batch(images, holes, length, uniform, generator=_seeded(seed))
        second = cf.cutout_batch(images, holes, length, uniform, generator=_seeded(seed))
        boxes = cf.draw_holes((9, 12), holes, length, uniform, generator=_seeded(seed))

        assert len(boxes) == holes
        assert torch.equal(first, second)
        assert torch.equal(first, cf.cutout_batch(images, boxes=boxes))
        assert (first[0] == 0).sum() <= holes * round(9 * length) ** 2

    @pytest.mark.parametrize(("holes", "length"), [(0, 0.5), (3, 0)])
    @pytest.mark.parametrize("uniform", [False, True])
    def test_no_holes_are_the_identity(self, holes: int, length: float, uniform: bool):
        """Without holes, or with holes of no size, images pass bit for bit, in new memory."""
        images = torch.rand(2, 3, 4, 4)

        output = cf.cutout_batch(images, holes, length, uniform)

        assert torch.equal(output, images)
        assert output.data_ptr() != images.data_ptr()

    @pytest.mark.parametrize("format", [torch.contiguous_format, torch.channels_last])
    def test_memory_format_is_kept_and_input_untouched(self, format: torch.memory_format):
        """The result is laid out as the input, which is as before."""
        images = torch.rand(4, 3, 6, 5).contiguous(memory_format=format)
        before = images.clone()

        output = cf.cutout_batch(images, length=0.8)

        assert output.is_contiguous(memory_format=format)
        assert output.shape == images.shape
        assert torch.equal(images, before)

    def test_expanded_input_is_not_written_through(self):
        """A batch that is one image seen several times gets memory of its own."""
        images = torch.ones(1, 1, 4, 4).expand(3, 2, 4, 4)

        output = cf.cutout_batch(images, boxes=[(0, 0, 2, 2)])

        assert images.sum() == 96
        assert output.sum() == 72

    def test_gradient_is_zero_in_the_holes(self):
        """What was blanked has no influence."""
        images = torch.rand(1, 1, 3, 3, requires_grad=True)

        cf.cutout_batch(images, boxes=[(0, 1, 2, 3)]).sum().backward()

        assert images.grad is not None
        assert images.grad[0, 0].tolist() == [[1, 0, 0], [1, 0, 0], [1, 1, 1]]

    def test_compiles_without_a_break(self):
        """With the holes handed in, it is one graph, and other holes are right as well."""
        compiled = torch.compile(cf.cutout_batch, fullgraph=True, backend="eager")
        images = torch.rand(2, 3, 6, 6)

        for x in range(3):
            output = compiled(images, boxes=[(x, 1, x + 2, 5)])

            assert (output == 0).nonzero()[:, 2].unique().tolist() == [x, x + 1]
            assert (output == 0).sum() == 2 * 3 * 2 * 4

    @pytest.mark.parametrize("images", [torch.rand(4, 4), torch.rand(2, 3, 4, 4, 4), torch.tensor(1.0)])
    def test_other_shapes_are_refused(self, images: torch.Tensor):
        """The last two dimensions have to be height and width."""
        with pytest.raises(ValueError, match=r"input must have shape \(N, C, H, W\) or \(C, H, W\) with at least one"):
            cf.cutout_batch(images)

    @pytest.mark.parametrize("shape", [(0, 3, 4, 4), (2, 3, 0, 4)])
    def test_empty_batch_is_refused(self, shape: tuple[int, ...]):
        """There must be something to blank."""
        with pytest.raises(ValueError, match="at least one pixel"):
            cf.cutout_batch(torch.rand(shape))

    def test_other_types_are_refused(self):
        """It takes tensors."""
        with pytest.raises(TypeError, match=r"input must be a tensor .* got list"):
            cf.cutout_batch([[[0.0]]])

    @pytest.mark.parametrize("length", [-0.1, 1.1, math.nan])
    def test_length_out_of_range_is_refused(self, length: float):
        """The message names the parameter, its range and what came."""
        with pytest.raises(ValueError, match=rf"length must lie in \[0, 1\], got {length}"):
            cf.cutout_batch(torch.rand(1, 3, 4, 4), length=length)

    def test_length_on_a_device_is_refused(self):
        """A tensor would have to be waited for."""
        with pytest.raises(TypeError, match="length must be a number, got a tensor"):
            cf.cutout_batch(torch.rand(1, 3, 4, 4), length=torch.tensor(0.5))

    def test_bad_number_of_holes_is_refused(self):
        """Holes are counted."""
        with pytest.raises(ValueError, match="num_holes must be at least 0, got -1"):
            cf.cutout_batch(torch.rand(1, 3, 4, 4), -1)
        with pytest.raises(TypeError, match=r"num_holes must be an int, got 1\.5"):
            cf.cutout_batch(torch.rand(1, 3, 4, 4), 1.5)

    @pytest.mark.parametrize(
        "box", [(-1, 0, 2, 2), (0, 0, 5, 2), (3, 0, 2, 2), (0, -1, 2, 2), (0, 0, 2, 7), (0, 3, 2, 2)]
    )
    def test_box_outside_is_refused(self, box: tuple[int, int, int, int]):
        """The message says along which dimension each number counts."""
        with pytest.raises(
            ValueError, match=r"each of boxes must be .* x2 <= 4 \(the height\) .* y2 <= 6 \(the width\)"
        ):
            cf.cutout_batch(torch.rand(1, 3, 4, 6), boxes=[(0, 0, 4, 6), box])

    @pytest.mark.parametrize("box", [(0, 0, 2), (0, 0, 2, 2.0)])
    def test_box_of_other_numbers_is_refused(self, box: tuple[float, ...]):
        """A box is four ints."""
        with pytest.raises(TypeError, match="each of boxes must be four ints"):
            cf.cutout_batch(torch.rand(1, 3, 4, 6), boxes=[box])


class TestDrawHoles:
    @pytest.mark.parametrize("uniform", [False, True])
    def test_each_is_a_box_of_its_own(self, uniform: bool):
        """Holes are squares drawn one after the other, with the chosen kind of sampling."""
        generator = _seeded(5)

        holes = cf.draw_holes((9, 12), 20, 0.5, uniform, generator=_seeded(5))

        assert holes == [cf.draw_box((9, 12), (4, 4), uniform, generator=generator) for _ in range(20)]
        assert len(set(holes)) > 5


class TestDrawBox:
    def test_centre_is_any_pixel(self):
        """By default every pixel is the centre of some box, and each equally often; boxes are cut off at the border."""
        counts = torch.zeros(5, 4)

        for seed in range(4000):
            x1, y1, x2, y2 = cf.draw_box((5, 4), (1, 1), generator=_seeded(seed))
            assert (x2 - x1, y2 - y1) == (1, 1)
            counts[x1, y1] += 1

        assert counts.min() > 200 - 4 * math.sqrt(200)
        assert counts.max() < 200 + 4 * math.sqrt(200)

    def test_box_lies_around_its_centre(self):
        """Boxes of three in six begin at one less than the centre, and stop at the border."""
        boxes = {cf.draw_box((6, 6), (3, 1), generator=_seeded(seed))[::2] for seed in range(200)}

        assert boxes == {(0, 2), (0, 3), (1, 4), (2, 5), (3, 6), (4, 6)}

    def test_uniform_sampling_covers_each_pixel_equally_often(self):
        """Every place that touches the image is drawn: a pixel is covered with probability side / (size + side - 1)."""
        covered = torch.zeros(5, 4)
        draws = 6000

        for seed in range(draws):
            x1, y1, x2, y2 = cf.draw_box((5, 4), (3, 2), uniform_sampling=True, generator=_seeded(seed))
            covered[x1:x2, y1:y2] += 1

        share = 3 / 7 * 2 / 5
        spread = math.sqrt(share * (1 - share) / draws)
        assert (covered / draws - share).abs().max() < 4.5 * spread

    def test_default_covers_the_border_less(self):
        """Boxes whose centre lies in the image reach a corner half as often along each dimension."""
        covered = torch.zeros(8, 8)

        for seed in range(3000):
            x1, y1, x2, y2 = cf.draw_box((8, 8), (5, 5), generator=_seeded(seed))
            covered[x1:x2, y1:y2] += 1

        assert covered[0, 0] < 0.6 * covered[4, 4]

    @given(
        height=st.integers(1, 9),
        width=st.integers(1, 9),
        rows=st.integers(0, 12),
        columns=st.integers(0, 12),
        uniform=st.booleans(),
        seed=st.integers(0, 2**40),
    )
    def test_lies_within_the_image(self, height: int, width: int, rows: int, columns: int, uniform: bool, seed: int):
        """Whatever the sizes, it is a box within the image, at most as large as asked, empty only if asked for none."""
        x1, y1, x2, y2 = cf.draw_box((height, width), (rows, columns), uniform, generator=_seeded(seed))

        assert 0 <= x1 <= x2 <= height
        assert 0 <= y1 <= y2 <= width
        assert min(1, rows) <= x2 - x1 <= rows
        assert min(1, columns) <= y2 - y1 <= columns

    def test_draws_on_the_cpu(self):
        """Numbers are drawn on the CPU although new tensors go elsewhere by default."""
        with torch.device("meta"):
            box = cf.draw_box((4, 4), (2, 2))

        assert all(type(edge) is int for edge in box)

    @pytest.mark.parametrize(("size", "sides"), [((0, 4), (1, 1)), ((4, 4), (1, -1))])
    def test_bad_sizes_are_refused(self, size: tuple[int, int], sides: tuple[int, int]):
        """An image has pixels, and a box has no negative side."""
        with pytest.raises(ValueError, match="size must be at least 1 and sides at least 0, got"):
            cf.draw_box(size, sides)

    @pytest.mark.gpu
    def test_generator_of_a_gpu_is_refused(self):
        """A number drawn on a device would have to be waited for."""
        with pytest.raises(ValueError, match="generator must be on the CPU"):
            cf.draw_box((4, 4), (2, 2), generator=torch.Generator("cuda"))
