"""Safetensors files: written from tensors, and read into tensors.

They are written and read here rather than by the safetensors package, so that their bytes are copied and hashed in one
pass. Dtypes and strides that the format cannot express are stored in the header's metadata.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import mmap
import os
import sys
from typing import TYPE_CHECKING, Any, BinaryIO

import attrs
import torch
from torch import Tensor
from torch._utils import _unflatten_dense_tensors

from composer.checkpoint.errors import CheckpointError
from composer.core import NotSerializableError
from composer.core.serialization import from_data
from composer.functional.dtensors import shard_like

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from pathlib import Path

__all__ = [
    "DTYPES",
    "CopyMemory",
    "PackedTensors",
    "allocate",
    "bytes_of",
    "is_dense",
    "new_tensors",
    "pack_tensors",
    "read_shapes",
    "read_tensors",
]

_WRITTEN_NAMES = {
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
# Only recent releases of safetensors have the last four names; tensors of these dtypes are written as bytes.
_DTYPES = {name: dtype for dtype, name in _WRITTEN_NAMES.items()} | {
    "C64": torch.complex64,
    "F8_E8M0": torch.float8_e8m0fnu,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
}
_DTYPES_AS_BYTES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in vars(torch).values()
    if isinstance(dtype, torch.dtype) and dtype not in _WRITTEN_NAMES and not str(dtype).startswith("torch.q")
}

DTYPES = _DTYPES_AS_BYTES | {str(dtype).removeprefix("torch."): dtype for dtype in _WRITTEN_NAMES}
"""The dtypes of tensors that are saved, by name."""

_SETTINGS = "composer"
_CHUNK = 1 << 20
_HUGE = 4 << 20
_WIPE_ON_FORK = 18  # MADV_WIPEONFORK of Linux, which mmap does not have
_ALIGNMENT = 64
"""That of the memory which torch allocates."""
_MAX_HEADER_BYTES = 100_000_000

_Entry = tuple[str, list[int], int]  # dtype, shape, bytes


@attrs.frozen
class _Settings:
    """What the format cannot express: dtype and shape of tensors stored as bytes, and strides."""

    dtypes: dict[str, tuple[str, list[int]]] = attrs.field(factory=dict)
    strides: dict[str, list[int]] = attrs.field(factory=dict)


@attrs.frozen
class _Header:
    """The beginning of a safetensors file; ``entries`` are dtype, shape and bytes by name, in the order of the file."""

    content: bytes
    entries: dict[str, _Entry]
    settings: _Settings


def read_shapes(path: Path) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Return dtype and shape of each tensor in a safetensors file, without reading the tensors.

    Raises:
        CheckpointError: It is not a complete safetensors file.
    """
    try:
        with path.open("rb", buffering=0) as file:
            header = _read_header(file, path)
    except OSError as error:
        raise CheckpointError(path, f"cannot be read: {error.strerror}.") from None
    shapes = {name: (dtype, tuple(shape)) for name, (dtype, shape, _) in header.entries.items()}
    return shapes | {name: (dtype, tuple(shape)) for name, (dtype, shape) in header.settings.dtypes.items()}


