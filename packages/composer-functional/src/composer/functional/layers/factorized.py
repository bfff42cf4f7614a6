"""Layers as products of two smaller layers, and the best factors (Jaderberg et al. 2014, arXiv:1405.3866)."""

from __future__ import annotations

from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn
from torch.nn.functional import unfold

from composer.functional.checks import (
    check_flags,
    check_float_tensors,
    check_pixels,
    check_sizes,
    check_tensors,
    check_whole,
    check_whole_numbers,
)
from composer.functional.modes import without_autocast


@torch.no_grad()
def factorize_matrix(
    weight: Tensor, rank: int, *, inputs: Tensor | None = None, targets: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Approximate a linear layer's weight by a product of two, ``second @ first``, of a given rank.

    The result minimises, in the Frobenius norm,

    - with ``weight`` alone the distance to it, ``|second @ first - weight|``: the truncated SVD (Eckart and Young);
    - with ``inputs`` the distance of the outputs, ``|inputs @ (second @ first - weight).T|``;
    - with ``inputs`` and ``targets`` the error of the prediction, ``|inputs @ (second @ first).T - targets|``: least
      squares, then the truncated SVD of their predictions (reduced-rank regression).

    Directions that the inputs do not determine stay as close to ``weight`` as the rank allows. ``first`` and ``second``
    have the same singular values, the square roots of those of the product.

    Args:
        weight: A weight as of ``torch.nn.Linear``, shape ``(out, in)``, floating point. Half precision is computed in
            float32.
        rank: The rank of the product, from 1 to ``min(out, in)``.
        inputs: Inputs of the layer, shape ``(..., in)``, with a few times more rows than ``in``.
        targets: The desired outputs for them, without the bias, shape ``(..., out)``.

    Returns:
        ``(first, second)``, shapes ``(rank, in)`` and ``(out, rank)``, on the device of ``weight`` and in its
        dtype, detached from the graph.

    Raises:
        ValueError: A shape or ``rank`` does not fit, or ``targets`` are given without ``inputs``.
        TypeError: ``weight`` is not a floating point tensor.
        RuntimeError: A value is not finite, so that there is no SVD (``torch.linalg.LinAlgError``).

    Example:
        >>> weight = torch.outer(torch.arange(4.0), torch.ones(6))
        >>> first, second = factorize_matrix(weight, rank=1)
        >>> torch.allclose(second @ first, weight, atol=1e-5)
        True
    """
    _check_weight(weight, 2, "(out, in)")
    check_whole_numbers(rank=rank)
    if not 1 <= rank <= min(weight.shape):
        raise ValueError(
            f"rank must lie between 1 and {min(weight.shape)}, the highest that a matrix of shape "
            f"{tuple(weight.shape)} can have, got {rank}."
        )
    exact = weight.to(torch.promote_types(weight.dtype, torch.float32))
    if inputs is not None:
        with without_autocast(weight):
            exact = _fit_to_data(exact, rank, inputs, targets)
    elif targets is not None:
        raise ValueError("targets must come with the inputs that they belong to, got inputs=None.")
    left, values, right = torch.linalg.svd(exact, full_matrices=False)
    roots = values[:rank].sqrt()
    first, second = roots[:, None] * right[:rank], left[:, :rank] * roots
    # LAPACK returns some matrices in column-major order.
    return first.to(weight.dtype).contiguous(), second.to(weight.dtype).contiguous()


@torch.no_grad()
def factorize_conv2d(
    weight: Tensor,
    rank: int,
    *,
    inputs: Tensor | None = None,
    targets: Tensor | None = None,
    stride: int | tuple[int, int] = 1,
    padding: int | tuple[int, int] = 0,
    dilation: int | tuple[int, int] = 1,
) -> tuple[Tensor, Tensor]:
    """Approximate a convolution's weight by a convolution to ``rank`` channels and a 1x1 convolution (arXiv:1405.3866).

    It applies :func:`factorize_matrix` to the weight as a matrix ``(out, in * rows * columns)``, with patches of the
    images as inputs, which take ``rows * columns`` times the memory of the images.

    Args:
        weight: A weight as of ``torch.nn.Conv2d`` with one group, shape ``(out, in, rows, columns)``, floating point.
        rank: The number of latent channels, from 1 to ``min(out, in * rows * columns)``.
        inputs: Inputs of the convolution, shape ``(N, in, H, W)``.
        targets: The desired outputs for them, without the bias, shape ``(N, out, H', W')``.
        stride: The convolution's stride, for ``inputs``.
        padding: The convolution's zero padding, for ``inputs``; for other padding modes, pad the images first.
        dilation: The convolution's dilation, for ``inputs``.

    Returns:
        ``(first, second)``, shapes ``(rank, in, rows, columns)`` and ``(out, rank, 1, 1)``. The first takes the
        convolution's stride, padding and dilation; the second takes its bias. Memory format is kept.

    Raises:
        ValueError: A shape or ``rank`` does not fit, or ``targets`` are given without ``inputs``.
        TypeError: ``weight`` is not a floating point tensor.
        RuntimeError: A value is not finite, so that there is no SVD (``torch.linalg.LinAlgError``).

    Example:
        >>> first, second = factorize_conv2d(torch.rand(16, 8, 3, 3), rank=4)
        >>> first.shape, second.shape
        (torch.Size([4, 8, 3, 3]), torch.Size([16, 4, 1, 1]))
    """
    _check_weight(weight, 4, "(out, in, rows, columns)")
    check_pixels(stride=stride, padding=padding, dilation=dilation)
    patches = None
    if inputs is not None:
        check_tensors(inputs=inputs)
        if inputs.ndim != 4 or inputs.shape[1] != weight.shape[1]:
            raise ValueError(f"inputs must have shape (N, {weight.shape[1]}, H, W), got {tuple(inputs.shape)}.")
        kernel_size = (weight.shape[2], weight.shape[3])
        patches = unfold(inputs, kernel_size, dilation, padding, stride).mT
    if targets is not None:
        check_tensors(targets=targets)
        if targets.ndim != 4:
            raise ValueError(f"targets must have shape (N, {weight.shape[0]}, H', W'), got {tuple(targets.shape)}.")
        targets = targets.flatten(2).mT
    first, second = factorize_matrix(weight.flatten(1), rank, inputs=patches, targets=targets)
    first = first.view(rank, *weight.shape[1:])
    if weight.is_contiguous(memory_format=torch.channels_last):
        first = first.contiguous(memory_format=torch.channels_last)
    return first, second[:, :, None, None]


class _Factorized(nn.Module):
    """Two layers that are applied one after the other, with the weight and bias of their product."""

    first: Any
    second: Any
    _kind: ClassVar[str]
    _channel_dim: ClassVar[int]

    @property
    def module0(self) -> nn.Module:
        """The first layer, under its name in MosaicML Composer."""
        return self.first  # type: ignore[no-any-return]

    @property
    def module1(self) -> nn.Module:
        """The second layer, under its name in MosaicML Composer."""
        return self.second  # type: ignore[no-any-return]

    @property
    def bias(self) -> Tensor | None:
        """The second layer's bias."""
        bias: Tensor | None = self.second.bias
        return bias

    def forward(self, input: Tensor) -> Tensor:
        """Apply the first layer, then the second."""
        output: Tensor = self.second(self.first(input))
        return output

    @torch.no_grad()
    def set_rank(self, input: Tensor, rank: int) -> None:
        """Reduce the latent size, so that the outputs for an input change as little as possible.

        They are the best approximation of that rank, see :func:`factorize_matrix`. The weights of both layers are new
        parameters: create the optimizer afterwards, or see :func:`update_params_in_optimizer`.

        Args:
            input: An input of the module, with a few times more rows or pixels than latent features.
            rank: The new latent size, from 1 to the current one, with which nothing changes.

        Raises:
            TypeError: ``rank`` is not an int, or ``input`` not a tensor.
            ValueError: ``rank`` is out of range.
        """
        check_tensors(input=input)
        check_whole("rank", rank, 1, "It is the new latent size.")
        first, second = self.first.weight, self.second.weight
        if rank > len(first):
            raise ValueError(f"rank must be at most the current latent size {len(first)}, got {rank}.")
        if rank == len(first):
            return
        latent = self.first(input).movedim(self._channel_dim, -1)
        inner, outer = factorize_matrix(second.flatten(1), rank, inputs=latent)
        with without_autocast(first):
            smaller = (inner @ first.flatten(1)).view(rank, *first.shape[1:])
        self._with_factors((smaller, outer.view(-1, rank, *second.shape[2:])), self.bias)
        for module, name in ((self, "latent"), (self.first, "out"), (self.second, "in")):
            setattr(module, f"{name}_{self._kind}", rank)

    def _with_factors(self, factors: tuple[Tensor, Tensor], bias: Tensor | None) -> Self:
        """Set the weights of both layers and the bias, and return the module."""
        for layer, factor in zip((self.first, self.second), factors, strict=True):
            layer.weight = nn.Parameter(factor, requires_grad=layer.weight.requires_grad)
        self.second.bias = bias
        return self


class FactorizedLinear(_Factorized):
    """Two linear layers with few latent features between them, in place of one layer (arXiv:1405.3866).

    ``second(first(input))``; only the second layer has a bias. ``weight`` and ``bias`` are those of the single layer
    with the same outputs.

    Shape: ``(..., in_features)`` to ``(..., out_features)``.

    Args:
        in_features: Number of input features.
        out_features: Number of output features.
        bias: Whether the second layer has a bias.
        latent_features: The latent features: an int, or a float in ``(0, 1)``, a fraction of the smaller of input and
            output features (rounded down, but at least 1).

    Raises:
        ValueError: ``latent_features`` is neither a whole number of at least 1 nor a fraction between 0 and 1.

    Example:
        >>> layer = FactorizedLinear(64, 32, latent_features=0.25)
        >>> layer.latent_features, layer(torch.rand(5, 64)).shape
        (8, torch.Size([5, 32]))
    """

    _kind = "features"
    _channel_dim = -1

    def __init__(self, in_features: int, out_features: int, bias: bool = True, latent_features: float = 0.25) -> None:
        super().__init__()
        check_sizes(in_features=in_features, out_features=out_features)
        check_flags(bias=bias)
        self.in_features = in_features
        self.out_features = out_features
        smaller = min(in_features, out_features)
        self.latent_features = resolve_latent_size("latent_features", latent_features, smaller)
        self.first = nn.Linear(in_features, self.latent_features, bias=False)
        self.second = nn.Linear(self.latent_features, out_features, bias=bias)

    @property
    def weight(self) -> Tensor:
        """The product of the two weights, shape ``(out_features, in_features)``."""
        product: Tensor = self.second.weight @ self.first.weight
        return product

    @classmethod
    def from_linear(cls, module: nn.Linear, module_index: int = -1, latent_features: float = 0.25) -> Self:  # noqa: ARG003
        """Return the best approximation of a linear layer: a policy for :func:`replace_module_classes`.

        Args:
            module: The layer.
            module_index: Not used.
            latent_features: As for the class.

        Returns:
            The two layers, with factors of the weight, see :func:`factorize_matrix`; the bias is the same parameter.
        """
        with torch.device("meta"):  # draws no random numbers for weights that are replaced
            new = cls(module.in_features, module.out_features, module.bias is not None, latent_features)
        return new._with_factors(factorize_matrix(module.weight, new.latent_features), module.bias)


class FactorizedConv2d(_Factorized):
    """A convolution to few latent channels and a 1x1 convolution, in place of one convolution (arXiv:1405.3866).

    ``second(first(input))``; the first convolution has the kernel size, stride, padding and dilation, the second has
    the bias. ``weight`` and ``bias`` are those of the single convolution with the same outputs.

    Shape: that of the single convolution.

    Args:
        in_channels: Channels of the input.
        out_channels: Channels of the output.
        kernel_size: Size of the first convolution's kernel, one number or (rows, columns).
        latent_channels: The latent channels: an int, or a float in ``(0, 1)``, a fraction of the smaller of input and
            output channels (rounded down, but at least 1).
        stride: Its stride.
        padding: Its padding.
        dilation: Its dilation.
        bias: Whether the second convolution has a bias.
        padding_mode: Its padding mode.

    Raises:
        ValueError: ``latent_channels`` is neither a whole number of at least 1 nor a fraction between 0 and 1.

    Example:
        >>> layer = FactorizedConv2d(32, 16, kernel_size=3, padding=1, latent_channels=0.5)
        >>> layer.latent_channels, layer(torch.rand(2, 32, 8, 8)).shape
        (8, torch.Size([2, 16, 8, 8]))
    """

    _kind = "channels"
    _channel_dim = -3

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int | tuple[int, ...],
        latent_channels: float = 0.25,
        stride: int | tuple[int, ...] = 1,
        padding: str | int | tuple[int, ...] = 0,
        dilation: int | tuple[int, ...] = 1,
        bias: bool = True,
        padding_mode: str = "zeros",
    ) -> None:
        super().__init__()
        check_sizes(in_channels=in_channels, out_channels=out_channels)
        check_flags(bias=bias)
        self.in_channels = in_channels
        self.out_channels = out_channels
        self.latent_channels = resolve_latent_size("latent_channels", latent_channels, min(in_channels, out_channels))
        where: dict[str, Any] = {"kernel_size": kernel_size, "stride": stride, "padding": padding}
        where |= {"dilation": dilation, "padding_mode": padding_mode}
        self.first = nn.Conv2d(in_channels, self.latent_channels, bias=False, **where)
        self.second = nn.Conv2d(self.latent_channels, out_channels, kernel_size=1, bias=bias)

    @property
    def weight(self) -> Tensor:
        """The product of the two weights, shape ``(out_channels, in_channels, rows, columns)``."""
        product: Tensor = self.second.weight.flatten(1) @ self.first.weight.flatten(1)
        return product.view(self.out_channels, *self.first.weight.shape[1:])

    @classmethod
    def from_conv2d(cls, module: nn.Conv2d, module_index: int = -1, latent_channels: float = 0.25) -> Self:  # noqa: ARG003
        """Return the best approximation of a convolution: a policy for :func:`replace_module_classes`.

        Args:
            module: The convolution, with one group.
            module_index: Not used.
            latent_channels: As for the class.

        Returns:
            The two convolutions, with factors of the weight, see :func:`factorize_conv2d`; the bias is the same
            parameter.

        Raises:
            ValueError: The convolution has groups.
        """
        if module.groups != 1:
            raise ValueError(
                f"module must have one group, got {module.groups}. Grouped convolutions are already small."
            )
        with torch.device("meta"):  # draws no random numbers for weights that are replaced
            new = cls(
                module.in_channels,
                module.out_channels,
                module.kernel_size,
                latent_channels,
                module.stride,
                module.padding,
                module.dilation,
                module.bias is not None,
                module.padding_mode,
            )
        return new._with_factors(factorize_conv2d(module.weight, new.latent_channels), module.bias)


