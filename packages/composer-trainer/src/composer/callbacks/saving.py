"""The callbacks that save what a run is asked to save."""

from __future__ import annotations

from typing import TYPE_CHECKING

from composer.callbacks.checkpoint_saver import CheckpointSaver, SaveInterval, check_folder, check_keep_last
from composer.core import Interval

if TYPE_CHECKING:
    import os

    from composer.checkpoint.snapshot import IgnoreKeys

__all__ = ["SaveInterval", "savers"]


def savers(
    folder: str | os.PathLike[str] | None,
    filename: str,
    latest_filename: str | None,
    save_interval: SaveInterval,
    *,
    overwrite: bool,
    num_checkpoints_to_keep: int,
    weights_only: bool,
    ignore_keys: IgnoreKeys,
    goes_on: bool,
) -> list[CheckpointSaver]:
    """Return what saves checkpoints in a folder; nothing without one.

    The arguments are those of :class:`~composer.callbacks.CheckpointSaver`, but for ``goes_on``: whether the run goes
    on with what it finds in the folder, damaged checkpoints left aside.

    Example:
        >>> savers(
        ...     None, "ep{epoch}", None, "1ep",
        ...     overwrite=False, num_checkpoints_to_keep=-1, weights_only=False, ignore_keys=None, goes_on=False,
        ... )
        []
    """
    check_keep_last(num_checkpoints_to_keep, "save_num_checkpoints_to_keep")
    if not callable(save_interval):
        Interval.named("save_interval", save_interval)
    if folder is None:
        return []
    check_folder(folder, "save_folder")
    saver = CheckpointSaver(
        folder,
        filename,
        latest_filename,
        save_interval,
        overwrite=overwrite,
        num_checkpoints_to_keep=num_checkpoints_to_keep,
        weights_only=weights_only,
        ignore_keys=ignore_keys,
    )
    saver.goes_on = goes_on
    return [saver]
