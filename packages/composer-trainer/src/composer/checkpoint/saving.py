"""Saving a run: one checkpoint, in the folder and under the name that it is told."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from composer.checkpoint.errors import CheckpointError, CheckpointSaveError
from composer.checkpoint.folder import Folder, open_folder
from composer.checkpoint.snapshot import IgnoreKeys, Snapshot, take_snapshot
from composer.core import State, TimeUnit
from composer.core.checks import shortened
from composer.core.naming import fill_in

if TYPE_CHECKING:
    from collections.abc import Mapping

    from composer.checkpoint.manifest import Manifest

__all__ = ["checkpoint_name", "filled_in", "save_checkpoint", "write_snapshot"]


def save_checkpoint(
    state: State,
    path: str | os.PathLike[str],
    *,
    extra: Mapping[str, Any] | None = None,
    weights_only: bool = False,
    ignore_keys: IgnoreKeys = None,
    overwrite: bool = False,
) -> str:
    """Save a run as a checkpoint, and return where it is when it is all there.

    Args:
        state: The run.
        path: The checkpoint's folder or address, such as ``"runs/{run_name}/ep{epoch}-ba{batch}"``.
        extra: More to save, by name: plain data and tensors. :func:`load_checkpoint` gives it back.
        weights_only: Whether to save only the weights that the model is evaluated with; training cannot resume from
            them. See :func:`composer.core.evaluation_weights`.
        ignore_keys: What not to save: patterns of paths such as ``"optimizers/*"``, or a function that takes it out of
            the dictionary that it is given.
        overwrite: Whether to replace another checkpoint of the name. One of this run at this very moment is left as it
            is, and one that is damaged is replaced, in any case.

    Raises:
        NotImplementedError: The model is sharded.
        NotSerializableError: Something is neither data nor a tensor; it is said where.
        CheckpointSaveError: It could not be written. What was there before is as it was.

    Example:
        >>> import tempfile, torch
        >>> state = State(torch.nn.Linear(2, 2))
        >>> path = save_checkpoint(state, tempfile.mkdtemp() + "/ep{epoch}-ba{batch}")
        >>> path[-7:], sorted(os.listdir(path))
        ('ep0-ba0', ['manifest.json', 'model.safetensors', 'state.json'])
    """
    text = filled_in(os.fspath(path), state).rstrip("/")
    parent, _, name = text.rpartition("/")
    folder = open_folder(parent or ("/" if text.startswith("/") else "."))
    snapshot = take_snapshot(state, extra, weights_only=weights_only, ignore_keys=ignore_keys, copy=False)
    folder.make()
    write_snapshot(folder, checkpoint_name(name, state), snapshot, overwrite=overwrite)
    return folder.at(name)


def checkpoint_name(pattern: str, state: State, parameter: str = "A checkpoint's name") -> str:
    """Return the name of a checkpoint at this moment.

    Args:
        pattern: Text in which ``{run_name}``, ``{rank}``, ``{epoch}``, ``{batch}``, ``{iteration}``, ``{sample}``,
            ``{token}``, ``{batch_in_epoch}`` and so on are filled in.
        state: The run.
        parameter: Whose value the pattern is, for the error.

    Raises:
        ValueError: There is something else in braces, or it cannot be the name of a folder.

    Example:
        >>> checkpoint_name("ep{epoch}-ba{batch}", State(model=None))
        'ep0-ba0'
    """
    name = filled_in(pattern, state, parameter)
    if not name or name.startswith(".") or "/" in name or "\\" in name:
        raise ValueError(
            f"{parameter} must be the name of a folder, without '/' and not beginning with '.', got {shortened(name)}."
        )
    return name


def filled_in(pattern: str, state: State, parameter: str = "A checkpoint's path") -> str:
    """Return a text with the run's name and clock filled in.

    Raises:
        ValueError: Something else is in braces, or it is no name at all.
    """
    clock = state.timestamp
    values = {
        "run_name": state.run_name,
        "rank": state.rank,
        **{name: int(value) for name, value in clock.state_dict().items() if not name.endswith("_wct")},
        "total_wct": clock.total_wct.total_seconds(),
    }
    return fill_in(pattern, values, parameter)


def write_snapshot(folder: Folder, name: str, snapshot: Snapshot, *, overwrite: bool) -> Manifest:
    """Write what was taken of a run, unless it is there already.

    Raises:
        CheckpointSaveError: It could not be written, or there is another checkpoint of the name.
    """
    there = None if overwrite else _there_already(folder, name, snapshot.manifest)
    return folder.write(name, snapshot) if there is None else there


def _there_already(folder: Folder, name: str, wanted: Manifest) -> Manifest | None:
    """Return the manifest of the same moment's checkpoint, None if there is none that is whole."""
    if not folder.exists(name):
        return None
    try:
        there = folder.manifest(name)
        folder.check(name, there)
    except CheckpointError:
        return None
    if _moment(there) != _moment(wanted):
        raise CheckpointSaveError(
            folder.at(name),
            f"there is one already, of run {there.run_name!r} at batch {there.timestamp.count(TimeUnit.BATCH)}. "
            "Say overwrite (save_overwrite=True of a Trainer) to replace it, or choose another folder or run_name.",
        )
    return there


def _moment(manifest: Manifest) -> tuple[Any, ...]:
    counts = {name: value for name, value in manifest.timestamp.state_dict().items() if not name.endswith("_wct")}
    return (manifest.run_name, manifest.weights_only, counts)
