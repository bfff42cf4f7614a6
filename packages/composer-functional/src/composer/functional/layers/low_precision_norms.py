"""Layer and group normalisation that compute in 16 bits, autocast or not."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import group_norm, layer_norm

__all__ = ["LowPrecisionGroupNorm", "LowPrecisionLayerNorm"]


class LowPrecisionLayerNorm(nn.LayerNorm):
    """A ``torch.nn.LayerNorm`` whose input, parameters and output are in 16 bits.

    Autocast on CUDA runs normalisations in 32 bits and leaves 32 bits to what follows; this layer moves half as much
    memory. Mean and variance are still summed in 32 bits inside torch's kernels, on the CPU as well as on CUDA.

    Under autocast the output is in the low precision; without autocast it has the input's dtype again, for what follows
    could not use another.

    Shape: that of ``torch.nn.LayerNorm``.

    Args:
        normalized_shape: As for ``torch.nn.LayerNorm``.
        eps: Added to the variance.
        elementwise_affine: Whether there is a weight.
        bias: Whether there is a bias as well.
        precision: ``torch.bfloat16`` or ``torch.float16``; ``None`` for what autocast says at the time, without which
            the layer is a ``torch.nn.LayerNorm``.

    Raises:
        ValueError: ``precision`` is another dtype.

    Example:
        >>> layer = LowPrecisionLayerNorm(8, precision=torch.bfloat16)
        >>> with torch.autocast("cpu", dtype=torch.bfloat16):
        ...     layer(torch.rand(2, 8)).dtype
        torch.bfloat16
    """

    def __init__(
        self,
        normalized_shape: int | list[int] | torch.Size,
        eps: float = 1e-5,
        elementwise_affine: bool = True,
        bias: bool = True,
        precision: torch.dtype | None = None,
    ) -> None:
        super().__init__(normalized_shape, eps, elementwise_affine, bias)
        _check_low(precision)
        self.precision = precision

    def forward(self, input: Tensor) -> Tensor:
        """Normalise in 16 bits."""
        dtype = _find_dtype(self.precision, input)
        if dtype is None:
            return super().forward(input)
        weight, bias = _cast(self.weight, dtype), _cast(self.bias, dtype)
        if not _autocasts(input):
            return layer_norm(input.to(dtype), self.normalized_shape, weight, bias, self.eps).to(input.dtype)
        with torch.autocast(input.device.type, enabled=False):
            return layer_norm(input.to(dtype), self.normalized_shape, weight, bias, self.eps)

    def extra_repr(self) -> str:
        """Name the precision after the settings of the plain layer."""
        return f"{super().extra_repr()}, precision={self.precision}"


class LowPrecisionGroupNorm(nn.GroupNorm):
    """A ``torch.nn.GroupNorm`` whose input, parameters and output are in 16 bits.

    What :class:`LowPrecisionLayerNorm` says holds here too.

    Shape: that of ``torch.nn.GroupNorm``.

    Args:
        num_groups: As for ``torch.nn.GroupNorm``.
        num_channels: As for ``torch.nn.GroupNorm``.
        eps: Added to the variance.
        affine: Whether there are weight and bias.
        precision: ``torch.bfloat16`` or ``torch.float16``; ``None`` for what autocast says at the time, without which
            the layer is a ``torch.nn.GroupNorm``.

    Raises:
        ValueError: ``precision`` is another dtype.

    Example:
        >>> layer = LowPrecisionGroupNorm(2, 8, precision=torch.bfloat16)
        >>> with torch.autocast("cpu", dtype=torch.bfloat16):
        ...     layer(torch.rand(2, 8, 4, 4)).dtype
        torch.bfloat16
    """

    def __init__(
        self,
        num_groups: int,
        num_channels: int,
        eps: float = 1e-5,
        affine: bool = True,
        precision: torch.dtype | None = None,
    ) -> None:
        super().__init__(num_groups, num_channels, eps, affine)
        _check_low(precision)
        self.precision = precision

    def forward(self, input: Tensor) -> Tensor:
        """Normalise in 16 bits."""
        dtype = _find_dtype(self.precision, input)
        if dtype is None:
            return super().forward(input)
        weight, bias = _cast(self.weight, dtype), _cast(self.bias, dtype)
        if not _autocasts(input):
            return group_norm(input.to(dtype), self.num_groups, weight, bias, self.eps).to(input.dtype)
        with torch.autocast(input.device.type, enabled=False):
            return group_norm(input.to(dtype), self.num_groups, weight, bias, self.eps)

    def extra_repr(self) -> str:
        """Name the precision after the settings of the plain layer."""
        return f"{super().extra_repr()}, precision={self.precision}"


def _check_low(precision: torch.dtype | None) -> None:
    if precision not in {None, torch.bfloat16, torch.float16}:
        raise ValueError(f"precision must be torch.bfloat16, torch.float16 or None, got {precision}.")


def _find_dtype(precision: torch.dtype | None, input: Tensor) -> torch.dtype | None:
    if precision is None and _autocasts(input):
        return torch.get_autocast_dtype(input.device.type)
    return precision


def _autocasts(input: Tensor) -> bool:
    # Asked for the meta device, torch raises.
    return input.device.type != "meta" and torch.is_autocast_enabled(input.device.type)


def _cast(parameter: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    return None if parameter is None else parameter.to(dtype)