def read_tensors(path: Path, digest: Any = None, likes: Mapping[str, Tensor] | None = None) -> dict[str, Tensor]:
    """Return the tensors of a safetensors file, on the CPU.

    The file is read once, from its beginning to its end.

    Args:
        path: The file.
        digest: An object like those of :mod:`hashlib`, which is updated with the bytes of the file.
        likes: By the names of tensors, DTensors of their shapes. Of these only the part that this process has of the
            DTensor is kept, as a DTensor of its placements and device; one such tensor at a time is complete.

    Raises:
        CheckpointError: It is not a complete safetensors file, or was changed while it was read.
    """
    likes = likes or {}
    try:
        with path.open("rb", buffering=0) as file:
            header = _read_header(file, path)
            shapes = {name: (_DTYPES[dtype], shape) for name, (dtype, shape, _) in header.entries.items()}
            kept = new_tensors({name: one for name, one in shapes.items() if name not in likes})
            size = max((size for name, (_, _, size) in header.entries.items() if name in likes), default=0)
            scratch = torch.empty(size, dtype=torch.uint8, device="cpu")
            if digest is not None:
                digest.update(header.content)
            tensors = {}
            for name, (dtype, shape) in shapes.items():
                tensor = scratch[: header.entries[name][2]].view(dtype).view(shape) if name in likes else kept[name]
                _read_into(bytes_of(tensor), file, digest, path)
                tensor = _restored(tensor, name, header.settings, path)
                tensors[name] = shard_like(tensor, likes[name]) if name in likes else tensor
            if file.read(1):
                raise CheckpointError(path, "has been changed while it was read.")
    except OSError as error:
        raise CheckpointError(path, f"cannot be read: {error.strerror}.") from None
    return tensors


def _restored(tensor: Tensor, name: str, settings: _Settings, path: Path) -> Tensor:
    """Return a tensor with the dtype and the strides that the format cannot express."""
    try:
        if name in settings.dtypes:
            dtype, shape = settings.dtypes[name]
            tensor = tensor.view(_DTYPES_AS_BYTES[dtype]).reshape(shape)
        if name in settings.strides:
            strides = settings.strides[name]
            if not is_dense(tensor.shape, strides):
                raise ValueError(f"strides {strides} do not fit the shape {list(tensor.shape)}")  # noqa: TRY301
            tensor = torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype, device="cpu").copy_(tensor)
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        raise CheckpointError(path, f"has metadata that does not fit its tensors: {name!r:.80}: {error}.") from None
    return tensor


def _read_header(file: BinaryIO, path: Path) -> _Header:
    size = os.fstat(file.fileno()).st_size
    prefix = file.read(8)
    length = int.from_bytes(prefix, "little")
    if len(prefix) < 8 or length > min(size - 8, _MAX_HEADER_BYTES):
        raise CheckpointError(path, "is not a complete safetensors file: its header is longer than the file.")
    text = file.read(length)
    try:
        content = json.loads(text)
        metadata = content.pop("__metadata__", None) or {}
        entries = _checked_entries(content, size - 8 - length)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(path, f"is not a complete safetensors file: {type(error).__name__}: {error}.") from None
    try:
        settings = from_data({"dtypes": {}, "strides": {}} | json.loads(metadata.get(_SETTINGS, "{}")), _Settings)
        shapes_and_strides = [*settings.strides.values(), *(shape for _, shape in settings.dtypes.values())]
    except (AttributeError, TypeError, ValueError, RecursionError):
        shapes_and_strides = [[-1]]
    if not all(map(_are_sizes, shapes_and_strides)):
        raise CheckpointError(path, "has a header whose metadata is not as composer writes it.")
    if unknown := {*settings.dtypes, *settings.strides} - entries.keys():
        raise CheckpointError(path, f"has metadata that does not fit its tensors: {min(unknown)!r:.80} is not there.")
    return _Header(prefix + text, entries, settings)


def _checked_entries(content: dict[str, Any], size: int) -> dict[str, _Entry]:
    """Return the entries of a header, after checking that the tensors fill the file with neither gaps nor overlaps."""
    entries, position = {}, 0
    for name, entry in sorted(content.items(), key=lambda item: item[1]["data_offsets"]):
        dtype, shape, (begin, end) = entry["dtype"], entry["shape"], entry["data_offsets"]
        if dtype not in _DTYPES:
            raise ValueError(f"{name[:80]!r} has the dtype {dtype!r:.80}, which torch does not have")
        if type(shape) is not list or not _are_sizes([*shape, begin, end]) or max(shape, default=0) >= 2**63:
            raise ValueError(f"{name[:80]!r} has a shape or an offset that is not made of sizes")
        if begin != position:
            raise ValueError(f"{name[:80]!r} does not begin where the tensor before it ends")
        if math.prod(shape) * _DTYPES[dtype].itemsize != end - begin:
            raise ValueError(f"{name[:80]!r} has {end - begin} bytes, which do not fit its shape and dtype")
        entries[name], position = (dtype, shape, end - begin), end
    if position != size:
        raise ValueError(f"the tensors have {position} bytes, and the file has {size} for them")
    return entries


