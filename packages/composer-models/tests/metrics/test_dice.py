"""Tests of composer.metrics.Dice."""

import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sklearn.metrics import f1_score
from torchmetrics.classification import MulticlassF1Score

from composer.metrics import Dice


def _reference(guesses, truths):
    """Return the mean over the classes seen of 2 |P and T| / (|P| + |T|), from sets of pixels."""
    fractions = []
    for label in sorted({*guesses, *truths}):
        predicted, actual = ({i for i, one in enumerate(ids) if one == label} for ids in (guesses, truths))
        fractions.append(2 * len(predicted & actual) / (len(predicted) + len(actual)))
    return math.fsum(fractions) / len(fractions) if fractions else math.nan


def _masks(seed, shape=(3, 6, 5), classes=4):
    generator = torch.Generator().manual_seed(seed)
    return (torch.randint(classes, shape, generator=generator) for _ in range(2))


class TestDice:
    def test_equals_scikit_learn_and_torchmetrics(self):
        """The value is the macro average of the F1 scores."""
        guess, target = _masks(seed=0)
        metric, second = Dice(num_classes=4), MulticlassF1Score(4, average="macro")

        metric.update(guess, target)
        second.update(guess, target)

        expected = f1_score(target.flatten().numpy(), guess.flatten().numpy(), average="macro")
        assert metric.compute().item() == pytest.approx(expected, rel=1e-6)
        assert metric.compute().item() == pytest.approx(second.compute().item(), rel=1e-6)

    @given(
        pixels=st.lists(st.tuples(st.integers(0, 2), st.integers(0, 2)), min_size=1, max_size=30),
        cuts=st.lists(st.integers(0, 30), max_size=4),
    )
    def test_does_not_depend_on_batch_split(self, pixels, cuts):
        """Batches of any size, and absent classes, are counted by pixel."""
        guesses, truths = zip(*pixels, strict=True)
        edges = [0, *sorted(min(cut, len(pixels)) for cut in cuts), len(pixels)]
        metric = Dice(num_classes=5)

        for start, stop in itertools.pairwise(edges):
            metric.update(torch.tensor([guesses[start:stop]]).long(), torch.tensor([truths[start:stop]]).long())

        assert metric.compute().item() == pytest.approx(_reference(guesses, truths), rel=1e-6)

    def test_scores_are_converted_to_ids(self):
        """Scores (N, C, H, W) give the same as their argmax."""
        scores, target = torch.randn(3, 4, 6, 5), torch.randint(4, (3, 6, 5))
        by_scores, by_ids = Dice(4), Dice(4)

        by_scores.update(scores, target)
        by_ids.update(scores.argmax(dim=1), target)

        assert by_scores.compute() == by_ids.compute()

    def test_merges_across_processes(self):
        """Unequal states of two processes merge to the value over all pixels."""
        guess, target = _masks(seed=3)
        first, second = Dice(4), Dice(4)
        first.update(guess[:1], target[:1])
        second.update(guess[1:], target[1:])

        first.merge_state(second)

        expected = _reference(guess.flatten().tolist(), target.flatten().tolist())
        assert first.compute().item() == pytest.approx(expected, rel=1e-6)

    def test_is_nan_without_updates(self):
        """Before the first batch, and after a reset, the value is nan."""
        metric = Dice(2)
        metric.update(torch.tensor([[0, 1]]), torch.tensor([[0, 1]]))

        metric.reset()
        metric.update(torch.zeros(0, 3, dtype=torch.long), torch.zeros(0, 3, dtype=torch.long))

        assert math.isnan(metric.compute().item())

    def test_stats_of_one_batch(self):
        """Each class has its coefficient, absent ones have none."""
        scores = torch.nn.functional.one_hot(torch.tensor([[0, 0, 1, 1]]), 3).movedim(-1, 1).float()

        stats = Dice.compute_stats(scores, torch.tensor([[0, 1, 1, 1]]))

        torch.testing.assert_close(stats, torch.tensor([2 / 3, 4 / 5, math.nan]), equal_nan=True)


class TestBadInput:
    def test_mismatched_number_of_classes(self):
        """Scores of 5 classes for a metric of 3 raise with both numbers."""
        with pytest.raises(ValueError, match=r"counts 3 classes, but predictions of shape .* hold scores of 5"):
            Dice(3).update(torch.zeros(1, 5, 2, 2), torch.zeros(1, 2, 2, dtype=torch.long))

    def test_id_out_of_range(self):
        """Without an ignored id, -1 is not a class."""
        with pytest.raises(ValueError, match=r"Class ids must be from 0 to 2; .* targets -1 to 2"):
            Dice(3).update(torch.zeros(1, 3, 2), torch.tensor([[2, -1]]))

    def test_no_classes(self):
        """At least one class is required."""
        with pytest.raises(ValueError, match="num_classes must be at least 1, got 0"):
            Dice(0)
