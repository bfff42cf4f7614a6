"""Kornia augmentations on batches: draws, images and annotations."""

import inspect

import kornia
import kornia.augmentation as ka
import kornia.augmentation.auto as kauto
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kornia.geometry.boxes import Boxes
from torch import nn
from torch.torch_version import TorchVersion
from torchvision import tv_tensors
from torchvision.transforms import v2

from composer import functional as cf
from composer.functional.augmentations import pipelines
from fixtures import seeded

ARGUMENTS = {
    "CenterCrop": (16,),
    "CenterCrop3D": (8,),
    "ColorJiggle": (0.1, 0.1, 0.1, 0.1),
    "ColorJitter": (0.1, 0.1, 0.1, 0.1),
    "Denormalize": (torch.full((3,), 0.5), torch.full((3,), 0.5)),
    "LongestMaxSize": (16,),
    "Normalize": (torch.full((3,), 0.5), torch.full((3,), 0.5)),
    "PadTo": ((40, 40),),
    "RandomAffine": (30.0,),
    "RandomAffine3D": ((15.0, 15.0, 15.0),),
    "RandomBrightness": ((0.5, 1.5),),
    "RandomContrast": ((0.5, 1.5),),
    "RandomCrop": ((16, 16),),
    "RandomCrop3D": ((8, 8, 8),),
    "RandomGamma": ((0.5, 1.5),),
    "RandomFisheye": (torch.tensor([-0.3, 0.3]), torch.tensor([-0.3, 0.3]), torch.tensor([0.9, 1.1])),
    "RandomGaussianBlur": ((3, 3), (0.1, 2.0)),
    "RandomMotionBlur": (3, 30.0, 0.5),
    "RandomMotionBlur3D": (3, (30.0, 30.0, 30.0), 0.5),
    "RandomResizedCrop": ((16, 16),),
    "RandomRotation": (30.0,),
    "RandomRotation3D": ((15.0, 15.0, 15.0),),
    "RandomRotation90": ((1, 3),),
    "RandomShear": (10.0,),
    "RandomTranslate": ((0.1, 0.1), (0.1, 0.1)),
    "Resize": ((16, 16),),
    "SmallestMaxSize": (16,),
}
LEFT_OUT = {
    "RandomDissolving": "downloads a diffusion model",
    "RandomTransplantation": "needs masks to draw from",
    "RandomTransplantation3D": "needs masks to draw from",
    "ManyToManyAugmentationDispather": "takes several batches, one for each of its augmentations",
    "ManyToOneAugmentationDispather": "returns several batches, one for each of its augmentations",
    "PolicySequential": "is a part of the policies",
    "VideoSequential": "takes videos, see test_videos",
}
CONTAINERS = {"AugmentationSequential", "ImageSequential", "PatchSequential"}
POLICIES = {"AutoAugment", "RandAugment", "TrivialAugment"}
EXPORTED = {
    name
    for module in (ka, kauto, ka.container)
    for name, kind in inspect.getmembers(module, inspect.isclass)
    if "Base" not in name
}
CLASSES = sorted(EXPORTED - LEFT_OUT.keys() - CONTAINERS - POLICIES)
DETERMINISTIC = {
    "CenterCrop",
    "CenterCrop3D",
    "Denormalize",
    "LongestMaxSize",
    "Normalize",
    "PadTo",
    "Resize",
    "SmallestMaxSize",
}


def make(name):
    kind = getattr(ka, name)
    # With a probability of a half, nearly every augmentation draws whether each of the images is changed.
    options = {"p": 0.5} if "p" in inspect.signature(kind).parameters and name not in DETERMINISTIC else {}
    if name == "RandomCutMixV2" and "use_correct_lambda" in inspect.signature(kind).parameters:
        options["use_correct_lambda"] = True  # the other way is deprecated
    return kind(*ARGUMENTS.get(name, ()), **options)


def images(count=8, size=32, seed=3):
    return torch.rand(count, 3, size, size, generator=seeded(seed))


