"""Pictures of a GPU's memory: what was allocated where, and by which lines, in files that torch's viewer shows."""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from composer.core.naming import fill_in

if TYPE_CHECKING:
    from composer.core import Logger, State

__all__ = ["check_names", "is_recordable", "start_history", "stop_history", "write_snapshot"]


def is_recordable(state: State, who: str) -> bool:
    """Return whether the run is on a CUDA device, and warn if it is not."""
    if state.device.type == "cuda":
        return True
    warnings.warn(
        f"{who} has nothing to record: it looks at the memory of CUDA devices, and the run is on {state.device}.",
        UserWarning,
        stacklevel=3,
    )
    return False


def start_history(max_entries: int) -> None:
    """Let torch's allocator note every allocation with the lines of code that asked for it."""
    torch.cuda.memory._record_memory_history(max_entries=max_entries)  # noqa: SLF001  (documented, without a public name)


def stop_history() -> None:
    """Let it note nothing any more."""
    torch.cuda.memory._record_memory_history(enabled=None)  # noqa: SLF001  (see start_history)


def write_snapshot(
    folder: str, filename: str, remote_file_name: str | None, state: State, logger: Logger, *, overwrite: bool
) -> Path:
    """Write what has been noted to ``<folder>/<filename>.pickle``, and give the file to the loggers.

    https://docs.pytorch.org/memory_viz shows it. The file is there as a whole or not at all.

    Raises:
        FileExistsError: The file exists, and ``overwrite`` is False.
    """
    path = Path(_filled_in(folder, state)) / f"{_filled_in(filename, state)}.pickle"
    if path.exists() and not overwrite:
        raise FileExistsError(
            f"{str(path)!r} exists. Say overwrite=True to write over it, or put {{run_name}} and {{batch}} into it."
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{path.name}.tmp")
    dump: Any = torch.cuda.memory._dump_snapshot  # noqa: SLF001  (see start_history)
    dump(os.fspath(beside))
    beside.replace(path)
    if remote_file_name is not None:
        logger.upload_file(f"{_filled_in(remote_file_name, state)}.pickle", path, overwrite=overwrite)
    return path


def check_names(**texts: str | None) -> None:
    """Refuse names that cannot be filled in.

    Raises:
        ValueError: There is another name in braces than ``run_name``, ``rank`` and ``batch``.

    Example:
        >>> check_names(filename="{run_name}/rank{rank}.{batch}")
    """
    for name, text in texts.items():
        if text is not None:
            fill_in(text, {"run_name": "run", "rank": 0, "batch": 0}, name)


def _filled_in(text: str, state: State) -> str:
    values = {"run_name": state.run_name, "rank": state.rank, "batch": int(state.timestamp.batch)}
    return fill_in(text, values, "A name")
