"""Where the tensors of a checkpoint are, and the contents of the files that a process writes of them.

A tensor has one or more parts, and each is in a file of the format of safetensors. A process writes the parts that it
has. A checkpoint of one process has one part for each tensor.
"""

from __future__ import annotations

import bisect
import itertools
import json
import math
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import attrs
import torch
from torch import Tensor

from composer.checkpoint.base import read_json
from composer.checkpoint.errors import CheckpointError
from composer.core import NotSerializableError
from composer.functional.dtensors import is_dtensor, own_part

__all__ = [
    "DTYPES",
    "KeptMemory",
    "Layout",
    "PartFile",
    "TensorLayout",
    "bytes_of",
    "describe_parts",
    "pack_parts",
    "part_here",
    "plan_parts",
]

DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in vars(torch).values()
    if isinstance(dtype, torch.dtype) and not str(dtype).startswith("torch.q")
}
"""The dtypes of tensors that are saved, by name."""
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
_SHARDING = "DCP_SHARDING_INFO"
"""The key of a file's metadata from which PyTorch's ``HuggingFaceStorageReader`` takes the offsets of parts."""

KeptMemory = dict[tuple[str, str], Tensor]
"""Copies of an earlier save by file and name, which the next save fills again: new memory takes as long as a copy."""

Part: TypeAlias = tuple[tuple[int, ...], tuple[int, ...]]
"""The offset and shape of a process's part of a tensor."""

TensorInfo: TypeAlias = tuple[str, tuple[int, ...], tuple[int, ...] | None, tuple[int, ...] | None]
"""The dtype, shape and strides (None if contiguous) of a tensor, and the placements of a DTensor."""

Described: TypeAlias = dict[str, dict[str, tuple[TensorInfo, Part]]]
"""For each kind of file, by name: each tensor of which a process has a part, and that part."""

_Key: TypeAlias = tuple[str, str]
"""The kind of file and the name of a tensor."""


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
        placements: Of a DTensor, for each dimension of the mesh the dimension over which it was sharded, and -1 if it
            was replicated.

    Raises:
        ValueError: The values do not describe a tensor and a grid that fills it.
    """

    dtype: str
    shape: list[int]
    cuts: list[list[int]]
    files: list[int]
    positions: list[int]
    strides: list[int] | None = None
    placements: list[int] | None = None

    def __attrs_post_init__(self) -> None:
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
        if DTYPES[self.dtype].itemsize * math.prod(max(length, 1) for length in self.shape) >= 1 << 62:
            raise ValueError(f"the shape {self.shape} is that of no tensor")
        placements = [] if self.placements is None else self.placements
        if not isinstance(placements, list) or not all(
            type(one) is int and -1 <= one < len(self.shape) for one in placements
        ):
            raise ValueError(f"placements {placements!r:.80} do not fit the shape {self.shape}")
        if self.strides is not None and (len(self.files) > 1 or not _is_without_gaps(self.shape, self.strides)):
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
        blocks: The XXH3 (128 bits) of each block of :data:`~composer.checkpoint.base.BLOCK_BYTES` bytes in
            hexadecimal digits, one after the other, so that a process checks only what it reads.

    Raises:
        ValueError: A value is of another kind.
    """

    begin: int = 0
    blocks: str = ""

    def __attrs_post_init__(self) -> None:
        if type(self.begin) is not int or not 0 <= self.begin < 1 << 62 or not isinstance(self.blocks, str):
            raise ValueError("a file of parts must have a number 'begin' and a string 'blocks'")


@attrs.frozen
class Layout:
    """The content of :data:`~composer.checkpoint.base.LAYOUT`.

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


def describe_parts(tensors: Mapping[str, Mapping[str, Tensor]], *, is_first: bool) -> Described:
    """Describe the parts that this process has of the tensors of each kind of file.

    Args:
        tensors: The tensors by kind and name: DTensors, of which each process has a part, and others, which are saved
            as the first process has them.
        is_first: Whether this is the first process.

    Raises:
        RuntimeError: A DTensor has partial sums instead of values, or parts that are not blocks of it.
    """
    known: KnownParts = {}
    described: Described = {kind: {} for kind in tensors}
    for kind, of_kind in tensors.items():
        for name, tensor in of_kind.items():
            part = part_here(tensor, known) if is_first or is_dtensor(tensor) else None
            if part is not None:
                described[kind][name] = (_info(tensor), part)
    return described


def _info(tensor: Tensor) -> TensorInfo:
    dtype, shape = str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape)
    if is_dtensor(tensor):
        return dtype, shape, None, tuple(getattr(one, "dim", -1) for one in tensor.placements)
    # Kernels round differently where strides differ: a resumed run is only bit-identical with the same ones.
    has_order = not tensor.is_contiguous() and tensor.numel() > 0 and _is_without_gaps(shape, tensor.stride())
    return dtype, shape, tuple(tensor.stride()) if has_order else None, None


def _is_without_gaps(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Return whether items of these strides fill their memory without gaps and overlaps."""
    expected = 1
    for stride, length in sorted(zip(strides, shape, strict=True)):
        if length > 1 and stride != expected:
            return False
        expected *= length
    return True


KnownParts: TypeAlias = "dict[object, Part | None]"


