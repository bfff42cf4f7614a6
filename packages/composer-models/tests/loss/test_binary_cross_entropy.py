"""composer.loss.binary_cross_entropy_with_logits."""

import math

import pytest
import torch
from torch.nn import functional as F

from composer.loss import binary_cross_entropy_with_logits


def _reference(logits, target):
    """Return -(t log s + (1 - t) log(1 - s)) of each element, in Python floats."""
    rows = []
    for row, truths in zip(logits.tolist(), target.tolist(), strict=True):
        fractions = [1 / (1 + math.exp(-x)) for x in row]
        rows.append([-(t * math.log(s) + (1 - t) * math.log(1 - s)) for s, t in zip(fractions, truths, strict=True)])
    return rows


LOGITS = torch.tensor([[0.5, -1.0, 2.0], [-0.3, 0.1, 0.0]])
ONE_HOT = torch.tensor([[0.0, 0.0, 1.0], [1.0, 0.0, 0.0]])


class TestBinaryCrossEntropy:
    def test_equals_the_formula(self):
        """By default losses are summed over classes and averaged over samples."""
        loss = binary_cross_entropy_with_logits(LOGITS, ONE_HOT)

        expected = math.fsum(x for row in _reference(LOGITS, ONE_HOT) for x in row) / 2
        assert loss.item() == pytest.approx(expected, rel=1e-6)

    @pytest.mark.parametrize("dtype", [torch.int64, torch.uint8])
    def test_class_ids_are_one_hot(self, dtype):
        """A class id is a positive label for its class only."""
        by_ids = binary_cross_entropy_with_logits(LOGITS, torch.tensor([2, 0], dtype=dtype))

        assert torch.equal(by_ids, binary_cross_entropy_with_logits(LOGITS, ONE_HOT))

    @pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
    @pytest.mark.parametrize("scale", [True, False])
    def test_reductions_and_weights_match_torch(self, reduction, scale):
        """Weights and reductions match torch's, divided by the number of samples."""
        weight, pos_weight = torch.tensor([[2.0], [0.5]]), torch.tensor([1.0, 3.0, 0.1])

        loss = binary_cross_entropy_with_logits(LOGITS, ONE_HOT, weight, reduction, pos_weight, scale)

        expected = F.binary_cross_entropy_with_logits(
            LOGITS, ONE_HOT, weight=weight, pos_weight=pos_weight, reduction=reduction
        )
        torch.testing.assert_close(loss, expected / 2 if scale else expected)

    def test_pixels(self):
        """With ids (N, H, W) the loss is summed over classes and pixels."""
        logits, target = torch.randn(2, 3, 4, 5), torch.randint(3, (2, 4, 5))

        loss = binary_cross_entropy_with_logits(logits, target)

        one_hot = F.one_hot(target, 3).movedim(-1, 1).float()
        expected = F.binary_cross_entropy_with_logits(logits, one_hot, reduction="sum") / 2
        torch.testing.assert_close(loss, expected)

    def test_mismatched_targets_raise(self):
        """Targets that are neither ids nor probabilities raise, with both shapes."""
        with pytest.raises(ValueError, match=r"targets must be integer class ids of shape \(2,\)"):
            binary_cross_entropy_with_logits(LOGITS, torch.zeros(2, 4))
