"""Tensors in safetensors files: packed into one piece of memory, which is the copy that a run need not wait for.

The safetensors package reads the files. They are written here, because what is written has to be copied before the
training goes on, and hashed, and each of that would be one more pass over the memory.
"""

from __future__ import annotations

import ctypes
import json
import math
import mmap
from typing import TYPE_CHECKING, Any, BinaryIO

import attrs
import torch
from torch import Tensor

from composer.checkpoint.errors import CheckpointError
from composer.core import NotSerializableError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from pathlib import Path

__all__ = ["CopyMemory", "PackedTensors", "UnreadTensors", "make_room", "pack_tensors", "read_shapes", "read_tensors"]

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
_DTYPES = {name: dtype for dtype, name in _NAMES.items()}
_OTHERS = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in vars(torch).values()
    if isinstance(dtype, torch.dtype) and dtype not in _NAMES and not str(dtype).startswith("torch.q")
}
"""Dtypes that the format has no name for, at least in releases that people have: saved as bytes, named beside them."""

_SETTINGS = "composer"
_HUGE = 4 << 20
_CHUNK = 1 << 20


@attrs.frozen(eq=False)
class PackedTensors:
    """The contents of a safetensors file, in memory: what :func:`pack_tensors` returns.

    Args:
        pieces: The contents, one after the other: first names, dtypes, shapes and places, then the tensors' bytes.
        owners: What the pieces are the memory of.
    """

    pieces: tuple[memoryview, ...]
    owners: tuple[Tensor, ...] = ()

    @property
    def size(self) -> int:
        """The file's size in bytes."""
        return sum(len(piece) for piece in self.pieces)


class CopyMemory:
    """Memory that copies were in, for the next ones: to touch new memory first takes about as long as to copy into it.

    Example:
        >>> memory = CopyMemory()
        >>> first = pack_tensors({"weight": torch.ones(1 << 20)}, memory=memory)
        >>> memory.give([first])
        >>> pack_tensors({"weight": torch.zeros(1 << 20)}, memory=memory).pieces[1].obj is first.pieces[1].obj
        True
    """

    def __init__(self) -> None:
        self._free: list[mmap.mmap] = []

    def take(self, size: int) -> mmap.mmap | bytearray:
        """Return memory of a size, new if there is none."""
        for place, one in enumerate(self._free):
            if len(one) == size:
                return self._free.pop(place)
        return _allocate(size)

    def give(self, written: Iterable[PackedTensors]) -> None:
        """Take memory back whose contents nobody needs any more; what was there before is freed."""
        bodies = [packed.pieces[-1].obj for packed in written]
        self._free = [body for body in bodies if isinstance(body, mmap.mmap)]


def pack_tensors(
    tensors: Mapping[str, Tensor], *, copy: bool = True, memory: CopyMemory | None = None
) -> PackedTensors:
    """Return some tensors as the contents of a safetensors file.

    With ``copy``, that is the only copy that is made: what is written later is this memory. Tensors may be on any
    device, of any dtype and layout of strides; two that share memory are both written, so that a model finds each of
    its names.

    Args:
        tensors: The tensors by name.
        copy: Whether the tensors may change before the contents are written.
        memory: Where the copy may go; else into memory of its own.

    Raises:
        NotSerializableError: A name cannot be written.

    Example:
        >>> packed = pack_tensors({"weight": torch.ones(2, 2)})
        >>> len(packed.pieces[1]), bytes(packed.pieces[0][8:]).decode().rstrip()
        (16, '{"weight":{"dtype":"F32","shape":[2,2],"data_offsets":[0,16]}}')
    """
    entries: dict[str, Any] = {}
    settings: dict[str, dict[str, Any]] = {"dtypes": {}, "strides": {}}
    places: dict[str, tuple[Tensor, int]] = {}
    offset = 0
    # The largest items first keep each tensor at a multiple of its item's size.
    for name in sorted(tensors, key=lambda one: (-tensors[one].element_size(), one)):
        tensor = tensors[name].detach()
        size = tensor.numel() * tensor.element_size()
        shape = list(tensor.shape)
        if tensor.dtype not in _NAMES:
            settings["dtypes"][name] = [str(tensor.dtype).removeprefix("torch."), shape]
            shape = [size]
        if _is_rearranged(tensor):
            settings["strides"][name] = list(tensor.stride())
        entries[name] = {
            "dtype": _NAMES.get(tensor.dtype, "U8"),
            "shape": shape,
            "data_offsets": [offset, offset + size],
        }
        places[name] = (tensor, offset)
        offset += size
    header = memoryview(_header(entries, settings))
    if copy:
        body = _allocate(offset) if memory is None else memory.take(offset)
        return PackedTensors((header, _copied(places, offset, body)))
    owners = [_on_cpu(name, tensor) for name, (tensor, _) in places.items() if tensor.numel()]
    return PackedTensors((header, *map(_memory, owners)), tuple(owners))


