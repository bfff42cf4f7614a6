"""A load into a sharded model: of which tensors a process needs only its own region."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from composer.checkpoint.errors import CheckpointError
from composer.checkpoint.layout import TensorLayout
from composer.checkpoint.manifest import EXTRA
from composer.checkpoint.reading import OpenCheckpoint
from composer.core.serialization import MAX_DEPTH
from composer.functional.dtensors import is_dtensor, region_of

__all__ = ["is_reference", "sharded_likes"]


def sharded_likes(
    opened: OpenCheckpoint, weights: Mapping[str, Any], data: Mapping[str, Any]
) -> dict[str, dict[str, Tensor]]:
    """Return, for each kind of file and by the names of its tensors, the DTensors like which they are read.

    A tensor belongs to a weight if it has its name, or is anywhere under its name in the saved data (as the state of an
    optimizer, and averages), and was sharded. It is sharded like the weight if it has its shape, and else as it was.
    In a checkpoint of a model that was not sharded, weights and the state of optimizers are taken for sharded if they
    have the weight's shape.

    Args:
        opened: The checkpoint.
        weights: The weights of the run by name.
        data: The data of the checkpoint, of :data:`~composer.checkpoint.manifest.STATE`.

    Raises:
        CheckpointError: A tensor of another shape was sharded over a mesh of other dimensions.
    """
    own = {name: weight for name, weight in weights.items() if is_dtensor(weight)}
    weight_of = {name: name for name in own}

    def find(value: Any, weight: str | None, depth: int) -> None:
        if is_reference(value):
            if weight is not None:
                weight_of.setdefault(value["$tensor"], weight)
        elif isinstance(value, (dict, list)) and depth < 2 * MAX_DEPTH:
            items = value.items() if isinstance(value, dict) else enumerate(value)
            for key, item in items:
                find(item, key if key in own else weight, depth + 1)

    find({name: value for name, value in data.items() if name != "model"}, None, 0)
    kinds = opened.layout.tensors
    was_sharded = any(one.placements is not None for of_kind in kinds.values() for one in of_kind.values())
    likes: dict[str, dict[str, Tensor]] = {kind: {} for kind in kinds}
    for kind, tensors in kinds.items():
        for name, one in tensors.items():
            weight: Any = own.get(weight_of.get(name, ""))
            may_be_sharded = one.placements is not None if was_sharded else kind != EXTRA
            if weight is None or not may_be_sharded:
                continue
            if one.shape == [*weight.shape]:
                likes[kind][name] = weight
            elif one.placements is not None:
                likes[kind][name] = _placed_like(weight, name, one, opened.path)
    return likes


def is_reference(value: Any) -> bool:
    """Return whether saved data is the name of a tensor, as :func:`composer.core.split_tensors` writes it."""
    return isinstance(value, dict) and isinstance(value.get("$tensor"), str)


def _placed_like(weight: Any, name: str, one: TensorLayout, path: str) -> Tensor:
    """Return a DTensor on the mesh of a weight, sharded as a tensor of another shape was."""
    dimensions, placements = weight.device_mesh.ndim, one.placements or []
    if {*placements} == {-1}:
        placements = [-1] * dimensions
    if len(placements) != dimensions:
        raise CheckpointError(
            path,
            f"cannot be loaded with this mesh: {name!r} has another shape than its weight, and was sharded over a mesh "
            f"of {len(placements)} dimensions instead of {dimensions}.",
        )
    from torch.distributed.tensor import DTensor, Replicate, Shard  # noqa: PLC0415

    if [getattr(one, "dim", -1) for one in weight.placements] == [*placements]:
        placed = weight.placements  # they may be _StridedShard, and not Shard
    else:
        placed = [Replicate() if dimension < 0 else Shard(dimension) for dimension in placements]
    # Not torch's zeros(): where _StridedShard splits unevenly, its local tensor has another shape than FSDP2's.
    mesh, complete = weight.device_mesh, torch.empty(tuple(one.shape), device="meta")
    own_shape = region_of(complete.shape, mesh, placed).shape
    # Without memory, which a damaged layout could request without limit.
    local = torch.empty((), dtype=weight.dtype, device=weight.to_local().device).expand(own_shape)
    return DTensor.from_local(local, mesh, placed, run_check=False, shape=complete.shape, stride=complete.stride())
