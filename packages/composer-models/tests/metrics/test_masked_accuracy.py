"""Tests of composer.metrics.MaskedAccuracy."""

import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torchmetrics.classification import MulticlassAccuracy

from composer.metrics import MaskedAccuracy


class TestMaskedAccuracy:
    @given(
        pairs=st.lists(st.tuples(st.integers(0, 2), st.sampled_from([-100, 0, 1, 2])), min_size=1, max_size=30),
        cuts=st.lists(st.integers(0, 30), max_size=4),
    )
    def test_does_not_depend_on_batch_split(self, pairs, cuts):
        """The value is the fraction of correct predictions among all counted targets."""
        scores = torch.eye(3)[[guess for guess, _ in pairs]]
        targets = torch.tensor([truth for _, truth in pairs])
        metric = MaskedAccuracy()
        edges = [0, *sorted(min(cut, len(pairs)) for cut in cuts), len(pairs)]

        for start, stop in itertools.pairwise(edges):
            metric.update(scores[start:stop], targets[start:stop])

        counted = [guess == truth for guess, truth in pairs if truth != -100]
        expected = sum(counted) / len(counted) if counted else math.nan
        assert metric.compute().item() == pytest.approx(expected, nan_ok=True)

    def test_tokens(self):
        """Scores (N, L, V) with targets (N, L) of a language model, also in a model's output."""
        scores, targets = torch.rand(2, 4, 6), torch.tensor([[0, 1, -100, 5], [3, -100, 2, 2]])
        alone, output = MaskedAccuracy(), MaskedAccuracy()

        alone.update(scores, targets)
        output.update({"logits": scores}, targets)

        right = (scores.argmax(-1) == targets).sum().item()
        assert alone.compute() == output.compute() == torch.tensor(right / 6)

    def test_pixels(self):
        """Scores (N, C, H, W) with targets (N, H, W) equal torchmetrics' accuracy."""
        scores, targets = torch.rand(2, 3, 4, 5), torch.randint(3, (2, 4, 5))
        targets[0, 0] = 255
        actual, expected = MaskedAccuracy(ignore_index=255), MulticlassAccuracy(3, average="micro", ignore_index=255)

        for metric in (actual, expected):
            metric.update(scores, targets)

        assert actual.compute().item() == pytest.approx(expected.compute().item())

    def test_mismatched_targets_raise(self):
        """Targets of another shape raise."""
        with pytest.raises(ValueError, match=r"got \(2, 3\) for \(3,\)"):
            MaskedAccuracy().update(torch.zeros(2, 3), torch.zeros(3, dtype=torch.long))
