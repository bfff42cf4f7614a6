"""The cases of ``kernels.py``: first the reference, then the kernel of this library, then other implementations."""

from __future__ import annotations

import copy
import functools
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from composer import functional as cf
from composer.functional.augmentations import batch_operations
from composer.functional.augmentations.operations import GEOMETRIC, OPERATIONS
from composer.functional.random import send

if TYPE_CHECKING:
    from collections.abc import Callable

    import PIL.Image

    from composer.core import Algorithm

    Variant = tuple[str, Callable[[], object]]

__all__ = ["CASES", "Case"]

SHAPES = {"128 of 32": (128, 3, 32, 32), "32 of 224": (32, 3, 224, 224)}


@dataclass(frozen=True)
class Case:
    """A comparison: ``variants`` creates the reference, ours and others.

    ``limit`` is the target ratio for ours, ``tolerance`` the largest difference of a result from the reference's.
    """

    name: str
    variants: Callable[[], list[Variant]]
    limit: float | None
    runs_on_gpu: bool = True
    tolerance: float | None = None


CASES: list[Case] = []


def case(
    name: str,
    limit: float | None,
    *,
    shapes: bool = False,
    runs_on_gpu: bool = True,
    tolerance: float | None = None,
) -> Callable[[Callable[..., list[Variant]]], None]:
    """Add a case, or one for each shape of a batch. Cases with PIL images do not run on a GPU."""

    def add(make: Callable[..., list[Variant]]) -> None:
        if shapes:
            for label, shape in SHAPES.items():
                CASES.append(Case(f"{name}, {label}", functools.partial(make, shape), limit, runs_on_gpu, tolerance))
        else:
            CASES.append(Case(name, make, limit, runs_on_gpu, tolerance))

    return add


