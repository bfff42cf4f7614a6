"""Each operation on PIL images compared with Pillow and with the operations on tensors."""

from __future__ import annotations

import pytest
import torch
from PIL import Image, ImageEnhance, ImageOps
from torch import Tensor
from torchvision.transforms.v2.functional import pil_to_tensor, to_pil_image

from composer import functional as cf

BILINEAR, NEAREST = Image.Resampling.BILINEAR, Image.Resampling.NEAREST
AFFINE = Image.Transform.AFFINE

# Number, magnitude, the same by Pillow, and by how much tensors may differ: Pillow rounds grey where torchvision cuts.
POINTWISE = {
    "identity": (0, 0.0, lambda img: img, 0),
    "autocontrast": (1, 0.0, ImageOps.autocontrast, 1),
    "equalize": (2, 0.0, ImageOps.equalize, 0),
    "posterize": (3, 2.3, lambda img: ImageOps.posterize(img, 3), 0),
    "solarize": (4, 0.6, lambda img: ImageOps.solarize(img, 154), 0),
    "less color": (5, 0.25, lambda img: ImageEnhance.Color(img).enhance(0.25), 1),
    "more color": (5, 1.75, lambda img: ImageEnhance.Color(img).enhance(1.75), 1),
    "contrast": (6, 1.75, lambda img: ImageEnhance.Contrast(img).enhance(1.75), 1),
    "brightness": (7, 0.25, lambda img: ImageEnhance.Brightness(img).enhance(0.25), 0),
    "less sharpness": (8, 0.25, lambda img: ImageEnhance.Sharpness(img).enhance(0.25), 0),
    "more sharpness": (8, 1.75, lambda img: ImageEnhance.Sharpness(img).enhance(1.75), 0),
    "translate_x": (12, 0.25, lambda img: img.transform(img.size, AFFINE, (1, 0, -8, 0, 1, 0)), 0),
    "translate_y": (13, -0.25, lambda img: img.transform(img.size, AFFINE, (1, 0, 0, 0, 1, 5)), 0),
}
WARPS = {
    "rotate": (9, 12.5, lambda img, resample: img.rotate(12.5, resample)),
    "shear_x": (10, 0.25, lambda img, resample: img.transform(img.size, AFFINE, (1, 0.25, 0, 0, 1, 0), resample)),
    "shear_y": (11, -0.25, lambda img, resample: img.transform(img.size, AFFINE, (1, 0, 0, -0.25, 1, 0), resample)),
}


@pytest.fixture(params=["RGB", "L"])
def img(request: pytest.FixtureRequest) -> Image.Image:
    """A random image, 34 pixels wide and 23 high."""
    pixels = torch.randint(40, 230, (3 if request.param == "RGB" else 1, 23, 34), dtype=torch.uint8)
    return to_pil_image(pixels)


def draw(number: int, magnitude: float) -> cf.RandAugmentDraws:
    """Assign one operation to one sample."""
    return cf.RandAugmentDraws(torch.tensor([[number]]), torch.tensor([[magnitude]]))


def mixture(number: int, magnitude: float) -> cf.AugMixDraws:
    """Return a chain with one operation and a weight of one."""
    one = torch.ones(1, 1)
    return cf.AugMixDraws(torch.tensor([[[number]]]), torch.tensor([[[magnitude]]]), one, one[0])


def differences(one: Image.Image, other: Image.Image | Tensor) -> Tensor:
    """Subtract bytes."""
    other = other if isinstance(other, Tensor) else pil_to_tensor(other)
    return (pil_to_tensor(one).int() - other.int()).abs()


class TestPointwise:
    @pytest.mark.parametrize("name", POINTWISE)
    def test_equals_pillow(self, name: str, img: Image.Image):
        """A PIL image is changed exactly as by Pillow."""
        number, magnitude, expected, _ = POINTWISE[name]

        output = cf.randaugment_image(img, draws=draw(number, magnitude))

        assert (output.mode, output.size) == (img.mode, img.size)
        assert not differences(output, expected(img)).any()

    @pytest.mark.parametrize("name", POINTWISE)
    def test_tensors_agree(self, name: str, img: Image.Image):
        """The same draw changes a tensor of the same bytes alike, up to rounding of gray by one."""
        number, magnitude, _, tolerance = POINTWISE[name]

        output = cf.randaugment_image(img, draws=draw(number, magnitude))
        tensor = cf.randaugment_image(pil_to_tensor(img), draws=draw(number, magnitude))

        assert differences(output, tensor).max() <= tolerance


class TestWarps:
    @pytest.mark.parametrize("name", WARPS)
    def test_equals_pillow(self, name: str, img: Image.Image):
        """RandAugment uses the nearest pixel, AugMix interpolates."""
        number, magnitude, expected = WARPS[name]

        nearest = cf.randaugment_image(img, draws=draw(number, magnitude))
        bilinear = cf.augmix_image(img, draws=mixture(number, magnitude))

        assert not differences(nearest, expected(img, NEAREST)).any()
        assert not differences(bilinear, expected(img, BILINEAR)).any()

    @pytest.mark.parametrize("name", WARPS)
    def test_tensors_agree(self, name: str, img: Image.Image):
        """Nearest pixels are equal except for ties; Pillow rounds interpolated ones down.

        At borders Pillow cuts off sharply, while tensors fade to black within a pixel.
        """
        number, magnitude, _ = WARPS[name]
        pixels = pil_to_tensor(img)

        nearest = differences(
            cf.randaugment_image(img, draws=draw(number, magnitude)),
            cf.randaugment_image(pixels, draws=draw(number, magnitude)),
        )
        bilinear = differences(
            cf.augmix_image(img, draws=mixture(number, magnitude)),
            cf.augmix_image(pixels, draws=mixture(number, magnitude)),
        )

        white = torch.ones(1, *pixels.shape[1:])
        is_inside = cf.augmix_image(white, draws=mixture(number, magnitude)) > 0.9999
        assert (nearest > 0).float().mean() < 0.01
        assert bilinear[is_inside.expand_as(bilinear)].max() <= 1
