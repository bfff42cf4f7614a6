"""The manifest of a checkpoint: the names, sizes and checksums of its files, and the JSON of these.

A folder is a checkpoint if its manifest is valid and the files have the sizes that it lists; contents are compared with
their checksums when they are read (``reading.py``). Nothing that is read from a file is trusted: errors name the file.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib.metadata import version
from io import RawIOBase
from typing import Any

import attrs
import xxhash
from attrs.validators import ge, lt, matches_re

from composer.checkpoint.errors import CheckpointError, OtherReleaseError
from composer.core import Timestamp
from composer.core.checks import shortened
from composer.core.saving.codec import Record
from composer.core.saving.records import read

MANIFEST = "manifest.json"
MODEL, OPTIMIZERS, EXTRA = "model.safetensors", "optimizers.safetensors", "extra.safetensors"
"""The kinds of files with tensors, and the names of those that one process writes alone."""
PROCESS_FILES = "process.safetensors"  # the kind of those of process_file
STATE, LAYOUT = "state.json", "layout.json"
FORMAT = "composer-checkpoint"
FORMAT_VERSION = 3
"""It never goes back: 2 was used before 1 was."""
# More than the names of the files of 20,000 processes need; a larger file of that name is not read.
MAX_MANIFEST_BYTES = 8 << 20
BLOCK_BYTES = 4 << 20
"""Files with tensors have a checksum for each block of that many bytes, so that a range of a file can be checked."""
TENSORS = re.compile(r"(model|optimizers|extra|process)(-\d{5}-of-\d{5})?\.safetensors")
"""The names of files with tensors, or with cells of them, or with what belongs to a process."""
_FILE_NAME = re.compile(r"(?!manifest\.json$)[a-z][a-z0-9_-]{0,99}\.(json|safetensors)")
_CHUNK = 1 << 20


@attrs.frozen(kw_only=True)
class Manifest(Record):
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
        # Before the checksum, which another format may compute in another way.
        number = data.get("format_version")
        if type(number) is int and number != FORMAT_VERSION:
            raise _unreadable(path, data, f"is of format {number}, and this release reads format {FORMAT_VERSION}.")
        data.pop("sha256", None)
        try:
            # Byte for byte: the JSON of another program may mean the same and is rejected.
            is_unchanged = content == _signed({"format": FORMAT, **data})
        except (ValueError, RecursionError):
            is_unchanged = False
        if not is_unchanged:
            raise CheckpointError(path, "has been changed since it was written: its checksum is not that of its text.")
        if type(data.pop("format_version", None)) is not int:
            raise CheckpointError(path, f"is of format {number!r}, which is no number.")
        try:
            manifest: Manifest = read(data, cls, "it")
        except ValueError as error:
            raise _unreadable(path, data, f"is not valid: {error}") from None
        if not manifest.files:
            raise CheckpointError(path, "is not valid: files is empty.")
        return manifest


@attrs.frozen
class FileRecord(Record):
    """Size and checksum of a file of a checkpoint.

    Args:
        size: In bytes.
        xxh3_128: XXH3 of 128 bits in hexadecimal digits, as ``xxh128sum`` prints it. It detects damage and not
            forgery, which no checksum beside a file does.

    Raises:
        ValueError: A value is out of range.

    Example:
        >>> FileRecord(size=7, xxh3_128="917e1274274fc195b27a2d2388d9568c").size
        7
    """

    size: int = attrs.field(validator=[ge(0), lt(1 << 62)])
    xxh3_128: str = attrs.field(validator=matches_re("[0-9a-f]{32}"))


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


def process_file(rank: int, world_size: int) -> str:
    """Return the name of the file with what belongs to a process; that of the first one is in :data:`STATE`."""
    return f"process-{rank + 1:05}-of-{world_size:05}.safetensors"


def read_into(source: RawIOBase, path: object, position: int, memory: memoryview) -> None:
    """Fill memory with the bytes at a position of an open file, whose path is for the error.

    Raises:
        CheckpointError: The file ends before.

    Example:
        >>> import io
        >>> content = bytearray(3)
        >>> read_into(io.BytesIO(b"header"), "state.json", 1, memoryview(content))
        >>> content
        bytearray(b'ead')
    """
    source.seek(position)
    while memory:
        count = source.readinto(memory)
        if not count:
            raise CheckpointError(path, "has been changed while it was read: it ends before that.")
        memory = memory[count:]


def write_json(data: Any) -> bytes:
    r"""Return data as JSON that is easy to read; equal data gives equal bytes.

    Example:
        >>> write_json({"b": 1, "a": [0.5, None]})
        b'{\n "a": [\n  0.5,\n  null\n ],\n "b": 1\n}\n'
    """
    return (json.dumps(data, sort_keys=True, indent=1, allow_nan=False) + "\n").encode()


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

    Only the name decides, as a checkpoint may have no manifest.

    Example:
        >>> foreign_files(["manifest.json", "state.json", ".DS_Store", "notes.txt"])
        ['notes.txt']
    """
    others = {*names} - {MANIFEST, LAYOUT, STATE}
    return sorted(name for name in others if not name.startswith(".") and not TENSORS.fullmatch(name))


def _unreadable(path: object, data: dict[str, Any], reason: str) -> CheckpointError:
    """Return the error of a manifest that was not damaged, unless this release has written it."""
    run_name, release = data.get("run_name"), dictionary(data.get("versions")).get("composer-trainer")
    if data.get("format_version", FORMAT_VERSION) == FORMAT_VERSION and release in (None, version("composer-trainer")):
        return CheckpointError(path, reason)
    return OtherReleaseError(path, reason, run_name if isinstance(run_name, str) else None, str(release)[:40])


def _signed(data: dict[str, Any]) -> bytes:
    return write_json(data | {"sha256": hashlib.sha256(write_json(data)).hexdigest()})