def middle(side: int) -> slice:
    """Return the middle half of a side."""
    return slice(side // 4, side // 4 + side // 2)


@case("mixup_batch", 1.1, shapes=True)
def _mixup(shape: tuple[int, ...]) -> list[Variant]:
    from torchvision.transforms import v2

    images, labels, partners = torch.rand(shape), torch.randint(10, shape[:1]), torch.randperm(shape[0])
    theirs = v2.MixUp(alpha=0.2, num_classes=10)
    return [
        ("index, then lerp_", lambda: (images[partners].lerp_(images, 0.7), labels[partners])),
        ("ours", lambda: cf.mixup_batch(images, labels, mixing=0.3, indices=partners)),
        ("ours with its draws", lambda: cf.mixup_batch(images, labels)),
        ("torchvision, one partner by rolling", lambda: theirs(images, labels)),
    ]


@case("cutmix_batch", 1.05, shapes=True)
def _cutmix(shape: tuple[int, ...]) -> list[Variant]:
    from torchvision.transforms import v2

    images, labels, partners = torch.rand(shape), torch.randint(10, shape[:1]), torch.randperm(shape[0])
    rows, columns = middle(shape[2]), middle(shape[3])
    box = (rows.start, columns.start, rows.stop, columns.stop)
    theirs = v2.CutMix(num_classes=10)

    def reference() -> tuple[Tensor, Tensor]:
        mixed = images.clone()
        mixed[:, :, rows, columns] = images[partners, :, rows, columns]
        return mixed, labels[partners]

    return [
        ("one clone, one box written", reference),
        ("ours", lambda: cf.cutmix_batch(images, labels, bbox=box, indices=partners)),
        ("ours with its draws, half the side", lambda: cf.cutmix_batch(images, labels, length=0.5)),
        ("torchvision, one partner by rolling", lambda: theirs(images, labels)),
    ]


def pipeline(hue: float = 0.05, *, compiled: bool = False) -> nn.Module:
    """Return a flip, an affine transform and a colour jitter of kornia."""
    import kornia.augmentation as ka

    jitter = ka.ColorJitter(0.2, 0.2, 0.2, hue)
    if compiled:
        jitter.compile()
    return ka.AugmentationSequential(
        ka.RandomHorizontalFlip(),
        ka.RandomAffine(15.0, (0.1, 0.1), p=1.0),
        jitter,
    )


@case("augment_batch", 1.03, shapes=True, tolerance=0.0)
def _augment(shape: tuple[int, ...]) -> list[Variant]:
    images, augmentation = torch.rand(shape), pipeline()
    draws = cf.draw_augmentation(augmentation, shape, generator=torch.Generator("cpu").manual_seed(0))
    return [
        ("kornia's own call with the same draws", lambda: augmentation(images, params=draws.params)),
        ("ours", lambda: cf.augment_batch(images, augmentation, params=draws)),
    ]


def policy(name: str, *arguments: object) -> None:
    """Add a case for a policy of kornia on a batch so small that the calls themselves take most of the time."""

    def make() -> list[Variant]:
        from kornia.augmentation import auto

        with torch.device("cpu"):  # kornia's policies cannot draw with a GPU as the default device
            images, augmentation = torch.rand(2, 3, 8, 8), getattr(auto, name)(*arguments)
            generator = torch.Generator().manual_seed(0)
            draws = [cf.draw_augmentation(augmentation, images.shape, generator=generator) for _ in range(50)]

        def theirs() -> None:
            for one in draws:
                augmentation(images, params=one.params)

        def ours() -> None:
            for one in draws:
                cf.augment_batch(images, augmentation, params=one)

        return [("kornia's own calls, 50", theirs), ("ours", ours)]

    case(f"augment_batch with {name} of 2 x 3 x 8 x 8, 60 µs more allowed in a call", None)(make)


policy("RandAugment", 2, 10)
policy("AutoAugment")
policy("TrivialAugment")


def photographs(count: int, side: int) -> Tensor:
    """Return crops of scikit-learn's two photographs, shape ``(count, 3, side, side)``, from 0 to 1."""
    from sklearn.datasets import load_sample_images

    both = [torch.tensor(one, device="cpu").permute(2, 0, 1) / 255 for one in load_sample_images().images]
    generator = torch.Generator("cpu").manual_seed(0)
    crops = []
    for index in range(count):
        height, width = both[index % 2].shape[1:]
        top, left = (
            int(torch.randint(room - side + 1, (), generator=generator, device="cpu")) for room in (height, width)
        )
        crops.append(both[index % 2][:, top : top + side, left : left + side])
    return torch.stack(crops)


@case("Augment in the trainer, 32 photographs of 224", 1.0)
def _augment_photographs() -> list[Variant]:
    return augment_in_trainer(photographs(64, 224))


@case("Augment in the trainer, 32 photographs of 224, no hue", 1.0)
def _augment_without_hue() -> list[Variant]:
    return augment_in_trainer(photographs(64, 224), hue=0.0)


@case("Augment in the trainer, 32 of 224, noise", None)
def _augment_noise() -> list[Variant]:
    return augment_in_trainer(torch.rand(64, 3, 224, 224, device="cpu"))


def augment_in_trainer(images: Tensor, *, hue: float = 0.05) -> list[Variant]:
    """Return epochs with transforms of torchvision in the loader, with ``Augment``, and without augmentation.

    Without ``hue`` the colour jitter changes brightness, contrast and saturation, as timm's does by default.
    """
    from torch.utils.data import DataLoader, Dataset
    from torchvision.transforms import InterpolationMode, v2

    from composer import Trainer
    from composer.algorithms import Augment
    from composer.models import ComposerClassifier

    per_sample = v2.Compose(
        [
            v2.RandomHorizontalFlip(),
            v2.RandomAffine(15.0, (0.1, 0.1), interpolation=InterpolationMode.BILINEAR),
            v2.ColorJitter(0.2, 0.2, 0.2, hue),
        ]
    )

    class Images(Dataset[tuple[Tensor, int]]):
        def __init__(self, transform: Callable[[Tensor], Tensor]) -> None:
            self.transform = transform

        def __len__(self) -> int:
            return len(images)

        def __getitem__(self, index: int) -> tuple[Tensor, int]:
            return self.transform(images[index]), index % 10

    def epoch(transform: Callable[[Tensor], Tensor], *algorithms: Algorithm) -> Callable[[], object]:
        network = nn.Sequential(nn.AvgPool2d(224), nn.Flatten(), nn.Linear(3, 10))
        trainer = Trainer(
            model=ComposerClassifier(network, num_classes=10, train_metrics=[], val_metrics=[]),
            train_dataloader=DataLoader(Images(transform), batch_size=32),
            algorithms=algorithms,
            max_duration="10000ep",
            progress_bar=False,
        )
        return lambda: trainer.fit(duration="1ep")

    return [
        ("torchvision v2 in the loader, one at a time", epoch(per_sample)),
        ("ours, the jitter compiled", epoch(torch.clone, Augment(pipeline(hue, compiled=True)))),
        ("ours", epoch(torch.clone, Augment(pipeline(hue)))),
        ("no augmentation", epoch(torch.clone)),
    ]


@case("cutout_batch", 1.2, shapes=True)
def _cutout(shape: tuple[int, ...]) -> list[Variant]:
    images = torch.rand(shape)
    rows, columns = middle(shape[2]), middle(shape[3])

    def reference() -> Tensor:
        holed = images.clone()
        holed[:, :, rows, columns] = 0
        return holed

    box = (rows.start, columns.start, rows.stop, columns.stop)
    return [
        ("one clone, one box filled", reference),
        ("ours", lambda: cf.cutout_batch(images, boxes=[box])),
        ("ours with its draws, clipped at the border", lambda: cf.cutout_batch(images)),
    ]


@case("colout_batch", 1.5, shapes=True)
def _colout(shape: tuple[int, ...]) -> list[Variant]:
    images = torch.rand(shape)
    rows, columns = (torch.randperm(side)[: int(side * 0.85)].sort().values for side in shape[2:])
    return [
        ("index_select on rows, then on columns", lambda: images.index_select(2, rows).index_select(3, columns)),
        ("ours with its draws", lambda: cf.colout_batch(images)),
    ]


@case("smooth_labels with loss, forward and backward", 1.3)
def _smooth_labels() -> list[Variant]:
    logits, labels = torch.randn(128, 1000, requires_grad=True), torch.randint(1000, (128,))
    return [
        ("cross_entropy(label_smoothing=)", lambda: cross_entropy(logits, labels, label_smoothing=0.1).backward()),
        ("ours", lambda: cf.soft_cross_entropy(logits, cf.smooth_labels(logits, labels, 0.1)).backward()),
    ]


def resnet(name: str = "resnet50") -> nn.Module:
    """Return a ResNet with gradients."""
    import torchvision

    model: nn.Module = getattr(torchvision.models, name)()
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter) * 1e-3
    return model


