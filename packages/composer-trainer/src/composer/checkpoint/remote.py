"""Checkpoints in remote folders, through fsspec: ``s3://``, ``gs://``, ``memory://`` and its other protocols."""

from __future__ import annotations

import contextlib
import os
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import attrs

from composer.checkpoint.errors import CheckpointError, CheckpointSaveError
from composer.checkpoint.local import records_while
from composer.checkpoint.manifest import MANIFEST, MAX_MANIFEST_BYTES, Manifest, foreign_files, warn_of_unknown

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from composer.checkpoint.saving import Snapshot
    from composer.checkpoint.sharded import ReadInto

__all__ = ["RemoteFolder"]

_CHUNK = 8 << 20
T = TypeVar("T")


def _without_slash(url: str) -> str:
    return url.rstrip("/")


def _file_name(entry: dict[str, Any]) -> str:
    return str(entry["name"]).rpartition("/")[2]


@attrs.frozen
class RemoteFolder:
    """A remote folder of checkpoints.

    Remote folders have no atomic rename: a checkpoint is complete as soon as its manifest, the last file, is written.
    Failed operations are retried with growing delays. There is no lock: two runs can save to one remote folder.

    Args:
        url: The address.
        tries: How often an operation is tried in total.
        wait: Seconds before the second try; doubled before each further one.
    """

    url: str = attrs.field(converter=_without_slash)
    tries: int = 4
    wait: float = 0.5

    def __str__(self) -> str:
        return self.url

    def at(self, name: str) -> str:
        """Return the address of a checkpoint."""
        return f"{self.url}/{name}"

    def make(self) -> None:
        """Do nothing: remote folders exist as soon as they have a file."""

    def names(self) -> list[str]:
        """Return the names of possible checkpoints."""
        return self._read(self.url, self._names)

    def _names(self) -> list[str]:
        _, root = self._files()
        paths = [entry["name"].strip("/") for entry in self._list() if entry["type"] == "directory"]
        return sorted(path.rpartition("/")[2] for path in paths if path != root.strip("/"))

    def _list(self, name: str = "") -> list[dict[str, Any]]:
        """Return the entries of a folder; none if it does not exist."""
        files, root = self._files()
        try:
            entries: list[dict[str, Any]] = files.ls(f"{root}/{name}" if name else root, detail=True)
        except FileNotFoundError:
            return []
        return entries

    def manifest(self, name: str) -> Manifest:
        """Return the manifest of a checkpoint, after checking the names and sizes of its files.

        Raises:
            CheckpointError: There is no complete checkpoint of the name.
        """
        path = f"{self.at(name)}/{MANIFEST}"
        try:
            content, sizes = self._read(path, lambda: self._manifest_and_sizes(name))
        except FileNotFoundError:
            raise CheckpointError(path, "is missing, so this is no checkpoint, or one that was not finished.") from None
        manifest = Manifest.from_bytes(content, path)
        for file in sorted(manifest.files.keys() - sizes.keys()):
            raise CheckpointError(f"{self.at(name)}/{file}", "is missing, and the manifest lists it.")
        for file, record in manifest.files.items():
            if sizes[file] != record.size:
                raise CheckpointError(
                    f"{self.at(name)}/{file}", f"has {sizes[file]} bytes, and the manifest lists {record.size}."
                )
        warn_of_unknown(self.at(name), sizes.keys() - manifest.files.keys())
        return manifest

    def _manifest_and_sizes(self, name: str) -> tuple[bytes, dict[str, int]]:
        entries = [entry for entry in self._list(name) if entry["type"] == "file"]
        sizes = {_file_name(entry): int(entry["size"] or 0) for entry in entries}
        if MANIFEST not in sizes:
            raise FileNotFoundError(MANIFEST)
        if sizes.pop(MANIFEST) > MAX_MANIFEST_BYTES:
            raise CheckpointError(f"{self.at(name)}/{MANIFEST}", "is larger than any manifest.")
        files, root = self._files()
        return files.cat_file(f"{root}/{name}/{MANIFEST}"), {file: size for file, size in sizes.items() if file}

    def check(
        self, name: str, manifest: Manifest, files: Iterable[str] | None = None, *, thoroughly: bool = False
    ) -> None:
        """Download the contents of a checkpoint, or of some files, and compare them with its manifest.

        Raises:
            CheckpointError: The content of a file is not the one that was written.
        """
        for file in manifest.files if files is None else files:
            self._fetch(name, file, manifest, None, thoroughly=thoroughly)

    def download(self, name: str, manifest: Manifest, to: Path, names: list[str]) -> None:
        """Download files of a checkpoint to a local folder, and compare them with its manifest.

        Raises:
            CheckpointError: A file cannot be read, or its content is not the one that was written.
        """
        for file in names:
            self._fetch(name, file, manifest, to / file)

    def _fetch(self, name: str, file: str, manifest: Manifest, to: Path | None, *, thoroughly: bool = False) -> None:
        path, record = f"{self.at(name)}/{file}", manifest.files[file]

        def copy() -> dict[str, Any]:
            files, root = self._files()
            hashes, left = record.hashes(thoroughly=thoroughly), record.size
            with files.open(f"{root}/{name}/{file}", "rb") as source, (to or Path(os.devnull)).open("wb") as target:
                while left and (chunk := source.read(min(_CHUNK, left))):
                    for digest in hashes.values():
                        digest.update(chunk)
                    if to is not None:
                        target.write(chunk)
                    left -= len(chunk)
            return hashes

        try:
            hashes = self._read(path, copy)
        except FileNotFoundError:
            raise CheckpointError(path, "is missing, and the manifest lists it.") from None
        record.compare(path, hashes)

    @contextlib.contextmanager
    def reader(self, name: str, file: str) -> Iterator[ReadInto]:
        """Open a file of a checkpoint, and yield a function that fills memory with the bytes at a position.

        Raises:
            CheckpointError: It cannot be read, or ends before that.
        """
        path = f"{self.at(name)}/{file}"
        sources: list[Any] = []

        def fill(position: int, memory: memoryview) -> None:
            if not sources:
                files, root = self._files()
                sources.append(files.open(f"{root}/{name}/{file}", "rb", block_size=_CHUNK))
            try:
                sources[0].seek(position)
                content = sources[0].read(len(memory))
            except Exception:
                sources.clear()  # opened again by the next try
                raise
            if len(content) != len(memory):
                raise CheckpointError(path, "has been changed while it was read: it ends within a tensor.")
            memory[:] = content

        def read(position: int, memory: memoryview) -> None:
            try:
                self._read(path, partial(fill, position, memory))
            except FileNotFoundError:
                raise CheckpointError(path, "is missing, and the manifest lists it.") from None

        try:
            yield read
        finally:
            for source in sources:
                source.close()

    def exists(self, name: str) -> bool:
        """Return whether a file or folder has a name."""
        return bool(self._read(self.at(name), lambda: self._list(name)))

    def write(self, name: str, snapshot: Snapshot) -> Manifest:
        """Write a checkpoint, and replace one that has the name.

        Raises:
            CheckpointSaveError: It could not be written; the files that were are not a checkpoint.
        """
        contents = snapshot.files()
        with records_while(contents) as records:
            place = self.begin(name)
            for file, pieces in contents.items():
                self.put(name, place, file, pieces)
            manifest = attrs.evolve(snapshot.manifest, files=records())
        self.commit(name, place, manifest)
        return manifest

    def begin(self, name: str) -> str:
        """Return the place for the files of a new checkpoint, after deleting one that has the name.

        Raises:
            CheckpointSaveError: It cannot be deleted.
        """
        if self._write(name, lambda: self._list(name)):
            self.delete(name)
        return name

    def put(self, name: str, place: str, file: str, pieces: Iterable[memoryview]) -> None:
        """Upload a file of a checkpoint, in any process.

        Raises:
            CheckpointSaveError: It could not be uploaded.
        """
        self._write(name, partial(self._put, f"{place}/{file}", pieces))

    def commit(self, name: str, place: str, manifest: Manifest) -> None:
        """Upload the manifest, which makes the files a checkpoint, after checking that they are in the folder.

        Raises:
            CheckpointSaveError: It could not be uploaded, or a file is missing or of another size.
        """
        entries = self._write(name, lambda: self._list(place))
        sizes = {_file_name(entry): int(entry["size"] or 0) for entry in entries if entry["type"] == "file"}
        for file, record in sorted(manifest.files.items()):
            if sizes.get(file) != record.size:
                found = f"has {sizes[file]} bytes instead of {record.size}" if file in sizes else "is missing"
                raise CheckpointSaveError(
                    self.at(name),
                    f"{file!r} {found} in the folder of the first process, though it has been written; the folder must "
                    "be the same for all processes, which memory:// and folders of each host are not.",
                )
        self.put(name, place, MANIFEST, [memoryview(manifest.to_bytes())])

    def abandon(self, place: str) -> None:
        """Do nothing: files without a manifest are no checkpoint, and the next one of the name deletes them."""

    def _put(self, path: str, pieces: Iterable[memoryview]) -> None:
        files, root = self._files()
        with files.open(f"{root}/{path}", "wb") as file:
            pending = bytearray()  # a store may have a limit for the number of writes
            for piece in pieces:
                for begin in range(0, len(piece), _CHUNK):
                    pending += piece[begin : begin + _CHUNK]
                    if len(pending) >= _CHUNK:
                        file.write(bytes(pending))
                        pending.clear()
            file.write(bytes(pending))

    def foreign(self, name: str) -> list[str]:
        """Return which files in a checkpoint are not ours."""
        return foreign_files(map(_file_name, self._read(self.at(name), lambda: self._list(name))))

    def set_aside(self, name: str, *, for_link: bool = False) -> str | None:
        """Do nothing: there is no rename, and incomplete checkpoints are replaced."""
        del name, for_link
        return None

    def delete(self, name: str) -> None:
        """Delete a checkpoint, its manifest first.

        Raises:
            CheckpointSaveError: It cannot be deleted.
        """
        self._write(name, lambda: self._delete(name))

    def _delete(self, name: str) -> None:
        files, _ = self._files()
        entries = self._list(name)  # none if this is tried again after the last file was deleted
        foreign = foreign_files(map(_file_name, entries))
        if foreign:
            raise CheckpointSaveError(
                self.at(name), f"{foreign[0]!r} in it is not a file of a checkpoint; move it elsewhere."
            )
        for entry in sorted(entries, key=lambda entry: _file_name(entry) != MANIFEST):
            files.rm_file(entry["name"])

    def set_latest(self, latest: str, name: str) -> None:
        """Write the name of a checkpoint to the file ``latest``.

        Raises:
            CheckpointSaveError: It cannot be written.
        """
        self._write(latest, lambda: self._put(latest, (memoryview(f"{name}\n".encode()),)))

    def get_latest(self, latest: str) -> str | None:
        """Return the name of the checkpoint that ``latest`` points to; None if there is none."""
        try:
            return self._tried(lambda: self._content(latest))
        except Exception:  # noqa: BLE001  (each file system has its own errors)
            return None

    def _content(self, latest: str) -> str:
        files, root = self._files()
        return str(files.cat_file(f"{root}/{latest}", end=4096).decode().strip())

    def _files(self) -> tuple[Any, str]:
        import fsspec  # noqa: PLC0415

        try:
            files, root = fsspec.core.url_to_fs(self.url)
        except ImportError as error:
            raise ImportError(
                f'{self.url} needs another package: {error}. For s3://: pip install "composer-trainer[s3]".'
            ) from None
        except ValueError as error:
            raise CheckpointError(self.url, f"is not an address that fsspec supports: {error}") from None
        files.invalidate_cache()
        return files, root.rstrip("/")

    def _read(self, path: str, call: Callable[[], T]) -> T:
        try:
            return self._tried(call)
        except (CheckpointError, ImportError, FileNotFoundError):
            raise
        except Exception as error:
            raise CheckpointError(path, f"cannot be read: {type(error).__name__}: {error}") from error

    def _write(self, name: str, call: Callable[[], T]) -> T:
        try:
            return self._tried(call)
        except (CheckpointError, CheckpointSaveError, ImportError):
            raise
        except Exception as error:
            raise CheckpointSaveError(self.at(name), f"{type(error).__name__}: {error}") from error

    def _tried(self, call: Callable[[], T]) -> T:
        for again in range(self.tries - 1):
            try:
                return call()
            except (CheckpointSaveError, ImportError, TypeError, ValueError):
                raise
            except (FileNotFoundError, IsADirectoryError, PermissionError):  # not a matter of the connection
                raise
            except Exception:  # noqa: BLE001  (each file system has its own errors; the last is raised below)
                time.sleep(self.wait * 2**again)
        return call()
