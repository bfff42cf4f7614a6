"""Write trace files atomically, and delete the oldest."""

from __future__ import annotations

import glob
import re
from pathlib import Path
from typing import TYPE_CHECKING

from composer.core import TimeUnit
from composer.core.checks import fill_in
from composer.core.files import UNFINISHED, check_template, fill_in_run, write_atomically
from composer.functional.checks import check_flags, is_whole

if TYPE_CHECKING:
    from collections.abc import Callable

    from composer.core import Logger, State

__all__ = ["TraceFiles", "check_optional_template"]

_FIELDS = ("run_name", "rank", "epoch", "batch")


def check_optional_template(template: str | None, parameter: str) -> str | None:
    """Return the template of a file name as a string; None stays None.

    Raises:
        TypeError: The template is neither a string nor a path.
        ValueError: The template contains another field than ``run_name``, ``rank``, ``epoch`` and ``batch``.

    Example:
        >>> check_optional_template("ep{epoch}.json", "filename")
        'ep{epoch}.json'
    """
    return None if template is None else check_template(template, parameter, _FIELDS)


class TraceFiles:
    """Write files into a folder, and upload them to loggers that store files.

    Args:
        folder: The folder; fields in braces are filled in, here and in the other names.
        filename: Name of each file.
        remote_file_name: Name of each file at the loggers; None uploads nothing.
        overwrite: Whether a new run may overwrite the files of another.
        num_traces_to_keep: Number of files to keep, the newest; -1 keeps all.

    Raises:
        ValueError: A name contains another field in braces, or ``num_traces_to_keep`` is less than -1.

    Example:
        >>> TraceFiles("traces", "ep{epoch}.json", None, overwrite=False, num_traces_to_keep=-1).paths
        []
    """

    def __init__(
        self, folder: str, filename: str, remote_file_name: str | None, *, overwrite: bool, num_traces_to_keep: int
    ) -> None:
        self.folder = check_template(folder, "folder", _FIELDS)
        self.filename = check_template(filename, "filename", _FIELDS)
        self.remote_file_name = check_optional_template(remote_file_name, "remote_file_name")
        check_flags(overwrite=overwrite)
        if not is_whole(num_traces_to_keep) or num_traces_to_keep < -1:
            raise ValueError(
                f"num_traces_to_keep must be a number of traces, or -1 for all, got {num_traces_to_keep!r}."
            )
        self.overwrite = overwrite
        self.num_traces_to_keep = num_traces_to_keep
        self.paths: list[Path] = []

    def check_folder(self, state: State) -> None:
        """Raise an error at the start of a training in a folder that contains traces of another.

        Raises:
            FileExistsError: The folder contains traces with this name.
        """
        if self.overwrite or self.paths or state.timestamp.count(TimeUnit.BATCH):
            return
        existing = self.existing(state)
        if existing:
            raise FileExistsError(
                f"{str(existing[0].parent)!r} already contains traces, such as {existing[0].name!r}. "
                "Set overwrite=True to overwrite them, choose another folder, or add {run_name} to its name."
            )

    def existing(self, state: State, *, of_all_ranks: bool = False) -> list[Path]:
        """Return the files in the folder with names of this process, or of all processes."""
        pattern = glob.escape(self.filename)
        for field in ("epoch", "batch", "rank") if of_all_ranks else ("epoch", "batch"):
            pattern = re.sub(rf"\{{{field}[^}}]*\}}", "*", pattern)
        pattern = fill_in(pattern, {"run_name": glob.escape(state.run_name), "rank": state.rank}, "filename")
        return sorted(path for path in self.folder_of(state).glob(pattern) if not path.name.startswith(UNFINISHED))

    def folder_of(self, state: State) -> Path:
        """Return the folder."""
        return Path(fill_in_run(self.folder, state)).absolute()

    def write(self, write: Callable[[Path], object], state: State, logger: Logger) -> Path:
        """Write a file atomically by ``write(path)``, and upload it to the loggers.

        Returns:
            The path of the file; the file is already deleted if ``num_traces_to_keep`` is 0.
        """
        path = self.folder_of(state) / fill_in_run(self.filename, state)
        write_atomically(write, path)
        if self.remote_file_name is not None and logger.has_file_upload_destination():
            logger.upload_file(fill_in_run(self.remote_file_name, state), path, overwrite=self.overwrite)
        self.paths = [*(each for each in self.paths if each != path), path]
        surplus = 0 if self.num_traces_to_keep == -1 else max(len(self.paths) - self.num_traces_to_keep, 0)
        for old in self.paths[:surplus]:
            old.unlink(missing_ok=True)
        self.paths = self.paths[surplus:]
        return path
