"""Files of traces: their names, written whole or not at all, the newest kept."""

from __future__ import annotations

import glob
import re
from pathlib import Path
from typing import TYPE_CHECKING

from composer.core import State, TimeUnit
from composer.core.checks import to_path
from composer.core.naming import fill_in
from composer.functional.checks import check_flags, is_whole

if TYPE_CHECKING:
    from collections.abc import Callable

    from composer.core import Logger

__all__ = ["TraceFiles", "check_template", "filled_in"]

_UNFINISHED = ".unfinished-"


def check_template(template: str, parameter: str) -> str:
    """Return a file name in which ``{run_name}``, ``{rank}``, ``{epoch}`` and ``{batch}`` are to be filled in.

    Raises:
        TypeError: It is neither a text nor a path.
        ValueError: It has something else in braces, or is no name at all.

    Example:
        >>> check_template("ep{epoch}.json", "filename")
        'ep{epoch}.json'
    """
    template = to_path(parameter, template)
    filled_in(template, State(model=None), parameter)
    return template


def filled_in(template: str, state: State, parameter: str = "A name") -> str:
    """Return a file name for where a run stands.

    Example:
        >>> from composer.core import State
        >>> filled_in("{run_name}/ep{epoch}-ba{batch}.json", State(model=None, run_name="mine"))
        'mine/ep0-ba0.json'
    """
    clock = state.timestamp
    values = {
        "run_name": state.run_name,
        "rank": state.rank,
        "epoch": clock.count(TimeUnit.EPOCH),
        "batch": clock.count(TimeUnit.BATCH),
    }
    return fill_in(template, values, parameter)


class TraceFiles:
    """Writes one file after the other into a folder, and hands them to loggers that keep files.

    Args:
        folder: The folder; fields in braces are filled in, as in the other names.
        filename: Each file's name in it.
        remote_file_name: What loggers are to call it; None hands nothing to them.
        overwrite: Whether a run that begins may write over files of another.
        num_traces_to_keep: How many are kept in the folder, the newest; -1 keeps all.

    Raises:
        ValueError: A name has something else in braces, or ``num_traces_to_keep`` is less than -1.

    Example:
        >>> TraceFiles("traces", "ep{epoch}.json", None, overwrite=False, num_traces_to_keep=-1).paths
        []
    """

    def __init__(
        self, folder: str, filename: str, remote_file_name: str | None, *, overwrite: bool, num_traces_to_keep: int
    ) -> None:
        self.folder = check_template(folder, "folder")
        self.filename = check_template(filename, "filename")
        self.remote_file_name = (
            None if remote_file_name is None else check_template(remote_file_name, "remote_file_name")
        )
        check_flags(overwrite=overwrite)
        if not is_whole(num_traces_to_keep) or num_traces_to_keep < -1:
            raise ValueError(
                f"num_traces_to_keep must be a number of traces, or -1 for all, got {num_traces_to_keep!r}."
            )
        self.overwrite = overwrite
        self.num_traces_to_keep = num_traces_to_keep
        self.paths: list[Path] = []

    def check_folder(self, state: State) -> None:
        """Refuse, where a training begins, to write among the traces of another.

        Raises:
            FileExistsError: The folder has traces of this name already.
        """
        if self.overwrite or self.paths or state.timestamp.count(TimeUnit.BATCH):
            return
        there = self.existing(state)
        if there:
            raise FileExistsError(
                f"There are traces in {str(there[0].parent)!r} already, such as {there[0].name!r}. Say overwrite=True "
                "to write over them, choose another folder, or put {run_name} into its name."
            )

    def existing(self, state: State, *, of_all_ranks: bool = False) -> list[Path]:
        """Return the files in the folder that are named as this process's, or as those of all."""
        pattern = glob.escape(self.filename)
        for field in ("epoch", "batch", "rank") if of_all_ranks else ("epoch", "batch"):
            pattern = re.sub(rf"\{{{field}[^}}]*\}}", "*", pattern)
        pattern = fill_in(pattern, {"run_name": glob.escape(state.run_name), "rank": state.rank}, "filename")
        return sorted(path for path in self.folder_of(state).glob(pattern) if not path.name.startswith(_UNFINISHED))

    def folder_of(self, state: State) -> Path:
        """Return the folder."""
        return Path(filled_in(self.folder, state)).absolute()

    def write(self, write: Callable[[Path], object], state: State, logger: Logger) -> Path:
        """Let ``write(path)`` write a file, which then appears under its name, and hand it to loggers.

        Returns:
            The file, which is gone already if none is to be kept.
        """
        path = self.folder_of(state) / filled_in(self.filename, state)
        write_whole(write, path)
        if self.remote_file_name is not None and logger.has_file_upload_destination():
            logger.upload_file(filled_in(self.remote_file_name, state), path, overwrite=self.overwrite)
        self.paths = [*(each for each in self.paths if each != path), path]
        surplus = 0 if self.num_traces_to_keep == -1 else max(len(self.paths) - self.num_traces_to_keep, 0)
        for old in self.paths[:surplus]:
            old.unlink(missing_ok=True)
        self.paths = self.paths[surplus:]
        return path


def write_whole(write: Callable[[Path], object], path: Path) -> None:
    """Let ``write(path)`` write a file that appears under its name when it is whole."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f"{_UNFINISHED}{path.name}")
    try:
        write(unfinished)
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)
