"""Tensors in the files of a checkpoint: where they are, which process writes which part of them, and their bytes.

The regions that processes have of a tensor are the cells of a grid that fills it, and each cell is in one file, of the
format of safetensors. A tensor that is not sharded has one cell. When a checkpoint is saved, :func:`describe_tensors`
states what a process has, :func:`plan_files` decides from what all have described who writes which cell, and
:func:`pack_files` copies those of this process to the CPU, behind the header of a file. When one is loaded, nothing in
the :class:`Layout` is trusted, and :meth:`TensorLayout.cells` names those that a process needs.
"""

from __future__ import annotations

import bisect
import itertools
import json
import math
import operator
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any, NamedTuple, TypeAlias

import attrs
import safetensors.torch
import torch
from torch import Tensor

from composer.checkpoint.errors import CheckpointError
from composer.checkpoint.manifest import read_json
from composer.core import NotSerializableError, join_tensors, split_tensors
from composer.core.saving.codec import Record
from composer.functional.dtensors import Region, is_dtensor, own_region

DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in vars(torch).values()
    if isinstance(dtype, torch.dtype) and not str(dtype).startswith("torch.q")
}
_NAMES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8",
    torch.uint64: "U64", torch.uint32: "U32", torch.uint16: "U16", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip
"""The dtypes that all releases of safetensors have. Others are bytes in the header, and named in the layout."""


@attrs.frozen(slots=False)  # for cached_property
class Layout:
    """The content of :data:`~composer.checkpoint.manifest.LAYOUT`.

    Args:
        files: The files by name.
        tensors: For each kind of file (``"model.safetensors"``) the tensors by name.

    Raises:
        ValueError: A cell is in no file.
    """

    files: dict[str, TensorFile]
    tensors: dict[str, dict[str, TensorLayout]]

    def __attrs_post_init__(self) -> None:
        for of_kind in self.tensors.values():
            for name, layout in of_kind.items():
                if max(layout.files, default=0) >= len(self.files):
                    raise ValueError(f"{name[:80]!r} is in a file that does not exist")

    @cached_property
    def _tensors_json(self) -> str:
        """The tensors as JSON without spaces, as there may be millions of numbers; the same in each save of a plan."""
        return json.dumps(self.tensors, separators=(",", ":"), default=_fields)

    def to_bytes(self, files: Mapping[str, TensorFile]) -> bytes:
        """Return the file's content, with what the written files have."""
        written = {name: files[name] for name in self.files}
        return f'{{"files":{json.dumps(written, default=_fields)},"tensors":{self._tensors_json}}}'.encode()

    @classmethod
    def from_bytes(cls, content: bytes, path: object) -> Layout:
        """Return the layout in a file's content.

        Raises:
            CheckpointError: It is not the layout of a checkpoint.
        """
        data = read_json(content, path)
        try:
            # Not by read(), which takes ten seconds for the numbers of 10,000 tensors in 64 processes.
            data["files"] = {name: TensorFile(**one) for name, one in data["files"].items()}
            data["tensors"] = {
                kind: {name: TensorLayout(**one) for name, one in of_kind.items()}
                for kind, of_kind in data["tensors"].items()
            }
            return cls(**data)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise CheckpointError(path, f"is not the layout of a checkpoint: {error}.") from None