@case("compute_ema, ResNet-50", 1.1)
def _ema() -> list[Variant]:
    model = resnet()
    average = copy.deepcopy(model)
    ours, theirs = (
        [tensor for tensor in (*each.parameters(), *each.buffers()) if tensor.is_floating_point()]
        for each in (average, model)
    )

    @torch.no_grad()
    def reference() -> None:
        torch._foreach_lerp_(ours, theirs, 0.01)

    return [("torch._foreach_lerp_", reference), ("ours", lambda: cf.compute_ema(model, average, 0.99))]


@case("clipping by norm, ResNet-50", 1.05)
def _clip_norm() -> list[Variant]:
    model = resnet()
    parameters = list(model.parameters())
    return [
        ("clip_grad_norm_", lambda: nn.utils.clip_grad_norm_(parameters, 1.0, foreach=True)),
        ("ours", lambda: cf.apply_gradient_clipping(model, "norm", 1.0)),
    ]


@case("clipping by value, ResNet-50", 1.05)
def _clip_value() -> list[Variant]:
    model = resnet()
    parameters = list(model.parameters())
    return [
        ("clip_grad_value_", lambda: nn.utils.clip_grad_value_(parameters, 1.0, foreach=True)),
        ("ours", lambda: cf.apply_gradient_clipping(model, "value", 1.0)),
    ]


