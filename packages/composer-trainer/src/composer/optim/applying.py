"""How the direction of an optimizer changes weights: cautiously, and without losing small updates of 16-bit weights."""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping
from typing import Any

import torch
from torch import Tensor

from composer.core.randomness import derive_seed
from composer.functional.checks import check_choice, check_flags
from composer.functional.dtensors import is_dtensor, local_parts

_SIMPLE: dict[str, Any] = {"cautious_weight_decay": False, "cautious_update": False, "rounding": "nearest"}

_MOST_ELEMENTS = 2**25
"""The most elements for which temporary tensors of 32 bits exist at once."""


def check_applying(group: dict[str, Any]) -> None:
    """Raise an error for an invalid setting."""
    check_flags(**{name: group[name] for name in ("cautious_weight_decay", "cautious_update")})
    check_choice("rounding", group["rounding"], "nearest", "stochastic", "kahan")


def check_dtypes(weights: list[Tensor], group: dict[str, Any]) -> None:
    """Raise an error for weights that cannot be rounded stochastically."""
    if group["rounding"] == "stochastic" and any(weight.dtype is torch.float16 for weight in weights):
        raise ValueError(
            "rounding='stochastic' requires weights in bfloat16, or in 32 bits, which need no rounding, got float16. "
            "Use rounding='kahan', or model.to(torch.bfloat16)."
        )


def is_applied_simply(group: dict[str, Any]) -> bool:
    """Return whether all settings of this module have their defaults."""
    return all(group[name] == default for name, default in _SIMPLE.items())


def batches_of(weights: list[Tensor], most: int = _MOST_ELEMENTS, *, by_shape: bool = False) -> Iterator[list[int]]:
    """Yield the indices of weights that are processed together: of one dtype, device and sharding."""
    kinds: dict[object, list[int]] = {}
    for place, weight in enumerate(weights):
        spread = (weight.device_mesh, weight.placements) if is_dtensor(weight) else None
        key = (weight.dtype, weight.device, spread, weight.shape if by_shape else None)
        kinds.setdefault(key, []).append(place)
    for places in kinds.values():
        batch, elements = [places[0]], weights[places[0]].numel()
        for place in places[1:]:
            elements += weights[place].numel()
            if elements > most:
                yield batch
                batch, elements = [], weights[place].numel()
            batch.append(place)
        yield batch


def apply_directions(
    states: MutableMapping[Tensor, Any],
    weights: list[Tensor],
    gradients: list[Tensor],
    directions: list[Tensor],
    group: dict[str, Any],
    *,
    rate: float,
    fraction: float,
    seed: object,
) -> None:
    """Compute ``weights <- weights - fraction * weights - rate * directions`` with the settings of a group.

    Args:
        states: The states of the optimizer; those of ``"kahan"`` get a ``compensation``.
        weights: The weights, all of one dtype, device and sharding; **changed in place**.
        gradients: Their gradients: this process's parts.
        directions: The directions: this process's parts; **changed in place**.
        group: The settings.
        rate: The factor of the directions.
        fraction: The fraction of the weights to remove.
        seed: Determines the random numbers of ``"stochastic"``; equal in each process, so that replicas remain equal.
    """
    check_dtypes(weights, group)
    if group["cautious_update"]:
        _mask(directions, real_parts(gradients), weights)
    parts = real_parts(weights)
    is_low = parts[0].dtype.itemsize < 4
    wide = [part.float() for part in parts] if is_low else parts
    steps = list(torch._foreach_mul([one.float() for one in directions] if is_low else directions, rate))
    if fraction:
        decayed: Any = wide
        if group["cautious_weight_decay"]:
            agrees = torch._foreach_mul(steps, wide)  # the rate does not change the sign, unless it is 0
            torch._foreach_sign_(agrees)
            torch._foreach_add_(agrees, 1)
            torch._foreach_clamp_max_(agrees, 1)  # 1 where the product is at least 0
            decayed = torch._foreach_mul(agrees, wide)
        torch._foreach_add_(steps, decayed, alpha=fraction)
    if is_low and group["rounding"] == "kahan":
        _step_with_compensation(states, weights, parts, wide, steps)
        return
    torch._foreach_sub_(wide, steps)
    if is_low:
        if group["rounding"] == "stochastic":
            for place, values in enumerate(wide):
                _round_stochastically(values, derive_seed("rounding", seed, place))
        torch._foreach_copy_(parts, wide)


def _mask(directions: list[Tensor], gradients: list[Tensor], weights: list[Tensor]) -> None:
    """Remove what opposes the gradients, and scale the rest by ``elements / (remaining elements + 1)``."""
    # Products of signs, because those of small numbers may be 0 in float16.
    masks = torch._foreach_sign(directions)  # noqa: SLF001
    torch._foreach_mul_(masks, torch._foreach_sign(gradients))  # noqa: SLF001
    torch._foreach_clamp_min_(masks, 0)
    remaining = torch.stack([mask.sum(dtype=torch.float32) for mask in masks])
    first = weights[0]
    for dimension, placement in enumerate(first.placements) if is_dtensor(first) else ():
        if not placement.is_replicate():
            assert is_dtensor(first)
            torch.distributed.all_reduce(remaining, group=first.device_mesh.get_group(dimension))
    counts = torch.tensor([weight.numel() * (1 + weight.is_complex()) for weight in weights], dtype=torch.float32)
    factors = counts.to(remaining.device, non_blocking=True) / (remaining + 1)
    torch._foreach_mul_(directions, masks)
    torch._foreach_mul_(directions, [factor.to(directions[0].dtype) for factor in factors.unbind()])


def _step_with_compensation(
    states: MutableMapping[Tensor, Any],
    weights: list[Tensor],
    parts: list[Tensor],
    wide: list[Tensor],
    steps: list[Tensor],
) -> None:
    """Subtract steps, and keep what rounding removes for the next step (Kahan summation)."""
    for weight in weights:
        if "compensation" not in states[weight]:
            states[weight]["compensation"] = torch.zeros_like(weight, memory_format=torch.preserve_format)
    kept = real_parts([states[weight]["compensation"] for weight in weights])
    due = torch._foreach_sub([one.float() for one in kept], steps)
    torch._foreach_copy_(parts, list(torch._foreach_add(wide, due)))
    changes = torch._foreach_sub([part.float() for part in parts], wide)
    torch._foreach_copy_(kept, list(torch._foreach_sub(due, changes)))


def _round_stochastically(values: Tensor, seed: int) -> None:
    """Round float32 to one of the two neighbours in bfloat16, in place, with probabilities that keep the mean.

    bfloat16 is the upper half of float32: a random number is added to the lower half, which is then removed. Infinite
    values and NaN, whose lower half is 0 or whose carry does not reach the exponent, remain what they are.
    """
    generator = torch.Generator(values.device).manual_seed(seed)
    bits = values.view(torch.int32)
    noise = torch.randint(0, 2**16, bits.shape, dtype=torch.int32, device=values.device, generator=generator)
    bits.add_(noise).bitwise_and_(-(2**16))


def placed_like(gradient: Tensor, weight: Tensor) -> Tensor:
    """Return a gradient with the placements of its weight: of partial sums this process's part of the sum."""
    if is_dtensor(gradient) and is_dtensor(weight) and gradient.placements != weight.placements:
        return gradient.redistribute(placements=weight.placements)
    return gradient


def real_parts(tensors: list[Tensor]) -> list[Tensor]:
    """Return this process's parts, complex ones as pairs of real numbers; all share their memory."""
    return [torch.view_as_real(part) if part.is_complex() else part for part in local_parts(tensors)]
