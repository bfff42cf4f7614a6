"""Checkpoints at URLs, through fsspec: ``s3://``, ``gs://``, ``memory://`` and its other protocols.

Each file is written to a local temporary file and uploaded when it is complete, and downloaded to one before it is
read. There is no rename and no lock. The draft is the checkpoint's own folder, and without a manifest, which is
uploaded last and deleted first, it is none. The file systems of fsspec repeat requests that fail.
"""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from io import RawIOBase
from pathlib import Path
from typing import Any

import attrs

from composer.checkpoint.errors import CheckpointError, CheckpointSaveError
from composer.checkpoint.manifest import MANIFEST, Manifest, foreign_files
from composer.core.saving.secrets import without_secret_urls

_CHUNK = 8 << 20
_STORAGE_OPTIONS: dict[str, Mapping[str, Any]] = {}


def set_storage_options(url: str, options: Mapping[str, Any]) -> None:
    """Set the arguments of fsspec's file system for a URL and all below it, in this process."""
    _STORAGE_OPTIONS[url] = options


def file_system(url: str, options: Mapping[str, Any] | None = None) -> tuple[Any, str]:
    """Return the file system of fsspec for a URL, and the path in it.

    Args:
        url: The URL.
        options: Arguments of the file system; those of :func:`set_storage_options` if None.

    Example:
        >>> file_system("memory://bucket/run")[1]
        '/bucket/run'
    """
    import fsspec  # noqa: PLC0415

    if options is None:
        set_for = [root for root in _STORAGE_OPTIONS if f"{url}/".startswith(f"{root}/")]
        options = _STORAGE_OPTIONS[max(set_for, key=len)] if set_for else {}
    files, path = fsspec.core.url_to_fs(url, **options)
    return files, str(path)


def _file_name(entry: dict[str, Any]) -> str:
    return str(entry["name"]).rstrip("/").rpartition("/")[2]


def _is_file(entry: dict[str, Any]) -> bool:
    return entry["type"] == "file" and not str(entry["name"]).endswith("/")


def _without_slash(url: str) -> str:
    return url.rstrip("/")


