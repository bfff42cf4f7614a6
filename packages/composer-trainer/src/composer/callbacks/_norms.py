"""Sums of squares and products over many tensors at once, also of such that are sharded over processes."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["local", "sums_of", "sums_of_products", "sums_of_squares", "sums_over_processes"]


def local(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return of each sharded tensor the part that this process holds, and others as they are."""
    either: Sequence[Any] = tensors
    return [one.to_local() if _is_distributed(one) else one for one in either]


def sums_of_squares(tensors: Sequence[Tensor]) -> Tensor:
    """Return each tensor's sum of squares, in one tensor ``(len(tensors),)`` of at least 32 bits.

    Example:
        >>> sums_of_squares([torch.tensor([3.0, 4.0]), torch.ones(2, 2)])
        tensor([25.,  4.])
    """
    if not tensors:
        return torch.zeros(0)
    return torch.stack(torch._foreach_norm(list(tensors), 2, dtype=_precise(tensors))).square()


def sums_of(tensors: Sequence[Tensor]) -> Tensor:
    """Return each tensor's sum, as :func:`sums_of_squares`; nothing in them may be negative.

    Example:
        >>> sums_of([torch.tensor([3.0, 4.0])])
        tensor([7.])
    """
    if not tensors:
        return torch.zeros(0)
    return torch.stack(torch._foreach_norm(list(tensors), 1, dtype=_precise(tensors)))


def sums_of_products(first: Sequence[Tensor], second: Sequence[Tensor]) -> Tensor:
    """Return the dot product of each pair of tensors, as :func:`sums_of_squares`.

    Example:
        >>> sums_of_products([torch.tensor([3.0, 4.0])], [torch.tensor([1.0, -1.0])])
        tensor([-1.])
    """
    if not first:
        return torch.zeros(0)
    products = torch._foreach_mul(list(first), list(second))
    precise = _precise(products)
    return torch.stack([product.sum(dtype=precise) for product in products])


def sums_over_processes(sums: Tensor, tensors: Sequence[Tensor]) -> Tensor:
    """Return what the sums of all processes' parts come to, by one reduction; without sharded tensors, ``sums``.

    Args:
        sums: One for each tensor, of this process's part of it.
        tensors: What was summed; in every process the same ones, in the same order.
    """
    if not any(map(_is_distributed, tensors)):
        return sums
    # A part lies in as many processes as there are replicas of it, and shall count once.
    shares = torch.tensor([_num_shards(one) for one in tensors], dtype=sums.dtype) / torch.distributed.get_world_size()
    total = sums * shares.to(sums.device, non_blocking=True)
    torch.distributed.all_reduce(total)
    return total


def _is_distributed(tensor: Any) -> bool:
    return hasattr(tensor, "device_mesh")  # a DTensor; asking so does not import what defines it


def _num_shards(tensor: Any) -> int:
    if not _is_distributed(tensor):
        return 1
    sizes = zip(tensor.placements, tensor.device_mesh.shape, strict=True)
    return math.prod(size for placement, size in sizes if placement.is_shard())


def _precise(tensors: Sequence[Tensor]) -> torch.dtype:
    return torch.float64 if any(one.dtype is torch.float64 for one in tensors) else torch.float32
