"""From a path or address to the checked files of a checkpoint on this machine."""

from __future__ import annotations

import tempfile
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import attrs

from composer.checkpoint.errors import CheckpointError
from composer.checkpoint.finding import find_checkpoints, newest_checkpoint
from composer.checkpoint.folder import Folder, open_folder
from composer.checkpoint.local import check_files, read_manifest
from composer.checkpoint.remote import RemoteFolder, is_remote

if TYPE_CHECKING:
    import os
    from collections.abc import Iterator, Sequence

    from composer.checkpoint.manifest import Manifest

__all__ = ["OpenCheckpoint", "is_weights_file", "locate", "open_checkpoint"]

_WEIGHTS = (".pt", ".pth", ".bin", ".ckpt", ".safetensors")


@attrs.frozen
class OpenCheckpoint:
    """A checkpoint whose files are here, and as far as :func:`open_checkpoint` was told to compare them, whole.

    Args:
        path: Where it comes from.
        files: The folder that its files are in.
        manifest: What it holds.
    """

    path: str
    files: Path
    manifest: Manifest


def is_weights_file(path: str | os.PathLike[str]) -> bool:
    """Return whether a path names a single file of weights, by its ending; a folder here is none, whatever its name.

    Example:
        >>> is_weights_file("resnet.pt"), is_weights_file("runs/ep3-ba1200")
        (True, False)
    """
    text = str(path)
    return text.endswith(_WEIGHTS) and (is_remote(text) or not Path(text.removeprefix("file://")).is_dir())


def locate(path: str | os.PathLike[str], folder: str | os.PathLike[str] | None = None) -> tuple[Folder, str]:
    """Return the folder that a checkpoint is in, and its name there.

    Args:
        path: The checkpoint; a link or file that names it (``runs/latest``); a folder of checkpoints, of which the
            newest whole one is taken; or ``"latest"``, the newest whole one in ``folder``.
        folder: Where ``"latest"`` is looked for.

    Raises:
        CheckpointError: There is none.
    """
    if not str(path):
        raise CheckpointError("''", "is not the path of a checkpoint.")
    text = str(path).rstrip("/") or "/"
    if text == "latest" and folder is not None:
        return _newest(folder)
    if not is_remote(text):
        here = Path(text.removeprefix("file://"))
        try:
            text = str(here.resolve() if here.is_symlink() else here.absolute())
        except (RuntimeError, OSError):  # before and since Python 3.13
            raise CheckpointError(path, "is a symbolic link that leads to itself.") from None
    parent, _, name = text.rpartition("/")
    opened = open_folder(parent or "/")
    named = opened.get_latest(name)
    if named and named != ".." and named == Path(named).name and opened.exists(named):
        name = named
    elif not opened.exists(name):
        raise CheckpointError(path, "does not exist.")
    inside = open_folder(opened.at(name))
    if not inside.exists("manifest.json") and any(one.is_whole for one in find_checkpoints(inside)):
        return _newest(opened.at(name))
    return opened, name


def _newest(folder: str | os.PathLike[str]) -> tuple[Folder, str]:
    found = newest_checkpoint(folder, weights_only=None)
    if found is None:
        raise CheckpointError(folder, "holds no whole checkpoint.")
    return open_folder(folder), found.name


@contextmanager
def open_checkpoint(
    path: str | os.PathLike[str],
    folder: str | os.PathLike[str] | None = None,
    names: Sequence[str] | None = None,
    *,
    check_tensors: bool = True,
) -> Iterator[OpenCheckpoint]:
    """Give a checkpoint whose files have been compared with the manifest; remote ones are fetched for the time.

    Args:
        path: Which one; see :func:`locate`.
        folder: Where ``"latest"`` is looked for.
        names: The files that are needed, as far as there are such; all if None.
        check_tensors: Whether contents of files of tensors are compared, too; else whoever reads them has to.

    Raises:
        CheckpointError: There is none, or it is not whole.
    """
    opened, name = locate(path, folder)
    if not isinstance(opened, RemoteFolder):
        files = Path(opened.at(name))
        manifest = read_manifest(files)
        needed = manifest.files if names is None else names
        check_files(files, manifest, [one for one in needed if check_tensors or not one.endswith(".safetensors")])
        yield OpenCheckpoint(str(files), files, manifest)
        return
    manifest = opened.manifest(name)
    wanted = [file for file in manifest.files if names is None or file in names]
    # On Windows, files that an error still refers to cannot be deleted.
    with tempfile.TemporaryDirectory(prefix="composer-", ignore_cleanup_errors=True) as here:
        opened.download(name, manifest, Path(here), wanted)
        yield OpenCheckpoint(opened.at(name), Path(here), manifest)
