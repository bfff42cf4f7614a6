"""The folder that a run saves to: its lock, what may be there already, links and copies, and which checkpoints to keep.

After each save, :func:`delete_old` deletes only complete checkpoints of the same run, never the one just saved or a
later one, and none with files of the user in it.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterable, Sequence
from typing import Literal, NamedTuple

import attrs

from composer.checkpoint.errors import (
    CheckpointError,
    CheckpointSaveError,
    LaterCheckpointError,
    MissingCheckpointError,
    OtherReleaseError,
)
from composer.checkpoint.finding import FoundCheckpoint, clock_order, damage_of, find_checkpoints
from composer.checkpoint.folders import Folder, LocalFolder, open_folder, split_path
from composer.checkpoint.lock import FolderLock
from composer.checkpoint.manifest import MANIFEST, Manifest, foreign_files
from composer.checkpoint.reading import OpenCheckpoint
from composer.core import State, Timestamp, TimeUnit
from composer.core.checks import NamesArguments, integer, one_of
from composer.core.evaluator import nearest_metric

_log = logging.getLogger(__name__)


class Names(NamedTuple):
    """The folder, the names in it of a checkpoint and of the links to the latest and the best one, and its copies."""

    folder: str
    checkpoint: str
    latest: str | None
    best: str | None
    copies: list[str]

    def folders_of_copies(self) -> list[str]:
        """Return the URLs of the folders that the copies are in."""
        return [*dict.fromkeys(split_path(url)[0] for url in self.copies)]


@attrs.frozen
class KeepBest(NamesArguments):
    """Keep the checkpoints with the best values of a metric, in addition to the last ones.

    Args:
        metric: The name under which the metric is logged: ``"metrics/eval/MulticlassAccuracy"``.
        count: The number of checkpoints.
        mode: Whether the largest (``"max"``) or the smallest (``"min"``) values are the best.

    Raises:
        ValueError: An argument is out of range.

    Example:
        >>> KeepBest("metrics/eval/CrossEntropy", count=3, mode="min")
        KeepBest(metric='metrics/eval/CrossEntropy', count=3, mode='min')
    """

    metric: str = attrs.field()
    count: int = integer(1, 1, meaning="It is the number of checkpoints to keep.")
    mode: Literal["max", "min"] = attrs.field(default="max", validator=one_of("max", "min"))

    @metric.validator
    def _check_metric(self, _: object, metric: object) -> None:
        if not isinstance(metric, str) or not metric:
            raise (ValueError if metric == "" else TypeError)(
                f"metric must be the name of a metric as it is logged, such as 'metrics/eval/Accuracy', got {metric!r}."
            )

    @property
    def _sign(self) -> int:
        return -1 if self.mode == "max" else 1

    def best(self, checkpoints: Iterable[FoundCheckpoint]) -> list[FoundCheckpoint]:
        """Return the best of some checkpoints, the earlier of equal ones; never one without a finite value."""
        known = [(value, one) for one in checkpoints if (value := self.value(one)) is not None]
        return [one for _, one in sorted(known, key=lambda item: self._sign * item[0])[: self.count]]

    def improves(self, value: float, best: list[float]) -> bool:
        """Return whether a value is better than one of the best, or there are fewer than ``count``.

        Example:
            >>> KeepBest("metrics/eval/Accuracy", count=2).improves(0.85, [0.9, 0.8])
            True
        """
        return len(best) < self.count or self._sign * value < self._sign * best[-1]

    def best_values(self, values: Iterable[float]) -> list[float]:
        """Return the best of some values, the best first.

        Example:
            >>> KeepBest("metrics/eval/Accuracy", count=2).best_values([0.8, 0.9, 0.85])
            [0.9, 0.85]
        """
        return sorted(values, key=lambda value: self._sign * value)[: self.count]

    def value(self, checkpoint: FoundCheckpoint) -> float | None:
        """Return a checkpoint's value of the metric; None if it has none."""
        return None if checkpoint.manifest is None else checkpoint.manifest.metrics.get(self.metric)


