"""Tests of composer.metrics.CrossEntropy."""

import copy
import itertools
import math
import pickle

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from composer.metrics import CrossEntropy


def _reference_mean(logits, targets, ignore_index=-100):
    """Average -log softmax over counted targets, in Python floats."""
    losses = []
    for row, target in zip(logits.tolist(), targets.tolist(), strict=True):
        if target != ignore_index:
            losses.append(math.log(sum(math.exp(x) for x in row)) - row[target])
    return math.fsum(losses) / len(losses)


class TestCrossEntropy:
    def test_equals_the_formula(self):
        """The value is the mean of -log softmax at the target."""
        logits, targets = torch.randn(20, 5), torch.randint(5, (20,))
        metric = CrossEntropy()

        metric.update(logits, targets)

        assert metric.compute().item() == pytest.approx(_reference_mean(logits, targets), rel=1e-6)

    @given(
        classes=st.lists(st.sampled_from([-100, 0, 1, 2]), min_size=1, max_size=30).filter(lambda c: max(c) >= 0),
        cuts=st.lists(st.integers(0, 30), max_size=5),
    )
    def test_does_not_depend_on_batch_split(self, classes, cuts):
        """Small and empty batches and ignored targets are weighted by their number of targets."""
        targets = torch.tensor(classes)
        logits = torch.randn(len(classes), 3, generator=torch.Generator().manual_seed(len(classes)))
        metric = CrossEntropy()
        edges = [0, *sorted(min(cut, len(classes)) for cut in cuts), len(classes)]

        for start, stop in itertools.pairwise(edges):
            metric.update(logits[start:stop], targets[start:stop])

        assert metric.compute().item() == pytest.approx(_reference_mean(logits, targets), rel=1e-6)

    @pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.int32])
    def test_integer_dtypes(self, dtype):
        """Ids may have any integer dtype."""
        logits, targets = torch.randn(2, 3, 4, 4), torch.randint(3, (2, 4, 4))
        metric, expected = CrossEntropy(), CrossEntropy()

        metric.update(logits, targets.to(dtype))
        metric.update(logits[:, :, 0, 0], targets[:, 0, 0].to(dtype))

        expected.update(logits, targets)
        expected.update(logits[:, :, 0, 0], targets[:, 0, 0])
        assert metric.compute() == expected.compute()

    def test_one_hot_integers_are_probabilities(self):
        """Torch's one_hot gives the same value as ids."""
        logits, targets = torch.randn(6, 4), torch.randint(4, (6,))
        metric = CrossEntropy()

        metric.update(logits, torch.nn.functional.one_hot(targets, 4))

        assert metric.compute().item() == pytest.approx(_reference_mean(logits, targets), rel=1e-6)

    def test_class_probabilities(self):
        """With class probabilities the value is their weighted mean of -log softmax."""
        logits, probabilities = torch.randn(6, 4), torch.rand(6, 4).softmax(dim=1)
        metric = CrossEntropy()

        metric.update(logits[:1], probabilities[:1])
        metric.update(logits[1:], probabilities[1:])

        expected = -(probabilities * logits.log_softmax(dim=1)).sum() / 6
        assert metric.compute().item() == pytest.approx(expected.item(), rel=1e-5)

    def test_rows_of_zeros_are_ignored(self):
        """Ignored class ids as probabilities are not counted."""
        logits, targets = torch.randn(4, 3), torch.tensor([0, -100, 2, -100])
        by_ids, by_probabilities = CrossEntropy(), CrossEntropy()

        by_ids.update(logits, targets)
        by_probabilities.update(logits, torch.tensor([[1.0, 0, 0], [0, 0, 0], [0, 0, 1], [0, 0, 0]]))

        assert by_probabilities.compute().item() == pytest.approx(by_ids.compute().item(), rel=1e-6)

    def test_pixels(self):
        """With ids (N, H, W) and with probabilities (N, C, H, W), the mean is over pixels."""
        logits, targets = torch.randn(2, 3, 4, 5), torch.randint(3, (2, 4, 5))
        by_ids, by_probabilities = CrossEntropy(), CrossEntropy()

        by_ids.update(logits, targets)
        by_probabilities.update(logits, torch.nn.functional.one_hot(targets, 3).movedim(-1, 1).float())

        expected = _reference_mean(logits.movedim(1, -1).reshape(-1, 3), targets.flatten())
        assert by_ids.compute().item() == pytest.approx(expected, rel=1e-6)
        assert by_probabilities.compute().item() == pytest.approx(expected, rel=1e-6)

    def test_ignore_index(self):
        """The ignored id can be set, also to a class."""
        logits, targets = torch.randn(8, 3), torch.tensor([0, 1, 2, 0, 1, 2, 0, 0])
        metric = CrossEntropy(ignore_index=2)

        metric.update(logits, targets)

        assert metric.compute().item() == pytest.approx(_reference_mean(logits, targets, ignore_index=2), rel=1e-6)

    def test_half_precision_logits_are_summed_in_float32(self):
        """Logits from autocast only have their own rounding errors."""
        logits, targets = torch.randn(4096, 4).bfloat16(), torch.randint(4, (4096,))
        metric = CrossEntropy()

        metric.update(logits, targets)

        assert metric.compute().dtype == torch.float32
        assert metric.compute().item() == pytest.approx(_reference_mean(logits.float(), targets), rel=1e-6)

    def test_accumulates_in_double_precision(self):
        """A small batch changes a large sum, which single precision would lose."""
        metric = CrossEntropy()
        metric.loss_sum, metric.count = torch.tensor(2.0**24), torch.tensor(1)

        for _ in range(64):
            metric.update(torch.zeros(1, 2), torch.zeros(1, dtype=torch.long))

        assert metric.compute().item() == pytest.approx((2.0**24 + 64 * math.log(2)) / 65, rel=1e-7)

    def test_infinite_loss(self):
        """A certain and wrong model gives inf, not nan."""
        metric = CrossEntropy()

        metric.update(torch.tensor([[0.0, -math.inf]]), torch.tensor([1]))
        metric.update(torch.zeros(1, 2), torch.tensor([1]))

        assert metric.compute().item() == math.inf

    def test_is_nan_if_all_targets_are_ignored(self):
        """The mean of no targets is nan."""
        metric = CrossEntropy()

        metric.update(torch.zeros(2, 3), torch.tensor([-100, -100]))

        assert math.isnan(metric.compute().item())

    def test_reset(self):
        """After a reset earlier batches do not count."""
        metric = CrossEntropy()
        metric.update(torch.tensor([[0.0, 9.0]]), torch.tensor([0]))

        metric.reset()
        metric.update(torch.zeros(1, 2), torch.tensor([0]))

        assert metric.compute().item() == pytest.approx(math.log(2), rel=1e-6)

    @pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda metric: pickle.loads(pickle.dumps(metric))])
    def test_copies_are_independent(self, duplicate):
        """A copy starts with the current state and is then updated separately."""
        metric = CrossEntropy(ignore_index=1)
        metric.update(torch.zeros(1, 2), torch.tensor([0]))

        other = duplicate(metric)
        other.update(torch.tensor([[0.0, 9.0]]), torch.tensor([0]))

        assert metric.compute().item() == pytest.approx(math.log(2), rel=1e-6)
        assert other.compute().item() == pytest.approx((math.log(2) + 9 + math.log1p(math.exp(-9))) / 2, rel=1e-6)

    def test_merges_across_processes(self):
        """Unequal states of two processes merge to the mean over all targets."""
        logits, targets = torch.randn(9, 3), torch.tensor([0, 1, -100, 2, 0, 1, 2, -100, 0])
        first, second = CrossEntropy(), CrossEntropy()
        first.update(logits[:2], targets[:2])
        second.update(logits[2:], targets[2:])

        first.merge_state(second)

        assert first.compute().item() == pytest.approx(_reference_mean(logits, targets), rel=1e-6)
