"""MixUp, CutMix, CutOut and ColOut on images with masks and boxes, compared with rectangles painted pixel by pixel."""

from __future__ import annotations

import kornia.augmentation as ka
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torchvision import tv_tensors
from torchvision.transforms import v2

from composer import functional as cf
from fixtures import seeded

SIZE = (14, 18)


def paint(boxes: torch.Tensor, size: tuple[int, int] = SIZE) -> torch.Tensor:
    """Return a mask for each box, by comparing the coordinates of every pixel."""
    rows, columns = torch.arange(size[0])[:, None], torch.arange(size[1])
    inside = [
        (columns >= left) & (columns < right) & (rows >= top) & (rows < bottom)
        for left, top, right, bottom in boxes.tolist()
    ]
    return torch.stack(inside) if inside else torch.zeros(0, *size, dtype=torch.bool)


def box_around(mask: torch.Tensor) -> list[float]:
    rows, columns = mask.nonzero(as_tuple=True)
    return [float(edge) for edge in (columns.min(), rows.min(), columns.max() + 1, rows.max() + 1)]


def drawn(seed: int, count: int = 3, size: tuple[int, int] = SIZE) -> list[torch.Tensor]:
    """Return up to four rectangles for each image."""
    generator, boxes = seeded(seed), []
    for _ in range(count):
        number = int(torch.randint(0, 5, (), generator=generator))
        edges = torch.rand(number, 2, 2, generator=generator).sort(dim=1).values * torch.tensor([size[1], size[0]])
        boxes.append(torch.cat([edges[:, 0].floor(), edges[:, 1].floor() + 1], dim=-1))
    return boxes


def scene(seed: int, **more: object) -> cf.AugmentedBatch:
    """Return images with masks of rectangles, the boxes around them and a label for each."""
    boxes = drawn(seed)
    masks = torch.stack([paint(one).sum(0) for one in boxes])
    labels = [torch.arange(len(one)) + 10 * place for place, one in enumerate(boxes)]
    return cf.AugmentedBatch(masks[:, None].float(), masks, boxes, None, labels)._replace(**more)


PARTNERS = torch.tensor([2, 0, 1])
RAGGED = torch.nested.nested_tensor([torch.zeros(count, 4) for count in (1, 2, 0)], layout=torch.jagged)


