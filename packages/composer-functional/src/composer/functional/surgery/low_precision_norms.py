"""Low-precision normalisation: run layer and group norms in 16 bits where autocast would run them in 32."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from composer.functional.layers.low_precision_norms import LowPrecisionGroupNorm, LowPrecisionLayerNorm
from composer.functional.surgery.replace import SurgeryReport, is_untouched, replace_module_classes

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch.optim import Optimizer

    from composer.functional.surgery.replace import ReplacementFunction

__all__ = ["apply_low_precision_groupnorm", "apply_low_precision_layernorm"]

_DTYPES = {
    "amp_bf16": torch.bfloat16,
    "amp_fp16": torch.float16,
    "amp_fp8": torch.bfloat16,  # what is not a matrix product is in bfloat16 there
    "fp32": torch.float32,
}


def apply_low_precision_layernorm(
    model: nn.Module,
    precision: torch.dtype | str | None = None,
    optimizers: Optimizer | Sequence[Optimizer] | None = None,
) -> SurgeryReport:
    """Let every ``torch.nn.LayerNorm`` compute in 16 bits, in place.

    Each becomes a :class:`LowPrecisionLayerNorm`, which says what is computed, with the same parameters under the
    same names. timm's ``LayerNorm`` is replaced as well. Left alone are other subclasses with a ``forward`` of their
    own, layers with parametrized or pruned weights, or whose ``forward`` was exchanged, and what computes in low
    precision already. ``torch.export`` works; with ``None`` it records what autocast said at the time.

    Args:
        model: The model; **changed in place**.
        precision: ``torch.bfloat16`` or ``torch.float16``; or ``"amp_bf16"``, ``"amp_fp16"``, ``"amp_fp8"`` (bfloat16
            here); or ``None`` for what autocast says at the time. ``torch.float32`` and ``"fp32"`` replace nothing.
        optimizers: Optimizers of the model; every parameter survives under its name, so they need not change.

    Returns:
        A report of what was replaced; empty if nothing matched, or ``precision`` is not low.

    Raises:
        TypeError: ``model`` is not a module, or ``precision`` none of the above.
        ValueError: ``precision`` is another dtype or name, or the model itself is a layer that would be replaced.

    Example:
        >>> model = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8))
        >>> print(apply_low_precision_layernorm(model, "amp_bf16"))
        1 module replaced
          1: LayerNorm -> LowPrecisionLayerNorm
    """

    def lower(norm: nn.LayerNorm, dtype: torch.dtype | None) -> nn.Module:
        shape, affine = list(norm.normalized_shape), norm.elementwise_affine
        # On the meta device no memory is filled, for the parameters are exchanged at once.
        with torch.device("meta"):
            new = LowPrecisionLayerNorm(shape, norm.eps, affine, norm.bias is not None, precision=dtype)
        return _take_parameters(new, norm)

    return _apply(model, nn.LayerNorm, lower, precision, optimizers)


def apply_low_precision_groupnorm(
    model: nn.Module,
    precision: torch.dtype | str | None = None,
    optimizers: Optimizer | Sequence[Optimizer] | None = None,
) -> SurgeryReport:
    """Let every ``torch.nn.GroupNorm`` compute in 16 bits, in place.

    Each becomes a :class:`LowPrecisionGroupNorm`, which says what is computed, with the same parameters under the
    same names. timm's ``GroupNorm`` is replaced as well. Left alone are other subclasses with a ``forward`` of their
    own, layers with parametrized or pruned weights, or whose ``forward`` was exchanged, and what computes in low
    precision already. ``torch.export`` works; with ``None`` it records what autocast said at the time.

    Args:
        model: The model; **changed in place**.
        precision: ``torch.bfloat16`` or ``torch.float16``; or ``"amp_bf16"``, ``"amp_fp16"``, ``"amp_fp8"`` (bfloat16
            here); or ``None`` for what autocast says at the time. ``torch.float32`` and ``"fp32"`` replace nothing.
        optimizers: Optimizers of the model; every parameter survives under its name, so they need not change.

    Returns:
        A report of what was replaced; empty if nothing matched, or ``precision`` is not low.

    Raises:
        TypeError: ``model`` is not a module, or ``precision`` none of the above.
        ValueError: ``precision`` is another dtype or name, or the model itself is a layer that would be replaced.

    Example:
        >>> model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.GroupNorm(2, 8))
        >>> print(apply_low_precision_groupnorm(model, torch.float16))
        1 module replaced
          1: GroupNorm -> LowPrecisionGroupNorm
    """

    def lower(norm: nn.GroupNorm, dtype: torch.dtype | None) -> nn.Module:
        with torch.device("meta"):
            new = LowPrecisionGroupNorm(norm.num_groups, norm.num_channels, norm.eps, norm.affine, precision=dtype)
        return _take_parameters(new, norm)

    return _apply(model, nn.GroupNorm, lower, precision, optimizers)


def _apply(
    model: nn.Module,
    plain: type[nn.Module],
    lower: Callable[[Any, torch.dtype | None], nn.Module],
    precision: torch.dtype | str | None,
    optimizers: Optimizer | Sequence[Optimizer] | None,
) -> SurgeryReport:
    dtype = _find_dtype(precision)
    replaceable = _find_forwards(plain)

    def is_wanted(module: nn.Module) -> bool:
        # Our own layers have a forward of their own too.
        return isinstance(module, plain) and type(module).forward in replaceable and is_untouched(module)

    def replace(norm: nn.Module, _: int) -> nn.Module | None:
        return lower(norm, dtype) if is_wanted(norm) else None

    if is_wanted(model):
        raise ValueError(
            f"model must hold the layers to be replaced, got a {type(model).__name__} that is one itself. "
            "Wrap it: torch.nn.Sequential(model)."
        )
    policies: dict[type[nn.Module], ReplacementFunction] = {} if dtype is torch.float32 else {plain: replace}
    return replace_module_classes(model, policies, optimizers)


def _find_dtype(precision: torch.dtype | str | None) -> torch.dtype | None:
    if precision is None:
        return None
    if not isinstance(precision, torch.dtype | str):
        raise TypeError(f"precision must be a torch.dtype, a name or None, got {type(precision).__name__}.")
    dtype = _DTYPES.get(precision) if isinstance(precision, str) else precision
    if dtype not in {torch.bfloat16, torch.float16, torch.float32}:
        raise ValueError(
            f"precision must be torch.bfloat16, torch.float16, torch.float32 or one of "
            f"{', '.join(map(repr, _DTYPES))}, got {precision!r}. None takes what autocast says."
        )
    return dtype


def _find_forwards(plain: type[nn.Module]) -> set[Callable[..., Any]]:
    """Collect the functions that are known to compute what torch's own layer does."""
    forwards: set[Callable[..., Any]] = {plain.forward}
    timm_norms = sys.modules.get("timm.layers.norm")  # a model that holds such layers has loaded them
    if timm_norms is not None:
        forwards.add(getattr(timm_norms, plain.__name__).forward)
    return forwards


def _take_parameters(new: nn.Module, old: nn.Module) -> nn.Module:
    """Hand over the parameters themselves."""
    for name in ("weight", "bias"):
        new.register_parameter(name, getattr(old, name))
    return new
