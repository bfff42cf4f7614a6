"""All processes load the same checkpoint: rank 0 chooses it, and each one verifies that it sees the same there.

All processes have to call these functions, and nothing is loaded before they agree.
"""

from __future__ import annotations

import hashlib
import os
import socket

import attrs

from composer.checkpoint.errors import CheckpointError
from composer.checkpoint.finding import (
    candidates,
    damage_of,
    follow,
    is_weights_file,
    locate,
    warn_of_skipped,
    without_any,
)
from composer.checkpoint.local import open_folder
from composer.distributed import all_gather_object, from_rank_zero, get_global_rank, get_world_size
from composer.distributed.collectives import failing_in_all_processes

__all__ = ["agreed_newest", "agreed_path"]


def agreed_path(own: str | None, argument: str, folder: str | os.PathLike[str] | None = None) -> str | None:
    """Return the checkpoint that all processes load; all have to call it, and nothing is loaded before they agree.

    In a folder of checkpoints, they choose the newest undamaged one by :func:`agreed_newest`.

    Args:
        own: The checkpoint or file of weights that this process would load, or None. Rank 0 decides.
        argument: The Trainer's argument with the path, for the error.
        folder: Where to look for ``"latest"``.

    Raises:
        CheckpointError: In every process, if the checkpoint of rank 0 is missing or a different one in any process, or
            if rank 0 has none and another process does.

    Example:
        >>> agreed_path("runs/ep1-ba5", "load_path")
        'runs/ep1-ba5'
    """
    if get_world_size() == 1:
        return own

    def failed(reason: str) -> CheckpointError:
        return CheckpointError(argument, f"cannot be loaded: {reason}")

    is_folder = False
    with failing_in_all_processes("looking for it", failed):
        if own is not None and get_global_rank() == 0 and not is_weights_file(own):
            opened, name = follow(own, folder)  # a link may change before another process follows it
            own, is_folder = (str(opened), True) if name is None else (opened.at(name), False)
    chosen, is_folder = from_rank_zero((own, is_folder))
    if chosen is not None and is_folder:
        newest = agreed_newest(chosen, None, weights_only=None, argument=argument)
        if newest is None:
            raise without_any(open_folder(chosen))
        return newest
    seen = all_gather_object(_Seen(own) if chosen is None else _Seen.at(chosen))
    advice = f"Let {argument} be on storage that all processes share."
    for rank, one in enumerate(seen):
        process = f"process {rank} (host {one.host!r})"
        if chosen is None and one.path is not None:
            raise CheckpointError(one.path, f"is seen by {process}, and process 0 has no checkpoint. {advice}")
        if chosen is not None and one.is_other_than(seen[0]):
            reason = one.problem or "it has another manifest there."
            raise CheckpointError(chosen, f"is what process 0 loads, and {process} does not see it: {reason} {advice}")
    return chosen


def agreed_newest(
    folder: str | os.PathLike[str],
    run_name: str | None,
    *,
    weights_only: bool | None = False,
    argument: str = "save_folder",
) -> str | None:
    """Return the newest undamaged checkpoint of a folder that all processes load; None if there is none.

    All processes have to call it. Rank 0 decides which checkpoints there are. Files with tensors are
    distributed over the processes, which compare them with their checksums; each process compares all other files, so
    that none waits longer than ``dist_timeout`` for another. Processes that see other checkpoints raise an error as in
    :func:`agreed_path`: one that does not see rank 0's compares nothing before.

    Args:
        folder: A path or URL.
        run_name: The run that has saved it; any if None.
        weights_only: See :func:`newest_checkpoint`.
        argument: The Trainer's argument with the folder, for the error.

    Raises:
        CheckpointError: The folder cannot be read, looking for a checkpoint failed in another process, or the processes
            see different ones.
    """
    opened = open_folder(folder)

    def failed(reason: str) -> CheckpointError:
        return CheckpointError(folder, f"cannot be loaded from: {reason}")

    with failing_in_all_processes("looking for a checkpoint", failed):
        own = candidates(opened, run_name, weights_only=weights_only)
    listed = from_rank_zero([(one.name, one.problem) for one in own])
    for name, known in listed:
        with failing_in_all_processes("reading a checkpoint", failed):
            problem = known or damage_of(opened, name, get_global_rank(), get_world_size())
        problems = [one for one in all_gather_object(problem) if one is not None]
        if not problems:
            return agreed_path(opened.at(name), argument)
        warn_of_skipped(problems[0])
    names = {name for name, _ in listed}
    return agreed_path(next((one.path for one in own if one.is_complete and one.name not in names), None), argument)


@attrs.frozen
class _Seen:
    """What a process finds at a path: a manifest, by its digest; or a problem; of a file of weights neither."""

    path: str | None
    digest: str | None = None
    problem: str | None = None
    host: str = attrs.field(factory=socket.gethostname)

    @classmethod
    def at(cls, path: str) -> _Seen:
        """Look at a path."""
        if is_weights_file(path):
            return cls(path)
        try:
            folder, name = locate(path)
            return cls(path, digest=hashlib.sha256(folder.manifest(name).to_bytes()).hexdigest())
        except CheckpointError as error:
            return cls(path, problem=str(error))

    def is_other_than(self, first: _Seen) -> bool:
        """Return whether it is not what the first process has found."""
        return (self.digest, self.problem is None) != (first.digest, first.problem is None)
