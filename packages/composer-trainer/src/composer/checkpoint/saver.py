"""The callback that saves checkpoints during a run; the Trainer creates it for ``save_folder``.

A save has four parts, the first three in all processes at the same batches:

1. ``_save_if_due`` decides at the events of checkpoints: the interval is due, or the weights are among the best.
2. :meth:`CheckpointSaver.save` does nothing if this :class:`_Moment` was saved last, and waits for the former save, so
   that there is never more than one copy of the run.
3. ``_take`` copies the run into a snapshot.
4. A thread writes it, and then updates links and deletes old checkpoints (``_finish``). It sets ``_saved`` and
   ``_best``; all other attributes belong to the main thread.

If the write fails, ``_repeatable`` forgets the moment, so that the same batch may be saved again, and raises the error:
at the next batch, or in several processes, which have to raise it at the same one, at the next save.
"""

from __future__ import annotations

import contextlib
import logging
import os
import warnings
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import attrs

from composer.checkpoint.base import is_remote, split_path
from composer.checkpoint.errors import CheckpointSaveError
from composer.checkpoint.finding import find_checkpoints
from composer.checkpoint.ignoring import IgnoreKeys, check_ignore_keys
from composer.checkpoint.local import FolderLock, LocalFolder, open_folder
from composer.checkpoint.retention import KeepBest, delete_old, own_checkpoints
from composer.checkpoint.saving import (
    checkpoint_name,
    metric_values,
    reject_fsdp1,
    take_snapshot,
)
from composer.checkpoint.writers import failing_in_all
from composer.core import Callback, Event, Interval, Logger, State, Time, TimeUnit
from composer.core.background import Background, ThreadError
from composer.core.files import fill_in_run
from composer.distributed import from_rank_zero, get_world_size
from composer.functional.checks import check_flags
from composer.functional.dtensors import is_sharded

if TYPE_CHECKING:
    from composer.checkpoint.base import Folder, Manifest
    from composer.checkpoint.finding import FoundCheckpoint
    from composer.checkpoint.layout import KeptMemory
    from composer.checkpoint.writers import Snapshot
    from composer.core import Timestamp

__all__ = ["CheckpointSaver", "SaveInterval", "check_folder", "check_keep_last"]

_log = logging.getLogger(__name__)
_LAST_WAIT = 5.0
"""Seconds that an ending process waits for the others to write their parts."""

SaveInterval: TypeAlias = Time | str | int | Callable[[State, Event], bool]


class _Names(NamedTuple):
    """The folder, the names in it of a checkpoint and of the links to the latest and the best one, and its copies."""

    folder: str
    checkpoint: str
    latest: str | None
    best: str | None
    copies: list[str]


@attrs.frozen
class _Moment:
    """What identifies a save; a second one of the same moment does nothing.

    An evaluation between two saves of a batch may complete what was interrupted, or show that it is among the best.
    """

    name: str
    batch: int
    interrupted: object
    is_best: bool


@attrs.define
class _Seen:
    """What has happened at which batch; discarded when a training starts, as the clock may have been set back.

    Args:
        last: The last save; None if it failed, so that it may be repeated.
        measured: The batch at which the metrics of each label were measured last.
        compared: The batch at which the metric of ``keep_best`` was compared last.
        best: The last batch at which it was among the best.
    """

    last: _Moment | None = None
    measured: dict[str, int] = attrs.field(factory=dict)
    compared: int | None = None
    best: int | None = None


