"""One living process to a folder: a lock that ends with the process that holds it, however that ends."""

from __future__ import annotations

import os
import platform
import threading
from pathlib import Path
from typing import IO

from composer.checkpoint.errors import CheckpointSaveError, FolderInUseError

__all__ = ["FolderLock"]

_LOCK = ".lock"
_held: dict[str, tuple[IO[str], int]] = {}
_changing = threading.Lock()


class FolderLock:
    """Says of a folder on this machine that this process saves to it.

    The lock belongs to the process: several savers in one process share it, processes that it starts do not have it,
    and the system takes it back when the process ends, also by a kill. Where the system or the file system has no
    such locks, there is none.

    Args:
        folder: The folder, which exists.

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
        """Give the lock back; the last saver of the process that does so frees the folder."""
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
        # Not flock: a process that has been forked, such as a loader's worker, would hold on to it after a kill.
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
