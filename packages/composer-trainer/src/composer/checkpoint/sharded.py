"""Checkpoints of sharded models: each process writes its parts of the tensors, and a layout lists where they are."""

from __future__ import annotations

import bisect
import itertools
import json
import math
from collections import defaultdict
from typing import TYPE_CHECKING, Any, TypeAlias

import attrs
import torch
import xxhash

from composer.checkpoint.errors import CheckpointError
from composer.checkpoint.manifest import BLOCK_BYTES, LAYOUT, MODEL, read_json
from composer.checkpoint.tensor_file import DTYPES, bytes_of, is_dense, new_tensors, pack_tensors
from composer.functional.dtensors import block_of, is_dtensor, own_part

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from contextlib import AbstractContextManager

    from torch import Tensor

    from composer.checkpoint.manifest import Manifest
    from composer.checkpoint.tensor_file import CopyMemory, PackedTensors

__all__ = ["Layout", "PartFile", "TensorLayout", "like_weight", "own_parts", "pack_parts", "plan_parts", "read_parts"]

_SHARDING = "DCP_SHARDING_INFO"
"""The key of a part file's metadata from which PyTorch's ``HuggingFaceStorageReader`` takes the offsets."""
_READ_BYTES = 1 << 20
_DIRECT_BYTES = 1 << 18
"""The fewest bytes of a block that are read into the memory of a tensor, and not copied from the block."""
_DIGITS = 32

Part: TypeAlias = tuple[tuple[int, ...], tuple[int, ...]]
"""The offset and shape of a process's part of a tensor."""

Look: TypeAlias = tuple[str, tuple[int, ...], tuple[int, ...] | None, tuple[int, ...] | None]
"""The dtype, shape and strides (None if contiguous) of a tensor, and the placements of a DTensor."""

Described: TypeAlias = dict[str, dict[str, tuple[Look, Part]]]
"""For each kind of file, by name: the look and the part of each tensor that a process has."""

_Key: TypeAlias = tuple[str, str]
"""The kind of file and the name of a tensor."""

ReadInto: TypeAlias = "Callable[[int, memoryview], None]"
"""Fills memory with the bytes at a position of a file."""


@attrs.frozen
class TensorLayout:
    """Where the parts of a tensor are: the cells of a grid.

    Args:
        dtype: Its dtype, ``"float32"``.
        shape: Its complete shape.
        cuts: For each dimension, where parts begin: ``[[0, 2], [0]]`` for two parts of two rows each.
        files: For each cell in row-major order, the index of its file in :attr:`Layout.files`.
        positions: For each cell its first byte, counted from the end of the file's header.
        strides: The strides of a tensor in one part, if it is dense and not contiguous.
        is_plain: True if it was no DTensor; else, and in checkpoints of earlier releases, None.
        placements: Of a DTensor that is no weight, for each dimension of the mesh the dimension over which it was
            sharded, and -1 if it was replicated.

    Raises:
        ValueError: The values do not describe a tensor and a grid that fills it.
    """

    dtype: str
    shape: list[int]
    cuts: list[list[int]]
    files: list[int]
    positions: list[int]
    strides: list[int] | None = None
    is_plain: bool | None = None
    placements: list[int] | None = None

    def __attrs_post_init__(self) -> None:
        placements = [] if self.placements is None else self.placements
        if self.is_plain not in (None, True) or not isinstance(placements, list):
            raise ValueError("is_plain must be true, and placements a list")
        if not all(type(one) is int and -1 <= one < len(self.shape) for one in placements):
            raise ValueError(f"placements {placements} do not fit the shape {self.shape}")
        cuts = self.cuts if isinstance(self.cuts, list) else [None]
        lists = [self.shape, self.files, self.positions, [] if self.strides is None else self.strides, *cuts]
        if not all(isinstance(one, list) for one in lists) or not all(
            type(number) is int and 0 <= number < 1 << 62 for number in itertools.chain.from_iterable(lists)
        ):
            raise ValueError("it must have lists of numbers of at least 0")
        if not isinstance(self.dtype, str) or self.dtype not in DTYPES:
            raise ValueError(f"torch has no dtype {self.dtype!r:.80}")
        is_grid = len(self.cuts) == len(self.shape) and all(
            cuts[:1] == [0] and all(a < b for a, b in itertools.pairwise([*cuts, max(whole, 1)]))
            for cuts, whole in zip(self.cuts, self.shape, strict=True)
        )
        if not is_grid or not math.prod(map(len, self.cuts)) == len(self.files) == len(self.positions):
            raise ValueError(f"its parts do not fill the shape {self.shape} exactly once")
        if self.strides is not None and (len(self.files) > 1 or not is_dense(self.shape, self.strides)):
            raise ValueError(f"strides {self.strides} do not fit the shape {self.shape}")

    def cells(self, part: Part) -> Iterator[tuple[int, int, Part]]:
        """Yield file, position, and offset and shape of each cell that has elements of a part of the tensor."""
        chosen = []
        for cuts, whole, start, length in zip(self.cuts, self.shape, *part, strict=True):
            first, last = bisect.bisect_right(cuts, start) - 1, bisect.bisect_left(cuts, start + length)
            ends = [*cuts[1:], whole]
            chosen.append([(place, cuts[place], ends[place] - cuts[place]) for place in range(first, last)])
        for cell in itertools.product(*chosen):
            number = 0
            for (place, _, _), cuts in zip(cell, self.cuts, strict=True):
                number = number * len(cuts) + place
            yield (
                self.files[number],
                self.positions[number],
                (tuple(start for _, start, _ in cell), tuple(length for _, _, length in cell)),
            )


