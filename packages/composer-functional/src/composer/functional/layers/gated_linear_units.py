"""Gated linear units: a linear layer whose activation is multiplied by another one (Shazeer 2020, arXiv:2002.05202)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor, nn

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["GatedLinearUnit"]


class GatedLinearUnit(nn.Module):
    """A linear layer with its activation, times a second linear layer (arXiv:2002.05202).

    ``output = act_fn(gated_layer(input)) * non_gated_layer(input)``

    Shape: ``(..., in_features)`` to ``(..., out_features)`` of both layers.

    Args:
        gated_layer: The layer under the activation.
        non_gated_layer: The layer beside it, with the same shapes.
        act_fn: The activation, a module or a function of one tensor.

    Raises:
        TypeError: ``act_fn`` is a class, or cannot be called.

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
        """Multiply the activation of the one by the other."""
        output: Tensor = self.act_fn(self.gated_layer(input)) * self.non_gated_layer(input)
        return output


def check_activation(act_fn: object) -> None:
    """Refuse what is no activation, above all a class instead of a module."""
    if isinstance(act_fn, type) or not callable(act_fn):
        raise TypeError(
            f"act_fn must be a module or a function of one tensor, as torch.nn.ReLU() or torch.relu, got {act_fn!r}."
        )
