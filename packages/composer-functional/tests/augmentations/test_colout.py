"""ColOut compared with list indexing, on tensors, PIL images, pairs, and in data loader workers."""

from __future__ import annotations

import math
import pickle

import numpy as np
import PIL.Image
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader
from torchvision import transforms
from torchvision.datasets import FakeData

from composer import functional as cf
from fixtures import seeded

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.uint8, torch.int64, torch.bool]
MODES = ["1", "L", "P", "RGB", "RGBA", "CMYK", "I", "F", "I;16"]


def _pick(images: torch.Tensor, rows: list[int], columns: list[int]) -> torch.Tensor:
    """Select rows and columns one by one."""
    selected = torch.stack([images[..., row, :] for row in rows], -2)
    return torch.stack([selected[..., column] for column in columns], -1)


def _picture(mode: str, width: int = 9, height: int = 7) -> PIL.Image.Image:
    """Return a random PIL image."""
    noise = np.random.default_rng(3).integers(0, 256, (height, width, 3), dtype=np.uint8)
    picture = PIL.Image.fromarray(noise)
    return picture.convert("I").convert(mode) if mode == "I;16" else picture.convert(mode)


class TestColoutBatch:
    @pytest.mark.parametrize("format", [torch.contiguous_format, torch.channels_last])
    @pytest.mark.parametrize("dtype", DTYPES)
    def test_keeps_the_rows_and_columns(self, dtype: torch.dtype, format: torch.memory_format, device: torch.device):
        """The output has the rows and columns with these indices, in the input's memory format."""
        images = torch.randint(0, 99, (2, 3, 6, 7), device=device).to(dtype).contiguous(memory_format=format)
        rows, columns = [0, 1, 4], [2, 3, 5, 6]
        before = images.clone()

        output = cf.colout_batch(
            images,
            row_indices=torch.tensor(rows, device=device),
            col_indices=torch.tensor(columns, device=device),
        )

        assert torch.equal(output, _pick(images, rows, columns))
        assert output.dtype == dtype
        assert output.is_contiguous(memory_format=format)
        assert torch.equal(images, before)

    @pytest.mark.parametrize("shape", [(3, 20, 40), (2, 3, 20, 40)])
    @pytest.mark.parametrize(
        ("p_row", "p_col", "size"),
        [(0.15, 0.15, (17, 34)), (0.5, 0, (10, 40)), (0, 0.99, (20, 1)), (0.99, 0.31, (1, 27)), (0.8, 0.9, (4, 4))],
    )
    def test_number_of_dropped_rows_and_columns(
        self, shape: tuple[int, ...], p_row: float, p_col: float, size: tuple[int, int]
    ):
        """The numbers of those that remain are rounded down, and are at least 1."""
        output = cf.colout_batch(torch.rand(shape), p_row, p_col)

        assert output.shape == (*shape[:-2], *size)

    @given(
        seed=st.integers(0, 2**40),
        height=st.integers(1, 12),
        width=st.integers(1, 12),
        p_row=st.floats(0, 0.99),
        p_col=st.floats(0, 0.99),
    )
    def test_draws_can_be_passed_in(self, seed: int, height: int, width: int, p_row: float, p_col: float):
        """The same generator selects the same sorted rows and columns in all images and channels."""
        images = torch.arange(height * width).view(height, width).expand(2, 3, height, width)
        generator = seeded(seed)

        first = cf.colout_batch(images, p_row, p_col, generator=seeded(seed))
        rows = cf.draw_kept(height, p_row, generator=generator).tolist()
        columns = cf.draw_kept(width, p_col, generator=generator).tolist()

        assert torch.equal(first, _pick(images, rows, columns))
        assert torch.equal(first, cf.colout_batch(images, p_row, p_col, generator=seeded(seed)))

    def test_dropping_nothing_is_the_identity(self):
        """With fractions of 0 a bit-identical copy is returned."""
        images = torch.rand(2, 3, 5, 6)

        output = cf.colout_batch(images, 0, 0)

        assert torch.equal(output, images)
        assert output.data_ptr() != images.data_ptr()

    def test_defaults(self):
        """Fifteen percent of rows and of columns are dropped."""
        assert cf.colout_batch(torch.rand(1, 3, 100, 200)).shape == (1, 3, 85, 170)

    @pytest.mark.parametrize("format", [torch.contiguous_format, torch.channels_last])
    def test_gradient_of_dropped_pixels_is_zero(self, format: torch.memory_format):
        """Selected pixels receive their gradient, dropped ones none."""
        images = torch.rand(2, 2, 3, 4, dtype=torch.float64).contiguous(memory_format=format).requires_grad_()
        rows, columns = torch.tensor([0, 2]), torch.tensor([1, 2])

        output = cf.colout_batch(images, row_indices=rows, col_indices=columns)
        (gradient,) = torch.autograd.grad(output.sum(), images)

        selected = torch.zeros(3, 4, dtype=torch.float64)
        selected[rows[:, None], columns] = 1
        assert torch.equal(gradient, selected.expand_as(gradient))

    @pytest.mark.parametrize("format", [torch.contiguous_format, torch.channels_last])
    def test_compiles_to_one_graph(self, format: torch.memory_format):
        """With draws as inputs, one graph is compiled, also for a pair."""
        compiled = torch.compile(cf.colout_batch, fullgraph=True, backend="eager")
        images, masks = torch.rand(2, 3, 5, 6).contiguous(memory_format=format), torch.rand(2, 5, 6)
        rows, columns = [0, 2, 3], [1, 4]

        output, smaller = compiled((images, masks), row_indices=torch.tensor(rows), col_indices=torch.tensor(columns))

        assert torch.equal(output, _pick(images, rows, columns))
        assert torch.equal(smaller, _pick(masks, rows, columns))

    @pytest.mark.parametrize("shape", [(4, 4), (2, 3, 4, 4, 4)])
    def test_invalid_shape_raises(self, shape: tuple[int, ...]):
        """The last two dimensions must be height and width."""
        with pytest.raises(ValueError, match=r"input must have shape \(N, C, H, W\) or \(C, H, W\) with at least one"):
            cf.colout_batch(torch.rand(shape))

    @pytest.mark.parametrize("shape", [(0, 3, 4, 4), (3, 0, 4)])
    def test_empty_batch_raises(self, shape: tuple[int, ...]):
        """There must be something left."""
        with pytest.raises(ValueError, match="at least one pixel"):
            cf.colout_batch(torch.rand(shape))
        with pytest.raises(ValueError, match="at least one pixel, got height and width"):
            cf.colout_batch(PIL.Image.new("L", (0, 3)))

    @pytest.mark.parametrize("sample", ["image", np.zeros((3, 4, 4)), (1, 2), (torch.rand(3, 4, 4),) * 3])
    def test_invalid_type_raises(self, sample: object):
        """Tensors, PIL images and pairs are supported."""
        with pytest.raises(TypeError, match="sample must be a tensor, a PIL image, or a pair"):
            cf.colout_batch(sample)

    @pytest.mark.parametrize("p", [-0.1, 1.0, math.nan])
    @pytest.mark.parametrize("name", ["p_row", "p_col"])
    def test_fraction_out_of_range_raises(self, p: float, name: str):
        """The error states the parameter, its range and the value."""
        with pytest.raises(ValueError, match=rf"{name} must lie in \[0, 1\), got {p}"):
            cf.colout_batch(torch.rand(3, 4, 4), **{name: p})

    @pytest.mark.parametrize("name", ["row_indices", "col_indices"])
    def test_bad_indices_raise(self, name: str):
        """A list of at least one index is required."""
        for indices in (torch.zeros(2, 2, dtype=torch.int64), torch.zeros(0, dtype=torch.int64)):
            with pytest.raises(
                ValueError, match=rf"{name} must hold the indices of those that remain, shape \(K,\), got"
            ):
                cf.colout_batch(torch.rand(3, 4, 4), **{name: indices})

    def test_unknown_resize_target_raises(self):
        """The error lists the three values."""
        with pytest.raises(ValueError, match="resize_target must be True, False or 'auto', got 'always'"):
            cf.colout_batch(torch.rand(3, 4, 4), resize_target="always")