@attrs.frozen
class RemoteFolder:
    """A folder of checkpoints at a URL, with the methods of a ``LocalFolder`` other than ``tidy`` and ``set_aside``.

    A checkpoint is complete as soon as its manifest, the last file, is uploaded. Two runs can save to one such folder.

    Args:
        url: The URL.
    """

    url: str = attrs.field(converter=_without_slash)

    def __str__(self) -> str:
        return without_secret_urls(self.url)

    def at(self, name: str) -> str:
        """Return the URL of a checkpoint."""
        return f"{self.url}/{name}"

    def make(self) -> None:
        """Do nothing: a remote folder exists as soon as it has a file."""

    def names(self) -> list[str]:
        """Return the names of possible checkpoints."""
        with self._reading(self.url):
            return sorted(_file_name(entry) for entry in self._list() if entry["type"] == "directory")

    def _list(self, name: str = "") -> list[dict[str, Any]]:
        """Return the entries of a folder, without itself; none if it does not exist."""
        files, root = self._files()
        path = f"{root}/{name}" if name else root
        with contextlib.suppress(FileNotFoundError):
            try:
                entries = files.ls(path, detail=True)
            except NotADirectoryError:  # local files, before fsspec 2023.12
                return [files.info(path)]
            # Some stores have an empty file "folder/" for a folder; a file is the only entry of its own name.
            return [one for one in entries if _is_file(one) or one["name"].strip("/") != path.strip("/")]
        return []

    def exists(self, name: str) -> bool:
        """Return whether a file or folder has a name."""
        with self._reading(self.at(name)):
            return bool(self._list(name))

    def sizes(self, name: str) -> dict[str, int | None]:
        """Return the size of each file of a checkpoint."""
        with self._reading(self.at(name)):
            return {_file_name(entry): int(entry["size"] or 0) for entry in self._list(name) if _is_file(entry)}

    @contextlib.contextmanager
    def reader(self, name: str, file: str) -> Iterator[RawIOBase]:
        """Download a file of a checkpoint, and open it for reading."""
        with tempfile.TemporaryDirectory() as folder:
            local = Path(folder, file)
            with self._reading(f"{self.at(name)}/{file}"):
                files, root = self._files()
                files.get_file(f"{root}/{name}/{file}", str(local))
            with local.open("rb", buffering=0) as source:
                yield source

    def begin(self, name: str) -> str:
        """Return the name of the new checkpoint, after deleting one that has the name."""
        self.delete(name)
        return name

    def put(self, name: str, draft: str, file: str, content: Iterable[memoryview]) -> None:
        """Write a file of a checkpoint to a temporary one, and upload that, in any process."""
        with self._saving(name):
            self._upload(f"{draft}/{file}", content)

    def commit(self, name: str, draft: str, manifest: Manifest) -> None:
        """Upload the manifest, which makes the files a checkpoint."""
        self.put(name, draft, MANIFEST, [memoryview(manifest.to_bytes())])

    def abandon(self, draft: str) -> None:
        """Leave the files of a draft: the next checkpoint of the name deletes those without a manifest."""

    def _upload(self, path: str, pieces: Iterable[memoryview]) -> None:
        files, root = self._files()
        with tempfile.TemporaryFile() as local:
            local.writelines(pieces)
            local.seek(0)
            with files.open(f"{root}/{path}", "wb") as file:  # put_file would leave empty folders in some systems
                shutil.copyfileobj(local, file, _CHUNK)

    def delete(self, name: str) -> None:
        """Delete a checkpoint, its manifest first."""
        with self._saving(name):
            files, entries = self._files()[0], self._list(name)
            if foreign := foreign_files(map(_file_name, entries)):
                reason = f"{foreign[0]!r} in it is not a file of a checkpoint; move it elsewhere."
                raise CheckpointSaveError(self.at(name), reason)
            # Without a manifest it is no checkpoint, so that an interruption leaves none that is incomplete.
            for entry in sorted(entries, key=lambda entry: _file_name(entry) != MANIFEST):
                files.rm_file(entry["name"])

    def set_latest(self, latest: str, name: str) -> None:
        """Write the name of a checkpoint to the file ``latest``."""
        with self._saving(latest):
            self._upload(latest, [memoryview(f"{name}\n".encode())])

    def get_latest(self, latest: str) -> str | None:
        """Return the name of the checkpoint that ``latest`` points to; None if there is none."""
        with contextlib.suppress(CheckpointError, ImportError), self._reading(latest):
            files, root = self._files()
            return str(files.cat_file(f"{root}/{latest}", end=4096).decode().strip())
        return None

    def _files(self) -> tuple[Any, str]:
        try:
            files, root = file_system(self.url)
        except ImportError as error:
            raise ImportError(
                f'{self} needs another package: {error}. For s3://: pip install "composer-trainer[s3]".'
            ) from None
        except ValueError as error:
            raise CheckpointError(self.url, f"is not a URL that fsspec supports: {error}") from None
        # fsspec keeps the listings of folders, to which other processes write as well.
        files.invalidate_cache()
        return files, root.rstrip("/")

    @contextlib.contextmanager
    def _reading(self, path: str) -> Iterator[None]:
        try:
            yield
        except (CheckpointError, ImportError):
            raise
        except Exception as error:  # noqa: BLE001  (each file system has its own errors)
            is_gone = isinstance(error, FileNotFoundError)
            reason = "is missing." if is_gone else f"cannot be read: {type(error).__name__}: {error}"
            # The file system's own error may contain the secrets of the URL.
            raise CheckpointError(path, reason) from (error if str(self) == self.url else None)

    @contextlib.contextmanager
    def _saving(self, name: str) -> Iterator[None]:
        try:
            yield
        except (CheckpointError, CheckpointSaveError, ImportError):
            raise
        except Exception as error:  # noqa: BLE001
            reason = f"{type(error).__name__}: {error}"
            raise CheckpointSaveError(self.at(name), reason) from (error if str(self) == self.url else None)
