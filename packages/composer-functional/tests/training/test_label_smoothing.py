"""Label smoothing compared with torch and the formula."""

from __future__ import annotations

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

    @pytest.mark.parametrize(
        ("logits", "expected"),
        [(torch.float64, torch.float64), (torch.float16, torch.float32), (torch.bfloat16, torch.float32)],
    )
    def test_dtype_is_at_least_float32(self, logits: torch.dtype, expected: torch.dtype):
        """Row sums are accurate for any precision of the logits."""
        smoothed = cf.smooth_labels(torch.zeros(2, 1000, dtype=logits), torch.tensor([0, 1]))

        assert smoothed.dtype == expected
        assert (smoothed.sum(1) - 1).abs().max() < 1e-5
