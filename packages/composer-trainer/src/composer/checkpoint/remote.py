"""Checkpoints in remote folders, through fsspec: ``s3://``, ``gs://``, ``memory://`` and whatever else it knows."""

from __future__ import annotations

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
    from collections.abc import Callable

    from composer.checkpoint.saving import Snapshot

__all__ = ["RemoteFolder"]

_CHUNK = 8 << 20
T = TypeVar("T")


def _without_slash(url: str) -> str:
    return url.rstrip("/")


@attrs.frozen
class RemoteFolder:
    """A remote folder in which checkpoints are.

    There is no renaming in one step there: a checkpoint is one as soon as its manifest, the last file, has arrived.
    What fails is tried again, a little later each time. Nothing keeps two runs from saving to one remote folder.

    Args:
        url: The address.
        tries: How often something is tried in all.
        wait: Seconds before the second try; twice as long before each further one.
    """

    url: str = attrs.field(converter=_without_slash)
    tries: int = 4
    wait: float = 0.5

    def __str__(self) -> str:
        return self.url

    def at(self, name: str) -> str:
        """Return where the checkpoint of a name is."""
        return f"{self.url}/{name}"

    def make(self) -> None:
        """Do nothing: remote folders are there as soon as something is in them."""

    def names(self) -> list[str]:
        """Return the names of the folders in it that may be checkpoints."""
        return self._read(self.url, self._names)

    def _names(self) -> list[str]:
        files, root = self._files()
        try:
            found = files.ls(root, detail=True)
        except FileNotFoundError:
            return []
        own = root.strip("/")
        names = [one["name"].rstrip("/") for one in found if one["type"] == "directory"]
        return sorted(name.rpartition("/")[2] for name in names if name.strip("/") != own)

    def manifest(self, name: str) -> Manifest:
        """Return the manifest of a checkpoint, after a look at which files are there and how large they are.

        Raises:
            CheckpointError: There is no whole checkpoint of the name.
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
                    f"{self.at(name)}/{file}", f"has {sizes[file]} bytes, and the manifest says {record.size}."
                )
        warn_of_unknown(self.at(name), sizes.keys() - manifest.files.keys())
        return manifest

    def _manifest_and_sizes(self, name: str) -> tuple[bytes, dict[str, int]]:
        files, root = self._files()
        found = files.ls(f"{root}/{name}", detail=True)
        sizes = {one["name"].rpartition("/")[2]: int(one["size"] or 0) for one in found if one["type"] == "file"}
        if MANIFEST not in sizes:
            raise FileNotFoundError(MANIFEST)
        if sizes.pop(MANIFEST) > MAX_MANIFEST_BYTES:
            raise CheckpointError(f"{self.at(name)}/{MANIFEST}", "is larger than any manifest.")
        return files.cat_file(f"{root}/{name}/{MANIFEST}"), {file: size for file, size in sizes.items() if file}

    def check(self, name: str, manifest: Manifest, *, thoroughly: bool = False) -> None:
        """Check the contents of a checkpoint, for which all of it is read.

        Raises:
            CheckpointError: A file is not as it was written.
        """
        for file in manifest.files:
            self._fetch(name, file, manifest, None, thoroughly=thoroughly)

    def download(self, name: str, manifest: Manifest, to: Path, names: list[str]) -> None:
        """Put files of a checkpoint into a folder of this machine, and check them on the way.

        Raises:
            CheckpointError: One cannot be read, or is not as it was written.
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

    def exists(self, name: str) -> bool:
        """Return whether there is anything of a name."""
        return self._read(self.at(name), lambda: self._exists(name))

    def _exists(self, name: str) -> bool:
        files, root = self._files()
        try:
            return bool(files.ls(f"{root}/{name}"))
        except FileNotFoundError:
            return False

    def write(self, name: str, snapshot: Snapshot) -> Manifest:
        """Write a checkpoint, in place of one that has the name.

        Raises:
            CheckpointSaveError: It could not be written; what has been does not look like a checkpoint.
        """
        contents = snapshot.files()
        with records_while(contents) as records:
            if self._write(name, lambda: self._exists(name)):
                self.delete(name)
            for file, pieces in contents.items():
                self._write(name, partial(self._put, f"{name}/{file}", pieces))
            manifest = attrs.evolve(snapshot.manifest, files=records())
        self._write(name, lambda: self._put(f"{name}/{MANIFEST}", (memoryview(manifest.to_bytes()),)))
        return manifest

    def _put(self, path: str, pieces: tuple[memoryview, ...]) -> None:
        files, root = self._files()
        with files.open(f"{root}/{path}", "wb") as file:
            for piece in pieces:
                for begin in range(0, len(piece), _CHUNK):
                    file.write(bytes(piece[begin : begin + _CHUNK]))

    def foreign(self, name: str) -> list[str]:
        """Return which files in a checkpoint are somebody else's."""
        return self._read(self.at(name), lambda: self._foreign(name))

    def _foreign(self, name: str) -> list[str]:
        files, root = self._files()
        try:
            return foreign_files(one["name"].rpartition("/")[2] for one in files.ls(f"{root}/{name}", detail=True))
        except FileNotFoundError:
            return []

    def set_aside(self, name: str, *, for_link: bool = False) -> str | None:
        """Do nothing: there is no renaming, and what is half written is replaced."""
        del name, for_link
        return None

    def delete(self, name: str) -> None:
        """Delete a checkpoint, its manifest first.

        Raises:
            CheckpointSaveError: It cannot be deleted.
        """
        self._write(name, lambda: self._delete(name))

    def _delete(self, name: str) -> None:
        files, root = self._files()
        try:
            found = [one["name"] for one in files.ls(f"{root}/{name}", detail=True)]
        except FileNotFoundError:  # also when this is tried again, and the last file was deleted the first time
            return
        foreign = foreign_files(path.rpartition("/")[2] for path in found)
        if foreign:
            raise CheckpointSaveError(
                self.at(name), f"{foreign[0]!r} is there and is no file of ours; move it elsewhere."
            )
        for path in sorted(found, key=lambda path: not path.endswith(f"/{MANIFEST}")):
            files.rm_file(path)

    def set_latest(self, latest: str, name: str) -> None:
        """Write the file ``latest`` with the name of a checkpoint.

        Raises:
            CheckpointSaveError: It cannot be written.
        """
        self._write(latest, lambda: self._put(latest, (memoryview(f"{name}\n".encode()),)))

    def get_latest(self, latest: str) -> str | None:
        """Return the name of the checkpoint that ``latest`` leads to; None if there is none."""
        try:
            files, root = self._files()
            return str(files.cat_file(f"{root}/{latest}", end=4096).decode().strip())
        except Exception:  # noqa: BLE001  (each file system has its own errors; there is none to be found)
            return None

    def _files(self) -> tuple[Any, str]:
        import fsspec  # noqa: PLC0415

        try:
            files, root = fsspec.core.url_to_fs(self.url)
        except ImportError as error:
            raise ImportError(f"{self.url} needs a package more: {error}. For s3://: {_S3}") from None
        except ValueError as error:
            raise CheckpointError(self.url, f"is no address that fsspec knows: {error}") from None
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
            except (CheckpointSaveError, ImportError, FileNotFoundError, PermissionError, TypeError, ValueError):
                raise
            except Exception:  # noqa: BLE001  (each file system has its own errors; the last is raised below)
                time.sleep(self.wait * 2**again)
        return call()


_S3 = 'pip install "composer-trainer[s3]".'
