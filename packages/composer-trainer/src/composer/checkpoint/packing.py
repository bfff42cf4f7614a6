"""The bytes of the files with tensors that a process writes: of each the header, and copies of its tensors."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from composer.checkpoint.planning import Described, Writes
from composer.core import NotSerializableError
from composer.functional.dtensors import is_dtensor

__all__ = ["KeptMemory", "bytes_of", "pack_files"]

KeptMemory = dict[tuple[str, str], Tensor]
"""Copies of an earlier save by file and name, which the next save fills again: new memory takes as long as a copy."""

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
"""The key of a file's metadata from which PyTorch's ``HuggingFaceStorageReader`` takes the offsets of cells."""


@torch.no_grad()  # a DTensor returns its local tensor much faster without a graph
def pack_files(
    tensors: Mapping[str, Mapping[str, Any]],
    described: Described,
    writes: Writes,
    *,
    copy: bool,
    memory: KeptMemory | None = None,
) -> dict[str, list[memoryview]]:
    """Return the contents of the files that this process writes: the header, and the bytes of each tensor.

    Tensors may be on any device, and of any dtype and strides. Two that share memory are both written, so that a model
    finds each of its names.

    Args:
        tensors: The tensors by kind and name.
        described: What :func:`describe_tensors` returned for them.
        writes: The names of the tensors in each file, as :func:`plan_files` returns them for this rank.
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
            _, region = described[kind][name]
            offsets[name] = {"saved_offsets": [*region.offset]}
        copies = {name: kept[file, name] for name in names}
        packed[file] = [memoryview(_header(copies, offsets)), *map(bytes_of, copies.values())]
    for device in devices:
        if device.type == "cuda":
            # With CUDA, a copy to pinned memory may be incomplete when it returns: the host may read it only when the
            # stream that copies has finished. One wait is enough for all copies, because a stream works in order; and
            # what the next step requests of the same stream comes after them.
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
