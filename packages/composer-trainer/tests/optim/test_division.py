"""Shares of an optimizer's work; in several processes: distributed/test_muon.py."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from composer.optim.division import divided, shares_of, windows_of


@given(st.lists(st.floats(0, 100), max_size=20), st.integers(1, 5))
def test_shares_are_balanced(costs, processes):
    """Each item is in one share, and no share is larger than the mean by more than one item (Graham 1966)."""
    shares = shares_of(costs, processes)

    assert sorted(place for share in shares for place in share) == list(range(len(costs)))
    most = max(sum(costs[place] for place in share) for share in shares)
    assert most <= sum(costs) / processes + max(costs, default=0) + 1e-6


def test_windows_have_at_most_so_many_elements():
    """Unless one batch is larger."""
    weights = [torch.zeros(size) for size in (4, 4, 4, 20, 1)]

    assert list(windows_of([[0], [1], [2], [3], [4]], weights, 8)) == [[0, 1], [2], [3], [4]]


def test_results_of_one_process():
    """They are in the order of the items, whose shapes differ."""
    items = [torch.randn(2, 3), torch.randn(3, 2), torch.randn(2, 3)]

    results = divided(items, [3.0, 1.0, 2.0], lambda stack: stack + 1, torch.float32, 12)

    assert all(torch.equal(result, item + 1) for result, item in zip(results, items, strict=True))
