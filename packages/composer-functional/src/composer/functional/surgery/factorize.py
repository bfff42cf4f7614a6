"""Factorization: two small layers in the place of a large one (Jaderberg et al. 2014, arXiv:1405.3866)."""

from __future__ import annotations

from collections import Counter
from math import prod
from typing import TYPE_CHECKING, cast

from torch import nn

from composer.functional.checks import check_flags, check_whole_numbers
from composer.functional.layers.factorized import FactorizedConv2d, FactorizedLinear, resolve_latent_size
from composer.functional.surgery.replace import SurgeryReport, is_untouched, replace_module_classes

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor
    from torch.optim import Optimizer

    from composer.functional.surgery.replace import ReplacementFunction

__all__ = ["apply_factorization"]


def apply_factorization(
    model: nn.Module,
    factorize_convs: bool = True,
    factorize_linears: bool = True,
    min_channels: int = 512,
    latent_channels: float = 0.25,
    min_features: int = 512,
    latent_features: float = 0.25,
    optimizers: Optimizer | Sequence[Optimizer] | None = None,
) -> SurgeryReport:
    """Replace large convolutions and linear layers by two smaller ones each, in place (arXiv:1405.3866).

    A convolution becomes a :class:`FactorizedConv2d`, a linear layer a :class:`FactorizedLinear`. Their weights are
    the best approximation of the old one, see :func:`factorize_matrix`: ``layer.weight`` gives way to
    ``layer.first.weight`` and ``layer.second.weight`` in a state dict, and ``layer.bias`` is ``layer.second.bias``.

    Left alone are layers for which two would need as many multiplications or more, convolutions with groups, layers
    whose weight another module uses too (a language model's tied head), layers that are pruned or normalised by the old
    ``torch.nn.utils.weight_norm`` and ``spectral_norm``, layers whose ``forward`` was exchanged, and subclasses
    (parametrized, lazy, quantised ones; attention's output layer, whose weight ``torch.nn.MultiheadAttention`` reads
    itself). What is factorized is not factorized again.

    Args:
        model: The model; **changed in place**.
        factorize_convs: Whether to replace ``torch.nn.Conv2d``.
        factorize_linears: Whether to replace ``torch.nn.Linear``.
        min_channels: Convolutions with fewer input or output channels, at least 1, are left alone.
        latent_channels: The channels between: a whole number, or a fraction of the smaller of input and output.
        min_features: Linear layers with fewer input or output features, at least 1, are left alone.
        latent_features: The features between, likewise.
        optimizers: Optimizers of the model; the new weights join the groups of the old ones, and begin without state.

    Returns:
        A report of what was replaced; empty if nothing matched.

    Raises:
        TypeError: ``model`` is not a module.
        ValueError: A latent size is neither a whole number of at least 1 nor a fraction between 0 and 1, a minimum is
            less than 1, a weight to be factorized is not finite (nothing is changed then), or the model itself is a
            layer that would be replaced.

    Example:
        >>> model = nn.Sequential(nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10))
        >>> print(apply_factorization(model))
        1 module replaced
          0: Linear -> FactorizedLinear
        >>> bool(apply_factorization(model))
        False
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"The model must be a torch.nn.Module, got {type(model).__name__}.")
    resolve_latent_size(latent_channels, 1, "latent_channels")
    resolve_latent_size(latent_features, 1, "latent_features")
    check_flags(factorize_convs=factorize_convs, factorize_linears=factorize_linears)
    _check_minimum("min_channels", min_channels)
    _check_minimum("min_features", min_features)
    if isinstance(model, FactorizedConv2d | FactorizedLinear):
        return SurgeryReport()
    is_tied = _find_tied(model)

    def is_wanted(layer: nn.Module) -> bool:
        if not is_untouched(layer):
            return False
        if type(layer) is nn.Conv2d:
            return factorize_convs and _saves_conv(layer, min_channels, latent_channels) and not is_tied(layer)
        if type(layer) is nn.Linear:
            return factorize_linears and _saves_linear(layer, min_features, latent_features) and not is_tied(layer)
        return False

    def factorize(layer: nn.Conv2d | nn.Linear, index: int) -> nn.Module | None:
        if not is_wanted(layer):
            return None
        if isinstance(layer, nn.Conv2d):
            return FactorizedConv2d.from_conv2d(layer, index, latent_channels)
        return FactorizedLinear.from_linear(layer, index, latent_features)

    _check_before_change(model, is_wanted)
    policies: dict[type[nn.Module], ReplacementFunction] = {
        nn.Conv2d: factorize,
        nn.Linear: factorize,
        FactorizedConv2d: _keep,
        FactorizedLinear: _keep,
    }
    return replace_module_classes(model, policies, optimizers)


def _saves_conv(conv: nn.Conv2d, min_channels: int, latent_channels: float) -> bool:
    """Whether two convolutions need fewer multiplications for each pixel of the output than one."""
    smaller = min(conv.in_channels, conv.out_channels)
    if conv.groups != 1 or smaller < min_channels:
        return False
    latent = resolve_latent_size(latent_channels, smaller, "latent_channels")
    patch = conv.in_channels * prod(conv.kernel_size)
    return latent * (patch + conv.out_channels) < patch * conv.out_channels


def _saves_linear(linear: nn.Linear, min_features: int, latent_features: float) -> bool:
    smaller = min(linear.in_features, linear.out_features)
    if smaller < min_features:
        return False
    latent = resolve_latent_size(latent_features, smaller, "latent_features")
    return latent * (linear.in_features + linear.out_features) < linear.in_features * linear.out_features


def _find_tied(model: nn.Module) -> Callable[[nn.Module], bool]:
    """Tell for a layer whether another module holds one of its parameters too."""
    holders = Counter(id(each) for module in model.modules() for each in module.parameters(recurse=False))
    return lambda layer: any(holders[id(each)] > 1 for each in layer.parameters(recurse=False))


def _check_minimum(name: str, minimum: int) -> None:
    check_whole_numbers(**{name: minimum})
    if not minimum >= 1:
        raise ValueError(
            f"{name} must be at least 1, got {minimum}. It is the smallest width that a layer must have to be replaced."
        )


def _check_before_change(model: nn.Module, is_wanted: Callable[[nn.Module], bool]) -> None:
    if is_wanted(model):
        raise ValueError(
            f"model must hold the layers to be replaced, got a {type(model).__name__} that is one itself. "
            "Wrap it: torch.nn.Sequential(model)."
        )
    for path, layer in model.named_modules():
        if is_wanted(layer):
            weight = cast("Tensor", layer.weight)
            if not weight.is_meta and not weight.isfinite().all():
                raise ValueError(
                    f"The weight of {path} must be finite to be factorized, got infinity or NaN in it. "
                    "Look for the step of the training that made it so."
                )


def _keep(module: nn.Module, _: int) -> nn.Module:
    return module
