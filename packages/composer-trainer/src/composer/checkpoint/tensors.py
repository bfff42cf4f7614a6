"""Files of tensors in the format of safetensors: what a process writes, and reads, of its parts of the tensors.

The header is written here, as the safetensors package would copy all tensors once more.
"""

from __future__ import annotations

import json
import math
import re
from collections import defaultdict
from typing import TYPE_CHECKING, Any

import torch
import xxhash
from torch import Tensor

from composer.checkpoint.base import BLOCK_BYTES, LAYOUT
from composer.checkpoint.errors import CheckpointError
from composer.checkpoint.layout import DTYPES, part_here
from composer.core import NotSerializableError
from composer.functional.dtensors import block_of, is_dtensor

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from contextlib import AbstractContextManager

    from composer.checkpoint.base import Manifest, ReadInto
    from composer.checkpoint.layout import Described, KnownParts, Layout, Part, PartFile, TensorLayout

__all__ = ["KeptMemory", "like_weight", "pack_parts", "read_parts"]

_SHARDING = "DCP_SHARDING_INFO"
"""The key of a file's metadata from which PyTorch's ``HuggingFaceStorageReader`` takes the offsets of parts."""
_DIGITS = 32
_READ_BYTES = 1 << 20
"""So many bytes are read at once that the processor's cache has them when they are hashed."""
_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
"""The dtypes that all releases of safetensors have. Others are bytes in the header, and named in the layout."""

KeptMemory = dict[tuple[str, str], Tensor]
"""Copies of an earlier save by file and name, which the next save fills again: new memory takes as long as a copy."""


@torch.no_grad()  # a DTensor returns its local tensor much faster without a graph
def pack_parts(
    tensors: Mapping[str, Mapping[str, Any]],
    described: Described,
    writes: Mapping[str, Sequence[str]],
    *,
    copy: bool,
    memory: KeptMemory | None = None,
) -> dict[str, list[memoryview]]:
    """Return the contents of the files that this process writes: the header, and the bytes of each tensor.

    Tensors may be on any device, and of any dtype and strides. Two that share memory are both written, so that a model
    finds each of its names.

    Args:
        tensors: The tensors by kind and name.
        described: What :func:`describe_parts` returned for them.
        writes: The names of the tensors in each file, as :func:`plan_parts` returns them for this rank.
        copy: Whether the tensors may change before the contents are written.
        memory: The copies of an earlier save that has been written, to be used again; those of this one replace them.

    Raises:
        NotSerializableError: A name or a tensor cannot be written.
    """
    kept: KeptMemory = {}
    packed, devices = {}, set()
    for file, names in writes.items():
        # model-00001-of-00002.safetensors has tensors of the kind model.safetensors.
        kind = re.sub(r"-.*", ".safetensors", file)
        offsets = {}
        for name in names:
            tensor = tensors[kind][name]
            local = tensor.to_local() if is_dtensor(tensor) else tensor
            kept[file, name] = _on_cpu(name, local, None if memory is None else memory.get((file, name)), copy=copy)
            devices.add(local.device)
            offsets[name] = {"saved_offsets": [*described[kind][name][1][0]]}
        parts = {name: kept[file, name] for name in names}
        packed[file] = [memoryview(_header(parts, offsets)), *map(_bytes_of, parts.values())]
    for device in devices:
        if device.type == "cuda":  # copies to pinned memory are not waited for one by one
            torch.cuda.current_stream(device).synchronize()
    if memory is not None:
        memory.clear()
        memory.update(kept)
    return packed


def _on_cpu(name: str, tensor: Tensor, target: Tensor | None, *, copy: bool) -> Tensor:
    """Return a contiguous tensor on the CPU: the tensor itself if it needs no copy, else a copy in ``target``."""
    if (
        not copy
        and tensor.device.type == "cpu"
        and tensor.is_contiguous()
        and not (tensor.is_conj() or tensor.is_neg())
    ):
        return tensor
    if target is None or (target.shape, target.dtype, target.is_pinned()) != (
        tensor.shape,
        tensor.dtype,
        tensor.is_cuda,
    ):
        target = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=tensor.is_cuda)
    try:
        # A copy that is not waited for would conjugate or negate the values before it has them.
        return target.copy_(tensor.resolve_conj().resolve_neg(), non_blocking=tensor.is_cuda)
    except RuntimeError as error:
        if "not implemented" not in str(error):
            raise
        raise NotSerializableError(
            name, f"a tensor of {tensor.dtype} cannot be saved, as torch cannot copy it."
        ) from None


def _header(tensors: Mapping[str, Tensor], offsets: Mapping[str, Any]) -> bytes:
    if "__metadata__" in tensors:
        raise NotSerializableError("__metadata__", "a tensor cannot be saved by this name, as safetensors uses it.")
    entries: dict[str, Any] = {"__metadata__": {"format": "pt", _SHARDING: json.dumps(offsets)}}
    end = 0
    for name, tensor in tensors.items():
        begin, end = end, end + tensor.nbytes
        shape = [*tensor.shape] if tensor.dtype in _NAMES else [tensor.nbytes]
        entries[name] = {"dtype": _NAMES.get(tensor.dtype, "U8"), "shape": shape, "data_offsets": [begin, end]}
    try:
        content = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise NotSerializableError("", "a tensor has a name that is no valid string (UTF-8).") from None
    # The format pads its header with spaces, so that the tensors are at multiples of 8 bytes.
    content += b" " * (-len(content) % 8)
    return len(content).to_bytes(8, "little") + content


