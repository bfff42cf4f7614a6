"""Random numbers and permutations, drawn on the CPU, so that nothing waits for a device."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from composer.functional.checks import check_interval, check_whole, described

_WORD = 2**32 - 1


def draw_beta(alpha: float, *, generator: torch.Generator | None = None) -> float:
    """Draw one number from the Beta distribution with both parameters ``alpha``.

    ``X / (X + Y)`` with ``X`` and ``Y`` from a Gamma distribution, computed with logarithms, because for a small
    ``alpha`` both would be rounded to zero.

    Args:
        alpha: Both parameters, positive and finite. Below 1, the draws concentrate at 0 and 1; above, at 0.5.
        generator: The random generator, on the CPU; torch's default generator if ``None``.

    Returns:
        A number in ``[0, 1]``.

    Raises:
        ValueError: ``alpha`` is not positive and finite, or ``generator`` is not on the CPU.

    Example:
        >>> 0 <= draw_beta(0.2, generator=torch.Generator().manual_seed(17)) <= 1
        True
    """
    check_alpha(alpha)
    check_generator(generator)
    log_odds = _draw_log_gamma(alpha, generator) - _draw_log_gamma(alpha, generator)
    odds = math.exp(-abs(log_odds))  # of the smaller part, because the larger could overflow
    return (1 if log_odds > 0 else odds) / (1 + odds)


def draw_permutation(count: int | Tensor, *, generator: torch.Generator | None = None) -> Tensor:
    """Draw a permutation of ``count`` items, or of the samples of a batch.

    It depends only on the generator, not on the device of the result.

    Args:
        count: The number of items, or a tensor of shape ``(N, ...)`` for ``N`` items.
        generator: The random generator, on the CPU; torch's default generator if ``None``.

    Returns:
        A permutation of ``range(count)``, int64, shape ``(count,)``, on the tensor's device (the CPU for a number).

    Raises:
        ValueError: ``count`` is negative or has no first dimension, or ``generator`` is not on the CPU.

    Example:
        >>> draw_permutation(4, generator=torch.Generator().manual_seed(17)).sort().values
        tensor([0, 1, 2, 3])
        >>> draw_permutation(torch.rand(5, 3)).shape
        torch.Size([5])
    """
    check_generator(generator)
    if not isinstance(count, Tensor):
        check_whole("count", count, 0, "It is the number of items to permute.")
        return torch.randperm(count, generator=generator, device="cpu")
    if count.ndim == 0:
        raise ValueError("count must be a number or a batch of shape (N, ...), got a tensor without dimensions.")
    return send(torch.randperm(count.shape[0], generator=generator, device="cpu"), count.device)


def send(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy from the CPU to a device, without waiting for pending work of the device.

    CUDA copies asynchronously from pinned memory only. The kernels that follow on the same stream start after the copy,
    and torch reuses the pinned memory only after the event that it records behind the copy.
    """
    # A tensor on a device cannot be pinned, nor a fake one.
    is_pinned = device.type == "cuda" and tensor.device.type == "cpu" and not torch.compiler.is_compiling()
    return tensor.pin_memory().to(device, non_blocking=True) if is_pinned else tensor.to(device)


def spread_words(numbers: Tensor) -> Tensor:
    """Spread small int64 numbers over 32 bits, by the golden ratio."""
    return (numbers * 0x9E3779B1) & _WORD


def hash_words(words: Tensor) -> Tensor:
    """Mix 32-bit words in int64 by shifts and multiplications, a one-to-one map like the final step of MurmurHash3."""
    # The shifts and factors of splitmix32. The factors are below 2^31, so that no product overflows int64.
    words = ((words ^ (words >> 16)) * 0x21F0AAAD) & _WORD
    words = ((words ^ (words >> 15)) * 0x735A2D97) & _WORD
    return words ^ (words >> 15)


def check_alpha(alpha: float) -> None:
    """Raise an error for a number that cannot be all parameters of a Beta or Dirichlet distribution."""
    meaning = "It is the parameter of the distribution."
    check_interval("alpha", alpha, 0, math.inf, meaning, open_low=True, open_high=True)


def check_generator(generator: torch.Generator | None) -> None:
    """Raise an error for other types, and for a generator on a device, whose draws would wait for the device."""
    if generator is None:
        return
    if not isinstance(generator, torch.Generator):
        raise TypeError(
            f"generator must be a torch.Generator or None, got {described(generator)}. "
            "For a seed: torch.Generator().manual_seed(seed)."
        )
    if generator.device.type != "cpu":
        raise ValueError(
            f"generator must be on the CPU, got one on {generator.device}. "
            "Create it by torch.Generator(): drawing a number on a device would wait for the device."
        )


def _draw_log_gamma(alpha: float, generator: torch.Generator | None) -> float:
    """Draw the logarithm of a Gamma(alpha) variable (Marsaglia and Tsang 2000, doi:10.1145/358407.358414).

    Their method draws from Gamma(alpha + 1), which accepts nearly every proposal, and multiplies by U^(1/alpha).
    """
    # The paper's d = a - 1/3 and c = 1 / sqrt(9 d), for a = alpha + 1.
    shape = alpha + 2 / 3
    scale = 1 / math.sqrt(9 * shape)
    while True:
        normal = torch.randn((), generator=generator, dtype=torch.float64, device="cpu").item()
        cube = (1 + scale * normal) ** 3
        accept, boost = torch.rand(2, generator=generator, dtype=torch.float64, device="cpu").tolist()
        # torch.rand may return 0 but not 1, so the logarithms of 1 minus a draw are finite.
        if cube > 0 and math.log1p(-accept) < normal**2 / 2 + shape * (1 - cube + math.log(cube)):
            # Below 1e-300 both logarithms of draw_beta would be infinite, and their difference NaN.
            return math.log(shape) + math.log(cube) + math.log1p(-boost) / max(alpha, 1e-300)