def resolve_latent_size(name: str, latent: object, size: int = 1) -> int:
    """Return a latent size that is an integer, or a fraction of ``size``."""
    if isinstance(latent, int) and not isinstance(latent, bool) and latent >= 1:
        return latent
    if isinstance(latent, float) and 0 < latent < 1:
        return max(1, int(latent * size + 1e-6))
    raise ValueError(
        f"{name} must be a whole number of at least 1, or a fraction between 0 and 1, got {latent!r}. "
        "It is the size between the two layers."
    )


def _fit_to_data(weight: Tensor, rank: int, inputs: Tensor, targets: Tensor | None) -> Tensor:
    """Return the matrix of the rank whose outputs are closest to the targets, or else to those of the weight."""
    out_features, in_features = weight.shape
    check_tensors(inputs=inputs)
    if targets is not None:
        check_tensors(targets=targets)
    if inputs.ndim == 0 or inputs.shape[-1] != in_features or inputs.numel() == 0:
        raise ValueError(f"inputs must have shape (..., {in_features}) and a row at least, got {tuple(inputs.shape)}.")
    if targets is not None and targets.shape != (*inputs.shape[:-1], out_features):
        expected = (*inputs.shape[:-1], out_features)
        raise ValueError(f"targets must have shape {tuple(expected)}, got {tuple(targets.shape)}.")
    rows = inputs.reshape(-1, in_features).to(weight.dtype)
    outputs = rows @ weight.mT
    if targets is not None:
        # The smallest change of the weight that solves the least-squares problem.
        rest = targets.reshape(-1, out_features).to(weight.dtype) - outputs
        change = torch.linalg.pinv(rows) @ rest
        weight, outputs = weight + change.mT, outputs + rows @ change
    # All right singular vectors of the outputs, from the small factor of a QR decomposition.
    directions: Tensor = torch.linalg.svd(torch.linalg.qr(outputs, mode="r").R).Vh[:rank]
    return directions.mT @ (directions @ weight)


def _check_weight(weight: Tensor, ndim: int, shape: str) -> None:
    check_float_tensors(weight=weight)
    if weight.ndim != ndim or weight.numel() == 0:
        raise ValueError(f"weight must have shape {shape} and an element at least, got {tuple(weight.shape)}.")