@case("adaptive clipping, ResNet-50", 1.2)
def _clip_adaptive() -> list[Variant]:
    import timm.utils

    model = resnet()
    parameters = list(model.parameters())
    gradients = [parameter.grad for parameter in parameters]

    def reference() -> None:
        torch._foreach_norm(gradients)
        torch._foreach_norm(gradients)
        torch._foreach_mul_(gradients, 1.0)

    return [
        ("two reads and one write of all gradients", reference),
        ("ours", lambda: cf.apply_gradient_clipping(model, "adaptive", 0.01)),
        ("timm", lambda: timm.utils.adaptive_clip_grad(parameters, 0.01)),
    ]


@case("select_using_loss, ResNet-18", 1.1)
def _select() -> list[Variant]:
    model = resnet("resnet18")
    images, labels = torch.rand(64, 3, 64, 64), torch.randint(1000, (64,))

    @torch.no_grad()
    def reference() -> Tensor:
        return cross_entropy(model(images), labels, reduction="none")

    return [
        ("only the extra forward pass", reference),
        ("ours", lambda: cf.select_using_loss(images, labels, model, cross_entropy, keep=0.5)),
    ]


@case("randaugment_batch", 3.0, shapes=True)
def _randaugment_batch(shape: tuple[int, ...]) -> list[Variant]:
    from torchvision.transforms import v2

    images = torch.rand(shape)
    theirs = v2.RandAugment(num_ops=2, magnitude=9)
    rounds = range(10 if shape[2] > 100 else 50)  # the cost of a call depends on its draws
    return [
        ("torchvision, one draw for the batch", lambda: [theirs(images) for _ in rounds]),
        ("ours, each sample its own draw", lambda: [cf.randaugment_batch(images) for _ in rounds]),
    ]


def pictures(count: int, side: int = 224) -> list[PIL.Image.Image]:
    """Return PIL images with smooth shapes and some noise, similar to decoded photographs."""
    from torchvision.transforms.v2.functional import to_pil_image

    coarse = nn.functional.interpolate(torch.rand(count, 3, 7, 7), size=(side, side), mode="bicubic")
    fine = (coarse + 0.05 * torch.randn_like(coarse)).clamp(0, 1)
    return [to_pil_image(image) for image in fine]


@case("augmix_batch", 0.5, shapes=True, runs_on_gpu=False)
def _augmix_batch(shape: tuple[int, ...]) -> list[Variant]:
    from torchvision.transforms.v2.functional import pil_to_tensor

    images = pictures(shape[0], shape[2])
    batch = torch.stack([pil_to_tensor(image) for image in images]).float() / 255
    from timm.data.auto_augment import augment_and_mix_transform

    theirs = augment_and_mix_transform("augmix-m3-w3", {})
    return [
        ("augmix_image on PIL images, one at a time", lambda: [cf.augmix_image(image) for image in images]),
        ("ours", lambda: cf.augmix_batch(batch)),
        ("timm on PIL images, one at a time", lambda: [theirs(image) for image in images]),
    ]


@case("randaugment_image, PIL 224", 1.0, runs_on_gpu=False)
def _randaugment_image() -> list[Variant]:
    from torchvision.transforms import RandAugment, v2

    images = pictures(100)
    theirs, newer = RandAugment(num_ops=2, magnitude=9), v2.RandAugment(num_ops=2, magnitude=9)
    return [
        ("torchvision", lambda: [theirs(image) for image in images]),
        ("ours", lambda: [cf.randaugment_image(image) for image in images]),
        ("torchvision v2", lambda: [newer(image) for image in images]),
    ]


@case("augmix_image, PIL 224", 1.0, runs_on_gpu=False)
def _augmix_image() -> list[Variant]:
    from timm.data.auto_augment import augment_and_mix_transform
    from torchvision.transforms import AugMix

    images = pictures(40)
    theirs, other = augment_and_mix_transform("augmix-m3-w3", {}), AugMix(severity=3)
    return [
        ("timm", lambda: [theirs(image) for image in images]),
        ("ours", lambda: [cf.augmix_image(image) for image in images]),
        ("torchvision", lambda: [other(image) for image in images]),
    ]


