"""Counts of predictions, targets and their agreement."""

import pytest
import torch

from composer.metrics.overlap import class_mean, count_overlap


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

    @pytest.mark.parametrize(
        ("preds", "targets", "message"),
        [
            (torch.rand(2, 4), torch.zeros(2, dtype=torch.long), r"counts 3 classes.*\(2, 4\) hold scores of 4"),
            (torch.rand(2), torch.zeros(2), r"integer class ids"),
            (torch.zeros(2, dtype=torch.long), torch.zeros(3, dtype=torch.long), r"shapes \(2,\) and \(3,\)"),
            (torch.tensor([0, 3]), torch.tensor([0, 1]), r"from 0 to 2; predictions have 0 to 3 and targets 0 to 1"),
        ],
    )
    def test_bad_inputs_raise(self, preds, targets, message):
        """Shapes that do not fit and class ids out of range raise with what was passed."""
        with pytest.raises(ValueError, match=message):
            count_overlap(preds, targets, 3)


def test_class_mean():
    """Classes that do not occur, or are not selected, do not count; without any the mean is nan."""
    part, whole = torch.tensor([1, 1, 0]), torch.tensor([2, 4, 0])

    assert class_mean(part, whole) == 0.375
    assert class_mean(part, whole, torch.tensor([False, True, True])) == 0.25
    assert class_mean(part, torch.zeros(3, dtype=torch.long)).isnan()
