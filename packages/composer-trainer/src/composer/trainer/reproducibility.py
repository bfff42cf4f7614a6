"""Seeds and deterministic algorithms: the same numbers from the same program."""

from __future__ import annotations

import os
import random
import secrets
import sys

import torch

__all__ = ["configure_deterministic_mode", "get_random_seed", "seed_all"]

MAX_SEED = 2**32 - 1
"""NumPy takes no larger one."""


def get_random_seed() -> int:
    """Return a seed that nobody chose, without touching any generator.

    Example:
        >>> 0 <= get_random_seed() <= MAX_SEED
        True
    """
    return secrets.randbelow(MAX_SEED + 1)


def seed_all(seed: int) -> None:
    """Seed Python's, NumPy's and torch's global generators, those of every device included.

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
    check_seed(seed)
    random.seed(seed)
    torch.manual_seed(seed)
    if "numpy" in sys.modules:
        # Where nobody has imported NumPy, nobody draws from it.
        sys.modules["numpy"].random.seed(seed)


def check_seed(seed: int) -> int:
    """Return the seed.

    Raises:
        TypeError: It is no whole number.
        ValueError: It is out of range.
    """
    if isinstance(seed, bool) or not isinstance(seed, int):
        raise TypeError(f"seed must be a whole number, got {seed!r}.")
    if not 0 <= seed <= MAX_SEED:
        raise ValueError(f"seed must be in [0, {MAX_SEED}], got {seed}.")
    return seed


def configure_deterministic_mode() -> None:
    """Make torch use algorithms that give the same bits every time, or raise where it has none.

    Call it before the first use of a GPU: cuBLAS reads its setting only once.

    Example:
        >>> configure_deterministic_mode()
        >>> torch.are_deterministic_algorithms_enabled()
        True
        >>> torch.use_deterministic_algorithms(mode=False)
    """
    torch.use_deterministic_algorithms(mode=True)
    torch.backends.cudnn.benchmark = False
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