class CheckpointSaver(Callback):
    """Save checkpoints of a run, and keep the last and the best of them.

    Checkpoints are written in the background: training waits while its tensors are copied, not while they are written.
    A save waits for the previous one, so that there is never more than one copy. If one fails, the next batch raises
    the error; earlier checkpoints are unchanged. The end of the training waits for the last save. Rank 0 writes, and a
    model that is sharded by FSDP2 is written by all processes. All processes have to save at the same times: if one of
    them fails, all raise an error at the next save or at the end of the training.

    The end of the training always saves a checkpoint (unless the interval is 0 or a function), after everything else
    has run, including the last evaluation.

    A new run raises an error if the folder has later checkpoints of any run, or if another running process saves to the
    same local folder.

    Args:
        folder: A path or a URL (``"s3://bucket/{run_name}"``). The run's name is filled in.
        filename: The checkpoint's name in it; ``{epoch}``, ``{batch}``, ``{run_name}`` and so on are filled in. The
            ending ``.pt`` of MosaicML Composer's files is removed, with a warning, as a checkpoint is a folder; in a
            local folder, a link beside it has the name with the ending.
        latest_filename: The name of a link to the newest checkpoint; none if None. It is a file with the checkpoint's
            name where links are not supported.
        save_interval: A time, a string, a number of epochs, or 0 for never; or a function ``f(state, event) -> bool``,
            which is called after each batch, epoch and iteration, and at the end.
        overwrite: Whether to replace checkpoints of other runs with the same names.
        num_checkpoints_to_keep: The number of the last checkpoints to keep; -1 keeps all. Those later than the one
            just saved, as after ``reset_time``, neither count nor are deleted. 0 gives a warning: no local copies are
            kept of checkpoints at a URL, and the last one in a local folder is.
        keep_best: The best checkpoints to keep in addition to the last ones.
        best_filename: The name of a link to the best checkpoint by ``keep_best``; none if None.
        weights_only: Whether to save only the weights that the model is evaluated with; training cannot resume from
            them.
        ignore_keys: What not to save; see :func:`~composer.checkpoint.save_checkpoint`.
        background: Whether training continues while a checkpoint is written.
        remote_file_name: The URL of a copy of each checkpoint of a local folder, or its name at the uploaders among
            the loggers of a program for MosaicML Composer; None makes no copies. A copy is written after the
            checkpoint, with the same link beside it, and is never deleted.
        latest_remote_file_name: Ignored.
        num_concurrent_uploads: Ignored.
        upload_timeout_in_seconds: Ignored.

    The attribute ``extra``, if set, is a function that returns plain data and tensors to save beside the state,
    such as the position in the data. A second save at the same time does nothing, unless the data has another
    ``interrupted`` than before. ``uploaders`` are functions that return the URL of a copy for ``remote_file_name``,
    until the next run. A run that has resumed from the newest undamaged checkpoint of the folder sets
    ``continues``: later checkpoints, which are damaged, are replaced by those of the same names and otherwise ignored,
    and anything else with the name of the next checkpoint, such as an incomplete folder, is renamed to a hidden name,
    which is logged.

    Raises:
        TypeError: A setting is of the wrong type.
        ValueError: A setting is out of range, or a name has an unknown field in braces.

    Example:
        >>> saver = CheckpointSaver("runs/{run_name}", save_interval="500ba", num_checkpoints_to_keep=3)
        >>> saver.saved_checkpoints
        []
    """

    def __init__(
        self,
        folder: str | os.PathLike[str] = "{run_name}/checkpoints",
        filename: str = "ep{epoch}-ba{batch}",
        remote_file_name: str | None = "{run_name}/checkpoints/ep{epoch}-ba{batch}",
        latest_filename: str | None = "latest",
        latest_remote_file_name: str | None = None,
        save_interval: SaveInterval = "1ep",
        *,
        overwrite: bool = False,
        num_checkpoints_to_keep: int = -1,
        keep_best: KeepBest | None = None,
        best_filename: str | None = "best",
        weights_only: bool = False,
        ignore_keys: IgnoreKeys = None,
        background: bool = True,
        num_concurrent_uploads: int = 1,
        upload_timeout_in_seconds: int = 3600,
    ) -> None:
        del latest_remote_file_name, num_concurrent_uploads, upload_timeout_in_seconds
        check_folder("folder", folder)
        check_flags(overwrite=overwrite, weights_only=weights_only, background=background)
        num_checkpoints_to_keep = _without_zero(num_checkpoints_to_keep, folder)
        check_keep_last("num_checkpoints_to_keep", num_checkpoints_to_keep)
        if keep_best is not None and not isinstance(keep_best, KeepBest):
            raise TypeError(
                f"keep_best must be e.g. KeepBest('metrics/eval/MulticlassAccuracy', 3), got {keep_best!r}."
            )
        check_ignore_keys(ignore_keys, "ignore_keys (save_ignore_keys)")
        self._with_ending = [str(name).endswith(".pt") for name in (filename, latest_filename)]
        self.folder, self.filename = str(folder), _without_suffix(filename)
        self.latest_filename = None if latest_filename is None else _without_suffix(latest_filename)
        self.best_filename = best_filename
        self.remote_file_name = None if remote_file_name is None else str(remote_file_name).removesuffix(".pt")
        self.uploaders: list[Callable[[str], str]] = []
        self._names(State(model=None))
        self.save_interval = (
            save_interval if callable(save_interval) else Interval.named("save_interval", save_interval)
        )
        self.overwrite, self.weights_only, self.ignore_keys = overwrite, weights_only, ignore_keys
        self.num_checkpoints_to_keep, self.keep_best = num_checkpoints_to_keep, keep_best
        self.background = background
        self.extra: Callable[[], Mapping[str, Any]] | None = None
        self.continues = False
        # Of the run: the paths of its checkpoints and of the best one; and, only in the process of rank 0, the values
        # of the best ones, the best first.
        self._saved: list[str] = []
        self._copied: set[str] = set()
        self._best: str | None = None
        self._best_values: list[float] = []
        # Of the training, a call of fit.
        self._seen = _Seen()
        # Until the saver is closed.
        self._opened: Folder | None = None
        self._lock: FolderLock | None = None
        self._memory: KeptMemory = {}
        # Of the save in the background; and its path, and the snapshot that all processes write together, until all
        # have waited for it.
        self._saving = Background()
        self._path: str | None = None
        self._joint: Snapshot | None = None

    @property
    def saved_checkpoints(self) -> list[str]:
        """The paths of the checkpoints that this run has saved and not deleted, the oldest first."""
        return list(self._saved)

    @property
    def best_checkpoint(self) -> str | None:
        """The path of the best checkpoint of this run by ``keep_best``; None until one with the metric is saved."""
        return self._best

    @property
    def monitored_metric(self) -> str | None:
        """The metric of ``keep_best``, by the name under which it is logged; None without one."""
        return self.keep_best.metric if self.keep_best else None

    def init(self, state: State, logger: Logger) -> None:
        """Forget an earlier run."""
        del state, logger
        self._saved, self._best, self._best_values, self._seen, self.uploaders = [], None, [], _Seen(), []

    def fit_start(self, state: State, logger: Logger) -> None:
        """Create the folder, and check that no other process saves to it.

        Raises:
            ValueError: There are no data with the label of the metric of ``keep_best``.
        """
        del logger
        reject_fsdp1(state.model)
        labels = [state.dataloader_label or "train", *state.eval_metrics]
        if self.keep_best is not None and self._best_label not in labels:
            raise ValueError(
                f"save_best (keep_best) must be a metric of {' or '.join(labels)}, got {self.keep_best.metric!r}, "
                "which nothing computes. Give eval_dataloader, or an Evaluator with this label."
            )
        self._wait()  # what was saved before this fit counts below
        self._seen = _Seen()
        with failing_in_all(self._names(state).folder):
            if state.rank == 0:
                folder = self._opened or self._open(state)
                if self.keep_best is not None:
                    earlier = self._own(folder, state.run_name, state.timestamp)
                    values = map(self.keep_best.value, self.keep_best.best(earlier))
                    self._best_values = [value for value in values if value is not None]

    def eval_end(self, state: State, logger: Logger) -> None:
        """Note that the weights have been evaluated, or the training metrics of an epoch computed."""
        del logger
        self._seen.measured[str(state.dataloader_label)] = int(state.timestamp.batch)

    epoch_end = eval_end

    def batch_checkpoint(self, state: State, logger: Logger) -> None:
        """Save if a checkpoint is due, and raise the error of a save in the background."""
        del logger
        self._save_if_due(state, Event.BATCH_CHECKPOINT)

    def epoch_checkpoint(self, state: State, logger: Logger) -> None:
        """Save if a checkpoint is due."""
        del logger
        self._save_if_due(state, Event.EPOCH_CHECKPOINT)

    def iteration_checkpoint(self, state: State, logger: Logger) -> None:
        """Save if a checkpoint is due."""
        del logger
        self._save_if_due(state, Event.ITERATION_CHECKPOINT)

    def fit_end(self, state: State, logger: Logger) -> None:
        """Save at the end of the training, and wait until the checkpoint is written."""
        del logger
        self._save_if_due(state, Event.FIT_END)
        self._wait()

    def close(self, state: State, logger: Logger) -> None:
        """Wait until the last checkpoint is written, and release the folder."""
        del state, logger
        if self._joint is not None:
            self._joint.limit_waiting(_LAST_WAIT)  # after an error, other processes may have ended
        try:
            with self._repeatable():
                self._saving.wait()
        finally:
            if self._lock is not None:
                self._lock.release()
            self._opened = self._lock = None
            self._memory.clear()

    def save(self, state: State) -> None:
        """Save now, in the background unless that is disabled; a second save of the same does nothing.

        Raises:
            NotImplementedError: The model is wrapped by FSDP 1.
            NotSerializableError: A value is neither data nor a tensor; the error names its place.
            CheckpointSaveError: The checkpoint or the previous one could not be written.
        """
        reject_fsdp1(state.model)  # in all processes, though only rank 0 may save
        names, seen, batch = self._names(state), self._seen, int(state.timestamp.batch)
        # In all processes, also those that write nothing, because it exchanges data between them.
        extra = None if self.extra is None else self.extra()
        moment = _Moment(names.checkpoint, batch, (extra or {}).get("interrupted"), seen.best == batch)
        if moment == seen.last:
            return
        # Before the copy, so that there is only one in memory. CUDA fills pinned memory at any time after the copy is
        # requested, also while a thread still writes the former contents to a file.
        self._wait()
        is_again = seen.last is not None and (seen.last.name, seen.last.batch) == (moment.name, batch)
        take = partial(self._take, state, names, extra, overwrite=self.overwrite or is_again)
        write = take() if is_sharded(state.model) else None  # with collectives, which must not be in the block below
        seen.last, path = moment, open_folder(names.folder).at(names.checkpoint)
        with self._repeatable(), failing_in_all(path):
            if state.rank == 0 and write is None:
                write = take()
            if write is not None:
                self._saving.start(write)
        self._path = path
        if not self.background:
            self._wait()

    def _take(
        self, state: State, names: _Names, extra: Mapping[str, Any] | None, *, overwrite: bool
    ) -> Callable[[], None]:
        """Take a snapshot, and return what writes this process's files of it."""
        folder, name, is_joint = open_folder(names.folder), names.checkpoint, is_sharded(state.model)
        with failing_in_all(folder.at(name)) if is_joint else contextlib.nullcontext():
            if state.rank == 0:
                folder = self._opened or self._open(state)
        batch = int(state.timestamp.batch)
        snapshot = take_snapshot(
            state,
            extra,
            path=folder.at(name),
            weights_only=self.weights_only,
            ignore_keys=self.ignore_keys,
            memory=self._memory,
            measured=[label for label, at in self._seen.measured.items() if at == batch],
        )
        self._joint = snapshot if is_joint else None
        return partial(
            snapshot.write,
            folder,
            name,
            overwrite=overwrite,
            prepare=lambda: self._set_aside(folder, name),
            finish=lambda manifest: self._finish(folder, names, manifest),
        )

    def _wait(self) -> None:
        """Wait for the previous save; if it failed, raise an error in all processes."""
        path, self._path, self._joint = self._path, None, None
        # In all processes, or only some would take part in a repeated save.
        with self._repeatable(), contextlib.nullcontext() if path is None else failing_in_all(path):
            self._saving.wait()

    @contextlib.contextmanager
    def _repeatable(self) -> Iterator[None]:
        """Start, check or await a save within this context: if it fails, it can be repeated at the same batch."""
        try:
            yield
        except BaseException as error:
            last, self._seen.last = self._seen.last, None
            if isinstance(error, ThreadError) and self._opened is not None and last is not None:
                raise CheckpointSaveError(self._opened.at(last.name), str(error)) from error
            raise

    def _names(self, state: State) -> _Names:
        """Return the names of a save now."""
        folder = fill_in_run(self.folder, state, "folder (save_folder)")
        name = checkpoint_name(self.filename, state, "filename (save_filename)")
        links = (self.latest_filename, "latest_filename (save_latest_filename)"), (self.best_filename, "best_filename")
        latest, best = (None if link is None else checkpoint_name(link, state, argument) for link, argument in links)
        return _Names(folder, name, latest, best, self._copies(state))

    def _copies(self, state: State) -> list[str]:
        """Return the URLs of the copies of a checkpoint that is saved now."""
        if self.remote_file_name is None or is_remote(self.folder):
            return []
        remote = fill_in_run(self.remote_file_name, state, "remote_file_name")
        return [remote] if is_remote(remote) else [url_of(remote) for url_of in self.uploaders]

    def _save_if_due(self, state: State, event: Event) -> None:
        """Raise the error of a save in the background, and save if it is time or the weights are among the best."""
        if get_world_size() == 1:  # several processes would raise it in different batches
            with self._repeatable():
                self._saving.check()
        is_due, is_best = self._is_due(state, event), self._record_if_best(state)
        if is_due or is_best:
            self.save(state)

    def _is_due(self, state: State, event: Event) -> bool:
        interval, elapsed = self.save_interval, state.get_elapsed_duration()
        if not isinstance(interval, Interval):
            return interval(state, event)
        if event is Event.FIT_END:
            return bool(interval.every.value)
        # The last checkpoint is saved at FIT_END, after the last evaluation.
        return (elapsed is None or elapsed.value < 1) and interval.is_due(state)

    def _record_if_best(self, state: State) -> bool:
        """Record a new value of the metric if it is among the best, and return whether; the same in all processes."""
        best, seen, batch = self.keep_best, self._seen, int(state.timestamp.batch)
        if best is None or seen.measured.get(self._best_label) != batch or seen.compared == batch:
            return False
        seen.compared = batch
        value = metric_values(state).get(best.metric)
        is_best = from_rank_zero(value is not None and best.improves(value, self._best_values))  # it read the folder
        if is_best:
            seen.best = batch
        return is_best

    @property
    def _best_label(self) -> str:
        """The label of the data whose metric chooses the best checkpoint."""
        return (self.monitored_metric or "").removeprefix("metrics/").partition("/")[0]

    def _finish(self, folder: Folder, names: _Names, manifest: Manifest) -> None:
        """List a checkpoint that has been written, update the links to the latest and best, and delete old ones."""
        path = folder.at(names.checkpoint)
        self._saved = [*(one for one in self._saved if one != path), path]
        try:
            self._link(folder, names.latest, names.checkpoint)
            self._link_files(folder, names)
            for url in names.copies:
                self._copy(folder, names, url)
            if self.keep_best is None and self.num_checkpoints_to_keep < 0:
                return
            own = self._own(folder, manifest.run_name, manifest.timestamp)
            if self.keep_best is not None and (best := self.keep_best.best(own)):
                self._best = folder.at(best[0].name)
                self._link(folder, names.best, best[0].name)
            # After the links were moved, which would otherwise point to deleted checkpoints for a moment.
            gone = {folder.at(one) for one in delete_old(folder, own, self.num_checkpoints_to_keep, self.keep_best)}
            for link in [Path(f"{path}.pt") for path in gone] if self._with_ending[0] else ():
                if link.is_symlink():
                    link.unlink()
        except (CheckpointSaveError, OSError) as error:
            outcome = "is complete, and a link to it was not updated, a copy not written, or an old one not deleted"
            reason = f"{error.path}: {error.reason}" if isinstance(error, CheckpointSaveError) else str(error)
            raise CheckpointSaveError(path, reason, outcome=outcome) from error
        self._saved = [one for one in self._saved if one not in gone]

    def _copy(self, folder: Folder, names: _Names, url: str) -> None:
        """Copy a checkpoint to a URL, and point the link beside it to it."""
        parent, name = split_path(url)
        to, again = open_folder(parent), self.overwrite or self.continues or url in self._copied
        folder.copy(names.checkpoint, to, name, overwrite=again)
        self._copied.add(url)
        if names.latest is not None:
            to.set_latest(names.latest, name)

    def _link_files(self, folder: Folder, names: _Names) -> None:
        """Point links with the ending of a file to a checkpoint, if the names were given with it."""
        for name, has_ending in zip((names.checkpoint, names.latest), self._with_ending, strict=True):
            if has_ending and isinstance(folder, LocalFolder):
                folder.set_file_link(f"{name}.pt", names.checkpoint, overwrite=self.overwrite)

    def _own(self, folder: Folder, run_name: str, until: Timestamp) -> list[FoundCheckpoint]:
        return own_checkpoints(folder, run_name, until, weights_only=self.weights_only)

    def _link(self, folder: Folder, link: str | None, name: str) -> None:
        if link is not None:
            self._set_aside(folder, link, for_link=True)
            folder.set_latest(link, name)

    def _set_aside(self, folder: Folder, name: str, *, for_link: bool = False) -> None:
        aside = folder.set_aside(name, for_link=for_link) if self.continues else None
        if aside is not None:
            _log.warning(
                "autoresume: %s has the name of the next checkpoint and is not one that can be replaced: it is now %s.",
                folder.at(name),
                aside,
            )

    def _open(self, state: State) -> Folder:
        folder = open_folder(self._names(state).folder)
        folder.make()
        if isinstance(folder, LocalFolder):
            self._lock = self._lock or FolderLock(folder.path)
            folder.tidy()
        if not self.overwrite and not self.continues:
            _check_no_later_ones(folder, state)
        self._opened = folder
        return folder


