"""The folder that a run saves to: its lock, what may be there already, links, and the deletion of old checkpoints."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import NamedTuple

import attrs

from composer.checkpoint.errors import CheckpointError, CheckpointSaveError, LaterCheckpointError
from composer.checkpoint.finding import FoundCheckpoint, find_checkpoints
from composer.checkpoint.folder import Folder, split_path
from composer.checkpoint.former import FileLinks
from composer.checkpoint.local import LocalFolder, open_folder
from composer.checkpoint.lock import FolderLock
from composer.checkpoint.manifest import Manifest
from composer.checkpoint.retention import KeepBest, delete_old, own_checkpoints
from composer.core import State, Timestamp, TimeUnit

__all__ = ["Names", "RunFolder"]

_log = logging.getLogger(__name__)


class Names(NamedTuple):
    """The folder, the names in it of a checkpoint and of the links to the latest and the best one, and its copies."""

    folder: str
    checkpoint: str
    latest: str | None
    best: str | None
    copies: list[str]


@attrs.define(eq=False)
class RunFolder:
    """The folder of a saver, in the process of rank 0; in the others, which write to drafts there, it is never opened.

    It is open from the first training until :meth:`close`, and locked all that time. The thread that writes a
    checkpoint calls :meth:`prepare` before and :meth:`finish` after it; the main thread opens and closes the folder
    while nothing is written.

    Args:
        overwrite: Whether to replace checkpoints of other runs.
        weights_only: Whether the checkpoints are of weights only.
        keep_last: The number of the last ones to keep; -1 keeps all.
        keep_best: The best ones to keep in addition.
        links: Links with the ending of a file.

    Attributes:
        opened: The folder while it is open.
        saved: The paths of the checkpoints that the run has saved and not deleted, the oldest first.
        best: The path of the best one.
    """

    overwrite: bool
    weights_only: bool
    keep_last: int
    keep_best: KeepBest | None
    links: FileLinks
    opened: Folder | None = attrs.field(default=None, init=False)
    saved: list[str] = attrs.field(factory=list, init=False)
    best: str | None = attrs.field(default=None, init=False)
    _copied: set[str] = attrs.field(factory=set, init=False)
    _continues: bool = attrs.field(default=False, init=False)
    _lock: FolderLock | None = attrs.field(default=None, init=False)

    def open(self, path: str, state: State, *, continues: bool, copies: Sequence[str] = ()) -> Folder:
        """Return the folder; if it is not open, create and lock it, and delete what killed processes have left.

        Args:
            path: Its path or URL.
            state: The run.
            copies: The URLs of the copies of a checkpoint that is saved now.
            continues: Whether the run has resumed from the newest undamaged checkpoint there, so that what is in the
                way of the next ones is set aside.

        Raises:
            FolderInUseError: Another process has the lock.
            CheckpointError: It cannot be read, or the folder of a copy cannot.
            CheckpointSaveError: It cannot be created, or has later checkpoints than the run; or the folder of a copy
                has later ones of the same run.
        """
        if self.opened is None:
            folder = open_folder(path)
            folder.make()
            if isinstance(folder, LocalFolder):
                self._lock = self._lock or FolderLock(folder.path)
                folder.tidy()
            if not self.overwrite and not continues:
                _check_no_later_ones(folder, state.timestamp, find_checkpoints(folder))
                for place in {split_path(url)[0]: None for url in copies}:
                    own = [
                        one
                        for one in find_checkpoints(place)
                        if one.manifest and one.manifest.run_name == state.run_name
                    ]
                    _check_no_later_ones(open_folder(place), state.timestamp, own)
            self.opened, self._continues = folder, continues
        return self.opened

    def forget(self) -> None:
        """Forget what an earlier run has saved and copied, which is then that of another run."""
        self.saved, self.best, self._copied = [], None, set()

    def close(self) -> None:
        """Release the lock."""
        if self._lock is not None:
            self._lock.release()
        self.opened = self._lock = None

    def best_values(self, folder: Folder, run_name: str, until: Timestamp) -> list[float]:
        """Return the values of the best checkpoints of a run that exist, the best first."""
        if self.keep_best is None:
            return []
        best = self.keep_best.best(self._own(folder, run_name, until))
        return [value for value in map(self.keep_best.value, best) if value is not None]

    def prepare(self, folder: Folder, name: str, *, for_link: bool = False) -> None:
        """Set aside what has the name of the next checkpoint, or link, and cannot be replaced, if the run continues."""
        aside = folder.set_aside(name, for_link=for_link) if self._continues else None
        if aside is not None:
            _log.warning(
                "autoresume: %s has the name of the next checkpoint and is not one that can be replaced: it is now %s.",
                folder.at(name),
                aside,
            )

    def finish(self, folder: Folder, names: Names, manifest: Manifest) -> None:
        """List a written checkpoint, update the links to the latest and best, copy it, and delete old ones.

        Raises:
            CheckpointSaveError: It was not copied, a link not updated, or an old checkpoint not deleted.
        """
        path = folder.at(names.checkpoint)
        self.saved = [*(one for one in self.saved if one != path), path]
        try:
            self._link(folder, names.latest, names.checkpoint)
            self.links.point_to(folder, names.checkpoint, names.latest, overwrite=self.overwrite)
            for url in names.copies:
                self._copy(folder, names, url)
            if self.keep_best is None and self.keep_last < 0:
                return
            own = self._own(folder, manifest.run_name, manifest.timestamp)
            if self.keep_best is not None and (best := self.keep_best.best(own)):
                self.best = folder.at(best[0].name)
                self._link(folder, names.best, best[0].name)
            # After the links were moved, which would otherwise point to deleted checkpoints for a moment.
            deleted = {folder.at(one) for one in delete_old(folder, own, self.keep_last, self.keep_best)}
            self.links.remove(deleted)
        except (CheckpointError, OSError, ImportError) as error:  # CheckpointSaveError is an OSError
            outcome = "is complete, and a link to it was not updated, a copy not written, or an old one not deleted"
            reason = f"{error.path}: {error.reason}" if isinstance(error, CheckpointSaveError) else str(error)
            raise CheckpointSaveError(path, reason, outcome=outcome) from error
        self.saved = [one for one in self.saved if one not in deleted]

    def _copy(self, folder: Folder, names: Names, url: str) -> None:
        """Copy a checkpoint to a URL, and point the link beside it to it."""
        parent, name = split_path(url)
        to, again = open_folder(parent), self.overwrite or self._continues or url in self._copied
        folder.copy(names.checkpoint, to, name, overwrite=again)
        self._copied.add(url)
        if names.latest is not None:
            to.set_latest(names.latest, name)

    def _own(self, folder: Folder, run_name: str, until: Timestamp) -> list[FoundCheckpoint]:
        return own_checkpoints(folder, run_name, until, weights_only=self.weights_only)

    def _link(self, folder: Folder, link: str | None, name: str) -> None:
        if link is not None:
            self.prepare(folder, link, for_link=True)
            folder.set_latest(link, name)


def _check_no_later_ones(folder: Folder, now: Timestamp, checkpoints: Sequence[FoundCheckpoint]) -> None:
    batch = now.count(TimeUnit.BATCH)
    for found in reversed(checkpoints):
        if found.manifest is not None and found.manifest.timestamp.count(TimeUnit.BATCH) > batch:
            raise LaterCheckpointError(folder, found.name, found.manifest.run_name, int(batch))
