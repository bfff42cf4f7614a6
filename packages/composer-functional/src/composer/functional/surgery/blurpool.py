"""BlurPool: subsample without aliasing (Zhang 2019, arXiv:1904.11486)."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from torch import nn
from torch.optim import Optimizer

from composer.functional.checks import check_flags, check_whole
from composer.functional.layers.blurpool import BlurConv2d, BlurMaxPool2d
from composer.functional.surgery.replace import ReplacementFunction, SurgeryReport, replace_layers


def apply_blurpool(
    model: nn.Module,
    replace_convs: bool = True,
    replace_maxpools: bool = True,
    blur_first: bool = True,
    min_channels: int = 16,
    optimizers: Optimizer | Sequence[Optimizer] | None = None,
) -> SurgeryReport:
    """Add a blur to every strided convolution and max pooling, in place (arXiv:1904.11486).

    Each layer becomes a :class:`BlurConv2d` or :class:`BlurMaxPool2d` with the same output size. The convolution
    becomes the attribute ``conv`` of the new layer, with its parameters and hooks: in a state dict, ``layer.weight``
    becomes ``layer.conv.weight``. Max poolings that return indices (which an unpooling needs) and subclasses with a
    ``forward`` of their own, such as timm's with stride-dependent padding, are not replaced. Blurred layers are not
    blurred again.

    Args:
        model: The model; **changed in place**.
        replace_convs: Whether to blur convolutions with a stride above 1.
        replace_maxpools: Whether to blur max poolings with a stride above 1.
        blur_first: Blur before the convolution, which is cheap. Otherwise blur after it, as in the paper, which takes
            about stride² times as long.
        min_channels: The smallest number of input channels of a convolution to blur. With few channels,
            as in the first layer, the blur costs as much as the convolution.
        optimizers: Optimizers of the model. All parameters remain; only their names in the optimizer change.

    Returns:
        A report of the replaced layers; empty if there are none.

    Raises:
        TypeError: ``model`` is not a module.
        ValueError: ``min_channels`` is negative, or the model itself is a layer to be replaced.

    Example:
        >>> model = nn.Sequential(nn.Conv2d(16, 32, 3, stride=2), nn.ReLU(), nn.MaxPool2d(2))
        >>> print(apply_blurpool(model))
        2 modules replaced
          0: Conv2d -> BlurConv2d
          2: MaxPool2d -> BlurMaxPool2d
        >>> bool(apply_blurpool(model))
        False
    """
    check_flags(replace_convs=replace_convs, replace_maxpools=replace_maxpools, blur_first=blur_first)
    check_whole("min_channels", min_channels, 0, "It is the smallest number of input channels of a layer to blur.")

    def is_wanted(layer: nn.Module) -> bool:
        # A subclass with its own forward may depend on the stride, such as timm's padding, and the blur changes it.
        if isinstance(layer, nn.Conv2d) and type(layer).forward is nn.Conv2d.forward:
            return replace_convs and layer.in_channels >= min_channels and max(layer.stride) > 1
        if isinstance(layer, nn.MaxPool2d) and type(layer).forward is nn.MaxPool2d.forward:
            is_strided = (layer.stride if isinstance(layer.stride, int) else max(layer.stride)) > 1
            return replace_maxpools and not layer.return_indices and is_strided
        return False

    replacements: dict[type[nn.Module], ReplacementFunction] = {
        nn.Conv2d: partial(BlurConv2d.from_conv2d, blur_first=blur_first),
        nn.MaxPool2d: BlurMaxPool2d.from_maxpool2d,
    }
    return replace_layers(model, replacements, is_wanted, optimizers, skipped=(BlurConv2d, BlurMaxPool2d))
