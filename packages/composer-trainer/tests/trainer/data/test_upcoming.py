"""Batches that are loaded ahead."""

import pytest
import torch

from composer.core import DataSpec
from composer.trainer.data.batches import Batches


class Live:
    """A loader whose state is the dictionary that it changes, and which has more batches than it says."""

    def __init__(self):
        self.state = {"place": 0}

    def __len__(self):
        return 2

    def __iter__(self):
        while self.state["place"] < 4:
            self.state["place"] += 1
            yield torch.tensor([self.state["place"]])

    def state_dict(self):
        return self.state

    def load_state_dict(self, state):
        self.state = dict(state)


@pytest.mark.filterwarnings("ignore:.*train_dataloader:UserWarning")
def test_live_state_of_a_loader_is_copied():
    """A batch that is loaded ahead does not change the state that is saved."""
    batches = Batches(DataSpec(Live()), -1, torch.device("cpu"))
    batches.next()
    batches.next()

    assert batches.state_dict()["loader"] == {"place": 2}