@attrs.frozen
class PartFile:
    """A file with parts.

    Args:
        begin: The length of its header in bytes.
        blocks: The XXH3 (128 bits) of each block of :data:`~composer.checkpoint.manifest.BLOCK_BYTES` bytes in
            hexadecimal digits, one after the other, so that a process checks only what it reads.

    Raises:
        ValueError: A value is of another kind.
    """

    begin: int = 0
    blocks: str = ""

    def __attrs_post_init__(self) -> None:
        if type(self.begin) is not int or not 0 <= self.begin < 1 << 62 or not isinstance(self.blocks, str):
            raise ValueError("a file of parts must have a number 'begin' and a text 'blocks'")


@attrs.frozen
class Layout:
    """The content of :data:`~composer.checkpoint.manifest.LAYOUT`.

    Args:
        files: The files with parts by name.
        tensors: For each kind of file (``"model.safetensors"``) the tensors by name.

    Raises:
        ValueError: A part is in no file.
    """

    files: dict[str, PartFile]
    tensors: dict[str, dict[str, TensorLayout]]

    def __attrs_post_init__(self) -> None:
        for of_kind in self.tensors.values():
            for name, layout in of_kind.items():
                if max(layout.files, default=0) >= len(self.files):
                    raise ValueError(f"{name[:80]!r} has a part in a file that does not exist")

    def to_bytes(self) -> bytes:
        """Return the file's content: JSON without spaces, as there may be millions of numbers."""
        tensors = {
            kind: {name: _fields(one) for name, one in of_kind.items()} for kind, of_kind in self.tensors.items()
        }
        files = {name: _fields(one) for name, one in self.files.items()}
        return json.dumps({"files": files, "tensors": tensors}, separators=(",", ":")).encode()

    @classmethod
    def from_bytes(cls, content: bytes, path: object) -> Layout:
        """Return the layout in a file's content.

        Raises:
            CheckpointError: It is not the layout of a checkpoint.
        """
        data = read_json(content, path)
        try:
            # Not by from_data, which takes ten seconds for the numbers of 10,000 tensors in 64 processes.
            data["files"] = {name: PartFile(**one) for name, one in data["files"].items()}
            data["tensors"] = {
                kind: {name: TensorLayout(**one) for name, one in of_kind.items()}
                for kind, of_kind in data["tensors"].items()
            }
            return cls(**data)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise CheckpointError(path, f"is not the layout of a checkpoint: {error}.") from None


