"""Which checkpoints a folder has, and which of them is the newest whole one."""

from __future__ import annotations

import os
import warnings
from typing import TYPE_CHECKING

import attrs

from composer.checkpoint.errors import CheckpointError
from composer.checkpoint.folder import Folder, open_folder
from composer.core import TimeUnit

if TYPE_CHECKING:
    from composer.checkpoint.manifest import Manifest

__all__ = ["FoundCheckpoint", "find_checkpoints", "newest_checkpoint"]


@attrs.frozen
class FoundCheckpoint:
    """A checkpoint in a folder, or what looks like one.

    Args:
        path: Where it is.
        name: Its name in the folder.
        manifest: What it holds; None if it is not whole.
        problem: Why it is not, as a sentence; None if nothing is wrong.

    Example:
        >>> FoundCheckpoint("runs/ep1-ba5", "ep1-ba5", None, "runs/ep1-ba5/manifest.json is missing.").is_whole
        False
    """

    path: str
    name: str
    manifest: Manifest | None
    problem: str | None

    @property
    def is_whole(self) -> bool:
        """Whether it can be used, as far as it has been looked at."""
        return self.manifest is not None


def find_checkpoints(folder: str | os.PathLike[str] | Folder) -> list[FoundCheckpoint]:
    """Return what a folder has of checkpoints, the oldest first, those that are not whole before all others.

    Manifests, names and sizes of files are looked at, contents are not. What is being written is left out.

    Args:
        folder: Where to look; a path or an address. A folder that does not exist has none.

    Raises:
        CheckpointError: The folder cannot be read.

    Example:
        >>> find_checkpoints("no/such/folder")
        []
    """
    opened = open_folder(folder) if isinstance(folder, (str, os.PathLike)) else folder
    found = [_look_at(opened, name) for name in opened.names()]
    return sorted(found, key=_age)


def _look_at(folder: Folder, name: str) -> FoundCheckpoint:
    try:
        return FoundCheckpoint(folder.at(name), name, folder.manifest(name), None)
    except CheckpointError as error:
        return FoundCheckpoint(folder.at(name), name, None, str(error))


def _age(found: FoundCheckpoint) -> tuple[bool, int | float, int | float, str]:
    if found.manifest is None:
        return (False, 0, 0, found.name)
    clock = found.manifest.timestamp
    # An epoch's end has the clock of its last batch, and one epoch more.
    return (True, clock.count(TimeUnit.BATCH), clock.count(TimeUnit.EPOCH), found.manifest.created)


def newest_checkpoint(
    folder: str | os.PathLike[str], *, run_name: str | None = None, weights_only: bool | None = False
) -> FoundCheckpoint | None:
    """Return the newest whole checkpoint of a folder; None if there is none.

    Newest is the one with the most batches. Contents are compared with their checksums, so that it is whole indeed; of
    each that is passed over for that reason a warning says why.

    Args:
        folder: Where to look; a path or an address.
        run_name: Of which run; of any if None.
        weights_only: Whether one with or without the state of the training is wanted; None takes either.

    Raises:
        CheckpointError: The folder cannot be read.

    Example:
        >>> newest_checkpoint("no/such/folder") is None
        True
    """
    opened = open_folder(folder)
    for found in reversed(find_checkpoints(opened)):
        if found.manifest is None:
            _warn(found.problem)
            continue
        if run_name not in (None, found.manifest.run_name) or weights_only not in (None, found.manifest.weights_only):
            continue
        try:
            opened.check(found.name, found.manifest)
        except CheckpointError as error:
            _warn(str(error))
            continue
        return found
    return None


def _warn(problem: str | None) -> None:
    warnings.warn(f"Passed over a checkpoint that is not whole: {problem}", UserWarning, stacklevel=3)