class TestCutmix:
    @given(
        st.integers(0, 10_000),
        st.tuples(st.integers(0, 14), st.integers(0, 14)).map(sorted),
        st.tuples(st.integers(0, 18), st.integers(0, 18)).map(sorted),
    )
    def test_boxes_are_those_of_the_visible_pixels(self, seed: int, rows: list[int], columns: list[int]):
        """For each rectangle that stays visible there is the smallest box around its visible pixels, with its label."""
        (x1, x2), (y1, y2) = rows, columns
        batch, pasted = scene(seed), torch.zeros(SIZE, dtype=torch.bool)
        pasted[x1:x2, y1:y2] = True

        mixed, *_ = cf.cutmix_batch(batch, None, bbox=(x1, y1, x2, y2), indices=PARTNERS)

        for place, partner in enumerate(PARTNERS.tolist()):
            visible = [*(paint(batch.boxes[place]) & ~pasted), *(paint(batch.boxes[partner]) & pasted)]
            labels = [*batch.labels[place].tolist(), *batch.labels[partner].tolist()]
            expected = [(box_around(one), label) for one, label in zip(visible, labels, strict=True) if one.any()]
            assert mixed.boxes[place].tolist() == [box for box, _ in expected]
            assert mixed.labels[place].tolist() == [label for _, label in expected]

    def test_masks_as_images(self):
        """Masks are pasted at the same places as images, and neither input changes."""
        batch = scene(1)
        before = batch.masks.clone()

        mixed, target, _, (x1, y1, x2, y2) = cf.cutmix_batch(batch, torch.arange(3), length=0.5, generator=seeded(1))

        expected = batch.masks.clone()
        expected[:, x1:x2, y1:y2] = batch.masks[target][:, x1:x2, y1:y2]
        assert torch.equal(mixed.masks, expected)
        assert torch.equal(mixed.input[:, 0], expected.float())
        assert torch.equal(batch.masks, before)

    @pytest.mark.parametrize(("min_visible", "labels"), [(0.0, [1, 2, 3, 4]), (0.3, [1, 2, 3]), (0.6, [1, 3])])
    def test_boxes_with_less_are_dropped(self, min_visible: float, labels: list[int]):
        """Boxes of which less than the fraction is visible are dropped with their labels."""
        boxes = [
            torch.tensor([[0.0, 0.0, 4.0, 4.0], [0.0, 10.0, 10.0, 14.0]]),  # 100 % and 50 % visible
            torch.tensor([[6.0, 8.0, 10.0, 12.0], [1.0, 8.0, 6.0, 9.0]]),  # 100 % and 20 % pasted
        ]
        batch = cf.AugmentedBatch(
            torch.zeros(2, 1, *SIZE), boxes=boxes, labels=[torch.tensor([1, 2]), torch.tensor([3, 4])]
        )

        mixed, *_ = cf.cutmix_batch(
            batch, None, bbox=(8, 5, 14, 18), indices=torch.tensor([1, 0]), min_visible=min_visible
        )

        assert mixed.labels[0].tolist() == labels

    @pytest.mark.parametrize("box_format", ["xyxy", "xywh", "cxcywh"])
    def test_formats(self, box_format: str):
        """Boxes of any format, plain or torchvision's, give the same result in that format."""
        batch = scene(4)
        back = v2.ConvertBoundingBoxFormat("XYXY")
        convert = v2.ConvertBoundingBoxFormat(box_format.upper())
        wrapped = [convert(tv_tensors.BoundingBoxes(one, format="XYXY", canvas_size=SIZE)) for one in batch.boxes]
        plain = [one.as_subclass(torch.Tensor) for one in wrapped]
        settings = {"bbox": (3, 4, 11, 12), "indices": PARTNERS}

        expected = cf.cutmix_batch(batch, None, **settings)[0].boxes
        typed = cf.cutmix_batch(batch._replace(boxes=wrapped), None, **settings)[0].boxes
        named = cf.cutmix_batch(batch._replace(boxes=plain), None, **settings, box_format=box_format)[0].boxes

        for one, other, exact in zip(typed, named, expected, strict=True):
            torch.testing.assert_close(back(one).as_subclass(torch.Tensor), exact)
            assert torch.equal(one.as_subclass(torch.Tensor), other)

    def test_follows_augment_batch(self):
        """The result of a pipeline can be mixed, and boxes stay around their rectangles."""
        batch = scene(6)
        moved = cf.augment_batch(
            batch.input, ka.RandomHorizontalFlip(p=1.0), masks=batch.masks, boxes=batch.boxes, labels=batch.labels
        )

        mixed, *_ = cf.cutmix_batch(moved, None, bbox=(0, 0, 14, 18), indices=PARTNERS)

        assert torch.equal(mixed.masks, batch.masks[PARTNERS].flip(-1))
        for place, partner in enumerate(PARTNERS.tolist()):
            assert torch.equal(paint(mixed.boxes[place]).sum(0), batch.masks[partner].flip(-1))


