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


def _mean_by_hand(logits, targets, ignore_index=-100):
    """Average -log softmax over the targets that count, in Python floats."""
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

        assert metric.compute().item() == pytest.approx(_mean_by_hand(logits, targets), rel=1e-6)

    @given(
        classes=st.lists(st.sampled_from([-100, 0, 1, 2]), min_size=1, max_size=30).filter(lambda c: max(c) >= 0),
        cuts=st.lists(st.integers(0, 30), max_size=5),
    )
    def test_any_batch_split_gives_the_same(self, classes, cuts):
        """Small batches, empty ones and ignored targets weigh what their targets weigh."""
        targets = torch.tensor(classes)
        logits = torch.randn(len(classes), 3, generator=torch.Generator().manual_seed(len(classes)))
        metric = CrossEntropy()
        edges = [0, *sorted(min(cut, len(classes)) for cut in cuts), len(classes)]

        for start, stop in itertools.pairwise(edges):
            metric.update(logits[start:stop], targets[start:stop])

        assert metric.compute().item() == pytest.approx(_mean_by_hand(logits, targets), rel=1e-6)

    @pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.int32])
    def test_ids_of_any_integer(self, dtype):
        """Ids of a vector or of a mask may be of any integer type, as the losses take them."""
        logits, targets = torch.randn(2, 3, 4, 4), torch.randint(3, (2, 4, 4))
        metric, expected = CrossEntropy(), CrossEntropy()

        metric.update(logits, targets.to(dtype))
        metric.update(logits[:, :, 0, 0], targets[:, 0, 0].to(dtype))

        expected.update(logits, targets)
        expected.update(logits[:, :, 0, 0], targets[:, 0, 0])
        assert metric.compute() == expected.compute()

    def test_one_hot_integers_are_probabilities(self):
        """What torch's one_hot makes of ids counts as the ids do."""
        logits, targets = torch.randn(6, 4), torch.randint(4, (6,))
        metric = CrossEntropy()

        metric.update(logits, torch.nn.functional.one_hot(targets, 4))

        assert metric.compute().item() == pytest.approx(_mean_by_hand(logits, targets), rel=1e-6)

    def test_probabilities_weigh_the_classes(self):
        """With class probabilities the value is their weighted mean of -log softmax, one a sample."""
        logits, probabilities = torch.randn(6, 4), torch.rand(6, 4).softmax(dim=1)
        metric = CrossEntropy()

        metric.update(logits[:1], probabilities[:1])
        metric.update(logits[1:], probabilities[1:])

        expected = -(probabilities * logits.log_softmax(dim=1)).sum() / 6
        assert metric.compute().item() == pytest.approx(expected.item(), rel=1e-5)

    def test_rows_of_zeros_do_not_count(self):
        """What ignored class ids become as probabilities counts as little as they do."""
        logits, targets = torch.randn(4, 3), torch.tensor([0, -100, 2, -100])
        by_ids, by_probabilities = CrossEntropy(), CrossEntropy()

        by_ids.update(logits, targets)
        by_probabilities.update(logits, torch.tensor([[1.0, 0, 0], [0, 0, 0], [0, 0, 1], [0, 0, 0]]))

        assert by_probabilities.compute().item() == pytest.approx(by_ids.compute().item(), rel=1e-6)

    def test_pixels_count_one_each(self):
        """With ids (N, H, W) and with probabilities (N, C, H, W), the mean runs over the pixels."""
        logits, targets = torch.randn(2, 3, 4, 5), torch.randint(3, (2, 4, 5))
        by_ids, by_probabilities = CrossEntropy(), CrossEntropy()

        by_ids.update(logits, targets)
        by_probabilities.update(logits, torch.nn.functional.one_hot(targets, 3).movedim(-1, 1).float())

        expected = _mean_by_hand(logits.movedim(1, -1).reshape(-1, 3), targets.flatten())
        assert by_ids.compute().item() == pytest.approx(expected, rel=1e-6)
        assert by_probabilities.compute().item() == pytest.approx(expected, rel=1e-6)

    def test_another_ignore_index(self):
        """The id that does not count can be chosen, among the classes too."""
        logits, targets = torch.randn(8, 3), torch.tensor([0, 1, 2, 0, 1, 2, 0, 0])
        metric = CrossEntropy(ignore_index=2)

        metric.update(logits, targets)

        assert metric.compute().item() == pytest.approx(_mean_by_hand(logits, targets, ignore_index=2), rel=1e-6)

    def test_half_precision_logits_are_summed_in_single(self):
        """Logits from autocast lose nothing but their own rounding."""
        logits, targets = torch.randn(4096, 4).bfloat16(), torch.randint(4, (4096,))
        metric = CrossEntropy()

        metric.update(logits, targets)

        assert metric.compute().dtype == torch.float32
        assert metric.compute().item() == pytest.approx(_mean_by_hand(logits.float(), targets), rel=1e-6)

    def test_many_batches_lose_no_digits(self):
        """A large sum goes on to see small batches, which single precision alone would drop."""
        metric = CrossEntropy()
        metric.loss_sum, metric.count = torch.tensor(2.0**24), torch.tensor(1)

        for _ in range(64):
            metric.update(torch.zeros(1, 2), torch.zeros(1, dtype=torch.long))

        assert metric.compute().item() == pytest.approx((2.0**24 + 64 * math.log(2)) / 65, rel=1e-7)

    def test_an_infinite_loss_stays_infinite(self):
        """A model that is certain and wrong gives inf, not nan."""
        metric = CrossEntropy()

        metric.update(torch.tensor([[0.0, -math.inf]]), torch.tensor([1]))
        metric.update(torch.zeros(1, 2), torch.tensor([1]))

        assert metric.compute().item() == math.inf

    def test_nothing_counted_is_nan(self):
        """Where every target is ignored there is no mean."""
        metric = CrossEntropy()

        metric.update(torch.zeros(2, 3), torch.tensor([-100, -100]))

        assert math.isnan(metric.compute().item())

    def test_reset_starts_anew(self):
        """After a reset nothing is left of what came before."""
        metric = CrossEntropy()
        metric.update(torch.tensor([[0.0, 9.0]]), torch.tensor([0]))

        metric.reset()
        metric.update(torch.zeros(1, 2), torch.tensor([0]))

        assert metric.compute().item() == pytest.approx(math.log(2), rel=1e-6)

    @pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda metric: pickle.loads(pickle.dumps(metric))])
    def test_copies_count_for_themselves(self, duplicate):
        """A copy starts with what was counted and then goes its own way."""
        metric = CrossEntropy(ignore_index=1)
        metric.update(torch.zeros(1, 2), torch.tensor([0]))

        other = duplicate(metric)
        other.update(torch.tensor([[0.0, 9.0]]), torch.tensor([0]))

        assert metric.compute().item() == pytest.approx(math.log(2), rel=1e-6)
        assert other.compute().item() == pytest.approx((math.log(2) + 9 + math.log1p(math.exp(-9))) / 2, rel=1e-6)

    def test_shares_of_two_processes_add_up(self):
        """What two processes counted, unequal in size, merges to the mean over all of it."""
        logits, targets = torch.randn(9, 3), torch.tensor([0, 1, -100, 2, 0, 1, 2, -100, 0])
        mine, theirs = CrossEntropy(), CrossEntropy()
        mine.update(logits[:2], targets[:2])
        theirs.update(logits[2:], targets[2:])

        mine.merge_state(theirs)

        assert mine.compute().item() == pytest.approx(_mean_by_hand(logits, targets), rel=1e-6)