def surgery(name: str, limit: float, apply: Callable[[nn.Module], object]) -> None:
    """Add cases for the forward and backward pass of a changed ResNet-18."""

    def make(shape: tuple[int, ...]) -> list[Variant]:
        plain = resnet("resnet18")
        changed = copy.deepcopy(plain)
        apply(changed)
        images, labels = torch.rand(shape), torch.randint(1000, shape[:1])

        def step(model: nn.Module) -> None:
            model.zero_grad()
            cross_entropy(model(images), labels).backward()

        return [("the plain model", lambda: step(plain)), ("ours", lambda: step(changed))]

    case(f"{name} on ResNet-18", limit, shapes=True)(make)


surgery("BlurPool", 1.12, lambda model: cf.apply_blurpool(model))  # noqa: PLW0108  (looked up when it runs)
surgery("SqueezeExcite", 1.07, lambda model: cf.apply_squeeze_excite(model))  # noqa: PLW0108
surgery("GhostBatchNorm", 1.03, lambda model: cf.apply_ghost_batchnorm(model))  # noqa: PLW0108


def operation(name: str, magnitude: float, mode: str = "bilinear", tolerance: float = 3e-4) -> None:
    """Add cases for an operation of RandAugment and AugMix: ours, kornia's and torchvision's, with the same results.

    The images are bytes divided by 255; the magnitudes are drawn on the CPU. All samples have the same one because
    torchvision accepts only one for a batch; kornia and this library accept one for each sample. Each library gets a
    copy of the images, because RandAugment and AugMix copy the samples that drew an operation.
    """

    def make(shape: tuple[int, ...]) -> list[Variant]:
        images = torch.randint(256, shape) / 255
        operations = torch.full(shape[:1], OPERATIONS.index(name), device="cpu")
        magnitudes = torch.full(shape[:1], magnitude, device="cpu")
        function = batch_operations._POINTWISE[operations[0]] if name not in GEOMETRIC else batch_operations._warp
        options = {"mode": mode} if name in GEOMETRIC else {}

        def ours() -> Tensor:
            numbers = batch_operations._numbers(operations, magnitudes, *shape[2:]).to(images.dtype)
            return function(images.clone(), send(numbers, images.device), 1.0, **options)

        theirs, others = with_kornia(name, mode), with_torchvision(name, magnitude, mode)
        return [
            ("ours", ours),
            ("kornia", lambda: theirs(images.clone(), send(magnitudes, images.device))),
            ("torchvision v2, one magnitude for the batch", lambda: others(images.clone())),
        ]

    case(f"operation {name}", None, shapes=True, tolerance=tolerance)(make)


def with_kornia(name: str, mode: str) -> Callable[[Tensor, Tensor], Tensor]:
    """Return kornia's operation, a function of images and a magnitude for each."""
    from kornia import enhance, geometry

    options = {"mode": mode, "align_corners": False}

    def shear(images: Tensor, slopes: Tensor, *, is_x: bool) -> Tensor:
        matrices = torch.eye(2, 3, device=images.device).repeat(len(images), 1, 1)
        matrices[:, 0 if is_x else 1, 1 if is_x else 0] = -slopes
        matrices[:, 0 if is_x else 1, 2] = -slopes / 2  # from the corner of the first pixel, not from its centre
        return geometry.warp_affine(images, matrices, (images.shape[2], images.shape[3]), **options)

    def translate(images: Tensor, fractions: Tensor, *, is_x: bool) -> Tensor:
        pixels = (fractions * images.shape[3 if is_x else 2]).trunc()
        zeros = torch.zeros_like(pixels)
        return geometry.translate(images, torch.stack((pixels, zeros) if is_x else (zeros, pixels), -1), **options)

    operations: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
        "autocontrast": lambda images, _: enhance.normalize_min_max(images),
        "equalize": lambda images, _: enhance.equalize(images),
        "posterize": enhance.posterize,
        "solarize": lambda images, thresholds: enhance.solarize(images, thresholds * 256 / 255),
        "color": enhance.adjust_saturation_with_gray_subtraction,
        "contrast": enhance.adjust_contrast_with_mean_subtraction,
        "brightness": enhance.adjust_brightness_accumulative,
        "sharpness": enhance.sharpness,
        "rotate": lambda images, degrees: geometry.rotate(images, degrees, **options),
        "shear_x": lambda images, slopes: shear(images, slopes, is_x=True),
        "shear_y": lambda images, slopes: shear(images, slopes, is_x=False),
        "translate_x": lambda images, fractions: translate(images, fractions, is_x=True),
        "translate_y": lambda images, fractions: translate(images, fractions, is_x=False),
    }
    return operations[name]