def _bytes_of(tensor: Tensor) -> memoryview:
    """Return the memory of a contiguous tensor on the CPU, writable."""
    array: Any = tensor.detach().view(-1).view(torch.uint8).numpy()
    return memoryview(array)


@torch.no_grad()
def read_parts(
    layout: Layout,
    kind: str,
    manifest: Manifest,
    open_file: Callable[[str], AbstractContextManager[ReadInto]],
    path: str,
    likes: Mapping[str, Tensor] | None = None,
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

    Raises:
        CheckpointError: A file is missing, or a block is not the one that was written.
    """
    known: KnownParts = {}
    likes, of_kind = likes or {}, layout.tensors[kind]
    # Before memory is allocated, which a damaged layout could request without limit.
    if sum(DTYPES[one.dtype].itemsize * math.prod(one.shape) for one in of_kind.values()) > manifest.size:
        raise CheckpointError(f"{path}/{LAYOUT}", "lists tensors that are larger than the files.")
    parts = {name: _part_of(one, likes.get(name), known) for name, one in of_kind.items()}
    targets = {
        name: torch.empty(parts[name][1], dtype=DTYPES[one.dtype], device="cpu") for name, one in of_kind.items()
    }
    cells: dict[int, list[tuple[int, str, Part]]] = defaultdict(list)
    for name, target in targets.items():
        for file, position, cell in of_kind[name].cells(parts[name]) if target.numel() else ():
            cells[file].append((position, name, cell))
    names = [*layout.files]
    for file, of_file in cells.items():
        name, place = names[file], f"{path}/{names[file]}"
        if name not in manifest.files:
            raise CheckpointError(place, f"is missing, and {LAYOUT} lists it.")
        with open_file(name) as read:
            blocks = _Blocks(read, layout.files[name], manifest.files[name].size, place)
            for position, tensor, cell in sorted(of_file):
                _read_cell(blocks, targets[tensor], parts[tensor], position, cell)
            blocks.finish()
    return {name: _placed(target, of_kind[name], likes.get(name)) for name, target in targets.items()}


def _part_of(one: TensorLayout, like: Any, known: KnownParts) -> Part:
    """Return the part of a tensor that this process has: of a DTensor its own, else all of it."""
    if like is None:
        return (0,) * len(one.shape), tuple(one.shape)
    return part_here(like, known) or ((0,) * like.ndim, tuple(like.to_local().shape))


class _Blocks:
    """The bytes of a file, read in blocks, each of which is compared with its checksum when the next one begins.

    Bytes are read to where they belong, and hashed there. Those of a block that nothing needs are read for its checksum
    only. If ranges are read in order, each block is read once.
    """

    def __init__(self, read: ReadInto, file: PartFile, size: int, path: str) -> None:
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


def _read_cell(blocks: _Blocks, target: Tensor, part: Part, position: int, cell: Part) -> None:
    """Read the elements of a cell that are in a part, which ``target`` is; ``position`` is the cell's first byte."""
    if part == cell:
        blocks.fill(_bytes_of(target), position)
        return
    (offset, shape), (cell_offset, cell_shape) = part, cell
    bounds = [
        (max(start, cell_start), min(start + length, cell_start + cell_length))
        for start, length, cell_start, cell_length in zip(offset, shape, cell_offset, cell_shape, strict=True)
    ]
    inside = tuple(slice(low - start, high - start) for (low, high), start in zip(bounds, offset, strict=True))
    # The bytes of a cell are contiguous by rows of its first dimension.
    position += (bounds[0][0] - cell_offset[0]) * math.prod(cell_shape[1:]) * target.element_size()
    if (offset[1:], shape[1:]) == (cell_offset[1:], cell_shape[1:]):
        blocks.fill(_bytes_of(target[inside[0]]), position)
        return
    rows = torch.empty((bounds[0][1] - bounds[0][0], *cell_shape[1:]), dtype=target.dtype, device="cpu")
    blocks.fill(_bytes_of(rows), position)
    columns = [slice(low - start, high - start) for (low, high), start in zip(bounds[1:], cell_offset[1:], strict=True)]
    target[inside].copy_(rows[(slice(None), *columns)])


def like_weight(weight: Any, shape: Sequence[int], placements: Sequence[int]) -> Tensor:
    """Return a DTensor of zeros on the mesh of a weight, with the placements of :attr:`TensorLayout.placements`."""
    from torch.distributed.tensor import DTensor, Replicate, Shard  # noqa: PLC0415

    if [getattr(one, "dim", -1) for one in weight.placements] == [*placements]:
        placed = weight.placements  # they may be _StridedShard, and not Shard
    else:
        placed = [Replicate() if dimension < 0 else Shard(dimension) for dimension in placements]
    # Not torch's zeros(): where _StridedShard splits unevenly, its local tensor has another shape than FSDP2's.
    mesh, complete = weight.device_mesh, torch.empty(tuple(shape), device="meta")
    _, own_shape = block_of(complete.shape, mesh, placed)
    local = torch.zeros(own_shape, dtype=weight.dtype, device=weight.to_local().device)
    return DTensor.from_local(local, mesh, placed, run_check=False, shape=complete.shape, stride=complete.stride())


def _placed(target: Tensor, one: TensorLayout, like: Any) -> Tensor:
    """Return a tensor of which ``target`` has this process's part, with the strides, device and placements it needs."""
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
