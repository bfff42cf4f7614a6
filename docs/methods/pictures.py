"""Create the pictures of the method cards from data of scikit-learn.

python docs/methods/pictures.py           # all of them
python docs/methods/pictures.py cutmix    # one

A picture of images is a function that returns panels, each a caption and an image; the function and the picture have
the same name. New functions are added to PICTURES. Diagrams and curves are in charts.py.
"""

from __future__ import annotations

import argparse
import io
from pathlib import Path

import kornia.augmentation as ka
import matplotlib.pyplot as plt
import torch
from charts import CHARTS
from PIL import Image
from sklearn.datasets import load_sample_images
from torch import Tensor
from torch.nn.functional import interpolate

from composer import functional as cf

Panel = tuple[str, Tensor]
"""A caption and an image, shape (3, H, W), from 0 to 1, drawn pixel by pixel."""

SIDE = 200
MARGIN = 8
CAPTION = 24
COLORS = 256
DPI = 120
FOLDER = Path(__file__).parent / "pictures"


def augment() -> list[Panel]:
    """Show a flower with its mask and box, before and after five augmentations of kornia."""
    flower = photographs()[1][None]
    height, width = flower.shape[-2:]
    mask = ellipse(height, width, (0.2, 0.15, 0.85, 0.8))[None]
    box = torch.tensor([[[0.15 * width, 0.2 * height, 0.8 * width, 0.85 * height]]])
    chosen = {
        "RandomHorizontalFlip": ka.RandomHorizontalFlip(p=1.0),
        "RandomAffine": ka.RandomAffine(25.0, scale=(0.7, 0.9), p=1.0),
        "RandomResizedCrop": ka.RandomResizedCrop((SIDE, SIDE), scale=(0.3, 0.5), p=1.0),
        "RandomPerspective": ka.RandomPerspective(0.5, p=1.0),
        "ColorJitter": ka.ColorJitter(0.3, 0.3, 0.6, 0.2, p=1.0),
    }
    moved = [
        (name, cf.augment_batch(flower, one, masks=mask, boxes=box, generator=seeded(3)))
        for name, one in chosen.items()
    ]
    panels = [("before", flower, mask, box), *((name, one.input, one.masks, one.boxes) for name, one in moved)]
    return [(name, outlined(image[0], shape[0], boxes[0, 0])) for name, image, shape, boxes in panels]


def ellipse(height: int, width: int, place: tuple[float, float, float, float]) -> Tensor:
    """Return a mask of an ellipse inside a box, given by its top, left, bottom and right as fractions."""
    top, left, bottom, right = place
    rows = (torch.arange(height)[:, None] / height - (top + bottom) / 2) / ((bottom - top) / 2)
    columns = (torch.arange(width) / width - (left + right) / 2) / ((right - left) / 2)
    return rows**2 + columns**2 < 1


def outlined(image: Tensor, mask: Tensor, box: Tensor) -> Tensor:
    """Return an image that is darker outside of a mask, with a box drawn on it."""
    image = image * torch.where(mask, 1.0, 0.45)
    left, top, right, bottom = box.round().int().tolist()
    frame = torch.zeros_like(mask)
    frame[top:bottom, left:right] = True
    frame[top + 2 : bottom - 2, left + 2 : right - 2] = False
    return torch.where(frame, torch.tensor([1.0, 0.85, 0.1])[:, None, None], image)


def augmix() -> list[Panel]:
    """Show a photograph and three draws."""
    flower = photographs()[1]
    draws = [(f"draw {seed}", cf.augmix_image(flower, generator=seeded(seed))) for seed in (1, 2, 3)]
    return [("before", flower), *draws]


