"""Targets and cross entropy against torch."""

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
        """Every integer dtype can hold class ids."""
        ids = torch.zeros(4, dtype=dtype)

        assert cf.check_for_index_targets(ids)
        assert cf.infer_target_type(torch.rand(4, 3), ids) == "indices"

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bool, torch.bfloat16])
    def test_others_are_not(self, dtype: torch.dtype):
        """Neither floats nor booleans number classes."""
        assert not cf.check_for_index_targets(torch.zeros(4, dtype=dtype))

    def test_pixels_have_ids_too(self):
        """The class dimension is the second, whatever follows."""
        logits = torch.rand(2, 5, 7, 8)

        assert cf.infer_target_type(logits, torch.zeros(2, 7, 8, dtype=torch.int64)) == "indices"
        assert cf.infer_target_type(logits, torch.rand(2, 5, 7, 8)) == "probabilities"

    @pytest.mark.parametrize(
        "targets", [torch.rand(4), torch.zeros(5, dtype=torch.int64), torch.rand(4, 2), torch.zeros(4, 1).long()]
    )
    def test_what_is_neither_is_refused(self, targets: torch.Tensor):
        """The message says which shapes would do and what came."""
        with pytest.raises(ValueError, match=r"class ids of shape \(4,\) or class probabilities of shape \(4, 3\)"):
            cf.infer_target_type(torch.rand(4, 3), targets)

    def test_scores_without_classes_are_refused(self):
        """A vector has no batch."""
        with pytest.raises(ValueError, match=r"input must have shape \(N, C, ...\), got \(3,\)"):
            cf.infer_target_type(torch.rand(3), torch.rand(3))


class TestEnsureTargetsOneHot:
    @pytest.mark.parametrize("dtype", INTEGERS)
    def test_equals_torch_one_hot(self, dtype: torch.dtype, device: torch.device):
        """Ids become a one in their column."""
        ids = torch.tensor([2, 0, 1, 2], dtype=dtype, device=device)

        one_hot = cf.ensure_targets_one_hot(torch.rand(4, 3, device=device), ids)

        assert torch.equal(one_hot, F.one_hot(ids.long(), 3).float())

    def test_classes_come_second(self):
        """For pixels, the class dimension is moved to its place."""
        ids = torch.randint(5, (2, 3, 4))

        one_hot = cf.ensure_targets_one_hot(torch.rand(2, 5, 3, 4), ids)

        assert torch.equal(one_hot, F.one_hot(ids, 5).movedim(-1, 1).float())

    def test_ignored_ids_become_zeros(self):
        """A negative id belongs to no class."""
        one_hot = cf.ensure_targets_one_hot(torch.rand(3, 2), torch.tensor([-100, 1, -1]))

        assert one_hot.tolist() == [[0, 0], [0, 1], [0, 0]]

    def test_probabilities_pass_through(self):
        """What is already right is not copied."""
        target = torch.rand(4, 3)

        assert cf.ensure_targets_one_hot(torch.rand(4, 3), target) is target

    def test_integer_one_hot_becomes_floating_point(self):
        """Ones and zeros in the shape of the input are probabilities, whatever their dtype."""
        target = torch.eye(3, dtype=torch.int64)

        assert torch.equal(cf.ensure_targets_one_hot(torch.rand(3, 3), target), torch.eye(3))

    def test_number_of_classes_can_be_given(self):
        """More classes than scores make wider rows."""
        assert cf.ensure_targets_one_hot(torch.rand(2, 3), torch.tensor([0, 4]), num_classes=6).shape == (2, 6)

    @pytest.mark.parametrize(
        ("input_dtype", "expected"),
        [(torch.float64, torch.float64), (torch.float32, torch.float32), (torch.bfloat16, torch.float32)],
    )
    def test_dtype_is_at_least_float32(self, input_dtype: torch.dtype, expected: torch.dtype):
        """Labels to be smoothed or mixed keep enough digits."""
        assert cf.ensure_targets_one_hot(torch.rand(2, 3).to(input_dtype), torch.tensor([0, 1])).dtype == expected