def _copied(places: Mapping[str, tuple[Tensor, int]], size: int, body: mmap.mmap | bytearray) -> memoryview:
    for name, (tensor, begin) in places.items():
        if tensor.numel():
            place = torch.frombuffer(body, dtype=tensor.dtype, count=tensor.numel(), offset=begin)
            _copy(name, tensor, place.view(tensor.shape))
    return memoryview(body)[:size]


def _on_cpu(name: str, tensor: Tensor) -> Tensor:
    """Return a tensor as it is to be written: itself, if that is how it lies in memory."""
    if tensor.device.type == "cpu" and tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg():
        return tensor
    return _copy(name, tensor, torch.empty(tensor.shape, dtype=tensor.dtype))


def _copy(name: str, tensor: Tensor, place: Tensor) -> Tensor:
    try:
        return place.copy_(tensor)
    except RuntimeError as error:
        if "not implemented" not in str(error):
            raise
        dtype = str(tensor.dtype).removeprefix("torch.")
        raise NotSerializableError(name, f"a tensor of {dtype} cannot be saved, as torch cannot copy it.") from None


def _memory(tensor: Tensor) -> memoryview:
    """Return the memory of a contiguous tensor on the CPU; it lives no longer than the tensor."""
    size = tensor.numel() * tensor.element_size()
    return memoryview((ctypes.c_ubyte * size).from_address(tensor.data_ptr())).cast("B")


def _is_rearranged(tensor: Tensor) -> bool:
    """Return whether a tensor's items lie in another order than that of its dimensions, and without gaps."""
    # torch's elementwise kernels round differently where strides differ: a run goes on to the same bits only with them.
    return not tensor.is_contiguous() and tensor.numel() > 0 and _is_dense(tensor.shape, tensor.stride())


def _is_dense(shape: Sequence[int], strides: Sequence[int]) -> bool:
    expected = 1
    for stride, length in sorted(zip(strides, shape, strict=True)):
        if length > 1 and stride != expected:
            return False
        expected *= length
    return True


def _allocate(size: int) -> mmap.mmap | bytearray:
    if size < _HUGE or not hasattr(mmap, "MADV_HUGEPAGE"):
        return bytearray(size)
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


def _header(entries: dict[str, Any], settings: dict[str, dict[str, Any]]) -> bytes:
    if "__metadata__" in entries:
        raise NotSerializableError("__metadata__", "a tensor cannot be saved by this name, as safetensors uses it.")
    written = {kind: of_names for kind, of_names in settings.items() if of_names}
    metadata = {"__metadata__": {_SETTINGS: json.dumps(written)}} if written else {}
    text = json.dumps(metadata | entries, separators=(",", ":"), ensure_ascii=False)
    try:
        content = text.encode()
    except UnicodeEncodeError:
        raise NotSerializableError("", "a tensor has a name that is no valid text (UTF-8).") from None
    content += b" " * (-len(content) % 8)
    return len(content).to_bytes(8, "little") + content


