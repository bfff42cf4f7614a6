"""Selection of tokens by their excess losses."""

import pytest
import torch

from composer import functional as cf


def by_sorting(losses, reference, mask, keep):
    """Return the weights of one row, computed with Python's numbers."""
    places = [place for place, counts in enumerate(mask) if counts]
    places.sort(key=lambda place: -(losses[place] - reference[place]))
    weights, left = [0.0] * len(mask), keep * len(places)
    for place in places:
        weights[place] = max(min(left, 1.0), 0.0)
        left -= 1
    return weights


@pytest.fixture
def rows():
    """Return losses, losses of a reference and a mask, whose last row is empty."""
    generator = torch.Generator().manual_seed(0)
    losses, reference = torch.rand(2, 6, 9, generator=generator, dtype=torch.float64)
    mask = torch.rand(6, 9, generator=generator) < torch.tensor([1.0, 0.8, 0.6, 0.4, 0.3, 0.0])[:, None]
    return losses, reference, mask


@pytest.mark.parametrize("keep", [0.05, 0.3, 0.6, 1.0])
def test_weights_are_those_of_sorted_tokens(rows, keep):
    """In each row, the tokens with the highest excess have the weights, of the sum keep times their number."""
    weights = cf.select_tokens(*rows, keep)

    expected = [by_sorting(*row, keep) for row in zip(*(one.tolist() for one in rows), strict=True)]
    torch.testing.assert_close(weights, torch.tensor(expected, dtype=torch.float64))
    torch.testing.assert_close(weights.sum(1), keep * rows[2].sum(1).double())


def test_rows_do_not_depend_on_others(rows):
    """Any split of the rows gives the same weights."""
    parts = [cf.select_tokens(*part, 0.37) for part in zip(*(one.split([1, 3, 2]) for one in rows), strict=True)]

    assert torch.equal(torch.cat(parts), cf.select_tokens(*rows, 0.37))


def test_excess_and_not_the_loss_is_ranked():
    """A token with a high loss that the reference model has, too, is left out."""
    losses, reference = torch.tensor([[9.0, 2.0]]), torch.tensor([[9.0, 0.5]])

    weights = cf.select_tokens(losses.requires_grad_(), reference, torch.ones(1, 2).bool(), 0.5)

    assert weights.tolist() == [[0.0, 1.0]]
    assert not weights.requires_grad