class TestSoftCrossEntropy:
    @pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
    @pytest.mark.parametrize("weight", [None, torch.tensor([1.0, 2.0, 0.5])])
    def test_class_ids_as_torch(self, reduction: str, weight: torch.Tensor | None):
        """With class ids it is cross_entropy, ignored ids included."""
        logits, ids = torch.randn(4, 3), torch.tensor([0, 7, 2, 1])

        loss = cf.soft_cross_entropy(logits, ids, weight, ignore_index=7, reduction=reduction)

        assert torch.equal(loss, F.cross_entropy(logits, ids, weight, ignore_index=7, reduction=reduction))

    @pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
    def test_probabilities_by_hand(self, reduction: str):
        """With probabilities it is minus the sum of probability times log-softmax, for pixels too."""
        logits, target = torch.randn(4, 3, 2), torch.softmax(torch.randn(4, 3, 2), 1)

        loss = cf.soft_cross_entropy(logits, target, reduction=reduction)

        each = -(target * torch.log_softmax(logits, 1)).sum(1)
        expected = {"none": each, "mean": each.mean(), "sum": each.sum()}[reduction]
        torch.testing.assert_close(loss, expected)

    @given(seed=st.integers(0, 2**40), classes=st.integers(1, 8), count=st.integers(1, 8))
    def test_one_hot_equals_class_ids(self, seed: int, classes: int, count: int):
        """Both ways to write a label give the same loss."""
        generator = torch.Generator().manual_seed(seed)
        logits = torch.randn(count, classes, generator=generator)
        ids = torch.randint(classes, (count,), generator=generator)

        torch.testing.assert_close(
            cf.soft_cross_entropy(logits, cf.ensure_targets_one_hot(logits, ids)), cf.soft_cross_entropy(logits, ids)
        )

    @pytest.mark.parametrize("dtype", INTEGERS)
    def test_every_integer_will_do(self, dtype: torch.dtype):
        """Ids need not be int64."""
        logits, ids = torch.randn(3, 4), torch.tensor([0, 3, 1])

        assert torch.equal(cf.soft_cross_entropy(logits, ids.to(dtype)), F.cross_entropy(logits, ids))

    def test_float32_labels_beside_bfloat16_logits(self):
        """Low-precision logits take labels in full precision."""
        logits = torch.randn(4, 3, dtype=torch.bfloat16, requires_grad=True)

        loss = cf.soft_cross_entropy(logits, cf.smooth_labels(logits, torch.tensor([0, 1, 2, 0])))
        loss.backward()

        expected = F.cross_entropy(logits.detach().float(), torch.tensor([0, 1, 2, 0]), label_smoothing=0.1)
        torch.testing.assert_close(loss.detach().float(), expected, atol=0.02, rtol=0.02)
        assert logits.grad is not None

    def test_integer_probabilities(self):
        """A one-hot matrix of integers counts as probabilities."""
        logits = torch.randn(3, 3)

        torch.testing.assert_close(
            cf.soft_cross_entropy(logits, torch.eye(3, dtype=torch.int64)), F.cross_entropy(logits, torch.arange(3))
        )

    def test_compiles_without_a_break(self):
        """One graph with class ids and one with probabilities."""
        compiled = torch.compile(cf.soft_cross_entropy, fullgraph=True, backend="eager")
        logits, ids = torch.randn(4, 3), torch.tensor([0, 1, 2, 0])

        assert torch.equal(compiled(logits, ids), F.cross_entropy(logits, ids))
        torch.testing.assert_close(compiled(logits, F.one_hot(ids, 3).float()), F.cross_entropy(logits, ids))

    @pytest.mark.parametrize("smoothing", [0.0, 0.1])
    def test_ignored_rows_do_not_count_in_the_mean(self, smoothing: float):
        """Rows of zeros, which are what ignored class ids become, count as ignored ids do in torch."""
        logits, ids = torch.randn(4, 3, 5, dtype=torch.float64), torch.randint(-1, 3, (4, 5))
        ids[:2, 0] = torch.tensor([-1, 0])
        ids[ids < 0] = -100

        loss = cf.soft_cross_entropy(logits, cf.smooth_labels(logits, ids, smoothing))

        torch.testing.assert_close(loss, F.cross_entropy(logits, ids, label_smoothing=smoothing))

    def test_only_ignored_rows_have_no_mean(self):
        """The mean of nothing is nan, as that of ignored class ids is."""
        assert cf.soft_cross_entropy(torch.rand(2, 3), torch.zeros(2, 3)).isnan()

    def test_bad_reduction_is_refused(self):
        """The message lists what there is."""
        with pytest.raises(ValueError, match=r"reduction must be .* got 'average'"):
            cf.soft_cross_entropy(torch.rand(2, 3), torch.tensor([0, 1]), reduction="average")
