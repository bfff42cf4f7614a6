"""Layer and group normalisation that compute in 16 bits, autocast or not."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import group_norm, layer_norm


class _LowPrecision(nn.Module):
    """A norm that is computed in ``precision``, or in autocast's dtype; to be inherited from before torch's norm."""

    precision: torch.dtype | None

    def _set_precision(self, precision: torch.dtype | None) -> None:
        if precision not in {None, torch.bfloat16, torch.float16}:
            raise ValueError(f"precision must be torch.bfloat16, torch.float16 or None, got {precision}.")
        self.precision = precision

    def _normalize(self, input: Tensor, weight: Any, bias: Any) -> Tensor:
        raise NotImplementedError

    def forward(self, input: Tensor) -> Tensor:
        """Normalise in 16 bits."""
        device = input.device.type
        is_autocast = device != "meta" and torch.is_autocast_enabled(device)  # raises an error for the meta device
        dtype = torch.get_autocast_dtype(device) if self.precision is None and is_autocast else self.precision
        weight, bias = self.weight, self.bias
        if dtype is None:
            return self._normalize(input, weight, bias)
        weight = None if weight is None else weight.to(dtype)
        bias = None if bias is None else bias.to(dtype)
        if not is_autocast:
            return self._normalize(input.to(dtype), weight, bias).to(input.dtype)
        # Otherwise autocast on CUDA would convert the input of the norm back to 32 bits.
        with torch.autocast(device, enabled=False):
            return self._normalize(input.to(dtype), weight, bias)

    def extra_repr(self) -> str:
        """Return the settings of the plain layer and the precision for ``repr``."""
        return f"{super().extra_repr()}, precision={self.precision}"


class LowPrecisionLayerNorm(_LowPrecision, nn.LayerNorm):
    """A ``torch.nn.LayerNorm`` whose input, parameters and output are in 16 bits.

    Autocast on CUDA computes normalisations in 32 bits, and returns 32 bits; this layer moves half as much memory.
    torch's kernels still sum mean and variance in 32 bits, on the CPU as well as on CUDA.

    Under autocast the output is in the low precision; without autocast it has the dtype of the input. In float16,
    inputs beyond 65504 are infinite, and what is normalised with them is NaN.

    Shape: that of ``torch.nn.LayerNorm``.

    Args:
        normalized_shape: As for ``torch.nn.LayerNorm``.
        eps: Added to the variance.
        elementwise_affine: Whether there is a weight.
        bias: Whether there is a bias as well.
        precision: ``torch.bfloat16`` or ``torch.float16``; ``None`` for autocast's dtype at each call, or without
            autocast that of ``torch.nn.LayerNorm``.

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
        self._set_precision(precision)

    def _normalize(self, input: Tensor, weight: Any, bias: Any) -> Tensor:
        return layer_norm(input, self.normalized_shape, weight, bias, self.eps)


class LowPrecisionGroupNorm(_LowPrecision, nn.GroupNorm):
    """A ``torch.nn.GroupNorm`` whose input, parameters and output are in 16 bits.

    See :class:`LowPrecisionLayerNorm` for the dtypes.

    Shape: that of ``torch.nn.GroupNorm``.

    Args:
        num_groups: As for ``torch.nn.GroupNorm``.
        num_channels: As for ``torch.nn.GroupNorm``.
        eps: Added to the variance.
        affine: Whether there are weight and bias.
        precision: ``torch.bfloat16`` or ``torch.float16``; ``None`` for autocast's dtype at each call, or without
            autocast that of ``torch.nn.GroupNorm``.

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
        self._set_precision(precision)

    def _normalize(self, input: Tensor, weight: Any, bias: Any) -> Tensor:
        return group_norm(input, self.num_groups, weight, bias, self.eps)