def _fields(one: TensorLayout | PartFile) -> dict[str, Any]:
    return {name: value for name in attrs.fields_dict(type(one)) if (value := getattr(one, name)) is not None}


def own_parts(tensors: Mapping[str, Mapping[str, Tensor]], *, is_first: bool) -> Described:
    """Describe the parts that this process has of the tensors of each kind of file.

    Args:
        tensors: The tensors by kind and name: DTensors, of which each process has a part, and others, which are saved
            as the first process has them.
        is_first: Whether this is the first process.

    Raises:
        RuntimeError: A DTensor has partial sums instead of values, or parts that are not blocks of it.
    """
    parts = _Parts()
    return {
        kind: {
            name: (_look_of(tensor), own)
            for name, tensor in of_kind.items()
            if (own := parts.of(tensor, is_first=is_first)) is not None
        }
        for kind, of_kind in tensors.items()
    }


def _look_of(tensor: Tensor) -> Look:
    # Kernels round differently where strides differ: a resumed run is only bit-identical with the same ones.
    is_restrided = (
        not is_dtensor(tensor)
        and not tensor.is_contiguous()
        and tensor.numel() > 0
        and is_dense(tensor.shape, tensor.stride())
    )
    strides = tuple(tensor.stride()) if is_restrided else None
    placements: Any = getattr(tensor, "placements", ())
    return (
        str(tensor.dtype).removeprefix("torch."),
        tuple(tensor.shape),
        strides,
        tuple(getattr(one, "dim", -1) for one in placements) if is_dtensor(tensor) else None,
    )


class _Parts:
    """The parts that this process has of tensors, computed once for those of the same shape and sharding."""

    def __init__(self) -> None:
        self._known: dict[Any, Part | None] = {}

    def of(self, tensor: Any, *, is_first: bool = True) -> Part | None:
        """Return the offset and shape of this process's part of a tensor; None if it has none.

        Args:
            tensor: A DTensor; or another tensor, which is complete in each process.
            is_first: Whether this is the first process, which has the tensors that are not sharded.
        """
        if not is_dtensor(tensor):
            return ((0,) * tensor.ndim, tuple(tensor.shape)) if is_first else None
        key = (tensor.device_mesh, tensor.placements, tensor.shape)
        if key not in self._known:
            part = own_part(tensor)
            is_empty = not math.prod(part[1]) and tensor.numel()
            self._known[key] = None if is_empty else part
        return self._known[key]