def blurpool() -> list[Panel]:
    """Show roof tiles after subsampling every fourth pixel, without and with a blur, and moved by two pixels."""
    top, left, side, border = 190, 150, 200, 8
    blur, panels = cf.BlurPool2d(stride=2), []
    for name, moved in (("{}", 0), ("{}, moved", 2)):
        rows, columns = (slice(start - border, start + side + border) for start in (top, left + moved))
        detail = photographs(427)[:1, :, rows, columns]
        quarter = slice(border // 4, -border // 4)
        panels += [
            (name.format("every fourth pixel"), enlarge(detail[0, :, ::4, ::4][:, quarter, quarter], 4)),
            (name.format("blurred before"), enlarge(blur(blur(detail))[0, :, quarter, quarter], 4)),
        ]
    return panels


def colout() -> list[Panel]:
    """Show a photograph and three draws."""
    temple = photographs()[0]
    return [
        ("before", temple),
        ("p_row = p_col = 0.15", cf.colout_batch(temple, generator=seeded(1))),
        ("p_row=0.4, p_col=0", cf.colout_batch(temple, 0.4, 0.0, generator=seeded(2))),
        ("p_row = p_col = 0.4", cf.colout_batch(temple, 0.4, 0.4, generator=seeded(2))),
    ]


def cutmix() -> list[Panel]:
    """Show two photographs, and each with a box of the other."""
    batch = photographs()
    mixed, _, weight, _ = cf.cutmix_batch(batch, torch.arange(2), indices=swap(), bbox=(20, 50, 110, 140))
    return [
        ("temple", batch[0]),
        ("flower", batch[1]),
        (f"{weight:.2f} temple", mixed[0]),
        (f"{weight:.2f} flower", mixed[1]),
    ]


def cutmix_boxes() -> list[Panel]:
    """Show two photographs with a box each, and each with a part of the other and the boxes that are left."""
    batch, places = photographs(), torch.tensor([[2.0, 10.0, 90.0, 140.0], [24.0, 32.0, 128.0, 136.0]])
    scenes = cf.AugmentedBatch(batch, boxes=list(places[:, None]), labels=[torch.tensor([0]), torch.tensor([1])])
    mixed = cf.cutmix_batch(scenes, None, indices=swap(), bbox=(80, 0, 160, 160))[0]
    everything = torch.ones(batch.shape[-2:], dtype=torch.bool)
    panels = []
    for caption, found in (("{}", scenes), ("{} with a part of the other", mixed)):
        assert found.boxes is not None
        for name, image, boxes in zip(("temple", "flower"), found.input, found.boxes, strict=True):
            for box in boxes:
                image = outlined(image, everything, box)  # noqa: PLW2901
            panels.append((caption.format(name), image))
    return panels


def cutout() -> list[Panel]:
    """Show one large hole, a hole at the edge, and several small ones."""
    flower = photographs()[1]
    large = ((50, 40, 130, 120),)
    clipped = ((0, 100, 60, 160),)
    return [
        ("before", flower),
        ("length=0.5", cf.cutout_batch(flower, boxes=large)),
        ("cut off by the edge", cf.cutout_batch(flower, boxes=clipped)),
        ("num_holes=6, length=0.2", cf.cutout_batch(flower, 6, 0.2, generator=seeded(4))),
    ]


def mixup() -> list[Panel]:
    """Show two photographs and two blends of them."""
    batch = photographs()
    blends = [cf.mixup_batch(batch, torch.arange(2), mixing, indices=swap())[0][0] for mixing in (0.25, 0.5)]
    return [
        ("temple", batch[0]),
        ("flower", batch[1]),
        ("mixing=0.25", blends[0]),
        ("mixing=0.5", blends[1]),
    ]


def patch_dropout() -> list[Panel]:
    """Show which of 64 patches remain in two steps with half of the patches, and in one with a quarter."""
    flower, size = photographs()[1], SIDE // 8
    numbers = torch.arange(64.0)[None, :, None]
    panels = [("in evaluation", flower)]
    for caption, p, seed in (("p=0.5, a step", 0.5, 0), ("p=0.5, the next step", 0.5, 1), ("p=0.75", 0.75, 2)):
        torch.manual_seed(seed)
        kept = torch.zeros(64)
        kept[cf.PatchDropout(p, num_prefix_tokens=0)(numbers)[0, :, 0].long()] = 1
        mask = kept.view(8, 8).repeat_interleave(size, 0).repeat_interleave(size, 1)
        panels.append((caption, torch.where(mask == 1, flower, 0.9)))
    return panels


def progressive_resizing() -> list[Panel]:
    """Show the sizes at the start, in the middle and at the end, and a crop of the first size."""
    batch = photographs()[:1]
    sizes = [(f"scale_factor={scale}", cf.resize_batch(batch, None, scale)[0][0]) for scale in (0.5, 0.75, 1.0)]
    crop, _ = cf.resize_batch(batch, None, 0.5, mode="crop", corner=(60, 30))
    return [*sizes, ('mode="crop", 0.5', crop[0])]


def randaugment() -> list[Panel]:
    """Show a photograph and five pairs of operations on it."""
    flower = photographs()[1]
    pairs = {
        "shear_x, color": ([10, 5], [0.25, 0.3]),
        "solarize, rotate": ([4, 9], [0.75, 15.0]),
        "equalize, translate_y": ([2, 13], [0.0, 0.2]),
        "contrast, translate_x": ([6, 12], [1.8, -0.25]),
        "posterize, sharpness": ([3, 8], [2.0, 1.9]),
    }
    panels = [("before", flower)]
    for names, (operations, magnitudes) in pairs.items():
        draws = cf.RandAugmentDraws(torch.tensor(operations)[:, None], torch.tensor(magnitudes)[:, None])
        panels.append((names, cf.randaugment_image(flower, draws=draws)))
    return panels


PICTURES = [
    augment,
    augmix,
    blurpool,
    colout,
    cutmix,
    cutmix_boxes,
    cutout,
    mixup,
    patch_dropout,
    progressive_resizing,
    randaugment,
]


def photographs(side: int = SIDE) -> Tensor:
    """Return the two photographs, a temple and a flower, as a batch ``(2, 3, side, side)`` from 0 to 1."""
    pixels = torch.stack([torch.tensor(photograph) for photograph in load_sample_images().images])
    batch = pixels.permute(0, 3, 1, 2) / 255
    left = (batch.shape[3] - batch.shape[2]) // 2
    square = batch[..., left : left + batch.shape[2]]
    return square if side == square.shape[2] else resize(square, side)


def resize(batch: Tensor, side: int) -> Tensor:
    """Reduce the size of images without aliasing."""
    return interpolate(batch, size=(side, side), mode="bilinear", antialias=True).clamp(0, 1)


def enlarge(image: Tensor, factor: int) -> Tensor:
    """Show each pixel as a square of pixels."""
    return image.repeat_interleave(factor, 1).repeat_interleave(factor, 2)


def seeded(seed: int) -> torch.Generator:
    """Return a generator with which a picture is reproducible."""
    return torch.Generator().manual_seed(seed)


def swap() -> Tensor:
    """Return the partners that exchange two samples."""
    return torch.tensor([1, 0])


def draw(panels: list[Panel]) -> plt.Figure:
    """Draw panels in two rows with their captions above, one pixel of an image as one pixel of the file."""
    columns = (len(panels) + 1) // 2
    cell_width = max(SIDE, *(image.shape[2] for _, image in panels)) + MARGIN
    cell_height = max(image.shape[1] for _, image in panels) + CAPTION + MARGIN
    width, height = columns * cell_width + MARGIN, 2 * cell_height + MARGIN
    figure = plt.figure(figsize=(width / DPI, height / DPI), dpi=DPI)
    for place, (caption, image) in enumerate(panels):
        row, column = divmod(place, columns)
        x = MARGIN + column * cell_width + (cell_width - MARGIN - image.shape[2]) // 2
        top = height - MARGIN - row * cell_height
        y = top - CAPTION - (cell_height - MARGIN - CAPTION + image.shape[1]) // 2
        figure.figimage(image.permute(1, 2, 0).numpy(), x, y)
        middle = MARGIN + column * cell_width + (cell_width - MARGIN) / 2
        figure.text(middle / width, (top - CAPTION / 2) / height, caption, ha="center", va="center", size=8)
    return figure


def write(figure: plt.Figure, file: Path) -> None:
    """Write a figure with few colours, to keep the file small."""
    buffer = io.BytesIO()
    figure.savefig(buffer, dpi=DPI)
    plt.close(figure)
    file.parent.mkdir(exist_ok=True)
    Image.open(buffer).convert("RGB").quantize(COLORS, dither=Image.Dither.NONE).save(file, optimize=True)


def main() -> None:
    """Create the pictures with the given names, or all."""
    known = {picture.__name__: picture for picture in [*PICTURES, *CHARTS]}
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="name", help=f"any of {', '.join(known)}; all by default")
    names = parser.parse_args().names or list(known)
    for name in names:
        if name not in known:
            parser.error(f"There is no picture {name!r}. Choose from {', '.join(known)}.")
        shown = known[name]()
        write(draw(shown) if isinstance(shown, list) else shown, FOLDER / f"{name}.png")


if __name__ == "__main__":
    main()