def part_here(tensor: Any, known: KnownParts) -> Part | None:
    """Return the offset and shape of this process's part of a tensor; None if it has none of a DTensor.

    Args:
        tensor: A DTensor; or another tensor, which is complete in each process.
        known: Results for DTensors, which are computed once for those of the same shape and sharding.
    """
    if not is_dtensor(tensor):
        return (0,) * tensor.ndim, tuple(tensor.shape)
    key = (tensor.device_mesh, tensor.placements, tensor.shape)
    if key not in known:
        part = own_part(tensor)
        is_empty = not math.prod(part[1]) and tensor.numel()
        known[key] = None if is_empty else part
    return known[key]


def plan_parts(described: Sequence[Described]) -> tuple[Layout, list[dict[str, list[str]]]]:
    """Decide which process writes which part; every process gets the same result.

    Of the processes with equal parts, as in the replicas of a mesh, the one writes that has the fewest bytes so far.

    Args:
        described: What :func:`describe_parts` returned in each process, by rank.

    Returns:
        The layout, and for each rank the names of its files by kind, with the names of the tensors to write there in
        the order of their bytes.

    Raises:
        ValueError: A tensor has another dtype or shape in another process, or its parts are not the cells of a grid.

    Example:
        >>> info = ("float32", (4, 2), None, (0,))
        >>> part = lambda start: {"model.safetensors": {"weight": (info, ((start, 0), (2, 2)))}}
        >>> layout, writes = plan_parts([part(0), part(2), part(0), part(2)])
        >>> [*layout.files]
        ['model-00001-of-00002.safetensors', 'model-00002-of-00002.safetensors']
        >>> [list(files.values()) for files in writes]
        [[['weight']], [['weight']], [], []]
    """
    infos: dict[_Key, TensorInfo] = {}
    held: dict[_Key, list[tuple[int, Part]]] = defaultdict(list)
    for rank, own in enumerate(described):
        for kind, of_kind in own.items():
            for name, (info, part) in of_kind.items():
                if infos.setdefault((kind, name), info) != info:
                    raise ValueError(
                        f"{name!r} is {info[0]}{list(info[1])} in process {rank}, and has another dtype or shape "
                        "in a process before it. Build the same model in each process."
                    )
                held[kind, name].append((rank, part))
    known: dict[Any, _Split] = {}  # most tensors are split in a few ways
    splits: dict[_Key, _Split] = {}
    for key, of_tensor in held.items():
        way = (infos[key][1], tuple(of_tensor))
        splits[key] = known[way] if way in known else known.setdefault(way, _split(key[1], *way))
    sizes = {key: DTYPES[info[0]].itemsize for key, info in infos.items()}
    writers = _writers(splits, sizes, len(described))
    planned: dict[str, dict[str, _Planned]] = {kind: {} for own in described for kind in own}
    for key, split in splits.items():
        planned[key[0]][key[1]] = _Planned(infos[key], split, writers[key])
    layout = Layout({}, {})
    writes: list[dict[str, list[str]]] = [{} for _ in described]
    for kind, tensors in planned.items():
        _add_kind(kind, tensors, layout, writes)
    return layout, writes


def _add_kind(
    kind: str, planned: Mapping[str, _Planned], layout: Layout, writes: Sequence[dict[str, list[str]]]
) -> None:
    """Add the files and the tensors of a kind to the layout, and to what each rank writes."""
    ranks = sorted({rank for one in planned.values() for rank in one.writers}) or [0]
    files = dict(zip(ranks, _file_names(kind, len(ranks)), strict=True))
    numbers = dict(zip(ranks, itertools.count(len(layout.files))))
    ends = dict.fromkeys(ranks, 0)
    for rank, file in files.items():
        layout.files[file], writes[rank][file] = PartFile(), []
    tensors = {}
    # The largest items first keep each tensor at a multiple of its item's size.
    for name, one in sorted(planned.items(), key=lambda item: (-item[1].item_size, item[0])):
        positions = []
        for rank, (count, _) in zip(one.writers, one.split.cells, strict=True):
            writes[rank][files[rank]].append(name)
            positions.append(ends[rank])
            ends[rank] += count * one.item_size
        dtype, shape, *orders = one.info
        tensors[name] = TensorLayout(
            dtype,
            [*shape],
            one.split.cuts,
            [numbers[rank] for rank in one.writers],
            positions,
            *(None if order is None else [*order] for order in orders),
        )
    layout.tensors[kind] = dict(sorted(tensors.items()))


def _file_names(kind: str, count: int) -> list[str]:
    """Return the names of the files of a kind that processes write; a single one has the name of the kind."""
    stem, _, suffix = kind.partition(".")
    return [kind] if count == 1 else [f"{stem}-{place:05}-of-{count:05}.{suffix}" for place in range(1, count + 1)]


@attrs.frozen
class _Split:
    """Where the cells of a tensor begin in each dimension; of each cell the elements, and the ranks that have it."""

    cuts: list[list[int]]
    cells: list[tuple[int, list[int]]]


@attrs.frozen
class _Planned:
    """A tensor, how it is split, and the rank that writes each cell."""

    info: TensorInfo
    split: _Split
    writers: list[int]

    @property
    def item_size(self) -> int:
        return DTYPES[self.info[0]].itemsize


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
        packed[file] = [memoryview(_header(parts, offsets)), *map(bytes_of, parts.values())]
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
    """Return the header of a file; not by the safetensors package, which would copy all tensors once more."""
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


def bytes_of(tensor: Tensor) -> memoryview:
    """Return the memory of a contiguous tensor on the CPU, writable."""
    array: Any = tensor.detach().view(-1).view(torch.uint8).numpy()
    return memoryview(array)