class TestTargets:
    @pytest.mark.parametrize("container", [tuple, list])
    @pytest.mark.parametrize("shape", [(4, 20, 40), (4, 1, 20, 40)])
    def test_masks_are_reduced_alike(self, container: type, shape: tuple[int, ...]):
        """Targets of the images' size lose the same rows and columns, and a pair is returned as a pair."""
        masks = torch.randint(0, 50, shape)
        images = masks.view(4, 1, 20, 40).float()

        pair = cf.colout_batch(container((images, masks)))

        assert type(pair) is container
        assert pair[0].shape == (4, 1, 17, 34)
        assert torch.equal(pair[1].view(pair[0].shape).float(), pair[0])

    @pytest.mark.parametrize(
        "target",
        [torch.arange(20), torch.rand(20, 40), torch.rand(20, 9, 4), torch.rand(3, 20, 40), {"boxes": 1}, None, 7],
    )
    def test_other_targets_are_unchanged(self, target: object):
        """Labels, boxes and other targets do not change."""
        _, passed = cf.colout_batch((torch.rand(20, 3, 20, 40), target))

        assert passed is target

    def test_resize_target_false(self):
        """With resize_target=False a mask does not change."""
        masks = torch.rand(2, 8, 8)

        images, passed = cf.colout_batch((torch.rand(2, 3, 8, 8), masks), 0.5, 0.5, resize_target=False)

        assert passed is masks
        assert images.shape == (2, 3, 4, 4)

    def test_mask_of_a_single_image(self):
        """The mask of an image (C, H, W) has two or three dimensions."""
        mask = torch.randint(0, 50, (20, 40))

        image, smaller = cf.colout_batch((mask[None].float(), mask), resize_target=True)
        _, cubed = cf.colout_batch((mask[None].float(), mask[None]))

        assert torch.equal(smaller, image[0].long())
        assert cubed.shape == (1, 17, 34)

    @pytest.mark.parametrize("target", [torch.arange(4), torch.rand(4, 9, 8), torch.rand(3, 8, 8), [1, 2], None])
    def test_target_without_pixels_raises(self, target: object):
        """With resize_target=True, a target without pixels raises an error with the remedy."""
        with pytest.raises(
            ValueError, match=r"target must be an image or a mask with .* \(8, 8\).* resize_target=False"
        ):
            cf.colout_batch((torch.rand(4, 3, 8, 8), target), resize_target=True)


