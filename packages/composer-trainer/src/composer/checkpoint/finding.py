"""From a path or address to a checkpoint: which folder it is in, which checkpoint is the newest, and its files."""

from __future__ import annotations

import errno
import hashlib
import os
import re
import socket
import tempfile
import warnings
from contextlib import contextmanager
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import attrs

from composer.checkpoint.errors import CheckpointError
from composer.checkpoint.local import LocalFolder, check_files
from composer.checkpoint.manifest import LAYOUT, PART, STATE, read_json
from composer.checkpoint.remote import RemoteFolder
from composer.checkpoint.sharded import Layout, read_parts
from composer.checkpoint.tensor_file import read_shapes, read_tensors
from composer.core import TimeUnit
from composer.distributed import all_gather_object, from_rank_zero, get_global_rank, get_world_size
from composer.distributed.collectives import failing_together

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
    from contextlib import AbstractContextManager

    from torch import Tensor

    from composer.checkpoint.manifest import Manifest
    from composer.checkpoint.saving import Snapshot
    from composer.checkpoint.sharded import ReadInto

__all__ = [
    "Folder",
    "FoundCheckpoint",
    "OpenCheckpoint",
    "agreed_newest",
    "agreed_path",
    "find_checkpoints",
    "is_remote",
    "is_weights_file",
    "locate",
    "newest_checkpoint",
    "open_checkpoint",
    "open_folder",
]

_PROTOCOL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+://")
_WEIGHTS = (".pt", ".pth", ".bin", ".ckpt", ".safetensors")


class Folder(Protocol):
    """A local or remote folder of checkpoints; :class:`LocalFolder` documents the methods."""

    def at(self, name: str) -> str:
        """Return the path or address of a checkpoint."""

    def make(self) -> None:
        """Make the folder."""

    def names(self) -> list[str]:
        """Return the names of possible checkpoints."""

    def manifest(self, name: str) -> Manifest:
        """Return a checkpoint's manifest."""

    def check(
        self, name: str, manifest: Manifest, files: Iterable[str] | None = None, *, thoroughly: bool = False
    ) -> None:
        """Compare a checkpoint's contents, or those of some files, with its manifest."""

    def exists(self, name: str) -> bool:
        """Return whether anything has a name."""

    def write(self, name: str, snapshot: Snapshot) -> Manifest:
        """Write a checkpoint."""

    def reader(self, name: str, file: str) -> AbstractContextManager[ReadInto]:
        """Open a file, and yield what fills memory with the bytes at a position."""

    def begin(self, name: str) -> str:
        """Return the place for the files of a new checkpoint."""

    def put(self, name: str, place: str, file: str, pieces: Iterable[memoryview]) -> None:
        """Write a file to a place, in any process; the pieces may be iterated over again after a failed attempt."""

    def commit(self, name: str, place: str, manifest: Manifest) -> None:
        """Write the manifest, which makes the files a checkpoint."""

    def abandon(self, place: str) -> None:
        """Delete the remains at a place."""

    def foreign(self, name: str) -> list[str]:
        """Return which files in a checkpoint are not ours."""

    def set_aside(self, name: str, *, for_link: bool = False) -> str | None:
        """Rename what a checkpoint cannot replace, and return its new path."""

    def delete(self, name: str) -> None:
        """Delete a checkpoint."""

    def set_latest(self, latest: str, name: str) -> None:
        """Point ``latest`` to a checkpoint."""

    def get_latest(self, latest: str) -> str | None:
        """Return the name of the checkpoint that ``latest`` points to."""


def is_remote(path: object) -> bool:
    """Return whether a path is an address that fsspec opens; ``file://`` is local.

    Example:
        >>> is_remote("s3://bucket/run"), is_remote("runs/blur"), is_remote("file:///tmp")
        (True, False, False)
    """
    text = str(path)
    return bool(_PROTOCOL.match(text)) and not text.startswith("file://")


def is_weights_file(path: str | os.PathLike[str]) -> bool:
    """Return whether the ending of a path is that of a single file of weights; False for a local folder.

    Example:
        >>> is_weights_file("resnet.pt"), is_weights_file("runs/ep3-ba1200")
        (True, False)
    """
    text = str(path)
    return text.endswith(_WEIGHTS) and (is_remote(text) or not Path(text.removeprefix("file://")).is_dir())


def open_folder(path: str | os.PathLike[str]) -> Folder:
    """Return the folder of a path or address; nothing is created or read.

    Example:
        >>> open_folder("s3://bucket/runs/").at("ep1-ba5")
        's3://bucket/runs/ep1-ba5'
    """
    if is_remote(path):
        return RemoteFolder(str(path))
    return LocalFolder(Path(str(path).removeprefix("file://")).absolute())


