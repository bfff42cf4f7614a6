"""Tensors as the contents of a safetensors file: one piece of memory, which is the copy that a run need not wait for.

They are written here, and not by the safetensors package, because what is written has to be copied before the training
goes on, and hashed, and each of that would be one more pass over the memory.
"""

from __future__ import annotations

import itertools
import json
import mmap
from typing import TYPE_CHECKING, Any

import attrs
import torch
from torch import Tensor
from torch._utils import _unflatten_dense_tensors

from composer.checkpoint.tensor_file import DTYPE_NAMES, SETTINGS, is_dense, memory_of
from composer.core import NotSerializableError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

__all__ = ["CopyMemory", "PackedTensors", "pack_tensors"]

_HUGE = 4 << 20


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


@torch.no_grad()
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
        tensor = tensors[name]
        size = tensor.nbytes
        shape = list(tensor.shape)
        if tensor.dtype not in DTYPE_NAMES:
            settings["dtypes"][name] = [str(tensor.dtype).removeprefix("torch."), shape]
            shape = [size]
        if _is_rearranged(tensor):
            settings["strides"][name] = list(tensor.stride())
        entries[name] = {
            "dtype": DTYPE_NAMES.get(tensor.dtype, "U8"),
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
    return PackedTensors((header, *map(memory_of, owners)), tuple(owners))


def _copied(places: Mapping[str, tuple[Tensor, int]], size: int, body: mmap.mmap | bytearray) -> memoryview:
    held = {name: tensor for name, (tensor, _) in places.items() if tensor.numel()}
    targets = []
    for dtype, names in itertools.groupby(held, key=lambda name: held[name].dtype):
        run = [*names]
        count = sum(held[name].numel() for name in run)
        flat = torch.frombuffer(body, dtype=dtype, count=count, offset=places[run[0]][1])
        targets += _unflatten_dense_tensors(flat, [held[name] for name in run])  # type: ignore[no-untyped-call]
    try:
        torch._foreach_copy_(targets, [*held.values()])
    except (RuntimeError, TypeError):  # one by one, torch can copy more kinds
        for (name, tensor), target in zip(held.items(), targets, strict=True):
            _copy(name, tensor, target)
    return memoryview(body)[:size]


def _on_cpu(name: str, tensor: Tensor) -> Tensor:
    """Return a tensor as it is to be written: itself, if that is how it lies in memory."""
    if tensor.device.type == "cpu" and tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg():
        return tensor
    return _copy(name, tensor, torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu"))


def _copy(name: str, tensor: Tensor, place: Tensor) -> Tensor:
    try:
        return place.copy_(tensor)
    except RuntimeError as error:
        if "not implemented" not in str(error):
            raise
        dtype = str(tensor.dtype).removeprefix("torch.")
        raise NotSerializableError(name, f"a tensor of {dtype} cannot be saved, as torch cannot copy it.") from None


def _is_rearranged(tensor: Tensor) -> bool:
    """Return whether a tensor's items lie in another order than that of its dimensions, and without gaps."""
    # torch's elementwise kernels round differently where strides differ: a run goes on to the same bits only with them.
    return not tensor.is_contiguous() and tensor.numel() > 0 and is_dense(tensor.shape, tensor.stride())


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
    metadata = {"__metadata__": {SETTINGS: json.dumps(written)}} if written else {}
    text = json.dumps(metadata | entries, separators=(",", ":"), ensure_ascii=False)
    try:
        content = text.encode()
    except UnicodeEncodeError:
        raise NotSerializableError("", "a tensor has a name that is no valid text (UTF-8).") from None
    content += b" " * (-len(content) % 8)
    return len(content).to_bytes(8, "little") + content