def batch_for(name):
    """Return images, or volumes for the augmentations of these."""
    return torch.rand(4, 3, 10, 12, 12, generator=seeded(3)) if "3D" in name else images()


def sizes_of_calls(augmentation):
    """Return a list to which each call of an augmentation adds the size of its batch."""
    found = []
    augmentation.register_forward_pre_hook(lambda _, arguments: found.append(len(arguments[0])))
    return found


PIPELINES = {
    "AugmentationSequential": lambda: ka.AugmentationSequential(ka.RandomAffine(30.0), ka.ColorJitter(0.2, 0.2, 0.2)),
    "AutoAugment": kauto.AutoAugment,
    "ImageSequential": lambda: ka.ImageSequential(ka.RandomAffine(30.0), ka.RandomHorizontalFlip(), random_apply=1),
    "PatchSequential": lambda: ka.PatchSequential(
        ka.ColorJitter(0.2, 0.2, 0.2), ka.RandomErasing(), grid_size=(2, 2), patchwise_apply=False
    ),
    "RandAugment": lambda: kauto.RandAugment(2, 10),
    "TrivialAugment": kauto.TrivialAugment,
    "dropout": lambda: nn.Dropout2d(0.5),
} | {name: lambda name=name: make(name) for name in CLASSES}


class TestDraws:
    @pytest.mark.parametrize("name", PIPELINES)
    def test_properties(self, name):
        """Draws depend only on the generator, can be reused, and equal kornia's for the same seed."""
        augmentation, batch = PIPELINES[name](), batch_for(name)
        before = torch.get_rng_state()

        draws = cf.draw_augmentation(augmentation, batch.shape, generator=seeded())
        output = cf.augment_batch(batch, augmentation, params=draws)

        assert torch.equal(torch.get_rng_state(), before)
        assert torch.equal(cf.augment_batch(batch, augmentation, generator=seeded()), output)
        assert torch.equal(cf.augment_batch(batch, augmentation, params=draws), output)
        with torch.random.fork_rng():
            torch.manual_seed(draws.seed)
            assert torch.equal(output, augmentation(batch))

    def test_videos(self):
        """All frames of a video are transformed alike."""
        augmentation = ka.VideoSequential(ka.RandomRotation(90.0, p=1.0))
        frames = images(2)[:, None].expand(-1, 5, -1, -1, -1)

        output = cf.augment_batch(frames, augmentation, generator=seeded())

        assert output.shape == frames.shape
        assert (output == output[:, :1]).all()

    def test_every_class_is_tested(self):
        """Each class that kornia exports is tested, or is an exception; one that is gone needs no exception."""
        assert set(PIPELINES) - {"dropout"} | set(LEFT_OUT) == EXPORTED


class TestImages:
    def test_uint8(self):
        """8-bit images are augmented as floating-point images, and rounded."""
        augmentation = ka.ColorJitter(0.3, 0.3, 0.3, 0.1, p=1.0)
        batch = (images() * 255).to(torch.uint8)

        output = cf.augment_batch(batch, augmentation, generator=seeded())

        exact = cf.augment_batch(batch / 255, augmentation, generator=seeded())
        assert output.dtype is torch.uint8
        assert torch.equal(output, (exact * 255).clamp(0, 255).round().to(torch.uint8))

    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
    def test_dtypes(self, dtype):
        """The dtype is preserved, also under autocast."""
        batch = images().to(dtype)

        with torch.autocast("cpu", torch.bfloat16):
            output = cf.augment_batch(batch, ka.RandomRotation(30.0, p=1.0), generator=seeded())

        expected = cf.augment_batch(batch.float(), ka.RandomRotation(30.0, p=1.0), generator=seeded())
        assert output.dtype is dtype
        torch.testing.assert_close(output.float(), expected, atol=1e-2, rtol=0)