@attrs.frozen
class FoundCheckpoint:
    """A checkpoint in a folder, or a folder that looks like one.

    Args:
        path: Its path or address.
        name: Its name in the folder.
        manifest: Its manifest; None if it is incomplete or damaged.
        problem: What is wrong with it, as a sentence; None if nothing is.

    Example:
        >>> FoundCheckpoint("runs/ep1-ba5", "ep1-ba5", None, "runs/ep1-ba5/manifest.json is missing.").is_whole
        False
    """

    path: str
    name: str
    manifest: Manifest | None
    problem: str | None

    @property
    def is_whole(self) -> bool:
        """Whether its manifest and the sizes of its files are right."""
        return self.manifest is not None


def find_checkpoints(folder: str | os.PathLike[str] | Folder) -> list[FoundCheckpoint]:
    """Return the checkpoints of a folder, incomplete ones first and the others from the oldest to the newest.

    Manifests and the names and sizes of files are checked, contents are not. Checkpoints that are being written are
    left out.

    Args:
        folder: A path or address. A folder that does not exist has no checkpoints.

    Raises:
        CheckpointError: The folder cannot be read.

    Example:
        >>> find_checkpoints("no/such/folder")
        []
    """
    opened = open_folder(folder) if isinstance(folder, (str, os.PathLike)) else folder
    found = []
    for name in opened.names():
        try:
            found.append(FoundCheckpoint(opened.at(name), name, opened.manifest(name), None))
        except CheckpointError as error:
            found.append(FoundCheckpoint(opened.at(name), name, None, str(error)))
    return sorted(found, key=_age)


def _age(found: FoundCheckpoint) -> tuple[bool, int | float, int | float, str]:
    if found.manifest is None:
        return (False, 0, 0, found.name)
    clock = found.manifest.timestamp
    # The end of an epoch has the clock of its last batch and one epoch more.
    return (True, clock.count(TimeUnit.BATCH), clock.count(TimeUnit.EPOCH), found.manifest.created)


def newest_checkpoint(
    folder: str | os.PathLike[str], *, run_name: str | None = None, weights_only: bool | None = False
) -> FoundCheckpoint | None:
    """Return the undamaged checkpoint of a folder that has the most batches; None if there is none.

    Contents are compared with their checksums. A warning names each checkpoint that is skipped as damaged.

    Args:
        folder: A path or address.
        run_name: The run that has saved it; any if None.
        weights_only: Whether to return a checkpoint of weights only, or one from which training resumes; None accepts
            both.

    Raises:
        CheckpointError: The folder cannot be read.

    Example:
        >>> newest_checkpoint("no/such/folder") is None
        True
    """
    opened = open_folder(folder)
    for found in _candidates(opened, run_name, weights_only=weights_only):
        problem = found.problem or _problem(opened, found.name)
        if problem is None:
            return found
        _warn_of_skipped(problem)
    return None


def agreed_newest(folder: str | os.PathLike[str], run_name: str) -> str | None:
    """Return the newest undamaged checkpoint from which a run resumes; None if there is none.

    All processes have to call it. Rank 0 decides which checkpoints there are. Files with parts of sharded tensors are
    distributed over the processes, which compare them with their checksums; each process compares all other files, so
    that none waits longer than ``dist_timeout`` for another. Use the result with :func:`agreed_path`, which reports
    processes that see other checkpoints: one that does not see rank 0's compares nothing here, and if rank 0 has none,
    each process gets its own.

    Args:
        folder: A path or address.
        run_name: The run that has saved it.

    Raises:
        CheckpointError: The folder cannot be read, or looking for a checkpoint failed in another process.
    """
    opened = open_folder(folder)

    def failed(reason: str) -> CheckpointError:
        return CheckpointError(folder, f"cannot be resumed from: {reason.rstrip('.')}.")

    with failing_together("looking for a checkpoint", failed):
        own = _candidates(opened, run_name, weights_only=False)
    listed = from_rank_zero([(one.name, one.problem) for one in own])
    for name, known in listed:
        with failing_together("reading a checkpoint", failed):
            problem = known or _problem(opened, name, get_global_rank(), get_world_size())
        problems = [one for one in all_gather_object(problem) if one is not None]
        if not problems:
            return opened.at(name)
        _warn_of_skipped(problems[0])
    names = {name for name, _ in listed}
    return next((one.path for one in own if one.is_whole and one.name not in names), None)


