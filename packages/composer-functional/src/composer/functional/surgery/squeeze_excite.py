"""Squeeze-and-excitation: scale channels by a function of their means (Hu et al. 2018, arXiv:1709.01507)."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from torch import nn
from torch.optim import Optimizer

from composer.functional.checks import check_modules, check_whole
from composer.functional.layers.blurpool import BlurConv2d
from composer.functional.layers.factorized import FactorizedConv2d, resolve_latent_size
from composer.functional.layers.squeeze_excite import SqueezeExcite2d, SqueezeExciteConv2d, plain_convolution
from composer.functional.surgery.replace import SurgeryReport, replace_layers


def apply_squeeze_excite(
    model: nn.Module,
    latent_channels: float = 64,
    min_channels: int = 128,
    optimizers: Optimizer | Sequence[Optimizer] | None = None,
) -> SurgeryReport:
    """Add a :class:`SqueezeExcite2d` after every convolution with many channels, in place (arXiv:1709.01507).

    Each convolution becomes a :class:`SqueezeExciteConv2d`, whose attribute ``conv`` it is, with its parameters and
    hooks: in a state dict, ``layer.weight`` becomes ``layer.conv.weight``. A :class:`BlurConv2d` or
    :class:`FactorizedConv2d` counts as one convolution, so the order of these surgeries does not matter. A second call
    changes nothing. Subclasses of ``torch.nn.Conv2d`` are convolutions; transposed convolutions and lazy ones before
    their first input are not.

    The weights of the new layers are drawn from torch's default generator. They change the outputs of a trained model:
    apply it before training.

    Args:
        model: The model; **changed in place**.
        latent_channels: The hidden size: an int, or a float in ``(0, 1)``, a fraction of the output channels.
        min_channels: Convolutions with fewer input or output channels are not replaced.
        optimizers: Optimizers of the model, to which the new parameters are added.

    Returns:
        A report of the replaced layers; empty if there are none.

    Raises:
        TypeError: ``model`` is not a module.
        ValueError: ``latent_channels`` is neither a whole number of at least 1 nor a fraction between 0 and 1,
            ``min_channels`` is negative, or the model itself is a layer to be replaced.

    Example:
        >>> model = nn.Sequential(nn.Conv2d(3, 128, 3), nn.ReLU(), nn.Conv2d(128, 256, 3))
        >>> print(apply_squeeze_excite(model))
        1 module replaced
          2: Conv2d -> SqueezeExciteConv2d
        >>> bool(apply_squeeze_excite(model))
        False
    """
    resolve_latent_size("latent_channels", latent_channels)
    check_modules(model=model)
    check_whole("min_channels", min_channels, 0, "It is the smallest number of channels of a convolution to extend.")

    convolutions = (nn.Conv2d, BlurConv2d, FactorizedConv2d)
    # A factorized layer with few channels may have a part with many.
    parts = {part for layer in model.modules() if isinstance(layer, FactorizedConv2d) for part in layer.children()}

    def is_wanted(layer: nn.Module) -> bool:
        if not isinstance(layer, convolutions) or layer in parts:
            return False
        inner = plain_convolution(layer)
        return min(inner.in_channels, inner.out_channels) >= min_channels

    excite = partial(SqueezeExciteConv2d.from_conv2d, latent_channels=latent_channels)
    skipped = (SqueezeExcite2d, SqueezeExciteConv2d)
    return replace_layers(model, dict.fromkeys(convolutions, excite), is_wanted, optimizers, skipped=skipped)
