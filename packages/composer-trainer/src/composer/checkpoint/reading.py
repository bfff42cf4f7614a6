"""The files of a checkpoint as what was saved; their contents are compared with their checksums as they are read."""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import attrs

from composer.checkpoint.errors import CheckpointError
from composer.checkpoint.local import check_digest, check_files
from composer.checkpoint.manifest import new_hash
from composer.checkpoint.plain_json import read_json
from composer.checkpoint.snapshot import EXTRA, MODEL, OPTIMIZERS, STATE, join
from composer.checkpoint.tensor_file import MappedTensors, make_room, map_tensors

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from pathlib import Path

    from torch import Tensor

    from composer.checkpoint.opening import OpenCheckpoint

__all__ = ["SavedState", "read_state"]

T = TypeVar("T")


@attrs.frozen(eq=False)
class SavedState:
    """What a checkpoint holds.

    Args:
        data: The saved state, the model's weights included.
        weights: Where those lie that stay in their file until they are copied; None if all are in memory.
    """

    data: dict[str, Any]
    weights: MappedTensors | None = None


@contextmanager
def read_state(opened: OpenCheckpoint, *, weights_only: bool = False, at_once: bool = False) -> Iterator[SavedState]:
    """Give what a checkpoint holds, so that it can be checked while the last of it is read.

    The tensors of optimizers have their shapes at once, and their values when this is left; whether the files are as
    they were written is said then, and before whatever has been found wrong meanwhile.

    Args:
        opened: The checkpoint.
        weights_only: Whether to leave out all but what the model's weights need.
        at_once: Whether all is to be in memory at once; else the model's weights stay in their file until they are
            copied.

    Raises:
        CheckpointError: It is not as it was written.
    """
    shown = f"{opened.path}/{STATE}"
    if STATE not in opened.manifest.files:
        raise CheckpointError(shown, "is missing.")
    wanted = (MODEL, EXTRA) if weights_only else (MODEL, EXTRA, OPTIMIZERS)
    names = [name for name in wanted if name in opened.manifest.files and (at_once or name != MODEL)]
    rooms = {name: _sound(opened, name, make_room) for name in names}
    with _quick_switches(), ThreadPoolExecutor(len(wanted)) as pool:
        reading = {name: pool.submit(_checked, opened, name, room.read) for name, room in rooms.items()}
        try:
            for room in rooms.values():
                room.find_memory()
            data = read_json((opened.files / STATE).read_bytes(), shown)
            is_mapped = MODEL in opened.manifest.files and not at_once
            weights = _checked(opened, MODEL, partial(map_tensors, opened.files / MODEL)) if is_mapped else None
            for name in names:
                if at_once or name != OPTIMIZERS:
                    reading[name].result()
            tensors = {name: room.tensors for name, room in rooms.items()}
            if weights is not None:
                tensors[MODEL] = weights.tensors()
            yield SavedState(_joined(data, tensors, shown, weights_only=weights_only), weights)
        finally:
            for one in reading.values():
                one.result()


@contextmanager
def _quick_switches() -> Iterator[None]:
    """Let threads that read go on soon while another one checks: 50 µs after they ask for the interpreter, not 5 ms."""
    usual = sys.getswitchinterval()
    sys.setswitchinterval(min(usual, 5e-5))
    try:
        yield
    finally:
        sys.setswitchinterval(usual)


def _joined(
    data: dict[str, Any], tensors: Mapping[str, dict[str, Tensor]], path: str, *, weights_only: bool
) -> dict[str, Any]:
    """Return the saved state that a checkpoint's JSON and tensors say."""
    try:
        saved = join(data, {**tensors.get(OPTIMIZERS, {}), **tensors.get(EXTRA, {})}, weights_only=weights_only)
    except (ValueError, TypeError, RecursionError) as error:
        raise CheckpointError(path, f"is not what a checkpoint holds: {error}") from None
    if not isinstance(saved.get("model", {}), dict):
        raise CheckpointError(path, "must hold a dictionary 'model'.")
    if MODEL in tensors:
        saved["model"] = tensors[MODEL] | saved.get("model", {})
    else:
        saved.pop("model", None)
    return saved


def _checked(opened: OpenCheckpoint, name: str, read: Callable[[Any], T]) -> T:
    """Read a file, and compare what a checksum sees of it meanwhile with what the manifest says."""
    [(kind, expected)] = opened.manifest.files[name].checksums().items()
    digest = new_hash(kind)
    result = _sound(opened, name, lambda _: read(digest))
    check_digest(opened.files / name, kind, digest.hexdigest(), expected)
    return result


def _sound(opened: OpenCheckpoint, name: str, call: Callable[[Path], T]) -> T:
    try:
        return call(opened.files / name)
    except CheckpointError:
        # Whatever is wrong with it, it is first of all not what was written.
        check_files(opened.files, opened.manifest, [name])
        raise