@attrs.frozen
class TensorFile(Record):
    """A file with cells of tensors.

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
            raise ValueError("a file of tensors must have a number 'begin' and a string 'blocks'")


@attrs.frozen
class TensorLayout:
    """Where the cells of a tensor are.

    Args:
        dtype: Its dtype, ``"float32"``.
        shape: Its complete shape.
        cuts: For each dimension, where cells begin: ``[[0, 2], [0]]`` for two cells of two rows each.
        files: For each cell in row-major order, the index of its file in :attr:`Layout.files`.
        positions: For each cell its first byte, counted from the end of the file's header.
        strides: The strides of a tensor in one cell, if it is dense and not contiguous.
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
        numbers = [*itertools.chain.from_iterable(lists)] if all(isinstance(one, list) for one in lists) else [-1]
        if {*map(type, numbers)} - {int} or not 0 <= min(numbers, default=0) <= max(numbers, default=0) < 1 << 62:
            raise ValueError("it must have lists of numbers of at least 0")
        if not isinstance(self.dtype, str) or self.dtype not in DTYPES:
            raise ValueError(f"torch has no dtype {self.dtype!r:.80}")
        is_grid = len(self.cuts) == len(self.shape) and all(
            cuts[:1] == [0] and all(map(operator.lt, cuts, [*cuts[1:], max(whole, 1)]))
            for cuts, whole in zip(self.cuts, self.shape, strict=True)
        )
        if not is_grid or not math.prod(map(len, self.cuts)) == len(self.files) == len(self.positions):
            raise ValueError(f"its cells do not fill the shape {self.shape} exactly once")
        if DTYPES[self.dtype].itemsize * math.prod(max(length, 1) for length in self.shape) >= 1 << 62:
            raise ValueError(f"the shape {self.shape} is that of no tensor")
        placements = [] if self.placements is None else self.placements
        if not isinstance(placements, list) or not all(
            type(one) is int and -1 <= one < len(self.shape) for one in placements
        ):
            raise ValueError(f"placements {placements!r:.80} do not fit the shape {self.shape}")
        if self.strides is not None and (len(self.files) > 1 or not is_without_gaps(self.shape, self.strides)):
            raise ValueError(f"strides {self.strides} do not fit the shape {self.shape}")

    def cells(self, region: Region) -> Iterator[Cell]:
        """Yield each cell that has elements of a region of the tensor."""
        chosen = []
        for cuts, whole, start, length in zip(self.cuts, self.shape, *region, strict=True):
            first, last = bisect.bisect_right(cuts, start) - 1, bisect.bisect_left(cuts, start + length)
            ends = [*cuts[1:], whole]
            chosen.append([(index, cuts[index], ends[index] - cuts[index]) for index in range(first, last)])
        for cell in itertools.product(*chosen):
            number = 0
            for (index, _, _), cuts in zip(cell, self.cuts, strict=True):
                number = number * len(cuts) + index
            cell_region = Region(tuple(start for _, start, _ in cell), tuple(length for _, _, length in cell))
            yield Cell(self.files[number], self.positions[number], cell_region)


class Cell(NamedTuple):
    """A cell of a tensor: the index of its file, its first byte after the header of that file, and its region."""

    file: int
    position: int
    region: Region