GEOMETRIC = {
    "horizontal flip": lambda: ka.RandomHorizontalFlip(p=1.0),
    "vertical flip": lambda: ka.RandomVerticalFlip(p=1.0),
    "quarter turn": lambda: ka.RandomRotation90((1, 3), p=1.0),
    "crop": lambda: ka.RandomCrop((208, 208), p=1.0),
    "padded crop": lambda: ka.RandomCrop((256, 256), padding=16, p=1.0),
    "resized crop": lambda: ka.RandomResizedCrop((256, 256), scale=(0.8, 1.0), p=1.0),
    "centre crop": lambda: ka.CenterCrop((224, 224)),
    "resize": lambda: ka.Resize((320, 288)),
    "longest side": lambda: ka.LongestMaxSize(320),
    "shortest side": lambda: ka.SmallestMaxSize(320),
    "padding": lambda: ka.PadTo((300, 300)),
    "translation": lambda: ka.RandomTranslate((0.1, 0.1), (0.1, 0.1), p=1.0),
    "scale": lambda: ka.RandomAffine(0.0, scale=(0.8, 1.2), p=1.0),
    "rotation": lambda: ka.RandomRotation(30.0, p=1.0),
    "shear": lambda: ka.RandomShear((-10.0, 10.0), p=1.0),
    "perspective": lambda: ka.RandomPerspective(0.2, p=1.0),
    "affine": lambda: ka.RandomAffine(20.0, (0.05, 0.05), (0.9, 1.1), p=1.0),
}


IN_SEQUENCES = sorted(GEOMETRIC.keys() - {"crop", "resized crop"})  # three of those lose the rectangle


def rectangles(generator, count=4, size=256):
    """Return images with a white rectangle each, its mask, its box and its corner points."""
    batch, boxes = torch.zeros(count, 3, size, size), []
    for image in batch:
        left, top = torch.randint(64, 80, (2,), generator=generator).tolist()
        width, height = torch.randint(88, 112, (2,), generator=generator).tolist()
        image[:, top : top + height, left : left + width] = 1
        boxes.append(torch.tensor([[left, top, left + width, top + height]], dtype=torch.float32))
    return batch, batch[:, 0] > 0.5, boxes


def box_around(shape):
    rows, columns = shape.nonzero(as_tuple=True)
    return torch.stack([columns.min(), rows.min(), columns.max() + 1, rows.max() + 1]).float()


def overlap(one, other):
    low, high = torch.maximum(one[:2], other[:2]), torch.minimum(one[2:], other[2:])
    both = (high - low).clamp_min(0).prod()
    return both / ((one[2:] - one[:2]).prod() + (other[2:] - other[:2]).prod() - both)


def check_together(augmentation, seed):
    generator = seeded(seed)
    batch, masks, boxes = rectangles(generator)

    moved = cf.augment_batch(batch, augmentation, masks=masks, boxes=boxes, generator=generator)

    for image, mask, (box,) in zip(moved.input, moved.masks, moved.boxes, strict=True):
        shape = image[0] > 0.5
        assert (shape & mask).sum() / (shape | mask).sum() >= 0.95
        assert overlap(box_around(shape), box) >= 0.95


