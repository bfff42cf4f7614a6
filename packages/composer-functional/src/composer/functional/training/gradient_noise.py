"""The noise of gradients, estimated from their norms at two batch sizes (McCandlish et al. 2018, arXiv:1812.06162)."""

from __future__ import annotations

import math

from torch import Tensor

from composer.functional.checks import check_float_tensors, check_interval


def estimate_gradient_noise(
    small_square: Tensor, big_square: Tensor, small_size: float | Tensor, big_size: float | Tensor
) -> tuple[Tensor, Tensor]:
    """Return unbiased estimates of the squared norm of the true gradient and of the variance of a sample's gradient.

    ``square = (big_size * big_square - small_size * small_square) / (big_size - small_size)`` and
    ``trace = (small_square - big_square) / (1 / small_size - 1 / big_size)`` (arXiv:1812.06162, appendix A.1)

    ``trace`` is the trace of the covariance of single samples' gradients. Each estimate may be negative. Average both
    over many batches: ``trace / square`` is the simple noise scale, a number of samples. Far smaller batches give up
    little of the progress that a sample can bring, far larger ones save hardly any steps.

    Args:
        small_square: Squared norm of the mean gradient of a smaller batch, which may be a part of the bigger one. Shape
            ``(...)``, floating point.
        big_square: That of a bigger batch, shape ``(...)``.
        small_size: Number of samples in the smaller batch; a tensor is not compared, which would wait for the device.
        big_size: That in the bigger batch.

    Returns:
        ``square`` and ``trace``, of shape ``(...)``.

    Raises:
        TypeError: A squared norm is not a floating point tensor, or a size is not a number.
        ValueError: A size is not above 0, or ``small_size`` is not less than ``big_size``.

    Example:
        >>> import torch
        >>> estimate_gradient_noise(torch.tensor(7.0), torch.tensor(4.0), 2, 8)
        (tensor(3.), tensor(8.))
    """
    check_float_tensors(small_square=small_square, big_square=big_square)
    if not isinstance(big_size, Tensor):
        check_interval("big_size", big_size, 0, math.inf, "It counts samples.", open_low=True, open_high=True)
    if not isinstance(small_size, Tensor):
        most = math.inf if isinstance(big_size, Tensor) else big_size
        meaning = "It is the number of samples in the smaller batch."
        check_interval("small_size", small_size, 0, most, meaning, open_low=True, open_high=True)
    square = (big_size * big_square - small_size * small_square) / (big_size - small_size)
    trace = (small_square - big_square) / (1 / small_size - 1 / big_size)
    return square, trace
