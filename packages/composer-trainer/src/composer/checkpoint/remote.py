"""Checkpoints in remote folders, through fsspec: ``s3://``, ``gs://``, ``memory://`` and its other protocols.

Each file is written to a local temporary file and uploaded when it is complete, and downloaded to one before it is
read. Such folders have no rename and no lock. The draft is the checkpoint's own folder, and without a manifest, which
is uploaded last and deleted first, it is none. Operations that fail are tried again, as a connection may be
interrupted.
"""

from __future__ import annotations

import contextlib
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import attrs

from composer.checkpoint.errors import CheckpointError, CheckpointSaveError
from composer.checkpoint.folder import MANIFEST, Folder, Manifest, ReadInto, foreign_files, read_into
from composer.core.saving.secrets import without_secret_urls

_CHUNK = 8 << 20
_STORAGE_OPTIONS: dict[str, Mapping[str, Any]] = {}
_NOT_OF_THE_CONNECTION = (TypeError, ValueError, FileNotFoundError, IsADirectoryError, PermissionError)
T = TypeVar("T")


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


def _sizes(entries: list[dict[str, Any]]) -> dict[str, int | None]:
    return {_file_name(entry): int(entry["size"] or 0) for entry in entries if _is_file(entry)}


def _without_slash(url: str) -> str:
    return url.rstrip("/")


