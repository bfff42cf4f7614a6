"""Tests of composer.metrics.BinaryF1Score."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from composer.metrics import BinaryF1Score


def _f1_by_hand(pairs):
    """Return 2 TP / (2 TP + FP + FN), 0 where nothing is positive."""
    hits = sum(guess == truth == 1 for guess, truth in pairs)
    misses = sum(guess != truth for guess, truth in pairs)
    return 2 * hits / (2 * hits + misses) if hits + misses else 0.0


class TestBinaryF1Score:
    @given(st.lists(st.tuples(st.integers(0, 1), st.integers(0, 1)), min_size=1, max_size=30), st.integers(1, 30))
    def test_equals_the_formula_whatever_the_split(self, pairs, size):
        """Two logits a sample, in batches of any size, give the F1 score of all of them."""
        logits = torch.eye(2)[[guess for guess, _ in pairs]] - 0.5
        targets = torch.tensor([truth for _, truth in pairs])
        metric = BinaryF1Score()

        for scores, labels in zip(logits.split(size), targets.split(size), strict=True):
            metric.update(scores, labels)

        assert metric.compute().item() == pytest.approx(_f1_by_hand(pairs))

    @pytest.mark.parametrize("shape", [(4,), (4, 1)])
    def test_one_logit_is_positive_or_not(self, shape):
        """One logit a sample is a logit even where all lie between 0 and 1; also within a model's output."""
        logits, targets = torch.tensor([0.2, 0.3, 0.1, -0.4]).reshape(shape), torch.tensor([1, 0, 1, 1])
        metric = BinaryF1Score()

        metric.update({"logits": logits[:2]}, targets[:2])
        metric.update(logits[2:], targets[2:])

        assert metric.compute().item() == pytest.approx(_f1_by_hand([(1, 1), (1, 0), (1, 1), (0, 1)]))

    def test_ignored_targets(self):
        """A padded sample does not count, and keeps its label."""
        targets = torch.tensor([1, -100, 0])
        metric = BinaryF1Score()

        metric.update(torch.tensor([3.0, 3.0, -3.0]), targets)

        assert metric.compute() == 1.0
        assert targets.tolist() == [1, -100, 0]

    def test_what_does_not_fit(self):
        """Three classes are refused."""
        with pytest.raises(ValueError, match=r"takes logits \(N, 2\).*got \(4, 3\) with \(4,\)"):
            BinaryF1Score().update(torch.zeros(4, 3), torch.zeros(4, dtype=torch.long))
