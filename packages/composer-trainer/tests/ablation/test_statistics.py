"""Differences, p-values and times, compared with SciPy, published numbers and worked-out cases."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from composer.ablation import Study
from composer.ablation.results import Result, Settings
from composer.ablation.statistics import adjusted_p_values, paired_difference, seeds_needed, time_to

# The p-values and R's p.adjust(p, "holm") in the tests of statsmodels' multipletests.
P_VALUES = [
    0.838541367553,
    0.642193923795,
    0.680845947633,
    0.967833824309,
    0.71626938238,
    0.177096952723,
    5.23656777208e-05,
    0.0202732688798,
    0.00028140506198,
    0.0149877310796,
]
HOLM = [1, 1, 1, 1, 1, 1, 5.23656777208e-04, 0.14191288215860001, 2.5326455578199999e-03, 0.11990184863680001]


def study_of(values, mode="max"):
    """Return a study of final values by arm: ``{"name": [a value for each seed]}``."""
    count = len(next(iter(values.values())))
    runs = [
        Result(() if name == "baseline" else (name,), seed, ((1.0, float(value)),), 1.0)
        for name, column in values.items()
        for seed, value in enumerate(column)
    ]
    return Study(Settings("eval/Accuracy", mode, tuple(range(count)), {}), runs)


class TestPairedDifference:
    def test_equals_scipy(self):
        """Interval and p-value are those of scipy.stats.ttest_rel."""
        generator = np.random.default_rng(0)
        values, baseline = generator.normal(1, 1, 7).tolist(), generator.normal(0, 1, 7).tolist()

        found = paired_difference(dict(enumerate(values)), dict(enumerate(baseline)))

        expected = stats.ttest_rel(values, baseline)
        interval = expected.confidence_interval(0.95)
        assert (found.low, found.high) == pytest.approx((interval.low, interval.high))
        assert found.p_value == pytest.approx(expected.pvalue)
        assert found.mean == pytest.approx(np.mean(values) - np.mean(baseline))


class TestAdjustedPValues:
    def test_published_example(self):
        """The values are those that R and statsmodels compute."""
        assert adjusted_p_values(P_VALUES) == pytest.approx(HOLM, rel=1e-9)

    @given(st.lists(st.floats(0, 1), min_size=1, max_size=8))
    def test_laws(self, p_values):
        """Adjusted values are not smaller, at most 1, and in the same order."""
        adjusted = adjusted_p_values(p_values)

        assert all(before <= after <= 1 for before, after in zip(p_values, adjusted, strict=True))
        in_order = [after for _, after in sorted(zip(p_values, adjusted, strict=True))]
        assert in_order == sorted(in_order)


class TestOneHundredStudies:
    def test_no_effect_is_not_found(self):
        """With algorithms that do nothing, 95 % intervals contain 0, and adjusted p-values are uniform or above."""
        generator = np.random.default_rng(1)
        contain, smallest = [], []
        for _ in range(100):
            noise = generator.normal(0, 0.02, (4, 5))
            rows = study_of(dict(zip(["baseline", "a", "b", "c"], 0.9 + noise, strict=True))).rows[1:]
            contain.append(not rows[0].difference.is_clear)
            smallest.append(min(row.adjusted_p for row in rows))

        assert sum(contain) >= 90
        # The smallest of the adjusted p-values is below a level with at most this probability.
        assert stats.kstest(smallest, "uniform", alternative="greater").pvalue > 0.01

    def test_an_effect_is_found(self):
        """A gain of three standard deviations is the recipe in nearly all studies."""
        generator = np.random.default_rng(17)
        found = []
        for _ in range(100):
            baseline = generator.normal(0.9, 0.02, 5)
            better = baseline + generator.normal(0.03, 0.01, 5)
            found.append(study_of({"baseline": baseline, "better": better}).best_recipe() == ("better",))

        assert sum(found) >= 95


class TestSeedsNeeded:
    def test_more_seeds_for_a_smaller_effect(self):
        """The number is the first for which the interval of the same mean and spread excludes 0."""
        difference = paired_difference({0: 1.0, 1: 3.0, 2: -1.0}, dict.fromkeys(range(3), 0.0))

        needed = seeds_needed(difference)

        def half_width(seeds):
            return stats.t.ppf(0.975, seeds - 1) * 2.0 / math.sqrt(seeds)

        assert half_width(needed) < 1.0 <= half_width(needed - 1)


class TestTimeTo:
    def test_between_evaluations(self):
        """Between two evaluations the curve is a straight line."""
        curve = [(1.0, 4.0), (2.0, 2.0), (3.0, 1.0)]

        assert time_to(3.0, curve, sign=-1) == 1.5
        assert time_to(1.0, curve, sign=-1) == 3.0
        assert time_to(5.0, curve, sign=-1) == 1.0
        assert time_to(0.5, curve, sign=-1) == math.inf