def check_folder(name: str, folder: object) -> None:
    """Raise a TypeError if ``folder`` is neither a path nor a URL; the error calls it by ``name``."""
    if not isinstance(folder, (str, os.PathLike)):
        raise TypeError(f"{name} must be a path or a URL, got {folder!r}.")


def _without_suffix(name: str) -> str:
    """Return the name of a checkpoint without the ending of a file."""
    if not isinstance(name, str) or not name.endswith(".pt"):
        return name
    warnings.warn(
        f"A checkpoint is a folder, so {name!r} is saved as {name.removesuffix('.pt')!r}, with a link: remove '.pt' "
        "from filename (save_filename) and latest_filename (save_latest_filename).",
        UserWarning,
        stacklevel=3,
    )
    return name.removesuffix(".pt")


def _without_zero(keep_last: int, folder: str | os.PathLike[str]) -> int:
    """Return the number of checkpoints to keep; instead of 0 all at a URL, and the last one in a local folder."""
    if keep_last != 0 or isinstance(keep_last, bool):
        return keep_last
    all_or_last, number = ("all checkpoints", -1) if is_remote(folder) else ("the last checkpoint", 1)
    warnings.warn(
        f"num_checkpoints_to_keep=0 (save_num_checkpoints_to_keep) keeps {all_or_last} in {folder}: there are no "
        f"other copies. Set it to {number}.",
        UserWarning,
        stacklevel=3,
    )
    return number


def check_keep_last(name: str, keep_last: object) -> None:
    """Raise a ValueError if ``keep_last`` is no number of checkpoints to keep; the error calls it by ``name``."""
    if not isinstance(keep_last, int) or isinstance(keep_last, bool) or keep_last == 0 or keep_last < -1:
        raise ValueError(
            f"{name} must be -1 (all) or at least 1, as the last complete checkpoint is never deleted, "
            f"got {keep_last!r}."
        )


def _check_no_later_ones(folder: Folder, state: State) -> None:
    now = state.timestamp.count(TimeUnit.BATCH)
    for found in reversed(find_checkpoints(folder)):
        if found.manifest is not None and found.manifest.timestamp.count(TimeUnit.BATCH) > now:
            raise CheckpointSaveError(
                folder,
                f"it holds {found.name} of run {found.manifest.run_name!r}, later than this run's batch {now}. "
                "Continue from it (autoresume, load_path), set overwrite=True (save_overwrite) to replace it, "
                "or choose another folder or run_name.",
            )
