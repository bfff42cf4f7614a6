"""The manifest: what makes a folder a checkpoint."""

from __future__ import annotations

import hashlib
import re
import warnings
from typing import TYPE_CHECKING, Any

import attrs
import xxhash

from composer.checkpoint.errors import CheckpointError
from composer.checkpoint.plain_json import read_json, write_json
from composer.core import Timestamp
from composer.core.checks import abridged

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = [
    "FILE_NAMES",
    "FORMAT",
    "FORMAT_VERSION",
    "MANIFEST",
    "MAX_MANIFEST_BYTES",
    "FileRecord",
    "Manifest",
    "foreign_files",
    "new_hash",
    "warn_of_unknown",
]

MANIFEST = "manifest.json"
FILE_NAMES = ("model.safetensors", "optimizers.safetensors", "extra.safetensors", "state.json")
FORMAT_VERSION = 2
MAX_MANIFEST_BYTES = 16 << 20
FORMAT = "composer-checkpoint"
_FILE_NAME = re.compile(r"[a-z][a-z0-9_-]{0,99}\.(json|safetensors)")
_DIGEST = re.compile(r"[0-9a-f]+")
_CHUNK = 1 << 20
_DIGITS = {"sha256": 64, "xxh3_128": 32}


@attrs.frozen
class FileRecord:
    """A file of a checkpoint. Its content has two checksums, as SHA-256 takes longer than all else that loading does.

    Args:
        size: In bytes.
        sha256: SHA-256 in hexadecimal digits, which any system can compute; compared when a checkpoint is verified.
        xxh3_128: XXH3 of 128 bits in hexadecimal digits, compared at every load. Checkpoints of format 1 have none.

    Example:
        >>> FileRecord.of([b"content"]).sha256[:8]
        'ed7002b4'
    """

    size: int
    sha256: str
    xxh3_128: str | None = None

    @classmethod
    def of(cls, pieces: Iterable[bytes | memoryview]) -> FileRecord:
        """Return the record of a content that comes in pieces."""
        hashes, size = {kind: new_hash(kind) for kind in _DIGITS}, 0
        for piece in pieces:
            size += len(piece)
            for begin in range(0, len(piece), _CHUNK):  # so small that the second hash finds it in the cache
                for one in hashes.values():
                    one.update(piece[begin : begin + _CHUNK])
        return cls(size, **{kind: one.hexdigest() for kind, one in hashes.items()})

    def checksums(self, *, all_of_them: bool = False) -> dict[str, str]:
        """Return what a content is compared with: the quickest checksum there is, or all, by their kinds."""
        known = {"sha256": self.sha256} if self.xxh3_128 is None else {"xxh3_128": self.xxh3_128}
        return known | {"sha256": self.sha256} if all_of_them else known


def new_hash(kind: str) -> Any:
    """Return an object like those of :mod:`hashlib` for a kind of checksum."""
    return xxhash.xxh3_128() if kind == "xxh3_128" else hashlib.sha256()


def warn_of_unknown(checkpoint: object, names: Iterable[str]) -> None:
    """Warn of files in a checkpoint that its manifest does not list, such as ``.DS_Store``: nothing reads them."""
    unknown = sorted(names)
    if unknown:
        shown = abridged(", ".join(map(repr, unknown)))
        warnings.warn(
            f"{checkpoint} holds what its manifest does not list, and that is ignored: {shown}.",
            UserWarning,
            stacklevel=4,
        )


def foreign_files(names: Iterable[str]) -> list[str]:
    """Return which files in a checkpoint somebody else may want to keep: those not ours, and not hidden.

    Example:
        >>> foreign_files(["manifest.json", "state.json", ".DS_Store", "notes.txt"])
        ['notes.txt']
    """
    return sorted(name for name in {*names} - {MANIFEST, *FILE_NAMES} if not name.startswith("."))