class TestMixup:
    def test_union_of_boxes(self):
        """Each image gets its own boxes and labels, then those of its partner."""
        batch = scene(2, masks=None)

        mixed, target, mixing = cf.mixup_batch(batch, None, mixing=0.25, indices=PARTNERS)

        assert torch.allclose(mixed.input, 0.75 * batch.input + 0.25 * batch.input[PARTNERS])
        assert (target, mixing) == (None, 0.25)
        for place, partner in enumerate(PARTNERS.tolist()):
            assert torch.equal(mixed.boxes[place], torch.cat([batch.boxes[place], batch.boxes[partner]]))
            assert torch.equal(mixed.labels[place], torch.cat([batch.labels[place], batch.labels[partner]]))

    def test_masks_of_probabilities(self):
        """Masks in floating point are blended as images are."""
        batch = scene(3, boxes=None, labels=None)
        batch = batch._replace(masks=torch.rand(3, 2, *SIZE))

        mixed, *_ = cf.mixup_batch(batch, None, mixing=0.3, indices=PARTNERS)

        torch.testing.assert_close(mixed.masks, 0.7 * batch.masks + 0.3 * batch.masks[PARTNERS])

    @pytest.mark.parametrize(("mixing", "order"), [(0.0, [0, 1, 2]), (1.0, [2, 0, 1])])
    def test_invisible_images_have_no_boxes(self, mixing: float, order: list[int]):
        """With weight 0 for one of both, only the boxes of the other remain."""
        batch = scene(5, masks=None)

        mixed, *_ = cf.mixup_batch(batch, None, mixing=mixing, indices=PARTNERS)

        assert [one.tolist() for one in mixed.boxes] == [batch.boxes[place].tolist() for place in order]


class TestCutout:
    @pytest.mark.parametrize("value", [255, 0])
    def test_holes_in_masks(self, value: int):
        """Holes of the masks have the value, at the pixels at which images are zero; boxes stay."""
        batch = scene(7)._replace(input=torch.ones(3, 1, *SIZE))

        holed = cf.cutout_batch(batch, 2, 0.5, mask_value=value, generator=seeded(2))

        expected = torch.where(holed.input[:, 0] == 0, value, batch.masks)
        assert torch.equal(holed.masks, expected)
        assert torch.equal(holed.input, cf.cutout_batch(batch.input, 2, 0.5, generator=seeded(2)))
        assert holed.boxes is batch.boxes

    def test_masks_stay_without_a_value(self):
        """By default masks do not change."""
        batch = scene(7)

        assert cf.cutout_batch(batch, generator=seeded(2)).masks is batch.masks


class TestColout:
    @given(st.integers(0, 10_000), st.floats(0, 0.9), st.floats(0, 0.9))
    def test_boxes_are_those_of_the_remaining_pixels(self, seed: int, p_row: float, p_col: float):
        """The rectangles, without the dropped rows and columns, are what the boxes are around."""
        batch = scene(seed)

        smaller = cf.colout_batch(batch, p_row, p_col, generator=seeded(seed))

        size = tuple(smaller.input.shape[-2:])
        assert torch.equal(smaller.masks, smaller.input[:, 0].long())
        for boxes, labels, old, old_labels in zip(
            smaller.boxes, smaller.labels, batch.boxes, batch.labels, strict=True
        ):
            painted = paint(old)[None] if len(old) else torch.zeros(1, 1, *SIZE)
            remaining = cf.colout_batch(painted, p_row, p_col, generator=seeded(seed))[0]
            pairs = zip(remaining, old_labels, strict=bool(len(old)))
            preserved = [(box_around(one), int(label)) for one, label in pairs if one.any()]
            assert boxes.tolist() == [box for box, _ in preserved]
            assert labels.tolist() == [label for _, label in preserved]
            if len(boxes):
                assert torch.equal(paint(boxes, size), remaining[[bool(one.any()) for one in remaining]])

    def test_keypoints_stay_on_their_pixels(self):
        """The keypoint of a pixel that remains is at the new place of the pixel."""
        rows, columns = torch.tensor([0, 3, 4, 9]), torch.tensor([1, 2, 7, 17])
        points = torch.cartesian_prod(columns, rows).float().expand(3, -1, 2)
        batch = cf.AugmentedBatch(torch.zeros(3, 1, *SIZE), keypoints=points)

        smaller = cf.colout_batch(batch, row_indices=rows, col_indices=columns)

        expected = torch.cartesian_prod(torch.arange(4), torch.arange(4)).float()
        assert torch.equal(smaller.keypoints, expected.expand(3, -1, 2))

    def test_boxes_in_a_tensor(self):
        """Boxes of a tensor stay as many as they were, also those of which nothing remains."""
        boxes = torch.tensor([[[2.0, 0.0, 6.0, 4.0], [4.0, 4.0, 5.0, 8.0]]])
        batch = cf.AugmentedBatch(torch.zeros(1, 1, 8, 8), boxes=boxes)

        smaller = cf.colout_batch(batch, row_indices=torch.arange(8), col_indices=torch.tensor([0, 1, 2, 3, 5, 6, 7]))

        assert smaller.boxes.tolist() == [[[2, 0, 5, 4], [4, 4, 4, 8]]]

    def test_with_a_target(self):
        """A pair of such a batch and a target is returned as a pair."""
        batch, labels = scene(8), torch.arange(3)

        smaller, same = cf.colout_batch((batch, labels), generator=seeded(0))

        assert isinstance(smaller, cf.AugmentedBatch)
        assert same is labels


