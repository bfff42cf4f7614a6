"""Estimates of the noise of gradients, compared with the covariances of known distributions."""

import itertools

import pytest
import torch

from composer import functional as cf


def square(gradients):
    """Return the squared norm of the mean of gradients ``(..., samples, parameters)``."""
    return gradients.mean(-2).square().sum(-1)


class TestEstimates:
    @pytest.mark.parametrize("size", [1, 2])
    def test_mean_over_all_batches(self, size):
        """The means over all batches of 3 of 4 samples are the squared norm and the trace of the covariance."""
        samples = torch.randn(4, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        batches = samples[torch.tensor(list(itertools.product(range(4), repeat=3)))]

        squares, traces = cf.estimate_gradient_noise(square(batches[:, :size]), square(batches), size, 3)

        covariance = torch.cov(samples.T, correction=0)
        torch.testing.assert_close(squares.mean(), square(samples))
        torch.testing.assert_close(traces.mean(), covariance.trace())

    def test_quadratic(self):
        """On a quadratic with known noise, the ratio of averages is the noise scale of the closed formula."""
        generator = torch.Generator().manual_seed(1)
        curvature, place = torch.tensor([4.0, 1.0, 0.25]), torch.tensor([0.5, -1.0, 2.0])
        deviation = torch.tensor([1.0, 2.0, 0.5])
        # Of the loss 1/2 curvature · place² + noise · place of a sample; the noise is independent.
        noise = torch.randn(20_000, 16, 3, generator=generator) * deviation
        gradients = curvature * place + noise

        squares, traces = cf.estimate_gradient_noise(square(gradients[:, :4]), square(gradients), 4, 16)

        expected = deviation.square().sum() / (curvature * place).square().sum()
        torch.testing.assert_close(traces.mean() / squares.mean(), expected, rtol=0.02, atol=0.0)
