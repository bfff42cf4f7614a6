"""The manifest, which makes a folder a checkpoint, and the JSON of checkpoints."""

from __future__ import annotations

import hashlib
import json
import math
import re
import warnings
from collections import Counter
from typing import TYPE_CHECKING, Any

import attrs
import xxhash
from attrs.validators import ge, lt, matches_re, optional

from composer.checkpoint.errors import CheckpointError
from composer.core import Timestamp  # noqa: TC001  (the converter reads the annotation)
from composer.core.checks import abridged, shortened
from composer.core.serialization import field_types, from_data

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

__all__ = [
    "BLOCK_BYTES",
    "EXTRA",
    "FORMAT",
    "FORMAT_VERSION",
    "LAYOUT",
    "MANIFEST",
    "MAX_MANIFEST_BYTES",
    "MODEL",
    "OPTIMIZERS",
    "PART",
    "STATE",
    "FileRecord",
    "Manifest",
    "PartContent",
    "foreign_files",
    "read_json",
    "warn_of_unknown",
    "write_json",
]

MANIFEST = "manifest.json"
FILE_NAMES = MODEL, OPTIMIZERS, EXTRA, STATE = (
    "model.safetensors",
    "optimizers.safetensors",
    "extra.safetensors",
    "state.json",
)
LAYOUT = "layout.json"
"""The file that lists where the parts of sharded tensors are; such a checkpoint is of format 3."""
FORMAT = "composer-checkpoint"
FORMAT_VERSION = 2
SHARDED_VERSION = 3
MAX_MANIFEST_BYTES = 16 << 20
BLOCK_BYTES = 4 << 20
"""The files of format 3 have a checksum for each block of that many bytes."""
PART = re.compile(r"(model|optimizers|extra)-\d{5}-of-\d{5}\.safetensors")
"""The names of files with parts of sharded tensors."""
_FILE_NAME = re.compile(r"(?!manifest\.json$)[a-z][a-z0-9_-]{0,99}\.(json|safetensors)")
_CHUNK = 1 << 20


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
        data = json.loads(content.decode(), object_pairs_hook=_without_repeats, parse_constant=_refuse_constant)
    except RecursionError:
        raise CheckpointError(path, "is not the JSON of a checkpoint: it is nested too deep.") from None
    except ValueError as error:
        text = str(error).rstrip(".")
        raise CheckpointError(path, f"is not the JSON of a checkpoint: {text:.200}.") from None
    if not isinstance(data, dict):
        raise CheckpointError(path, f"must hold a dictionary, got {type(data).__name__}.")
    return data


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    data = dict(pairs)
    if len(data) < len(pairs):
        [(repeated, _)] = Counter(name for name, _ in pairs).most_common(1)
        raise ValueError(f"{repeated[:80]!r} is there twice")
    return data


def _refuse_constant(constant: str) -> None:
    raise ValueError(f"{constant} is no number of JSON")


@attrs.frozen
class FileRecord:
    """A file of a checkpoint: its size and checksums. Loading compares XXH3, as SHA-256 takes longer than the rest.

    Args:
        size: In bytes.
        sha256: SHA-256 in hexadecimal digits, which any system can compute; compared when a checkpoint is verified.
            None for the parts of sharded tensors, whose writing it would double.
        xxh3_128: XXH3 of 128 bits in hexadecimal digits, compared at every load. Checkpoints of format 1 have none.

    Raises:
        ValueError: A value is out of range, or there is no checksum.

    Example:
        >>> FileRecord.of([b"content"]).sha256[:8]
        'ed7002b4'
    """

    size: int = attrs.field(validator=[ge(0), lt(1 << 62)])
    sha256: str | None = attrs.field(validator=optional(matches_re("[0-9a-f]{64}")))
    xxh3_128: str | None = attrs.field(default=None, validator=optional(matches_re("[0-9a-f]{32}")))

    def __attrs_post_init__(self) -> None:
        if self.sha256 is None and self.xxh3_128 is None:
            raise ValueError("'sha256' or 'xxh3_128' is required.")

    @classmethod
    def of(cls, pieces: Iterable[bytes | memoryview]) -> FileRecord:
        """Return the record of a content that comes in pieces."""
        sha256, xxh3, size = hashlib.sha256(), xxhash.xxh3_128(), 0
        for piece in pieces:
            for begin in range(0, len(piece), _CHUNK):  # small enough for the next hash to find it in the cache
                chunk = piece[begin : begin + _CHUNK]
                size += len(chunk)
                sha256.update(chunk)
                xxh3.update(chunk)
        return cls(size, sha256.hexdigest(), xxh3.hexdigest())

    def hashes(self, *, thoroughly: bool = False) -> dict[str, Any]:
        """Return new objects like those of :mod:`hashlib` for the fastest checksum of the record, or for all."""
        hashes: dict[str, Any] = {} if self.xxh3_128 is None else {"xxh3_128": xxhash.xxh3_128()}
        if self.sha256 is not None and (thoroughly or not hashes):
            hashes["sha256"] = hashlib.sha256()
        return hashes

    def compare(self, path: object, hashes: Mapping[str, Any]) -> None:
        """Compare :meth:`hashes`, updated with the content of the file at ``path``, with the record.

        Raises:
            CheckpointError: The content is not the one that was written.
        """
        for kind, digest in hashes.items():
            if digest.hexdigest() != getattr(self, kind):
                raise CheckpointError(path, f"has been changed since it was written: its {kind} is not the manifest's.")