def _candidates(opened: Folder, run_name: str | None, *, weights_only: bool | None) -> list[FoundCheckpoint]:
    """Return the checkpoints of a run, and those whose run is unknown as they are damaged, the newest first."""
    return [
        one
        for one in reversed(find_checkpoints(opened))
        if one.manifest is None
        or (run_name in (None, one.manifest.run_name) and weights_only in (None, one.manifest.weights_only))
    ]


def _problem(opened: Folder, name: str, rank: int = 0, world_size: int = 1) -> str | None:
    """Return what is wrong with a checkpoint, as far as this process compares its contents; None if nothing is."""
    try:
        manifest = opened.manifest(name)
    except CheckpointError as error:
        return None if rank else str(error)
    parts = sorted(filter(PART.fullmatch, manifest.files))
    try:
        opened.check(name, manifest, sorted({*manifest.files} - {*parts} | {*parts[rank::world_size]}))
    except CheckpointError as error:
        return str(error)
    return None


def _warn_of_skipped(problem: str) -> None:
    warnings.warn(f"Skipped a checkpoint that is incomplete or damaged: {problem}", UserWarning, stacklevel=3)


def locate(path: str | os.PathLike[str], folder: str | os.PathLike[str] | None = None) -> tuple[Folder, str]:
    """Return the folder that a checkpoint is in, and its name there.

    Args:
        path: The checkpoint; a link or file that names it (``runs/latest``); a folder of checkpoints, of which the
            newest undamaged one is chosen; or ``"latest"``, the newest undamaged one in ``folder``.
        folder: Where to look for ``"latest"``.

    Raises:
        CheckpointError: There is none.
    """
    if not str(path):
        raise CheckpointError("''", "is not the path of a checkpoint.")
    text = str(path).rstrip("/") or "/"
    if text == "latest" and folder is not None:
        return _newest(folder)
    if not is_remote(text):
        local = Path(text.removeprefix("file://"))
        text = str(local.absolute())
        if local.is_symlink():
            try:
                text = os.path.realpath(local, strict=True)
            except OSError as error:
                if error.errno == errno.ELOOP:
                    raise CheckpointError(path, "is a symbolic link that leads to itself.") from None
                text = os.path.realpath(local)
    parent, _, name = text.rpartition("/")
    opened = open_folder(parent or "/")
    latest = opened.get_latest(name)
    if latest and latest != ".." and latest == Path(latest).name and opened.exists(latest):
        name = latest
    elif not opened.exists(name):
        raise CheckpointError(path, "does not exist.")
    inside = open_folder(opened.at(name))
    if not inside.exists("manifest.json") and any(found.is_whole for found in find_checkpoints(inside)):
        return _newest(opened.at(name))
    return opened, name


def _newest(folder: str | os.PathLike[str]) -> tuple[Folder, str]:
    found = newest_checkpoint(folder, weights_only=None)
    if found is None:
        raise CheckpointError(folder, "contains no complete checkpoint.")
    return open_folder(folder), found.name


