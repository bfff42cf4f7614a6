"""Tests of composer.metrics.BinaryF1Score."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from composer.metrics import BinaryF1Score


def _reference_f1(pairs):
    """Return 2 TP / (2 TP + FP + FN), 0 without positives."""
    hits = sum(guess == truth == 1 for guess, truth in pairs)
    misses = sum(guess != truth for guess, truth in pairs)
    return 2 * hits / (2 * hits + misses) if hits + misses else 0.0


class TestBinaryF1Score:
    @given(st.lists(st.tuples(st.integers(0, 1), st.integers(0, 1)), min_size=1, max_size=30), st.integers(1, 30))
    def test_does_not_depend_on_batch_split(self, pairs, size):
        """Two logits per sample, in batches of any size, give the F1 score of all samples."""
        logits = torch.eye(2)[[guess for guess, _ in pairs]] - 0.5
        targets = torch.tensor([truth for _, truth in pairs])
        metric = BinaryF1Score()

        for scores, labels in zip(logits.split(size), targets.split(size), strict=True):
            metric.update(scores, labels)

        assert metric.compute().item() == pytest.approx(_reference_f1(pairs))

    @pytest.mark.parametrize("shape", [(4,), (4, 1)])
    def test_single_logit(self, shape):
        """A single output per sample is a logit, also if all are in [0, 1]; also within a model's output."""
        logits, targets = torch.tensor([0.2, 0.3, 0.1, -0.4]).reshape(shape), torch.tensor([1, 0, 1, 1])
        metric = BinaryF1Score()

        metric.update({"logits": logits[:2]}, targets[:2])
        metric.update(logits[2:], targets[2:])

        assert metric.compute().item() == pytest.approx(_reference_f1([(1, 1), (1, 0), (1, 1), (0, 1)]))

    def test_padded_samples_are_ignored(self):
        """Padded samples are not counted."""
        targets = torch.tensor([1, -100, 0])
        metric = BinaryF1Score()

        metric.update(torch.tensor([3.0, 3.0, -3.0]), targets)

        assert metric.compute() == 1.0
        assert targets.tolist() == [1, -100, 0]

    def test_more_than_two_classes_raise(self):
        """Three classes raise."""
        with pytest.raises(ValueError, match=r"takes logits \(N, 2\).*got \(4, 3\) with \(4,\)"):
            BinaryF1Score().update(torch.zeros(4, 3), torch.zeros(4, dtype=torch.long))
