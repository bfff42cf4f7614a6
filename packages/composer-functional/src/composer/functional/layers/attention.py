"""Parts of attention: norms of its heads, gates on its output, and values of the first layer."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn

from composer.functional.layers.derived import DerivedModule


@dataclass(frozen=True)
class Heads:
    """How the output of a projection is divided into heads.

    Attributes:
        head_dim: The features of a head.
        axis: None for one of queries, keys and values; of a layer for all three the axis of the three in the divided
            output: -3 if all queries come before all keys, -2 if those of each head do.

    Example:
        >>> query, key, value = Heads(2, axis=-3).split(torch.arange(12.0))
        >>> key, Heads(2, axis=-3).join([query, key, value])[:3]
        (tensor([[4., 5.],
                [6., 7.]]), tensor([0., 1., 2.]))
    """

    head_dim: int
    axis: int | None = None

    def split(self, features: Tensor) -> list[Tensor]:
        """Return the parts ``(..., heads, head_dim)`` of features ``(..., D)``."""
        if self.axis is None:
            return [torch.unflatten(features, -1, (-1, self.head_dim))]
        shape = (3, -1, self.head_dim) if self.axis == -3 else (-1, 3, self.head_dim)
        return [*torch.unflatten(features, -1, shape).unbind(self.axis)]

    def join(self, parts: list[Tensor]) -> Tensor:
        """Return the features of the parts."""
        return parts[0].flatten(-2) if self.axis is None else torch.stack(parts, self.axis).flatten(-3)


class NormalizedHeads(nn.Module):
    """A projection whose queries or keys are divided by their root mean square, each head by its own.

    Args:
        layer: The projection.
        heads: How its output is divided.
        count: The number of parts that are normalized: 1, or 2 if the layer projects queries, keys and values.
        eps: What is added to the mean square.
    """

    def __init__(self, layer: nn.Module, heads: Heads, count: int, eps: float) -> None:
        super().__init__()
        self.layer, self.heads = layer, heads
        self.norms = nn.ModuleList(nn.RMSNorm(heads.head_dim, eps) for _ in range(count))

    def forward(self, input: Tensor) -> Tensor:
        """Project and normalize."""
        parts, norms = self.heads.split(self.layer(input)), cast("Iterable[nn.RMSNorm]", self.norms)
        for place, norm in enumerate(norms):
            part = parts[place]
            parts[place] = norm(part.to(norm.weight.dtype)).to(part.dtype)  # under autocast in 32 bits
        return self.heads.join(parts)


@dataclass(eq=False)
class FirstValues:
    """The values of the first layer in one forward pass, with whether they were computed with gradients."""

    values: Tensor | None = None
    with_grad: bool = False


class MixedValues(nn.Module):
    """A projection whose values are mixed with those of the first layer.

    Args:
        layer: The projection.
        heads: How its output is divided.
        initial_weight: The weight of the first layer's values, beside one minus this for its own; None in that layer.
    """

    def __init__(self, layer: nn.Module, heads: Heads, initial_weight: float | None) -> None:
        super().__init__()
        self.layer, self.heads = layer, heads
        self.first: FirstValues | None = None
        weights = None if initial_weight is None else torch.tensor([1 - initial_weight, initial_weight])
        self.weights = None if weights is None else nn.Parameter(weights)

    def forward(self, input: Tensor) -> Tensor:
        """Project, and store or mix the values."""
        parts, first, self.first = self.heads.split(self.layer(input)), self.first, None
        if first is None:
            raise RuntimeError(
                "The attention got no first_values, which ValueResidual passes to the model: its blocks must pass "
                "keyword arguments that they do not have on to their attention, as those of Transformers do."
            )
        if self.weights is None:
            first.values, first.with_grad = parts[-1], torch.is_grad_enabled()
        elif first.values is None or (torch.is_grad_enabled() and not first.with_grad):
            raise RuntimeError(
                "The values of the first layer must be computed with gradients, got none: ValueResidual does not work "
                "with reentrant checkpointing. Pass use_reentrant=False, or use ActivationCheckpointing."
            )
        else:
            parts[-1] = self.weights[0] * parts[-1] + self.weights[1] * first.values.to(parts[-1])
        return self.heads.join(parts)


def begin_pass(_: nn.Module, args: Any, kwargs: Mapping[str, Any]) -> Any:
    """Pass a place for the first values through a stack of layers, as a forward pre-hook.

    It is an argument, as a block that is computed again in the backward pass needs the values of its forward pass.
    """
    return args, {**kwargs, "first_values": FirstValues()}


@dataclass(frozen=True)
class HandOver:
    """A forward pre-hook of an attention that gives the first values to its projection, an attribute of this name."""

    name: str

    def __call__(self, attention: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
        """Give the values to the projection, and return the arguments without them."""
        layer = getattr(attention, self.name)
        while not isinstance(layer, MixedValues):
            layer = layer.layer
        layer.first = kwargs.get("first_values")
        return args, {name: value for name, value in kwargs.items() if name != "first_values"}


class GatedAttention(DerivedModule):
    """An attention whose heads are multiplied by gates, which its input determines, before its output layers.

    These are children of ``output``, under their names; where the attention calls them, nothing changes.
    """

    prefix: ClassVar = "Gated"
    gate: nn.Module
    output: nn.ModuleDict
    offset: float
    num_heads_with_gate: int

    @classmethod
    def around(
        cls, attention: nn.Module, output: tuple[str, ...], num_heads: int, gate: nn.Module, initial_gate: float
    ) -> GatedAttention:
        """Return an attention with gates; the other must not be used afterwards."""
        children = {**vars(attention)["_modules"]}
        layers = nn.ModuleDict({name: children.pop(name) for name in output})
        children |= {"output": layers, "gate": gate}
        settings = {"offset": math.log(initial_gate / (1 - initial_gate)), "num_heads_with_gate": num_heads}
        return cls.take_over(attention, _modules=children, **settings, **dict.fromkeys(output, _unchanged))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return what the attention returns, whose first item is its output."""
        result = super().forward(*args, **kwargs)
        heads, *others = result if isinstance(result, tuple) else (result,)
        hidden = args[0] if args else kwargs["hidden_states"]
        gate = torch.sigmoid(self.gate(hidden) + self.offset)
        shape = (self.num_heads_with_gate, -1)
        output = (torch.unflatten(heads, -1, shape) * torch.unflatten(gate, -1, shape)).flatten(-2)
        for layer in self.output.values():
            output = layer(output)
        return (output, *others) if isinstance(result, tuple) else output


def _unchanged(input: Tensor) -> Tensor:
    return input
