"""Each operation on tensors compared with torchvision and kornia, and properties of all."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torchvision.transforms import InterpolationMode
from torchvision.transforms.v2 import functional as tv

from composer import functional as cf

NAMES = [
    "identity",
    "autocontrast",
    "equalize",
    "posterize",
    "solarize",
    "color",
    "contrast",
    "brightness",
    "sharpness",
    "rotate",
    "shear_x",
    "shear_y",
    "translate_x",
    "translate_y",
]
MAGNITUDES = {
    "identity": (0.0, 0.0, 0.0),
    "autocontrast": (0.0, 0.0, 0.0),
    "equalize": (0.0, 0.0, 0.0),
    "posterize": (1.0, 4.0, 8.0),
    "solarize": (0.33, 0.77, 0.0),
    "color": (0.3, 1.7, 0.0),
    "contrast": (0.3, 1.7, 0.0),
    "brightness": (0.3, 1.7, 0.0),
    "sharpness": (0.3, 1.7, 0.0),
    "rotate": (17.0, -29.0, 3.0),
    "shear_x": (0.21, -0.3, 0.0),
    "shear_y": (0.13, -0.29, 0.0),
    "translate_x": (0.3, -0.11, 0.0),
    "translate_y": (0.2, -0.33, 0.0),
}


def apply_torchvision(img: Tensor, name: str, magnitude: float, mode: InterpolationMode) -> Tensor:
    """Apply torchvision's operation to one image."""
    height, width = img.shape[-2:]
    white = 255 if img.dtype == torch.uint8 else 1

    def affine(angle: float = 0, x: int = 0, y: int = 0, shear: tuple[float, float] = (0, 0), center=None) -> Tensor:
        slopes = [math.degrees(math.atan(slope)) for slope in shear]
        return tv.affine(img, angle, [x, y], 1.0, slopes, mode, center=center)

    operations = {
        "identity": lambda: img,
        "autocontrast": lambda: tv.autocontrast(img),
        "equalize": lambda: tv.equalize(img),
        "posterize": lambda: tv.posterize(img, int(magnitude)),
        "solarize": lambda: tv.solarize(img, 256 * magnitude * white / 255),
        "color": lambda: tv.adjust_saturation(img, magnitude),
        "contrast": lambda: tv.adjust_contrast(img, magnitude),
        "brightness": lambda: tv.adjust_brightness(img, magnitude),
        "sharpness": lambda: tv.adjust_sharpness(img, magnitude),
        "rotate": lambda: tv.rotate(img, magnitude, mode),
        "shear_x": lambda: affine(shear=(magnitude, 0), center=[0, 0]),
        "shear_y": lambda: affine(shear=(0, magnitude), center=[0, 0]),
        "translate_x": lambda: affine(x=int(magnitude * width)),
        "translate_y": lambda: affine(y=int(magnitude * height)),
    }
    return operations[name]()


def one_step(names: list[str], magnitudes: tuple[float, ...]) -> cf.RandAugmentDraws:
    """Assign one operation to each sample."""
    places = [NAMES.index(name) for name in names]
    return cf.RandAugmentDraws(torch.tensor([places]), torch.tensor([magnitudes]))


def one_chain(draws: cf.RandAugmentDraws) -> cf.AugMixDraws:
    """Give the chain a weight of one."""
    ones = torch.ones(1, draws.operations.shape[1])
    return cf.AugMixDraws(draws.operations[:, None], draws.magnitudes[:, None], ones, ones[0])


def make_bytes(channels: int = 3, size: tuple[int, int] = (23, 34)) -> Tensor:
    """Make three images of bytes with different ranges."""
    images = torch.randint(256, (3, channels, *size), dtype=torch.uint8)
    images[1] = images[1] // 3 + 40
    images[2, :, :, :7] = 255
    return images


def apply_batch(images: Tensor, draws: cf.RandAugmentDraws, interpolation: str) -> Tensor:
    """Apply one operation to each sample; AugMix interpolates."""
    if interpolation == "nearest":
        return cf.randaugment_batch(images, draws=draws)
    return cf.augmix_batch(images, draws=one_chain(draws))


def apply_each(images: Tensor, name: str, interpolation: str) -> Tensor:
    """Apply torchvision's operation sample by sample."""
    magnitudes = torch.tensor(MAGNITUDES[name]).tolist()  # as float32 has them
    mode = InterpolationMode(interpolation)
    pairs = zip(images, magnitudes, strict=True)
    return torch.stack([apply_torchvision(img, name, magnitude, mode) for img, magnitude in pairs])


