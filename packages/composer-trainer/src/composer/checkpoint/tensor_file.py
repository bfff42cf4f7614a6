"""Safetensors files of ours, and what is in them beside what the format has words for.

The safetensors package says whether a file is sound. Whole files of ours are read here, so that they are hashed in the
same pass, and so that memory for what they hold is there before it is needed: to touch new memory takes several times
as long as to copy into it.
"""

from __future__ import annotations

import ctypes
import functools
import json
import math
import mmap
import sys
import weakref
from typing import TYPE_CHECKING, Any, BinaryIO, TypeAlias

import attrs
import torch
from torch import Tensor

from composer.checkpoint.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence
    from pathlib import Path

__all__ = [
    "DTYPE_NAMES",
    "SETTINGS",
    "MappedTensors",
    "UnreadTensors",
    "is_dense",
    "make_room",
    "map_tensors",
    "memory_of",
    "read_shapes",
    "read_tensors",
]

DTYPE_NAMES = {
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
_DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()}
_OTHERS = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in vars(torch).values()
    if isinstance(dtype, torch.dtype) and dtype not in DTYPE_NAMES and not str(dtype).startswith("torch.q")
}
"""Dtypes that the format has no name for, at least in releases that people have: saved as bytes, named beside them."""

SETTINGS = "composer"
_CHUNK = 1 << 20
_PIECE = 4 << 20
_POPULATE_READ, _POPULATE_WRITE = 22, 23
"""Advice that Linux takes since 5.14, and that the mmap module has no names for."""

_Entry: TypeAlias = tuple[torch.dtype, list[int], int]


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


@attrs.define(eq=False)
class UnreadTensors:
    """The tensors of a safetensors file of ours, whose memory is there, and is empty until :meth:`read` fills it.

    Args:
        path: The file.
        header: What the file begins with.
        tensors: By name.
    """

    path: Path
    header: bytes
    tensors: dict[str, Tensor]
    _written: dict[str, Tensor]
    """As they are in the file, and in its order; most are those of :attr:`tensors`, or share memory with them."""
    _rearranged: Collection[str]
    _filled: int = attrs.field(default=0, init=False)

    def read(self, digest: Any) -> None:
        """Read the file once; ``digest.update`` sees all of it.

        Raises:
            CheckpointError: It cannot be read, or is not what it was.
        """
        try:
            with self.path.open("rb", buffering=0) as source:
                is_same = source.read(len(self.header)) == self.header
                digest.update(self.header)
                for self._filled, tensor in enumerate(self._written.values()):  # noqa: B020
                    _fill(tensor, source, digest)
                is_same = is_same and not source.read(1)
        except (OSError, ValueError) as error:
            raise CheckpointError(self.path, f"is no whole safetensors file of ours: {error}.") from None
        if not is_same:
            raise _changed(self.path)
        for name in self._rearranged:
            self.tensors[name].copy_(self._written[name])

    def find_memory(self) -> None:
        """Let the system find memory for what is not read yet, last tensors first, while another thread reads.

        It finds much of it at once in half of the time that it takes page by page, when something is read into it.
        """
        for place, tensor in reversed([*enumerate(self._written.values())]):
            if place < self._filled or not _find_memory(tensor):
                return


def make_room(path: Path) -> UnreadTensors:
    """Return the tensors of a safetensors file of ours, not read yet.

    Each has memory of its own, laid out as torch lays it out: what is computed from it does not depend on where it has
    been. It is made by the thread that calls this, as memory of threads that end would not be used again.

    Raises:
        CheckpointError: It is no safetensors file, or cannot be read.
    """
    header, entries, settings = _read_header(path)
    written = {name: torch.empty(shape, dtype=dtype) for name, (dtype, shape, _) in entries.items()}
    return UnreadTensors(path, header, _restored(path, dict(written), settings), written, settings["strides"].keys())


