"""Power-function averages and their reconstruction, compared with integrals and direct averages."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from composer import functional as cf


def direct(weights, sigma_rel, every=1):
    """Return the averages of rows of weights by the recurrence, after every so many updates, and these counts."""
    average, averages, counts = torch.zeros_like(weights[0]), [], []
    for count, row in enumerate(weights, start=1):
        smoothing = cf.power_ema_smoothing(count, sigma_rel)
        average = smoothing * average + (1 - smoothing) * row
        if not count % every:
            averages.append(average)
            counts.append(count)
    return averages, counts


def walk(steps, size=50):
    """Return weights that drift, with noise, like those of a training."""
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(size, generator=generator, dtype=torch.float64)
    return start + 0.05 * torch.randn(steps, size, generator=generator, dtype=torch.float64).cumsum(0)


class TestSmoothing:
    @given(sigma_rel=st.floats(0.01, 0.288))
    def test_width_of_the_profile(self, sigma_rel):
        """The weights of the updates sum to 1, and their standard deviation is ``sigma_rel`` of the training."""
        updates = 4000
        smoothings = np.array([cf.power_ema_smoothing(count, sigma_rel) for count in range(1, updates + 1)])
        later = np.append(np.cumprod(smoothings[:0:-1])[::-1], 1.0)
        profile, times = (1 - smoothings) * later, np.arange(1, updates + 1) / updates

        mean = (profile * times).sum()
        deviation = math.sqrt((profile * (times - mean) ** 2).sum())

        assert profile.sum() == pytest.approx(1, abs=1e-9)
        assert deviation == pytest.approx(sigma_rel, rel=0.01, abs=2 / updates)

    def test_widest_is_the_mean(self):
        """The largest width gives all updates the same weight."""
        weights = walk(100)

        averages, _ = direct(weights, 12**-0.5)

        torch.testing.assert_close(averages[-1], weights.mean(0))


class TestReconstruction:
    @pytest.mark.parametrize("sigma_rel", [0.04, 0.05, 0.06, 0.08, 0.1, 0.12, 0.15, 0.2])
    @pytest.mark.parametrize("at", [1000, 720])
    def test_equals_the_average_that_is_computed_directly(self, sigma_rel, at):
        """From 50 snapshots of two widths, averages of others are within 1e-3, also at an earlier snapshot."""
        weights = walk(1000)
        (narrow, counts), (wide, _) = direct(weights, 0.05, every=20), direct(weights, 0.1, every=20)
        expected = direct(weights[:at], sigma_rel)[0][-1]

        factors = cf.post_hoc_weights(counts * 2, [0.05] * 50 + [0.1] * 50, sigma_rel, at)

        found = factors @ torch.stack(narrow + wide)
        assert (found - expected).norm() <= 1e-3 * expected.norm()

    def test_inner_products_are_integrals(self):
        """With two snapshots, the factors solve the equations whose coefficients are integrated numerically."""
        times = (np.arange(1_000_000) + 0.5) / 1_000_000

        def profile(end, sigma_rel):
            power = math.log(cf.power_ema_smoothing(2, sigma_rel)) / math.log(0.5)
            return np.where(times < end, power * times ** (power - 1) / end**power, 0)

        first, second, third, wanted = profile(0.9, 0.1), profile(1, 0.1), profile(1, 0.15), profile(1, 0.13)
        # The sum of the factors is 1, so two of them are free.
        changes = np.stack([first - third, second - third])
        factors = np.linalg.solve(changes @ changes.T, changes @ (wanted - third))

        found = cf.post_hoc_weights([90, 100, 100], [0.1, 0.1, 0.15], 0.13)

        assert found.tolist() == pytest.approx([*factors, 1 - factors.sum()], abs=1e-4)

    @pytest.mark.parametrize(("sigma_rel", "at"), [(0.01, None), (0.28, None), (0.2, 100)])
    def test_what_cannot_be_reconstructed_is_an_error(self, sigma_rel, at):
        """Widths far from those of few snapshots raise an error with the difference."""
        with pytest.raises(ValueError, match=r"cannot be reconstructed from these 4 snapshots: .* differs by \d+%"):
            cf.post_hoc_weights([100, 100, 200, 200], [0.05, 0.1] * 2, sigma_rel, at)

    @pytest.mark.parametrize("at", [5, 12, 21])
    def test_time_of_no_snapshot_is_an_error(self, at):
        """An average can be reconstructed at the snapshots only; the error has the nearest ones."""
        with pytest.raises(ValueError, match=rf"number of updates of a snapshot, such as \[.*\], got {at}"):
            cf.post_hoc_weights([10, 20], [0.05, 0.05], 0.05, at=at)
