"""Metrics that go on in another number of processes; those of real groups are in checkpoint/test_world_sizes.py."""

import pytest
import torch
from torchmetrics import Metric, PearsonCorrCoef
from torchmetrics.regression import NormalizedRootMeanSquaredError
from torchmetrics.retrieval import RetrievalMAP

from composer.trainer.evaluation.merging import merge_metrics
from composer.trainer.evaluation.metrics import load_metrics, save_metrics


def only_two(stacked):
    """Reduce the states of two processes, and of no other number."""
    first, second = stacked
    return first + second


class Own(Metric):
    """A metric with one state and a reduction of the user."""

    def __init__(self, reduce):
        super().__init__()
        self.add_state("total", torch.tensor(0.0), dist_reduce_fx=reduce)

    def update(self, number):
        self.total = self.total + number

    def compute(self):
        return self.total


def updated(metric, *batches):
    for batch in batches:
        metric.update(*batch)
    return metric


@pytest.fixture
def shares(monkeypatch):
    """Return a function that merges the metrics of several processes, and returns them in each of the new ones."""

    def merge(of_each, world_size, make):
        saved, merged = [save_metrics({"own": metric}) for metric in of_each], []
        monkeypatch.setenv("WORLD_SIZE", str(world_size))
        for rank in range(world_size):
            monkeypatch.setenv("RANK", str(rank))
            metric = make()
            states = merge_metrics({"own": metric}, saved, is_first=rank == 0)
            load_metrics({"own": metric}, states, torch.device("cpu"))
            merged.append(metric)
        return merged

    return merge


class TestMergeMetrics:
    def test_pearson(self, shares):
        """The correlation of two processes' samples is that of one process with all of them."""
        x, y = torch.randn(2, 40, generator=torch.Generator().manual_seed(0)) + torch.tensor([[3.0], [-2.0]])
        parts = [updated(PearsonCorrCoef(), (x[part], (x + y)[part])) for part in (slice(30), slice(30, 40))]

        [merged] = shares(parts, 1, PearsonCorrCoef)

        torch.testing.assert_close(merged.compute(), torch.corrcoef(torch.stack((x, x + y)))[0, 1])

    def test_sum_of_the_user(self, shares):
        """A sum by the user's function is in one process, so that all together have it once."""
        metrics = shares(
            [updated(Own(lambda x: x.sum(0)), (3.0,)) for _ in range(2)], 3, lambda: Own(lambda x: x.sum(0))
        )

        assert [float(metric.total) for metric in metrics] == [6.0, 0.0, 0.0]

    def test_updates(self, shares):
        """The updates of all processes together are those before, as torchmetrics weighs means by them."""
        metrics = shares([updated(Own("sum"), (3.0,), (1.0,)) for _ in range(4)], 3, lambda: Own("sum"))

        assert [metric._update_count for metric in metrics] == [3, 3, 2]

    @pytest.mark.parametrize(
        ("make", "batch", "world_size", "state"),
        [
            (NormalizedRootMeanSquaredError, (torch.ones(3), torch.arange(3.0)), 1, "total"),
            (RetrievalMAP, (torch.rand(3), torch.ones(3), torch.arange(3)), 4, "indexes"),
            (lambda: Own(only_two), (3.0,), 1, "total"),
        ],
        ids=["tensors without a reduction", "a list without a reduction", "a function for two processes"],
    )
    def test_a_metric_that_cannot_be_divided_is_reset(self, shares, make, batch, world_size, state):
        """One warning names it and the state, and its next value counts only later batches."""
        before = [updated(make(), batch) for _ in range(2)]
        name = type(before[0]).__name__

        with pytest.warns(UserWarning, match="is reset") as caught:
            metrics = shares(before, world_size, make)

        [text] = {str(one.message) for one in caught}
        assert len(caught) == 1
        assert f"metric 'own' ({name}) is reset and counts only" in text
        assert f"{state!r} of 2 processes cannot be divided among {world_size}" in text
        for metric in metrics:
            assert metric._update_count == 0
            assert updated(metric, batch).compute() == updated(make(), batch).compute()
