"""The interface of a local or remote folder of checkpoints, and what is equal in both: reading and checking.

:func:`~composer.checkpoint.local.open_folder` returns the folder of a path or URL.
"""

from __future__ import annotations

import os
import re
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, TypeAlias

import attrs
import xxhash

from composer.checkpoint.errors import CheckpointError, CheckpointSaveError
from composer.checkpoint.manifest import (
    MANIFEST,
    MAX_MANIFEST_BYTES,
    MAX_STATE_BYTES,
    STATE,
    Manifest,
    foreign_files,
    read_json,
)
from composer.core.checks import abridged

__all__ = ["Folder", "ReadInto", "check_folder", "is_remote", "local_path", "split_path"]

_PROTOCOL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+://")
_CHUNK = 1 << 20

ReadInto: TypeAlias = Callable[[int, memoryview], None]
"""Fills memory with the bytes at a position of a file."""


class Folder(ABC):
    """A local or remote folder of checkpoints.

    What reads raises a :class:`CheckpointError`, and what writes a :class:`CheckpointSaveError`.
    """

    @abstractmethod
    def at(self, name: str) -> str:
        """Return the path or URL of a checkpoint."""

    @abstractmethod
    def make(self) -> None:
        """Create the folder."""

    @abstractmethod
    def names(self) -> list[str]:
        """Return the names of possible checkpoints."""

    @abstractmethod
    def exists(self, name: str) -> bool:
        """Return whether a file or folder has a name."""

    @abstractmethod
    def sizes(self, name: str) -> dict[str, int | None]:
        """Return the size of each file of a checkpoint; None for what is no file."""

    @abstractmethod
    def reader(self, name: str, file: str) -> AbstractContextManager[ReadInto]:
        """Open a file of a checkpoint, and yield a function that fills memory with the bytes at a position."""

    @abstractmethod
    def begin(self, name: str) -> str:
        """Return the name of a draft: files of a new checkpoint, which are none until they are committed."""

    @abstractmethod
    def put(self, name: str, draft: str, file: str, content: Iterable[memoryview]) -> None:
        """Write a file of a draft, in any process; after a failed attempt the content may be iterated over again."""

    @abstractmethod
    def commit(self, name: str, draft: str, manifest: Manifest) -> None:
        """Write the manifest of a draft, which makes it the checkpoint of a name; one that has the name is replaced."""

    @abstractmethod
    def delete(self, name: str) -> None:
        """Delete a checkpoint, which is never found incomplete meanwhile."""

    @abstractmethod
    def set_latest(self, latest: str, name: str) -> None:
        """Point the link ``latest`` to a checkpoint."""

    @abstractmethod
    def get_latest(self, latest: str) -> str | None:
        """Return the name of the checkpoint that ``latest`` points to; None if there is none."""

    def copy(self, name: str, to: Folder, new: str, *, overwrite: bool) -> None:
        """Copy a complete checkpoint into another folder under a new name, its manifest last."""
        manifest = self.manifest(name)
        if not overwrite and MANIFEST in to.sizes(new):  # without it, it is what an interrupted copy has left
            raise CheckpointSaveError(to.at(new), "exists. Set overwrite=True (save_overwrite) to replace it.")
        to.make()
        draft = to.begin(new)
        try:
            for file, record in manifest.files.items():
                to.put(new, draft, file, _Chunks(self, name, file, record.size))
            to.commit(new, draft, manifest)
        finally:
            to.abandon(draft)

    def abandon(self, draft: str) -> None:
        """Delete what is left of a draft: unfinished files, or a replaced checkpoint; call it after :meth:`begin`.

        In a remote folder the next checkpoint of the name deletes files without a manifest.
        """
        del draft

    def set_aside(self, name: str, *, for_link: bool = False) -> str | None:
        """Rename what a checkpoint, or a link, cannot replace, and return its new path; None if there is nothing.

        A remote folder has no rename, and incomplete checkpoints are replaced.
        """
        del name, for_link
        return None

    def manifest(self, name: str) -> Manifest:
        """Return a checkpoint's manifest, after checking the names and sizes of its files.

        Files that the manifest does not list are ignored with a warning.
        """
        sizes = self.sizes(name)
        size, path = sizes.pop(MANIFEST, None), f"{self.at(name)}/{MANIFEST}"
        if size is None:
            raise CheckpointError(path, "is missing, so this is no checkpoint, or one that was not finished.")
        if size > MAX_MANIFEST_BYTES:
            raise CheckpointError(path, f"is larger than any manifest ({MAX_MANIFEST_BYTES} bytes).")
        manifest = Manifest.from_bytes(self._read_file(name, MANIFEST, size), path)
        for file, record in manifest.files.items():
            path = f"{self.at(name)}/{file}"
            if file not in sizes:
                raise CheckpointError(path, "is missing, and the manifest lists it.")
            if sizes[file] is None:
                raise CheckpointError(path, "must be a file, and is a link or a folder.")
            if sizes[file] != record.size:
                raise CheckpointError(
                    path, f"has {sizes[file]} bytes, and the manifest lists {record.size}: it was cut off or replaced."
                )
        if unknown := sorted(sizes.keys() - manifest.files.keys()):
            shown = abridged(", ".join(map(repr, unknown)))
            warnings.warn(
                f"{self.at(name)} contains files that its manifest does not list, and they are ignored: {shown}.",
                UserWarning,
                stacklevel=3,
            )
        return manifest

    def foreign(self, name: str) -> list[str]:
        """Return which files in a checkpoint are not ours; see :func:`foreign_files`."""
        return foreign_files(self.sizes(name))

    def content(self, name: str, file: str, manifest: Manifest) -> bytes:
        """Return the content of a JSON file, after comparing it with its checksum."""
        if file not in manifest.files:
            raise CheckpointError(f"{self.at(name)}/{file}", "is missing.")
        content = self._read_file(name, file, manifest.files[file].size)
        self._compare(name, file, manifest, xxhash.xxh3_128_hexdigest(content))
        return content

    def data(self, name: str, manifest: Manifest) -> dict[str, Any]:
        """Return the data of :data:`STATE`, after comparing the file with its checksum."""
        path, size = f"{self.at(name)}/{STATE}", manifest.files[STATE].size if STATE in manifest.files else 0
        if size > MAX_STATE_BYTES:
            raise CheckpointError(path, f"has {size} bytes, more than any that is saved ({MAX_STATE_BYTES} bytes).")
        return read_json(self.content(name, STATE, manifest), path)

    def check(self, name: str, manifest: Manifest, files: Iterable[str] | None = None) -> None:
        """Compare the contents of a checkpoint's files, or of some of them, with their checksums."""
        for file in manifest.files if files is None else files:
            digest = xxhash.xxh3_128()
            for chunk in _Chunks(self, name, file, manifest.files[file].size):
                digest.update(chunk)
            self._compare(name, file, manifest, digest.hexdigest())

    def _read_file(self, name: str, file: str, size: int) -> bytes:
        try:
            content = bytearray(size)
        except MemoryError:
            raise CheckpointError(f"{self.at(name)}/{file}", f"has {size} bytes, which memory cannot hold.") from None
        with self.reader(name, file) as read:
            read(0, memoryview(content))
        return bytes(content)

    def _compare(self, name: str, file: str, manifest: Manifest, digest: str) -> None:
        if digest != manifest.files[file].xxh3_128:
            raise CheckpointError(
                f"{self.at(name)}/{file}", "has been changed since it was written: its xxh3_128 is not the manifest's."
            )


