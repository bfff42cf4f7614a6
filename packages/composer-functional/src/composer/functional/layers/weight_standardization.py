"""Standardised weights of convolutions (Qiao et al. 2019, arXiv:1903.10520)."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn.functional import layer_norm

from composer.functional.checks import check_numbers

__all__ = ["WeightStandardizer", "standardize_weight"]


def standardize_weight(weight: Tensor, eps: float = 1e-6) -> Tensor:
    """Give each filter of a convolution zero mean and unit variance (arXiv:1903.10520).

    ``(weight - mean) / sqrt(variance + eps)``, with the mean and the (biased) variance over a filter: over the input
    channels and the kernel, for each output channel. A filter of equal weights, or of a single one, becomes zero.

    Args:
        weight: Shape ``(out, in, ...)``, floating point.
        eps: What keeps the division safe. The variance of new weights is about 1 / (3 · weights of a filter), for
            large filters less than 1e-4.

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
    if not isinstance(weight, Tensor) or not weight.is_floating_point():
        kind = weight.dtype if isinstance(weight, Tensor) else type(weight).__name__
        raise TypeError(f"weight must be a floating point tensor, got {kind}.")
    if weight.ndim < 2 or weight.numel() == 0:
        raise ValueError(f"weight must have shape (out, in, ...) and an element at least, got {tuple(weight.shape)}.")
    _check_eps(eps)
    if weight.is_contiguous():
        return layer_norm(weight, weight.shape[1:], eps=eps)
    channels_last = weight.movedim(1, -1)
    return layer_norm(channels_last, channels_last.shape[1:], eps=eps).movedim(-1, 1)


def _check_eps(eps: float) -> None:
    check_numbers(eps=eps)
    if not eps > 0:
        raise ValueError(f"eps must be above 0, got {eps}. It keeps filters of equal weights from becoming NaN.")


class WeightStandardizer(nn.Module):
    """:func:`standardize_weight` for ``torch.nn.utils.parametrize`` (arXiv:1903.10520).

    Args:
        eps: What keeps the division safe.

    Raises:
        TypeError: ``eps`` is not a number.
        ValueError: ``eps`` is not above 0; when called, as :func:`standardize_weight`.

    Example:
        >>> conv = nn.Conv2d(4, 8, 3)
        >>> _ = nn.utils.parametrize.register_parametrization(conv, "weight", WeightStandardizer())
        >>> conv.weight[0].mean().abs() < 1e-6
        tensor(True)
    """

    def __init__(self, eps: float = 1e-6) -> None:
        super().__init__()
        _check_eps(eps)
        self.eps = eps

    def forward(self, weight: Tensor) -> Tensor:
        """Standardise."""
        return standardize_weight(weight, self.eps)

    def extra_repr(self) -> str:
        """Name the setting."""
        return f"eps={self.eps}"
