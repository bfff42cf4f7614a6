"""CutMix compared with the formula and torchvision."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torchvision.transforms import v2

from composer import functional as cf
from fixtures import seeded

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.uint8]


class TestCutmixBatch:
    @pytest.mark.parametrize("format", [torch.contiguous_format, torch.channels_last])
    @pytest.mark.parametrize("dtype", DTYPES)
    def test_pastes_the_partners_box(self, dtype: torch.dtype, format: torch.memory_format, device: torch.device):
        """Pixels in the box are the partner's, others the sample's own."""
        images = torch.randint(0, 100, (4, 3, 5, 7), device=device).to(dtype).contiguous(memory_format=format)
        partners = torch.tensor([2, 0, 3, 1], device=device)

        mixed, partner_labels, weight, bbox = cf.cutmix_batch(
            images, torch.arange(4, device=device), bbox=(1, 3, 4, 7), indices=partners
        )

        rows = torch.arange(5, device=device)[:, None]
        columns = torch.arange(7, device=device)
        inside = (rows >= 1) & (rows < 4) & (columns >= 3)
        assert torch.equal(mixed, torch.where(inside, images[partners], images))
        assert partner_labels.tolist() == [2, 0, 3, 1]
        assert weight == 1 - 3 * 4 / 35
        assert bbox == (1, 3, 4, 7)
        assert mixed.dtype == dtype
        assert mixed.is_contiguous(memory_format=format)

    def test_names_the_originals_weight(self):
        """``adjusted_lambda`` is the original's fraction of an image, in Composer's place, the third."""
        images, swap = torch.stack([torch.zeros(1, 2, 4), torch.ones(1, 2, 4)]), torch.tensor([1, 0])

        result = cf.cutmix_batch(images, torch.arange(2), bbox=(0, 1, 2, 4), indices=swap)

        assert 1 - result.input[0].mean() == result.adjusted_lambda == result[2] == 0.25
        assert (result.target.tolist(), result.bbox) == ([1, 0], (0, 1, 2, 4))

    @pytest.mark.parametrize("seed", range(5))
    def test_agrees_with_torchvision(self, seed: int, monkeypatch: pytest.MonkeyPatch):
        """With torchvision's box and partner, the neighbour in the batch, images and labels are equal."""
        images, labels = torch.rand(6, 3, 16, 24), torch.tensor([0, 1, 2, 3, 1, 0])
        boxes = []
        original = v2.CutMix.make_params

        def spy(self: v2.CutMix, inputs: list[object]) -> dict[str, object]:
            params = original(self, inputs)
            boxes.append(params["box"])
            return params

        monkeypatch.setattr(v2.CutMix, "make_params", spy)
        torch.manual_seed(seed)
        their_images, their_labels = v2.CutMix(num_classes=4)(images, labels)
        left, top, right, bottom = boxes[0]

        mixed, soft = cf.cutmix(
            images, labels, num_classes=4, bbox=(top, left, bottom, right), indices=torch.arange(6).roll(1)
        )

        assert torch.equal(mixed, their_images)
        torch.testing.assert_close(soft, their_labels)

    @pytest.mark.parametrize(
        ("size", "length", "sides"), [((32, 32), 0.5, (16, 16)), ((20, 40), 0.26, (5, 10)), ((9, 7), 1.0, (9, 7))]
    )
    def test_length_is_a_fraction_of_each_side(self, size: tuple[int, int], length: float, sides: tuple[int, int]):
        """The box has the image's aspect ratio, with sides rounded to pixels."""
        boxes = [cf.draw_cutmix_box(size, length, generator=seeded(seed)) for seed in range(200)]

        assert max(x2 - x1 for x1, _, x2, _ in boxes) == sides[0]
        assert max(y2 - y1 for _, y1, _, y2 in boxes) == sides[1]

    @pytest.mark.parametrize("settings", [{"length": 0}, {"alpha": 0}, {"length": 0, "uniform_sampling": True}])
    def test_empty_box_is_the_identity(self, settings: dict[str, float]):
        """Nothing is pasted, and the sample has weight 1."""
        images = torch.rand(4, 3, 5, 6)

        mixed, _, weight, _ = cf.cutmix_batch(images, torch.arange(4), **settings)

        assert torch.equal(mixed, images)
        assert weight == 1

    @given(
        seed=st.integers(0, 2**40),
        count=st.integers(1, 5),
        alpha=st.floats(0, 10),
        length=st.none() | st.floats(0, 1),
        uniform=st.booleans(),
    )
    def test_draws_depend_on_the_generator(
        self, seed: int, count: int, alpha: float, length: float | None, uniform: bool
    ):
        """Draws are reproducible and can be passed in; the weight is the remaining area."""
        images, labels = torch.arange(count).view(-1, 1, 1, 1).expand(count, 1, 6, 5), torch.arange(count)

        def run(**draws: object) -> tuple[torch.Tensor, torch.Tensor, float, tuple[int, ...]]:
            return cf.cutmix_batch(images, labels, length, alpha, uniform_sampling=uniform, **draws)

        first = run(generator=seeded(seed))
        second = run(generator=seeded(seed))
        replayed = run(bbox=first[3], indices=first[1])

        for other in (second, replayed):
            assert torch.equal(first[0], other[0])
            assert torch.equal(first[1], other[1])
            assert first[2:] == other[2:]
        for sample, partner in enumerate(first[1].tolist()):
            own = (first[0][sample] == sample).double().mean()
            torch.testing.assert_close(own.item(), 1.0 if partner == sample else first[2])

    def test_inputs_are_not_modified(self):
        """Images and labels are not modified, also in an expanded batch."""
        images, labels = torch.rand(1, 3, 6, 6).expand(4, 3, 6, 6), torch.arange(4)
        images_before, labels_before = images.clone(), labels.clone()

        cf.cutmix_batch(images, labels, length=0.5)

        assert torch.equal(images, images_before)
        assert torch.equal(labels, labels_before)

    @pytest.mark.parametrize("format", [torch.contiguous_format, torch.channels_last])
    def test_gradients_flow_to_both_images(self, format: torch.memory_format):
        """Each output pixel passes its gradient to its source."""
        images = torch.rand(2, 2, 3, 4, dtype=torch.float64).contiguous(memory_format=format).requires_grad_()
        swap = torch.tensor([1, 0])

        def paste(images: torch.Tensor) -> torch.Tensor:
            return cf.cutmix_batch(images, torch.arange(2), bbox=(0, 1, 2, 4), indices=swap)[0]

        assert torch.autograd.gradcheck(paste, images)

    @pytest.mark.parametrize("format", [torch.contiguous_format, torch.channels_last])
    def test_compiles_to_one_graph(self, format: torch.memory_format):
        """With draws as inputs, one graph serves all boxes."""
        compiled = torch.compile(cf.cutmix_batch, fullgraph=True, backend="eager")
        images = torch.zeros(2, 3, 6, 6).contiguous(memory_format=format)
        images[1] = 1

        for x in range(3):
            mixed, labels, weight, _ = compiled(
                images, torch.arange(2), bbox=(x, 1, x + 2, 4), indices=torch.tensor([1, 0])
            )

            assert mixed[0, 0].nonzero().min(0).values.tolist() == [x, 1]
            assert mixed[0].sum() == 3 * 6
            assert labels.tolist() == [1, 0]
            assert weight == 1 - 6 / 36

    @pytest.mark.parametrize("shape", [(2, 6, 8), (2, 1, 6, 8)])
    def test_masks_raise(self, shape: tuple[int, ...]):
        """Masks raise an error that names the function for them."""
        with pytest.raises(ValueError, match=r"target must be one label for each image, got a mask .* with mask_key"):
            cf.cutmix_batch(torch.rand(2, 3, 6, 8), torch.zeros(shape))

    @pytest.mark.parametrize("shape", [(3, 4, 4), (4, 4), (2, 3, 4, 4, 4)])
    def test_invalid_shape_raises(self, shape: tuple[int, ...]):
        """Images have the shape (N, C, H, W)."""
        with pytest.raises(ValueError, match=r"input must have shape \(N, C, H, W\) with at least one pixel"):
            cf.cutmix_batch(torch.rand(shape), torch.arange(shape[0]))

    def test_empty_batch_raises(self):
        """At least one sample is required."""
        with pytest.raises(ValueError, match="at least one pixel, got shape"):
            cf.cutmix_batch(torch.rand(0, 3, 4, 4), torch.arange(0))

    def test_invalid_type_raises(self):
        """Images and targets are tensors."""
        with pytest.raises(TypeError, match=r"input must be a tensor .* got list"):
            cf.cutmix_batch([[1.0]], torch.arange(1))
        with pytest.raises(TypeError, match=r"target must be a tensor .* got dict"):
            cf.cutmix_batch(torch.rand(2, 3, 4, 4), {"boxes": torch.rand(2, 4)})
        for indices, kind in (([1, 0], "list"), (torch.arange(2).int(), "torch.int32")):
            with pytest.raises(TypeError, match=f"indices must be an int64 tensor, .* got {kind}"):
                cf.cutmix_batch(torch.rand(2, 3, 4, 4), torch.arange(2), indices=indices)

    @pytest.mark.parametrize("target", [torch.arange(3), torch.tensor(1)])
    def test_mismatched_target_raises(self, target: torch.Tensor):
        """Samples and targets must have the same length."""
        with pytest.raises(ValueError, match="target must have the input's 2 samples"):
            cf.cutmix_batch(torch.rand(2, 3, 4, 4), target)

    def test_mismatched_partners_raise(self):
        """Each sample needs one partner."""
        with pytest.raises(ValueError, match="indices must be a permutation of the 2 samples"):
            cf.cutmix_batch(torch.rand(2, 3, 4, 4), torch.arange(2), indices=torch.arange(3))

    def test_values_out_of_range_raise(self):
        """The error states the parameter, its range and the value."""
        images, labels = torch.rand(2, 3, 4, 6), torch.arange(2)

        with pytest.raises(
            ValueError, match=r"bbox must be .* <= 4 \(the height\) .* <= 6 \(the width\), got \(0, 0, 6"
        ):
            cf.cutmix_batch(images, labels, bbox=(0, 0, 6, 4))
        with pytest.raises(TypeError, match="bbox must be four ints"):
            cf.cutmix_batch(images, labels, bbox=torch.tensor([0, 0, 2, 2]))
        for length in (-0.5, 1.5, math.nan):
            with pytest.raises(ValueError, match=rf"length must lie in \[0, 1\], got {length}"):
                cf.cutmix_batch(images, labels, length)
        for alpha in (-1.0, math.nan):
            with pytest.raises(ValueError, match=f"alpha must be at least 0, got {alpha}"):
                cf.cutmix_batch(images, labels, alpha=alpha)
        with pytest.raises(ValueError, match="alpha must be more than 0, got inf"):
            cf.cutmix_batch(images, labels, alpha=math.inf)


