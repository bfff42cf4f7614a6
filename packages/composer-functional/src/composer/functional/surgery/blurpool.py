"""BlurPool: subsample without aliasing (Zhang 2019, arXiv:1904.11486)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import nn

from composer.functional.checks import check_flags, check_whole_numbers
from composer.functional.layers.blurpool import BlurConv2d, BlurMaxPool2d
from composer.functional.surgery.replace import SurgeryReport, replace_module_classes

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch.optim import Optimizer

    from composer.functional.surgery.replace import ReplacementFunction

__all__ = ["apply_blurpool"]


def apply_blurpool(
    model: nn.Module,
    replace_convs: bool = True,
    replace_maxpools: bool = True,
    blur_first: bool = True,
    min_channels: int = 16,
    optimizers: Optimizer | Sequence[Optimizer] | None = None,
) -> SurgeryReport:
    """Put a blur into every strided convolution and max pooling, in place (arXiv:1904.11486).

    Each becomes a :class:`BlurConv2d` or :class:`BlurMaxPool2d`, with the same output size. A convolution stays inside
    as ``conv``, with its parameters and hooks: ``layer.weight`` is ``layer.conv.weight`` in a state dict. Max poolings
    that return indices are left alone, for an unpooling elsewhere needs them; so are subclasses with a ``forward`` of
    their own, as timm's with padding that depends on the stride. What is blurred is not blurred again.

    Args:
        model: The model; **changed in place**.
        replace_convs: Whether to blur convolutions with a stride above 1.
        replace_maxpools: Whether to blur max poolings with a stride above 1.
        blur_first: Blur before the convolution, which is cheap; otherwise after it, as in the paper, which takes about
            stride² times as long.
        min_channels: Convolutions with fewer input channels, at least 1, are left alone; the first one sees pixels,
            which are cheap to blur but too few to afford it.
        optimizers: Optimizers of the model; every parameter survives, so they only learn its new name.

    Returns:
        A report of what was replaced; empty if nothing matched.

    Raises:
        TypeError: ``model`` is not a module.
        ValueError: ``min_channels`` is less than 1, or the model itself is a layer that would be replaced.

    Example:
        >>> model = nn.Sequential(nn.Conv2d(16, 32, 3, stride=2), nn.ReLU(), nn.MaxPool2d(2))
        >>> print(apply_blurpool(model))
        2 modules replaced
          0: Conv2d -> BlurConv2d
          2: MaxPool2d -> BlurMaxPool2d
        >>> bool(apply_blurpool(model))
        False
    """
    check_whole_numbers(min_channels=min_channels)
    check_flags(replace_convs=replace_convs, replace_maxpools=replace_maxpools, blur_first=blur_first)
    if min_channels < 1:
        raise ValueError(
            f"min_channels must be at least 1, got {min_channels}. "
            "It is the smallest number of input channels a convolution must have to be blurred."
        )

    def is_wanted(layer: nn.Module) -> bool:
        if isinstance(layer, nn.Conv2d) and type(layer).forward is nn.Conv2d.forward:
            return replace_convs and layer.in_channels >= min_channels and _is_strided(layer.stride)
        if isinstance(layer, nn.MaxPool2d) and type(layer).forward is nn.MaxPool2d.forward:
            return replace_maxpools and not layer.return_indices and _is_strided(layer.stride)
        return False

    def blur_conv(conv: nn.Conv2d, _: int) -> nn.Module | None:
        return BlurConv2d(conv, blur_first) if is_wanted(conv) else None

    def blur_maxpool(pool: nn.MaxPool2d, _: int) -> nn.Module | None:
        if not is_wanted(pool):
            return None
        return BlurMaxPool2d(pool.kernel_size, pool.stride, pool.padding, pool.dilation, pool.ceil_mode)

    if isinstance(model, BlurConv2d | BlurMaxPool2d):
        return SurgeryReport()
    if is_wanted(model):
        raise ValueError(
            f"model must hold the layers to be replaced, got a {type(model).__name__} that is one itself. "
            "Wrap it: torch.nn.Sequential(model)."
        )
    policies: dict[type[nn.Module], ReplacementFunction] = {
        nn.Conv2d: blur_conv,
        nn.MaxPool2d: blur_maxpool,
        BlurConv2d: _keep,
        BlurMaxPool2d: _keep,
    }
    return replace_module_classes(model, policies, optimizers)


def _is_strided(stride: int | tuple[int, ...]) -> bool:
    return stride > 1 if isinstance(stride, int) else max(stride) > 1


def _keep(module: nn.Module, _: int) -> nn.Module:
    return module
