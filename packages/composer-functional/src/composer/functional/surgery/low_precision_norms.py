"""Low-precision normalisation: layer and group norms in 16 bits where autocast computes them in 32."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from composer.functional.layers.low_precision_norms import LowPrecisionGroupNorm, LowPrecisionLayerNorm
from composer.functional.surgery.replace import SurgeryReport, as_class, is_untouched, replace_layers

_DTYPES = {
    "amp_bf16": torch.bfloat16,
    "amp_fp16": torch.float16,
    "amp_fp8": torch.bfloat16,  # only matrix products are in FP8 there
    "fp32": torch.float32,
}


def apply_low_precision_layernorm(
    model: nn.Module,
    precision: torch.dtype | str | None = None,
    optimizers: Optimizer | Sequence[Optimizer] | None = None,
) -> SurgeryReport:
    """Replace every ``torch.nn.LayerNorm`` by one that computes in 16 bits, in place.

    Each becomes a :class:`LowPrecisionLayerNorm` with the same parameters under the same names. timm's ``LayerNorm`` is
    replaced as well. Not replaced are other subclasses with a ``forward`` of their own, layers with parametrized or
    pruned weights, layers whose instance has its own ``forward``, and low-precision norms. ``torch.export`` works; with
    ``None`` it records autocast's dtype at the time of the export.

    Args:
        model: The model; **changed in place**.
        precision: ``torch.bfloat16`` or ``torch.float16``; or ``"amp_bf16"``, ``"amp_fp16"``, ``"amp_fp8"`` (bfloat16
            here); or ``None`` for autocast's dtype at each call. ``torch.float32`` and ``"fp32"`` replace nothing.
        optimizers: Optimizers of the model. All parameters keep their names, so the optimizers do not change.

    Returns:
        A report of the replaced layers; empty if there are none, or ``precision`` is float32.

    Raises:
        TypeError: ``model`` is not a module, or ``precision`` is none of the above.
        ValueError: ``precision`` is another dtype or name, or the model itself is a layer to be replaced.

    Example:
        >>> model = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8))
        >>> print(apply_low_precision_layernorm(model, "amp_bf16"))
        1 module replaced
          1: LayerNorm -> LowPrecisionLayerNorm
    """
    return _apply(model, nn.LayerNorm, LowPrecisionLayerNorm, precision, optimizers)


def apply_low_precision_groupnorm(
    model: nn.Module,
    precision: torch.dtype | str | None = None,
    optimizers: Optimizer | Sequence[Optimizer] | None = None,
) -> SurgeryReport:
    """Replace every ``torch.nn.GroupNorm`` by one that computes in 16 bits, in place.

    Each becomes a :class:`LowPrecisionGroupNorm` with the same parameters under the same names. timm's ``GroupNorm`` is
    replaced as well. Not replaced are other subclasses with a ``forward`` of their own, layers with parametrized or
    pruned weights, layers whose instance has its own ``forward``, and low-precision norms. ``torch.export`` works; with
    ``None`` it records autocast's dtype at the time of the export.

    Args:
        model: The model; **changed in place**.
        precision: ``torch.bfloat16`` or ``torch.float16``; or ``"amp_bf16"``, ``"amp_fp16"``, ``"amp_fp8"`` (bfloat16
            here); or ``None`` for autocast's dtype at each call. ``torch.float32`` and ``"fp32"`` replace nothing.
        optimizers: Optimizers of the model. All parameters keep their names, so the optimizers do not change.

    Returns:
        A report of the replaced layers; empty if there are none, or ``precision`` is float32.

    Raises:
        TypeError: ``model`` is not a module, or ``precision`` is none of the above.
        ValueError: ``precision`` is another dtype or name, or the model itself is a layer to be replaced.

    Example:
        >>> model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.GroupNorm(2, 8))
        >>> print(apply_low_precision_groupnorm(model, torch.float16))
        1 module replaced
          1: GroupNorm -> LowPrecisionGroupNorm
    """
    return _apply(model, nn.GroupNorm, LowPrecisionGroupNorm, precision, optimizers)


def _apply(
    model: nn.Module,
    plain: type[nn.Module],
    low: type[LowPrecisionLayerNorm | LowPrecisionGroupNorm],
    precision: torch.dtype | str | None,
    optimizers: Optimizer | Sequence[Optimizer] | None,
) -> SurgeryReport:
    dtype = _find_dtype(precision)
    # The forward methods that compute the same as torch's own layer; our layers and other subclasses have others.
    forwards: set[Callable[..., Any]] = {plain.forward}
    timm_norms = sys.modules.get("timm.layers.norm")  # imported if the model has such layers
    if timm_norms is not None:
        forwards.add(getattr(timm_norms, plain.__name__).forward)

    def is_wanted(module: nn.Module) -> bool:
        return isinstance(module, plain) and type(module).forward in forwards and is_untouched(module)

    def replace(norm: nn.Module, _: int) -> nn.Module:
        return as_class(low, norm, precision=dtype)

    return replace_layers(model, {} if dtype is torch.float32 else {plain: replace}, is_wanted, optimizers)


def _find_dtype(precision: torch.dtype | str | None) -> torch.dtype | None:
    if precision is None:
        return None
    if not isinstance(precision, torch.dtype | str):
        raise TypeError(f"precision must be a torch.dtype, a name or None, got {type(precision).__name__}.")
    dtype = _DTYPES.get(precision) if isinstance(precision, str) else precision
    if dtype not in {torch.bfloat16, torch.float16, torch.float32}:
        raise ValueError(
            f"precision must be torch.bfloat16, torch.float16, torch.float32 or one of "
            f"{', '.join(map(repr, _DTYPES))}, got {precision!r}. None takes autocast's dtype."
        )
    return dtype
