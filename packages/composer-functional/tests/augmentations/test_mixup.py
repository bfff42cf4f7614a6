"""MixUp compared with the formula."""

from __future__ import annotations

import math

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

    def test_names_the_partners_weight(self):
        """``mixing`` is the partner's fraction of a sample, in Composer's place, the third."""
        images, swap = torch.stack([torch.zeros(1, 2, 4), torch.ones(1, 2, 4)]), torch.tensor([1, 0])

        result = cf.mixup_batch(images, torch.arange(2), 0.25, indices=swap)

        assert result.input[0].mean() == result.mixing == result[2] == 0.25
        assert result.target is result[1]

    def test_mixing_zero_returns_the_input(self):
        """With mixing 0 samples are bit-identical."""
        images = torch.rand(8, 3, 4, 4)

        mixed, _, _ = cf.mixup_batch(images, torch.arange(8), mixing=0.0)

        assert torch.equal(images, mixed)

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

    def test_gradients_flow_to_both_samples(self):
        """The gradient is distributed to a sample and its partner by their weights."""
        images = torch.rand(2, 3, dtype=torch.float64, requires_grad=True)
        swap = torch.tensor([1, 0])

        assert torch.autograd.gradcheck(lambda x: cf.mixup_batch(x, x, 0.3, indices=swap)[0], images)

    def test_compiles_to_one_graph(self):
        """With draws as inputs, one graph serves all weights."""
        compiled = torch.compile(cf.mixup_batch, fullgraph=True, backend="eager")
        images, labels, partners = torch.rand(4, 3), torch.arange(4), torch.tensor([1, 0, 3, 2])

        for mixing in (0.25, 0.3, 0.7):
            mixed, partner_labels, _ = compiled(images, labels, mixing, indices=partners)

            torch.testing.assert_close(mixed, (1 - mixing) * images + mixing * images[partners])
            assert torch.equal(partner_labels, partners)

    @pytest.mark.parametrize("mixing", [-0.1, 1.1, math.nan])
    def test_mixing_out_of_range_raises(self, mixing: float):
        """The error states the parameter, its range and the value."""
        with pytest.raises(ValueError, match=rf"mixing must lie in \[0, 1\], got {mixing}"):
            cf.mixup_batch(torch.rand(2, 3), torch.arange(2), mixing)

    def test_tensor_mixing_raises(self):
        """Reading a tensor would synchronize."""
        with pytest.raises(TypeError, match="mixing must be a number"):
            cf.mixup_batch(torch.rand(2, 3), torch.arange(2), torch.tensor(0.5))

    def test_integer_samples_raise(self):
        """Bytes cannot be blended; the error states the remedy."""
        with pytest.raises(TypeError, match=r"input must be a floating point tensor, got torch\.uint8"):
            cf.mixup_batch(torch.zeros(2, 3, dtype=torch.uint8), torch.arange(2))

    @pytest.mark.parametrize("images", [torch.rand(0, 3), torch.tensor(1.0)])
    def test_empty_batch_raises(self, images: torch.Tensor):
        """At least one sample is required."""
        with pytest.raises(ValueError, match=r"input must be a batch \(N, ...\) with at least one sample"):
            cf.mixup_batch(images, torch.arange(0))

    def test_invalid_type_raises(self):
        """Samples, targets and partners are tensors, and partners are int64."""
        images, labels = torch.rand(2, 3), torch.arange(2)

        with pytest.raises(TypeError, match="input must be a floating point tensor, got list"):
            cf.mixup_batch([[1.0]], labels)
        with pytest.raises(TypeError, match=r"target must be a tensor .* got list"):
            cf.mixup_batch(images, [0, 1])
        for indices, kind in (([1, 0], "list"), (labels.int(), "torch.int32"), (labels.bool(), "torch.bool")):
            with pytest.raises(TypeError, match=f"indices must be an int64 tensor, .* got {kind}"):
                cf.mixup_batch(images, labels, indices=indices)

    def test_mismatched_target_raises(self):
        """Samples and targets must have the same length."""
        with pytest.raises(ValueError, match="target must have the input's 2 samples"):
            cf.mixup_batch(torch.rand(2, 3), torch.arange(3))

    def test_mismatched_partners_raise(self):
        """Each sample needs one partner."""
        with pytest.raises(ValueError, match="indices must be a permutation of the 2 samples"):
            cf.mixup_batch(torch.rand(2, 3), torch.arange(2), indices=torch.arange(3))

    def test_negative_alpha_raises(self):
        """Alpha parametrizes a Beta distribution."""
        with pytest.raises(ValueError, match=r"alpha must be at least 0, got -0.2"):
            cf.mixup_batch(torch.rand(2, 3), torch.arange(2), alpha=-0.2)


class TestDrawMixing:
    def test_is_at_most_one_half(self):
        """The partner's weight is never larger than the sample's."""
        draws = [cf.draw_mixing(1.0, generator=torch.Generator().manual_seed(seed)) for seed in range(50)]
        parts = [cf.draw_beta(1.0, generator=torch.Generator().manual_seed(seed)) for seed in range(50)]

        assert draws == [min(part, 1 - part) for part in parts]
        assert any(part > 0.5 for part in parts)


class TestMixup:
    def test_class_ids_give_probabilities(self):
        """Each row has the weights of the sample's class and the partner's."""
        images, labels = torch.rand(3, 2), torch.tensor([2, 0, 1])
        partners = torch.tensor([1, 2, 0])

        mixed, soft = cf.mixup(images, labels, num_classes=3, mixing=0.25, indices=partners)

        torch.testing.assert_close(mixed, 0.75 * images + 0.25 * images[partners])
        torch.testing.assert_close(soft, torch.tensor([[0.25, 0, 0.75], [0.75, 0.25, 0], [0, 0.75, 0.25]]))

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

    def test_class_ids_without_num_classes_raise(self):
        """The number of classes cannot be inferred from ids."""
        with pytest.raises(ValueError, match="num_classes must be given"):
            cf.mixup(torch.rand(2, 3), torch.arange(2))

    @pytest.mark.parametrize(
        "target", [torch.zeros(2, 3, dtype=torch.int64), torch.ones(2, 3, dtype=torch.bool), torch.arange(2)[:, None]]
    )
    def test_other_integer_targets_raise(self, target: torch.Tensor):
        """Class ids have one dimension; probabilities are floating point."""
        with pytest.raises(ValueError, match=rf"target must be class ids \(N,\), .* got {target.dtype} of shape \(2, "):
            cf.mixup(torch.rand(2, 3), target, num_classes=3)

    def test_lists_raise(self):
        """Data and targets are tensors."""
        with pytest.raises(TypeError, match="data must be a floating point tensor, got list"):
            cf.mixup([[1.0]], torch.arange(1), num_classes=3)
        with pytest.raises(TypeError, match=r"target must be a tensor .* got list"):
            cf.mixup(torch.rand(2, 3), [0, 1], num_classes=3)
