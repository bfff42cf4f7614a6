"""Draws of single numbers and permutations."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from composer import functional as cf
from composer.functional.random import send


def _beta_cdf(alpha: float, points: torch.Tensor) -> torch.Tensor:
    """The distribution function of Beta(alpha, alpha), summed over a grid in the logit, where there are no poles."""
    grid = torch.linspace(-200, 200, 400_001, dtype=torch.float64)
    density = torch.exp(alpha * (torch.nn.functional.logsigmoid(grid) + torch.nn.functional.logsigmoid(-grid)))
    cumulative = torch.cumsum(density, 0) / density.sum()
    places = torch.searchsorted(grid, torch.logit(points)).clamp(max=len(grid) - 1)
    return cumulative[places]


class TestDrawBeta:
    @pytest.mark.parametrize("alpha", [0.1, 0.2, 0.5, 1.0, 2.5, 30.0])
    def test_draws_follow_the_distribution(self, alpha: float, generator: torch.Generator):
        """The Kolmogorov-Smirnov distance of 4,000 draws is below the bound that is exceeded with probability 1e-4."""
        count = 4000

        draws = torch.tensor([cf.draw_beta(alpha, generator=generator) for _ in range(count)], dtype=torch.float64)

        expected = _beta_cdf(alpha, draws.sort().values.clamp(1e-15, 1 - 1e-15))
        steps = torch.arange(count + 1, dtype=torch.float64) / count
        # Two draws closer to 0 or 1 than the clamp are equal here and in the formula.
        inside = (expected > 1e-2) & (expected < 1 - 1e-2)
        distance = torch.maximum((expected - steps[:-1]).abs(), (expected - steps[1:]).abs())[inside].max()
        assert distance < 2.23 / math.sqrt(count)

    @given(alpha=st.floats(1e-6, 1e6), seed=st.integers(0, 2**40))
    def test_draws_depend_on_the_generator(self, alpha: float, seed: int):
        """Draws depend only on the generator and are in the interval."""
        first = cf.draw_beta(alpha, generator=torch.Generator().manual_seed(seed))
        second = cf.draw_beta(alpha, generator=torch.Generator().manual_seed(seed))

        assert first == second
        assert 0 <= first <= 1

    def test_global_generator_is_not_used(self, generator: torch.Generator):
        """With a generator, torch's global one is not advanced."""
        before = torch.get_rng_state()

        cf.draw_beta(0.2, generator=generator)
        cf.draw_permutation(8, generator=generator)

        assert torch.equal(before, torch.get_rng_state())


class TestDrawPermutation:
    @given(count=st.integers(0, 200), seed=st.integers(0, 2**40))
    def test_is_a_permutation(self, count: int, seed: int):
        """Each number occurs once, and draws are reproducible."""
        order = cf.draw_permutation(count, generator=torch.Generator().manual_seed(seed))

        assert torch.equal(order.sort().values, torch.arange(count))
        assert torch.equal(order, cf.draw_permutation(count, generator=torch.Generator().manual_seed(seed)))

    def test_tensor_gives_number_and_device(self, device: torch.device):
        """For a batch, the permutation has its length and device, with equal values on each device."""
        batch = torch.zeros(6, 2, device=device)

        order = cf.draw_permutation(batch, generator=torch.Generator().manual_seed(3))

        assert order.device == batch.device
        assert torch.equal(order.cpu(), cf.draw_permutation(6, generator=torch.Generator().manual_seed(3)))


class _Recorder:
    """Records calls on a tensor instead of using a GPU."""

    device = torch.device("cpu")

    def __init__(self, steps: tuple[object, ...] = ()) -> None:
        self.steps = steps

    def pin_memory(self) -> _Recorder:
        return _Recorder((*self.steps, "pinned"))

    def to(self, device: torch.device, *, non_blocking: bool = False) -> _Recorder:
        return _Recorder((*self.steps, device.type, non_blocking))


@pytest.mark.parametrize(("is_compiling", "steps"), [(False, ("pinned", "cuda", True)), (True, ("cuda", False))])
def test_does_not_pin_memory_while_compiling(
    is_compiling: bool, steps: tuple[object, ...], monkeypatch: pytest.MonkeyPatch
):
    """Fake tensors cannot be pinned; outside of compilation, pinning avoids a synchronization."""
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: is_compiling)

    assert send(_Recorder(), torch.device("cuda")).steps == steps
