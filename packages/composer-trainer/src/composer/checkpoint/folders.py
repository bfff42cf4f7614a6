"""Folders of checkpoints: from a path or URL to its folder, and local folders, to each of which one process saves.

Files are written to a draft, a hidden folder, which gets the checkpoint's name when all of it is on the disk. At any
time, also after a process was killed, a reader finds the former checkpoint or the new one, and never a part.

Three kinds of hidden names are beside the checkpoints:

- ``.NAME.PID-DIGITS.tmp``: a draft, a link that is not in place yet, or a checkpoint that is being deleted.
  :meth:`LocalFolder.tidy` deletes those that killed processes have left.
- ``.NAME.replaced``: the former checkpoint of a name, while the new one gets it. As long as nothing has the name, also
  after a kill, :class:`LocalFolder` reads this one under the name.
- ``.NAME.aside-DIGITS``: a damaged checkpoint that a resumed run has passed over. Nothing deletes it.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import secrets
import shutil
from collections.abc import Iterable, Iterator
from io import RawIOBase
from pathlib import Path
from typing import TypeAlias

import attrs

from composer.checkpoint.errors import CheckpointError, CheckpointSaveError
from composer.checkpoint.manifest import MANIFEST, Manifest, foreign_files
from composer.checkpoint.remote import RemoteFolder

_TEMPORARY = re.compile(r"\..+\.\d+-[0-9a-f]{8}\.tmp")
_REPLACED = ".replaced"
_being_written: set[str] = set()
"""The drafts and links that this process is writing, each with random digits in its name."""
_PROTOCOL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+://")


@attrs.frozen
class LocalFolder:
    """A local folder of checkpoints, each of which is a folder.

    Args:
        path: The folder.
    """

    path: Path

    def __str__(self) -> str:
        return str(self.path)

    def at(self, name: str) -> str:
        """Return the path of a checkpoint."""
        return str(self.path / name)

    def make(self) -> None:
        """Create the folder."""
        with reporting(self.path):
            self.path.mkdir(parents=True, exist_ok=True)

    def tidy(self) -> None:
        """Delete unfinished checkpoints and links of killed processes; call it only if no other process saves here."""
        with reporting(self.path):
            for entry in self.path.iterdir():
                # Another saver of this process, which shares the lock, may be writing one.
                if not _TEMPORARY.fullmatch(entry.name) or entry.name in _being_written:
                    continue
                if entry.is_dir() and not entry.is_symlink():
                    shutil.rmtree(entry, ignore_errors=True)
                else:
                    entry.unlink(missing_ok=True)

    def names(self) -> list[str]:
        """Return the names of possible checkpoints, also of those whose replacement was interrupted."""
        folders = [entry.name for entry in self._entries(self.path) if entry.is_dir() and not entry.is_symlink()]
        visible = {name for name in folders if not name.startswith(".")}
        hidden = {name for name in folders if name.startswith(".") and name.endswith(_REPLACED)}
        return sorted(visible.union(name[1 : -len(_REPLACED)] for name in hidden))

    def sizes(self, name: str) -> dict[str, int | None]:
        """Return the size of each file of a checkpoint; None for a link or a folder."""
        with _reading(self.path / name):
            return {
                entry.name: entry.stat().st_size if entry.is_file() and not entry.is_symlink() else None
                for entry in self._entries(self._place(name))
            }

    def _entries(self, path: Path) -> list[Path]:
        with _reading(path), contextlib.suppress(FileNotFoundError, NotADirectoryError):
            return [*path.iterdir()]
        return []

    def exists(self, name: str) -> bool:
        """Return whether a file or folder has a name."""
        return os.path.lexists(self._place(name))

    def _place(self, name: str) -> Path:
        """Return the path of what has a name: a checkpoint's hidden path if its replacement was interrupted."""
        path, replaced = self.path / name, self._replaced(name)
        return path if os.path.lexists(path) or not replaced.is_dir() else replaced

    def _replaced(self, name: str) -> Path:
        return self.path / f".{name}{_REPLACED}"

    @contextlib.contextmanager
    def reader(self, name: str, file: str) -> Iterator[RawIOBase]:
        """Open a file of a checkpoint for reading."""
        path = self._place(name) / file
        with _reading(path), open(path, "rb", buffering=0, opener=without_links) as source:
            yield source

    def begin(self, name: str) -> str:
        """Create a temporary folder for the files of a new checkpoint, and return its name."""
        temporary, target = self._temporary(name), self.path / name
        with reporting(target):
            sizes = self.sizes(name)
            if target.is_symlink() or (self.exists(name) and MANIFEST not in sizes):
                what = "a file or folder of that name is not a checkpoint; move it elsewhere."
                raise CheckpointSaveError(target, what)
            if foreign := foreign_files(sizes):
                reason = f"{foreign[0]!r} in it is not a file of a checkpoint; move it elsewhere."
                raise CheckpointSaveError(target, reason)
            _being_written.add(temporary.name)
            temporary.mkdir()
        return temporary.name

    def put(self, name: str, draft: str, file: str, content: Iterable[memoryview]) -> None:
        """Write a file of a checkpoint to the folder that :meth:`begin` returned, in any process."""
        with reporting(self.path / name):
            _write_file(self.path / draft / file, content)

    def commit(self, name: str, draft: str, manifest: Manifest) -> None:
        """Write the manifest and give the checkpoint its name; one that had it becomes the draft."""
        temporary = self.path / draft
        self.put(name, draft, MANIFEST, [memoryview(manifest.to_bytes())])
        with reporting(self.path / name):
            # The names of files are on the disk only after this. The system may write the rename before them.
            sync_folder(temporary)
            self._put_in_place(temporary, name)

    def abandon(self, draft: str) -> None:
        """Delete what is left of a draft: unfinished files, or a replaced checkpoint; call it after :meth:`begin`."""
        shutil.rmtree(self.path / draft, ignore_errors=True)
        _being_written.discard(draft)

    def _put_in_place(self, temporary: Path, name: str) -> None:
        target, aside = self.path / name, self._replaced(name)
        if os.path.lexists(target):
            # A folder cannot replace another in one step. In between, the old one is found under a hidden name.
            shutil.rmtree(aside, ignore_errors=True)
            target.rename(aside)
        try:
            temporary.rename(target)
        except OSError:
            if os.path.lexists(aside) and not os.path.lexists(target):
                aside.rename(target)
            raise
        sync_folder(self.path)
        if os.path.lexists(aside):
            try:
                aside.rename(temporary)  # deleted by abandon(), which may take a third of the time of writing
            except OSError:
                shutil.rmtree(aside, ignore_errors=True)

    def _temporary(self, name: str) -> Path:
        return self.path / f".{name}.{os.getpid()}-{secrets.token_hex(4)}.tmp"

    def delete(self, name: str) -> None:
        """Delete a checkpoint. It is renamed first, so that it is never found incomplete."""
        temporary = self._temporary(name)
        with reporting(self.path / name, "an old one cannot be deleted: "), contextlib.suppress(FileNotFoundError):
            self._place(name).rename(temporary)
        shutil.rmtree(temporary, ignore_errors=True)

    def set_aside(self, name: str) -> str:
        """Give what has a name a hidden one, under which nothing deletes it; return its path."""
        aside = self.path / f".{name}.aside-{secrets.token_hex(4)}"
        with reporting(self.path / name, "it is damaged and cannot be renamed: "):
            self._place(name).rename(aside)
        return str(aside)

    def set_latest(self, latest: str, name: str) -> None:
        """Point a link, to the latest or best one, to a checkpoint; a file with its name where links do not exist."""
        target, temporary = self.path / latest, self._temporary(latest)
        if target.is_dir() and not target.is_symlink():
            raise CheckpointSaveError(target, "a folder has the name of this link; rename it.")
        _being_written.add(temporary.name)
        with reporting(target):
            try:
                try:
                    # Relative, so that it is still valid after the folder was moved.
                    temporary.symlink_to(name, target_is_directory=True)
                except OSError:
                    temporary.write_text(f"{name}\n", encoding="utf-8")
                temporary.replace(target)
            finally:
                _being_written.discard(temporary.name)
                temporary.unlink(missing_ok=True)

    def get_latest(self, latest: str) -> str | None:
        """Return the name of the checkpoint that ``latest`` points to; None if there is none."""
        path = self.path / latest
        try:
            if path.is_symlink():
                return Path(path.readlink()).name
            # A larger file does not contain a name, and is not read.
            return path.read_text(encoding="utf-8").strip() if path.is_file() and path.stat().st_size < 4096 else None
        except (OSError, ValueError):
            return None