@attrs.define(eq=False)
class RunFolder:
    """The folder of a saver. Only rank 0 opens it; other processes write to drafts in it.

    It is open from the first training until :meth:`close`, and locked all that time. The thread that writes a
    checkpoint calls :meth:`finish` after it; the main thread opens and closes the folder while nothing is written.

    Args:
        overwrite: Whether to replace checkpoints of other runs.
        weights_only: Whether the checkpoints are of weights only.
        keep_last: The number of the last ones to keep; -1 keeps all.
        keep_best: The best ones to keep in addition.

    Attributes:
        opened: The folder while it is open.
        saved: The paths of the checkpoints that the run has saved and not deleted, the oldest first.
        best: The path of the best one.
    """

    overwrite: bool
    weights_only: bool
    keep_last: int
    keep_best: KeepBest | None
    opened: Folder | None = attrs.field(default=None, init=False)
    saved: list[str] = attrs.field(factory=list, init=False)
    best: str | None = attrs.field(default=None, init=False)
    _copied: set[str] = attrs.field(factory=set, init=False)
    _continues: bool = attrs.field(default=False, init=False)
    _lock: FolderLock | None = attrs.field(default=None, init=False)

    def open(self, folder: Folder, names: Names, state: State, *, continues: bool) -> Folder:
        """Return the folder; if it is not open, create and lock it, and delete what killed processes have left.

        Args:
            folder: The folder.
            names: The names of a checkpoint that is saved now.
            state: The run.
            continues: Whether the run begins with the newest undamaged checkpoint there.

        Raises:
            FolderInUseError: Another process has the lock.
            CheckpointError: It cannot be read, or the folder of a copy cannot.
            CheckpointSaveError: It cannot be created, or has later checkpoints than the run; or the folder of a copy
                has later ones of the same run.
        """
        if self.opened is None:
            folder.make()
            if isinstance(folder, LocalFolder):
                self._lock = self._lock or FolderLock(folder.path)
                folder.tidy()
            if not self.overwrite and not continues:
                _check_no_later_ones(folder, state.timestamp)
                for place in names.folders_of_copies():
                    _check_no_later_ones(open_folder(place), state.timestamp, state.run_name)
            elif continues and isinstance(folder, LocalFolder) and not self.weights_only:
                self._keep_damaged(folder, state)
            self.opened, self._continues = folder, continues
        return self.opened

    def _keep_damaged(self, folder: LocalFolder, state: State) -> None:
        """Rename the damaged checkpoints that the run has passed over, as it will save others of their names.

        Raises:
            LaterCheckpointError: One is later than the run and not damaged, as the clock was reset.
        """
        for found in find_checkpoints(folder):
            manifest = found.manifest
            if manifest is None:  # without the file, it may be another folder of the user
                is_passed = not isinstance(found.error, OtherReleaseError | MissingCheckpointError)
            else:
                is_own = manifest.run_name == state.run_name and not manifest.weights_only
                is_passed = is_own and clock_order(manifest.timestamp) > clock_order(state.timestamp)
                if is_passed and damage_of(folder, found.name) is None:
                    if self.overwrite:
                        continue
                    batch = state.timestamp.counts.batch
                    raise LaterCheckpointError(folder, found.name, manifest.run_name, batch)
            if is_passed:
                _log.warning("autoresume: %s is damaged, and is now %s.", found.path, folder.set_aside(found.name))

    def forget(self) -> None:
        """Forget what an earlier run has saved and copied, which is then that of another run."""
        self.saved, self.best, self._copied = [], None, set()

    def close(self) -> None:
        """Release the lock."""
        if self._lock is not None:
            self._lock.release()
        self.opened = self._lock = None

    def best_values(self, folder: Folder, state: State) -> list[float]:
        """Return the values of the best checkpoints of a run that exist; the best first."""
        if self.keep_best is None:
            return []
        own = own_checkpoints(folder, state.run_name, state.timestamp, weights_only=self.weights_only)
        values = map(self.keep_best.value, own)
        return self.keep_best.best_values(value for value in values if value is not None)

    def finish(self, folder: Folder, names: Names, manifest: Manifest) -> None:
        """List a written checkpoint, update the links to the latest and best, copy it, and delete old ones.

        Raises:
            CheckpointSaveError: It was not copied, a link not updated, or an old checkpoint not deleted.
        """
        path = folder.at(names.checkpoint)
        self.saved = [*(one for one in self.saved if one != path), path]
        try:
            self._link(folder, names.latest, names.checkpoint)
            for url in names.copies:
                self._copy(folder, names, url)
            if self.keep_best is None and self.keep_last < 0:
                return
            own = own_checkpoints(folder, manifest.run_name, manifest.timestamp, weights_only=self.weights_only)
            if self.keep_best is not None and (best := self.keep_best.best(own)):
                self.best = best[0].path
                self._link(folder, names.best, best[0].name)
            # After the links were moved, which would otherwise point to deleted checkpoints for a moment.
            deleted = {folder.at(one) for one in delete_old(folder, own, self.keep_last, self.keep_best)}
        except (CheckpointError, OSError, ImportError) as error:  # CheckpointSaveError is an OSError
            outcome = "is complete, and a link to it was not updated, a copy not written, or an old one not deleted"
            reason = f"{error.path}: {error.reason}" if isinstance(error, CheckpointSaveError) else str(error)
            raise CheckpointSaveError(path, reason, outcome=outcome) from error
        self.saved = [one for one in self.saved if one not in deleted]

    def _copy(self, folder: Folder, names: Names, url: str) -> None:
        """Copy a checkpoint to a URL, and point the link beside it to it."""
        parent, name = split_path(url)
        to, again = open_folder(parent), self.overwrite or self._continues or url in self._copied
        if not again and MANIFEST in to.sizes(name):  # without it, it is what an interrupted copy has left
            raise CheckpointSaveError(to.at(name), "exists. Set overwrite=True (save_overwrite) to replace it.")
        saved = OpenCheckpoint.of(folder, names.checkpoint)
        to.make()
        draft = to.begin(name)
        try:
            for file in saved.manifest.files:
                to.put(name, draft, file, saved.chunks(file))
            to.commit(name, draft, saved.manifest)
        finally:
            to.abandon(draft)
        self._copied.add(url)
        if names.latest is not None:
            to.set_latest(names.latest, name)

    def _link(self, folder: Folder, link: str | None, name: str) -> None:
        if link is not None:
            folder.set_latest(link, name)