@attrs.frozen(kw_only=True)
class Manifest:
    """What a checkpoint holds; the file is written last, with a checksum of its own.

    Args:
        files: The other files by name.
        timestamp: The run's clock.
        run_name: The run's name.
        created: When it was written, in UTC, as in ISO 8601.
        weights_only: Whether it holds the model's weights and nothing to go on training with.
        versions: Of Python and of the packages that wrote it.
        metrics: The values of the last evaluation and epoch, ``{"metrics/eval/MulticlassAccuracy": 0.75}``; None
            where one is not a finite number.

    Example:
        >>> manifest = Manifest(files={"state.json": FileRecord(2, "0" * 64)}, timestamp=Timestamp(batch=5))
        >>> Manifest.from_bytes(manifest.to_bytes(), "manifest.json") == manifest
        True
    """

    files: dict[str, FileRecord]
    timestamp: Timestamp
    run_name: str = "run"
    created: str = ""
    weights_only: bool = False
    versions: dict[str, str] = attrs.field(factory=dict)
    metrics: dict[str, float | None] = attrs.field(factory=dict)

    @property
    def size(self) -> int:
        """The checkpoint's size in bytes, without the manifest."""
        return sum(record.size for record in self.files.values())

    def to_bytes(self) -> bytes:
        """Return the file's content."""
        own = attrs.asdict(self, filter=lambda field, value: field.name != "timestamp" and value is not None)
        data = {
            "format": FORMAT,
            "format_version": FORMAT_VERSION,
            **own,
            "timestamp": self.timestamp.state_dict(),
        }
        return write_json(data | {"sha256": _digest(data)})

    @classmethod
    def from_bytes(cls, content: bytes, path: object) -> Manifest:
        """Return the manifest that a file's content says.

        Args:
            content: The file's content.
            path: Where it comes from, for the error.

        Raises:
            CheckpointError: It is not the manifest of a checkpoint, or has been changed since it was written.
        """
        data = read_json(content, path)
        if data.get("format") != FORMAT:
            raise CheckpointError(path, "is not the manifest of a composer checkpoint: its 'format' is missing.")
        version = data.get("format_version")
        if type(version) is int and version > FORMAT_VERSION:
            raise CheckpointError(
                path, f"is of format {version}, and this release reads up to {FORMAT_VERSION}; update composer-trainer."
            )
        if not _is_unchanged(data, content):
            raise CheckpointError(path, "has been changed since it was written: its checksum is not that of its text.")
        del data["sha256"]
        return _from_data(data, path)


def _is_unchanged(data: dict[str, Any], content: bytes) -> bool:
    claimed = {name: value for name, value in data.items() if name != "sha256"}
    try:
        # Byte for byte: a change of what does not matter to JSON is a change all the same.
        return content == write_json(claimed | {"sha256": _digest(claimed)})
    except (ValueError, RecursionError):
        return False


def _digest(data: dict[str, Any]) -> str:
    return hashlib.sha256(write_json(data)).hexdigest()


def _from_data(data: dict[str, Any], path: object) -> Manifest:
    expected = {"format", "format_version", *(field.name for field in attrs.fields(Manifest))}
    problems = [f"{name!r} is missing" for name in sorted(expected - data.keys())]
    problems += [f"{name!r} is unknown" for name in sorted(data.keys() - expected)]
    if not problems:
        problems = [
            f"{name!r} is not as it has to be" for name, is_right in _CHECKS.items() if not is_right(data[name])
        ]
    if problems:
        raise CheckpointError(path, f"is not whole: {', '.join(problems)}.")
    _check_file_names(data["files"], path)
    try:
        timestamp = Timestamp.from_state_dict(data["timestamp"])
    except (ValueError, TypeError, OverflowError) as error:
        raise CheckpointError(path, f"has no valid 'timestamp': {error}") from None
    values = {field.name: data[field.name] for field in attrs.fields(Manifest)}
    files = {name: FileRecord(**record) for name, record in data["files"].items()}
    return Manifest(**values | {"timestamp": timestamp, "files": files})


def _check_file_names(names: dict[str, Any], path: object) -> None:
    for name in names:
        if not _FILE_NAME.fullmatch(name) or name == MANIFEST:
            raise CheckpointError(path, f"lists {name[:80]!r}, which is no name of a file in a checkpoint.")


def _is_record(record: Any) -> bool:
    return (
        isinstance(record, dict)
        and {"size", "sha256"} <= record.keys() <= {"size", *_DIGITS}
        and type(record["size"]) is int
        and 0 <= record["size"] < 1 << 62
        and all(_is_digest(record[kind], digits) for kind, digits in _DIGITS.items() if kind in record)
    )


def _is_digest(value: Any, digits: int) -> bool:
    return isinstance(value, str) and len(value) == digits and bool(_DIGEST.fullmatch(value))


def _is_dict_of(check: Any) -> Any:
    return lambda value: isinstance(value, dict) and all(map(check, value.values()))


_CHECKS: dict[str, Any] = {
    "format_version": lambda value: type(value) is int and value >= 1,
    "files": lambda value: _is_dict_of(_is_record)(value) and bool(value),
    "timestamp": lambda value: isinstance(value, dict),
    "run_name": lambda value: isinstance(value, str),
    "created": lambda value: isinstance(value, str),
    "weights_only": lambda value: isinstance(value, bool),
    "versions": _is_dict_of(lambda value: isinstance(value, str)),
    "metrics": _is_dict_of(lambda value: value is None or type(value) is float),
}