@attrs.frozen
class RemoteFolder(Folder):
    """A remote folder of checkpoints.

    Remote folders have no atomic rename: a checkpoint is complete as soon as its manifest, the last file, is written.
    Failed operations are retried with growing delays. There is no lock: two runs can save to one remote folder.

    Args:
        url: The URL.
        tries: How often an operation is tried in total.
        wait: Seconds before the second try; doubled before each further one.
    """

    url: str = attrs.field(converter=_without_slash)
    tries: int = 4
    wait: float = 0.5

    def __str__(self) -> str:
        return without_secret_urls(self.url)

    def at(self, name: str) -> str:
        """Return the URL of a checkpoint."""
        return f"{self.url}/{name}"

    def make(self) -> None:
        """Do nothing: a remote folder exists as soon as it has a file."""

    def names(self) -> list[str]:
        """Return the names of possible checkpoints."""
        entries = self._read(self.url, self._list)
        return sorted(_file_name(entry) for entry in entries if entry["type"] == "directory")

    def _list(self, name: str = "") -> list[dict[str, Any]]:
        """Return the entries of a folder, without itself; none if it does not exist."""
        files, root = self._files()
        path = f"{root}/{name}" if name else root
        with contextlib.suppress(FileNotFoundError):
            entries = files.ls(path, detail=True)
            # Some stores have an empty file "folder/" for a folder; a file is the only entry of its own name.
            return [one for one in entries if _is_file(one) or one["name"].strip("/") != path.strip("/")]
        return []

    def exists(self, name: str) -> bool:
        """Return whether a file or folder has a name."""
        return bool(self._read(self.at(name), partial(self._list, name)))

    def sizes(self, name: str) -> dict[str, int | None]:
        """Return the size of each file of a checkpoint."""
        return _sizes(self._read(self.at(name), partial(self._list, name)))

    @contextlib.contextmanager
    def reader(self, name: str, file: str) -> Iterator[ReadInto]:
        """Download a file of a checkpoint, and yield a function that fills memory with the bytes at a position."""
        path = f"{self.at(name)}/{file}"
        with tempfile.TemporaryDirectory() as folder:
            local = Path(folder, file)
            self._read(path, partial(self._get, f"{name}/{file}", local))
            with local.open("rb", buffering=0) as source:
                yield partial(read_into, source, path)

    def _get(self, path: str, local: Path) -> None:
        files, root = self._files()
        files.get_file(f"{root}/{path}", str(local))

    def begin(self, name: str) -> str:
        """Return the name of the new checkpoint, after deleting one that has the name."""
        if self._write(name, partial(self._list, name)):
            self.delete(name)
        return name

    def put(self, name: str, draft: str, file: str, content: Iterable[memoryview]) -> None:
        """Write a file of a checkpoint to a temporary one, and upload that, in any process."""
        self._write(name, partial(self._put, f"{draft}/{file}", content))

    def commit(self, name: str, draft: str, manifest: Manifest) -> None:
        """Upload the manifest, which makes the files a checkpoint, after checking that they are in the folder."""
        sizes = _sizes(self._write(name, partial(self._list, draft)))
        for file, record in sorted(manifest.files.items()):
            if sizes.get(file) != record.size:
                found = f"has {sizes[file]} bytes instead of {record.size}" if file in sizes else "is missing"
                raise CheckpointSaveError(
                    self.at(name),
                    f"{file!r} {found} in the folder of the first process, though it has been written; the folder must "
                    "be the same for all processes, which memory:// and folders of each host are not.",
                )
        self.put(name, draft, MANIFEST, [memoryview(manifest.to_bytes())])

    def _put(self, path: str, pieces: Iterable[memoryview]) -> None:
        files, root = self._files()
        with tempfile.TemporaryFile() as local:
            local.writelines(pieces)
            local.seek(0)
            with files.open(f"{root}/{path}", "wb") as file:  # put_file would leave empty folders in some systems
                shutil.copyfileobj(local, file, _CHUNK)

    def delete(self, name: str) -> None:
        """Delete a checkpoint, its manifest first."""
        self._write(name, partial(self._delete, name))

    def _delete(self, name: str) -> None:
        files, _ = self._files()
        entries = self._list(name)  # none if this is tried again after the last file was deleted
        if foreign := foreign_files(map(_file_name, entries)):
            reason = f"{foreign[0]!r} in it is not a file of a checkpoint; move it elsewhere."
            raise CheckpointSaveError(self.at(name), reason)
        # Without a manifest it is no checkpoint, so that an interruption leaves none that is incomplete.
        for entry in sorted(entries, key=lambda entry: _file_name(entry) != MANIFEST):
            files.rm_file(entry["name"])

    def set_latest(self, latest: str, name: str) -> None:
        """Write the name of a checkpoint to the file ``latest``."""
        self._write(latest, lambda: self._put(latest, (memoryview(f"{name}\n".encode()),)))

    def get_latest(self, latest: str) -> str | None:
        """Return the name of the checkpoint that ``latest`` points to; None if there is none."""
        try:
            return self._read(latest, partial(self._content, latest))
        except (CheckpointError, ImportError):
            return None

    def _content(self, latest: str) -> str:
        files, root = self._files()
        return str(files.cat_file(f"{root}/{latest}", end=4096).decode().strip())

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

    def _read(self, path: str, call: Callable[[], T]) -> T:
        def failed(error: Exception) -> CheckpointError:
            is_gone, kind = isinstance(error, FileNotFoundError), type(error).__name__
            return CheckpointError(path, "is missing." if is_gone else f"cannot be read: {kind}: {error}")

        return self._tried(call, failed)

    def _write(self, name: str, call: Callable[[], T]) -> T:
        return self._tried(call, lambda error: CheckpointSaveError(self.at(name), f"{type(error).__name__}: {error}"))

    def _tried(self, call: Callable[[], T], to_error: Callable[[Exception], Exception]) -> T:
        """Call a function, again if the connection fails, and raise what ``to_error`` returns for the last error."""
        tries = 0
        while True:
            tries += 1
            try:
                return call()
            except (CheckpointError, CheckpointSaveError, ImportError):
                raise
            except Exception as error:  # noqa: BLE001  (each file system has its own errors)
                if tries == self.tries or isinstance(error, _NOT_OF_THE_CONNECTION):
                    # The file system's own error may contain the secrets of the URL.
                    raise to_error(error) from (error if str(self) == self.url else None)
                time.sleep(self.wait * 2 ** (tries - 1))
