"""Targets and cross entropy compared with torch."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional as F

from composer import functional as cf

INTEGERS = [torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8]


class TestTargetTypes:
    @pytest.mark.parametrize("dtype", INTEGERS)
    def test_integers_are_class_ids(self, dtype: torch.dtype):
        """Every integer dtype is accepted for class ids."""
        ids = torch.zeros(4, dtype=dtype)

        assert cf.check_for_index_targets(ids)
        assert cf.infer_target_type(torch.rand(4, 3), ids) == "indices"

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bool, torch.bfloat16])
    def test_other_dtypes_are_not_class_ids(self, dtype: torch.dtype):
        """Floats and bools are not class ids."""
        assert not cf.check_for_index_targets(torch.zeros(4, dtype=dtype))

    @pytest.mark.parametrize(
        "targets", [torch.rand(4), torch.zeros(5, dtype=torch.int64), torch.rand(4, 2), torch.zeros(4, 1).long()]
    )
    def test_invalid_target_raises(self, targets: torch.Tensor):
        """The error states the valid shapes and the value's."""
        with pytest.raises(ValueError, match=r"class ids of shape \(4,\) or class probabilities of shape \(4, 3\)"):
            cf.infer_target_type(torch.rand(4, 3), targets)


class TestEnsureTargetsOneHot:
    @pytest.mark.parametrize("dtype", INTEGERS)
    def test_equals_torch_one_hot(self, dtype: torch.dtype, device: torch.device):
        """Ids are one-hot encoded."""
        ids = torch.tensor([2, 0, 1, 2], dtype=dtype, device=device)

        one_hot = cf.ensure_targets_one_hot(torch.rand(4, 3, device=device), ids)

        assert torch.equal(one_hot, F.one_hot(ids.long(), 3).float())

    def test_ignored_ids_become_zeros(self):
        """A negative id gives zeros."""
        one_hot = cf.ensure_targets_one_hot(torch.rand(3, 2), torch.tensor([-100, 1, -1]))

        assert one_hot.tolist() == [[0, 0], [0, 1], [0, 0]]

    def test_integer_one_hot_becomes_floating_point(self):
        """Integer ones and zeros in the input's shape are converted to probabilities."""
        target = torch.eye(3, dtype=torch.int64)

        assert torch.equal(cf.ensure_targets_one_hot(torch.rand(3, 3), target), torch.eye(3))

    @pytest.mark.parametrize(
        ("input_dtype", "expected"),
        [(torch.float64, torch.float64), (torch.float32, torch.float32), (torch.bfloat16, torch.float32)],
    )
    def test_dtype_is_at_least_float32(self, input_dtype: torch.dtype, expected: torch.dtype):
        """Labels for smoothing or mixing have at least float32 precision."""
        assert cf.ensure_targets_one_hot(torch.rand(2, 3).to(input_dtype), torch.tensor([0, 1])).dtype == expected


class TestSoftCrossEntropy:
    @pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
    @pytest.mark.parametrize("weight", [None, torch.tensor([1.0, 2.0, 0.5])])
    def test_class_ids_equal_torch(self, reduction: str, weight: torch.Tensor | None):
        """With class ids it equals cross_entropy, including ignored ids."""
        logits, ids = torch.randn(4, 3), torch.tensor([0, 7, 2, 1])

        loss = cf.soft_cross_entropy(logits, ids, weight, ignore_index=7, reduction=reduction)

        assert torch.equal(loss, F.cross_entropy(logits, ids, weight, ignore_index=7, reduction=reduction))

    @pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
    def test_probabilities_match_the_formula(self, reduction: str):
        """With probabilities it is minus the sum of probability times log-softmax, also for pixels."""
        logits, target = torch.randn(4, 3, 2), torch.softmax(torch.randn(4, 3, 2), 1)

        loss = cf.soft_cross_entropy(logits, target, reduction=reduction)

        each = -(target * torch.log_softmax(logits, 1)).sum(1)
        expected = {"none": each, "mean": each.mean(), "sum": each.sum()}[reduction]
        torch.testing.assert_close(loss, expected)

    @given(seed=st.integers(0, 2**40), classes=st.integers(1, 8), count=st.integers(1, 8))
    def test_one_hot_equals_class_ids(self, seed: int, classes: int, count: int):
        """Both forms of labels give the same loss."""
        generator = torch.Generator().manual_seed(seed)
        logits = torch.randn(count, classes, generator=generator)
        ids = torch.randint(classes, (count,), generator=generator)

        torch.testing.assert_close(
            cf.soft_cross_entropy(logits, cf.ensure_targets_one_hot(logits, ids)), cf.soft_cross_entropy(logits, ids)
        )

    def test_float32_labels_with_bfloat16_logits(self):
        """Low-precision logits accept full-precision labels."""
        logits = torch.randn(4, 3, dtype=torch.bfloat16, requires_grad=True)

        loss = cf.soft_cross_entropy(logits, cf.smooth_labels(logits, torch.tensor([0, 1, 2, 0])))
        loss.backward()

        expected = F.cross_entropy(logits.detach().float(), torch.tensor([0, 1, 2, 0]), label_smoothing=0.1)
        torch.testing.assert_close(loss.detach().float(), expected, atol=0.02, rtol=0.02)
        assert logits.grad is not None

    @pytest.mark.parametrize("smoothing", [0.0, 0.1])
    def test_ignored_rows_are_excluded_from_the_mean(self, smoothing: float):
        """Rows of zeros, as from ignored class ids, are excluded as in torch."""
        logits, ids = torch.randn(4, 3, 5, dtype=torch.float64), torch.randint(-1, 3, (4, 5))
        ids[:2, 0] = torch.tensor([-1, 0])
        ids[ids < 0] = -100

        loss = cf.soft_cross_entropy(logits, cf.smooth_labels(logits, ids, smoothing))

        torch.testing.assert_close(loss, F.cross_entropy(logits, ids, label_smoothing=smoothing))

    def test_mean_of_ignored_rows_is_nan(self):
        """The mean is nan, as in torch."""
        assert cf.soft_cross_entropy(torch.rand(2, 3), torch.zeros(2, 3)).isnan()
