"""Processes that the tests of the data only count as."""

import pytest


@pytest.fixture
def one_of_two(monkeypatch):
    """This process counts as the second of two."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