@attrs.frozen
class _Chunks:
    """The content of a file of a checkpoint in parts, each until the next; it can be iterated over several times."""

    folder: Folder
    name: str
    file: str
    size: int

    def __iter__(self) -> Iterator[memoryview]:
        memory = memoryview(bytearray(min(_CHUNK, self.size)))
        with self.folder.reader(self.name, self.file) as read:
            for begin in range(0, self.size, _CHUNK):
                chunk = memory[: self.size - begin]
                read(begin, chunk)
                yield chunk


def is_remote(path: object) -> bool:
    """Return whether a path is a URL that fsspec opens; ``file://`` is local.

    Example:
        >>> is_remote("s3://bucket/run"), is_remote("runs/blur"), is_remote("file:///tmp")
        (True, False, False)
    """
    text = str(path)
    return bool(_PROTOCOL.match(text)) and not text.startswith("file://")


def local_path(path: object) -> Path:
    """Return a path that is not remote, also if it is a URL.

    Example:
        >>> local_path("file://runs/blur")
        PosixPath('runs/blur')
    """
    return Path(str(path).removeprefix("file://"))


def split_path(text: str) -> tuple[str, str]:
    """Return the folder and the name of a checkpoint's path or URL.

    Raises:
        CheckpointError: A URL has no folder.

    Example:
        >>> split_path("s3://bucket/run/ep1"), split_path("file://ep1")
        (('s3://bucket/run', 'ep1'), ('.', 'ep1'))
    """
    if not is_remote(text):
        return str(local_path(text).parent), local_path(text).name
    folder, _, name = text.rstrip("/").rpartition("/")
    if not is_remote(folder):  # else "s3:/" would be a local folder
        raise CheckpointError(text, "is a URL without a folder: give one, such as s3://bucket/run.")
    return folder, name


def check_folder(name: str, folder: object) -> None:
    """Raise a TypeError if ``folder`` is neither a path nor a URL; the error calls it by ``name``."""
    if not isinstance(folder, (str, os.PathLike)):
        raise TypeError(f"{name} must be a path or a URL, got {folder!r}.")