@attrs.frozen(slots=False)  # for cached_property
class OpenCheckpoint:
    """A checkpoint whose files are on this machine; only parts of sharded tensors are read from where they are.

    Args:
        folder: The folder that it is in.
        name: Its name there.
        files: The local folder of its files.
        manifest: Its manifest; sizes have been compared with it, contents only of files that were downloaded.
    """

    folder: Folder
    name: str
    files: Path
    manifest: Manifest

    @property
    def path(self) -> str:
        """The path or address that it comes from."""
        return self.folder.at(self.name)

    def data(self) -> dict[str, Any]:
        """Return the data of :data:`STATE`, after comparing the file with its checksum.

        Raises:
            CheckpointError: The file is missing, or its content is not the one that was written.
        """
        return read_json(self._content(STATE), f"{self.path}/{STATE}")

    @cached_property
    def layout(self) -> Layout | None:
        """Where the parts of the tensors are; None if they are not sharded."""
        if LAYOUT not in self.manifest.files:
            return None
        return Layout.from_bytes(self._content(LAYOUT), f"{self.path}/{LAYOUT}")

    def _content(self, name: str) -> bytes:
        path, record = f"{self.path}/{name}", self.manifest.files.get(name)
        if record is None:
            raise CheckpointError(path, "is missing.")
        hashes = record.hashes()
        try:
            content = (self.files / name).read_bytes()
        except OSError as error:
            raise CheckpointError(path, f"cannot be read: {error.strerror}.") from None
        for digest in hashes.values():
            digest.update(content)
        record.compare(path, hashes)
        return content

    def has(self, name: str) -> bool:
        """Return whether there are tensors of a kind, ``"model.safetensors"``, in one file or in parts."""
        return name in self.manifest.files or (self.layout is not None and name in self.layout.tensors)

    def tensors(self, name: str, likes: Mapping[str, Tensor] | None = None) -> dict[str, Tensor] | None:
        """Return the tensors of a file, after comparing what is read with its checksum; None if there is no such file.

        Args:
            name: The file.
            likes: DTensors by the names of tensors, of which only the own part is kept. If the tensors are in parts,
                no more than that is read.

        Raises:
            CheckpointError: The content of the file is not the one that was written.
        """
        if self.layout is not None and name in self.layout.tensors:
            open_file = partial(self.folder.reader, self.name)
            return read_parts(self.layout, name, self.manifest, open_file, self.path, likes)
        return self._read(name, likes) if name in self.manifest.files else None

    def shapes(self, name: str) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the tensors in a file; none if there is no such file.

        Raises:
            CheckpointError: It is not a complete safetensors file.
        """
        if name not in self.manifest.files:
            return {}
        return {tensor: shape for tensor, (_, shape) in read_shapes(self.files / name).items()}

    def _read(self, name: str, likes: Mapping[str, Tensor] | None) -> dict[str, Tensor]:
        record = self.manifest.files[name]
        hashes = record.hashes()
        [digest] = hashes.values()
        try:
            tensors = read_tensors(self.files / name, digest, likes)
        except CheckpointError:
            check_files(self.files, self.manifest, [name])  # a file that was changed is reported as such first
            raise
        record.compare(self.files / name, hashes)
        return tensors


@contextmanager
def open_checkpoint(
    path: str | os.PathLike[str],
    folder: str | os.PathLike[str] | None = None,
    names: Sequence[str] | None = None,
) -> Iterator[OpenCheckpoint]:
    """Open a checkpoint in a context; files of a remote one are downloaded for its duration.

    Args:
        path: The checkpoint; see :func:`locate`.
        folder: Where to look for ``"latest"``.
        names: The files to download; all if None.

    Raises:
        CheckpointError: There is none, or it is incomplete or damaged.
    """
    opened, name = locate(path, folder)
    manifest = opened.manifest(name)
    if not isinstance(opened, RemoteFolder):
        yield OpenCheckpoint(opened, name, Path(opened.at(name)), manifest)
        return
    # On Windows, files that an error still refers to cannot be deleted.
    with tempfile.TemporaryDirectory(prefix="composer-", ignore_cleanup_errors=True) as files:
        wanted = [
            file
            for file in manifest.files
            if file == LAYOUT or (not PART.fullmatch(file) and (names is None or file in names))
        ]
        opened.download(name, manifest, Path(files), wanted)
        yield OpenCheckpoint(opened, name, Path(files), manifest)


def agreed_path(
    find: Callable[[], str | None], argument: str, folder: str | os.PathLike[str] | None = None
) -> str | None:
    """Return the checkpoint that all processes load; all have to call it, and nothing is loaded before they agree.

    Args:
        find: Returns the checkpoint or file of weights that this process would load, or None. Rank 0 decides.
        argument: The Trainer's argument with the path, for the error.
        folder: Where to look for ``"latest"``.

    Raises:
        CheckpointError: In every process, if the checkpoint of rank 0 is missing or a different one in any process, or
            if rank 0 has none and another process does; and in the other processes, if ``find`` fails in one.

    Example:
        >>> agreed_path(lambda: "runs/ep1-ba5", "load_path")
        'runs/ep1-ba5'
    """
    if get_world_size() == 1:
        return find()

    def failed(reason: str) -> CheckpointError:
        return CheckpointError(argument, f"cannot be loaded: {reason.rstrip('.')}.")

    with failing_together("looking for it", failed):
        own = find()  # in all processes at the same time, as none may wait longer than dist_timeout for another
        if own is not None and get_global_rank() == 0 and not is_weights_file(own):
            opened, name = locate(own, folder)  # a link may change before another process follows it
            own = opened.at(name)
    chosen = from_rank_zero(own)
    digest, problem = (None, own) if chosen is None else _manifest_digest(chosen)
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


def _manifest_digest(path: str) -> tuple[str | None, str | None]:
    """Return a digest of a checkpoint's manifest, or why there is none; of a file of weights neither."""
    if is_weights_file(path):
        return None, None
    try:
        folder, name = locate(path)
        return hashlib.sha256(folder.manifest(name).to_bytes()).hexdigest(), None
    except CheckpointError as error:
        return None, str(error)