@attrs.define(eq=False)
class MappedTensors:
    """The tensors of a safetensors file of ours, for which the file's own memory stands until they are copied.

    Args:
        path: The file.
        content: All of it, mapped; what is written there does not reach the file. None when it has been let go of.
        begin: Where the tensors begin.
        entries: Dtype, shape and place of each, by name.
        settings: What the format has no words for.
    """

    path: Path
    content: mmap.mmap | None
    begin: int
    entries: dict[str, _Entry]
    settings: dict[str, dict[str, Any]]

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors; a process that looks at them is killed if the file has been cut off meanwhile.

        Raises:
            CheckpointError: They are not as they are said to be.
        """
        content = self.content or b""
        try:
            tensors = {name: self._tensor(content, *entry) for name, entry in self.entries.items()}
        except ValueError as error:
            raise CheckpointError(self.path, f"is no whole safetensors file of ours: {error}.") from None
        return _restored(self.path, tensors, self.settings)

    def _tensor(self, content: mmap.mmap | bytes, dtype: torch.dtype, shape: list[int], place: int) -> Tensor:
        count = math.prod(shape)
        if not count:
            return torch.empty(shape, dtype=dtype)
        return torch.frombuffer(content, dtype=dtype, count=count, offset=self.begin + place).view(shape)

    def close(self) -> bool:
        """Let go of the file; return False, and keep it, if somebody still holds a tensor that lies in it."""
        if self.content is not None:
            held = weakref.ref(self.content)  # each tensor holds the memory that it lies in
            self.content = None
            self.content = held()
        return self.content is None


def map_tensors(path: Path, digest: Any) -> MappedTensors:
    """Return the tensors of a safetensors file of ours, which stay in it: only for those that are copied soon.

    ``digest.update`` sees all of the file, which the system has read before.

    Raises:
        CheckpointError: It is no safetensors file, cannot be read, or is not what it was.
    """
    header, entries, settings = _read_header(path)
    try:
        with path.open("rb", buffering=0) as source:
            content = mmap.mmap(source.fileno(), 0, access=mmap.ACCESS_COPY)
            if not _advise(torch.frombuffer(content, dtype=torch.uint8).data_ptr(), len(content), _POPULATE_READ):
                # A disk that fails is told of here; a process that looks at what could not be read is killed.
                while source.read(_CHUNK):
                    pass
            digest.update(content)
    except (OSError, ValueError) as error:
        raise CheckpointError(path, f"cannot be read: {error}.") from None
    if content[: len(header)] != header:
        raise _changed(path)
    return MappedTensors(path, content, len(header), entries, settings)


def _changed(path: Path) -> CheckpointError:
    return CheckpointError(path, "has been changed while it was read.")


def _read_header(path: Path) -> tuple[bytes, dict[str, _Entry], dict[str, dict[str, Any]]]:
    """Return what a safetensors file of ours begins with, and what it says: entries in the file's order, settings."""
    with _opened(path):  # it knows what is wrong with a header
        pass
    try:
        with path.open("rb", buffering=0) as source:
            prefix = source.read(8)
            header = source.read(int.from_bytes(prefix, "little"))
        written = json.loads(header)
        settings = _read_settings(path, written.pop("__metadata__", None))
        ordered = sorted(written.items(), key=lambda item: item[1]["data_offsets"])
        entries = {name: _entry(entry["dtype"], entry["shape"], *entry["data_offsets"]) for name, entry in ordered}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(path, f"is no whole safetensors file of ours: {error}.") from None
    return prefix + header, entries, settings


def _entry(dtype: str, shape: list[int], begin: int, end: int) -> _Entry:
    kind = _DTYPES[dtype]
    if math.prod(shape) * kind.itemsize != end - begin:
        raise ValueError(f"a tensor of shape {shape} and dtype {dtype} does not have {end - begin} bytes")
    return kind, shape, begin


def _fill(tensor: Tensor, source: BinaryIO, digest: Any) -> None:
    memory = memory_of(tensor) if tensor.numel() else memoryview(b"")
    while memory:
        count = source.readinto(memory[:_CHUNK])  # type: ignore[attr-defined]
        if not count:
            raise ValueError("it ends within a tensor")
        digest.update(memory[:count])
        memory = memory[count:]


def _find_memory(tensor: Tensor) -> bool:
    """Let the system find memory for a tensor, and leave what is in it; return False where the system cannot."""
    begin, end = tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes
    first, last = -(-begin // mmap.PAGESIZE) * mmap.PAGESIZE, end // mmap.PAGESIZE * mmap.PAGESIZE
    pieces = [(place, min(_PIECE, last - place)) for place in range(first, last, _PIECE)]
    return all(_advise(place, size, _POPULATE_WRITE) for place, size in reversed(pieces))


def _advise(place: int, size: int, advice: int) -> bool:
    """Tell the system what memory is for; return whether it knows the advice, and has followed it."""
    return sys.platform == "linux" and bool(_madvise()(place, size, advice) == 0)


@functools.cache
def _madvise() -> Any:
    advise = ctypes.CDLL(None).madvise  # the mmap module's own advises only about what it has made, and holds the GIL
    advise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return advise


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
        settings: dict[str, dict[str, Any]] = empty | json.loads((metadata or {}).get(SETTINGS, "{}"))
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
    if not is_dense(tensor.shape, strides):
        raise ValueError(f"strides {strides} do not fit the shape {list(tensor.shape)}")
    return torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype).copy_(tensor)


def memory_of(tensor: Tensor) -> memoryview:
    """Return the memory of a contiguous tensor on the CPU; it lives no longer than the tensor."""
    size = tensor.numel() * tensor.element_size()
    return memoryview((ctypes.c_ubyte * size).from_address(tensor.data_ptr())).cast("B")


def is_dense(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Return whether items of these strides fill their memory without gaps and overlaps."""
    expected = 1
    for stride, length in sorted(zip(strides, shape, strict=True)):
        if length > 1 and stride != expected:
            return False
        expected *= length
    return True
