"""Which checkpoint several processes load: rank 0 chooses it, and all processes have to see the same one."""

from __future__ import annotations

import hashlib
import socket
from typing import TYPE_CHECKING

from composer.checkpoint.errors import CheckpointError
from composer.checkpoint.opening import is_weights_file, locate
from composer.distributed import all_gather_object, from_rank_zero, get_global_rank, get_world_size
from composer.distributed.collectives import failing_together

if TYPE_CHECKING:
    import os
    from collections.abc import Callable

__all__ = ["agreed_path"]


def agreed_path(
    find: Callable[[], str | None], argument: str, folder: str | os.PathLike[str] | None = None
) -> str | None:
    """Return the checkpoint that all processes load; all have to call it, and nothing is loaded before they agree.

    Args:
        find: Returns what this process would load, a checkpoint or a file of weights; None for nothing. Of several
            processes, the answer of rank 0 counts.
        argument: The name of the Trainer's argument that says where to look, for the error.
        folder: Where ``"latest"`` is looked for.

    Raises:
        CheckpointError: In every process, if one of them does not see the checkpoint of rank 0, or sees another in its
            place, or sees one where rank 0 has none.
        RuntimeError: In the other processes, if ``find`` fails in one.

    Example:
        >>> agreed_path(lambda: "runs/ep1-ba5", "load_path")
        'runs/ep1-ba5'
    """
    if get_world_size() == 1:
        return find()
    with failing_together("Looking for a checkpoint"):
        own = find()
        if own is not None and get_global_rank() == 0 and not is_weights_file(own):
            opened, name = locate(own, folder)  # a link may lead elsewhere by the time that another process follows it
            own = opened.at(name)
    chosen = from_rank_zero(own)
    digest, problem = (None, own) if chosen is None else _look_at(chosen)
    seen = all_gather_object((digest, problem, socket.gethostname()))
    for rank, (other, problem, host) in enumerate(seen):
        if (other, problem is None) == (seen[0][0], seen[0][1] is None):
            continue
        advice = f"Let {argument} be on storage that all processes share."
        if chosen is None:
            raise CheckpointError(
                problem, f"is seen by process {rank} (host {host!r}), and process 0 has no checkpoint. {advice}"
            )
        reason = "it has another manifest there." if problem is None else problem
        raise CheckpointError(
            chosen, f"is what process 0 loads, and process {rank} (host {host!r}) does not see it: {reason} {advice}"
        )
    return chosen


def _look_at(path: str) -> tuple[str | None, str | None]:
    """Return a digest of a checkpoint's manifest, or why there is none; of a file of weights neither."""
    if is_weights_file(path):
        return None, None
    try:
        folder, name = locate(path)
        return hashlib.sha256(folder.manifest(name).to_bytes()).hexdigest(), None
    except CheckpointError as error:
        return None, str(error)
