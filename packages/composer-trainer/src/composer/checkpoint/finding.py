"""From a path or URL to a checkpoint that all processes load: its folder, or the newest checkpoint of a folder.

:func:`follow` follows a path and links to a checkpoint, or to a folder of checkpoints. :func:`candidates` and
:func:`damage_of` choose the newest undamaged one in a folder. One process does both by :func:`locate`. Several, which
all have to call :func:`agreed_path` or :func:`agreed_newest`, load from the path that rank 0 has found, after
``_check_all_see`` has verified that they find the same checkpoint there. Nothing here changes a folder.
"""

from __future__ import annotations

import os
import warnings
from functools import partial
from pathlib import Path

import attrs

from composer.checkpoint.errors import CheckpointError, MissingCheckpointError, OtherReleaseError
from composer.checkpoint.folder import MANIFEST, TENSORS, Manifest, is_remote, local_path, split_path
from composer.checkpoint.local import Folder, open_folder
from composer.checkpoint.reading import OpenCheckpoint
from composer.core import Timestamp
from composer.distributed import all_gather_object, from_rank_zero, get_global_rank, get_world_size
from composer.distributed.collectives import failing_in_all_processes


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
    folder: str | os.PathLike[str], *, run_name: str | None = None, weights_only: bool | None = False
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
    opened = open_folder(folder)
    for found in candidates(opened, run_name, weights_only=weights_only):
        problem = found.problem or damage_of(opened, found.name)
        if problem is None:
            return found
        warn_of_skipped(problem)
    return None


def locate(path: str | os.PathLike[str], folder: str | os.PathLike[str] | None = None) -> tuple[Folder, str]:
    """Return the folder that a checkpoint is in, and its name there.

    Args:
        path: The checkpoint; a link or file that names it (``runs/latest``); a folder of checkpoints, of which the
            newest undamaged one is chosen; or ``"latest"``, the newest undamaged one in ``folder``.
        folder: Where to look for ``"latest"``.

    Raises:
        CheckpointError: There is none.
    """
    opened, name = follow(path, folder)
    if name is None:
        found = newest_checkpoint(str(opened), weights_only=None)
        if found is None:
            raise without_any(opened)
        name = found.name
    return opened, name


def open_checkpoint(path: str | os.PathLike[str], folder: str | os.PathLike[str] | None = None) -> OpenCheckpoint:
    """Return a checkpoint to be read.

    Args:
        path: The checkpoint; see :func:`locate`.
        folder: Where to look for ``"latest"``.

    Raises:
        CheckpointError: There is none, or it is incomplete or damaged.
    """
    return OpenCheckpoint.of(*locate(path, folder))


def agreed_path(path: str, folder: str | os.PathLike[str] | None = None) -> str:
    """Return the path from which all processes load, which rank 0 chooses; all have to call it.

    Rank 0 follows links, as one may change before another process follows it. In a folder of checkpoints, the newest
    undamaged one is chosen by :func:`agreed_newest`.

    Args:
        path: The path of a checkpoint. That of rank 0 is used.
        folder: Where to look for ``"latest"``.

    Raises:
        CheckpointError: In every process, if there is none.

    Example:
        >>> agreed_path("runs/ep1-ba5")
        'runs/ep1-ba5'
    """
    if get_world_size() == 1:
        return path
    is_folder = False
    with failing_in_all_processes("cannot be loaded: looking for it", partial(CheckpointError, path)):
        if get_global_rank() == 0:
            parent, name = follow(path, folder)
            path, is_folder = (str(parent), True) if name is None else (parent.at(name), False)
    path, is_folder = from_rank_zero((path, is_folder))
    chosen = agreed_newest(path, None, weights_only=None) if is_folder else path
    if chosen is None:
        raise without_any(open_folder(path))
    return chosen


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
    with failing_in_all_processes("cannot be loaded from: looking for a checkpoint", failed):
        found = candidates(opened, run_name, weights_only=weights_only) if get_global_rank() == 0 else []
    for name, path, problem in from_rank_zero([(one.name, one.path, one.problem) for one in found]):
        with failing_in_all_processes("cannot be loaded from: reading a checkpoint", failed):
            damage = problem or damage_of(opened, name, get_global_rank(), get_world_size())
        damage = next(filter(None, all_gather_object(damage)), None)
        if damage is None:
            return str(path)
        warn_of_skipped(damage)
    return None


def follow(path: str | os.PathLike[str], folder: str | os.PathLike[str] | None) -> tuple[Folder, str | None]:
    """Return as :func:`locate`, but None in place of the name if the newest one of the folder is to be chosen."""
    if not str(path):
        raise CheckpointError("''", "is not the path of a checkpoint.")
    text = str(path)
    if text.rstrip("/") == "latest" and folder is not None:
        return open_folder(folder), None
    if not is_remote(text):
        local = local_path(text)
        text = os.path.realpath(local) if local.is_symlink() else str(local.absolute())
    parent, name = split_path(text)
    opened = open_folder(parent)
    latest = opened.get_latest(name)
    if latest and latest != ".." and latest == Path(latest).name and opened.exists(latest):
        name = latest
    elif not opened.exists(name):
        raise MissingCheckpointError(path)
    elif not is_remote(text) and Path(text).is_file():
        what = "is a file: torch.load reads it, and load_checkpoint(composer.foreign.ForeignFile(path), …) loads it."
        raise CheckpointError(path, what)
    inside = open_folder(opened.at(name))
    if not inside.exists(MANIFEST) and any(found.is_complete for found in find_checkpoints(inside)):
        return inside, None
    return opened, name


def without_any(folder: Folder) -> CheckpointError:
    """Return the error of a folder in which there is nothing to load."""
    return CheckpointError(str(folder), "contains no complete checkpoint.")


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


def warn_of_skipped(problem: str) -> None:
    """Warn of a checkpoint that is not loaded, though it is newer than the one that is."""
    warnings.warn(f"Skipped a checkpoint that is incomplete or damaged: {problem}", UserWarning, stacklevel=3)


def clock_order(clock: Timestamp) -> tuple[int, int, int]:
    """Return by what the checkpoints of a run are ordered.

    The end of an epoch has the clock of its last batch and one epoch more, and that of an iteration one iteration more.
    """
    return int(clock.batch), int(clock.epoch), int(clock.iteration)


def _order(found: FoundCheckpoint) -> tuple[bool, tuple[int, int, int], str]:
    if found.manifest is None:
        return (False, (0, 0, 0), found.name)
    return (True, clock_order(found.manifest.timestamp), found.manifest.created)
