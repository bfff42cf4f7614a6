"""Saving a run now, or as a snapshot that is written later.

:func:`save_checkpoint`, the Trainer and the saver call :func:`take_snapshot`, which copies what may change before it is
written (:func:`pack_files`); :class:`~composer.checkpoint.writing.Snapshot` writes it. Values that cannot be saved
raise an error here, in all processes, before anything is written.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import re
from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor

from composer.checkpoint.contents import IgnoreKeys, contents_of, metric_values, reject_fsdp1
from composer.checkpoint.folder import split_path
from composer.checkpoint.layout import Described, Writes, bytes_of, describe_tensors
from composer.checkpoint.local import open_folder
from composer.checkpoint.manifest import Manifest
from composer.checkpoint.writing import Snapshot, failing_in_all, writers_of
from composer.core import NotSerializableError, State, evaluation_weights
from composer.core.checks import shortened
from composer.core.files import fill_in_run
from composer.distributed import from_rank_zero, get_global_rank
from composer.functional.dtensors import is_dtensor, is_sharded, reshard

__all__ = ["KeptMemory", "checkpoint_name", "pack_files", "save_checkpoint", "save_in_all_processes", "take_snapshot"]

KeptMemory = dict[tuple[str, str], Tensor]
"""Copies of an earlier save by file and name, which the next save fills again: new memory takes as long as a copy."""
_NAMES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8",
    torch.uint64: "U64", torch.uint32: "U32", torch.uint16: "U16", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip
"""The dtypes that all releases of safetensors have. Others are bytes in the header, and named in the layout."""
_SHARDING = "DCP_SHARDING_INFO"
"""The key of a file's metadata from which PyTorch's ``HuggingFaceStorageReader`` takes the offsets of cells."""


def save_checkpoint(
    state: State,
    path: str | os.PathLike[str],
    *,
    extra: Mapping[str, Any] | None = None,
    weights_only: bool = False,
    ignore_keys: IgnoreKeys = None,
    overwrite: bool = False,
) -> str:
    """Save a run as a checkpoint, and return its path when it is complete.

    The checkpoint is written atomically and without a lock. Do not save into a folder to which the
    :class:`~composer.callbacks.CheckpointSaver` of another process saves: it deletes unfinished checkpoints when it
    starts.

    If the model is sharded by FSDP2, all processes have to call it, and each writes its regions of the tensors.

    Args:
        state: The run.
        path: The checkpoint's folder or URL, such as ``"runs/{run_name}/ep{epoch}-ba{batch}"``.
        extra: More to save, by name: plain data and tensors. :func:`load_checkpoint` returns it.
        weights_only: Whether to save only the weights that the model is evaluated with; training cannot resume from
            them. See :func:`composer.core.evaluation_weights`.
        ignore_keys: What not to save: patterns of paths such as ``"optimizers/*"``, or a function that removes it from
            the dictionary that it is called with.
        overwrite: Whether to replace another checkpoint of the name. If False, one of the same run and moment is kept,
            a damaged one is replaced, and any other raises an error.

    Raises:
        NotImplementedError: The model is wrapped by FSDP 1.
        NotSerializableError: A value is neither data nor a tensor; the error names its place.
        CheckpointSaveError: It could not be written. Existing checkpoints are unchanged, except that one of the name at
            a URL is deleted first.

    Example:
        >>> import tempfile, torch
        >>> state = State(torch.nn.Linear(2, 2))
        >>> path = save_checkpoint(state, tempfile.mkdtemp() + "/ep{epoch}-ba{batch}")
        >>> path[-7:], sorted(os.listdir(path))
        ('ep0-ba0', ['layout.json', 'manifest.json', 'model.safetensors', 'state.json'])
    """
    parent, name = split_path(fill_in_run(os.fspath(path), state, "A checkpoint's path"))
    folder, name = open_folder(parent), _valid_name(name)
    snapshot = take_snapshot(
        state, extra, path=folder.at(name), weights_only=weights_only, ignore_keys=ignore_keys, copy=False
    )
    snapshot.write(folder, name, overwrite=overwrite, prepare=folder.make)
    return folder.at(name)


def save_in_all_processes(state: State, path: str, *, extra: Mapping[str, Any], weights_only: bool) -> str:
    """Save a checkpoint with :func:`save_checkpoint`; all processes have to call it, also if no model is sharded.

    Raises:
        NotImplementedError: The model is wrapped by FSDP 1; in every process.
        CheckpointSaveError: The checkpoint could not be written; in every process.
    """
    reject_fsdp1(state.model)
    if is_sharded(state.model):
        return save_checkpoint(state, path, extra=extra, weights_only=weights_only)
    with failing_in_all(path):
        saved = path if get_global_rank() else save_checkpoint(state, path, extra=extra, weights_only=weights_only)
    return from_rank_zero(saved)


def checkpoint_name(pattern: str, state: State, parameter: str) -> str:
    """Return the name of a checkpoint at the current time of a run.

    Args:
        pattern: A name with ``{run_name}``, ``{epoch}``, ``{batch}``, ``{batch_in_epoch}`` and so on in it.
        state: The run.
        parameter: The parameter with the pattern, for the error.

    Raises:
        ValueError: Another name is in braces, or the result cannot be the name of a folder.

    Example:
        >>> checkpoint_name("ep{epoch}-ba{batch}", State(model=None), "filename")
        'ep0-ba0'
    """
    return _valid_name(fill_in_run(pattern, state, parameter), parameter)


def _valid_name(name: str, parameter: str = "A checkpoint's name") -> str:
    """Return a name, and raise a ValueError if a checkpoint cannot have it."""
    if not name or name.startswith(".") or "/" in name or "\\" in name:
        raise ValueError(
            f"{parameter} must be the name of a folder, without '/' and not beginning with '.', got {shortened(name)}."
        )
    return name


def take_snapshot(
    state: State,
    extra: Mapping[str, Any] | None = None,
    *,
    path: str = "",
    weights_only: bool = False,
    ignore_keys: IgnoreKeys = None,
    copy: bool = True,
    memory: KeptMemory | None = None,
    measured: Collection[str] | None = None,
) -> Snapshot:
    """Return what this process writes of a checkpoint; if the model is sharded, all processes have to call it.

    Args:
        state: The run.
        extra: More to save, by name: plain data and tensors, such as the position in the data.
        path: The checkpoint, for errors.
        weights_only: Whether to save only the weights that the model is evaluated with, and what describes them.
        ignore_keys: What not to save.
        copy: Whether the run may change before the snapshot is written.
        memory: The copies of an earlier snapshot that has been written, to be filled again.
        measured: Labels of the data sets whose metrics were measured on these weights, and are listed; all if None.

    Raises:
        NotImplementedError: The model is wrapped by FSDP 1.
        NotSerializableError: A value is neither data nor a tensor; the error names its place.
        CheckpointSaveError: In the other processes, if it fails in one.
    """
    reject_fsdp1(state.model)
    writers = writers_of(state.model)
    if not writers.is_alone:
        reshard(state.model)  # it may have its complete weights since an evaluation
    block = evaluation_weights(state) if weights_only else contextlib.nullcontext(enter_result=False)
    with block as may_differ:
        with contextlib.nullcontext() if writers.is_alone else failing_in_all(path):
            data, tensors = contents_of(state, extra, ignore_keys, weights_only=weights_only)
            described = describe_tensors(tensors, is_first=writers.rank == 0)
        layout, writes = writers.plan(described)
        contents: dict[str, list[memoryview]] | Exception
        try:
            # Evaluation weights are in the model only within the block, and are copied in any case.
            contents = pack_files(tensors, described, writes, copy=copy or may_differ, memory=memory)
        except Exception as error:
            if writers.is_alone:
                raise
            contents = error  # raised in all processes when the checkpoint is written
    manifest = Manifest(
        files={},
        timestamp=state.timestamp.copy(),  # see Timestamp.load_state_dict
        run_name=state.run_name,
        created=datetime.datetime.now(tz=datetime.UTC).isoformat(timespec="microseconds"),
        weights_only=weights_only,
        versions={name: data["environment"][name] for name in ("python", "torch", "composer-trainer")},
        metrics=metric_values(state, measured),
    )
    return Snapshot(data, contents, manifest, layout, writers)


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
    memory = {} if memory is None else memory
    kept: KeptMemory = {}
    packed, devices = {}, set()
    for file, names in writes.items():
        # model-00001-of-00002.safetensors has tensors of the kind model.safetensors.
        kind = re.sub(r"-.*", ".safetensors", file)
        offsets = {}
        for name in names:
            tensor = tensors[kind][name]
            local = tensor.to_local() if is_dtensor(tensor) else tensor
            kept[file, name] = _on_cpu(name, local, memory.get((file, name)), copy=copy)
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
