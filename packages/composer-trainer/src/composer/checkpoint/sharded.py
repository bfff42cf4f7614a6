"""Checkpoints of sharded models: each process writes its parts of the tensors, and a layout lists where they are."""

from __future__ import annotations

import json
import math
from collections import defaultdict
from typing import TYPE_CHECKING, Any, TypeAlias

import attrs
import torch

from composer.checkpoint.errors import CheckpointError
from composer.checkpoint.manifest import LAYOUT, read_json
from composer.checkpoint.tensor_file import pack_tensors
from composer.core.serialization import from_data

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from torch import Tensor

    from composer.checkpoint.tensor_file import PackedTensors

__all__ = ["Layout", "TensorLayout", "assemble", "own_parts", "pack_parts", "plan_parts"]

_SHARDING = "DCP_SHARDING_INFO"
"""The key of a part file's metadata from which PyTorch's ``HuggingFaceStorageReader`` takes the offsets."""

Part: TypeAlias = tuple[tuple[int, ...], tuple[int, ...]]
"""The offset and shape of a process's part of a tensor."""

Described: TypeAlias = dict[str, dict[str, tuple[str, tuple[int, ...], Part]]]
"""For each kind of file, by name: the dtype, shape and part of each tensor that a process has."""


def _are_sizes(_: object, attribute: attrs.Attribute[Any], sizes: Iterable[int]) -> None:
    if any(size < 0 for size in sizes):
        raise ValueError(f"{attribute.name} must contain numbers of at least 0, got {[*sizes]}")


@attrs.frozen
class TensorLayout:
    """Where the parts of a tensor are.

    Args:
        dtype: Its dtype, ``"float32"``.
        shape: Its complete shape.
        chunks: For each part the number of its file in :attr:`Layout.files`, its offset and its shape.

    Raises:
        ValueError: The parts do not fill the tensor exactly once.
    """

    dtype: str
    shape: list[int] = attrs.field(validator=_are_sizes)
    chunks: list[tuple[int, list[int], list[int]]]

    def __attrs_post_init__(self) -> None:
        for _, offset, shape in self.chunks:
            if not len(offset) == len(shape) == len(self.shape) or any(
                start < 0 or length < 0 or start + length > whole
                for start, length, whole in zip(offset, shape, self.shape, strict=True)
            ):
                raise ValueError(f"a part of shape {shape} at {offset} is not within the shape {self.shape}")
        # Parts that do not overlap and have as many elements as the tensor fill it.
        if sum(math.prod(shape) for _, _, shape in self.chunks) != math.prod(self.shape) or self._overlaps():
            raise ValueError(f"its {len(self.chunks)} parts do not fill the shape {self.shape} exactly once")

    def _overlaps(self) -> bool:
        if len({tuple(offset) for _, offset, _ in self.chunks}) < len(self.chunks):
            return True
        # Parts of a mesh are the cells of a grid: each dimension is cut at the same places everywhere.
        for dimension, whole in enumerate(self.shape):
            cuts = sorted({offset[dimension] for _, offset, _ in self.chunks})
            next_cut = dict(zip(cuts, [*cuts[1:], whole], strict=True))
            if any(
                offset[dimension] + shape[dimension] > next_cut[offset[dimension]] for _, offset, shape in self.chunks
            ):
                return True
        return False


@attrs.frozen
class Layout:
    """The content of :data:`~composer.checkpoint.manifest.LAYOUT`.

    Args:
        files: The names of the files with parts.
        tensors: For each kind of file (``"model.safetensors"``) the tensors by name.

    Raises:
        ValueError: A part is in no file, or the parts of a tensor do not fill it.
    """

    files: list[str]
    tensors: dict[str, dict[str, TensorLayout]]

    def __attrs_post_init__(self) -> None:
        for of_kind in self.tensors.values():
            for name, layout in of_kind.items():
                if any(not 0 <= file < len(self.files) for file, _, _ in layout.chunks):
                    raise ValueError(f"{name[:80]!r} has a part in a file that does not exist")

    def to_bytes(self) -> bytes:
        """Return the file's content: JSON without spaces, as there may be millions of numbers."""
        return json.dumps(attrs.asdict(self), separators=(",", ":")).encode()

    @classmethod
    def from_bytes(cls, content: bytes, path: object) -> Layout:
        """Return the layout in a file's content.

        Raises:
            CheckpointError: It is not the layout of a checkpoint.
        """
        try:
            layout: Layout = from_data(read_json(content, path), cls)
        except ValueError as error:
            if isinstance(error, CheckpointError):
                raise
            raise CheckpointError(path, f"is not the layout of a checkpoint: {error}.") from None
        return layout


def own_parts(tensors: Mapping[str, Mapping[str, Tensor]], *, is_first: bool) -> Described:
    """Describe the parts that this process has of the tensors of each kind of file.

    Args:
        tensors: The tensors by kind and name: DTensors, of which each process has a part, and others, which are saved
            as the first process has them.
        is_first: Whether this is the first process.

    Raises:
        RuntimeError: A DTensor has partial sums instead of values.
    """
    return {
        kind: {
            name: (str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), part)
            for name, tensor in of_kind.items()
            if (part := _part_of(tensor, is_first=is_first)) is not None
        }
        for kind, of_kind in tensors.items()
    }


def _part_of(tensor: Any, *, is_first: bool) -> Part | None:
    """Return the offset and shape of this process's part of a tensor; None if it has none."""
    if not hasattr(tensor, "device_mesh"):
        return ((0,) * tensor.ndim, tuple(tensor.shape)) if is_first else None
    [chunk] = tensor.__create_chunk_list__()
    is_empty = not math.prod(chunk.sizes) and tensor.numel()
    return None if is_empty else (tuple(chunk.offsets), tuple(chunk.sizes))


