"""The manifest of a checkpoint, and what all of its files have in common: names, JSON and checksums.

A folder is a checkpoint if its manifest is valid and the files have the sizes that it lists; contents are compared with
their checksums when they are read. Nothing that is read from a file is trusted: errors name the file.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import attrs
import xxhash
from attrs.validators import ge, lt, matches_re

from composer.checkpoint.errors import CheckpointError
from composer.core import Timestamp
from composer.core.checks import shortened
from composer.core.serialization import from_data

__all__ = ["Content", "FileRecord", "Manifest", "dictionary", "foreign_files", "read_json", "write_json"]

MANIFEST = "manifest.json"
MODEL, OPTIMIZERS, EXTRA = "model.safetensors", "optimizers.safetensors", "extra.safetensors"
"""The kinds of files with tensors, and the names of those that one process writes alone."""
STATE, LAYOUT = "state.json", "layout.json"
FORMAT = "composer-checkpoint"
FORMAT_VERSION = 1
# More than the names of the files of 20,000 processes need; a larger file of that name is not read.
MAX_MANIFEST_BYTES = 8 << 20
MAX_STATE_BYTES = 1 << 30
"""A larger :data:`STATE` is neither written nor read, as its JSON would take many times as much memory."""
BLOCK_BYTES = 4 << 20
"""Files with tensors have a checksum for each block of that many bytes, so that a range of a file can be checked."""
TENSORS = re.compile(r"(model|optimizers|extra)(-\d{5}-of-\d{5})?\.safetensors")
"""The names of files with tensors, or with cells of them."""
_FILE_NAME = re.compile(r"(?!manifest\.json$)[a-z][a-z0-9_-]{0,99}\.(json|safetensors)")
_CHUNK = 1 << 20


@attrs.frozen(kw_only=True)
class Manifest:
    """What a checkpoint contains. The file is written last, with a checksum of its own.

    Args:
        files: The other files by name.
        timestamp: The run's clock.
        run_name: The run's name.
        created: When it was written, in UTC, in the format of ISO 8601.
        weights_only: Whether it has the model's weights only, from which training cannot resume.
        versions: Of Python and of the packages that wrote it.
        metrics: The values of the last evaluation and epoch, ``{"metrics/eval/MulticlassAccuracy": 0.75}``; None
            where one is not a finite number.

    Raises:
        ValueError: A file's name is not one that a checkpoint has, or a metric is neither a finite float nor None.

    Example:
        >>> manifest = Manifest(files={"state.json": FileRecord(2, "0" * 32)}, timestamp=Timestamp(batch=5))
        >>> Manifest.from_bytes(manifest.to_bytes(), "manifest.json") == manifest
        True
    """

    files: dict[str, FileRecord] = attrs.field()
    timestamp: Timestamp
    run_name: str = "run"
    created: str = ""
    weights_only: bool = False
    versions: dict[str, str] = attrs.field(factory=dict)
    metrics: dict[str, float | None] = attrs.field(factory=dict)

    @files.validator
    def _check_file_names(self, _: object, names: Iterable[str]) -> None:
        for name in names:
            if not _FILE_NAME.fullmatch(name):
                raise ValueError(f"{name[:80]!r} is no name of a file in a checkpoint.")

    @metrics.validator
    def _check_metrics(self, _: object, metrics: Mapping[str, Any]) -> None:
        for name, value in metrics.items():
            if value is not None and not (isinstance(value, float) and math.isfinite(value)):
                raise ValueError(f"metrics: {name[:80]!r} must be a finite float or None, got {shortened(value)}.")

    @property
    def size(self) -> int:
        """The checkpoint's size in bytes, without the manifest."""
        return sum(record.size for record in self.files.values())

    def to_bytes(self) -> bytes:
        """Return the file's content."""
        own = attrs.asdict(self, filter=lambda field, _: field.name != "timestamp")
        timestamp = self.timestamp.state_dict()
        return _signed({"format": FORMAT, "format_version": FORMAT_VERSION, **own, "timestamp": timestamp})

    @classmethod
    def from_bytes(cls, content: bytes, path: object) -> Manifest:
        """Return the manifest in a file's content.

        Args:
            content: The file's content.
            path: The file, for the error.

        Raises:
            CheckpointError: It is not the manifest of a checkpoint, or has been changed since it was written.
        """
        data = read_json(content, path)
        if data.pop("format", None) != FORMAT:
            raise CheckpointError(path, "is not the manifest of a composer checkpoint: its 'format' is missing.")
        data.pop("sha256", None)
        try:
            # Byte for byte: the JSON of another program may mean the same and is rejected.
            is_unchanged = content == _signed({"format": FORMAT, **data})
        except (ValueError, RecursionError):
            is_unchanged = False
        if not is_unchanged:
            raise CheckpointError(path, "has been changed since it was written: its checksum is not that of its text.")
        version = data.pop("format_version", None)
        if type(version) is not int or version != FORMAT_VERSION:
            raise CheckpointError(
                path, f"is of format {version!r}, and this release of composer-trainer reads format {FORMAT_VERSION}."
            )
        try:
            manifest: Manifest = from_data(data, cls, "it")
        except ValueError as error:
            raise CheckpointError(path, f"is not valid: {error}") from None
        if not manifest.files:
            raise CheckpointError(path, "is not valid: files is empty.")
        return manifest