def is_without_gaps(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Return whether items of these strides fill their memory without gaps and overlaps."""
    expected = 1
    for stride, length in sorted(zip(strides, shape, strict=True)):
        if length > 1 and stride != expected:
            return False
        expected *= length
    return True


def _fields(one: TensorLayout | TensorFile) -> dict[str, Any]:
    return {name: value for name in attrs.fields_dict(type(one)) if (value := getattr(one, name)) is not None}


class TensorInfo(NamedTuple):
    """What all processes have to agree on for a tensor; see :class:`TensorLayout`."""

    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...] | None = None
    placements: tuple[int, ...] | None = None


Described: TypeAlias = dict[str, dict[str, tuple[TensorInfo, Region]]]
"""For each kind of file, by name: each tensor of which a process has a region, and that region."""

FilesOfProcess: TypeAlias = dict[str, list[str]]
"""The files that a process writes, each with the names of its tensors in the order of their bytes."""

KeptMemory: TypeAlias = dict[tuple[str, str], Tensor]
"""Copies of an earlier save by file and name, which the next save fills again: new memory takes as long as a copy."""

KnownRegions: TypeAlias = "dict[object, Region | None]"
"""Regions by mesh, placements and shape; None for an empty one."""


def describe_tensors(tensors: Mapping[str, Mapping[str, Tensor]], *, is_first: bool) -> Described:
    """Describe the regions that this process has of the tensors of each kind of file.

    Args:
        tensors: The tensors by kind and name: DTensors, of which each process has a region, and others, which are saved
            as the first process has them.
        is_first: Whether this is the first process.

    Raises:
        RuntimeError: A DTensor has partial sums instead of values, or parts that are not blocks of it.
    """
    known: KnownRegions = {}
    described: Described = {kind: {} for kind in tensors}
    entries: dict[tuple[TensorInfo, Region], tuple[TensorInfo, Region]] = {}  # also one object when they are unpickled
    for kind, of_kind in tensors.items():
        for name, tensor in of_kind.items():
            region = region_here(tensor, known) if is_first or is_dtensor(tensor) else None
            if region is not None:
                entry = _info(tensor), region
                described[kind][name] = entries.setdefault(entry, entry)
    return described


def plan_files(described: Sequence[Described]) -> tuple[Layout, list[FilesOfProcess]]:
    """Decide which process writes which cell; every process gets the same result.

    The regions of a tensor are the cells of a grid, and each kind of file is divided among the processes that write
    cells of it. Of the processes with equal regions, as in the replicas of a mesh, the first one writes.

    Args:
        described: What :func:`describe_tensors` returned in each process, by rank.

    Returns:
        The layout, without the checksums of the files, and for each rank what it writes.

    Raises:
        ValueError: A tensor has another dtype or shape in another process, or its regions are not the cells of a grid.

    Example:
        >>> info = TensorInfo("float32", (4, 2), placements=(0,))
        >>> half = lambda start: {"model.safetensors": {"weight": (info, Region((start, 0), (2, 2)))}}
        >>> layout, writes = plan_files([half(0), half(2), half(0), half(2)])
        >>> [*layout.files]
        ['model-00001-of-00002.safetensors', 'model-00002-of-00002.safetensors']
        >>> [list(files.values()) for files in writes]
        [[['weight']], [['weight']], [], []]
    """
    # Most tensors are split in a few ways, and what all processes have of a tensor is compared by the ids of the
    # entries: describe_tensors() makes one object of equal ones, also after pickling. Unequal ids only cost time.
    known: dict[tuple[int, ...], _Split] = {}
    planned: dict[str, dict[str, _Split]] = {}
    for kind in dict.fromkeys(kind for own in described for kind in own):
        of_kind, planned[kind] = [own.get(kind, {}) for own in described], {}
        for name in dict.fromkeys(itertools.chain.from_iterable(of_kind)):
            column = [own.get(name) for own in of_kind]
            way = tuple(map(id, column))  # equal entries of a process are one object
            if way not in known:
                known[way] = _split(name, column)
            planned[kind][name] = known[way]
    layout = Layout({}, {})
    files_of: list[FilesOfProcess] = [{} for _ in described]
    for kind, tensors in planned.items():
        _add_kind(kind, tensors, layout, files_of)
    return layout, files_of


def _add_kind(kind: str, planned: Mapping[str, _Split], layout: Layout, files_of: Sequence[FilesOfProcess]) -> None:
    """Add the files and the tensors of a kind to the layout, and to what each rank writes."""
    ranks = sorted(set().union(*(split.writers for split in planned.values()))) or [0]
    files = dict(zip(ranks, _file_names(kind, len(ranks)), strict=True))
    numbers = dict(zip(ranks, itertools.count(len(layout.files))))
    ends, written = dict.fromkeys(ranks, 0), {rank: files_of[rank].setdefault(file, []) for rank, file in files.items()}
    layout.files.update({file: TensorFile() for file in files.values()})
    tensors = {}
    # The largest items first keep each tensor at a multiple of its item's size.
    for name, split in sorted(planned.items(), key=lambda item: (-DTYPES[item[1].info.dtype].itemsize, item[0])):
        positions = []
        for rank, size in zip(split.writers, split.sizes, strict=True):
            written[rank].append(name)
            positions.append(ends[rank])
            ends[rank] += size
        dtype, shape, *orders = split.info
        tensors[name] = TensorLayout(
            dtype,
            [*shape],
            split.cuts,
            [numbers[rank] for rank in split.writers],
            positions,
            *(None if order is None else [*order] for order in orders),
        )
    layout.tensors[kind] = dict(sorted(tensors.items()))


def kind_of(file: str) -> str:
    """Return the kind of a file that :func:`_file_names` or :func:`process_file` has named."""
    return re.sub(r"-.*", ".safetensors", file)


def _file_names(kind: str, count: int) -> list[str]:
    """Return the names of the files of a kind that processes write; a single one has the name of the kind."""
    stem, _, suffix = kind.partition(".")
    return [kind] if count == 1 else [f"{stem}-{number:05}-of-{count:05}.{suffix}" for number in range(1, count + 1)]


class _Split(NamedTuple):
    """A tensor, where its cells begin in each dimension, and in row-major order each cell's bytes and writer's rank."""

    info: TensorInfo
    cuts: list[list[int]]
    sizes: list[int]
    writers: list[int]


def _split(name: str, column: Sequence[tuple[TensorInfo, Region] | None]) -> _Split:
    """Return how a tensor is split of which each rank has a region, or none."""
    held = [(rank, *entry) for rank, entry in enumerate(column) if entry is not None]
    info, writers = held[0][1], dict[Region, int]()
    for rank, other, region in held:
        if other != info:
            raise ValueError(
                f"{name!r} is {other.dtype}{list(other.shape)} in process {rank}, and has another dtype or shape "
                "in a process before it. Build the same model in each process."
            )
        writers.setdefault(region, rank)
    regions = sorted(writers)
    cuts = [sorted({offset[dimension] for offset, _ in regions}) for dimension in range(len(info.shape))]
    lengths = [
        [end - begin for begin, end in itertools.pairwise([*begins, whole])]
        for begins, whole in zip(cuts, info.shape, strict=True)
    ]
    grid = [*zip(itertools.product(*cuts), itertools.product(*lengths), strict=True)]
    if regions != grid or any(begins[0] > 0 for begins in cuts):
        raise ValueError(
            f"the parts of {name!r} in the processes do not fill its shape {list(info.shape)} exactly once"
        )
    item_size = DTYPES[info.dtype].itemsize
    sizes = [item_size * math.prod(region.shape) for region in regions]
    return _Split(info, cuts, sizes, [writers[region] for region in regions])


def _info(tensor: Tensor) -> TensorInfo:
    dtype, shape = str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape)
    if is_dtensor(tensor):
        return TensorInfo(dtype, shape, placements=tuple(getattr(one, "dim", -1) for one in tensor.placements))
    # Kernels round differently where strides differ: a resumed run is only bit-identical with the same ones.
    has_order = not tensor.is_contiguous() and tensor.numel() > 0 and is_without_gaps(shape, tensor.stride())
    return TensorInfo(dtype, shape, tuple(tensor.stride()) if has_order else None)


def region_here(tensor: Any, known: KnownRegions) -> Region | None:
    """Return the region that this process has of a tensor; None if it has no element of a DTensor.

    Args:
        tensor: A DTensor; or another tensor, which is complete in each process.
        known: Results for DTensors, which are computed once for those of the same shape and sharding.
    """
    if not is_dtensor(tensor):
        return Region.of(tensor.shape)
    key = (tensor.device_mesh, tensor.placements, tensor.shape)
    if key not in known:
        region = own_region(tensor)
        is_empty = not math.prod(region.shape) and tensor.numel()
        known[key] = None if is_empty else region
    return known[key]


@torch.no_grad()  # a DTensor returns its local tensor much faster without a graph
def pack_files(
    tensors: Mapping[str, Mapping[str, Any]],
    files: FilesOfProcess,
    *,
    copy: bool,
    memory: KeptMemory | None = None,
    metadata: Mapping[str, Mapping[str, str]] | None = None,
    headers: dict[str, bytes] | None = None,
) -> dict[str, list[memoryview]]:
    """Return the contents of the files that this process writes: the header, and the bytes of each tensor.

    Tensors may be on any device, and of any dtype and strides. Two that share memory are both written, so that a model
    finds each of its names.

    Args:
        tensors: The tensors by kind and name.
        files: The names of the tensors in each file, as :func:`plan_files` returns them for this rank.
        copy: Whether the tensors may change before the contents are written.
        memory: The copies of an earlier save that has been written, to be used again; those of this one replace them.
        metadata: The metadata of files that are in no layout, by name.
        headers: The headers of the files of the plan, which are added by the first save with it.

    Raises:
        NotSerializableError: A name or a tensor cannot be written.
    """
    memory, headers = {} if memory is None else memory, {} if headers is None else headers
    kept: KeptMemory = {}
    packed, devices = {}, set()
    for file, names in files.items():
        kind = kind_of(file)
        for name in names:
            tensor = tensors[kind][name]
            local = tensor.to_local() if is_dtensor(tensor) else tensor
            kept[file, name] = _on_cpu(name, local, memory.get((file, name)), copy=copy)
            devices.add(local.device)
        copies = {name: kept[file, name] for name in names}
        if metadata and file in metadata:
            header = _header(copies, metadata[file])
        elif not (header := headers.get(file, b"")):
            header = headers[file] = _header(copies)
        packed[file] = [memoryview(header), *map(bytes_of, copies.values())]
    for device in devices:
        if device.type == "cuda":
            # With CUDA, a copy to pinned memory may be incomplete when it returns: the host may read it only when the
            # stream that copies has finished. One wait is enough for all copies, because a stream works in order; and
            # what the next step requests of the same stream comes after them.
            torch.cuda.current_stream(device).synchronize()
    memory.clear()
    memory.update(kept)
    return packed


def _on_cpu(name: str, tensor: Tensor, target: Tensor | None, *, copy: bool) -> Tensor:
    """Return a contiguous tensor on the CPU: the tensor itself if it needs no copy, else a copy in ``target``."""
    is_plain = tensor.device.type == "cpu" and tensor.is_contiguous() and not (tensor.is_conj() or tensor.is_neg())
    if is_plain and not copy:
        return tensor
    wanted = (tensor.shape, tensor.dtype, tensor.is_cuda)
    if target is None or (target.shape, target.dtype, target.is_pinned()) != wanted:
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


def _header(tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None) -> bytes:
    """Return the header of a file; not by the safetensors package, which would copy all tensors once more."""
    if "__metadata__" in tensors:
        raise NotSerializableError("__metadata__", "a tensor cannot be saved by this name, as safetensors uses it.")
    entries: dict[str, Any] = {"__metadata__": {"format": "pt", **(metadata or {})}}
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


def split_process(process: Any) -> tuple[dict[str, str], dict[str, Tensor]]:
    """Return what belongs to a process as the metadata and the tensors of a file.

    Example:
        >>> metadata, tensors = split_process({"place": 3, "generator": torch.ones(2, dtype=torch.uint8)})
        >>> metadata["data"]
        '{"place": 3, "generator": {"$tensor": "generator"}}'
    """
    data, tensors = split_tensors(process)
    kinds = {name: [_info(one).dtype, [*one.shape]] for name, one in tensors.items() if one.dtype not in _NAMES}
    return {"data": json.dumps(data), "kinds": json.dumps(kinds)}, tensors


def join_process(content: bytes, path: object) -> Any:
    """Return what :func:`split_process` split, from the content of the file.

    Raises:
        CheckpointError: It is not such a file.
    """
    try:
        metadata = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])["__metadata__"]
        tensors = safetensors.torch.load(content)
        for name, (dtype, shape) in json.loads(metadata["kinds"]).items():
            tensors[name] = tensors[name].view(DTYPES[dtype]).view(shape)
        return join_tensors(json.loads(metadata["data"]), tensors)
    except Exception as error:  # noqa: BLE001  (what is wrong in a file shows in any error)
        raise CheckpointError(path, f"is not the data of a process: {error}.") from None


def bytes_of(tensor: Tensor) -> memoryview:
    """Return the memory of a contiguous tensor on the CPU, writable."""
    array: Any = tensor.detach().view(-1).view(torch.uint8).numpy()
    return memoryview(array)