def plan_parts(described: Sequence[Described]) -> tuple[Layout, list[dict[str, list[str]]]]:
    """Decide which process writes which part; every process gets the same result.

    Of the processes with equal parts, as in the replicas of a mesh, the one writes that has the fewest bytes so far.

    Args:
        described: What :func:`own_parts` returned in each process, by rank.

    Returns:
        The layout, and for each rank the names of its files by kind, with the names of the tensors to write there.

    Example:
        >>> part = lambda start: {"model.safetensors": {"weight": ("float32", (4, 2), ((start, 0), (2, 2)))}}
        >>> layout, writes = plan_parts([part(0), part(2), part(0), part(2)])
        >>> layout.files
        ['model-00001-of-00002.safetensors', 'model-00002-of-00002.safetensors']
        >>> [list(files.values()) for files in writes]
        [[['weight']], [['weight']], [], []]
    """
    holders: dict[tuple[str, str, Part], list[int]] = defaultdict(list)
    looks: dict[tuple[str, str], tuple[str, tuple[int, ...]]] = {}
    for rank, own in enumerate(described):
        for kind, of_kind in own.items():
            for name, (dtype, shape, part) in of_kind.items():
                holders[kind, name, part].append(rank)
                if looks.setdefault((kind, name), (dtype, shape)) != (dtype, shape):
                    raise ValueError(
                        f"{name!r} is {dtype}{list(shape)} in process {rank}, and has another dtype or shape "
                        "in a process before it. Build the same model in each process."
                    )
    load = [0] * len(described)
    written: dict[int, dict[str, list[tuple[str, Part]]]] = defaultdict(lambda: defaultdict(list))
    for (kind, name, part), ranks in sorted(holders.items(), key=lambda item: (-math.prod(item[0][2][1]), item[0])):
        writer = min(ranks, key=lambda rank: (load[rank], rank))
        load[writer] += math.prod(part[1]) * getattr(torch, looks[kind, name][0]).itemsize
        written[writer][kind].append((name, part))
    files: list[str] = []
    tensors: dict[str, dict[str, TensorLayout]] = {}
    writes: list[dict[str, Any]] = [{} for _ in described]
    for kind in dict.fromkeys(kind for own in described for kind in own):
        writers = [rank for rank in sorted(written) if kind in written[rank]]
        chunks: dict[str, list[tuple[int, list[int], list[int]]]] = defaultdict(list)
        stem, _, suffix = kind.partition(".")
        for place, rank in enumerate(writers, start=1):
            file = f"{stem}-{place:05}-of-{len(writers):05}.{suffix}"
            for name, (offset, shape) in written[rank][kind]:
                chunks[name].append((len(files), [*offset], [*shape]))
            writes[rank][file] = [name for name, _ in written[rank][kind]]
            files.append(file)
        tensors[kind] = {
            name: TensorLayout(looks[kind, name][0], [*looks[kind, name][1]], sorted(chunks[name]))
            for name in sorted(chunks)
        }
    return Layout(files, tensors), writes


def pack_parts(
    tensors: Mapping[str, Mapping[str, Any]], writes: Mapping[str, Sequence[str]]
) -> dict[str, PackedTensors]:
    """Return the contents of the files that this process writes; tensors are copied.

    Args:
        tensors: The tensors by kind and name.
        writes: The names of the tensors in each file, as :func:`plan_parts` returns them for this rank.
    """
    by_name = {name: tensor for of_kind in tensors.values() for name, tensor in of_kind.items()}
    packed = {}
    for file, names in writes.items():
        parts, offsets = {}, {}
        for name in names:
            tensor = by_name[name]
            offsets[name] = {"saved_offsets": [*(_part_of(tensor, is_first=True) or ((),))[0]]}
            parts[name] = tensor.to_local() if hasattr(tensor, "device_mesh") else tensor
        packed[file] = pack_tensors(parts, metadata={_SHARDING: json.dumps(offsets)})
    return packed


def assemble(layout: Layout, kind: str, read: Callable[[str], dict[str, Tensor]], path: str) -> dict[str, Tensor]:
    """Return the complete tensors of a kind.

    Args:
        layout: The layout.
        kind: The kind of file, ``"model.safetensors"``.
        read: Returns the tensors of a file by name.
        path: The checkpoint, for errors.

    Raises:
        CheckpointError: A file does not contain what the layout lists.
    """
    tensors: dict[str, Tensor] = {}
    wanted: dict[str, list[tuple[str, list[int], list[int]]]] = defaultdict(list)
    for name, one in layout.tensors[kind].items():
        for number, offset, shape in one.chunks:
            wanted[layout.files[number]].append((name, offset, shape))
    for file, parts in wanted.items():
        contents = read(file)
        if contents.keys() != {name for name, _, _ in parts}:
            raise CheckpointError(f"{path}/{file}", f"has other tensors than {LAYOUT} lists.")
        for name, offset, shape in parts:
            expected, part = layout.tensors[kind][name], contents[name]
            if [*part.shape] != shape or str(part.dtype).removeprefix("torch.") != expected.dtype:
                raise CheckpointError(f"{path}/{file}", f"has another {name[:80]!r} than {LAYOUT} lists.")
            if shape == expected.shape:
                tensors[name] = part
                continue
            if name not in tensors:
                tensors[name] = torch.empty(expected.shape, dtype=part.dtype, device="cpu")
            place = tuple(slice(start, start + length) for start, length in zip(offset, shape, strict=True))
            tensors[name][place] = part
    return {name: tensors[name] for name in layout.tensors[kind]}
