"""Reading one checkpoint: its manifest and JSON, and of its tensors the regions that a process needs.

Only the blocks of bytes with elements of these regions are read, in the order of the file, and nothing is returned that
was not compared with its checksum. A damaged layout requests no more memory than the files have. If the model is
sharded, :func:`sharded_like` states of which tensors a process needs only its own region.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from functools import cached_property
from io import RawIOBase
from typing import Any, Self

import attrs
import torch
import xxhash
from torch import Tensor

from composer.checkpoint.errors import CheckpointError, MissingCheckpointError
from composer.checkpoint.folders import Folder
from composer.checkpoint.layout import (
    DTYPES,
    Cell,
    KnownRegions,
    Layout,
    TensorFile,
    TensorLayout,
    bytes_of,
    join_process,
    region_here,
)
from composer.checkpoint.manifest import (
    BLOCK_BYTES,
    EXTRA,
    LAYOUT,
    MANIFEST,
    MAX_MANIFEST_BYTES,
    STATE,
    Manifest,
    process_file,
    read_into,
    read_json,
)
from composer.distributed import get_global_rank, get_world_size
from composer.functional.dtensors import Region, is_dtensor, region_of

_DIGITS = 32
_READ_BYTES = 1 << 20
"""So many bytes are read at once that the processor's cache has them when they are hashed."""


