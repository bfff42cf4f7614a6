"""Patch dropout: a random part of the tokens remains."""

from __future__ import annotations

import pytest
import torch
from scipy import stats

from composer import functional as cf


def numbered(samples: int, tokens: int) -> torch.Tensor:
    """Return tokens of two features, their sample and their position."""
    rows = torch.arange(samples)[:, None].expand(samples, tokens)
    return torch.stack([rows, torch.arange(tokens).expand(samples, tokens)], dim=2).float()


class TestPatchDropout:
    @pytest.mark.parametrize(("p", "kept"), [(0.5, 4), (0.25, 6), (0.3, 5), (0.99, 1), (0.0, 8)])
    @pytest.mark.parametrize("prefix", [0, 1, 2])
    def test_number_of_tokens(self, p, kept, prefix):
        """Of T patches max(1, floor(T * (1 - p))) remain, and all prefix tokens at their places."""
        output = cf.PatchDropout(p, prefix)(numbered(3, prefix + 8))

        assert output.shape == (3, prefix + kept, 2)
        assert torch.equal(output[:, :prefix], numbered(3, prefix))

    def test_number_of_tokens_is_not_rounded_down(self):
        """A fifth of ten is two, although ``10 * (1 - 0.8)`` is less in floating point."""
        assert cf.PatchDropout(0.8, 0)(numbered(3, 10)).shape == (3, 2, 2)

    def test_patches_are_those_of_the_image(self):
        """Each image keeps different patches of its own, none twice, whose values do not change."""
        output = cf.PatchDropout(0.5)(numbered(64, 17))

        positions = output[:, 1:, 1].sort(dim=1).values
        assert torch.equal(output[:, :, 0], numbered(64, 9)[:, :, 0])
        assert (positions.diff(dim=1) > 0).all()
        assert len(positions.unique(dim=0)) > 60

    def test_patches_are_equally_likely(self):
        """Over many images each patch remains equally often (chi-squared test)."""
        torch.manual_seed(0)
        positions = cf.PatchDropout(0.5)(numbered(4000, 9))[:, 1:, 1]

        counts = positions.long().flatten().bincount(minlength=9)[1:]
        # The variance of each count is that of 4,000 draws of probability 1/2; 7 of 8 counts are free.
        statistic = ((counts - 2000).double().square() / 1000).sum().item() * 7 / 8
        assert stats.chi2.sf(statistic, 7) > 1e-3

    def test_evaluation_is_the_identity(self):
        """In evaluation nothing is drawn, and the input is returned."""
        tokens, before = torch.rand(2, 9, 4), torch.get_rng_state()

        assert cf.PatchDropout(0.5).eval()(tokens) is tokens
        assert torch.equal(torch.get_rng_state(), before)
