"""Arguments of MosaicML Composer's CheckpointSaver, translated to those here, each with a warning."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

import attrs

from composer.checkpoint.folder import Folder, is_remote
from composer.checkpoint.local import LocalFolder
from composer.core.former import warn_former

__all__ = ["FileLinks", "without_suffix", "without_zero"]

_SUFFIX = ".pt"


def without_suffix(name: str) -> str:
    """Return the name of a checkpoint without the ending of a file."""
    if not isinstance(name, str) or not name.endswith(_SUFFIX):
        return name
    warn_former(
        f"A checkpoint is a folder, so {name!r} is saved as {name.removesuffix(_SUFFIX)!r}, with a link: remove "
        f"'{_SUFFIX}' from filename (save_filename) and latest_filename (save_latest_filename)."
    )
    return name.removesuffix(_SUFFIX)


def without_zero(keep_last: int, folder: str | os.PathLike[str]) -> int:
    """Return the number of checkpoints to keep; instead of 0 all at a URL, and the last one in a local folder."""
    if keep_last != 0 or isinstance(keep_last, bool):
        return keep_last
    all_or_last, number = ("all checkpoints", -1) if is_remote(folder) else ("the last checkpoint", 1)
    warn_former(
        f"num_checkpoints_to_keep=0 (save_num_checkpoints_to_keep) keeps {all_or_last} in {folder}: there are no "
        f"other copies. Set it to {number}."
    )
    return number


@attrs.frozen
class FileLinks:
    """Links with the ending of a file, ``ep1.pt``, beside the checkpoints of a local folder, for who opens such a file.

    Args:
        to_checkpoints: Whether each checkpoint has one, as its name was given with the ending.
        to_latest: Whether the newest one has another, as the name of the link to it was given with the ending.
    """

    to_checkpoints: bool
    to_latest: bool

    @classmethod
    def of(cls, filename: object, latest_filename: object) -> FileLinks:
        """Return the links for names as they were given."""
        return cls(str(filename).endswith(_SUFFIX), str(latest_filename).endswith(_SUFFIX))

    def point_to(self, folder: Folder, name: str, latest: str | None, *, overwrite: bool) -> None:
        """Point the links to a new checkpoint."""
        for link, is_wanted in ((name, self.to_checkpoints), (latest, self.to_latest)):
            if is_wanted and isinstance(folder, LocalFolder):
                folder.set_file_link(f"{link}{_SUFFIX}", name, overwrite=overwrite)

    def remove(self, paths: Iterable[str]) -> None:
        """Remove the links to checkpoints that were deleted."""
        for link in (Path(f"{path}{_SUFFIX}") for path in paths) if self.to_checkpoints else ():
            if link.is_symlink():
                link.unlink()
