"""The objects of the data: which are searched for generators, and what a checkpoint has of them."""

import random

import pytest
import torch
from torch import nn
from torch.utils.data import Dataset

from composer.trainer.data.objects import generators_of, load_objects, save_objects


class Object:
    """An object of a user."""

    def __init__(self, **values):
        vars(self).update(values)


class Counting:
    """Has a state."""

    def __init__(self):
        self.count = 0

    def state_dict(self):
        return {"count": self.count}

    def load_state_dict(self, state):
        self.count = state["count"]


class Drawing(Dataset):
    """Has a generator."""

    def __init__(self):
        self.generator = torch.Generator()

    def __len__(self):
        return 1


class TestGenerators:
    def test_what_is_not_searched(self):
        """Long lists are data, a sampler's data are the loader's, and a stream of a package copies its generators."""
        datasets = pytest.importorskip("datasets")
        stream = datasets.Dataset.from_dict({"a": [1, 2]}).to_iterable_dataset().shuffle(seed=3)
        draw = Object(generator=random.Random(3))
        objects = {
            "dataset": Object(first=[draw] * 101, stream=stream),
            "sampler": torch.utils.data.SequentialSampler(Drawing()),
            "loss_fn": nn.Identity(),
        }

        assert list(generators_of(objects)) == []
        assert list(generators_of({"dataset": Object(first=[draw] * 100)})) == ["dataset.first[0].generator"]


class TestLoad:
    def test_missing_objects_warn(self):
        """State of objects that this program does not have is reported."""
        saved = save_objects({"one": Counting(), "other": Drawing()})

        with pytest.warns(UserWarning, match=r"This program has no one, no other\.generator, whose saved state"):
            load_objects(saved, {"one": Object(), "other": Object()})

    def test_rejected_state_raises(self):
        """An object that rejects its state ends the run with its name."""
        saved = save_objects({"one": Counting()})
        saved.states["one"] = {}

        with pytest.raises(ValueError, match=r"load_state_dict\(\) of one rejected .* same data\? KeyError: 'count'"):
            load_objects(saved, {"one": Counting()})
