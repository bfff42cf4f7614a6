"""The processes that write together; several are in ``test_snapshot.py`` and ``test_sharded.py``."""

import pytest
import torch
from torch import nn

from composer.checkpoint.planning import describe_tensors
from composer.checkpoint.writers import Writers, failing_in_all, writers_of


def described(rows):
    return describe_tensors({"model.safetensors": {"weight": torch.ones(rows, 2)}}, is_first=True)


def test_model_that_is_not_sharded():
    """One process writes alone, and several models do not share what is written."""
    one, other = writers_of(nn.Linear(2, 2)), writers_of(nn.Linear(2, 2))

    assert (one.is_alone, one.rank, one.world_size) == (True, 0, 1)
    assert one is not other


def test_plan():
    """A process alone writes each tensor, and plans again only if a tensor has changed."""
    writers = Writers(is_alone=True)

    layouts, writes = zip(*(writers.plan(described(rows)) for rows in (3, 3, 4)), strict=True)

    assert list(writes) == [{"model.safetensors": ["weight"]}] * 3
    assert [layout.tensors["model.safetensors"]["weight"].shape for layout in layouts] == [[3, 2], [3, 2], [4, 2]]
    assert layouts[0] is layouts[1]
    assert writers.saves == 3


def test_error_of_one_process():
    """The process in which a save fails raises its own error."""
    with pytest.raises(KeyError, match="weight"), failing_in_all("runs/one"):
        raise KeyError("weight")