def plan_parts(described: Sequence[Described]) -> tuple[Layout, list[dict[str, list[str]]]]:
    """Decide which process writes which part; every process gets the same result.

    Of the processes with equal parts, as in the replicas of a mesh, the one writes that has the fewest bytes so far.

    Args:
        described: What :func:`own_parts` returned in each process, by rank.

    Returns:
        The layout, and for each rank the names of its files by kind, with the names of the tensors to write there in
        the order of their bytes.

    Raises:
        ValueError: A tensor has another dtype or shape in another process, or its parts are not the cells of a grid.

    Example:
        >>> look = ("float32", (4, 2), None, (0,))
        >>> part = lambda start: {"model.safetensors": {"weight": (look, ((start, 0), (2, 2)))}}
        >>> layout, writes = plan_parts([part(0), part(2), part(0), part(2)])
        >>> [*layout.files]
        ['model-00001-of-00002.safetensors', 'model-00002-of-00002.safetensors']
        >>> [list(files.values()) for files in writes]
        [[['weight']], [['weight']], [], []]
    """
    looks: dict[_Key, Look] = {}
    held: dict[_Key, list[tuple[int, Part]]] = defaultdict(list)
    for rank, own in enumerate(described):
        for kind, of_kind in own.items():
            for name, (look, part) in of_kind.items():
                if looks.setdefault((kind, name), look) != look:
                    raise ValueError(
                        f"{name!r} is {look[0]}{list(look[1])} in process {rank}, and has another dtype or shape "
                        "in a process before it. Build the same model in each process."
                    )
                held[kind, name].append((rank, part))
    known: dict[Any, _Split] = {}  # most tensors are split in a few ways
    splits: dict[_Key, _Split] = {}
    for key, of_tensor in held.items():
        way = (looks[key][1], tuple(of_tensor))
        splits[key] = known[way] if way in known else known.setdefault(way, _split(key[1], *way))
    sizes = {key: DTYPES[look[0]].itemsize for key, look in looks.items()}
    writers = _writers(splits, sizes, len(described))
    files: dict[str, PartFile] = {}
    tensors: dict[str, dict[str, TensorLayout]] = {}
    writes: list[dict[str, list[str]]] = [{} for _ in described]
    for kind in dict.fromkeys(kind for own in described for kind in own):
        names = sorted(
            (name for of_kind, name in splits if of_kind == kind), key=lambda name: (-sizes[kind, name], name)
        )
        ranks = sorted({rank for name in names for rank in writers[kind, name]})
        stem, _, suffix = kind.partition(".")
        ends: dict[int, int] = {}
        number = {rank: len(files) + place for place, rank in enumerate(ranks)}
        lists = {}
        for place, rank in enumerate(ranks, start=1):
            file = f"{stem}-{place:05}-of-{len(ranks):05}.{suffix}"
            files[file], ends[rank] = PartFile(), 0
            lists[rank] = writes[rank][file] = []
        layouts = {}
        for name in names:
            positions = []
            for rank, (count, _) in zip(writers[kind, name], splits[kind, name].cells, strict=True):
                lists[rank].append(name)
                positions.append(ends[rank])
                ends[rank] += count * sizes[kind, name]
            dtype, shape, strides, placements = looks[kind, name]
            layouts[name] = TensorLayout(
                dtype,
                [*shape],
                splits[kind, name].cuts,
                [number[rank] for rank in writers[kind, name]],
                positions,
                None if strides is None else [*strides],
                True if placements is None else None,
                None if placements is None or kind == MODEL else [*placements],
            )
        tensors[kind] = dict(sorted(layouts.items()))
    return Layout(files, tensors), writes


@attrs.frozen
class _Split:
    """Where the cells of a tensor begin in each dimension; of each cell the elements, and the ranks that have it."""

    cuts: list[list[int]]
    cells: list[tuple[int, list[int]]]


def _split(name: str, shape: tuple[int, ...], held: Sequence[tuple[int, Part]]) -> _Split:
    """Return how a tensor is split whose parts the ranks have."""
    ranks: dict[Part, list[int]] = {}
    for rank, part in held:
        ranks.setdefault(part, []).append(rank)
    parts = sorted(ranks)
    cuts = [sorted({offset[dimension] for offset, _ in parts}) for dimension in range(len(shape))]
    lengths = [
        dict(zip(places, (b - a for a, b in itertools.pairwise([*places, whole])), strict=True))
        for places, whole in zip(cuts, shape, strict=True)
    ]
    is_grid = [offset for offset, _ in parts] == [*itertools.product(*cuts)] and all(
        length == expected[start] and 0 in expected
        for offset, size in parts
        for start, length, expected in zip(offset, size, lengths, strict=True)
    )
    if not is_grid:
        raise ValueError(f"the parts of {name!r} in the processes do not fill its shape {list(shape)} exactly once")
    return _Split(cuts, [(math.prod(size), ranks[offset, size]) for offset, size in parts])


def _writers(splits: Mapping[_Key, _Split], sizes: Mapping[_Key, int], count: int) -> dict[_Key, list[int]]:
    """Return which rank writes each cell of each tensor; ``sizes`` are those of the tensors' elements in bytes.

    First come the cells that only one rank has, then the largest.
    """
    load = [0] * count
    writers = {key: [ranks[0] for _, ranks in split.cells] for key, split in splits.items()}
    shared = []
    for key, split in splits.items():
        for place, (elements, ranks) in enumerate(split.cells):
            if len(ranks) > 1:
                shared.append((elements * sizes[key], key, place, ranks))
            else:
                load[ranks[0]] += elements * sizes[key]
    for size, key, place, ranks in sorted(shared, key=lambda one: -one[0]):
        writer = min(ranks, key=lambda rank: (load[rank], rank))
        load[writer] += size
        writers[key][place] = writer
    return writers


