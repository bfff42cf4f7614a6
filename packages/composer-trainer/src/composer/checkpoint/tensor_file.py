"""Tensors in safetensors files: packed into one piece of memory, which is the copy that a run need not wait for.

The safetensors package reads the files. They are written here, because what is written has to be copied before the
training goes on, and hashed, and each of that would be one more pass over the memory.
"""

from __future__ import annotations

import json
import mmap
from typing import TYPE_CHECKING, Any

import attrs
import torch
from torch import Tensor

from composer.checkpoint.errors import CheckpointError
from composer.core import NotSerializableError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

__all__ = ["PackedTensors", "pack_tensors", "read_shapes", "read_tensors"]

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
_OTHERS = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in vars(torch).values()
    if isinstance(dtype, torch.dtype) and dtype not in _NAMES and not str(dtype).startswith("torch.q")
}
"""Dtypes that the format has no name for, at least in releases that people have: saved as bytes, named beside them."""

_SETTINGS = "composer"
_HUGE = 4 << 20


@attrs.frozen(eq=False)
class PackedTensors:
    """The contents of a safetensors file, in memory: what :func:`pack_tensors` returns.

    Args:
        header: Names, dtypes, shapes and places, with the header's length before it.
        body: The tensors' bytes.
    """

    header: bytes
    body: memoryview

    @property
    def pieces(self) -> tuple[memoryview, ...]:
        """The file's contents, piece by piece."""
        return (memoryview(self.header), self.body)

    @property
    def size(self) -> int:
        """The file's size in bytes."""
        return len(self.header) + len(self.body)


def pack_tensors(tensors: Mapping[str, Tensor]) -> PackedTensors:
    """Return a copy of some tensors as the contents of a safetensors file.

    The copy is the only one that is made: what is written later is this memory. Tensors may be on any device, of any
    dtype and layout of strides; two that share memory are both written, so that a model finds each of its names.

    Args:
        tensors: The tensors by name.

    Raises:
        NotSerializableError: A name cannot be written.

    Example:
        >>> packed = pack_tensors({"weight": torch.ones(2, 2)})
        >>> len(packed.body), packed.header[8:].decode().rstrip()
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
    body = _allocate(offset)
    for name, (tensor, begin) in places.items():
        if tensor.numel():
            _copy(name, tensor, torch.frombuffer(body, dtype=tensor.dtype, count=tensor.numel(), offset=begin))
    return PackedTensors(_header(entries, settings), memoryview(body)[:offset])


def _copy(name: str, tensor: Tensor, place: Tensor) -> None:
    try:
        place.view(tensor.shape).copy_(tensor)
    except NotImplementedError:
        dtype = str(tensor.dtype).removeprefix("torch.")
        raise NotSerializableError(name, f"a tensor of {dtype} cannot be saved, as torch cannot copy it.") from None


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
    with _opened(path) as file:
        settings = _read_settings(path, file.metadata())
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    if not mapped:
        tensors = {name: tensor.clone() for name, tensor in tensors.items()}
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
