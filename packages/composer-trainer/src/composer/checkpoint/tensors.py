"""Reading tensors from the files of a checkpoint: the regions that a process needs of them.

For a load, :func:`sharded_likes` decides of which tensors a process needs only its own region, and :func:`read_tensors`
reads them: of each file the cells of :class:`~composer.checkpoint.layout.TensorLayout` with elements of these regions,
in the order of their bytes. Nothing is returned that was not compared with its checksum, and a damaged layout requests
no more memory than the files have.
"""

from __future__ import annotations

import math
from collections import defaultdict
from typing import TYPE_CHECKING, Any

import torch
import xxhash

from composer.checkpoint.base import BLOCK_BYTES, EXTRA, LAYOUT
from composer.checkpoint.errors import CheckpointError
from composer.checkpoint.layout import DTYPES, bytes_of, region_here
from composer.core.serialization import MAX_DEPTH
from composer.functional.dtensors import Region, is_dtensor, region_of

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping
    from contextlib import AbstractContextManager

    from torch import Tensor

    from composer.checkpoint.base import Manifest, ReadInto
    from composer.checkpoint.layout import KnownRegions, Layout, TensorFile, TensorLayout

__all__ = ["is_reference", "read_tensors", "sharded_likes"]

_DIGITS = 32
_READ_BYTES = 1 << 20
"""So many bytes are read at once that the processor's cache has them when they are hashed."""


@torch.no_grad()
def read_tensors(
    layout: Layout,
    kind: str,
    manifest: Manifest,
    open_file: Callable[[str], AbstractContextManager[ReadInto]],
    path: str,
    likes: Mapping[str, Tensor] | None = None,
    names: Collection[str] | None = None,
) -> dict[str, Tensor]:
    """Return the tensors of a kind, each complete or, where a DTensor is given, as a DTensor of its placements.

    Only the blocks of bytes with elements of this process are read, and each is compared with its checksum.

    Args:
        layout: The layout.
        kind: The kind of file, ``"model.safetensors"``.
        manifest: The manifest with the sizes of the files.
        open_file: Opens a file of the checkpoint, and yields what reads from it.
        path: The checkpoint, for errors.
        likes: DTensors by the names of tensors.
        names: The tensors to read; all if None.

    Raises:
        CheckpointError: A file is missing, or a block is not the one that was written; or there is too little memory.
    """
    known: KnownRegions = {}
    likes, of_kind = likes or {}, layout.tensors[kind]
    of_kind = {name: one for name, one in of_kind.items() if names is None or name in names}
    # Before memory is allocated, which a damaged layout could request without limit.
    if sum(DTYPES[one.dtype].itemsize * math.prod(one.shape) for one in of_kind.values()) > manifest.size:
        raise CheckpointError(f"{path}/{LAYOUT}", "lists tensors that are larger than the files.")
    regions = {name: _region_of(one, likes.get(name), known) for name, one in of_kind.items()}
    try:
        targets = {
            name: torch.empty(regions[name].shape, dtype=DTYPES[one.dtype], device="cpu")
            for name, one in of_kind.items()
        }
    except (RuntimeError, MemoryError) as error:  # RuntimeError as torch raises it
        raise CheckpointError(path, f"needs more memory than there is: {error}") from None
    cells: dict[int, list[tuple[int, str, Region]]] = defaultdict(list)
    for name, target in targets.items():
        for file, position, cell in of_kind[name].cells(regions[name]) if target.numel() else ():
            cells[file].append((position, name, cell))
    names = [*layout.files]
    for file, of_file in cells.items():
        name, file_path = names[file], f"{path}/{names[file]}"
        if name not in manifest.files:
            raise CheckpointError(file_path, f"is missing, and {LAYOUT} lists it.")
        with open_file(name) as read:
            blocks = _Blocks(read, layout.files[name], manifest.files[name].size, file_path)
            for position, tensor, cell in sorted(of_file):
                _read_cell(blocks, targets[tensor], regions[tensor], position, cell)
            blocks.finish()
    return {name: _placed(target, of_kind[name], likes.get(name)) for name, target in targets.items()}


def _region_of(one: TensorLayout, like: Any, known: KnownRegions) -> Region:
    """Return the region of a tensor that this process needs: of a DTensor its own, else all of it."""
    if like is None:
        return Region.of(one.shape)
    return region_here(like, known) or Region.of(like.to_local().shape)