def _check_no_later_ones(folder: Folder, now: Timestamp, run_name: str | None = None) -> None:
    """Raise an error if a folder has later checkpoints of a run, or of any if no name is given."""
    batch = now.count(TimeUnit.BATCH)
    for found in reversed(find_checkpoints(folder)):
        of_run = found.manifest if found.manifest and run_name in (None, found.manifest.run_name) else None
        if of_run is not None and of_run.timestamp.count(TimeUnit.BATCH) > batch:
            raise LaterCheckpointError(folder, found.name, of_run.run_name, int(batch))


def own_checkpoints(folder: Folder, run_name: str, until: Timestamp, *, weights_only: bool) -> list[FoundCheckpoint]:
    """Return the checkpoints of a run in a folder, complete ones or those of weights, the oldest first.

    Those later than the clock ``until`` are left out: they are of an earlier training, or damaged.
    """
    return [
        one
        for one in find_checkpoints(folder)
        if one.manifest is not None
        and (one.manifest.run_name, one.manifest.weights_only) == (run_name, weights_only)
        and clock_order(one.manifest.timestamp) <= clock_order(until)
    ]


def expired(
    checkpoints: Sequence[FoundCheckpoint], keep_last: int, keep_best: KeepBest | None = None
) -> list[FoundCheckpoint]:
    """Return which checkpoints to delete; never the last complete one, and no incomplete one.

    Args:
        checkpoints: The existing checkpoints, the oldest first.
        keep_last: The number of the last checkpoints to keep; -1 keeps all.
        keep_best: The best checkpoints to keep in addition.
    """
    if keep_last < 0:
        return []
    complete = [checkpoint for checkpoint in checkpoints if checkpoint.is_complete]
    to_keep = complete[-max(keep_last, 1) :] + (keep_best.best(complete) if keep_best else [])
    return [checkpoint for checkpoint in complete if checkpoint not in to_keep]


def delete_old(
    folder: Folder, own: Sequence[FoundCheckpoint], keep_last: int, keep_best: KeepBest | None = None
) -> list[str]:
    """Delete the checkpoints that need not be kept, and return their names.

    Folders that are not a complete checkpoint, or contain other files, are not deleted.

    Args:
        folder: Where they are.
        own: What :func:`own_checkpoints` returned.
        keep_last: The number of the last ones to keep; -1 keeps all.
        keep_best: The best ones to keep in addition.

    Raises:
        CheckpointSaveError: One cannot be deleted.
    """
    names = [one.name for one in expired(own, keep_last, keep_best) if not foreign_files(folder.sizes(one.name))]
    if names and keep_best is not None:
        _warn_if_metric_is_unknown(keep_best, own, folder)
    for name in names:
        folder.delete(name)
    return names


def _warn_if_metric_is_unknown(keep_best: KeepBest, checkpoints: Iterable[FoundCheckpoint], folder: Folder) -> None:
    """Warn if the checkpoints have other metrics of the same evaluation, and not the one to keep the best by."""
    found = {name for one in checkpoints if one.manifest is not None for name in one.manifest.metrics}
    similar = sorted(name for name in found if name.rpartition("/")[0] == keep_best.metric.rpartition("/")[0])
    if similar and keep_best.metric not in similar:
        hint = nearest_metric(keep_best.metric, similar)
        text = f"{keep_best} keeps none, as no checkpoint in {folder} has that metric{hint}"
        warnings.warn(text, UserWarning, stacklevel=3)


def check_keep_last(name: str, keep_last: object) -> None:
    """Raise a ValueError if ``keep_last`` is no number of checkpoints to keep; the error calls it by ``name``."""
    if not isinstance(keep_last, int) or isinstance(keep_last, bool) or keep_last < -1 or keep_last == 0:
        raise ValueError(
            f"{name} must be -1 (all) or at least 1, as the last complete checkpoint is never deleted, "
            f"got {keep_last!r}."
        )
