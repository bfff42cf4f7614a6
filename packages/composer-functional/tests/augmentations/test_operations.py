"""Draws of operations: kind, magnitude and frequency."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from composer import functional as cf

ENHANCEMENTS = [5, 6, 7, 8]


def draw_many(severity: float, augmentation_set: str = "all") -> dict[int, torch.Tensor]:
    """Sort the magnitudes of many draws by their operation."""
    draws = cf.draw_randaugment(3000, severity, 2, augmentation_set, generator=torch.Generator().manual_seed(3))
    return {number: draws.magnitudes[draws.operations == number] for number in draws.operations.unique().tolist()}


class TestSets:
    @pytest.mark.parametrize(
        ("name", "numbers"),
        [("all", [*range(1, 14)]), ("safe", [1, 2, 3, 4, *range(9, 14)]), ("original", [*range(1, 14)])],
    )
    def test_operations_are_equally_likely(self, name: str, numbers: list[int]):
        """Each operation of a set is drawn with equal frequency within four standard deviations, the identity never."""
        drawn = draw_many(9, name)

        expected = 6000 / len(numbers)
        assert sorted(drawn) == numbers
        assert all(abs(len(part) - expected) < 4 * math.sqrt(expected) for part in drawn.values())

    @pytest.mark.parametrize(
        ("number", "low", "high"),
        [
            (3, 1, 4),
            (4, 0.2, 1),
            *[(number, 0.28, 1.72) for number in ENHANCEMENTS],
            (9, -24, 24),
            (10, -0.24, 0.24),
            (11, -0.24, 0.24),
            (12, -0.8 / 3, 0.8 / 3),
            (13, -0.8 / 3, 0.8 / 3),
        ],
    )
    def test_ranges_at_severity_8(self, number: int, low: float, high: float):
        """Magnitudes cover the range of the severity, with both signs where applicable."""
        magnitudes = draw_many(8)[number]
        magnitudes = magnitudes.ceil() if number == 3 else magnitudes

        slack = 0.02 * (high - low)
        assert low - 1e-6 <= magnitudes.min() <= low + slack
        assert high - slack <= magnitudes.max() <= high + 1e-6

    @pytest.mark.parametrize("name", ["all", "safe"])
    def test_severity_zero_is_the_identity_except_for_three(self, name: str):
        """Only operations without strength, and posterize, change an image at severity 0."""
        images = torch.rand(3000, 3, 2, 2)
        draws = cf.draw_randaugment(3000, 0, 1, name)

        output = cf.randaugment_batch(images, draws=draws)

        others = draws.operations[0] > 3
        torch.testing.assert_close(output[others], images[others], atol=1e-6, rtol=0)
        assert others.any()
        assert (draws.magnitudes[draws.operations == 3] == 4).all()


class TestDraws:
    @given(seed=st.integers(0, 2**40), count=st.integers(1, 9), depth=st.integers(0, 4), severity=st.floats(0, 10))
    def test_draws_depend_on_the_generator(self, seed: int, count: int, depth: int, severity: float):
        """Draws depend only on the generator, are on the CPU, and have a row for each step."""
        first, second = (
            cf.draw_randaugment(count, severity, depth, generator=torch.Generator().manual_seed(seed)) for _ in range(2)
        )

        assert torch.equal(first.operations, second.operations)
        assert torch.equal(first.magnitudes, second.magnitudes)
        assert first.operations.shape == first.magnitudes.shape == (depth, count)
        assert (first.operations.dtype, first.magnitudes.dtype) == (torch.int64, torch.float32)


@pytest.mark.parametrize("name", ["randaugment", "augmix"])
def test_draws_of_functions(name: str):
    """The draws of functions, indices and levels, replay what a function for images draws itself."""
    functions = [lambda img, level: img * level, lambda img, level: img + level]
    draw, change = getattr(cf, f"draw_{name}"), getattr(cf, f"{name}_image")
    img = torch.rand(3, 4, 4)

    draws = draw(1, 5, 9, augmentation_set=functions, generator=torch.Generator().manual_seed(17))
    replayed = change(img, augmentation_set=functions, draws=draws)

    assert draws.operations.unique().tolist() == [0, 1]
    assert torch.equal(
        replayed, change(img, 5, 9, augmentation_set=functions, generator=torch.Generator().manual_seed(17))
    )
