"""The statistics of a study: paired differences with intervals, adjusted p-values, and times to a quality."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import attrs

from composer.loggers.products import import_product

_UPPER = 0.975
"""The upper end of an interval of 95 %, as a probability."""


@attrs.frozen
class Difference:
    """A mean paired difference.

    Args:
        mean: The mean.
        low: The lower end of its 95 % interval (Student's t); None for a single pair.
        high: The upper end.
        p_value: The two-sided p-value of a mean of 0; None for a single pair.
        pairs: The number of pairs.
    """

    mean: float
    low: float | None
    high: float | None
    p_value: float | None
    pairs: int

    @property
    def is_clear(self) -> bool:
        """Whether the interval excludes 0."""
        return self.low is not None and self.high is not None and (self.low > 0 or self.high < 0)


def paired_difference(values: Mapping[int, float], others: Mapping[int, float]) -> Difference | None:
    """Return the mean difference of two arms with the interval and p-value of :func:`scipy.stats.ttest_rel`.

    Args:
        values: A number by seed.
        others: The numbers of the other arm.

    Returns:
        The difference over the seeds that both have; None without any.

    Example:
        >>> paired_difference({0: 2.0, 1: 3.0, 2: 4.0}, {0: 1.0, 1: 1.0, 2: 1.0}).mean
        2.0
    """
    differences = [value - others[seed] for seed, value in values.items() if seed in others]
    count = len(differences)
    if count < 2:
        return Difference(differences[0], None, None, None, 1) if differences else None
    mean, error = statistics.fmean(differences), statistics.stdev(differences) / math.sqrt(count)
    if not error:  # without spread, there is no t statistic
        return Difference(mean, mean, mean, 0.0 if mean else 1.0, count)
    t = _students_t()
    half = float(t.ppf(_UPPER, count - 1)) * error
    return Difference(mean, mean - half, mean + half, 2 * float(t.sf(abs(mean) / error, count - 1)), count)


def paired_ratio(values: Mapping[int, float], others: Mapping[int, float]) -> Difference | None:
    """Return the geometric mean of ratios of positive numbers, as :func:`paired_difference` of their logarithms."""
    logarithms = ({seed: math.log(value) for seed, value in each.items()} for each in (values, others))
    found = paired_difference(*logarithms)
    if found is None:
        return None
    low, high = (None if end is None else math.exp(end) for end in (found.low, found.high))
    return attrs.evolve(found, mean=math.exp(found.mean), low=low, high=high)


def adjusted_p_values(p_values: Sequence[float]) -> list[float]:
    """Return p-values adjusted for their number by Holm's step-down method (Holm 1979, Scand. J. Statist. 6:65-70).

    The smallest of ``m`` is multiplied by ``m``, the next by ``m - 1`` and so on; no value is smaller than the one
    before it, or larger than 1. SciPy has no such function.

    Example:
        >>> adjusted_p_values([0.01, 0.04, 0.03])
        [0.03, 0.06, 0.06]
    """
    order = sorted(range(len(p_values)), key=p_values.__getitem__)
    multiplied = [(len(order) - rank) * p_values[place] for rank, place in enumerate(order)]
    adjusted = dict(zip(order, itertools.accumulate(multiplied, max), strict=True))
    return [min(1.0, adjusted[place]) for place in range(len(p_values))]


def seeds_needed(difference: Difference, most: int = 1000) -> int | None:
    """Return how many seeds would make the interval exclude 0 if mean and spread stay the same; None above ``most``."""
    if difference.low is None or difference.mean == 0:
        return None
    quantile = _students_t().ppf
    half, root = difference.mean - difference.low, math.sqrt(difference.pairs)
    deviation = half * root / float(quantile(_UPPER, difference.pairs - 1))
    for seeds in range(2, most + 1):
        if float(quantile(_UPPER, seeds - 1)) * deviation / math.sqrt(seeds) < abs(difference.mean):
            return seeds
    return None


def time_to(quality: float, curve: Sequence[tuple[float, float]], sign: int) -> float:
    """Return the seconds of training after which a curve first reaches a quality, interpolated between evaluations.

    Args:
        quality: The value to reach.
        curve: The seconds and values of the evaluations. A quality that the first one has reached takes its time.
        sign: 1 if larger values are better, else -1.

    Returns:
        The seconds; infinity if the quality is not reached.

    Example:
        >>> time_to(0.75, [(1.0, 0.5), (2.0, 1.0)], sign=1)
        1.5
    """
    before: tuple[float, float] | None = None
    for seconds, value in curve:
        if sign * value >= sign * quality:
            if before is None:
                return seconds
            share = (quality - before[1]) / (value - before[1])
            return before[0] + share * (seconds - before[0])
        before = seconds, value
    return math.inf


def _students_t() -> Any:
    return import_product("scipy.stats", "ablation").t