Folder: TypeAlias = LocalFolder | RemoteFolder
"""What reads raises a CheckpointError, and what writes a CheckpointSaveError.

Local ones, also ``FileFolder`` of ``foreign/pt_files.py``, have two methods more: ``tidy`` and ``set_aside``."""


def open_folder(path: str | os.PathLike[str]) -> Folder:
    """Return the folder of a path or URL; nothing is created or read.

    Example:
        >>> open_folder("s3://bucket/runs/").at("ep1-ba5")
        's3://bucket/runs/ep1-ba5'
    """
    return RemoteFolder(str(path)) if is_remote(path) else LocalFolder(local_path(path).absolute())


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


@contextlib.contextmanager
def _reading(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise CheckpointError(path, f"cannot be read: {error.strerror}.") from None


@contextlib.contextmanager
def reporting(path: Path, what: str = "") -> Iterator[None]:
    """Raise errors of the system within this context as a CheckpointSaveError with the path."""
    try:
        yield
    except CheckpointSaveError:
        raise
    except OSError as error:
        raise CheckpointSaveError(path, f"{what}{_reason(error)}") from error


def without_links(path: str, flags: int) -> int:
    """Open a file unless its name is a link, which may lead to a file of somebody else; for :func:`open`."""
    return os.open(path, flags | getattr(os, "O_NOFOLLOW", 0), 0o666)


def _write_file(path: Path, content: Iterable[memoryview]) -> None:
    """Write a file, and return when it is on the disk."""
    with path.open("xb") as file:
        file.writelines(content)
        file.flush()
        os.fsync(file.fileno())


def sync_folder(path: Path) -> None:
    """Return when the names of the files in a folder are on the disk."""
    if os.name == "posix":
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _reason(error: OSError) -> str:
    """Return the cause of a system error and what to do, as the rest of a sentence."""
    if error.errno in {errno.ENOSPC, getattr(errno, "EDQUOT", errno.ENOSPC)}:
        return "the disk is full. Free some space, or keep fewer with save_num_checkpoints_to_keep."
    if error.errno in {errno.EACCES, errno.EPERM, errno.EROFS}:
        return f"there is no permission to write to {error.filename or 'its folder'}."
    if error.errno == errno.ENOENT:
        return "its folder does not exist: it was removed or unmounted, or is not the same in all processes."
    if error.errno == errno.ENOTDIR or (error.errno == errno.EEXIST and Path(error.filename or "").is_file()):
        return "a file has the name of its folder. Remove the file, or choose another folder."
    if error.errno == errno.ELOOP:
        return f"{error.filename} is a link, through which nothing is written. Remove it."
    return f"{error.strerror or error}."
