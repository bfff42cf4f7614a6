"""ColOut compared with list indexing, on tensors, PIL images, pairs, and in data loader workers."""

from __future__ import annotations

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


class TestColOutTransform:
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