@attrs.define(eq=False)
class PartContent:
    """The content of a file of parts in pieces, each of which is hashed when it is iterated over.

    The pieces are so small that they are copied from the processor's cache afterwards. A further iteration hashes all
    of them again.

    Args:
        pieces: The content.

    Attributes:
        blocks: The XXH3 of each block of ``BLOCK_BYTES`` bytes in hexadecimal digits, one after the other; empty before
            an iteration over all pieces.

    Example:
        >>> content = PartContent([memoryview(b"header"), memoryview(b"parts")])
        >>> b"".join(content)
        b'headerparts'
        >>> content.record.size, content.record.sha256, content.blocks == content.record.xxh3_128
        (11, None, True)
    """

    pieces: Sequence[memoryview]
    _record: FileRecord | None = attrs.field(init=False, default=None)
    blocks: str = attrs.field(init=False, default="")

    @property
    def record(self) -> FileRecord:
        """The file's record.

        Raises:
            RuntimeError: There was no iteration over all pieces yet.
        """
        if self._record is None:
            raise RuntimeError("Not all pieces have been written, and so the file has no checksum.")
        return self._record

    def __iter__(self) -> Iterator[memoryview]:
        file, block, size, blocks = xxhash.xxh3_128(), xxhash.xxh3_128(), 0, []
        for piece in self.pieces:
            begin = 0
            while begin < len(piece):
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
        self._record, self.blocks = FileRecord(size, None, file.hexdigest()), "".join(blocks)


def _check_file_names(_: object, __: object, names: Iterable[str]) -> None:
    for name in names:
        if not _FILE_NAME.fullmatch(name):
            raise ValueError(f"{name[:80]!r} is no name of a file in a checkpoint.")


def _check_metrics(_: object, __: object, metrics: Mapping[str, Any]) -> None:
    for name, value in metrics.items():
        if value is not None and not (isinstance(value, float) and math.isfinite(value)):
            raise ValueError(f"metrics: {name[:80]!r} must be a finite float or None, got {shortened(value)}.")


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
        >>> manifest = Manifest(files={"state.json": FileRecord(2, "0" * 64)}, timestamp=Timestamp(batch=5))
        >>> Manifest.from_bytes(manifest.to_bytes(), "manifest.json") == manifest
        True
    """

    files: dict[str, FileRecord] = attrs.field(validator=_check_file_names)
    timestamp: Timestamp
    run_name: str = "run"
    created: str = ""
    weights_only: bool = False
    versions: dict[str, str] = attrs.field(factory=dict)
    metrics: dict[str, float | None] = attrs.field(factory=dict, validator=_check_metrics)

    @property
    def size(self) -> int:
        """The checkpoint's size in bytes, without the manifest."""
        return sum(record.size for record in self.files.values())

    def to_bytes(self) -> bytes:
        """Return the file's content."""
        own = attrs.asdict(self, filter=lambda field, value: field.name != "timestamp" and value is not None)
        timestamp = self.timestamp.state_dict()
        version = SHARDED_VERSION if LAYOUT in self.files else FORMAT_VERSION
        return _signed({"format": FORMAT, "format_version": version, **own, "timestamp": timestamp})

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
        version = data.get("format_version")
        if type(version) is int and version > SHARDED_VERSION:
            raise CheckpointError(
                path,
                f"is of format {version}, and this release reads up to {SHARDED_VERSION}; update composer-trainer.",
            )
        data.pop("sha256", None)
        try:
            # Byte for byte: the JSON of another program may mean the same and is refused.
            is_unchanged = content == _signed({"format": FORMAT, **data})
        except (ValueError, RecursionError):
            is_unchanged = False
        if not is_unchanged:
            raise CheckpointError(path, "has been changed since it was written: its checksum is not that of its text.")
        data.pop("format_version", None)
        if type(version) is not int or version < 1:
            raise CheckpointError(
                path, f"is not valid: 'format_version' must be a number of at least 1, got {version!r}."
            )
        types = field_types(cls)
        problems = [f"{name!r} is missing" for name in sorted(types.keys() - data.keys())]
        problems += [f"{name!r} is unknown" for name in sorted(data.keys() - types.keys())]
        if problems:
            raise CheckpointError(path, f"is not valid: {', '.join(problems)}.")
        for name, record in data["files"].items() if isinstance(data["files"], dict) else ():
            if isinstance(record, dict):
                if None in record.values():
                    raise CheckpointError(path, f"is not valid: files[{name!r}] has a null, which is never written.")
                record.setdefault("xxh3_128")  # records of format 1 have no XXH3
                if PART.fullmatch(name):
                    record.setdefault("sha256")
        try:
            manifest = cls(**{name: from_data(data[name], kind, name) for name, kind in types.items()})
        except ValueError as error:
            raise CheckpointError(path, f"is not valid: {error}") from None
        if not manifest.files:
            raise CheckpointError(path, "is not valid: files is empty.")
        return manifest


def _signed(data: dict[str, Any]) -> bytes:
    return write_json(data | {"sha256": hashlib.sha256(write_json(data)).hexdigest()})


def warn_of_unknown(checkpoint: object, names: Iterable[str]) -> None:
    """Warn of files in a checkpoint that its manifest does not list, such as ``.DS_Store``: they are ignored."""
    unknown = sorted(names)
    if unknown:
        shown = abridged(", ".join(map(repr, unknown)))
        warnings.warn(
            f"{checkpoint} contains files that its manifest does not list, and they are ignored: {shown}.",
            UserWarning,
            stacklevel=4,
        )


def foreign_files(names: Iterable[str]) -> list[str]:
    """Return which files in a checkpoint folder are not ours and not hidden, so that nothing deletes them.

    Example:
        >>> foreign_files(["manifest.json", "state.json", ".DS_Store", "notes.txt"])
        ['notes.txt']
    """
    others = {*names} - {MANIFEST, LAYOUT, *FILE_NAMES}
    return sorted(name for name in others if not name.startswith(".") and not PART.fullmatch(name))
