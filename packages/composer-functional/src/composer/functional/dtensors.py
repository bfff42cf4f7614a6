"""The parts of DTensors that a process has, also of plain tensors, without importing DTensor for those."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeGuard

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor, Placement

_PLAIN = {Tensor, nn.Parameter}


class Region(NamedTuple):
    """A block of the elements of a tensor, such as the part of a DTensor that a process has.

    Example:
        >>> torch.arange(12).view(3, 4)[Region(offset=(1, 2), shape=(2, 2)).slices]
        tensor([[ 6,  7],
                [10, 11]])
    """

    offset: tuple[int, ...]
    shape: tuple[int, ...]

    @classmethod
    def of(cls, shape: Sequence[int]) -> Region:
        """Return all of a tensor with some shape."""
        return cls((0,) * len(shape), tuple(shape))

    @property
    def slices(self) -> tuple[slice, ...]:
        """The index of the elements."""
        return tuple(slice(start, start + length) for start, length in zip(*self, strict=True))


def rank_and_processes() -> tuple[int, int]:
    """Return the rank of this process and the number of processes: 0 and 1 without a process group.

    Example:
        >>> rank_and_processes()
        (0, 1)
    """
    distributed = torch.distributed
    connected = distributed.is_available() and distributed.is_initialized()
    return (distributed.get_rank(), distributed.get_world_size()) if connected else (0, 1)


def is_dtensor(tensor: object) -> TypeGuard[DTensor]:
    """Return whether a value is a DTensor."""
    if type(tensor) in _PLAIN or not torch.distributed.is_available():
        return False
    from torch.distributed.tensor import DTensor  # noqa: PLC0415  (slow, and plain tensors do not need it)

    return isinstance(tensor, DTensor)


def is_sharded(model: nn.Module) -> bool:
    """Return whether a model is sharded: by ``fully_shard``, or with DTensors as weights.

    After the forward pass of an evaluation, a sharded model may have its complete weights.

    Example:
        >>> is_sharded(nn.Linear(2, 2))
        False
    """
    if "torch.distributed.tensor" not in sys.modules:
        return False  # slow to import, and no DTensor exists without it
    from torch.distributed.fsdp import FSDPModule  # noqa: PLC0415  (slow, too)

    return any(isinstance(module, FSDPModule) for module in model.modules()) or any(map(is_dtensor, model.parameters()))


def reshard(model: object) -> None:
    """Shard modules again that hold their complete weights after the forward pass of an evaluation.

    Until then, :func:`torch.distributed.fsdp.fully_shard` computes with the complete weights, even if the shards have
    changed. Other modules are not affected.

    Example:
        >>> reshard(nn.Linear(1, 1))
    """
    if not isinstance(model, nn.Module) or "torch.distributed.tensor" not in sys.modules:
        return
    from torch.distributed.fsdp import FSDPModule  # noqa: PLC0415  (see is_sharded)

    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def are_plain(tensors: list[Tensor]) -> bool:
    """Return whether all are plain tensors or parameters."""
    return {type(tensor) for tensor in tensors} <= _PLAIN


def local_parts(tensors: list[Tensor]) -> list[Tensor]:
    """Return the local part of each tensor, which shares its memory; call it without gradients."""
    if are_plain(tensors):
        return tensors
    return [tensor.to_local() if is_dtensor(tensor) else tensor for tensor in tensors]


@torch.no_grad()
def shard_like(tensor: Any, like: Any) -> Any:
    """Return a complete tensor with the sharding of another of its shape; any other value as it is.

    Every process passes the same tensor and keeps its part. Nothing is communicated.

    Example:
        >>> tensor = torch.ones(2)
        >>> shard_like(tensor, torch.zeros(2)) is tensor
        True
    """
    if not is_dtensor(like) or is_dtensor(tensor) or getattr(tensor, "shape", None) != like.shape:
        return tensor
    sharded: Any = torch.empty_like(like, dtype=tensor.dtype, requires_grad=False)
    sharded.to_local().copy_(tensor[own_region(sharded).slices])
    return sharded


def own_region(tensor: Any) -> Region:
    """Return the region that this process has of a DTensor.

    Raises:
        RuntimeError: The DTensor has partial sums instead of values, or its part is not one block of the tensor.
    """
    if all(getattr(placement, "split_factor", 1) == 1 for placement in tensor.placements):
        [chunk] = tensor.__create_chunk_list__()
        return Region(tuple(chunk.offsets), tuple(chunk.sizes))
    region = region_of(tensor.shape, tensor.device_mesh, tensor.placements)
    if region.shape != tuple(tensor.to_local().shape):
        raise _no_region(tensor.shape, tensor.device_mesh, tensor.placements)
    return region


def region_of(shape: Sequence[int], mesh: DeviceMesh, placements: Sequence[Placement]) -> Region:
    """Return the region that this process has of a tensor with some shape and placements.

    Where FSDP2 splits uneven parts of tensor parallelism (``_StridedShard``), the offset and shape that torch computes
    may not be those of the local tensor. On a mesh of 3 x 2 processes, 7 rows are first split into 4 and 3, and then
    into 2, 2, 0 and 1, 1, 1; torch computes 1 and 0 for the last of each.

    Raises:
        RuntimeError: The placements are of partial sums, or of parts that are not blocks of the tensor.
    """
    factors = [getattr(placement, "split_factor", 1) for placement in placements]
    offset, sizes, splits = [0] * len(shape), [*shape], [1] * len(shape)
    # FSDP2 splits the parts of tensor parallelism, which is a later dimension of the mesh.
    order = sorted(range(len(factors)), key=lambda place: (factors[place] > 1, -place if factors[place] > 1 else place))
    for place in order:
        dimension = getattr(placements[place], "dim", None)
        is_mixed = dimension is not None and factors[place] not in (1, splits[dimension])
        if placements[place].is_partial() or is_mixed:
            raise _no_region(shape, mesh, placements)
        if dimension is None:
            continue
        count = mesh.size(place)
        size = -(-sizes[dimension] // count)
        start = min(size * mesh.get_local_rank(place), sizes[dimension])
        offset[dimension] += start
        sizes[dimension] = min(size, sizes[dimension] - start)
        splits[dimension] *= count
    return Region(tuple(offset), tuple(sizes))


def _no_region(shape: Sequence[int], mesh: DeviceMesh, placements: Sequence[Placement]) -> RuntimeError:
    return RuntimeError(
        f"A tensor of shape {tuple(shape)} with placements {tuple(placements)} on the mesh {mesh} has parts that are "
        "not blocks of it. Redistribute it to placements of a weight, or to Replicate()."
    )


def without_repeats(tensor: Tensor) -> Tensor:
    """Return a view of an expanded tensor in which each element of its memory is once, as torch copies only into such.

    Example:
        >>> without_repeats(torch.zeros(3, 1).expand(3, 4)).shape
        torch.Size([3, 1])
    """
    if tensor.layout is not torch.strided or tensor.is_nested or is_dtensor(tensor) or 0 not in tensor.stride():
        return tensor
    sizes = [size if step else min(size, 1) for size, step in zip(tensor.shape, tensor.stride(), strict=True)]
    return tensor.as_strided(sizes, tensor.stride())