@torch.no_grad()  # a DTensor returns its local tensor much faster without a graph
def pack_parts(
    tensors: Mapping[str, Mapping[str, Any]],
    described: Described,
    writes: Mapping[str, Sequence[str]],
    *,
    copy: bool,
    memory: CopyMemory | None = None,
) -> dict[str, PackedTensors]:
    """Return the contents of the files that this process writes.

    Args:
        tensors: The tensors by kind and name.
        described: What :func:`own_parts` returned for them.
        writes: The names of the tensors in each file, as :func:`plan_parts` returns them for this rank.
        copy: Whether the tensors may change before the contents are written.
        memory: Where the copies are allocated, if not in new memory.
    """
    by_name = {name: tensor for of_kind in tensors.values() for name, tensor in of_kind.items()}
    offset_of = {name: offset for of_kind in described.values() for name, (_, (offset, _)) in of_kind.items()}
    packed = {}
    for file, names in writes.items():
        parts, offsets = {}, {}
        for name in names:
            tensor = by_name[name]
            offsets[name] = {"saved_offsets": [*offset_of[name]]}
            parts[name] = tensor.to_local() if is_dtensor(tensor) else tensor
        packed[file] = pack_tensors(parts, copy=copy, memory=memory, metadata={_SHARDING: json.dumps(offsets)})
    return packed


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
    likes, parts, of_kind = likes or {}, _Parts(), layout.tensors[kind]
    own = {name: _part_here(one, likes.get(name), parts) for name, one in of_kind.items()}
    targets = new_tensors({name: (DTYPES[one.dtype], own[name][1]) for name, one in of_kind.items()})
    ranges: dict[int, list[_Range]] = defaultdict(list)
    for name, target in targets.items():
        if target.numel():
            for file, position, cell in of_kind[name].cells(own[name]):
                ranges[file].append(_range_of(target, own[name], position, cell))
    names = [*layout.files]
    for file, of_file in ranges.items():
        name = names[file]
        if name not in manifest.files:
            raise CheckpointError(f"{path}/{name}", f"is missing, and {LAYOUT} lists it.")
        with open_file(name) as read:
            _read_blocks(read, of_file, layout.files[name], manifest.files[name].size, f"{path}/{name}")
    return {name: _placed(target, of_kind[name], likes.get(name)) for name, target in targets.items()}


def _part_here(one: TensorLayout, like: Any, parts: _Parts) -> Part:
    """Return the part of a tensor that this process has: of a DTensor its own, else all of it."""
    if like is None:
        return (0,) * len(one.shape), tuple(one.shape)
    return parts.of(like) or ((0,) * like.ndim, tuple(like.to_local().shape))


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


@attrs.frozen(eq=False)
class _Range:
    """Bytes of a file to read into memory; ``begin`` is counted from the end of the header."""

    begin: int
    memory: memoryview
    done: Callable[[], object] | None = None


def _range_of(target: Tensor, part: Part, position: int, cell: Part) -> _Range:
    """Return which bytes of a cell to read for the elements that it has of a part, which ``target`` is."""
    if part == cell:
        return _Range(position, bytes_of(target))
    (offset, shape), (cell_offset, cell_shape) = part, cell
    bounds = [
        (max(start, cell_start), min(start + length, cell_start + cell_length))
        for start, length, cell_start, cell_length in zip(offset, shape, cell_offset, cell_shape, strict=True)
    ]
    inside = tuple(slice(low - start, high - start) for (low, high), start in zip(bounds, offset, strict=True))
    # The bytes of a cell are contiguous by rows of its first dimension.
    row = math.prod(cell_shape[1:]) * target.element_size()
    begin = position + (bounds[0][0] - cell_offset[0]) * row
    if (offset[1:], shape[1:]) == (cell_offset[1:], cell_shape[1:]):
        return _Range(begin, bytes_of(target[inside[0]]))
    rows = torch.empty((bounds[0][1] - bounds[0][0], *cell_shape[1:]), dtype=target.dtype, device="cpu")
    columns = tuple(
        slice(low - start, high - start) for (low, high), start in zip(bounds[1:], cell_offset[1:], strict=True)
    )
    return _Range(begin, bytes_of(rows), lambda: target[inside].copy_(rows[(slice(None), *columns)]))