class TestPilImages:
    @pytest.mark.parametrize("mode", MODES)
    def test_selects_rows_and_columns(self, mode: str):
        """The pixels equal those of the array, in any mode, and the input is not modified."""
        picture = _picture(mode)
        pixels = np.asarray(picture)
        rows, columns = [1, 2, 5, 6], [0, 3, 4, 8]

        output = cf.colout_batch(picture, row_indices=torch.tensor(rows), col_indices=torch.tensor(columns))

        assert output.mode == mode
        assert np.array_equal(np.asarray(output), pixels[rows][:, columns])
        assert output.getpalette() == picture.getpalette()
        assert np.array_equal(np.asarray(picture), pixels)

    def test_equals_tensor_result(self):
        """The same generator drops the same rows and columns of a PIL image as of a tensor."""
        picture = _picture("RGB", 30, 20)
        tensor = torch.from_numpy(np.array(picture)).permute(2, 0, 1)

        output = cf.colout_batch(picture, 0.3, 0.2, generator=seeded(5))

        assert output.size == (24, 14)
        assert np.array_equal(
            np.asarray(output), cf.colout_batch(tensor, 0.3, 0.2, generator=seeded(5)).permute(1, 2, 0).numpy()
        )

    @pytest.mark.parametrize("setting", [True, "auto"])
    def test_masks_are_reduced_alike(self, setting: bool | str):
        """The mask of a PIL image may be a PIL image or a tensor."""
        picture = _picture("L", 30, 20)
        mask = torch.from_numpy(np.array(picture))

        output, smaller = cf.colout_batch((picture, picture), resize_target=setting, generator=seeded(5))
        _, tensor = cf.colout_batch((picture, mask), resize_target=setting, generator=seeded(5))
        _, of_tensor = cf.colout_batch((mask[None], picture), resize_target=setting, generator=seeded(5))

        assert output.size == (25, 17)
        for other in (smaller, tensor.numpy(), of_tensor):
            assert np.array_equal(np.asarray(output), np.asarray(other))

    def test_image_of_another_size_is_unchanged(self):
        """Only a target of the input's size is reduced."""
        thumbnail = _picture("L", 4, 4)

        _, passed = cf.colout_batch((_picture("RGB"), thumbnail))

        assert passed is thumbnail


