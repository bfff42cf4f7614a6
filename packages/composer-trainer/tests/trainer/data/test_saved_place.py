"""Saved places, read as places in other data."""

import pytest
import torch
from torch.utils.data import DataLoader, DistributedSampler

from composer.core import DataSpec
from composer.trainer.data.batches import Batches


@pytest.fixture
def batches():
    """The batches of the first of two processes, of two samples each from ten."""
    data = range(10)
    return Batches(
        DataSpec(DataLoader(data, batch_size=2, sampler=DistributedSampler(data, 2, 0))), -1, torch.device("cpu")
    )


def test_place_of_other_data(batches):
    """A saved place in other data is comparable only by its number of batches, which must exist."""
    saved = {"place": 24, "global_batch_size": 6, "sizes": {"batches": 5, "samples": 30}}

    problems = batches.check_state_dict(saved)

    assert batches.places.place_here(saved) == 16
    assert problems[0].startswith("data: 4 batches of the epoch were done, and train_dataloader has 3.")


def test_place_of_other_batches(batches):
    """A saved place in the same samples is the same place, whatever the batches and the number of processes were."""
    saved = {"place": 6, "global_batch_size": 6, "sizes": {"batches": 2, "samples": 10}}

    assert batches.places.place_here(saved) == 6
    assert batches.check_state_dict(saved) == []
