"""Factorization: replace a large layer by two small ones (Jaderberg et al. 2014, arXiv:1405.3866)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import partial
from typing import cast

from torch import Tensor, nn
from torch.optim import Optimizer

from composer.functional.checks import check_flags, check_modules, check_whole
from composer.functional.layers.factorized import FactorizedConv2d, FactorizedLinear, resolve_latent_size
from composer.functional.surgery.replace import ReplacementFunction, SurgeryReport, is_untouched, replace_layers


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
    the best approximation of the old weight, see :func:`factorize_matrix`. In a state dict, ``layer.weight`` is
    replaced by ``layer.first.weight`` and ``layer.second.weight``, and ``layer.bias`` becomes ``layer.second.bias``.

    Not replaced are layers for which the two factors would not need fewer multiplications, convolutions with groups,
    layers whose weight is tied to another module (such as a language model's head), layers that are pruned or
    normalised by the old ``torch.nn.utils.weight_norm`` and ``spectral_norm``, layers whose instance has its own
    ``forward``, and subclasses (parametrized, lazy or quantised layers; attention's output layer, whose weight
    ``torch.nn.MultiheadAttention`` reads itself). Factorized layers are not factorized again.

    Args:
        model: The model; **changed in place**.
        factorize_convs: Whether to replace ``torch.nn.Conv2d``.
        factorize_linears: Whether to replace ``torch.nn.Linear``.
        min_channels: Convolutions with fewer input or output channels are not replaced.
        latent_channels: The latent channels: an int, or a float in ``(0, 1)``, a fraction of the smaller of input and
            output channels.
        min_features: Linear layers with fewer input or output features are not replaced.
        latent_features: The latent features, likewise.
        optimizers: Optimizers of the model. The new weights join the groups of the old ones, without state.

    Returns:
        A report of the replaced layers; empty if there are none.

    Raises:
        TypeError: ``model`` is not a module.
        ValueError: A latent size is neither a whole number of at least 1 nor a fraction between 0 and 1, a minimum is
            negative, a weight to be factorized is not finite (nothing has been changed then), or the model itself
            is a layer to be replaced.

    Example:
        >>> model = nn.Sequential(nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10))
        >>> print(apply_factorization(model))
        1 module replaced
          0: Linear -> FactorizedLinear
        >>> bool(apply_factorization(model))
        False
    """
    check_modules(model=model)
    resolve_latent_size("latent_channels", latent_channels)
    resolve_latent_size("latent_features", latent_features)
    check_flags(factorize_convs=factorize_convs, factorize_linears=factorize_linears)
    check_whole("min_channels", min_channels, 0, "It is the smallest number of channels of a layer to factorize.")
    check_whole("min_features", min_features, 0, "It is the smallest number of features of a layer to factorize.")
    # A tied weight is in several modules, and factorizing one of them would untie it.
    holders = Counter(id(each) for module in model.modules() for each in module.parameters(recurse=False))
    # Layers of PEFT add their adapters to the weight of a base layer when they are merged.
    bases = {id(getattr(module, "base_layer", None)) for module in model.modules()}

    def is_wanted(layer: nn.Module) -> bool:
        is_tied = any(holders[id(each)] > 1 for each in layer.parameters(recurse=False))
        if is_tied or id(layer) in bases or not is_untouched(layer):
            return False
        if type(layer) is nn.Conv2d:
            return factorize_convs and layer.groups == 1 and _saves(layer.weight, min_channels, latent_channels)
        if type(layer) is nn.Linear:
            return factorize_linears and _saves(layer.weight, min_features, latent_features)
        return False

    # Before anything is replaced, because the SVD of a later layer would fail when earlier ones are replaced already.
    for path, layer in model.named_modules():
        if path and is_wanted(layer):
            weight = cast("Tensor", layer.weight)
            if not weight.is_meta and not weight.isfinite().all():
                raise ValueError(
                    f"The weight of {path} must be finite to be factorized, got infinity or NaN in it. "
                    "Find the training step that produced them."
                )
    replacements: dict[type[nn.Module], ReplacementFunction] = {
        nn.Conv2d: partial(FactorizedConv2d.from_conv2d, latent_channels=latent_channels),
        nn.Linear: partial(FactorizedLinear.from_linear, latent_features=latent_features),
    }
    return replace_layers(model, replacements, is_wanted, optimizers, skipped=(FactorizedConv2d, FactorizedLinear))


def _saves(weight: Tensor, minimum: int, latent: float) -> bool:
    """Return whether a weight has the least number of channels, and its factors have fewer elements than it."""
    smaller, (rows, columns) = min(weight.shape[:2]), weight.flatten(1).shape
    return smaller >= minimum and resolve_latent_size("latent", latent, smaller) * (rows + columns) < rows * columns
