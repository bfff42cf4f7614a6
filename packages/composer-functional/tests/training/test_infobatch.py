"""The weights of InfoBatch, compared with the paper's formula and with the gradient of all samples."""

import math

import pytest
import torch

from composer import functional as cf


def draws(scores, ratio, count):
    """Return the weights of so many epochs, shape ``(count, N)``."""
    generator = torch.Generator().manual_seed(0)
    return torch.stack([cf.draw_infobatch_weights(scores, ratio, generator=generator) for _ in range(count)])


class TestFormula:
    def test_matches_the_paper(self):
        """Below the mean of the scores a sample has the weight 0 or 1 / (1 - r), otherwise 1."""
        scores = torch.rand(1000, generator=torch.Generator().manual_seed(1))
        is_low = scores < scores.sum() / 1000

        weights = cf.draw_infobatch_weights(scores, 0.2, generator=torch.Generator().manual_seed(2))

        assert set(weights[is_low].tolist()) == {0.0, 1.25}
        assert set(weights[~is_low].tolist()) == {1.0}

    def test_the_mean_counts_known_scores(self):
        """Samples without a score do not count in the mean, and are not pruned."""
        scores = torch.tensor([0.1, 0.2, 0.9, torch.nan, torch.nan])

        weights = draws(scores, 0.5, 100)

        assert (weights[:, 2:] == 1).all()
        assert weights[:, :2].unique().tolist() == [0.0, 2.0]

    @pytest.mark.parametrize("scores", [torch.full((7,), torch.nan), torch.full((99,), 0.1), torch.zeros(0)])
    def test_no_score_is_below_the_mean(self, scores):
        """Without scores, or with equal ones, nothing is pruned."""
        assert torch.equal(cf.draw_infobatch_weights(scores, 0.9), torch.ones_like(scores))


class TestExpectation:
    @pytest.mark.parametrize("ratio", [0.2, 0.5, 0.8])
    def test_gradient_has_no_bias(self, ratio):
        """Over draws, the mean of the weighted gradients is the gradient of all samples, within 4 standard errors."""
        generator = torch.Generator().manual_seed(3)
        inputs = torch.randn(64, 5, generator=generator, dtype=torch.float64)
        targets, weight = inputs.sum(1) + inputs[:, 0].square(), torch.zeros(5, dtype=torch.float64)
        residuals = inputs @ weight - targets
        losses, gradients = residuals.square(), 2 * residuals.unsqueeze(1) * inputs
        count = 20_000

        found = draws(losses, ratio, count) @ gradients

        error = found.std(0) / math.sqrt(count)
        assert (error > 0).all()
        assert ((found.mean(0) - gradients.sum(0)).abs() < 4 * error).all()

    def test_fraction_of_pruned_samples(self):
        """Of the samples with low scores the fraction ``ratio`` is pruned, within 4 standard errors."""
        weights = draws(torch.tensor([0.0] * 400 + [1.0] * 100), 0.3, 50)

        assert abs((weights == 0).double().mean().item() / 0.8 - 0.3) < 4 * math.sqrt(0.21 / (400 * 50))
