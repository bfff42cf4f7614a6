"""Squeeze-and-excitation: weigh channels by what the whole image holds (Hu et al. 2018, arXiv:1709.01507)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import nn

from composer.functional.checks import check_whole_numbers
from composer.functional.layers.blurpool import BlurConv2d
from composer.functional.layers.factorized import FactorizedConv2d, resolve_latent_size
from composer.functional.layers.squeeze_excite import SqueezeExcite2d, SqueezeExciteConv2d, plain_convolution
from composer.functional.surgery.replace import SurgeryReport, replace_module_classes

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch.optim import Optimizer

    from composer.functional.surgery.replace import ReplacementFunction

__all__ = ["apply_squeeze_excite"]


def apply_squeeze_excite(
    model: nn.Module,
    latent_channels: float = 64,
    min_channels: int = 128,
    optimizers: Optimizer | Sequence[Optimizer] | None = None,
) -> SurgeryReport:
    """Put a :class:`SqueezeExcite2d` behind every convolution with many channels, in place (arXiv:1709.01507).

    Each convolution becomes a :class:`SqueezeExciteConv2d` and stays inside as ``conv``, with its parameters and hooks:
    ``layer.weight`` is ``layer.conv.weight`` in a state dict. A :class:`BlurConv2d` or :class:`FactorizedConv2d` is
    taken as one convolution, so the order of these surgeries does not matter. What has one gets no second. Subclasses
    of ``torch.nn.Conv2d`` are convolutions; transposed ones are not, nor lazy ones that have not seen an input.

    The new layers' weights are drawn by torch's default generator, as those of any new layer. They change what a
    trained model computes: apply it before training.

    Args:
        model: The model; **changed in place**.
        latent_channels: The width inside: a whole number, or a fraction of a convolution's output channels.
        min_channels: Convolutions with fewer input or output channels, at least 1, are left alone.
        optimizers: Optimizers of the model; they get the new parameters and learn the new names of the others.

    Returns:
        A report of what was replaced; empty if nothing matched.

    Raises:
        TypeError: ``model`` is not a module.
        ValueError: ``latent_channels`` is neither a whole number of at least 1 nor a fraction between 0 and 1,
            ``min_channels`` is less than 1, or the model itself is a layer that would be replaced.

    Example:
        >>> model = nn.Sequential(nn.Conv2d(3, 128, 3), nn.ReLU(), nn.Conv2d(128, 256, 3))
        >>> print(apply_squeeze_excite(model))
        1 module replaced
          2: Conv2d -> SqueezeExciteConv2d
        >>> bool(apply_squeeze_excite(model))
        False
    """
    resolve_latent_size(latent_channels, 1, "latent_channels")
    check_whole_numbers(min_channels=min_channels)
    if not min_channels >= 1:
        raise ValueError(
            f"min_channels must be at least 1, got {min_channels}. "
            "It is the smallest number of channels a convolution must have to be followed by squeeze-and-excitation."
        )

    def is_wanted(conv: nn.Module) -> bool:
        inner = plain_convolution(conv)
        return min(inner.in_channels, inner.out_channels) >= min_channels

    def excite(conv: nn.Module, index: int) -> nn.Module:
        return SqueezeExciteConv2d.from_conv2d(conv, index, latent_channels) if is_wanted(conv) else conv

    if isinstance(model, SqueezeExcite2d | SqueezeExciteConv2d):
        return SurgeryReport()
    if isinstance(model, nn.Conv2d | BlurConv2d | FactorizedConv2d) and is_wanted(model):
        raise ValueError(
            f"model must hold the layers to be replaced, got a {type(model).__name__} that is one itself. "
            "Wrap it: torch.nn.Sequential(model)."
        )
    policies: dict[type[nn.Module], ReplacementFunction] = {
        nn.Conv2d: excite,
        BlurConv2d: excite,
        FactorizedConv2d: excite,
        SqueezeExciteConv2d: _keep,
        SqueezeExcite2d: _keep,
    }
    return replace_module_classes(model, policies, optimizers)


def _keep(module: nn.Module, _: int) -> nn.Module:
    return module