def with_torchvision(name: str, magnitude: float, mode: str) -> Callable[[Tensor], Tensor]:
    """Return torchvision's operation, a function of images, with one magnitude for all."""
    from torchvision.transforms.v2 import InterpolationMode, functional

    interpolation = InterpolationMode(mode)

    def affine(images: Tensor, shift: tuple[int, int] = (0, 0), slopes: tuple[float, float] = (0, 0)) -> Tensor:
        degrees = [math.degrees(math.atan(slope)) for slope in slopes]
        return functional.affine(images, 0.0, list(shift), 1.0, degrees, interpolation, center=[0.0, 0.0])

    operations: dict[str, Callable[[Tensor], Tensor]] = {
        "autocontrast": functional.autocontrast,
        "equalize": functional.equalize,
        "posterize": lambda images: functional.posterize(images, int(magnitude)),
        "solarize": lambda images: functional.solarize(images, magnitude * 256 / 255),
        "color": lambda images: functional.adjust_saturation(images, magnitude),
        "contrast": lambda images: functional.adjust_contrast(images, magnitude),
        "brightness": lambda images: functional.adjust_brightness(images, magnitude),
        "sharpness": lambda images: functional.adjust_sharpness(images, magnitude),
        "rotate": lambda images: functional.rotate(images, magnitude, interpolation),
        "shear_x": lambda images: affine(images, slopes=(magnitude, 0)),
        "shear_y": lambda images: affine(images, slopes=(0, magnitude)),
        "translate_x": lambda images: affine(images, (int(magnitude * images.shape[3]), 0)),
        "translate_y": lambda images: affine(images, (0, int(magnitude * images.shape[2]))),
    }
    return operations[name]


operation("autocontrast", 0.0)
operation("equalize", 0.0)
operation("posterize", 4.0, tolerance=5e-3)  # torchvision has levels of 1 / 16, not bytes
operation("solarize", 0.5)
operation("color", 1.5)
operation("contrast", 1.5)
operation("brightness", 1.5)
operation("sharpness", 1.5)
operation("rotate", 17.0)
operation("shear_x", 0.21)
operation("shear_y", 0.21)
operation("translate_x", 0.2, mode="nearest")  # by whole pixels
operation("translate_y", 0.2, mode="nearest")


@case("conversion to grey", None, shapes=True, tolerance=3e-4)
def _grey(shape: tuple[int, ...]) -> list[Variant]:
    from kornia.color import rgb_to_grayscale
    from torchvision.transforms.v2 import functional

    images = torch.rand(shape)
    return [
        ("ours", lambda: batch_operations._grey(images, 1.0)),
        ("kornia", lambda: rgb_to_grayscale(images)),
        ("torchvision v2", lambda: functional.rgb_to_grayscale(images)),
    ]


def blur(stride: int) -> None:
    """Add cases for BlurPool's filter, which torchvision does not have."""

    def make(shape: tuple[int, ...]) -> list[Variant]:
        from kornia.filters import BlurPool2D

        images, ours, theirs = torch.rand(shape), cf.BlurPool2d(stride=stride), BlurPool2D(3, stride)
        return [("ours", lambda: ours(images)), ("kornia", lambda: theirs(images))]

    case(f"blur with stride {stride}", None, shapes=True, tolerance=1e-6)(make)


blur(1)
blur(2)


@case("resize_batch", None, shapes=True, tolerance=1e-6)
def _resize(shape: tuple[int, ...]) -> list[Variant]:
    from kornia.geometry import resize
    from torchvision.transforms.v2 import functional

    images = torch.rand(shape)
    size = [side // 2 for side in shape[2:]]
    return [
        ("ours", lambda: cf.resize_batch(images, None, 0.5)[0]),
        ("kornia", lambda: resize(images, tuple(size), align_corners=False)),
        ("torchvision v2", lambda: functional.resize(images, size, antialias=False)),
    ]
