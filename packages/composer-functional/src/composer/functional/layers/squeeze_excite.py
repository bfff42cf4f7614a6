"""Layers that scale channels by a function of their means (Hu et al. 2018, arXiv:1709.01507)."""

from __future__ import annotations

from typing import Any, Self

from torch import Tensor, nn

from composer.functional.checks import check_whole
from composer.functional.layers.blurpool import BlurConv2d
from composer.functional.layers.factorized import FactorizedConv2d, resolve_latent_size


class SqueezeExcite2d(nn.Module):
    """Scale each channel by a factor in (0, 1) that is computed from the means of all channels (arXiv:1709.01507).

    ``input * sigmoid(expand(relu(reduce(input.mean((-2, -1))))))``, with two linear layers without bias, as in the
    paper. The factors of a new layer are about one half, which the normalisation that usually follows compensates.

    Shape: ``(N, C, H, W)`` or ``(C, H, W)``, floating point; dtype and memory format are kept.

    Args:
        num_features: The number of channels ``C``.
        latent_channels: The size between the two linear layers: an int, or a float in ``(0, 1)``, a fraction of
            ``num_features`` (rounded down, but at least 1).

    Raises:
        ValueError: ``num_features`` is less than 1; or ``latent_channels`` is neither a whole number of at least 1 nor
            a fraction between 0 and 1; when called, the input has another number of channels.

    Example:
        >>> layer = SqueezeExcite2d(16, latent_channels=0.25)
        >>> layer.reduce.out_features, layer(torch.rand(2, 16, 8, 8)).shape
        (4, torch.Size([2, 16, 8, 8]))
    """

    def __init__(self, num_features: int, latent_channels: float = 0.125) -> None:
        super().__init__()
        check_whole("num_features", num_features, 1, "It is the number of channels.")
        latent = resolve_latent_size("latent_channels", latent_channels, num_features)
        self.reduce = nn.Linear(num_features, latent, bias=False)
        self.expand = nn.Linear(latent, num_features, bias=False)

    def forward(self, input: Tensor) -> Tensor:
        """Scale the channels."""
        channels = self.reduce.in_features
        if input.ndim not in {3, 4} or input.shape[-3] != channels:
            raise ValueError(
                f"input must have shape (N, {channels}, H, W) or ({channels}, H, W), got {tuple(input.shape)}. "
                "num_features is the number of channels."
            )
        gate: Tensor = self.expand(self.reduce(input.mean((-2, -1))).relu()).sigmoid()
        return input * gate[..., None, None]


class SqueezeExciteConv2d(nn.Module):
    """A convolution and a :class:`SqueezeExcite2d` of its output (arXiv:1709.01507).

    The convolution is the attribute ``conv``, with its parameters and hooks: in a state dict ``weight`` becomes
    ``conv.weight``, and ``se.reduce.weight`` and ``se.expand.weight`` are new.

    Shape: that of the convolution.

    Args:
        *args: Arguments of ``torch.nn.Conv2d``.
        latent_channels: As for :class:`SqueezeExcite2d`; a fraction refers to the output channels.
        conv: An existing convolution to use; a ``torch.nn.Conv2d``, :class:`BlurConv2d` or
            :class:`FactorizedConv2d`.
        **kwargs: Arguments of ``torch.nn.Conv2d``.

    Raises:
        TypeError: ``conv`` is of another type, or is passed together with arguments for a new convolution.
        ValueError: As :class:`SqueezeExcite2d`.

    Example:
        >>> SqueezeExciteConv2d(3, 16, kernel_size=3, latent_channels=4)(torch.rand(2, 3, 8, 8)).shape
        torch.Size([2, 16, 6, 6])
    """

    def __init__(
        self, *args: Any, latent_channels: float = 0.125, conv: nn.Module | None = None, **kwargs: Any
    ) -> None:
        super().__init__()
        if conv is not None and (args or kwargs):
            raise TypeError("conv must come without arguments for a new convolution, got both. Leave out one of them.")
        self.conv = nn.Conv2d(*args, **kwargs) if conv is None else conv
        self.se = SqueezeExcite2d(plain_convolution(self.conv).out_channels, latent_channels)

    def forward(self, input: Tensor) -> Tensor:
        """Convolve, then scale the channels."""
        output: Tensor = self.se(self.conv(input))
        return output

    @classmethod
    def from_conv2d(cls, module: nn.Module, module_index: int = -1, latent_channels: float = 0.125) -> Self:  # noqa: ARG003
        """Wrap a convolution: a policy for :func:`replace_module_classes` with ``latent_channels`` bound.

        Args:
            module: The convolution.
            module_index: Not used.
            latent_channels: As for the class.

        Returns:
            The layer, whose ``conv`` is ``module``.
        """
        return cls(conv=module, latent_channels=latent_channels)


def plain_convolution(conv: nn.Module) -> nn.Conv2d | FactorizedConv2d:
    """Return the convolution inside a :class:`BlurConv2d`, or the convolution itself.

    Raises:
        TypeError: ``conv`` is not a convolution.
    """
    inner = conv.conv if isinstance(conv, BlurConv2d) else conv
    if not isinstance(inner, nn.Conv2d | FactorizedConv2d):
        raise TypeError(
            f"conv must be a torch.nn.Conv2d, BlurConv2d or FactorizedConv2d, got {type(inner).__name__}. "
            "Add a SqueezeExcite2d after other layers."
        )
    return inner