@attrs.frozen
class FileRecord:
    """Size and checksum of a file of a checkpoint.

    Args:
        size: In bytes.
        xxh3_128: XXH3 of 128 bits in hexadecimal digits, as ``xxh128sum`` prints it. It detects damage and not
            forgery, which no checksum beside a file does.

    Raises:
        ValueError: A value is out of range.

    Example:
        >>> FileRecord.of([b"content"])
        FileRecord(size=7, xxh3_128='917e1274274fc195b27a2d2388d9568c')
    """

    size: int = attrs.field(validator=[ge(0), lt(1 << 62)])
    xxh3_128: str = attrs.field(validator=matches_re("[0-9a-f]{32}"))

    @classmethod
    def of(cls, pieces: Iterable[bytes | memoryview]) -> FileRecord:
        """Return the record of a content that comes in pieces."""
        content = Content([memoryview(piece) for piece in pieces])
        for _ in content:
            pass
        return content.record


@attrs.define(eq=False)
class Content:
    """The content of a file in pieces, which is hashed while it is iterated over, as by what writes it.

    A further iteration, as after a failed attempt to write, hashes all of it again.

    Args:
        pieces: The content.

    Attributes:
        record: The file's record; available after an iteration over all pieces.
        blocks: The XXH3 of each block of ``BLOCK_BYTES`` bytes in hexadecimal digits, one after the other.

    Example:
        >>> content = Content([memoryview(b"header"), memoryview(b"tensors")])
        >>> b"".join(content)
        b'headertensors'
        >>> content.record.size, content.blocks == content.record.xxh3_128
        (13, True)
    """

    pieces: Sequence[memoryview]
    record: FileRecord = attrs.field(init=False)
    blocks: str = attrs.field(init=False)

    def __iter__(self) -> Iterator[memoryview]:
        file, block, size, blocks = xxhash.xxh3_128(), xxhash.xxh3_128(), 0, []
        for piece in self.pieces:
            begin = 0
            while begin < len(piece):
                # So small that the processor's cache still has it when it is written.
                chunk = piece[begin : begin + min(_CHUNK, BLOCK_BYTES - size % BLOCK_BYTES)]
                begin, size = begin + len(chunk), size + len(chunk)
                file.update(chunk)
                block.update(chunk)
                if not size % BLOCK_BYTES:
                    blocks.append(block.hexdigest())
                    block.reset()
                yield chunk
        if size % BLOCK_BYTES:
            blocks.append(block.hexdigest())
        self.record, self.blocks = FileRecord(size, file.hexdigest()), "".join(blocks)


def write_json(data: Any, *, sort: bool = True) -> bytes:
    r"""Return data as JSON; if sorted, equal data gives equal bytes.

    Example:
        >>> write_json({"b": 1, "a": [0.5, None]})
        b'{\n "a": [\n  0.5,\n  null\n ],\n "b": 1\n}\n'
    """
    return (json.dumps(data, sort_keys=sort, indent=1, allow_nan=False) + "\n").encode()


def read_json(content: bytes, path: object) -> dict[str, Any]:
    """Return the dictionary in a JSON file of a checkpoint.

    Args:
        content: The file's content.
        path: The file, for the error.

    Raises:
        CheckpointError: It is not JSON, has a repeated name, or is not a dictionary.

    Example:
        >>> read_json(b'{"a": 1, "a": 2}', "state.json")
        Traceback (most recent call last):
        composer.checkpoint.errors.CheckpointError: state.json is not the JSON of a checkpoint: 'a' is there twice.
    """
    try:
        data = json.loads(content.decode(), object_pairs_hook=_without_repeats, parse_constant=_reject_constant)
    except RecursionError:
        raise CheckpointError(path, "is not the JSON of a checkpoint: it is nested too deep.") from None
    except ValueError as error:
        text = str(error).rstrip(".")
        raise CheckpointError(path, f"is not the JSON of a checkpoint: {text:.200}.") from None
    if not isinstance(data, dict):
        raise CheckpointError(path, f"must hold a dictionary, got {type(data).__name__}.")
    return data


def dictionary(value: Any) -> dict[str, Any]:
    """Return what was read as a dictionary; an empty one if it is none."""
    return value if isinstance(value, dict) else {}


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    data = dict(pairs)
    if len(data) < len(pairs):
        [(repeated, _)] = Counter(name for name, _ in pairs).most_common(1)
        raise ValueError(f"{repeated[:80]!r} is there twice")
    return data


def _reject_constant(constant: str) -> None:
    raise ValueError(f"{constant} is no number of JSON")


def foreign_files(names: Iterable[str]) -> list[str]:
    """Return which files in a checkpoint are not ours and not hidden, so that nothing deletes them.

    Example:
        >>> foreign_files(["manifest.json", "state.json", ".DS_Store", "notes.txt"])
        ['notes.txt']
    """
    others = {*names} - {MANIFEST, LAYOUT, STATE}
    return sorted(name for name in others if not name.startswith(".") and not TENSORS.fullmatch(name))


def _signed(data: dict[str, Any]) -> bytes:
    return write_json(data | {"sha256": hashlib.sha256(write_json(data)).hexdigest()})
