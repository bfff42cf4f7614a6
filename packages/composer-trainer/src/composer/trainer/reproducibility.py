"""Reproducibility: seeds and deterministic algorithms."""

from __future__ import annotations

import os
import secrets

import torch

from composer.core.saving.randomness import seed_globals

__all__ = ["configure_deterministic_mode", "get_random_seed", "seed_all"]

MAX_SEED = 2**32 - 1
"""The largest seed that NumPy accepts."""


def get_random_seed() -> int:
    """Return a random seed, without drawing from any generator.

    Example:
        >>> 0 <= get_random_seed() <= MAX_SEED
        True
    """
    return secrets.randbelow(MAX_SEED + 1)


def seed_all(seed: int) -> None:
    """Seed the global generators of Python, NumPy and torch, including those of all devices.

    Args:
        seed: In ``[0, 2**32 - 1]``.

    Raises:
        ValueError: The seed is out of range.

    Example:
        >>> seed_all(17)
        >>> first = torch.rand(2)
        >>> seed_all(17)
        >>> torch.equal(first, torch.rand(2))
        True
    """
    choose_seed(seed)
    torch.manual_seed(seed)
    seed_globals(seed)


def choose_seed(seed: int | None) -> int:
    """Return the seed, or a random one if None.

    Raises:
        TypeError: The seed is not an integer.
        ValueError: The seed is out of range.
    """
    if seed is None:
        return get_random_seed()
    if isinstance(seed, bool) or not isinstance(seed, int):
        raise TypeError(f"seed must be a whole number, got {seed!r}.")
    if not 0 <= seed <= MAX_SEED:
        raise ValueError(f"seed must be in [0, {MAX_SEED}], got {seed}.")
    return seed


def configure_deterministic_mode() -> None:
    """Make torch use deterministic algorithms, or raise an error for operations without one.

    Call it before the first use of a GPU, because cuBLAS reads its setting only once.

    Example:
        >>> configure_deterministic_mode()
        >>> torch.are_deterministic_algorithms_enabled()
        True
        >>> torch.use_deterministic_algorithms(mode=False)
    """
    torch.use_deterministic_algorithms(mode=True)
    torch.backends.cudnn.benchmark = False
    # One of the two sizes of workspaces with which cuBLAS is deterministic.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
