"""Standardised weights of convolutions (Qiao et al. 2019, arXiv:1903.10520)."""

from __future__ import annotations

import math

from torch import Tensor, nn
from torch.nn.functional import layer_norm

from composer.functional.checks import check_float_tensors, check_interval


def standardize_weight(weight: Tensor, eps: float = 1e-10) -> Tensor:
    """Give each filter of a convolution zero mean and unit variance (arXiv:1903.10520).

    ``(weight - mean) / sqrt(variance + eps)``, with the mean and the (biased) variance over a filter: over the input
    channels and the kernel, for each output channel. A filter of equal weights, or of a single one, becomes zero.

    Args:
        weight: Shape ``(out, in, ...)``, floating point.
        eps: Added to the variance. It has to be small: the variance of new weights is about 1 / (3 · weights of a
            filter), less than 1e-4 for large filters.

    Returns:
        A new tensor with the shape, dtype and memory format of ``weight``.

    Raises:
        TypeError: ``weight`` is not a floating point tensor.
        ValueError: ``weight`` has less than two dimensions or no element, or ``eps`` is not above 0.

    Example:
        >>> weight = standardize_weight(torch.rand(8, 4, 3, 3))
        >>> weight[0].mean().abs() < 1e-6, round(weight[0].std(correction=0).item(), 3)
        (tensor(True), 1.0)
    """
    check_float_tensors(weight=weight)
    if weight.ndim < 2 or weight.numel() == 0:
        raise ValueError(f"weight must have shape (out, in, ...) and an element at least, got {tuple(weight.shape)}.")
    _check_eps(eps)
    # Layer normalisation over the dimensions of a filter is this formula in one kernel, forward and backward.
    if weight.is_contiguous():
        return layer_norm(weight, weight.shape[1:], eps=eps)
    channels_last = weight.movedim(1, -1)  # contiguous if the weight is in the channels_last format
    return layer_norm(channels_last, channels_last.shape[1:], eps=eps).movedim(-1, 1)


def _check_eps(eps: float) -> None:
    meaning = "It prevents NaN in filters of equal weights."
    check_interval("eps", eps, 0, math.inf, meaning, open_low=True)


class WeightStandardizer(nn.Module):
    """:func:`standardize_weight` for ``torch.nn.utils.parametrize`` (arXiv:1903.10520).

    Args:
        eps: Added to the variance.

    Raises:
        TypeError: ``eps`` is not a number.
        ValueError: ``eps`` is not above 0; when called, as :func:`standardize_weight`.

    Example:
        >>> conv = nn.Conv2d(4, 8, 3)
        >>> _ = nn.utils.parametrize.register_parametrization(conv, "weight", WeightStandardizer())
        >>> conv.weight[0].mean().abs() < 1e-6
        tensor(True)
    """

    def __init__(self, eps: float = 1e-10) -> None:
        super().__init__()
        _check_eps(eps)
        self.eps = eps

    def forward(self, weight: Tensor) -> Tensor:
        """Standardise the weight."""
        return standardize_weight(weight, self.eps)

    def extra_repr(self) -> str:
        """Return the settings for ``repr``."""
        return f"eps={self.eps}"