def _are_sizes(values: Iterable[Any]) -> bool:
    return all(type(value) is int and value >= 0 for value in values)


def _read_into(memory: memoryview, file: Any, digest: Any, path: Path) -> None:
    """Fill memory with the next bytes of a file; hash each part while it is in the cache."""
    while memory:
        count = file.readinto(memory[:_CHUNK])
        if not count:
            raise CheckpointError(path, "has been changed while it was read: it ends within a tensor.")
        if digest is not None:
            digest.update(memory[:count])
        memory = memory[count:]


def new_tensors(shapes: Mapping[str, tuple[torch.dtype, Sequence[int]]]) -> dict[str, Tensor]:
    """Return contiguous tensors on the CPU with unspecified values, in one memory that is released with the last.

    Each has a storage of its own, so that a copy or a file of one of them does not include the others.

    Args:
        shapes: Dtype and shape of each tensor by name.

    Example:
        >>> tensors = new_tensors({"weight": (torch.float32, (3, 2)), "steps": (torch.int64, ())})
        >>> tensors["weight"].shape, tensors["steps"].untyped_storage().nbytes()
        (torch.Size([3, 2]), 8)
    """
    sizes = {name: math.prod(shape) * dtype.itemsize for name, (dtype, shape) in shapes.items()}
    *places, size = itertools.accumulate((-(-size // _ALIGNMENT) * _ALIGNMENT for size in sizes.values()), initial=0)
    memory = allocate(size) if size >= _HUGE else None
    tensors = {}
    for (name, (dtype, shape)), place in zip(shapes.items(), places, strict=True):
        if memory is None or not sizes[name]:
            tensors[name] = torch.empty(shape, dtype=dtype, device="cpu")
        else:
            content = torch.frombuffer(memory, dtype=torch.uint8, count=sizes[name], offset=place)
            tensors[name] = content.view(dtype).view(shape)
    return tensors


def bytes_of(tensor: Tensor) -> memoryview:
    """Return the memory of a contiguous tensor on the CPU, writable."""
    array: Any = tensor.view(-1).view(torch.uint8).numpy()
    return memoryview(array)


def allocate(size: int, kind: type[mmap.mmap] = mmap.mmap) -> mmap.mmap | bytearray:
    """Return new memory; in huge pages if possible, as touching memory page by page takes longer than copying to it."""
    if size < _HUGE or not hasattr(mmap, "MADV_HUGEPAGE"):
        return bytearray(size)
    memory = kind(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # the kernel has no huge pages
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


@attrs.frozen(eq=False)
class PackedTensors:
    """The contents of a safetensors file in memory, as :func:`pack_tensors` returns them.

    Args:
        pieces: The contents, one after the other: first the header, then the tensors' bytes.
        owners: The tensors whose memory the pieces are, if they are no copy.
    """

    pieces: tuple[memoryview, ...]
    owners: tuple[Tensor, ...] = ()

    @property
    def size(self) -> int:
        """The file's size in bytes."""
        return sum(len(piece) for piece in self.pieces)


class _PinnedMemory(mmap.mmap):
    """Memory that CUDA has registered, so that its devices copy to it directly, without waiting for each tensor."""

    registered: tuple[int, int, torch.device] | None = None
    """The process, the address and the device."""

    def register(self, device: torch.device) -> None:
        """Register the memory. It is used without that if the system refuses, for example because of a limit.

        Args:
            device: A device that copies to the memory.
        """
        # Forked processes, such as workers of a DataLoader, get other pages: with copies of these, the device and this
        # process could use different ones.
        with contextlib.suppress(OSError):  # the kernel is older than Linux 4.14
            self.madvise(_WIPE_ON_FORK)
        address = torch.frombuffer(self, dtype=torch.uint8).data_ptr()
        with torch.cuda.device(device):
            runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
            if int(runtime.cudaHostRegister(address, len(self), 0)) == 0:
                self.registered = os.getpid(), address, device
            else:
                with contextlib.suppress(RuntimeError):  # the next kernel raises the error that CUDA keeps
                    torch.zeros(1, device=device)

    def __del__(self) -> None:
        if self.registered is None or self.registered[0] != os.getpid() or sys.is_finalizing():
            return
        _, address, device = self.registered
        with torch.cuda.device(device):  # this may be another thread
            torch.cuda.cudart().cudaHostUnregister(address)  # type: ignore[no-untyped-call]


class CopyMemory:
    """Memory of earlier copies, reused for the next ones: touching new memory takes about as long as copying into it.

    For tensors on CUDA devices it is pinned.

    Example:
        >>> memory = CopyMemory()
        >>> first = pack_tensors({"weight": torch.ones(1 << 20)}, memory=memory)
        >>> memory.give([first])
        >>> pack_tensors({"weight": torch.zeros(1 << 20)}, memory=memory).pieces[1].obj is first.pieces[1].obj
        True
    """

    def __init__(self) -> None:
        self._free: list[mmap.mmap] = []

    def take(self, size: int, device: torch.device | None = None) -> mmap.mmap | bytearray:
        """Return memory of a size, new if none is free, and pinned if a CUDA device is given, which copies to it."""
        for index, memory in enumerate(self._free):
            if len(memory) == size:
                return self._free.pop(index)
        new = allocate(size, mmap.mmap if device is None else _PinnedMemory)
        if isinstance(new, _PinnedMemory) and device is not None:
            new.register(device)
        return new

    def give(self, written: Iterable[PackedTensors]) -> None:
        """Reuse the memory of contents that have been written; memory that was free before is released."""
        bodies = [packed.pieces[-1].obj for packed in written]
        self._free = [body for body in bodies if isinstance(body, mmap.mmap)]


@torch.no_grad()
def pack_tensors(
    tensors: Mapping[str, Tensor],
    *,
    copy: bool = True,
    memory: CopyMemory | None = None,
    metadata: Mapping[str, str] | None = None,
) -> PackedTensors:
    """Return tensors as the contents of a safetensors file.

    Tensors may be on any device, and of any dtype and strides. With ``copy`` they are copied once, to the memory that
    is written later. Two that share memory are both written, so that a model finds each of its names.

    Args:
        tensors: The tensors by name.
        copy: Whether the tensors may change before the contents are written.
        memory: Where the copy is allocated, if not in new memory.
        metadata: More texts for the header, for other readers.

    Raises:
        NotSerializableError: A name or a tensor cannot be written.

    Example:
        >>> packed = pack_tensors({"weight": torch.ones(2, 2)})
        >>> len(packed.pieces[1]), bytes(packed.pieces[0][8:]).decode().rstrip()
        (16, '{"weight":{"dtype":"F32","shape":[2,2],"data_offsets":[0,16]}}')
    """
    entries: dict[str, Any] = {}
    settings: dict[str, dict[str, Any]] = {"dtypes": {}, "strides": {}}
    offsets: dict[str, int] = {}
    offset = 0
    # The largest items first keep each tensor at a multiple of its item's size.
    for name in sorted(tensors, key=lambda name: (-tensors[name].element_size(), name)):
        tensor = tensors[name]
        shape, end = list(tensor.shape), offset + tensor.nbytes
        if tensor.dtype not in _WRITTEN_NAMES:
            settings["dtypes"][name] = [str(tensor.dtype).removeprefix("torch."), shape]
            shape = [tensor.nbytes]
        # Kernels round differently where strides differ: a resumed run is only bit-identical with the same ones.
        if not tensor.is_contiguous() and tensor.numel() > 0 and is_dense(tensor.shape, tensor.stride()):
            settings["strides"][name] = list(tensor.stride())
        dtype = _WRITTEN_NAMES.get(tensor.dtype, "U8")
        entries[name] = {"dtype": dtype, "shape": shape, "data_offsets": [offset, end]}
        if tensor.numel():
            offsets[name] = offset
        offset = end
    header = memoryview(_header(entries, settings, metadata or {}))
    if copy:
        cuda = next((tensors[name].device for name in offsets if tensors[name].is_cuda), None)
        body = allocate(offset) if memory is None else memory.take(offset, cuda)
        _copy_all(tensors, offsets, body)
        return PackedTensors((header, memoryview(body)[:offset]))
    owners = tuple(_on_cpu(name, tensors[name]) for name in offsets)
    return PackedTensors((header, *map(bytes_of, owners)), owners)


def _header(entries: dict[str, Any], settings: dict[str, dict[str, Any]], texts: Mapping[str, str]) -> bytes:
    if "__metadata__" in entries:
        raise NotSerializableError("__metadata__", "a tensor cannot be saved by this name, as safetensors uses it.")
    written = {kind: of_names for kind, of_names in settings.items() if of_names}
    metadata = {**texts, _SETTINGS: json.dumps(written)} if written else {**texts}
    text = json.dumps(
        ({"__metadata__": metadata} if metadata else {}) | entries, separators=(",", ":"), ensure_ascii=False
    )
    try:
        content = text.encode()
    except UnicodeEncodeError:
        raise NotSerializableError("", "a tensor has a name that is no valid text (UTF-8).") from None
    content += b" " * (-len(content) % 8)
    return len(content).to_bytes(8, "little") + content


def _copy_all(tensors: Mapping[str, Tensor], offsets: Mapping[str, int], body: mmap.mmap | bytearray) -> None:
    """Copy tensors to their offsets in memory, all of them in one call if torch can."""
    # A copy that is not waited for would conjugate or negate the values before it has them.
    sources = {name: tensors[name].resolve_conj().resolve_neg() for name in offsets}
    targets = []
    for dtype, group in itertools.groupby(sources, key=lambda name: sources[name].dtype):
        names = [*group]
        count = sum(sources[name].numel() for name in names)
        flat = torch.frombuffer(body, dtype=dtype, count=count, offset=offsets[names[0]])
        targets += _unflatten_dense_tensors(flat, [sources[name] for name in names])  # type: ignore[no-untyped-call]
    devices = {tensor.device for tensor in sources.values() if tensor.is_cuda}
    try:
        torch._foreach_copy_(targets, [*sources.values()], non_blocking=bool(devices))
    except (RuntimeError, TypeError):  # one by one, torch can copy more kinds
        for (name, tensor), target in zip(sources.items(), targets, strict=True):
            _copy(name, tensor, target)
    finally:
        for device in devices:
            torch.cuda.current_stream(device).synchronize()


def _on_cpu(name: str, tensor: Tensor) -> Tensor:
    """Return a tensor whose memory can be written: itself, if it is contiguous and on the CPU."""
    if tensor.device.type == "cpu" and tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg():
        return tensor
    return _copy(name, tensor, torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu"))


def _copy(name: str, tensor: Tensor, target: Tensor) -> Tensor:
    try:
        return target.copy_(tensor)
    except RuntimeError as error:
        if "not implemented" not in str(error):
            raise
        dtype = str(tensor.dtype).removeprefix("torch.")
        raise NotSerializableError(name, f"a tensor of {dtype} cannot be saved, as torch cannot copy it.") from None


def is_dense(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Return whether items of these strides fill their memory without gaps and overlaps."""
    expected = 1
    for stride, length in sorted(zip(strides, shape, strict=True)):
        if length > 1 and stride != expected:
            return False
        expected *= length
    return True
