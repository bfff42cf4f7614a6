"""Metrics of segmentations, and the counts that they divide."""

import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sklearn.metrics import f1_score, jaccard_score
from torchmetrics.classification import MulticlassF1Score, MulticlassJaccardIndex

from composer.metrics import Dice, MIoU
from composer.metrics.overlap import class_mean, count_overlap


def _reference_of_miou(guesses, truths, ignored=-1):
    """Return the mean over the classes seen of |P and T| / |P or T|, from sets of pixels."""
    pixels = [i for i, truth in enumerate(truths) if truth != ignored]
    fractions = []
    for label in sorted({*guesses, *truths} - {ignored}):
        predicted, actual = ({i for i in pixels if ids[i] == label} for ids in (guesses, truths))
        if predicted | actual:
            fractions.append(len(predicted & actual) / len(predicted | actual))
    return math.fsum(fractions) / len(fractions) if fractions else math.nan


def _masks(seed, shape=(3, 6, 5), classes=4):
    generator = torch.Generator().manual_seed(seed)
    return (torch.randint(classes, shape, generator=generator) for _ in range(2))


class TestMIoU:
    def test_equals_scikit_learn(self):
        """On masks with every class it is the macro average of the Jaccard scores, in percent."""
        guess, target = _masks(seed=0)
        metric = MIoU(num_classes=4)

        metric.update(guess, target)

        expected = jaccard_score(target.flatten().numpy(), guess.flatten().numpy(), average="macro")
        assert metric.compute().item() == pytest.approx(100 * expected, rel=1e-6)

    @given(
        pixels=st.lists(st.tuples(st.integers(0, 2), st.integers(-1, 2)), min_size=1, max_size=30),
        cuts=st.lists(st.integers(0, 30), max_size=4),
    )
    def test_does_not_depend_on_batch_split(self, pixels, cuts):
        """Batches of any size, with ignored pixels and absent classes, are counted by pixel."""
        guesses, truths = zip(*pixels, strict=True)
        edges = [0, *sorted(min(cut, len(pixels)) for cut in cuts), len(pixels)]
        metric = MIoU(num_classes=5)

        for start, stop in itertools.pairwise(edges):
            metric.update(torch.tensor([guesses[start:stop]]).long(), torch.tensor([truths[start:stop]]).long())

        expected = _reference_of_miou(guesses, truths)
        assert metric.compute().item() == pytest.approx(100 * expected, rel=1e-6, nan_ok=True)

    @pytest.mark.parametrize("ignore_index", [-1, 255, 0])
    def test_equals_torchmetrics(self, ignore_index):
        """With ignored pixels, also if the ignored id is a class, it is torchmetrics' Jaccard index in percent."""
        guess, target = _masks(seed=1)
        target[:, :2] = ignore_index
        actual = MIoU(4, ignore_index)
        second = MulticlassJaccardIndex(4, average="macro", ignore_index=ignore_index)

        actual.update(guess, target)
        second.update(guess, target)

        assert actual.compute().item() == pytest.approx(100 * second.compute().item(), rel=1e-6)


class TestBadInputOfMIoU:
    @pytest.mark.parametrize(("wrong", "result"), [(3, "0 to 3"), (4, "0 to 4"), (-2, "-2 to 0")])
    def test_id_out_of_range(self, wrong, result):
        """An id out of range raises with the valid range."""
        with pytest.raises(ValueError, match=rf"from 0 to 2, and -1 is ignored; .* targets {result}"):
            MIoU(3).update(torch.zeros(1, 3, 1, 3), torch.tensor([[[0, -1, wrong]]]))


def _reference_of_dice(guesses, truths):
    """Return the mean over the classes seen of 2 |P and T| / (|P| + |T|), from sets of pixels."""
    fractions = []
    for label in sorted({*guesses, *truths}):
        predicted, actual = ({i for i, one in enumerate(ids) if one == label} for ids in (guesses, truths))
        fractions.append(2 * len(predicted & actual) / (len(predicted) + len(actual)))
    return math.fsum(fractions) / len(fractions) if fractions else math.nan


class TestDice:
    def test_ignored_pixels(self):
        """Pixels with the id to ignore do not count."""
        guess, target = _masks(seed=0)
        metric = Dice(num_classes=4, ignore_index=255)

        metric.update(guess, target.index_fill(1, torch.tensor(0), 255))

        counted = target[:, 1:].flatten(), guess[:, 1:].flatten()
        assert metric.compute().item() == pytest.approx(f1_score(*counted, average="macro"), rel=1e-6)

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

        assert metric.compute().item() == pytest.approx(_reference_of_dice(guesses, truths), rel=1e-6)


class TestCountOverlap:
    @pytest.mark.parametrize("ignore_index", [None, -1, 2])
    def test_scores_and_ids_agree(self, ignore_index):
        """Scores count like their most likely class, and the counts are those of a plain loop."""
        torch.manual_seed(0)
        scores, targets = torch.randn(4, 3, 5, 5), torch.randint(3, (4, 5, 5))
        targets[0, 0] = 2 if ignore_index is None else ignore_index
        ids = scores.argmax(dim=1)
        pairs = [(p, t) for p, t in zip(ids.flatten().tolist(), targets.flatten().tolist(), strict=True)]
        counted = [pair for pair in pairs if pair[1] != ignore_index]

        result = count_overlap(scores, targets, 3, ignore_index)

        assert [one.tolist() for one in result] == [
            [sum(p == t == kind for p, t in counted) for kind in range(3)],
            [sum(p == kind for p, _ in counted) for kind in range(3)],
            [sum(t == kind for _, t in counted) for kind in range(3)],
        ]
        assert all(map(torch.equal, result, count_overlap(ids, targets, 3, ignore_index)))


def test_class_mean():
    """Classes that do not occur, or are not selected, do not count; without any the mean is nan."""
    part, whole = torch.tensor([1, 1, 0]), torch.tensor([2, 4, 0])

    assert class_mean(part, whole) == 0.375
    assert class_mean(part, whole, torch.tensor([False, True, True])) == 0.25
    assert class_mean(part, torch.zeros(3, dtype=torch.long)).isnan()