def _read_blocks(read: ReadInto, ranges: list[_Range], file: PartFile, size: int, path: str) -> None:
    """Read the blocks of a file that contain ranges, compare each with its checksum, and fill the ranges."""
    ranges.sort(key=lambda one: -one.begin)  # taken from the end, so that memory is released as it is read
    count = -(-size // BLOCK_BYTES)
    end = max(one.begin + len(one.memory) for one in ranges) + file.begin
    if len(file.blocks) != count * _DIGITS or end > size:
        raise CheckpointError(path, f"has {size} bytes, which do not fit what {LAYOUT} lists.")
    scratch = memoryview(bytearray(min(BLOCK_BYTES, size)))
    open_ranges: list[_Range] = []
    for number in range((ranges[-1].begin + file.begin) // BLOCK_BYTES, -(-end // BLOCK_BYTES)):
        start = number * BLOCK_BYTES
        stop = min(start + BLOCK_BYTES, size)
        while ranges and ranges[-1].begin + file.begin < stop:
            open_ranges.append(ranges.pop())
        if not open_ranges:
            continue
        places = [_overlap(one, file.begin, start, stop) for one in open_ranges]
        digits = file.blocks[number * _DIGITS : (number + 1) * _DIGITS]
        if _read_block(read, places, start, scratch[: stop - start]) != digits:
            raise CheckpointError(
                path, f"has been changed since it was written: the xxh3_128 of its block {number} is not {LAYOUT}'s."
            )
        for one in open_ranges:
            if one.done is not None and one.begin + file.begin + len(one.memory) <= stop:
                one.done()
        open_ranges = [one for one in open_ranges if one.begin + file.begin + len(one.memory) > stop]


def _read_block(read: ReadInto, places: list[tuple[memoryview, int]], start: int, scratch: memoryview) -> str:
    """Read a block, fill memory from places in it, and return its checksum.

    Args:
        read: Reads from the file.
        places: The memory, each with its place in the block, sorted by place. Places share bytes only if the layout is
            not one that we write; then all of the block is read into ``scratch`` first.
        start: Where the block begins in the file.
        scratch: Memory of the block's size, for bytes that nothing needs and for what is too short to be read alone.
    """
    is_apart = all(place + len(memory) <= later for (memory, place), (_, later) in itertools.pairwise(places))
    direct = [one for one in places if is_apart and len(one[0]) >= _DIRECT_BYTES]
    digest, end = xxhash.xxh3_128(), 0
    for memory, place in [*direct, (scratch[:0], len(scratch))]:
        for target, begin in ((scratch[end:place], end), (memory, place)):
            for offset in range(0, len(target), _READ_BYTES):  # small enough for the hash to find it in the cache
                piece = target[offset : offset + _READ_BYTES]
                read(start + begin + offset, piece)
                digest.update(piece)
        end = place + len(memory)
    for memory, place in places:
        if not is_apart or len(memory) < _DIRECT_BYTES:
            memory[:] = scratch[place : place + len(memory)]
    return digest.hexdigest()


def _overlap(one: _Range, header: int, start: int, stop: int) -> tuple[memoryview, int]:
    """Return the memory of a range that the block from start to stop fills, and its place in the block."""
    begin = one.begin + header
    low, high = max(begin, start), min(begin + len(one.memory), stop)
    return one.memory[low - begin : high - begin], low - start