class TestDrawSelected:
    def test_each_index_is_equally_likely(self):
        """In many draws each of ten indices is selected with probability 0.7."""
        counts = torch.zeros(10)

        for seed in range(2000):
            selected = cf.draw_kept(10, 0.3, generator=seeded(seed))
            assert selected.tolist() == sorted(set(selected.tolist()))
            counts[selected] += 1

        assert counts.sum() == 2000 * 7
        assert (counts / 2000 - 0.7).abs().max() < 4.5 * math.sqrt(0.7 * 0.3 / 2000)

    def test_device_follows_the_tensor(self, device: torch.device):
        """For a tensor the indices are on its device, with the same values as for a number."""
        selected = cf.draw_kept(torch.zeros(9, 2, device=device), 0.5, generator=seeded(1))

        assert selected.device.type == device.type
        assert selected.tolist() == cf.draw_kept(9, 0.5, generator=seeded(1)).tolist()

    def test_fraction_out_of_range_raises(self):
        """Not all can be dropped."""
        with pytest.raises(ValueError, match=r"p must lie in \[0, 1\), got 1"):
            cf.draw_kept(4, 1)


class TestColOutTransform:
    def test_equals_colout_batch(self):
        """The transform has the function's arguments, and both are validated."""
        transform = cf.colout(0.25, 0.5, resize_target=False)
        mask = torch.rand(8, 8)

        image, passed = transform((torch.rand(3, 8, 8), mask))

        assert repr(transform) == "ColOutTransform(p_row=0.25, p_col=0.5, resize_target=False)"
        assert image.shape == (3, 6, 4)
        assert passed is mask
        with pytest.raises(ValueError, match="p_row must lie in"):
            cf.colout(2.0)
        with pytest.raises(ValueError, match="resize_target must be"):
            cf.ColOutTransform(resize_target="never")

    def test_can_be_pickled(self):
        """A pickled copy gives the same result."""
        transform = cf.colout(0.25, 0.5)
        image = torch.rand(3, 16, 16)

        copy = pickle.loads(pickle.dumps(transform))

        torch.manual_seed(3)
        expected = transform(image)
        torch.manual_seed(3)
        assert torch.equal(copy(image), expected)

    # From 3.12 on Python says so of any process with threads, and torch has some.
    @pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
    @pytest.mark.parametrize(("context", "workers"), [("fork", 2), ("spawn", 1)])
    def test_works_in_worker_processes(self, context: str, workers: int):
        """In worker processes it drops different rows and columns of each image, the same number of all."""
        transform = transforms.Compose([cf.colout(0.25, 0.5), transforms.PILToTensor()])
        plain, dropped = (
            FakeData(size=4, image_size=(3, 16, 16), transform=each) for each in (transforms.PILToTensor(), transform)
        )
        loader = DataLoader(dropped, 2, num_workers=workers, multiprocessing_context=context, generator=seeded(1))

        images = torch.cat([images for images, _ in loader])

        selected = [_find(image, original) for image, (original, _) in zip(images, plain, strict=True)]
        assert images.shape == (4, 3, 12, 8)
        for (rows, columns), image, (original, _) in zip(selected, images, plain, strict=True):
            assert torch.equal(image, _pick(original, rows, columns))
        assert len({tuple(rows) for rows, _ in selected}) == 4


def _find(image: torch.Tensor, original: torch.Tensor) -> tuple[list[int], list[int]]:
    """Find an image's rows and columns in the original, whose colors are unique."""
    actual, expected = (each[0].int() << 16 | each[1].int() << 8 | each[2].int() for each in (image, original))
    assert expected.unique().numel() == expected.numel()
    places = [(expected == color).nonzero()[0].tolist() for color in (*actual[:, 0], *actual[0])]
    return [row for row, _ in places[: len(actual)]], [column for _, column in places[len(actual) :]]