class _Blocks:
    """The bytes of a file, read in blocks, each of which is compared with its checksum when the next one begins.

    Bytes are read to where they belong, and hashed there. Those of a block that nothing needs are read for its checksum
    only. If ranges are read in order, each block is read once.
    """

    def __init__(self, read: ReadInto, file: TensorFile, size: int, path: str) -> None:
        if len(file.blocks) != -(-size // BLOCK_BYTES) * _DIGITS:
            raise CheckpointError(path, f"has {size} bytes, which do not fit what {LAYOUT} lists.")
        self._read, self._file, self._size, self._path = read, file, size, path
        self._unneeded = memoryview(bytearray(min(_READ_BYTES, size)))
        self._number, self._position, self._digest = -1, 0, xxhash.xxh3_128()

    def fill(self, memory: memoryview, position: int) -> None:
        """Fill memory with the bytes at a position after the header."""
        begin = position + self._file.begin
        if begin + len(memory) > self._size:
            raise CheckpointError(self._path, f"has {self._size} bytes, which do not fit what {LAYOUT} lists.")
        while memory:
            number = begin // BLOCK_BYTES
            if number != self._number or begin < self._position:
                self.finish()
                self._number, self._position = number, number * BLOCK_BYTES
                self._digest.reset()
            self._skip(begin)
            count = min(len(memory), (number + 1) * BLOCK_BYTES - begin, _READ_BYTES)
            self._take(memory[:count])
            memory, begin = memory[count:], begin + count

    def finish(self) -> None:
        """Read what is left of the current block, and compare its checksum."""
        if self._number >= 0:
            self._skip(min((self._number + 1) * BLOCK_BYTES, self._size))
            if self._digest.hexdigest() != self._file.blocks[self._number * _DIGITS : (self._number + 1) * _DIGITS]:
                raise CheckpointError(
                    self._path,
                    f"has been changed since it was written: the xxh3_128 of its block {self._number} is not "
                    f"{LAYOUT}'s.",
                )

    def _skip(self, end: int) -> None:
        while self._position < end:
            self._take(self._unneeded[: end - self._position])

    def _take(self, memory: memoryview) -> None:
        self._read(self._position, memory)
        self._digest.update(memory)
        self._position += len(memory)


def _read_cell(blocks: _Blocks, target: Tensor, region: Region, position: int, cell: Region) -> None:
    """Read the elements of a cell that are in a region, that of ``target``; ``position`` is the cell's first byte."""
    if region == cell:
        blocks.fill(bytes_of(target), position)
        return
    (offset, shape), (cell_offset, cell_shape) = region, cell
    bounds = [
        (max(start, cell_start), min(start + length, cell_start + cell_length))
        for start, length, cell_start, cell_length in zip(offset, shape, cell_offset, cell_shape, strict=True)
    ]
    inside = tuple(slice(low - start, high - start) for (low, high), start in zip(bounds, offset, strict=True))
    # The bytes of a cell are contiguous by rows of its first dimension.
    position += (bounds[0][0] - cell_offset[0]) * math.prod(cell_shape[1:]) * target.element_size()
    if (offset[1:], shape[1:]) == (cell_offset[1:], cell_shape[1:]):
        blocks.fill(bytes_of(target[inside[0]]), position)
        return
    rows = torch.empty((bounds[0][1] - bounds[0][0], *cell_shape[1:]), dtype=target.dtype, device="cpu")
    blocks.fill(bytes_of(rows), position)
    columns = [slice(low - start, high - start) for (low, high), start in zip(bounds[1:], cell_offset[1:], strict=True)]
    target[inside].copy_(rows[(slice(None), *columns)])


def sharded_likes(
    layout: Layout, weights: Mapping[str, Any], data: Mapping[str, Any], path: str
) -> dict[str, dict[str, Tensor]]:
    """Return, for each kind of file and by the names of its tensors, the DTensors like which they are read.

    A tensor belongs to a weight if it has its name, or is anywhere under its name in the saved data (as the state of an
    optimizer, and averages), and was sharded. It is sharded like the weight if it has its shape, and else as it was.
    In a checkpoint of a model that was not sharded, weights and the state of optimizers are taken for sharded if they
    have the weight's shape.

    Args:
        layout: The layout.
        weights: The weights of the run by name.
        data: The data of :data:`~composer.checkpoint.base.STATE`.
        path: The checkpoint, for errors.

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
    kinds = layout.tensors
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
                likes[kind][name] = _placed_like(weight, name, one, path)
    return likes


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


def is_reference(value: Any) -> bool:
    """Return whether saved data is the name of a tensor, as :func:`composer.core.split_tensors` writes it."""
    return isinstance(value, dict) and isinstance(value.get("$tensor"), str)


def _placed(target: Tensor, one: TensorLayout, like: Any) -> Tensor:
    """Return a tensor of which this process has read ``target``, with the strides, device and placements it needs."""
    if like is None:
        if one.strides is None:
            return target
        return torch.empty_strided(one.shape, one.strides, dtype=target.dtype, device="cpu").copy_(target)
    from torch.distributed.tensor import DTensor  # noqa: PLC0415

    local = like.to_local()
    if local.device.type != "cpu" or not local.is_contiguous():
        target = torch.empty_like(local, dtype=target.dtype).copy_(target)
    return DTensor.from_local(
        target, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )
