"""Checkpoints in local folders, written atomically, and the lock that keeps other processes from saving there."""

from __future__ import annotations

import contextlib
import errno
import os
import platform
import re
import secrets
import shutil
import threading
from functools import partial
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import IO, TYPE_CHECKING, Self

import attrs

from composer.checkpoint.errors import CheckpointError, CheckpointSaveError, FolderInUseError
from composer.checkpoint.manifest import (
    FORMAT,
    MANIFEST,
    MAX_MANIFEST_BYTES,
    FileRecord,
    Manifest,
    foreign_files,
    warn_of_unknown,
)
from composer.checkpoint.tensor_file import allocate
from composer.core.background import Task, ThreadError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from composer.checkpoint.saving import Snapshot
    from composer.checkpoint.sharded import ReadInto

__all__ = ["FolderLock", "LocalFolder", "check_files", "read_manifest", "records_while"]

_CHUNK = 4 << 20
_HASHED = 1 << 20
_SECONDS_BETWEEN_LOOKS = 1.0
_LOCK = ".lock"
_TEMPORARY = re.compile(r"\..+\.\d+-[0-9a-f]{8}\.tmp")
_SET_ASIDE = ".replaced"
_being_written: set[str] = set()
"""Names of temporary folders that this process is writing, each with a random part."""


def read_manifest(checkpoint: Path) -> Manifest:
    """Return a checkpoint's manifest, after checking the names and sizes of its files.

    Files that the manifest does not list are ignored with a warning.

    Raises:
        CheckpointError: The folder is not a complete checkpoint.
    """
    path = checkpoint / MANIFEST
    try:
        if path.is_symlink() or not path.is_file():
            raise CheckpointError(path, "is missing, so this is no checkpoint, or one that was not finished.")
        if path.stat().st_size > MAX_MANIFEST_BYTES:
            raise CheckpointError(path, f"is larger than any manifest ({MAX_MANIFEST_BYTES} bytes).")
        content = path.read_bytes()
        names = {entry.name for entry in checkpoint.iterdir()} - {MANIFEST}
    except OSError as error:
        raise CheckpointError(path, f"cannot be read: {error.strerror}.") from None
    manifest = Manifest.from_bytes(content, path)
    for name in sorted(manifest.files.keys() - names):
        raise CheckpointError(checkpoint / name, "is missing, and the manifest lists it.")
    for name, record in manifest.files.items():
        file = checkpoint / name
        try:
            if file.is_symlink() or not file.is_file():
                raise CheckpointError(file, "must be a file, and is a link or a folder.")
            size = file.stat().st_size
        except OSError as error:
            raise CheckpointError(file, f"cannot be read: {error.strerror}.") from None
        if size != record.size:
            raise CheckpointError(
                file, f"has {size} bytes, and the manifest lists {record.size}: it was cut off or replaced."
            )
    warn_of_unknown(checkpoint, names - manifest.files.keys())
    return manifest


def check_files(
    checkpoint: Path, manifest: Manifest, names: Iterable[str] | None = None, *, thoroughly: bool = False
) -> None:
    """Compare the contents of files with their checksums.

    Args:
        checkpoint: The folder.
        manifest: Its manifest.
        names: The files; all if None.
        thoroughly: Whether to compare all checksums, or only the fastest.

    Raises:
        CheckpointError: The content of a file is not the one that was written.
    """
    for name in manifest.files if names is None else names:
        path, record = checkpoint / name, manifest.files[name]
        hashes = record.hashes(thoroughly=thoroughly)
        try:
            with path.open("rb", buffering=0) as file:
                while chunk := file.read(_HASHED):
                    for digest in hashes.values():
                        digest.update(chunk)
        except OSError as error:
            raise CheckpointError(path, f"cannot be read: {error.strerror}.") from None
        record.compare(path, hashes)