@pytest.mark.parametrize("interpolation", ["nearest", "bilinear"])
@pytest.mark.parametrize("channels", [1, 3])
class TestAgainstTorchvision:
    @pytest.mark.parametrize("name", NAMES)
    def test_bytes(self, name: str, channels: int, interpolation: str, device: torch.device):
        """Bytes are equal up to rounding.

        Torchvision truncates ``x / scale`` and ``a x + b y``, while this library computes ``y + a (x - y)`` as Pillow
        does; interpolated values at a half are rounded either way.
        """
        images = make_bytes(channels).to(device)

        output = apply_batch(images, one_step([name] * 3, MAGNITUDES[name]), interpolation)

        differences = (output.int() - apply_each(images, name, interpolation).int()).abs()
        is_interpolated = interpolation == "bilinear" and name in {"rotate", "shear_x", "shear_y"}
        is_exact = name not in {"autocontrast", "color"} and not is_interpolated
        assert differences.max() <= (0 if is_exact else 1)
        assert (differences > 0).float().mean() < 0.04

    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
    @pytest.mark.parametrize("name", [name for name in NAMES if name != "posterize"])
    def test_floats(self, name: str, channels: int, interpolation: str, dtype: torch.dtype, device: torch.device):
        """Floats are equal up to rounding, except for posterize, which torchvision computes with powers of two."""
        images = make_bytes(channels).to(device, dtype) / 255

        output = apply_batch(images, one_step([name] * 3, MAGNITUDES[name]), interpolation)

        torch.testing.assert_close(output, apply_each(images, name, interpolation), atol=2e-5, rtol=0)


class TestPosterize:
    def test_floats_are_posterized_as_bytes(self):
        """Floats that a data loader converts from bytes are treated as bytes; a fraction of a bit counts as one."""
        images = make_bytes()
        draws = one_step(["posterize"] * 3, (2.5, 0.3, 4.0))

        output = cf.randaugment_batch(images.float() / 255, draws=draws)

        bits = torch.tensor([3, 1, 4])[:, None, None, None]
        expected = images.int() // 2 ** (8 - bits) * 2 ** (8 - bits)
        assert torch.equal((output * 255).round().int(), expected.int())

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
    def test_all_bits_are_the_identity_for_bytes(self, dtype: torch.dtype):
        """Bytes are recognized in any precision, for any rounding of 1/255."""
        images = (torch.arange(256, dtype=torch.float64) / 255).to(dtype).view(1, 1, 16, 16)

        output = cf.randaugment_batch(images, draws=one_step(["posterize"], (8.0,)))

        assert torch.equal(output, images)


class TestEveryOperation:
    @pytest.mark.parametrize("dtype", [torch.uint8, torch.float32])
    def test_samples_are_independent(self, dtype: torch.dtype):
        """In a batch with all operations, two steps, each sample has the same result as alone."""
        count = len(NAMES)
        images = torch.randint(256, (count, 3, 13, 17), dtype=torch.uint8)
        images = images if dtype == torch.uint8 else images.to(dtype) / 255
        steps = torch.stack((torch.arange(count), torch.arange(count).roll(5)))
        magnitudes = torch.tensor([MAGNITUDES[name] for name in NAMES]).T[:2].contiguous()
        magnitudes[1] = magnitudes[1].roll(5)

        together = cf.randaugment_batch(images, draws=cf.RandAugmentDraws(steps, magnitudes))

        for row in range(count):
            alone = cf.RandAugmentDraws(steps[:, row : row + 1], magnitudes[:, row : row + 1])
            assert torch.equal(together[row : row + 1], cf.randaugment_batch(images[row : row + 1], draws=alone))

    def test_chunk_size_does_not_matter(self, monkeypatch: pytest.MonkeyPatch):
        """The number of images per chunk does not change the result."""
        images = torch.rand(11, 3, 8, 8)
        draws, mixture = cf.draw_randaugment(11), cf.draw_augmix(11)
        complete = cf.randaugment_batch(images, draws=draws), cf.augmix_batch(images, draws=mixture)

        monkeypatch.setattr("composer.functional.augmentations.batch_operations._PIXELS_AT_ONCE", 4 * 3 * 64)

        assert torch.equal(cf.randaugment_batch(images, draws=draws), complete[0])
        assert torch.equal(cf.augmix_batch(images, draws=mixture), complete[1])

    @pytest.mark.parametrize("name", NAMES)
    def test_backward_runs(self, name: str):
        """No operation modifies in place what the backward pass needs."""
        images = torch.rand(3, 3, 6, 6, requires_grad=True)
        draws = one_step([name] * 3, MAGNITUDES[name])
        twice = cf.RandAugmentDraws(draws.operations.repeat(2, 1), draws.magnitudes.repeat(2, 1))

        cf.augmix_batch(images * 1.0, draws=one_chain(twice)).sum().backward()

        assert images.grad is not None
        assert images.grad.isfinite().all()
