"""Gated linear units: the product of an activation and a linear layer (Shazeer 2020, arXiv:2002.05202)."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn


class GatedLinearUnit(nn.Module):
    """The activation of a linear layer, multiplied by a second linear layer (arXiv:2002.05202).

    ``output = act_fn(gated_layer(input)) * non_gated_layer(input)``

    Shape: ``(..., in_features)`` to ``(..., out_features)`` of both layers.

    Args:
        gated_layer: The layer to which the activation is applied.
        non_gated_layer: The second layer, with the same shapes.
        act_fn: The activation, a module or a function of one tensor.

    Raises:
        TypeError: ``act_fn`` is a class or not callable.

    Example:
        >>> unit = GatedLinearUnit(nn.Linear(4, 8), nn.Linear(4, 8, bias=False), nn.GELU())
        >>> unit(torch.rand(2, 4)).shape
        torch.Size([2, 8])
    """

    def __init__(self, gated_layer: nn.Module, non_gated_layer: nn.Module, act_fn: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        check_activation(act_fn)
        self.gated_layer = gated_layer
        self.non_gated_layer = non_gated_layer
        self.act_fn = act_fn

    def forward(self, input: Tensor) -> Tensor:
        """Multiply the activation of the gated layer by the output of the other."""
        output: Tensor = self.act_fn(self.gated_layer(input)) * self.non_gated_layer(input)
        return output


def check_activation(act_fn: object) -> None:
    """Raise a TypeError for an activation that is a class or not callable."""
    if isinstance(act_fn, type) or not callable(act_fn):
        raise TypeError(
            f"act_fn must be a module or a function of one tensor, such as nn.ReLU() or torch.relu, got {act_fn!r}."
        )
