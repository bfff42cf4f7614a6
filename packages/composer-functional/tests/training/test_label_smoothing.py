"""Label smoothing compared with torch and the formula."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional as F

from composer import functional as cf


class TestSmoothLabels:
    @pytest.mark.parametrize("smoothing", [0.0, 0.1, 0.5, 1.0])
    @pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.uint8])
    def test_loss_equals_torch(self, smoothing: float, dtype: torch.dtype, device: torch.device):
        """The loss and gradient equal cross_entropy(label_smoothing=)."""
        logits = torch.randn(6, 5, device=device, dtype=torch.float64, requires_grad=True)
        ids = torch.tensor([0, 4, 2, 1, 3, 4], device=device)

        actual = cf.soft_cross_entropy(logits, cf.smooth_labels(logits, ids.to(dtype), smoothing))
        expected = F.cross_entropy(logits, ids, label_smoothing=smoothing)

        torch.testing.assert_close(actual, expected)
        torch.testing.assert_close(*(torch.autograd.grad(loss, logits)[0] for loss in (actual, expected)))

    def test_pixels(self):
        """For pixel class ids the result is (1 - smoothing) * one_hot + smoothing / C."""
        logits, ids = torch.randn(2, 4, 3, 3), torch.randint(4, (2, 3, 3))

        smoothed = cf.smooth_labels(logits, ids, 0.2)

        torch.testing.assert_close(smoothed, 0.8 * F.one_hot(ids, 4).movedim(-1, 1) + 0.05)

    def test_ignored_ids_become_zeros(self):
        """An ignored label has no mass, and does not affect the loss."""
        logits, ids = torch.randn(3, 4), torch.tensor([1, -100, 2])

        smoothed = cf.smooth_labels(logits, ids, 0.2)

        assert smoothed[1].tolist() == [0, 0, 0, 0]
        torch.testing.assert_close(
            cf.soft_cross_entropy(logits, smoothed, reduction="sum"),
            F.cross_entropy(logits, ids, label_smoothing=0.2, reduction="sum"),
        )

    @given(seed=st.integers(0, 2**40), smoothing=st.floats(0, 1))
    def test_sum_of_probabilities_is_preserved(self, seed: int, smoothing: float):
        """Rows keep their sum, and the target is not modified."""
        target = torch.rand(5, 4, generator=torch.Generator().manual_seed(seed))
        target[0] = 0
        before = target.clone()

        smoothed = cf.smooth_labels(torch.rand(5, 4), target, smoothing)

        torch.testing.assert_close(smoothed.sum(1), target.sum(1))
        torch.testing.assert_close(smoothed, (1 - smoothing) * target + smoothing * target.mean(1, keepdim=True))
        assert torch.equal(target, before)

    @given(seed=st.integers(0, 2**40), smoothing=st.floats(0, 1))
    def test_ids_and_one_hot_agree(self, seed: int, smoothing: float):
        """Both forms of labels are smoothed alike."""
        ids = torch.randint(4, (5,), generator=torch.Generator().manual_seed(seed))
        logits = torch.rand(5, 4)

        torch.testing.assert_close(
            cf.smooth_labels(logits, ids, smoothing), cf.smooth_labels(logits, F.one_hot(ids, 4), smoothing)
        )

    def test_smoothing_zero_is_the_identity(self):
        """With smoothing 0 labels are bit-identical."""
        logits, target = torch.rand(3, 4), torch.rand(3, 4)

        assert torch.equal(cf.smooth_labels(logits, target, 0.0), target)
        assert torch.equal(cf.smooth_labels(logits, torch.tensor([0, 3, 1]), 0.0), torch.eye(4)[[0, 3, 1]])

    @pytest.mark.parametrize(
        ("logits", "expected"),
        [(torch.float64, torch.float64), (torch.float16, torch.float32), (torch.bfloat16, torch.float32)],
    )
    def test_dtype_is_at_least_float32(self, logits: torch.dtype, expected: torch.dtype):
        """Row sums are accurate for any precision of the logits."""
        smoothed = cf.smooth_labels(torch.zeros(2, 1000, dtype=logits), torch.tensor([0, 1]))

        assert smoothed.dtype == expected
        assert (smoothed.sum(1) - 1).abs().max() < 1e-5

    def test_memory_format_is_that_of_the_logits(self):
        """Channels-last logits give channels-last labels."""
        logits = torch.rand(2, 4, 3, 3).contiguous(memory_format=torch.channels_last)

        smoothed = cf.smooth_labels(logits, torch.randint(4, (2, 3, 3)))

        assert smoothed.is_contiguous(memory_format=torch.channels_last)

    def test_no_gradient_is_tracked_for_ids(self):
        """Labels do not depend on the logits' values."""
        logits = torch.rand(2, 4, requires_grad=True)

        assert not cf.smooth_labels(logits, torch.tensor([0, 1])).requires_grad

    def test_compiles_to_one_graph(self):
        """One graph is compiled for two amounts."""
        compiled = torch.compile(cf.smooth_labels, fullgraph=True, backend="eager")
        logits, ids = torch.randn(4, 3), torch.tensor([0, 1, 2, 0])

        for smoothing in (0.1, 0.3):
            expected = (1 - smoothing) * F.one_hot(ids, 3) + smoothing / 3
            torch.testing.assert_close(compiled(logits, ids, smoothing), expected)

    @pytest.mark.parametrize("smoothing", [-0.1, 1.5, math.nan])
    def test_smoothing_out_of_range_raises(self, smoothing: float):
        """The error states the parameter, its range and the value."""
        with pytest.raises(ValueError, match=rf"smoothing must lie in \[0, 1\], got {smoothing}"):
            cf.smooth_labels(torch.rand(2, 3), torch.tensor([0, 1]), smoothing)

    def test_mismatched_target_raises(self):
        """Logits and targets must have the same length."""
        with pytest.raises(ValueError, match=r"class ids of shape \(4,\)"):
            cf.smooth_labels(torch.rand(4, 3), torch.tensor([0, 1]))

    def test_non_tensors_raise(self):
        """The error states the type of the value."""
        with pytest.raises(TypeError, match=r"logits must be a tensor of shape \(N, C, ...\), got int"):
            cf.smooth_labels(3, torch.tensor([0, 1]))
        with pytest.raises(TypeError, match="targets must be a tensor, got"):
            cf.smooth_labels(torch.rand(2, 3), [0, 1])

    def test_logits_without_class_dimension_raise(self):
        """A vector has no batch dimension."""
        with pytest.raises(ValueError, match=r"shape \(N, C, ...\)"):
            cf.smooth_labels(torch.rand(3), torch.tensor(0))