class TestDrawCutmixBox:
    def test_area_follows_the_beta_draw(self):
        """With alpha 1 the area before clipping is uniformly distributed."""
        size = (400, 800)

        for seed in range(50):
            x1, y1, x2, y2 = cf.draw_cutmix_box(size, generator=seeded(seed))
            left_over = cf.draw_beta(1.0, generator=seeded(seed))
            rows, columns = (math.sqrt(1 - left_over) * side for side in size)
            assert x2 - x1 <= rows + 0.5
            assert y2 - y1 <= columns + 0.5
            assert x1 == 0 or x2 == size[0] or abs(x2 - x1 - rows) <= 0.5
            assert y1 == 0 or y2 == size[1] or abs(y2 - y1 - columns) <= 0.5

    def test_uniform_sampling_covers_each_pixel_equally_often(self):
        """The corner is covered as often as the center, and less often without uniform sampling."""
        size, draws = (6, 6), 3000
        uniform, default = torch.zeros(size), torch.zeros(size)

        for seed in range(draws):
            for counts, setting in ((uniform, True), (default, False)):
                x1, y1, x2, y2 = cf.draw_cutmix_box(size, 0.5, uniform_sampling=setting, generator=seeded(seed))
                counts[x1:x2, y1:y2] += 1

        fraction = (3 / 8) ** 2
        assert (uniform / draws - fraction).abs().max() < 4.5 * math.sqrt(fraction * (1 - fraction) / draws)
        assert default[0, 0] < 0.7 * default[3, 3]


