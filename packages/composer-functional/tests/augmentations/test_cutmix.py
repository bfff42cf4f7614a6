"""CutMix compared with the formula and torchvision."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode
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


class Launches(TorchDispatchMode):
    """Records the operations that launch a kernel on a GPU: all but views."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if not func.is_view:
            self.names.append(func.overloadpacket.__name__)
        return func(*args, **kwargs or {})


@pytest.mark.parametrize(
    ("kernel", "settings", "names"),
    [
        (cf.mixup_batch, {"mixing": 0.3}, ["index_select", "lerp_", "index_select"]),
        (cf.cutmix_batch, {"bbox": (1, 1, 5, 5)}, ["clone", "index_select", "copy_", "index_select"]),
    ],
)
def test_launches(kernel, settings, names):
    """With its draws, a kernel has the operations of the cheapest calls, the last of them for the targets."""
    images, labels, indices = torch.rand(8, 3, 8, 8), torch.arange(8), torch.randperm(8)

    with Launches() as launches:
        kernel(images, labels, indices=indices, **settings)

    assert launches.names == names
