"""RandAugment on batches, on single images, and in a data loader."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from torchvision import transforms
from torchvision.transforms.v2.functional import pil_to_tensor, to_pil_image

from composer import functional as cf


def halve(img: Tensor, level: float) -> Tensor:
    """Make an image darker, for any level."""
    return img * 0.5


def brighten(img: Tensor, level: float) -> Tensor:
    """Add the level."""
    return img + level


class Pictures(Dataset):
    """A dataset of gray PIL images with a transform."""

    def __init__(self, transform) -> None:
        self.transform = transform

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> Tensor:
        steps = torch.arange(20, dtype=torch.uint8)
        return self.transform(to_pil_image((steps[:, None] * 5 + steps * 7).repeat(3, 1, 1)))


class TestBatch:
    @given(
        seed=st.integers(0, 2**40),
        count=st.integers(1, 5),
        channels=st.sampled_from([1, 3]),
        size=st.tuples(st.integers(1, 9), st.integers(1, 9)),
        dtype=st.sampled_from([torch.uint8, torch.bfloat16, torch.float16, torch.float32, torch.float64]),
        augmentation_set=st.sampled_from(["all", "safe", "original"]),
    )
    def test_properties(self, seed, count, channels, size, dtype, augmentation_set):
        """Draws are reproducible; shape, dtype and range are preserved, and the input is not modified."""
        white = 255 if dtype == torch.uint8 else 1
        images = (torch.rand(count, channels, *size) * white).to(dtype)
        before = images.clone()

        first, second = (
            cf.randaugment_batch(images, 9, 2, augmentation_set, generator=torch.Generator().manual_seed(seed))
            for _ in range(2)
        )
        draws = cf.draw_randaugment(count, 9, 2, augmentation_set, generator=torch.Generator().manual_seed(seed))

        assert torch.equal(first, second)
        assert torch.equal(first, cf.randaugment_batch(images, draws=draws))
        assert (first.shape, first.dtype) == (images.shape, dtype)
        assert 0 <= first.min() <= first.max() <= white
        assert torch.equal(images, before)

    def test_half_precision_is_computed_in_float32(self):
        """Coordinates in bfloat16 would be off by pixels: only the result is rounded."""
        images, draws = torch.rand(40, 3, 64, 64).bfloat16(), cf.draw_randaugment(40)

        output = cf.randaugment_batch(images, draws=draws)

        assert torch.equal(output, cf.randaugment_batch(images.float(), draws=draws).bfloat16())

    def test_steps_are_applied_in_order(self):
        """The first row of the draws is applied first: inverting and halving do not commute."""
        images = torch.full((2, 1, 2, 2), 0.8)
        invert_halve = cf.RandAugmentDraws(torch.tensor([[4, 7], [7, 4]]), torch.tensor([[0.0, 0.5], [0.5, 0.0]]))

        output = cf.randaugment_batch(images, draws=invert_halve)

        torch.testing.assert_close(output[:, 0, 0, 0], torch.tensor([0.1, 0.6]))

    @pytest.mark.parametrize("dtype", [torch.uint8, torch.float32])
    def test_compiles_to_one_graph(self, dtype: torch.dtype):
        """With draws as inputs, one graph is compiled."""
        graphs = []
        compiled = torch.compile(
            cf.randaugment_batch, fullgraph=True, backend=lambda graph, _: graphs.append(graph) or graph
        )
        images = (torch.rand(14, 3, 9, 8) * 255).to(dtype)

        for severity in (3, 9):
            draws = cf.draw_randaugment(14, severity)

            torch.testing.assert_close(
                compiled(images, draws=draws), cf.randaugment_batch(images, draws=draws), atol=1e-6, rtol=0
            )
        assert len(graphs) == 1


class TestImage:
    @pytest.mark.parametrize("dtype", [torch.uint8, torch.float32])
    def test_tensor_equals_batch_of_one(self, dtype: torch.dtype):
        """The same draw gives the same result as in a batch."""
        images, draws = (torch.rand(1, 3, 9, 8) * 255).to(dtype), cf.draw_randaugment(1)

        output = cf.randaugment_image(images[0], draws=draws)

        assert torch.equal(output, cf.randaugment_batch(images, draws=draws)[0])

    @given(seed=st.integers(0, 2**40))
    def test_draws_depend_on_the_generator(self, seed: int):
        """A PIL image and a tensor have the same draws, which depend only on the generator."""
        img = to_pil_image(torch.randint(256, (3, 9, 14), dtype=torch.uint8))

        first, second = (cf.randaugment_image(img, generator=torch.Generator().manual_seed(seed)) for _ in range(2))
        draws = cf.draw_randaugment(1, generator=torch.Generator().manual_seed(seed))

        assert first.tobytes() == second.tobytes() == cf.randaugment_image(img, draws=draws).tobytes()

    def test_custom_functions(self):
        """Functions receive the image and a level from 0 to the severity, one after the other."""
        img = torch.ones(2, 2)[None]
        draws = cf.RandAugmentDraws(torch.tensor([[1], [0]]), torch.tensor([[3.0], [0.0]]))

        output = cf.randaugment_image(img, augmentation_set=[halve, brighten], draws=draws)
        levels = {float(cf.randaugment_image(img, 4, 1, [brighten])[0, 0, 0]) - 1 for _ in range(50)}

        assert torch.equal(output, torch.full((1, 2, 2), 2.0))
        assert 0 <= min(levels) < 1
        assert 3 < max(levels) <= 4


class TestTransform:
    def test_settings(self):
        """The transform applies and shows its settings."""
        transform, three_times = cf.randaugment(4, 3, "safe"), cf.randaugment(4, 3, [halve])
        img = torch.rand(3, 8, 8)
        torch.manual_seed(2)
        output = transform(img)
        torch.manual_seed(2)

        assert torch.equal(output, cf.randaugment_image(img, 4, 3, "safe"))
        assert torch.equal(three_times(img), img / 8)
        assert repr(transform) == "RandAugmentTransform(severity=4, depth=3, augmentation_set='safe')"

    @pytest.mark.parametrize("workers", [0, 2])
    @pytest.mark.parametrize("make", [cf.randaugment, cf.augmix])
    def test_works_in_worker_processes(self, make, workers: int):
        """In worker processes each sample, epoch and seed has other draws; equal seeds have the same."""
        normalize = transforms.Normalize([0.5] * 3, [0.5] * 3)
        pictures = Pictures(transforms.Compose([make(), transforms.ToTensor(), normalize]))
        loader = DataLoader(pictures, batch_size=8, num_workers=workers)

        torch.manual_seed(3)
        first, second = torch.cat(list(loader)), torch.cat(list(loader))
        torch.manual_seed(3)
        again = torch.cat(list(loader))

        assert first.shape == (16, 3, 20, 20)
        assert torch.equal(first, again)
        assert not torch.equal(first, second)
        assert len({tuple(image.flatten().tolist()) for image in first}) > 8


class TestBatches:
    @pytest.mark.parametrize("name", ["randaugment", "augmix"])
    def test_batch_of_images(self, name: str):
        """The function for images transforms a batch like the function for batches."""
        images = torch.randint(0, 256, (5, 3, 8, 8), dtype=torch.uint8)

        augmented = getattr(cf, f"{name}_image")(images, generator=torch.Generator().manual_seed(3))

        expected = getattr(cf, f"{name}_batch")(images, generator=torch.Generator().manual_seed(3))
        assert torch.equal(augmented, expected)

    @pytest.mark.parametrize("change", [cf.randaugment_image, cf.augmix_image])
    def test_functions_draw_for_each_image(self, change):
        """Custom functions are applied to each image of a batch, with its own draws."""
        images = torch.ones(6, 1, 2, 2)

        changed = change(images, 5, 1, augmentation_set=[lambda img, level: img * level])

        assert changed.shape == images.shape
        assert len(changed[:, 0, 0, 0].unique()) == 6


def test_pil_images_and_tensors_agree():
    """Over many draws of two steps, nearly all pixels differ by at most one or two."""
    pixels = torch.nn.functional.interpolate(torch.rand(1, 3, 6, 6), size=(48, 40), mode="bicubic").clamp(0, 1)[0]
    pixels = (pixels * 255).byte()
    img = to_pil_image(pixels)

    differences = torch.stack(
        [
            (
                pil_to_tensor(cf.randaugment_image(img, generator=torch.Generator().manual_seed(seed))).int()
                - cf.randaugment_image(pixels, generator=torch.Generator().manual_seed(seed)).int()
            ).abs()
            for seed in range(100)
        ]
    )

    assert (differences <= 2).float().mean() > 0.97
