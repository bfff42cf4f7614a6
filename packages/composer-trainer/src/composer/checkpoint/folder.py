"""Where checkpoints are: what this machine's folders and remote ones have in common."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from composer.checkpoint.local import LocalFolder
from composer.checkpoint.remote import RemoteFolder, is_remote

if TYPE_CHECKING:
    import os

    from composer.checkpoint.manifest import Manifest
    from composer.checkpoint.snapshot import Snapshot

__all__ = ["Folder", "open_folder"]


class Folder(Protocol):
    """A folder in which checkpoints are, here or elsewhere; the methods are told of at :class:`LocalFolder`."""

    def at(self, name: str) -> str:
        """Return where the checkpoint of a name is."""

    def make(self) -> None:
        """Make the folder."""

    def names(self) -> list[str]:
        """Return the names of what may be checkpoints."""

    def manifest(self, name: str) -> Manifest:
        """Return a checkpoint's manifest."""

    def check(self, name: str, manifest: Manifest, *, thoroughly: bool = False) -> None:
        """Check a checkpoint's contents."""

    def exists(self, name: str) -> bool:
        """Return whether there is anything of a name."""

    def write(self, name: str, snapshot: Snapshot) -> Manifest:
        """Write a checkpoint."""

    def foreign(self, name: str) -> list[str]:
        """Return which files in a checkpoint are somebody else's."""

    def set_aside(self, name: str, *, for_link: bool = False) -> str | None:
        """Move what no checkpoint can replace out of the way, and return where it is."""

    def delete(self, name: str) -> None:
        """Delete a checkpoint."""

    def set_latest(self, latest: str, name: str) -> None:
        """Let ``latest`` lead to a checkpoint."""

    def get_latest(self, latest: str) -> str | None:
        """Return what ``latest`` leads to."""


def open_folder(path: str | os.PathLike[str]) -> Folder:
    """Return the folder of a path or address; nothing is made or read.

    Example:
        >>> open_folder("s3://bucket/runs/").at("ep1-ba5")
        's3://bucket/runs/ep1-ba5'
    """
    if is_remote(path):
        return RemoteFolder(str(path))
    return LocalFolder(Path(str(path).removeprefix("file://")).absolute())
