"""MixUp compared with the formula."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from composer import functional as cf

FLOATS = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


class TestMixupBatch:
    @pytest.mark.parametrize("dtype", FLOATS)
    @pytest.mark.parametrize("mixing", [0.0, 0.25, 0.5, 0.9, 1.0])
    def test_matches_the_formula(self, dtype: torch.dtype, mixing: float, device: torch.device):
        """Each sample is (1 - mixing) of itself plus mixing of its partner."""
        images = torch.rand(5, 3, 4, 4, device=device).to(dtype)
        labels = torch.arange(5, device=device)
        partners = torch.tensor([2, 0, 1, 4, 3], device=device)

        mixed, partner_labels, weight = cf.mixup_batch(images, labels, mixing, indices=partners)

        expected = (1 - mixing) * images.double() + mixing * images.double()[partners]
        torch.testing.assert_close(mixed, expected.to(dtype))
        assert partner_labels.tolist() == [2, 0, 1, 4, 3]
        assert weight == mixing

    def test_alpha_zero_is_the_identity(self):
        """With alpha 0 nothing is mixed, for any partners."""
        images = torch.rand(8, 3, 4, 4)

        mixed, _, mixing = cf.mixup_batch(images, torch.arange(8), alpha=0)

        assert mixing == 0
        assert torch.equal(images, mixed)

    @given(seed=st.integers(0, 2**40), count=st.integers(1, 9), alpha=st.floats(0.01, 10))
    def test_draws_depend_on_the_generator(self, seed: int, count: int, alpha: float):
        """Draws depend only on the generator, and can be passed in."""
        images, labels = torch.rand(count, 2), torch.arange(count)

        first = cf.mixup_batch(images, labels, alpha=alpha, generator=torch.Generator().manual_seed(seed))
        second = cf.mixup_batch(images, labels, alpha=alpha, generator=torch.Generator().manual_seed(seed))
        replayed = cf.mixup_batch(images, labels, first[2], indices=first[1])

        assert torch.equal(first[0], second[0])
        assert torch.equal(first[1], second[1])
        assert first[2] == second[2] <= 0.5
        assert torch.equal(first[0], replayed[0])

    @pytest.mark.parametrize("format", [torch.contiguous_format, torch.channels_last])
    @pytest.mark.parametrize("dtype", FLOATS)
    def test_shape_dtype_and_memory_format_are_preserved(self, dtype: torch.dtype, format: torch.memory_format):
        """The output matches the input, which is not modified."""
        images = torch.rand(4, 3, 5, 6).to(dtype).contiguous(memory_format=format)
        labels = torch.arange(4)
        images_before, labels_before = images.clone(), labels.clone()

        mixed, _, _ = cf.mixup_batch(images, labels, alpha=1.0)

        assert mixed.shape == images.shape
        assert mixed.dtype == dtype
        assert mixed.is_contiguous(memory_format=format)
        assert torch.equal(images, images_before)
        assert torch.equal(labels, labels_before)


class TestDrawMixing:
    def test_is_at_most_one_half(self):
        """The partner's weight is never larger than the sample's."""
        draws = [cf.draw_mixing(1.0, generator=torch.Generator().manual_seed(seed)) for seed in range(50)]
        parts = [cf.draw_beta(1.0, generator=torch.Generator().manual_seed(seed)) for seed in range(50)]

        assert draws == [min(part, 1 - part) for part in parts]
        assert any(part > 0.5 for part in parts)


class TestMixup:
    @given(seed=st.integers(0, 2**40), alpha=st.floats(0, 5))
    def test_sum_of_probabilities_is_preserved(self, seed: int, alpha: float):
        """Rows still sum to one, and the target is not modified."""
        generator = torch.Generator().manual_seed(seed)
        target = torch.softmax(torch.randn(6, 4, generator=generator), 1)
        before = target.clone()

        _, soft = cf.mixup(torch.rand(6, 2), target, alpha, generator=generator)

        torch.testing.assert_close(soft.sum(1), torch.ones(6))
        assert torch.equal(target, before)

    def test_agrees_with_mixup_batch(self):
        """The loss of the mixed target is the mixed loss."""
        images, labels, logits = torch.rand(5, 2), torch.tensor([0, 1, 2, 0, 1]), torch.randn(5, 3)

        mixed, soft = cf.mixup(images, labels, 0.4, 3, generator=torch.Generator().manual_seed(1))
        expected, partner, mixing = cf.mixup_batch(
            images, labels, alpha=0.4, generator=torch.Generator().manual_seed(1)
        )

        loss = cf.soft_cross_entropy
        assert torch.equal(mixed, expected)
        torch.testing.assert_close(
            loss(logits, soft), (1 - mixing) * loss(logits, labels) + mixing * loss(logits, partner)
        )