@attrs.frozen(slots=False)  # for cached_property
class OpenCheckpoint:
    """A checkpoint whose files are read where they are, each in full or in part, when they are needed.

    Args:
        folder: The folder that it is in.
        name: Its name there.
        manifest: Its manifest; sizes have been compared with it, contents have not.
    """

    folder: Folder
    name: str
    manifest: Manifest

    @classmethod
    def of(cls, folder: Folder, name: str) -> Self:
        """Return the checkpoint of a name in a folder, after comparing the names and sizes of its files.

        Files that the manifest does not list are ignored.

        Raises:
            CheckpointError: It is incomplete, or its manifest is damaged.
        """
        sizes, path = folder.sizes(name), folder.at(name)
        manifest = read_manifest(folder, name, sizes)
        for file, record in manifest.files.items():
            if file not in sizes:
                raise CheckpointError(f"{path}/{file}", "is missing, and the manifest lists it.")
            if (size := sizes[file]) is None:
                raise CheckpointError(f"{path}/{file}", "must be a file, and is a link or a folder.")
            if size != record.size:
                reason = f"has {size} bytes, and the manifest lists {record.size}: it was cut off or replaced."
                raise CheckpointError(f"{path}/{file}", reason)
        return cls(folder, name, manifest)

    @property
    def path(self) -> str:
        """The path or URL that it comes from."""
        return self.folder.at(self.name)

    def data(self) -> dict[str, Any]:
        """Return the data of :data:`~composer.checkpoint.manifest.STATE`, after comparing the file with its checksum.

        Raises:
            CheckpointError: The file is missing, or its content is not the one that was written.
        """
        return read_json(self.content(STATE), f"{self.path}/{STATE}")

    def content(self, file: str) -> bytes:
        """Return the content of a small file, after comparing it with its checksum.

        Raises:
            CheckpointError: The file is missing, or its content is not the one that was written.
        """
        if file not in self.manifest.files:
            raise CheckpointError(f"{self.path}/{file}", "is missing.")
        content = _read_file(self.folder, self.name, file, self.manifest.files[file].size)
        self._compare(file, xxhash.xxh3_128_hexdigest(content))
        return content

    def check(self, files: Iterable[str] | None = None) -> None:
        """Compare the contents of the files, or of some of them, with their checksums.

        Raises:
            CheckpointError: The content of one is not the one that was written.
        """
        for file in self.manifest.files if files is None else files:
            digest = xxhash.xxh3_128()
            for chunk in self.chunks(file):
                digest.update(chunk)
            self._compare(file, digest.hexdigest())

    def chunks(self, file: str) -> Iterator[memoryview]:
        """Yield the content of a file in parts, each of which is valid until the next."""
        size = self.manifest.files[file].size
        memory = memoryview(bytearray(min(_READ_BYTES, size)))
        with self.folder.reader(self.name, file) as source:
            for begin in range(0, size, _READ_BYTES):
                chunk = memory[: size - begin]
                read_into(source, f"{self.path}/{file}", begin, chunk)
                yield chunk

    def _compare(self, file: str, digest: str) -> None:
        if digest != self.manifest.files[file].xxh3_128:
            reason = "has been changed since it was written: its xxh3_128 is not the manifest's."
            raise CheckpointError(f"{self.path}/{file}", reason)

    def own_process(self) -> Any:
        """Return what belongs to this process, not the first; None if another number of processes saved it.

        Raises:
            CheckpointError: Its file is missing, or its content is not the one that was written.
        """
        rank, world_size = get_global_rank(), get_world_size()
        if process_file(world_size - 1, world_size) not in self.manifest.files:
            return None
        file = process_file(rank, world_size)
        return join_process(self.content(file), f"{self.path}/{file}")

    @cached_property
    def layout(self) -> Layout:
        """Where the tensors are."""
        return Layout.from_bytes(self.content(LAYOUT), f"{self.path}/{LAYOUT}")

    def shapes(self, kind: str) -> dict[str, Tensor]:
        """Return tensors without data in place of those of a kind of file, ``"model.safetensors"``."""
        of_kind = self.layout.tensors.get(kind, {})
        return {name: torch.empty(one.shape, dtype=DTYPES[one.dtype], device="meta") for name, one in of_kind.items()}

    @torch.no_grad()
    def tensors(
        self, kind: str, dtensors: Mapping[str, Tensor] | None = None, names: Collection[str] | None = None
    ) -> dict[str, Tensor]:
        """Return the tensors of a kind, each complete or, where a DTensor is given, as a DTensor of its placements.

        Args:
            kind: The kind of file, ``"model.safetensors"``.
            dtensors: DTensors by the names of tensors, of which only the own region is read; see :func:`sharded_like`.
            names: The tensors to read; all if None.

        Raises:
            CheckpointError: A file is missing, or its content is not the one that was written; or there is too little
                memory.
        """
        known: KnownRegions = {}
        dtensors, of_kind = dtensors or {}, self.layout.tensors.get(kind, {})
        of_kind = {name: one for name, one in of_kind.items() if names is None or name in names}
        regions = {name: _region_needed(one, dtensors.get(name), known) for name, one in of_kind.items()}
        targets = self._allocate(of_kind, regions)
        needed: dict[int, list[tuple[Cell, str]]] = defaultdict(list)
        for name, target in targets.items():
            for cell in of_kind[name].cells(regions[name]) if target.numel() else ():
                needed[cell.file].append((cell, name))
        files = [*self.layout.files.items()]
        for number, of_file in needed.items():
            name, file = files[number]
            path = f"{self.path}/{name}"
            if name not in self.manifest.files:
                raise CheckpointError(path, f"is missing, and {LAYOUT} lists it.")
            with self.folder.reader(self.name, name) as source:
                blocks = _Blocks(source, file, self.manifest.files[name].size, path)
                for cell, tensor in sorted(of_file):  # by position
                    _read_cell(blocks, targets[tensor], regions[tensor], cell)
                blocks.finish()
        return {name: _placed(target, of_kind[name], dtensors.get(name)) for name, target in targets.items()}

    def _allocate(self, layouts: Mapping[str, TensorLayout], regions: Mapping[str, Region]) -> dict[str, Tensor]:
        """Return memory for regions of tensors, which a damaged layout could otherwise request without limit."""
        if sum(DTYPES[one.dtype].itemsize * math.prod(one.shape) for one in layouts.values()) > self.manifest.size:
            raise CheckpointError(f"{self.path}/{LAYOUT}", "lists tensors that are larger than the files.")
        try:
            return {
                name: torch.empty(regions[name].shape, dtype=DTYPES[one.dtype], device="cpu")
                for name, one in layouts.items()
            }
        except (RuntimeError, MemoryError) as error:  # RuntimeError as torch raises it
            raise CheckpointError(self.path, f"needs more memory than there is: {error}") from None