def read_shapes(path: Path) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Return dtype and shape of each tensor in a safetensors file, without reading the tensors.

    Raises:
        CheckpointError: It is no safetensors file.
    """
    with _opened(path) as file:
        settings = _read_settings(path, file.metadata())
        found = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118  (it is no dictionary)
        shapes = {name: (str(one.get_dtype()), tuple(one.get_shape())) for name, one in found.items()}
    return shapes | {name: (dtype, tuple(shape)) for name, (dtype, shape) in settings["dtypes"].items()}


def read_tensors(path: Path, *, mapped: bool = False) -> dict[str, Tensor]:
    """Return the tensors of a safetensors file, on the CPU.

    Args:
        path: The file.
        mapped: Whether the tensors may stay in the file until they are looked at; only for those that are copied soon.

    Raises:
        CheckpointError: It is no safetensors file.
    """
    from safetensors import SafetensorError  # noqa: PLC0415

    with _opened(path) as file:
        settings = _read_settings(path, file.metadata())
        try:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        except (SafetensorError, AttributeError, RuntimeError) as error:
            raise CheckpointError(path, f"holds a tensor that cannot be read: {error}.") from None
    if not mapped:
        tensors = {name: tensor.clone() for name, tensor in tensors.items()}
    return _restored(path, tensors, settings)


@attrs.frozen(eq=False)
class UnreadTensors:
    """The tensors of a safetensors file of ours, whose memory is there, and is empty until :meth:`read` fills it.

    Args:
        path: The file.
        header: What the file begins with.
        tensors: By name, in the file's order.
        settings: What the format has no words for.
    """

    path: Path
    header: bytes
    tensors: dict[str, Tensor]
    settings: dict[str, dict[str, Any]]

    def read(self, digest: Any) -> dict[str, Tensor]:
        """Return the tensors; the file is read once, and ``digest.update`` sees all of it.

        Raises:
            CheckpointError: It cannot be read, or is not what it was.
        """
        try:
            with self.path.open("rb", buffering=0) as source:
                is_same = source.read(len(self.header)) == self.header
                digest.update(self.header)
                for tensor in self.tensors.values():
                    _fill(tensor, source, digest)
                is_same = is_same and not source.read(1)
        except (OSError, ValueError) as error:
            raise CheckpointError(self.path, f"is no whole safetensors file of ours: {error}.") from None
        if not is_same:
            raise CheckpointError(self.path, "has been changed while it was read.")
        return _restored(self.path, dict(self.tensors), self.settings)


def make_room(path: Path) -> UnreadTensors:
    """Return the tensors of a safetensors file of ours, not read yet.

    Each has memory of its own, laid out as torch lays it out: what is computed from it does not depend on where it has
    been. It is made by the thread that calls this, as memory of threads that end would not be used again.

    Raises:
        CheckpointError: It is no safetensors file, or cannot be read.
    """
    with _opened(path):  # it knows what is wrong with a header
        pass
    try:
        with path.open("rb", buffering=0) as source:
            prefix = source.read(8)
            header = source.read(int.from_bytes(prefix, "little"))
        entries = json.loads(header)
        settings = _read_settings(path, entries.pop("__metadata__", None))
        ordered = sorted(entries.items(), key=lambda item: item[1]["data_offsets"])
        tensors = {name: _empty(entry["dtype"], entry["shape"], *entry["data_offsets"]) for name, entry in ordered}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(path, f"is no whole safetensors file of ours: {error}.") from None
    return UnreadTensors(path, prefix + header, tensors, settings)


def _empty(dtype: str, shape: list[int], begin: int, end: int) -> Tensor:
    kind = _DTYPES[dtype]
    if math.prod(shape) * kind.itemsize != end - begin:
        raise ValueError(f"a tensor of shape {shape} and dtype {dtype} does not have {end - begin} bytes")
    return torch.empty(shape, dtype=kind)


def _fill(tensor: Tensor, source: BinaryIO, digest: Any) -> None:
    memory = _memory(tensor) if tensor.numel() else memoryview(b"")
    while memory:
        count = source.readinto(memory[:_CHUNK])  # type: ignore[attr-defined]
        if not count:
            raise ValueError("it ends within a tensor")
        digest.update(memory[:count])
        memory = memory[count:]


def _restored(path: Path, tensors: dict[str, Tensor], settings: dict[str, dict[str, Any]]) -> dict[str, Tensor]:
    """Return tensors with the dtypes and strides that the format has no words for."""
    try:
        for name, (dtype, shape) in settings["dtypes"].items():
            tensors[name] = tensors[name].view(_OTHERS[dtype]).reshape(shape)
        for name, strides in settings["strides"].items():
            tensors[name] = _rearranged(tensors[name], strides)
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        raise CheckpointError(path, f"says something of a tensor that cannot be: {error}.") from None
    return tensors


def _opened(path: Path) -> Any:
    from safetensors import SafetensorError, safe_open  # noqa: PLC0415

    try:
        return safe_open(path, framework="pt", device="cpu")
    except (SafetensorError, OSError, ValueError, RuntimeError) as error:
        raise CheckpointError(path, f"is no whole safetensors file: {error}.") from None


def _read_settings(path: Path, metadata: dict[str, str] | None) -> dict[str, dict[str, Any]]:
    empty: dict[str, dict[str, Any]] = {"dtypes": {}, "strides": {}}
    try:
        settings: dict[str, dict[str, Any]] = empty | json.loads((metadata or {}).get(_SETTINGS, "{}"))
        whole = all(
            isinstance(name, str) and isinstance(dtype, str) and _is_shape(shape)
            for name, (dtype, shape) in settings["dtypes"].items()
        )
        whole = whole and all(_is_shape(strides) for strides in settings["strides"].values())
    except (AttributeError, TypeError, ValueError, RecursionError):
        whole = False
    if not whole or settings.keys() != empty.keys():
        raise CheckpointError(path, "has a header whose metadata is not as composer writes it.")
    return settings


def _is_shape(lengths: Any) -> bool:
    return isinstance(lengths, list) and all(type(length) is int and length >= 0 for length in lengths)


def _rearranged(tensor: Tensor, strides: list[int]) -> Tensor:
    if not _is_dense(tensor.shape, strides):
        raise ValueError(f"strides {strides} do not fit the shape {list(tensor.shape)}")
    return torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype).copy_(tensor)
