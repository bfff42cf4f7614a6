"""RandAugment on batches, on single images, and in a data loader."""

from __future__ import annotations

import math
import pickle
import subprocess
import sys

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

    @pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.float32, torch.float64])
    def test_depth_zero_is_the_identity(self, dtype: torch.dtype, device: torch.device):
        """With depth 0 a bit-identical copy is returned."""
        images = (torch.rand(4, 3, 5, 6, device=device) * 200).to(dtype)

        output = cf.randaugment_batch(images, depth=0)

        assert torch.equal(output, images)
        assert output.data_ptr() != images.data_ptr()

    def test_half_precision_is_computed_in_float32(self):
        """Coordinates in bfloat16 would be off by pixels: only the result is rounded."""
        images, draws = torch.rand(40, 3, 64, 64).bfloat16(), cf.draw_randaugment(40)

        output = cf.randaugment_batch(images, draws=draws)

        assert torch.equal(output, cf.randaugment_batch(images.float(), draws=draws).bfloat16())

    @pytest.mark.parametrize("dtype", [torch.uint8, torch.float32])
    def test_memory_format_is_preserved(self, dtype: torch.dtype, device: torch.device):
        """Channels-last input gives channels-last output with the same values."""
        images, draws = (torch.rand(6, 3, 8, 9, device=device) * 200).to(dtype), cf.draw_randaugment(6)
        last = images.contiguous(memory_format=torch.channels_last)

        output = cf.randaugment_batch(last, draws=draws)

        assert output.is_contiguous(memory_format=torch.channels_last)
        assert torch.equal(output, cf.randaugment_batch(images, draws=draws))

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

    def test_each_sample_has_its_own_draw(self):
        """Copies of one image are augmented differently."""
        images = torch.rand(1, 3, 16, 16).expand(20, 3, 16, 16)

        output = cf.randaugment_batch(images)

        assert len({tuple(image.flatten().tolist()) for image in output}) > 15


class TestImage:
    @pytest.mark.parametrize("dtype", [torch.uint8, torch.float32])
    def test_tensor_equals_batch_of_one(self, dtype: torch.dtype):
        """The same draw gives the same result as in a batch."""
        images, draws = (torch.rand(1, 3, 9, 8) * 255).to(dtype), cf.draw_randaugment(1)

        output = cf.randaugment_image(images[0], draws=draws)

        assert torch.equal(output, cf.randaugment_batch(images, draws=draws)[0])

    @pytest.mark.parametrize("mode", ["RGB", "L"])
    @pytest.mark.parametrize("augmentation_set", ["all", "safe", "original"])
    def test_pil_mode_and_size_are_preserved(self, mode: str, augmentation_set: str):
        """Every operation gives an image of the same mode and size; the input is not modified."""
        img = to_pil_image(torch.randint(256, (3, 9, 14), dtype=torch.uint8)).convert(mode)
        before = img.tobytes()

        outputs = [cf.randaugment_image(img, 9, 2, augmentation_set) for _ in range(60)]

        assert {(output.mode, output.size) for output in outputs} == {(mode, (14, 9))}
        assert img.tobytes() == before
        assert len({output.tobytes() for output in outputs}) > 20

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

    def test_custom_functions_on_pil_images(self):
        """A function's return value is the result."""
        img = to_pil_image(torch.zeros(3, 4, 5, dtype=torch.uint8))

        output = cf.randaugment_image(img, augmentation_set=[lambda img, level: img.rotate(90, expand=True)], depth=1)

        assert output.size == (4, 5)

    def test_pillow_is_optional(self):
        """Tensors are augmented without Pillow, NumPy and torchvision."""
        code = (
            "import sys; sys.modules.update(dict.fromkeys(['PIL', 'PIL.Image', 'torchvision', 'kornia']));"
            "import torch; from composer import functional as cf;"
            "img = torch.rand(3, 8, 8);"
            "print(cf.randaugment()(img).shape == cf.augmix()(img).shape == img.shape)"
        )

        run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

        assert run.stdout.strip() == "True"


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

    def test_can_be_pickled(self):
        """A pickled copy draws and computes the same."""
        transform = pickle.loads(pickle.dumps(cf.RandAugmentTransform(5, 2, [halve, brighten])))
        img = torch.rand(3, 8, 8)
        torch.manual_seed(2)
        output = transform(img)
        torch.manual_seed(2)

        assert torch.equal(output, cf.randaugment_image(img, 5, 2, [halve, brighten]))

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