class TestBadInput:
    @pytest.mark.parametrize(
        ("call", "changes", "error", "text"),
        [
            (cf.cutmix_batch, {"masks": torch.zeros(2, 14, 18)}, ValueError, r"masks must be .*, got \(2, 14, 18\)"),
            (cf.mixup_batch, {}, TypeError, "masks must be probabilities, floating point"),
            (cf.colout_batch, {"masks": torch.zeros(3, 9, 18)}, ValueError, "masks must be"),
            (cf.cutout_batch, {"masks": torch.zeros(3, 9, 18)}, ValueError, "masks must be"),
            (cf.cutmix_batch, {"boxes": [torch.zeros(1, 4)]}, ValueError, "boxes must be .* got a list of 1"),
            (cf.cutmix_batch, {"boxes": torch.zeros(3, 1, 4), "labels": None}, ValueError, "boxes must be a list"),
            (cf.mixup_batch, {"boxes": torch.zeros(3, 1, 4), "masks": None}, ValueError, "boxes must be a list"),
            (cf.colout_batch, {"boxes": torch.zeros(2, 1, 4), "labels": None}, ValueError, "boxes must be a tensor"),
            (cf.colout_batch, {"boxes": torch.zeros(3, 1, 4)}, ValueError, "labels needs a list of boxes"),
            (cf.cutmix_batch, {"labels": [torch.zeros(9)] * 3}, ValueError, "labels must have one entry for each box"),
            (cf.cutmix_batch, {"boxes": None}, ValueError, "labels needs a list of boxes.*of images .*as target"),
            (cf.cutmix_batch, {"labels": torch.arange(3)}, TypeError, r"shape \(3,\)\. Pass class labels of images as"),
            (
                cf.colout_batch,
                {"labels": [[0], [1], [2]]},
                TypeError,
                r"labels must be .*, got \[\[0\], \[1\], \[2\]\]",
            ),
            (cf.colout_batch, {"labels": 5}, TypeError, "labels must be .*, got 5"),
            (cf.cutmix_batch, {"boxes": RAGGED}, ValueError, r"a nested tensor\. Convert it: list\(boxes.unbind\(\)\)"),
            (cf.colout_batch, {"masks": RAGGED}, ValueError, "masks must be .* Draw masks of instances into one"),
            (cf.cutmix_batch, {"masks": [torch.zeros(1, 14, 18)] * 3}, ValueError, "got list. Draw masks of instances"),
            (cf.cutmix_batch, {"keypoints": torch.zeros(3, 1, 2)}, ValueError, "keypoints cannot be mixed"),
            (cf.mixup_batch, {"keypoints": torch.zeros(3, 1, 2)}, ValueError, "keypoints cannot be mixed"),
            (cf.colout_batch, {"input": torch.zeros(3, 14, 18)}, ValueError, r"input must have shape \(N, C, H, W\)"),
            (cf.cutout_batch, {"input": torch.zeros(3, 14, 18)}, ValueError, r"input must have shape \(N, C, H, W\)"),
        ],
    )
    def test_invalid_annotations_raise(self, call: object, changes: dict[str, object], error: type, text: str):
        """Annotations that do not match the images, or cannot be mixed, raise."""
        arguments = (None,) if call in (cf.cutmix_batch, cf.mixup_batch) else ()

        with pytest.raises(error, match=text):
            call(scene(9, **changes), *arguments)
