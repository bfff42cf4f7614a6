"""Initializers of a model's weights, by name."""

from __future__ import annotations

import math
from collections.abc import Callable
from enum import StrEnum

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd


class Initializer(StrEnum):
    """An initializer of the weights of some kinds of layers.

    ``model.apply(Initializer("kaiming_normal").get_initializer())`` initialises all layers of these kinds in the model;
    other layers do not change, and neither do biases, unless the documentation of the name states so.

    Example:
        >>> model = nn.Sequential(nn.Linear(4, 10), nn.ReLU())
        >>> for name in ["kaiming_normal", "linear_log_constant_bias"]:
        ...     _ = model.apply(Initializer(name).get_initializer())
        >>> model[0].bias[:3]  # log(1/10)
        tensor([-2.3026, -2.3026, -2.3026], grad_fn=<SliceBackward0>)
    """

    KAIMING_NORMAL = "kaiming_normal"
    """Weights of linear and convolution layers, drawn by ``nn.init.kaiming_normal_`` (arXiv:1502.01852)."""
    KAIMING_UNIFORM = "kaiming_uniform"
    """The same, by ``nn.init.kaiming_uniform_``."""
    BN_UNIFORM = "bn_uniform"
    """Batch norms: scales uniform in [0, 1), shifts 0."""
    BN_ONES = "bn_ones"
    """Batch norms: scales 1, shifts 0."""
    XAVIER_UNIFORM = "xavier_uniform"
    """Weights of linear and convolution layers, drawn by ``nn.init.xavier_uniform_`` (Glorot and Bengio 2010)."""
    XAVIER_NORMAL = "xavier_normal"
    """The same, by ``nn.init.xavier_normal_``."""
    LINEAR_LOG_CONSTANT_BIAS = "linear_log_constant_bias"
    """Biases of linear layers ``log(1 / out_features)``: every class starts with the same probability."""

    def get_initializer(self) -> Callable[[nn.Module], None]:
        """Return a function that initialises a module's own weights in place, for ``nn.Module.apply``.

        It draws from torch's global generator of the device of the weights.
        """
        return _SET[self]


def _of_weights(draw: Callable[[torch.Tensor], object]) -> Callable[[nn.Module], None]:
    def initialize(module: nn.Module) -> None:
        if isinstance(module, nn.Linear | _ConvNd):
            draw(module.weight)

    return initialize


def _of_batch_norms(draw: Callable[[torch.Tensor], object]) -> Callable[[nn.Module], None]:
    def initialize(module: nn.Module) -> None:
        if isinstance(module, _BatchNorm) and module.affine:
            draw(module.weight)
            nn.init.zeros_(module.bias)

    return initialize


def _set_log_constant_bias(module: nn.Module) -> None:
    if isinstance(module, nn.Linear) and module.bias is not None:
        nn.init.constant_(module.bias, -math.log(module.out_features))


_SET: dict[Initializer, Callable[[nn.Module], None]] = {
    Initializer.KAIMING_NORMAL: _of_weights(nn.init.kaiming_normal_),
    Initializer.KAIMING_UNIFORM: _of_weights(nn.init.kaiming_uniform_),
    Initializer.BN_UNIFORM: _of_batch_norms(nn.init.uniform_),
    Initializer.BN_ONES: _of_batch_norms(nn.init.ones_),
    Initializer.XAVIER_UNIFORM: _of_weights(nn.init.xavier_uniform_),
    Initializer.XAVIER_NORMAL: _of_weights(nn.init.xavier_normal_),
    Initializer.LINEAR_LOG_CONSTANT_BIAS: _set_log_constant_bias,
}