def read_manifest(folder: Folder, name: str, sizes: Mapping[str, int | None]) -> Manifest:
    """Return a checkpoint's manifest without comparing the other files with it.

    Raises:
        CheckpointError: There is none, or it is damaged or of another format.
    """
    size, path = sizes.get(MANIFEST), f"{folder.at(name)}/{MANIFEST}"
    if size is None:
        raise MissingCheckpointError(path, "is missing, so this is no checkpoint, or one that was not finished.")
    if size > MAX_MANIFEST_BYTES:
        raise CheckpointError(path, f"is larger than any manifest ({MAX_MANIFEST_BYTES} bytes).")
    return Manifest.from_bytes(_read_file(folder, name, MANIFEST, size), path)


def _read_file(folder: Folder, name: str, file: str, size: int) -> bytes:
    path = f"{folder.at(name)}/{file}"
    try:
        content = bytearray(size)
    except MemoryError:
        raise CheckpointError(path, f"has {size} bytes, which memory cannot hold.") from None
    with folder.reader(name, file) as source:
        read_into(source, path, 0, memoryview(content))
    return bytes(content)


def _region_needed(one: TensorLayout, dtensor: Any, known: KnownRegions) -> Region:
    """Return the region of a tensor that this process needs: of a DTensor its own, else all of it."""
    if dtensor is None:
        return Region.of(one.shape)
    return region_here(dtensor, known) or Region.of(dtensor.to_local().shape)


