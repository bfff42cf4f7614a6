"""The place in an epoch, where the epoch ends, and saved places in other data."""

import pytest
import torch
from torch.utils.data import DataLoader, DistributedSampler

from composer.checkpoint.contents import SavedPlace
from composer.core import DataSpec
from composer.trainer.data.batches import Batches
from composer.trainer.data.order import make_order
from composer.trainer.data.position import EpochPosition


def make_position(samples=10, subset=-1, **options):
    """Return the position of the first of two processes, with batches of two samples each."""
    data = range(samples)
    spec = DataSpec(DataLoader(data, batch_size=2, sampler=DistributedSampler(data, 2, 0), **options))
    return EpochPosition(spec, make_order(spec.dataloader, seed=17), subset)


class TestEnd:
    @pytest.mark.parametrize(
        ("options", "length", "last"), [({}, 3, 8), ({"drop_last": True}, 2, 4), ({"subset": 2}, 2, 4)]
    )
    def test_of_samples(self, options, length, last):
        """The epoch ends after its last batch; places are samples of both processes, and the length is in batches."""
        position = make_position(**options)

        over = []
        for place in (last, last + position.place_distance):
            position.move_to(place)
            over.append(position.epoch_is_over)

        assert (position.length, position.place_distance, over) == (length, 4, [False, True])

    @pytest.mark.parametrize(("subset", "length"), [(-1, 3), (2, 2), (5, 3)])
    def test_of_batches(self, subset, length):
        """In a list of batches, places are batches."""
        position = EpochPosition(DataSpec([1, 2, 3]), make_order([1, 2, 3], seed=17), subset)

        position.move_to(length)

        assert (position.length, position.num_batches, position.epoch_is_over) == (length, length, True)

    def test_of_an_unknown_length(self):
        """It is known only once the loader is exhausted, until the next epoch begins."""
        loader = iter([1, 2])
        position = EpochPosition(DataSpec(loader), make_order(loader, seed=17), -1)
        position.move_to(2)
        before = position.epoch_is_over

        position.set_end(2)
        after = position.epoch_is_over
        position.move_to(0)

        assert (before, after, position.epoch_is_over, position.length) == (False, True, False, None)


def test_more_batches_than_announced():
    """A resumed run has the length that the run had where it stopped."""

    class Loader:
        def __len__(self):
            return 1

        def __iter__(self):
            return iter([1, 2])

    loader = Loader()
    position = EpochPosition(DataSpec(loader), make_order(loader, seed=17), -1)
    position.advance()
    lengths = [position.length]
    with pytest.warns(UserWarning, match="train_dataloader has a length of 1 batches and returned more in an epoch"):
        position.advance()
    lengths.append(position.length)

    position.set_end(2)
    lengths.append(position.length)
    position.move_to(2)

    assert (*lengths, position.length, position.epoch_is_over) == (1, 3, 2, 3, False)


@pytest.fixture
def batches():
    """The batches of the first of two processes, of two samples each from ten."""
    data = range(10)
    return Batches(
        DataSpec(DataLoader(data, batch_size=2, sampler=DistributedSampler(data, 2, 0))), -1, torch.device("cpu")
    )


def test_place_of_other_data(batches):
    """A saved place in other data is comparable only by its number of batches, which must exist."""
    saved = SavedPlace(epoch=0, place=24, global_batch_size=6, sizes={"batches": 5, "samples": 30})

    problems = batches.place_reader.problems(saved, batches.position)

    assert batches.place_reader.place_here(saved) == 16
    assert problems[0].startswith("data: 4 batches of the epoch were done, and train_dataloader has 3.")


def test_place_of_other_batches(batches):
    """A saved place in the same samples is the same place, whatever the batches and the number of processes were."""
    saved = SavedPlace(epoch=0, place=6, global_batch_size=6, sizes={"batches": 2, "samples": 10})

    assert batches.place_reader.place_here(saved) == 6
    assert batches.place_reader.problems(saved, batches.position) == []
