"""The objects that were given to the Trainer are found, saved and restored by name."""

import random

import torch
from torch.utils.data import DataLoader, Dataset, RandomSampler

from composer.core import Callback
from fixtures import small_run


class Drawing(Dataset):
    """Twelve samples with noise from an own generator."""

    def __init__(self):
        self.generator = random.Random(3)

    def __len__(self):
        return 12

    def __getitem__(self, index):
        return torch.full((4,), self.generator.random()), index % 3


class Counting(Callback):
    """A callback with a generator."""

    def __init__(self):
        self.generator = torch.Generator().manual_seed(3)


def make_run(data):
    sampler = RandomSampler(data, generator=torch.Generator().manual_seed(1))
    train, evaluated = DataLoader(data, batch_size=4, sampler=sampler), DataLoader(Drawing(), batch_size=4)
    return small_run(train_dataloader=train, eval_dataloader=evaluated, callbacks=[Counting()], max_duration="1ep")


def test_generators_are_saved_by_name():
    """Those of components and of the data, without that of the sampler, which is replayed with the data."""
    saved = make_run(Drawing())._resume_state.to_data()["processes"][0]

    assert {*saved["objects"]["generators"]} == {
        "callbacks.Counting.generator",
        "train_dataloader.dataset.generator",
        "evaluators.eval.dataset.generator",
    }
    assert {*saved["data"]["objects"]["generators"]} == {"sampler.generator"}


def test_generators_are_restored():
    """A run continues with the draws that come after the save."""
    data, other = Drawing(), Drawing()
    data.generator.random()
    saved = make_run(data)._resume_state.to_data()
    expected = data.generator.random()

    resumed = make_run(other)._resume_state
    resumed.load(saved, "runs/ba1")
    resumed.resume()
    resumed.begin()

    assert other.generator.random() == expected
