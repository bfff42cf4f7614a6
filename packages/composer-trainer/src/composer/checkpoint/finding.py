"""From a path or URL to a checkpoint: its folder and name, or the newest undamaged checkpoint of a folder.

:func:`follow` follows a path and links to a checkpoint, or to a folder of checkpoints. :func:`locate` and
:func:`open_checkpoint` ask no other process, and choose in a folder by :func:`newest_checkpoint`. :func:`agreed_path`
and :func:`agreed_newest` do the same for all processes, which have to call them together: rank 0 follows the path and
lists the folder, and all compare contents and load from the path that they return. Nothing here changes a folder.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import attrs

from composer.checkpoint.errors import CheckpointError, MissingCheckpointError, OtherReleaseError
from composer.checkpoint.folders import Folder, is_remote, local_path, open_folder, split_path
from composer.checkpoint.manifest import MANIFEST, TENSORS, Manifest
from composer.checkpoint.reading import OpenCheckpoint
from composer.core import Timestamp
from composer.distributed import all_gather_object, from_rank_zero, get_global_rank, get_world_size
from composer.distributed.collectives import failing_in_all_processes

Found = TypeVar("Found")


@attrs.frozen
class FoundCheckpoint:
    """A checkpoint in a folder, or a folder that looks like one.

    Args:
        path: Its path or URL.
        name: Its name in the folder.
        manifest: Its manifest; None if it is incomplete or damaged.
        problem: What is wrong with it, as a sentence; None if nothing is.
        error: The error with this sentence.

    Example:
        >>> FoundCheckpoint("runs/ep1-ba5", "ep1-ba5", None, "runs/ep1-ba5/manifest.json is missing.").is_complete
        False
    """

    path: str
    name: str
    manifest: Manifest | None
    problem: str | None
    error: CheckpointError | None = None

    @property
    def is_complete(self) -> bool:
        """Whether its manifest and the sizes of its files are right."""
        return self.manifest is not None


def find_checkpoints(folder: str | os.PathLike[str] | Folder) -> list[FoundCheckpoint]:
    """Return the checkpoints of a folder, incomplete ones first and the others from the oldest to the newest.

    Manifests and the names and sizes of files are checked, contents are not. Checkpoints that are being written are
    left out.

    Args:
        folder: A path or URL. A folder that does not exist has no checkpoints.

    Raises:
        CheckpointError: The folder cannot be read.

    Example:
        >>> find_checkpoints("no/such/folder")
        []
    """
    opened = open_folder(folder) if isinstance(folder, (str, os.PathLike)) else folder
    found = []
    for name in opened.names():
        try:
            found.append(FoundCheckpoint(opened.at(name), name, OpenCheckpoint.of(opened, name).manifest, None))
        except CheckpointError as error:
            found.append(FoundCheckpoint(opened.at(name), name, None, str(error), error))
    return sorted(found, key=_order)


def newest_checkpoint(
    folder: str | os.PathLike[str] | Folder, *, run_name: str | None = None, weights_only: bool | None = False
) -> FoundCheckpoint | None:
    """Return the undamaged checkpoint of a folder that has the most batches; None if there is none.

    Contents are compared with their checksums. A warning names each checkpoint that is skipped as damaged.

    Args:
        folder: A path or URL.
        run_name: The run that has saved it; any if None.
        weights_only: Whether to return a checkpoint of weights only, or one from which training resumes; None accepts
            both.

    Raises:
        CheckpointError: The folder cannot be read.

    Example:
        >>> newest_checkpoint("no/such/folder") is None
        True
    """
    opened = open_folder(folder) if isinstance(folder, (str, os.PathLike)) else folder
    found = candidates(opened, run_name, weights_only=weights_only)
    return _first_undamaged(found, lambda one: one.problem or damage_of(opened, one.name))


def _first_undamaged(
    found: Iterable[FoundCheckpoint], problem_of: Callable[[FoundCheckpoint], str | None]
) -> FoundCheckpoint | None:
    """Return the first checkpoint in which no problem is found, and warn of those before it."""
    for one in found:
        problem = problem_of(one)
        if problem is None:
            return one
        skipped = f"Skipped a checkpoint that is incomplete or damaged: {problem}"
        warnings.warn(skipped, UserWarning, stacklevel=3)
    return None


def latest_in(folder: Any, path: Any) -> Any:
    """Return the folder, if there is one, in place of the path ``"latest"``, and any other path as it is."""
    return folder if folder is not None and str(path).rstrip("/") == "latest" else path


def locate(path: str | os.PathLike[str]) -> tuple[Folder, str]:
    """Return the folder that a checkpoint is in, and its name there; for one process.

    Args:
        path: The checkpoint; a link or file that names it (``runs/latest``); or a folder of checkpoints, of which the
            newest undamaged one is chosen.

    Raises:
        CheckpointError: There is none.
    """
    opened, name = follow(path)
    if name is None:
        name = _required(newest_checkpoint(opened, weights_only=None), opened).name
    return opened, name


def open_checkpoint(path: str | os.PathLike[str]) -> OpenCheckpoint:
    """Return the checkpoint at a path, see :func:`locate`, to be read; after :func:`agreed_path` no link is left.

    Raises:
        CheckpointError: There is none, or it is incomplete or damaged.
    """
    return OpenCheckpoint.of(*locate(path))


def agreed_path(path: str) -> str:
    """Return the path from which all processes load, which rank 0 chooses; all have to call it.

    A single process gets the path as it is, and :func:`open_checkpoint` follows it. Of several, rank 0 follows links,
    as one may change before another process follows it. In a folder of checkpoints, the newest undamaged one is chosen
    by :func:`agreed_newest`.

    Args:
        path: The path of a checkpoint; see :func:`locate`. That of rank 0 is used.

    Raises:
        CheckpointError: With several processes, in each, if there is none; else the load raises it.

    Example:
        >>> agreed_path("runs/ep1-ba5")
        'runs/ep1-ba5'
    """
    if get_world_size() == 1:
        return path
    is_folder = False
    with failing_in_all_processes("cannot be loaded: looking for it", partial(CheckpointError, path)):
        if get_global_rank() == 0:
            parent, name = follow(path)
            path, is_folder = (str(parent), True) if name is None else (parent.at(name), False)
    path, is_folder = from_rank_zero((path, is_folder))
    return _required(agreed_newest(path, None, weights_only=None), open_folder(path)) if is_folder else path


def agreed_newest(
    folder: str | os.PathLike[str] | Folder, run_name: str | None, *, weights_only: bool | None = False
) -> str | None:
    """Return the newest undamaged checkpoint of a folder, from which all processes load; None if there is none.

    All processes have to call it. Rank 0 lists the checkpoints, and all compare them with their checksums, the newest
    first: each a part of the files with tensors, so that none waits longer than ``dist_timeout`` for another.

    Args:
        folder: A folder, or its path or URL; the same in all processes.
        run_name: The run that has saved it; any if None.
        weights_only: See :func:`newest_checkpoint`.

    Raises:
        CheckpointError: The folder cannot be read, or looking for a checkpoint failed in another process.
    """
    opened = open_folder(folder) if isinstance(folder, (str, os.PathLike)) else folder
    failed = partial(CheckpointError, str(opened))

    def problem_of(one: FoundCheckpoint) -> str | None:
        with failing_in_all_processes("cannot be loaded from: reading a checkpoint", failed):
            own = one.problem or damage_of(opened, one.name, get_global_rank(), get_world_size())
        return next(filter(None, all_gather_object(own)), None)

    with failing_in_all_processes("cannot be loaded from: looking for a checkpoint", failed):
        found = candidates(opened, run_name, weights_only=weights_only) if get_global_rank() == 0 else []
    of_first = from_rank_zero([attrs.evolve(one, error=None) for one in found])  # errors are not sent
    newest = _first_undamaged(of_first, problem_of)
    return None if newest is None else newest.path


def follow(path: str | os.PathLike[str]) -> tuple[Folder, str | None]:
    """Return as :func:`locate`, but None in place of the name if the newest one of the folder is to be chosen."""
    if not str(path):
        raise CheckpointError("''", "is not the path of a checkpoint.")
    text = without_link(path)
    parent, name = split_path(text if is_remote(text) else str(local_path(text).absolute()))
    opened = open_folder(parent)
    name = follow_link(opened, name)
    if not opened.exists(name):
        raise MissingCheckpointError(path)
    if not is_remote(text) and Path(opened.at(name)).is_file():
        what = "is a file: torch.load reads it, and load_checkpoint(composer.foreign.ForeignFile(path), …) loads it."
        raise CheckpointError(path, what)
    inside = open_folder(opened.at(name))
    if not inside.exists(MANIFEST) and any(found.is_complete for found in find_checkpoints(inside)):
        return inside, None
    return opened, name


def without_link(path: object) -> str:
    """Return a path after following the symbolic link that it may be, and a URL as it is."""
    text = str(path)
    return text if is_remote(text) or not local_path(text).is_symlink() else os.path.realpath(local_path(text))


def follow_link(folder: Folder, name: str) -> str:
    """Return the name to which a link, or the content of a file, leads in a folder; the same name if to none.

    A link never leads out of the folder: only the name of something in it is followed.
    """
    target = folder.get_latest(name)
    is_name = target and target != ".." and target == Path(target).name and folder.exists(target)
    return target if target and is_name else name


def _required(found: Found | None, folder: Folder) -> Found:
    """Return what was found in a folder, and raise a CheckpointError if that is nothing."""
    if found is None:
        raise CheckpointError(str(folder), "contains no complete checkpoint.")
    return found


def candidates(opened: Folder, run_name: str | None, *, weights_only: bool | None) -> list[FoundCheckpoint]:
    """Return the checkpoints of a run, and those whose run is unknown as they are damaged, the newest first.

    Raises:
        OtherReleaseError: Another release has written one of the run, which may be newer than those listed.
    """
    found = find_checkpoints(opened)
    for error in (one.error for one in found):
        if isinstance(error, OtherReleaseError) and (run_name is None or error.run_name in (None, run_name)):
            raise error
    return [
        checkpoint
        for checkpoint in reversed(found)
        if (manifest := checkpoint.manifest) is None
        or (run_name in (None, manifest.run_name) and weights_only in (None, manifest.weights_only))
    ]


def damage_of(opened: Folder, name: str, rank: int = 0, world_size: int = 1) -> str | None:
    """Return what is wrong with a checkpoint, as far as this process compares its contents; None if nothing is.

    Each process compares its part of the files with tensors, and all other files. Only the first one reports that it
    does not see the checkpoint: another fails when it loads from it.
    """
    try:
        checkpoint = OpenCheckpoint.of(opened, name)
    except CheckpointError as error:
        return None if rank else str(error)
    with_tensors = sorted(filter(TENSORS.fullmatch, checkpoint.manifest.files))
    others = {*checkpoint.manifest.files}.difference(with_tensors)
    try:
        checkpoint.check(sorted(others.union(with_tensors[rank::world_size])))
    except CheckpointError as error:
        return str(error)
    return None


def clock_order(clock: Timestamp) -> tuple[int, int, int]:
    """Return by what the checkpoints of a run are ordered.

    The end of an epoch has the clock of its last batch and one epoch more, and that of an iteration one iteration more.
    """
    return int(clock.batch), int(clock.epoch), int(clock.iteration)


def _order(found: FoundCheckpoint) -> tuple[bool, tuple[int, int, int], str]:
    if found.manifest is None:
        return (False, (0, 0, 0), found.name)
    return (True, clock_order(found.manifest.timestamp), found.manifest.created)