class TestTogether:
    @pytest.mark.parametrize("name", GEOMETRIC)
    def test_single_augmentations(self, name):
        """A rectangle, its mask and its box are transformed together."""
        for seed in range(3):
            check_together(GEOMETRIC[name](), seed)

    @settings(max_examples=40, deadline=None)
    @given(st.lists(st.sampled_from(IN_SEQUENCES), min_size=3, max_size=3), st.integers(0, 99))
    def test_sequences(self, names, seed):
        """Three augmentations in sequence transform them together."""
        check_together(ka.AugmentationSequential(*(GEOMETRIC[name]() for name in names)), seed)

    def test_flip_equals_torchvision(self):
        """Images, masks, boxes and keypoints are flipped as by torchvision's transforms."""
        batch, masks, boxes = rectangles(seeded())
        points = [one.reshape(-1, 2) for one in boxes]
        sample = {
            "image": tv_tensors.Image(batch[0]),
            "mask": tv_tensors.Mask(masks[0]),
            "boxes": tv_tensors.BoundingBoxes(boxes[0], format="XYXY", canvas_size=(256, 256)),
        }

        flipped = v2.RandomHorizontalFlip(1.0)(sample)
        moved = cf.augment_batch(
            batch, ka.RandomHorizontalFlip(p=1.0), masks=masks, boxes=boxes, keypoints=points, generator=seeded()
        )

        assert torch.equal(moved.input[0], flipped["image"].as_subclass(torch.Tensor))
        assert torch.equal(moved.masks[0], flipped["mask"].as_subclass(torch.Tensor))
        assert torch.equal(moved.boxes[0], flipped["boxes"].as_subclass(torch.Tensor))
        assert torch.equal(moved.keypoints[0][:, 0], 255 - points[0][:, 0])

    @pytest.mark.parametrize("box_format", ["xyxy", "xywh", "cxcywh"])
    def test_formats(self, box_format):
        """Boxes are returned in the format in which they were passed."""
        batch, _, boxes = rectangles(seeded())
        convert = v2.ConvertBoundingBoxFormat(box_format.upper())
        wrapped = [tv_tensors.BoundingBoxes(one, format="XYXY", canvas_size=(256, 256)) for one in boxes]
        converted = [convert(one) for one in wrapped]
        flip = ka.RandomHorizontalFlip(p=1.0)

        expected = cf.augment_batch(batch, flip, boxes=boxes).boxes
        tensors = [one.as_subclass(torch.Tensor) for one in converted]
        plain = cf.augment_batch(batch, flip, boxes=tensors, box_format=box_format)
        typed = cf.augment_batch(batch, flip, boxes=converted)

        for one, other, exact in zip(plain.boxes, typed.boxes, expected, strict=True):
            assert isinstance(other, tv_tensors.BoundingBoxes)
            assert other.format.value == box_format.upper()
            assert torch.equal(one, other.as_subclass(torch.Tensor))
            back = v2.ConvertBoundingBoxFormat("XYXY")(other).as_subclass(torch.Tensor)
            torch.testing.assert_close(back, exact)

    def test_boxes_that_leave_the_image(self):
        """Boxes are clipped to the image; those with too small a visible part are dropped with their labels."""
        boxes = [torch.tensor([[0.0, 0.0, 8.0, 8.0], [14.0, 14.0, 22.0, 22.0], [20.0, 20.0, 30.0, 30.0]])]
        labels = [torch.tensor([1, 2, 3])]
        crop = ka.CenterCrop((16, 16))

        some = cf.augment_batch(torch.zeros(1, 3, 32, 32), crop, boxes=boxes, labels=labels)
        most = cf.augment_batch(torch.zeros(1, 3, 32, 32), crop, boxes=boxes, labels=labels, min_visible=0.5)

        assert some.boxes[0].tolist() == [[6, 6, 14, 14], [12, 12, 16, 16]]
        assert some.labels[0].tolist() == [2, 3]
        assert most.labels[0].tolist() == [2]

    @pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.uint8, torch.float32])
    def test_values_of_masks(self, dtype):
        """Masks keep their values and dtype: they are not interpolated."""
        masks = torch.randint(2 if dtype is torch.bool else 200, (4, 2, 32, 32), generator=seeded()).to(dtype)

        moved = cf.augment_batch(images(4), ka.RandomRotation(30.0, p=1.0), masks=masks, generator=seeded()).masks

        assert moved.dtype is dtype
        assert moved.shape == masks.shape
        assert set(moved.unique().tolist()) <= {*masks.unique().tolist(), 0}

    def test_kornias_boxes(self):
        """Boxes of kornia are returned as such, in their mode, without those that leave the image."""
        given = [torch.tensor([[0.0, 0.0, 8.0, 8.0], [14.0, 14.0, 22.0, 22.0], [20.0, 20.0, 30.0, 30.0]])]
        boxes, labels = Boxes.from_tensor(given, mode="xyxy"), [torch.tensor([1, 2, 3])]

        moved = cf.augment_batch(torch.zeros(1, 3, 32, 32), ka.CenterCrop((16, 16)), boxes=boxes, labels=labels)

        assert isinstance(moved.boxes, Boxes)
        assert moved.boxes.to_tensor()[0].tolist() == [[6, 6, 14, 14], [12, 12, 16, 16]]
        assert moved.labels[0].tolist() == [2, 3]