class TestErrors:
    @pytest.mark.parametrize("shape", [(0, 3, 4, 4), (3, 4, 4), (2, 2, 4, 4), (2, 3, 0, 4), (2, 4, 4, 4)])
    def test_invalid_shape(self, shape: tuple[int, ...]):
        """Three channels and a batch dimension are required."""
        with pytest.raises(ValueError, match=r"input must be a batch \(N, C, H, W\) with .* got shape"):
            cf.randaugment_batch(torch.zeros(shape))

    @pytest.mark.parametrize("dtype", [torch.int64, torch.int8, torch.bool, torch.complex64])
    def test_invalid_dtype(self, dtype: torch.dtype):
        """Of integer dtypes only uint8 is supported."""
        with pytest.raises(TypeError, match=rf"input must be uint8, or floating point .* got {dtype}"):
            cf.randaugment_batch(torch.zeros(2, 3, 4, 4, dtype=dtype))

    def test_non_tensor(self):
        """A batch is a tensor."""
        with pytest.raises(TypeError, match=r"input must be a tensor .* got list"):
            cf.randaugment_batch([1, 2])

    def test_functions_for_a_batch(self):
        """Functions would need a loop over samples."""
        with pytest.raises(TypeError, match="Functions are for randaugment_image"):
            cf.randaugment_batch(torch.rand(2, 3, 4, 4), augmentation_set=[halve])

    @pytest.mark.parametrize("count", [1, 3])
    def test_mismatched_draws(self, count: int):
        """Each sample needs its draw."""
        with pytest.raises(ValueError, match=r"draws must hold operations and magnitudes of shape \(depth, 2\)"):
            cf.randaugment_batch(torch.rand(2, 3, 4, 4), draws=cf.draw_randaugment(count))

    def test_draws_on_a_device(self):
        """Reading draws on a device would synchronize."""
        draws = cf.RandAugmentDraws(torch.zeros(1, 2, dtype=torch.int64, device="meta"), torch.zeros(1, 2))

        with pytest.raises(ValueError, match="draws must be on the CPU, got meta"):
            cf.randaugment_batch(torch.rand(2, 3, 4, 4), draws=draws)

    @pytest.mark.parametrize("call", [cf.draw_randaugment, cf.randaugment])
    def test_negative_depth(self, call):
        """Depth must not be negative."""
        arguments = {"count": 1} if call is cf.draw_randaugment else {}
        with pytest.raises(ValueError, match="depth must be at least 0, got -1"):
            call(**arguments, depth=-1)

    @pytest.mark.parametrize("make", [cf.randaugment, cf.augmix])
    def test_settings_of_transforms(self, make):
        """Settings are validated at construction, not in a worker."""
        with pytest.raises(ValueError, match=r"severity must lie in \[0, 10\], got nan"):
            make(severity=math.nan)
        with pytest.raises(ValueError, match="augmentation_set must be"):
            make(augmentation_set="none")
        with pytest.raises(TypeError, match=r"augmentation_set must be .* or a list of functions"):
            make(augmentation_set=3)
        with pytest.raises(TypeError, match=r"augmentation_set must be .* or a list of functions"):
            make(augmentation_set=["all"])
        with pytest.raises(ValueError, match="augmentation_set must hold at least one function"):
            make(augmentation_set=[])

    @pytest.mark.parametrize("change", [cf.randaugment_image, cf.augmix_image])
    def test_invalid_image(self, change):
        """An image has three dimensions, a batch four, or it is a gray or color PIL image."""
        with pytest.raises(TypeError, match=r"img must be a PIL image or a tensor .* got str"):
            change("cat.jpg")
        with pytest.raises(ValueError, match=r"img must be one image \(C, H, W\) or a batch .* got shape \(4, 4\)"):
            change(torch.rand(4, 4))
        with pytest.raises(ValueError, match=r"img must have the mode .*, got 'RGBA'\. Convert it: img\.convert"):
            change(to_pil_image(torch.rand(4, 5, 5)))
        with pytest.raises(ValueError, match=r"img must have at least one pixel, got size \(0, 5\)"):
            change(to_pil_image(torch.rand(3, 5, 5)).crop((0, 0, 0, 5)))

    @pytest.mark.parametrize("change", [cf.randaugment_image, cf.augmix_image])
    def test_invalid_tensor(self, change):
        """An image has 1 or 3 channels; custom functions accept any tensor."""
        with pytest.raises(ValueError, match=r"img must be one image \(C, H, W\) with 1 or 3 .* got shape \(4, 5, 5\)"):
            change(torch.rand(4, 5, 5))
        with pytest.raises(ValueError, match=r"img must be one image .* at least one pixel, got shape \(3, 0, 5\)"):
            change(torch.rand(3, 0, 5))
        with pytest.raises(TypeError, match=r"img must be uint8, or floating point .* got torch.int64"):
            change(torch.zeros(3, 5, 5, dtype=torch.int64))
        assert change(torch.rand(4, 5, 5), augmentation_set=[lambda img, _: img]).shape == (4, 5, 5)

    @pytest.mark.parametrize("draws", [3, (torch.zeros(1, 2), torch.zeros(1, 2))])
    def test_invalid_draws(self, draws):
        """The error names the function that returns draws."""
        images = torch.rand(2, 3, 4, 4)
        for batch, image, name in (
            (cf.randaugment_batch, cf.randaugment_image, "draw_randaugment"),
            (cf.augmix_batch, cf.augmix_image, "draw_augmix"),
        ):
            with pytest.raises(TypeError, match=f"draws must be .*, as by {name}, got {type(draws).__name__}"):
                batch(images, draws=draws)
            with pytest.raises(TypeError, match=f"draws must be .*, as by {name}, got {type(draws).__name__}"):
                image(images[0], draws=draws)

    @pytest.mark.parametrize("draw", [cf.draw_randaugment, cf.draw_augmix])
    def test_fractional_counts(self, draw):
        """Counts are integers."""
        with pytest.raises(TypeError, match=r"count must be an int, got 3\.5\. It is the number of samples\."):
            draw(3.5)
        with pytest.raises(TypeError, match=r"depth must be an int, got 1\.5\. It is the number of operations"):
            draw(3, depth=1.5)
        with pytest.raises(TypeError, match=r"width must be an int, got 1\.5\. It is the number of chains\."):
            cf.augmix(width=1.5)

    @pytest.mark.gpu
    def test_cuda_generator(self):
        """Draws are on the CPU."""
        with pytest.raises(ValueError, match="generator must be on the CPU"):
            cf.draw_randaugment(2, generator=torch.Generator("cuda"))


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
