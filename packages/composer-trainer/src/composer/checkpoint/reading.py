"""The files of a checkpoint as what was saved; their contents are compared with their checksums as they are read."""

from __future__ import annotations

import sys
import threading
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from composer.checkpoint.errors import CheckpointError
from composer.checkpoint.local import check_digest, check_files
from composer.checkpoint.manifest import new_hash
from composer.checkpoint.plain_json import read_json
from composer.checkpoint.snapshot import EXTRA, MODEL, OPTIMIZERS, STATE, join, named_tensors
from composer.checkpoint.tensor_file import allocate_tensors, map_tensors
from composer.core.background import in_threads

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from pathlib import Path

    from torch import Tensor

    from composer.checkpoint.opening import OpenCheckpoint

__all__ = ["read_state"]

T = TypeVar("T")


@contextmanager
def read_state(
    opened: OpenCheckpoint, *, weights_only: bool = False, at_once: bool = False, kept: tuple[str, ...] = ()
) -> Iterator[dict[str, Any]]:
    """Give the saved state that a checkpoint holds, so that it can be checked while the last of it is read.

    Optimizers' tensors have their shapes at once, and their values when this is left. What is wrong with the files is
    said then at the latest, and before what has been found wrong meanwhile. The model's weights lie in their file: they
    are to be copied, at once when this is left, and not kept.

    Args:
        opened: The checkpoint.
        weights_only: Whether to leave out all but what the model's weights need.
        at_once: Whether all values are to be there at once, in memory of their own.
        kept: How the names of those weights begin that have to be in memory of their own.

    Raises:
        CheckpointError: It is not as it was written.
    """
    shown = f"{opened.path}/{STATE}"
    if STATE not in opened.manifest.files:
        raise CheckpointError(shown, "is missing.")
    wanted = (MODEL, EXTRA) if weights_only else (MODEL, EXTRA, OPTIMIZERS)
    names = [name for name in wanted if name in opened.manifest.files and (at_once or name != MODEL)]
    rooms = {name: _sound(opened, name, allocate_tensors) for name in names}
    reads = [partial(_checked, opened, name, room.read) for name, room in rooms.items()]
    with _quick_switches(), in_threads(reads) as results:
        reading = dict(zip(rooms, results, strict=True))

        def finish(name: str) -> None:
            reading[name]()
            rooms[name].rearrange()

        try:
            for room in rooms.values():
                room.find_memory()
            data = read_json((opened.files / STATE).read_bytes(), shown)
            is_mapped = MODEL in opened.manifest.files and not at_once
            weights = _checked(opened, MODEL, partial(map_tensors, opened.files / MODEL)) if is_mapped else None
            for name in names:
                if at_once or name != OPTIMIZERS or _is_used_elsewhere(rooms[name].tensors, data):
                    finish(name)
            tensors = {name: room.tensors for name, room in rooms.items()}
            if weights is not None:
                tensors[MODEL] = {
                    name: one.clone() if name.startswith(kept) or name.endswith("_extra_state") else one
                    for name, one in weights.tensors.items()
                }
            yield _joined(data, tensors, shown, weights_only=weights_only)
        except Exception:
            for read in reading.values():
                read()  # what is wrong with the files comes first
            raise
        for name in names:
            finish(name)
        if weights is not None:
            weights.check_unchanged()


def _is_used_elsewhere(tensors: Mapping[str, Tensor], data: Mapping[str, Any]) -> bool:
    """Return whether tensors of the optimizers are also something else: the same memory is saved once."""
    try:
        return not named_tensors({**data, "optimizers": None}).isdisjoint(tensors)
    except RecursionError:
        return True


@contextmanager
def _quick_switches() -> Iterator[None]:
    """Let threads that read go on soon while this one checks: 50 µs after they ask for the interpreter, not 5 ms."""
    if threading.current_thread() is not threading.main_thread():  # two loads would put back each other's value
        yield
        return
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