@pytest.fixture
def split_into_parts(monkeypatch):
    """Return a function that sets the bytes of a part; a part has one sample at least."""
    return lambda size: monkeypatch.setattr(pipelines, "_PART_BYTES", size)


class TestParts:
    @pytest.mark.parametrize("name", [name for name in pipelines._SAMPLEWISE if name in CLASSES])
    @pytest.mark.parametrize("same_on_batch", [False, True])
    def test_equals_the_complete_batch(self, split_into_parts, name, same_on_batch):
        """A large batch that is augmented in parts has the same result as kornia's call on the complete batch."""
        augmentation, batch = make(name), torch.rand(11, 3, 33, 35, generator=seeded(3))
        augmentation.same_on_batch = same_on_batch
        draws, sizes = cf.draw_augmentation(augmentation, batch.shape, generator=seeded()), sizes_of_calls(augmentation)
        expected = augmentation(batch, params=draws.params)
        split_into_parts(batch.nbytes // 3)

        output = cf.augment_batch(batch, augmentation, params=draws)

        assert sizes == [11, 3, 4, 4]
        assert torch.equal(output, expected)

    @settings(max_examples=20, deadline=None)
    @given(
        names=st.lists(st.sampled_from(["ColorJitter", "RandomAffine", "RandomHorizontalFlip"]), min_size=1),
        count=st.integers(4, 9),
        num_parts=st.integers(2, 9),
        random_apply=st.sampled_from([False, True, 1]),
        channels_last=st.booleans(),
    )
    def test_containers(self, names, count, num_parts, random_apply, channels_last):
        """Parts of nested containers have the same images, masks, boxes and keypoints as the complete batch."""
        inner = ka.ImageSequential(*map(make, names), random_apply=random_apply)
        augmentation = ka.AugmentationSequential(
            inner, make("RandomRotation"), ka.AugmentationSequential(make(names[0]))
        )
        batch = images(count, 24)
        batch = batch.to(memory_format=torch.channels_last) if channels_last else batch
        annotations = {
            "masks": batch[:, 0] > 0.5,
            "boxes": [torch.tensor([[2.0, 3.0, 20.0, 12.0]] * (index % 3)).reshape(-1, 4) for index in range(count)],
            "keypoints": torch.rand(count, 2, 2, generator=seeded()) * 24,
        }
        draws = cf.draw_augmentation(augmentation, batch.shape, generator=seeded())
        expected = cf.augment_batch(batch, augmentation, **annotations, params=draws)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(pipelines, "_PART_BYTES", batch.nbytes // num_parts)
            moved = cf.augment_batch(batch, augmentation, **annotations, params=draws)

        assert torch.equal(moved.input, expected.input)
        assert torch.equal(moved.masks, expected.masks)
        assert torch.equal(moved.keypoints, expected.keypoints)
        assert all(map(torch.equal, moved.boxes, expected.boxes))

    @pytest.mark.parametrize("size", [224, 32])
    def test_only_large_batches_are_split(self, size):
        """Images of more than 8 MiB are augmented in parts of about 4, smaller ones in one call."""
        augmentation = ka.RandomHorizontalFlip()
        sizes = sizes_of_calls(augmentation)

        cf.augment_batch(torch.zeros(32, 3, size, size), augmentation)

        assert sizes == ([8, 8, 8, 8] if size == 224 else [32])

    @pytest.mark.parametrize("name", sorted(PIPELINES.keys() - set(pipelines._SAMPLEWISE)))
    def test_other_augmentations_are_not_split(self, split_into_parts, name):
        """Augmentations that pair samples or draw for the batch get the complete batch."""
        augmentation, batch = PIPELINES[name](), batch_for(name)
        sizes = sizes_of_calls(augmentation)
        split_into_parts(1)

        cf.augment_batch(batch, ka.AugmentationSequential(augmentation) if name in CLASSES else augmentation)

        assert sizes == [len(batch)]


class TestOtherModules:
    @pytest.mark.parametrize(
        "module",
        [nn.Identity(), kornia.enhance.AdjustBrightness(0.1), kornia.filters.MedianBlur(3), kauto.RandAugment(2, 10)],
    )
    def test_accepted_with_masks(self, module):
        """Modules of kornia that move nothing, or masks with the images, are accepted in containers."""
        masks, pipeline = images()[:, 0] > 0.5, ka.AugmentationSequential(ka.RandomHorizontalFlip(p=1.0), module)

        moved = cf.augment_batch(images(), pipeline, masks=masks, generator=seeded())

        assert moved.masks.shape == masks.shape
        if not isinstance(module, kauto.RandAugment):
            assert torch.equal(moved.masks, masks.flip(-1))


class TestBadInput:
    @pytest.mark.parametrize(
        ("changes", "error", "text"),
        [
            ({"input": torch.zeros(3, 8, 8)}, ValueError, r"input must have shape .*, got \(3, 8, 8\)"),
            ({"input": torch.zeros(4, 3, 8, 8, dtype=torch.int64)}, TypeError, "input must be a batch of images"),
            ({"input": [torch.zeros(3, 8, 8)]}, TypeError, "input must be a batch of images"),
            ({"input": torch.zeros(0, 3, 8, 8)}, ValueError, "without empty dimensions"),
            ({"boxes": torch.zeros(3, 1, 4)}, ValueError, r"boxes must be .* got a tensor of shape \(3, 1, 4\)"),
            ({"boxes": torch.zeros(4, 1, 2, 2)}, ValueError, r"boxes must be .* got a tensor of shape \(4, 1, 2, 2\)"),
            (
                {
                    "input": torch.zeros(4, 3, 6, 8, 8),
                    "augmentation": ka.RandomHorizontalFlip3D(),
                    "masks": torch.zeros(4, 6, 8, 8),
                },
                ValueError,
                "RandomHorizontalFlip3D cannot move masks",
            ),
            (
                {
                    "input": torch.zeros(2, 5, 3, 8, 8),
                    "augmentation": ka.VideoSequential(ka.RandomHorizontalFlip()),
                    "masks": torch.zeros(2, 4, 8, 8),
                },
                ValueError,
                "same number of frames",
            ),
            (
                {
                    "input": torch.zeros(2, 3, 5, 8, 8),
                    "augmentation": ka.VideoSequential(ka.RandomHorizontalFlip(), data_format="BCTHW"),
                    "masks": torch.zeros(2, 5, 8, 8),
                },
                ValueError,
                "mask next to a video must be 5D",
            ),
            ({"augmentation": "flip"}, TypeError, "augmentation must be a torch.nn.Module"),
            ({"masks": torch.zeros(3, 8, 8)}, ValueError, r"masks must be .*, got \(3, 8, 8\)"),
            ({"boxes": [torch.zeros(1, 4)]}, ValueError, "boxes must be .* got a list of 1"),
            ({"boxes": torch.zeros(4, 1, 5)}, ValueError, r"boxes must be .* got a tensor of shape \(4, 1, 5\)"),
            ({"boxes": [torch.zeros(1, 5)] * 4}, ValueError, "one of shape"),
            ({"boxes": 3}, TypeError, "boxes must be a tensor"),
            ({"boxes": torch.zeros(4, 1, 4), "box_format": "yxyx"}, ValueError, "box_format must be one of"),
            ({"boxes": torch.zeros(4, 1, 4), "min_visible": 2}, ValueError, r"min_visible must lie in \[0, 1\]"),
            ({"labels": [torch.zeros(1)] * 4}, ValueError, "labels needs a list of boxes"),
            ({"boxes": [torch.zeros(1, 4)] * 4, "labels": [torch.zeros(2)] * 4}, ValueError, "labels must have one"),
            ({"keypoints": torch.zeros(4, 4)}, ValueError, "keypoints must be a tensor of shape"),
            ({"augmentation": nn.Identity(), "masks": torch.zeros(4, 8, 8)}, TypeError, "got Identity"),
            (
                {"augmentation": nn.Flatten(0, 1)},
                ValueError,
                "Flatten must return as many images as it gets, 4, got 12",
            ),
            (
                {"augmentation": ka.RandomElasticTransform(), "boxes": torch.zeros(4, 1, 4)},
                ValueError,
                "RandomElasticTransform cannot move boxes",
            ),
            (
                {"augmentation": ka.RandomMixUpV2(), "masks": torch.zeros(4, 8, 8)},
                ValueError,
                "RandomMixUpV2 cannot move masks",
            ),
            (
                {"augmentation": ka.AugmentationSequential(nn.Flatten(0, 1)), "masks": torch.zeros(4, 8, 8)},
                TypeError,
                "got Flatten, which can be applied to images alone",
            ),
            (
                {
                    "augmentation": ka.AugmentationSequential(kornia.filters.BlurPool2D(3)),
                    "masks": torch.zeros(4, 8, 8),
                },
                TypeError,
                "got BlurPool2D, which can be applied to images alone",
            ),
            (
                {
                    "augmentation": ka.AugmentationSequential(ka.ImageSequential(kornia.geometry.Hflip())),
                    "boxes": torch.zeros(4, 1, 4),
                },
                TypeError,
                "got Hflip, which can be applied to images alone",
            ),
            (
                {"augmentation": ka.AugmentationSequential(ka.RandomMixUpV2()), "masks": torch.zeros(4, 8, 8)},
                ValueError,
                "RandomMixUpV2 cannot move masks",
            ),
        ],
    )
    def test_errors(self, changes, error, text):
        """Each error states the parameter, what was expected and the value."""
        arguments = {"input": torch.zeros(4, 3, 8, 8), "augmentation": ka.RandomHorizontalFlip()} | changes

        with pytest.raises(error, match=text):
            cf.augment_batch(**arguments)


@pytest.mark.skipif(TorchVersion(torch.__version__) < "2.8", reason="torch 2.7 makes no other class of fake tensors")
@pytest.mark.gpu
class TestGPU:
    """Images on a GPU."""

    @pytest.mark.parametrize("device", ["cpu", "cuda"])
    @pytest.mark.parametrize("as_list", [True, False])
    def test_annotations_keep_their_device(self, device, as_list):
        """Boxes and keypoints are returned on the device they came from, with the values of a CPU."""
        images, flip = torch.rand(2, 3, 8, 8), ka.RandomHorizontalFlip(p=1.0)
        given = [torch.tensor([[1.0, 2.0, 4.0, 6.0]]), torch.tensor([[0.0, 0.0, 8.0, 8.0]])]
        boxes = [one.to(device) for one in given] if as_list else torch.stack(given).to(device)

        on_gpu = cf.augment_batch(images.cuda(), flip, boxes=boxes, keypoints=torch.zeros(2, 1, 2, device=device))
        on_cpu = cf.augment_batch(images, flip, boxes=given, keypoints=torch.zeros(2, 1, 2))

        assert on_gpu.input.is_cuda
        assert on_gpu.keypoints.device.type == device
        for found, expected in zip(on_gpu.boxes, on_cpu.boxes, strict=True):
            assert found.device.type == device
            torch.testing.assert_close(found.cpu(), expected)

    def test_jitter(self):
        """The device is kept."""
        augmented = cf.augment_batch(torch.rand(2, 3, 8, 8, device="cuda"), ka.ColorJitter(hue=0.1))

        assert augmented.is_cuda
