"""Training batches in one of several processes."""

import itertools
import math

import pytest
import torch
from torch.utils.data import DataLoader, Sampler

import composer.trainer.data.batches
from composer.core import DataSpec
from composer.distributed import get_sampler
from composer.trainer.data.batches import Batches


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


class Pairs(Sampler):
    """A batch sampler of a user around another sampler."""

    def __init__(self, sampler):
        super().__init__()
        self.sampler, self.batch_size = sampler, 2

    def __len__(self):
        return (len(self.sampler) + 1) // 2

    def __iter__(self):
        keys = iter(self.sampler)
        while pair := list(itertools.islice(keys, 2)):
            yield pair


class TestOwnBatchSampler:
    """Its batches are its own, so that what the sampler repeats is trained on."""

    def test_repeats_warn(self):
        """The warning names the batch sampler, which no rule for samplers covers."""
        loader = DataLoader(range(5), batch_sampler=Pairs(get_sampler(range(5))))

        with pytest.warns(UserWarning, match=r"1 samples of each epoch are trained on twice.*the Pairs chooses"):
            Batches(DataSpec(loader), -1, torch.device("cpu"))

    def test_place_is_not_shared(self):
        """A position of other processes does not apply to it."""
        loader = DataLoader(range(6), batch_sampler=Pairs(get_sampler(range(6))))
        place = {"batches": 1, "sizes": {"samples": 6, "samples a batch": 2}, "is_distributed": True}

        assert Batches(DataSpec(loader), -1, torch.device("cpu")).moved(place, world_size=1) is None


class TestOtherNumbersOfProcesses:
    """The position of four processes, with three samples in a batch each, in the data of the second of two."""

    @pytest.mark.parametrize("batch_size", [6, 4, 12, 5])
    @pytest.mark.parametrize(("batches", "done", "own"), [(2, 24, 12), (4, 48, 23)])
    @pytest.mark.parametrize("saved", [True, False])
    def test_position(self, batches, done, own, batch_size, saved):
        """It is after the samples of all processes, whatever the batch size; earlier releases did not save it."""
        data = range(46)
        loader = DataLoader(data, batch_size=batch_size, sampler=get_sampler(data, shuffle=True))
        place = {"batches": batches, "sizes": {"samples": 46, "samples a batch": 3}, "is_distributed": True}

        moved = Batches(DataSpec(loader), -1, torch.device("cpu")).moved(
            place | ({"done": done} if saved else {}), world_size=4
        )

        assert moved is not None
        assert (moved["batches"], moved["done"], moved["samples"]) == (batches, done, own)

    @pytest.mark.parametrize(("done", "batches", "expected"), [(24, 2, 11 / 3), (46, 4, 0), (0, 0, 23 / 3)])
    def test_epoch_ends_after_its_last_sample(self, monkeypatch, done, batches, expected):
        """The rest of the epoch has batches of the new size, and begins with the next sample."""
        data = range(46)
        loader = DataLoader(data, batch_size=3, sampler=get_sampler(data))
        monkeypatch.setattr(composer.trainer.data.batches, "all_agree", lambda _: True)
        monkeypatch.setattr(composer.trainer.data.batches, "check_lengths", lambda _: None)
        rest = Batches(DataSpec(loader), -1, torch.device("cpu"))
        rest.agree_on_length()
        sizes = {"samples": 46}
        rest.load_state_dict({"epoch": 0, "batches": batches, "done": done, "sizes": sizes, "is_distributed": True})

        found = []
        while not rest.epoch_is_over:
            found.append(rest.next().tolist())
            assert rest.counts
            assert rest.is_full == (len(found) <= expected // 1)
            assert rest.state_dict()["done"] == done + 6 * len(found)

        assert len(found) == math.ceil(expected)
        assert [*itertools.chain(*found)] == [*range(done + 1, 46, 2)]

    def test_other_samplers(self):
        """A sampler whose order is not shared by processes has no such position."""
        place = {"batches": 4, "sizes": {"samples": 46, "samples a batch": 3}, "is_distributed": True}
        plain = Batches(DataSpec(DataLoader(range(46), batch_size=6)), -1, torch.device("cpu"))
        assert plain.moved(place, world_size=4) is None


class TestDropLast:
    def test_less_than_a_batch_of_all_processes(self):
        """Processes that would have batches of repeats alone train on none; without any the data is refused."""
        with pytest.raises(ValueError, match="smaller than one batch of all processes with drop_last=True"):
            make_batches(lambda *args, **options: DataLoader(*args, drop_last=True, **options), 3)