@contextlib.contextmanager
def records_while(files: Mapping[str, Sequence[memoryview]]) -> Iterator[Callable[[], dict[str, FileRecord]]]:
    """Hash each content in a thread while they are written; the context ends after the threads.

    Yields a function that waits for the threads and returns the records of the files by name.

    Args:
        files: The contents by name.
    """
    tasks: dict[str, Task[FileRecord]] = {}
    hashes = {name: partial(FileRecord.of, pieces) for name, pieces in files.items()}

    def record(name: str) -> FileRecord:
        with contextlib.suppress(KeyError, ThreadError):
            return tasks[name].result()
        return hashes[name]()

    try:
        for name, call in hashes.items():
            with contextlib.suppress(ThreadError):
                tasks[name] = Task(call)
        yield lambda: {name: record(name) for name in files}
    finally:
        for task in tasks.values():
            task.wait()


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
        """Create the folder.

        Raises:
            CheckpointSaveError: It cannot be created.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise CheckpointSaveError(self.path, _reason(error)) from error

    def tidy(self) -> None:
        """Delete the unfinished checkpoints of killed processes; call it only if no other process saves here.

        Raises:
            CheckpointSaveError: The folder cannot be read.
        """
        try:
            for entry in self.path.iterdir():
                is_left = _TEMPORARY.fullmatch(entry.name) and entry.name not in _being_written
                if is_left and entry.is_dir() and not entry.is_symlink():
                    shutil.rmtree(entry, ignore_errors=True)
        except OSError as error:
            raise CheckpointSaveError(self.path, _reason(error)) from error

    def names(self) -> list[str]:
        """Return the names of possible checkpoints, and of those whose replacement was interrupted."""
        try:
            folders = [entry.name for entry in self.path.iterdir() if entry.is_dir() and not entry.is_symlink()]
        except FileNotFoundError:
            return []
        except OSError as error:
            raise CheckpointError(self.path, f"cannot be read: {error.strerror}.") from None
        visible = {name for name in folders if not name.startswith(".")}
        hidden = {name for name in folders if name.startswith(".") and name.endswith(_SET_ASIDE)}
        return sorted(visible | {name for name in hidden if name[1 : -len(_SET_ASIDE)] not in visible})

    def manifest(self, name: str) -> Manifest:
        """Return the manifest of a checkpoint; see :func:`read_manifest`."""
        return read_manifest(self.path / name)

    def check(
        self, name: str, manifest: Manifest, files: Iterable[str] | None = None, *, thoroughly: bool = False
    ) -> None:
        """Compare the contents of a checkpoint, or of some files, with its manifest; see :func:`check_files`."""
        check_files(self.path / name, manifest, files, thoroughly=thoroughly)

    def exists(self, name: str) -> bool:
        """Return whether a file or folder has a name."""
        return os.path.lexists(self.path / name)

    def write(self, name: str, snapshot: Snapshot) -> Manifest:
        """Write a checkpoint atomically, and replace one that has the name.

        All files are on the disk before the folder gets its name.

        Raises:
            CheckpointSaveError: It could not be written; an existing checkpoint is unchanged.
        """
        place = self.begin(name)
        try:
            files = snapshot.files()
            with records_while(files) as records:
                for file, pieces in files.items():
                    self.put(name, place, file, pieces)
                manifest = attrs.evolve(snapshot.manifest, files=records())
            self.commit(name, place, manifest)
        finally:
            self.abandon(place)
        return manifest

    @contextlib.contextmanager
    def reader(self, name: str, file: str) -> Iterator[ReadInto]:
        """Open a file of a checkpoint, and yield a function that fills memory with the bytes at a position.

        Raises:
            CheckpointError: It cannot be read, or ends before that.
        """
        path = self.path / name / file

        def read(position: int, memory: memoryview) -> None:
            source.seek(position)
            while memory:
                count = source.readinto(memory)
                if not count:
                    raise CheckpointError(path, "has been changed while it was read: it ends within a tensor.")
                memory = memory[count:]

        try:
            with path.open("rb", buffering=0) as source:
                yield read
        except OSError as error:
            raise CheckpointError(path, f"cannot be read: {error.strerror}.") from None

    def begin(self, name: str) -> str:
        """Return the place for the files of a new checkpoint, which is not one until it is committed.

        Raises:
            CheckpointSaveError: No checkpoint can be written here, or not by this name.
        """
        temporary = self._temporary(name)
        _being_written.add(temporary.name)
        try:
            with self._saving(name):
                self._check_place(name)
                temporary.mkdir()
        except BaseException:
            self.abandon(temporary.name)
            raise
        return temporary.name

    def put(self, name: str, place: str, file: str, pieces: Iterable[memoryview]) -> None:
        """Write a file of a checkpoint to the place that :meth:`begin` returned, in any process.

        Raises:
            CheckpointSaveError: It could not be written.
        """
        with self._saving(name):
            _write_file(self.path / place / file, pieces)

    def commit(self, name: str, place: str, manifest: Manifest) -> None:
        """Write the manifest and give the checkpoint its name; one that had it is moved to the place.

        Raises:
            CheckpointSaveError: It could not be written; an existing checkpoint is unchanged.
        """
        temporary = self.path / place
        with self._saving(name):
            _write_file(temporary / MANIFEST, [memoryview(manifest.to_bytes())])
            _sync_folder(temporary)
            self._put_in_place(temporary, name)

    def abandon(self, place: str) -> None:
        """Delete what is at a place: an unfinished or a replaced checkpoint; call it after :meth:`begin`."""
        shutil.rmtree(self.path / place, ignore_errors=True)
        _being_written.discard(place)

    @contextlib.contextmanager
    def _saving(self, name: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if isinstance(error, CheckpointSaveError):
                raise
            raise CheckpointSaveError(self.at(name), _reason(error)) from error

    def _check_place(self, name: str) -> None:
        target = self.path / name
        if not self.path.is_dir():
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
        if os.path.lexists(target) and not _is_ours(target):
            raise CheckpointSaveError(target, "a file or folder of that name is not a checkpoint; move it elsewhere.")
        if foreign := self.foreign(name):
            raise CheckpointSaveError(target, f"{foreign[0]!r} in it is not a file of a checkpoint; move it elsewhere.")

    def _put_in_place(self, temporary: Path, name: str) -> None:
        target, aside = self.path / name, self.path / f".{name}{_SET_ASIDE}"
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
        _sync_folder(self.path)
        if os.path.lexists(aside):
            try:
                aside.rename(temporary)  # deleted by abandon(), which may take a third of the time of writing
            except OSError:
                shutil.rmtree(aside, ignore_errors=True)

    def _temporary(self, name: str) -> Path:
        return self.path / f".{name}.{os.getpid()}-{secrets.token_hex(4)}.tmp"

    def foreign(self, name: str) -> list[str]:
        """Return which files in a checkpoint are not ours."""
        try:
            return foreign_files(entry.name for entry in (self.path / name).iterdir())
        except OSError:
            return []

    def set_aside(self, name: str, *, for_link: bool = False) -> str | None:
        """Rename what a checkpoint cannot replace to a hidden name, and return its new path; None if there is nothing.

        Args:
            name: The name of the checkpoint to be written.
            for_link: Whether a link is to be written, which can replace anything but a folder.

        Raises:
            CheckpointSaveError: It cannot be renamed.
        """
        target = self.path / name
        if for_link:
            is_in_the_way = target.is_dir() and not target.is_symlink()
        else:
            is_in_the_way = os.path.lexists(target) and (not _is_ours(target) or bool(self.foreign(name)))
        if not is_in_the_way:
            return None
        aside = self.path / f".{name}.aside-{secrets.token_hex(4)}"
        try:
            target.rename(aside)
        except OSError as error:
            raise CheckpointSaveError(target, f"what has its name cannot be renamed: {_reason(error)}") from error
        return str(aside)

    def delete(self, name: str) -> None:
        """Delete a checkpoint. It is renamed first, so that it is never found incomplete.

        Raises:
            CheckpointSaveError: It cannot be deleted.
        """
        temporary = self._temporary(name)
        try:
            (self.path / name).rename(temporary)
        except FileNotFoundError:
            return
        except OSError as error:
            raise CheckpointSaveError(self.at(name), f"an old one cannot be deleted: {_reason(error)}") from error
        shutil.rmtree(temporary, ignore_errors=True)

    def set_latest(self, latest: str, name: str) -> None:
        """Point the link ``latest`` to a checkpoint; it is a file with its name where links are not supported.

        Raises:
            CheckpointSaveError: A folder has the link's name, or it cannot be written.
        """
        target, temporary = self.path / latest, self._temporary(latest)
        if target.is_dir() and not target.is_symlink():
            raise CheckpointSaveError(target, "a folder has the name of the link to the latest one; rename it.")
        try:
            try:
                temporary.symlink_to(name, target_is_directory=True)
            except OSError:
                temporary.write_text(f"{name}\n", encoding="utf-8")
            temporary.replace(target)
        except OSError as error:
            temporary.unlink(missing_ok=True)
            raise CheckpointSaveError(target, _reason(error)) from error

    def get_latest(self, latest: str) -> str | None:
        """Return the name of the checkpoint that ``latest`` points to; None if there is none."""
        path = self.path / latest
        try:
            if path.is_symlink():
                return Path(path.readlink()).name
            return path.read_text(encoding="utf-8").strip() if path.is_file() and path.stat().st_size < 4096 else None
        except (OSError, ValueError):
            return None


def _is_ours(checkpoint: Path) -> bool:
    """Return whether a folder is a checkpoint, even a damaged one."""
    manifest = checkpoint / MANIFEST
    if checkpoint.is_symlink() or not manifest.is_file() or manifest.stat().st_size > MAX_MANIFEST_BYTES:
        return False
    return FORMAT.encode() in manifest.read_bytes()


def _write_file(path: Path, pieces: Iterable[memoryview]) -> None:
    """Write a file to the disk, without the page cache where the system can.

    Pages for gigabytes take longer than the disk, and replace those of the data that is trained on.
    """
    with path.open("xb", buffering=0) as file:
        _set_direct(file, True)
        with _Chunks(file) as chunks:
            buffer, filled = chunks.free(), 0
            for piece in pieces:
                rest = piece
                while rest:
                    count = min(len(rest), _CHUNK - filled)
                    buffer[filled : filled + count] = rest[:count]
                    rest, filled = rest[count:], filled + count
                    if filled == _CHUNK:
                        chunks.write(buffer)
                        buffer, filled = chunks.free(), 0
        _set_direct(file, False)  # only complete blocks of the disk can be written directly
        _write(file, buffer[:filled])
        os.fsync(file.fileno())


class _Chunks:
    """Writes one chunk of a file in a thread while the next is filled; the end of the block waits for the thread.

    Args:
        file: The file.

    Raises:
        OSError: From :meth:`free` or at the end of the block: a chunk could not be written.
    """

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self._free: SimpleQueue[memoryview | None] = SimpleQueue()
        self._filled: SimpleQueue[memoryview | None] = SimpleQueue()
        for _ in range(2):
            self._free.put(memoryview(allocate(_CHUNK)))
        self._task: Task[None] | None = None
        with contextlib.suppress(ThreadError):  # then each chunk is written before the next is filled
            self._task = Task(self._run)

    def _run(self) -> None:
        try:
            while (chunk := self._filled.get()) is not None:
                _write(self._file, chunk)
                self._free.put(chunk)
        finally:
            self._free.put(None)

    def free(self) -> memoryview:
        """Return memory to fill."""
        while True:
            try:
                chunk = self._free.get(timeout=_SECONDS_BETWEEN_LOOKS)
            except Empty:
                if self._task is None or not self._task.is_over:
                    continue
                chunk = None
            if chunk is not None:
                return chunk
            self._finish()

    def _finish(self) -> None:
        """Wait for the thread, and raise its error; write what it should have written if it ended before it began."""
        try:
            if self._task is not None:
                self._task.result()
        except ThreadError:
            self._task = None
            with contextlib.suppress(Empty):
                while (chunk := self._filled.get_nowait()) is not None:
                    _write(self._file, chunk)
                    self._free.put(chunk)

    def write(self, chunk: memoryview) -> None:
        """Write a chunk that :meth:`free` has returned, now or later."""
        if self._task is None:
            _write(self._file, chunk)
            self._free.put(chunk)
        else:
            self._filled.put(chunk)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._filled.put(None)
        try:
            self._finish()
        finally:
            if self._task is not None:
                self._task.wait()  # after Ctrl-C, too: the file is closed next


def _write(file: IO[bytes], content: memoryview) -> None:
    """Write all of a content; through the page cache if the file system refuses to write it directly."""
    while content:
        try:
            written = file.write(content)
        except OSError as error:
            if error.errno != errno.EINVAL or not _set_direct(file, False):
                raise
            continue
        if not written:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        content = content[written:]


def _set_direct(file: IO[bytes], is_direct: bool) -> bool:
    """Set whether a file is written without the page cache; return whether that has changed."""
    try:
        import fcntl  # noqa: PLC0415  (not on every system)

        flags = fcntl.fcntl(file, fcntl.F_GETFL)
        wanted = flags | os.O_DIRECT if is_direct else flags & ~os.O_DIRECT
        fcntl.fcntl(file, fcntl.F_SETFL, wanted)
    except (ImportError, AttributeError, OSError):  # the system or the file system cannot
        return False
    return wanted != flags


def _sync_folder(path: Path) -> None:
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
    return f"{error.strerror or error}."


_held: dict[str, tuple[IO[str], int]] = {}
_changing = threading.Lock()


class FolderLock:
    """A lock on a local folder that only one living process can hold, so that no other process saves to it.

    The savers of a process share the lock, child processes do not have it, and the system releases it when the process
    ends, even if it is killed. Nothing is locked where the system or the file system has no such locks.

    Args:
        folder: An existing folder.

    Raises:
        FolderInUseError: Another living process has the lock.
        CheckpointSaveError: The lock's file cannot be written.

    Example:
        >>> import tempfile
        >>> lock = FolderLock(tempfile.mkdtemp())
        >>> lock.release()
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self._key: str | None = None
        key = str(Path(folder).resolve())
        with _changing:
            if key in _held:
                file, count = _held[key]
            else:
                opened = _locked(Path(key))
                if opened is None:
                    return
                file, count = opened, 0
            _held[key] = (file, count + 1)
            self._key = key

    def release(self) -> None:
        """Release the lock; the folder is free when the last saver of the process has done so."""
        key, self._key = self._key, None
        if key is None:
            return
        with _changing:
            file, count = _held.pop(key)
            if count > 1:
                _held[key] = (file, count - 1)
            else:
                file.close()


def _locked(folder: Path) -> IO[str] | None:
    try:
        import fcntl  # noqa: PLC0415  (not on every system)
    except ImportError:
        return None
    try:
        # Not flock: a forked process, such as a worker of a DataLoader, would hold the lock after a kill.
        file = (folder / _LOCK).open("a+", encoding="utf-8")
    except OSError as error:
        raise CheckpointSaveError(folder, f"{error.strerror or error}.") from error
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        file.seek(0)
        holder = file.read(200).strip() or "an unknown process"
        file.close()
        raise FolderInUseError(folder, holder) from None
    except OSError:  # a file system without locks
        file.close()
        return None
    file.truncate(0)
    file.write(f"process {os.getpid()} on {platform.node()}")
    file.flush()
    return file
