"""Ranks from torchrun's environment variables, also incomplete ones, and process groups."""

from operator import call

import pytest
import torch
from torch.utils.data import DataLoader

from composer import distributed as cd

VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "NODE_RANK")


@pytest.fixture(autouse=True)
def clean(monkeypatch):
    for variable in VARIABLES:
        monkeypatch.delenv(variable, raising=False)


def ranks():
    return (
        cd.get_global_rank(),
        cd.get_world_size(),
        cd.get_local_rank(),
        cd.get_local_world_size(),
        cd.get_node_rank(),
    )


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({}, (0, 1, 0, 1, 0)),
        ({"RANK": "3", "WORLD_SIZE": "4"}, (3, 4, 3, 4, 0)),
        ({"RANK": "5", "WORLD_SIZE": "6", "LOCAL_WORLD_SIZE": "2"}, (5, 6, 1, 2, 2)),
        (
            {"RANK": "5", "WORLD_SIZE": "6", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "3", "GROUP_RANK": "1"},
            (5, 6, 0, 3, 1),
        ),
        ({"RANK": "1", "WORLD_SIZE": "2", "NODE_RANK": "1"}, (1, 2, 1, 2, 1)),
        ({"RANK": "1", "WORLD_SIZE": "2", "NODE_RANK": "1", "GROUP_RANK": "0"}, (1, 2, 1, 2, 0)),
    ],
    ids=["alone", "one machine", "two on each", "as torchrun", "another launcher", "both"],
)
def test_ranks_from_the_environment(monkeypatch, variables, expected):
    """Rank, world size, local rank, local world size and node rank are as set, or derived from the others."""
    for name, value in variables.items():
        monkeypatch.setenv(name, value)

    result = ranks()

    assert result == expected


def test_ranks_of_two_processes(two_processes):
    """Under torchrun, with a process group, each process has its own rank."""
    assert [result["collectives"]["ranks"] for result in two_processes] == [[0, 0, 0, 2, 2], [1, 1, 0, 2, 2]]


@pytest.mark.parametrize("text", ["two", "-1", "1.5", ""])
def test_invalid_number_raises(monkeypatch, text):
    """A variable that is not a number raises with its name."""
    monkeypatch.setenv("WORLD_SIZE", text)

    with pytest.raises(ValueError, match=r"WORLD_SIZE must be a whole number, got '"):
        cd.get_world_size()


@pytest.fixture
def in_pairs(monkeypatch):
    """This is rank 3 of four processes, of which two each have the same samples."""
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("WORLD_SIZE", "4")
    cd.environment.set_tensor_parallel_size(2)
    yield
    cd.environment.set_tensor_parallel_size(1)


@pytest.mark.usefixtures("in_pairs")
@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_data_rank_in_a_worker(method):
    """A worker splits a stream as its process does, whether it is forked or not."""
    functions = [cd.get_data_rank, cd.get_data_world_size]
    loader = DataLoader(functions, None, num_workers=1, collate_fn=call, multiprocessing_context=method)

    assert list(loader) == [1, 2]


def test_missing_process_group_raises(monkeypatch):
    """Several processes without a process group raise."""
    monkeypatch.setenv("WORLD_SIZE", "2")

    with pytest.raises(RuntimeError, match=r"initialize_dist\(device\) first"):
        cd.all_reduce(torch.ones(1))
