"""The batches of training in one of several processes."""

import pytest
import torch
from torch.utils.data import DataLoader

from composer.core import DataSpec
from composer.distributed import get_sampler
from composer.trainer.training_data import Batches


class OwnLoader(DataLoader):
    """A loader that iterates by itself, so that its order is its own."""

    def __iter__(self):
        return super().__iter__()


@pytest.fixture(autouse=True)
def one_of_two(monkeypatch):
    """This process counts as the second of two."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")


def make_batches(loader_class, samples, **options):
    loader = loader_class(range(samples), batch_size=2, sampler=get_sampler(range(samples), **options))
    return Batches(DataSpec(loader), -1, torch.device("cpu"))


class TestRepeats:
    def test_a_loader_that_keeps_repeats_is_warned_of(self):
        """Where repeated samples cannot be left out, the warning says how many there are and what to do."""
        with pytest.warns(
            UserWarning, match=r"1 samples of each epoch are trained on twice.*OwnLoader.*drop_last=True"
        ):
            make_batches(OwnLoader, 5)

    @pytest.mark.parametrize(("samples", "options"), [(4, {}), (5, {"drop_last": True})])
    def test_without_repeats_nothing_is_warned_of(self, samples, options):
        """Samples that can be shared out evenly, or that are dropped, are trained on once by any loader."""
        assert make_batches(OwnLoader, samples, **options).length == 1

    @pytest.mark.parametrize(("samples", "expected"), [(5, [[1, 3], [0]]), (7, [[1, 3], [5]]), (6, [[1, 3], [5]])])
    def test_repeats_are_left_out(self, samples, expected):
        """The last batch has only samples of this process's own, unless it has none."""
        batches = make_batches(DataLoader, samples)

        assert [batches.next().tolist() for _ in range(2)] == expected

    @pytest.mark.parametrize(("samples", "expected"), [(5, [True, False]), (7, [True, True])])
    def test_a_batch_of_repeats_does_not_count(self, samples, expected):
        """It is trained on with weight 0, as the other process has a batch too."""
        batches = make_batches(DataLoader, samples)
        counts = []

        for _ in range(2):
            batches.next()
            counts.append(batches.counts)

        assert counts == expected


def test_sparse_batches_are_not_compared(monkeypatch):
    """Whether all processes have the same first batch is not asked of tensors that have no dense numbers."""
    batches = Batches(DataSpec([torch.eye(3).to_sparse()]), -1, torch.device("cpu"))
    monkeypatch.setenv("WORLD_SIZE", "1")

    assert batches.next().is_sparse
