"""Training batches in one of several processes."""

import pytest
import torch
from torch.utils.data import DataLoader

from composer.core import DataSpec
from composer.distributed import get_sampler
from composer.trainer.training_data import Batches


class OwnLoader(DataLoader):
    """A custom iterable loader with its own order."""

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
    def test_repeats_that_cannot_be_excluded_warn(self):
        """The warning states the number of repeated samples and the remedy."""
        with pytest.warns(
            UserWarning, match=r"1 samples of each epoch are trained on twice.*OwnLoader.*drop_last=True"
        ):
            make_batches(OwnLoader, 5)

    @pytest.mark.parametrize(("samples", "options"), [(4, {}), (5, {"drop_last": True})])
    def test_no_repeats_do_not_warn(self, samples, options):
        """Evenly divisible and dropped samples are trained on once by any loader."""
        assert make_batches(OwnLoader, samples, **options).length == 1

    @pytest.mark.parametrize(("samples", "expected"), [(5, [[1, 3], [0]]), (7, [[1, 3], [5]]), (6, [[1, 3], [5]])])
    def test_repeats_are_excluded(self, samples, expected):
        """The last batch has only this process's samples, unless it has none."""
        batches = make_batches(DataLoader, samples)

        assert [batches.next().tolist() for _ in range(2)] == expected

    @pytest.mark.parametrize(("samples", "expected"), [(5, [True, False]), (7, [True, True])])
    def test_batch_of_repeats_has_weight_zero(self, samples, expected):
        """It is trained on with weight 0, as the other process has a batch too."""
        batches = make_batches(DataLoader, samples)
        counts = []

        for _ in range(2):
            batches.next()
            counts.append(batches.counts)

        assert counts == expected


def test_sparse_batches_are_not_compared(monkeypatch):
    """First batches with sparse tensors are not compared across processes."""
    batches = Batches(DataSpec([torch.eye(3).to_sparse()]), -1, torch.device("cpu"))
    monkeypatch.setenv("WORLD_SIZE", "1")

    assert batches.next().is_sparse


class TestOtherNumbersOfProcesses:
    """The position of four processes, with three samples in a batch each, in the data of the second of two."""

    @pytest.mark.parametrize(
        ("batches", "batch_size", "expected"),
        [(2, 6, (2, 12)), (2, 4, (3, 12)), (2, 12, (1, 12)), (2, 5, None), (4, 6, (4, 23)), (4, 5, (5, 23))],
    )
    def test_position(self, batches, batch_size, expected):
        """It is after the samples of all processes; within a batch there is none, except at the end of the epoch."""
        data = range(46)
        loader = DataLoader(data, batch_size=batch_size, sampler=get_sampler(data, shuffle=True))
        place = {"batches": batches, "sizes": {"samples": 46, "samples a batch": 3}, "is_distributed": True}
        moved = Batches(DataSpec(loader), -1, torch.device("cpu")).moved(place, world_size=4)
        assert (moved and (moved["batches"], moved["samples"])) == expected

    def test_other_samplers(self):
        """A sampler whose order is not shared by processes has no such position."""
        place = {"batches": 4, "sizes": {"samples": 46, "samples a batch": 3}, "is_distributed": True}
        plain = Batches(DataSpec(DataLoader(range(46), batch_size=6)), -1, torch.device("cpu"))
        assert plain.moved(place, world_size=4) is None
