"""Spikes of losses and norms, compared with formulas and simulated trainings."""

import math

import numpy as np
import pytest
import torch

from composer import functional as cf


def simulated(series, window=128, threshold=6.0):
    """Return where a series of shape ``(runs, steps)`` has spikes, as a training with a moving window finds them."""
    history = torch.full((len(series), window), torch.nan)
    found = []
    for step, values in enumerate(series.unbind(1)):
        spikes, limits = cf.detect_spikes(values, history, threshold, window // 2)
        history[:, step % window] = values.minimum(limits)
        found.append(spikes)
    return torch.stack(found, 1)


class TestLimit:
    def test_matches_the_formula(self):
        """The limits are the means plus a number of NumPy's unbiased standard deviations."""
        history = torch.rand(3, 40, generator=torch.Generator().manual_seed(0))
        expected = history.numpy().mean(1) + 4 * np.std(history.numpy(), axis=1, ddof=1)

        spikes, limits = cf.detect_spikes(torch.tensor([0.5, 1.5, 9.0]), history, threshold=4.0)

        np.testing.assert_allclose(limits, expected, rtol=1e-6)
        assert spikes.tolist() == (np.array([0.5, 1.5, 9.0]) > expected).tolist()

    def test_missing_values_do_not_count(self):
        """A history with gaps has the limit of its values, in any order."""
        values = torch.tensor([2.0, 4.0, 3.0])
        with_gaps = torch.tensor([torch.nan, 4.0, torch.nan, 2.0, 3.0, torch.nan])

        expected = cf.detect_spikes(torch.tensor(5.0), values, 2.5)

        assert all(map(torch.equal, cf.detect_spikes(torch.tensor(5.0), with_gaps, 2.5), expected))
        assert expected[0].item() is False

    @pytest.mark.parametrize("least", [2, 4])
    def test_short_history_has_no_limit(self, least):
        """With fewer values than required, every finite value is normal."""
        history = torch.arange(least - 1.0)

        spike, limit = cf.detect_spikes(torch.tensor(1e30), history, min_values=least)

        assert (spike.item(), limit.item()) == (False, math.inf)

    @pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
    def test_values_that_are_not_finite_are_spikes(self, value):
        """NaN and infinite values are spikes, also without a history."""
        for history in (torch.full((8,), torch.nan), torch.rand(8)):
            assert cf.detect_spikes(torch.tensor(value), history)[0].item()


class TestSimulations:
    def series(self):
        """Return ten series of 10,000 steps: decreasing losses with noise, and skewed norms that rise in a warm-up."""
        generator, steps = torch.Generator().manual_seed(0), torch.arange(10_000)
        noise = torch.randn(10, 10_000, generator=generator)
        losses = 2 + 8 / (1 + steps / 100) + 0.1 * noise[:5]
        norms = (steps / 500).clamp(0.1, 1) * (0.25 * noise[5:]).exp()
        return torch.cat([losses, norms])

    def test_clean_runs_have_hardly_any_false_alarm(self):
        """In 10,000 steps without spikes, each series has at most one false alarm in 1,000 steps."""
        assert simulated(self.series()).float().mean(1).max() <= 1e-3

    def test_planted_spikes_are_found(self):
        """Values of ten times the usual size are found, each of them, also one after another."""
        series = self.series()
        planted = [700, 3000, 3001, 3002, 9999]
        series[:, planted] *= 10

        assert simulated(series)[:, planted].all()

    def test_higher_level_becomes_normal(self):
        """Values that stay at a higher level are spikes for a part of the window only."""
        series = self.series()[:5, :2000]
        series[:, 1000:] += 20

        found = simulated(series)[:, 1000:].sum(1)

        assert (found > 0).all()
        assert (found < 128).all()
