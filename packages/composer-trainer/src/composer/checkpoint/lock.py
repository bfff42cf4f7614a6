"""The lock by which only one living process saves to a local folder."""

from __future__ import annotations

import os
import platform
import threading
from pathlib import Path
from typing import IO

from composer.checkpoint.errors import FolderInUseError
from composer.checkpoint.folders import reporting, without_links

_LOCK = ".lock"
_held: dict[str, tuple[IO[str], int]] = {}
"""The files of the locks that this process has, by folder, each with the number of its savers."""
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
        key = str(Path(folder).resolve())
        with _changing:
            file, count = _held.get(key) or (_locked(Path(key)), 0)
            self._key = None if file is None else key
            if file is not None:
                _held[key] = (file, count + 1)

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
    with reporting(folder):
        file = open(folder / _LOCK, "a+", encoding="utf-8", opener=without_links)  # noqa: SIM115
    is_own = os.fstat(file.fileno()).st_nlink == 1  # with hard links it may also be a file of somebody else
    try:
        # Not flock: a forked process, such as a worker of a DataLoader, would hold the lock after a kill.
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        file.seek(0)
        holder = (file.read(200).strip() if is_own else "") or "an unknown process"
        file.close()
        raise FolderInUseError(folder, holder) from None
    except OSError:  # a file system without locks
        file.close()
        return None
    if is_own:
        file.truncate(0)
        file.write(f"process {os.getpid()} on {platform.node()}")
        file.flush()
    return file
