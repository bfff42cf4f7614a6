"""Safetensors files of ours, and what is in them beside what the format has words for.

The safetensors package says whether a file is sound. Files of ours are read here, so that they are hashed in the same
pass, and so that memory for what they hold is there in time, or is not needed: to touch new memory takes several times
as long as to copy into it.
"""

from __future__ import annotations

import ctypes
import functools
import json
import math
import mmap
import os
import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, BinaryIO, TypeAlias

import attrs
import torch
from torch import Tensor

from composer.checkpoint.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

__all__ = [
    "DTYPE_NAMES",
    "SETTINGS",
    "MappedTensors",
    "UnreadTensors",
    "allocate_tensors",
    "is_dense",
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
    """The tensors of a safetensors file of ours, whose memory is there, and is empty until it is filled.

    Args:
        path: The file.
        header: What the file begins with.
        tensors: By name.
        written: As they are in the file, and in its order; most share memory with those in ``tensors``.
        rearranged: Those of ``tensors`` that do not, and what is to be copied into them.
    """

    path: Path
    header: bytes
    tensors: dict[str, Tensor]
    written: list[Tensor]
    rearranged: list[tuple[Tensor, Tensor]]
    _filled: int = attrs.field(default=0, init=False)

    def read(self, digest: Any) -> None:
        """Read the file once, in any thread; ``digest.update`` sees all of it.

        Raises:
            CheckpointError: It cannot be read, or is not what it was.
        """
        try:
            with self.path.open("rb", buffering=0) as source:
                is_same = source.read(len(self.header)) == self.header
                digest.update(self.header)
                for self._filled, tensor in enumerate(self.written):  # noqa: B020
                    _fill(tensor, source, digest)
                is_same = is_same and not source.read(1)
        except (OSError, ValueError) as error:
            raise CheckpointError(self.path, f"is no whole safetensors file of ours: {error}.") from None
        if not is_same:
            raise _changed(self.path)

    def rearrange(self) -> None:
        """Put into order what has been read: then the tensors have their values."""
        while self.rearranged:
            target, source = self.rearranged.pop()
            target.copy_(source)

    def find_memory(self) -> None:
        """Let the system find memory for what is not read yet, last tensors first, while another thread reads.

        It finds much of it at once in half of the time that it takes page by page, when something is read into it.
        """
        for place, tensor in reversed([*enumerate(self.written)]):
            if place < self._filled or not _find_memory(tensor):
                return


def allocate_tensors(path: Path) -> UnreadTensors:
    """Return the tensors of a safetensors file of ours, not read yet.

    Each has memory of its own, laid out as torch lays it out: what is computed from it does not depend on where it has
    been. It is made by the thread that calls this, as memory of threads that end would not be used again.

    Raises:
        CheckpointError: It is no safetensors file, or cannot be read.
    """
    header, entries, settings = _read_header(path)
    written = {name: torch.empty(shape, dtype=dtype, device="cpu") for name, (dtype, shape, _) in entries.items()}
    with _told_of(path):
        flat = _typed(written, settings)
        rearranged = {name: _like(flat[name], strides) for name, strides in settings["strides"].items()}
    pairs = [(tensor, flat[name]) for name, tensor in rearranged.items()]
    return UnreadTensors(path, header, flat | rearranged, [*written.values()], pairs)


@attrs.frozen(eq=False)
class MappedTensors:
    """The tensors of a safetensors file of ours, for whose memory the file itself stands until they are copied.

    A process that looks at them is killed if the file is cut off meanwhile.

    Args:
        path: The file.
        tensors: By name; what is written into them does not reach the file.
        version: What tells whether it is still the same.
    """

    path: Path
    tensors: dict[str, Tensor]
    version: tuple[int, ...]

    def check_unchanged(self) -> None:
        """Look whether the file is still what it was when it was mapped.

        Raises:
            CheckpointError: It is not.
        """
        try:
            is_same = _version(self.path.stat()) == self.version
        except OSError:
            is_same = False
        if not is_same:
            raise _changed(self.path)


def map_tensors(path: Path, digest: Any) -> MappedTensors:
    """Return the tensors of a safetensors file of ours, which stay in it: only for those that are copied soon.

    ``digest.update`` sees all of the file, which the system has read before.

    Raises:
        CheckpointError: It is no safetensors file, cannot be read, or is not what it was.
    """
    header, entries, settings = _read_header(path)
    try:
        with path.open("rb", buffering=0) as source:
            version = _version(os.fstat(source.fileno()))
            content = mmap.mmap(source.fileno(), 0, access=mmap.ACCESS_COPY)
            if not _advise(torch.frombuffer(content, dtype=torch.uint8).data_ptr(), len(content), _POPULATE_READ):
                # A disk that fails, or a file that is cut off: to look at its memory would be the end of the process.
                _read_through(source, len(content))
            digest.update(content)
        tensors = {name: _mapped(content, len(header), *entry) for name, entry in entries.items()}
    except (OSError, ValueError) as error:
        raise CheckpointError(path, f"cannot be read: {error}.") from None
    if content[: len(header)] != header:
        raise _changed(path)
    return MappedTensors(path, _restored(path, tensors, settings), version)


def _read_through(source: BinaryIO, size: int) -> None:
    while size > 0:
        chunk = source.read(_CHUNK)
        if not chunk:
            raise ValueError("it ends too early")
        size -= len(chunk)


def _version(status: os.stat_result) -> tuple[int, ...]:
    return status.st_ino, status.st_size, status.st_mtime_ns


def _mapped(content: mmap.mmap, header: int, dtype: torch.dtype, shape: list[int], place: int) -> Tensor:
    count = math.prod(shape)
    if not count:
        return torch.empty(shape, dtype=dtype, device="cpu")
    return torch.frombuffer(content, dtype=dtype, count=count, offset=header + place).view(shape)


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
    with _told_of(path):
        flat = _typed(tensors, settings)
        return flat | {
            name: _like(flat[name], strides).copy_(flat[name]) for name, strides in settings["strides"].items()
        }


def _typed(tensors: dict[str, Tensor], settings: dict[str, dict[str, Any]]) -> dict[str, Tensor]:
    return tensors | {
        name: tensors[name].view(_OTHERS[dtype]).reshape(shape) for name, (dtype, shape) in settings["dtypes"].items()
    }


def _like(tensor: Tensor, strides: list[int]) -> Tensor:
    """Return a new tensor whose items lie in another order."""
    if not is_dense(tensor.shape, strides):
        raise ValueError(f"strides {strides} do not fit the shape {list(tensor.shape)}")
    return torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype, device="cpu")


@contextmanager
def _told_of(path: Path) -> Iterator[None]:
    try:
        yield
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        raise CheckpointError(path, f"says something of a tensor that cannot be: {error}.") from None


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
