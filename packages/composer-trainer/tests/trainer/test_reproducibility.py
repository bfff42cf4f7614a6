"""Seeds and deterministic algorithms."""

import random

import pytest
import torch

from composer.trainer.reproducibility import choose_seed, configure_deterministic_mode, seed_all


def test_equal_seeds_give_equal_draws():
    """The generators of Python, NumPy and torch are seeded."""
    numpy = pytest.importorskip("numpy")

    def draw(seed):
        seed_all(seed)
        return random.random(), float(numpy.random.rand()), float(torch.rand(1))

    assert draw(17) == draw(17)
    assert all(one != other for one, other in zip(draw(17), draw(18), strict=True))


@pytest.mark.parametrize(("seed", "error"), [("1", TypeError), (1.0, TypeError), (True, TypeError), (-1, ValueError)])
def test_bad_seeds_raise(seed, error):
    """A seed must be a whole number of at most 32 bits."""
    with pytest.raises(error, match=r"^seed must be"):
        choose_seed(seed)
    with pytest.raises(ValueError, match=r"seed must be in \[0, 4294967295\]"):
        seed_all(2**32)


def test_deterministic_mode(monkeypatch):
    """Torch uses deterministic algorithms, and cuBLAS has its setting unless the user has chosen one."""
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    benchmark = torch.backends.cudnn.benchmark
    try:
        configure_deterministic_mode()

        assert torch.are_deterministic_algorithms_enabled()
        assert not torch.backends.cudnn.benchmark
    finally:
        torch.use_deterministic_algorithms(mode=False)
        torch.backends.cudnn.benchmark = benchmark
