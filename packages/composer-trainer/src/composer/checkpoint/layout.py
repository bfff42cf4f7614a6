"""Where the tensors of a checkpoint are: the content of ``layout.json``, of which nothing is trusted when it is read.

The regions that processes have of a tensor are the cells of a grid that fills it, and each cell is in one file, of the
format of safetensors. A tensor that is not sharded has one cell. :mod:`~composer.checkpoint.planning` decides which
process writes which cell, and :mod:`~composer.checkpoint.reading` reads those that a process needs.
"""

from __future__ import annotations

import bisect
import itertools
import json
import math
from collections.abc import Iterator, Sequence
from typing import Any

import attrs
import torch

from composer.checkpoint.errors import CheckpointError
from composer.checkpoint.manifest import read_json
from composer.functional.dtensors import Region

__all__ = ["DTYPES", "Layout", "TensorFile", "TensorLayout", "is_without_gaps"]

DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in vars(torch).values()
    if isinstance(dtype, torch.dtype) and not str(dtype).startswith("torch.q")
}
"""The dtypes of tensors that are saved, by name."""


@attrs.frozen
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

    def to_bytes(self) -> bytes:
        """Return the file's content: JSON without spaces, as there may be millions of numbers."""
        return json.dumps(
            {"files": self.files, "tensors": self.tensors}, separators=(",", ":"), default=_fields
        ).encode()

    @classmethod
    def from_bytes(cls, content: bytes, path: object) -> Layout:
        """Return the layout in a file's content.

        Raises:
            CheckpointError: It is not the layout of a checkpoint.
        """
        data = read_json(content, path)
        try:
            # Not by from_data, which takes ten seconds for the numbers of 10,000 tensors in 64 processes.
            data["files"] = {name: TensorFile(**one) for name, one in data["files"].items()}
            data["tensors"] = {
                kind: {name: TensorLayout(**one) for name, one in of_kind.items()}
                for kind, of_kind in data["tensors"].items()
            }
            return cls(**data)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise CheckpointError(path, f"is not the layout of a checkpoint: {error}.") from None


@attrs.frozen
class TensorFile:
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
        if not all(isinstance(one, list) for one in lists) or not all(
            type(number) is int and 0 <= number < 1 << 62 for number in itertools.chain.from_iterable(lists)
        ):
            raise ValueError("it must have lists of numbers of at least 0")
        if not isinstance(self.dtype, str) or self.dtype not in DTYPES:
            raise ValueError(f"torch has no dtype {self.dtype!r:.80}")
        is_grid = len(self.cuts) == len(self.shape) and all(
            cuts[:1] == [0] and all(a < b for a, b in itertools.pairwise([*cuts, max(whole, 1)]))
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

    def cells(self, region: Region) -> Iterator[tuple[int, int, Region]]:
        """Yield file, position and region of each cell that has elements of a region of the tensor."""
        chosen = []
        for cuts, whole, start, length in zip(self.cuts, self.shape, *region, strict=True):
            first, last = bisect.bisect_right(cuts, start) - 1, bisect.bisect_left(cuts, start + length)
            ends = [*cuts[1:], whole]
            chosen.append([(index, cuts[index], ends[index] - cuts[index]) for index in range(first, last)])
        for cell in itertools.product(*chosen):
            number = 0
            for (index, _, _), cuts in zip(cell, self.cuts, strict=True):
                number = number * len(cuts) + index
            yield (
                self.files[number],
                self.positions[number],
                Region(tuple(start for _, start, _ in cell), tuple(length for _, _, length in cell)),
            )


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