class _Blocks:
    """The bytes of a file, read in blocks, each of which is compared with its checksum when the next one begins.

    Bytes are read to where they belong, and hashed there. Those of a block that nothing needs are read for its checksum
    only. If ranges are read in order, each block is read once.
    """

    def __init__(self, source: RawIOBase, file: TensorFile, size: int, path: str) -> None:
        if len(file.blocks) != -(-size // BLOCK_BYTES) * _DIGITS:
            raise CheckpointError(path, f"has {size} bytes, which do not fit what {LAYOUT} lists.")
        self._source, self._file, self._size, self._path = source, file, size, path
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
        read_into(self._source, self._path, self._position, memory)
        self._digest.update(memory)
        self._position += len(memory)


def _read_cell(blocks: _Blocks, target: Tensor, region: Region, cell: Cell) -> None:
    """Read the elements of a cell that are in a region, that of ``target``."""
    position = cell.position
    if region == cell.region:
        blocks.fill(bytes_of(target), position)
        return
    (offset, shape), (cell_offset, cell_shape) = region, cell.region
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


def _placed(target: Tensor, one: TensorLayout, dtensor: Any) -> Tensor:
    """Return a tensor of which this process has read ``target``, with the strides, device and placements it needs."""
    if dtensor is None:
        if one.strides is None:
            return target
        return torch.empty_strided(one.shape, one.strides, dtype=target.dtype, device="cpu").copy_(target)
    from torch.distributed.tensor import DTensor  # noqa: PLC0415

    local = dtensor.to_local()
    if local.device.type != "cpu" or not local.is_contiguous():
        target = torch.empty_like(local, dtype=target.dtype).copy_(target)
    return DTensor.from_local(
        target, dtensor.device_mesh, dtensor.placements, run_check=False, shape=dtensor.shape, stride=dtensor.stride()
    )


def references(data: Any) -> dict[str, list[str]]:
    """Return the names of the tensors that saved data refers to, each with the keys of dictionaries that lead to it.

    Example:
        >>> references({"state": {"body.weight": [{"$tensor": "optimizers.0"}]}})
        {'optimizers.0': ['state', 'body.weight']}
    """
    found: dict[str, list[str]] = {}
    waiting: list[tuple[Any, tuple[str, ...]]] = [(data, ())]
    while waiting:
        value, keys = waiting.pop()
        if isinstance(value, dict) and isinstance(value.get("$tensor"), str):
            found.setdefault(value["$tensor"], []).extend(keys)
        elif isinstance(value, dict):
            waiting += [(item, (*keys, key)) for key, item in value.items()]
        elif isinstance(value, list):
            waiting += [(item, keys) for item in value]
    return found


def sharded_like(
    opened: OpenCheckpoint, weights: Mapping[str, Any], data: Mapping[str, Any]
) -> dict[str, dict[str, Tensor]]:
    """Return DTensors with the shape, mesh and placements that tensors of a checkpoint get, by kind of file and name.

    Only tensors that belong to a sharded weight of the run are among them: the weight itself, and tensors anywhere
    below its name in the saved data, such as its averages and the state of its optimizer. All others are read
    completely in each process.

    - A tensor with the shape of its weight is sharded like it. If the model was saved sharded, this needs to have been
      sharded, too; if it was not, what is neither a weight nor of an optimizer is read completely.
    - A tensor of another shape, such as a factor of a second moment, is sharded as it was saved, on the run's mesh.

    Args:
        opened: The checkpoint.
        weights: The weights of the run by name.
        data: The data of the checkpoint, of :data:`~composer.checkpoint.manifest.STATE`.

    Raises:
        CheckpointError: A tensor of another shape was sharded over a mesh of other dimensions.
    """
    sharded = {name: weight for name, weight in weights.items() if is_dtensor(weight)}
    # Of several weights' names that lead to a tensor, the innermost one is that of its weight.
    weight_of = {tensor: key for tensor, keys in references(data).items() for key in keys if key in sharded}
    weight_of |= {name: name for name in sharded}
    kinds = opened.layout.tensors
    was_sharded = any(one.placements is not None for of_kind in kinds.values() for one in of_kind.values())
    dtensors: dict[str, dict[str, Tensor]] = {kind: {} for kind in kinds}
    for kind, of_kind in kinds.items():
        for name, one in of_kind.items():
            weight: Any = sharded.get(weight_of.get(name, ""))
            has_shards = one.placements is not None if was_sharded else kind != EXTRA
            if weight is None or not has_shards:
                continue
            if one.shape == [*weight.shape]:
                dtensors[kind][name] = weight
            elif one.placements is not None:
                dtensors[kind][name] = _of_other_shape(name, one, weight, opened.path)
    return dtensors


def _of_other_shape(name: str, one: TensorLayout, weight: Any, path: str) -> Tensor:
    """Return a DTensor of the shape of a saved tensor, with its placements, on the mesh of the weight it belongs to."""
    from torch.distributed.tensor import DTensor, Replicate, Shard  # noqa: PLC0415

    mesh, dimensions = weight.device_mesh, one.placements or []
    if {*dimensions} == {-1}:  # replicated, on a mesh of any number of dimensions
        dimensions = [-1] * mesh.ndim
    if len(dimensions) != mesh.ndim:
        raise CheckpointError(
            path,
            f"cannot be loaded with this mesh: {name!r} has another shape than its weight, and was sharded over a mesh "
            f"of {len(dimensions)} dimensions instead of {mesh.ndim}.",
        )
    placements = [Replicate() if dimension < 0 else Shard(dimension) for dimension in dimensions]
    if [getattr(placement, "dim", -1) for placement in weight.placements] == dimensions:
        placements = weight.placements  # they may be _StridedShard, and not Shard
    # Not torch's zeros(): where _StridedShard splits unevenly, its local tensor has another shape than FSDP2's.
    complete = torch.empty(tuple(one.shape), device="meta")
    own_shape = region_of(complete.shape, mesh, placements).shape
    # Without memory, which a damaged layout could request without limit.
    local = torch.empty((), dtype=weight.dtype, device=weight.to_local().device).expand(own_shape)
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=complete.shape, stride=complete.stride())