class TestCutmix:
    def test_class_ids_are_weighted_by_area(self):
        """Each row has the weights of the sample's class and the partner's."""
        images, labels, partners = torch.rand(3, 2, 4, 4), torch.tensor([2, 0, 1]), torch.tensor([1, 2, 0])

        mixed, soft = cf.cutmix(images, labels, num_classes=3, bbox=(0, 0, 2, 2), indices=partners)

        expected = images.clone()
        expected[:, :, :2, :2] = images[partners][:, :, :2, :2]
        assert torch.equal(mixed, expected)
        torch.testing.assert_close(soft, torch.tensor([[0.25, 0, 0.75], [0.75, 0.25, 0], [0, 0.75, 0.25]]))

    @given(seed=st.integers(0, 2**40), alpha=st.floats(0, 5))
    def test_sum_of_probabilities_is_preserved(self, seed: int, alpha: float):
        """Rows still sum to one, and the target is not modified."""
        generator = seeded(seed)
        target = torch.softmax(torch.randn(6, 4, generator=generator), 1)
        before = target.clone()

        _, soft = cf.cutmix(torch.rand(6, 1, 5, 5), target, alpha, generator=generator)

        torch.testing.assert_close(soft.sum(1), torch.ones(6))
        assert torch.equal(target, before)

    @pytest.mark.parametrize("uniform", [False, True])
    def test_agrees_with_cutmix_batch(self, uniform: bool):
        """The loss of the mixed target is the weighted loss."""
        images, labels, logits = torch.rand(5, 2, 8, 8), torch.tensor([0, 1, 2, 0, 1]), torch.randn(5, 3)
        settings = {"length": 0.6, "uniform_sampling": uniform}

        mixed, soft = cf.cutmix(images, labels, 0.4, 3, **settings, generator=seeded(1))
        expected, partner, weight, _ = cf.cutmix_batch(images, labels, alpha=0.4, **settings, generator=seeded(1))

        loss = cf.soft_cross_entropy
        assert torch.equal(mixed, expected)
        assert 0 < weight < 1
        torch.testing.assert_close(
            loss(logits, soft), weight * loss(logits, labels) + (1 - weight) * loss(logits, partner)
        )

    @pytest.mark.parametrize("shape", [(4, 6, 8), (4, 1, 6, 8), (4, 5, 6, 8)])
    @pytest.mark.parametrize("dtype", [torch.int64, torch.uint8, torch.float32])
    def test_masks_are_mixed_like_images(self, shape: tuple[int, ...], dtype: torch.dtype):
        """Each mask pixel comes from the same source as its image pixel."""
        masks = torch.randint(0, 20, shape).to(dtype)
        images = masks.view(4, -1, 6, 8).float()
        before = masks.clone()

        mixed, mixed_masks = cf.cutmix(images, masks, length=0.5, indices=torch.tensor([1, 2, 3, 0]))

        assert torch.equal(mixed_masks.view(4, -1, 6, 8).float(), mixed)
        assert mixed_masks.dtype == dtype
        assert not torch.equal(mixed_masks, masks)
        assert torch.equal(masks, before)

    def test_uint8_images_give_float32_probabilities(self):
        """The images' dtype is used only if it is a wider floating-point dtype."""
        images, labels = torch.zeros(2, 3, 4, 4, dtype=torch.uint8), torch.arange(2)

        _, narrow = cf.cutmix(images, labels, num_classes=2)
        _, wide = cf.cutmix(images.double(), labels, num_classes=2)

        assert narrow.dtype == torch.float32
        assert wide.dtype == torch.float64

    def test_compiles_to_one_graph(self):
        """With draws as inputs, one graph is compiled for ids and one for masks."""
        compiled = torch.compile(cf.cutmix, fullgraph=True, backend="eager")
        images, masks, swap = torch.rand(2, 3, 4, 4), torch.zeros(2, 4, 4), torch.tensor([1, 0])
        masks[1] = 1

        _, soft = compiled(images, torch.arange(2), num_classes=2, bbox=(0, 0, 2, 2), indices=swap)
        _, mixed_masks = compiled(images, masks, bbox=(0, 0, 2, 2), indices=swap)

        torch.testing.assert_close(soft, torch.tensor([[0.75, 0.25], [0.25, 0.75]]))
        assert mixed_masks.sum((1, 2)).tolist() == [4, 12]

    def test_class_ids_without_num_classes_raise(self):
        """How many classes there are cannot be seen from ids."""
        with pytest.raises(ValueError, match="num_classes must be given"):
            cf.cutmix(torch.rand(2, 3, 4, 4), torch.arange(2))

    @pytest.mark.parametrize("target", [torch.rand(2, 7, 4), torch.rand(2), torch.zeros(2, 3, dtype=torch.int64)])
    def test_other_targets_raise(self, target: torch.Tensor):
        """Only class ids, class probabilities and masks can be mixed."""
        with pytest.raises(ValueError, match=r"target must be class ids \(N,\), integers, class probabilities"):
            cf.cutmix(torch.rand(2, 3, 8, 8), target, num_classes=3)

    def test_mismatched_masks_raise(self):
        """Samples and masks must have the same length."""
        with pytest.raises(ValueError, match="target must have the input's 2 samples"):
            cf.cutmix(torch.rand(2, 3, 8, 8), torch.zeros(3, 8, 8))
