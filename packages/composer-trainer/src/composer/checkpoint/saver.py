"""The callback that saves checkpoints during a run; the Trainer creates it for ``save_folder``.

A save has six steps, the first five in all processes at the same batches:

1. At the events of checkpoints, :class:`DueSaves` decides whether to save.
2. :meth:`CheckpointSaver.save` calls ``resume_data``, which returns what a Trainer saves beside the state.
3. It does nothing more if the last save was of this moment, of which ``interrupted`` in that data is a part.
4. ``wait`` waits until the last save is written, so that there is never more than one copy of the run.
5. ``_snapshot`` copies the run into a :class:`~composer.checkpoint.saving.Snapshot`.
6. A thread writes it, and then updates the :class:`~composer.checkpoint.run_folder.RunFolder`.

If the write fails, ``_repeatable`` forgets the save, so that the same batch can be saved again. One process raises the
error at the next batch. Several raise it at the next save, because all of them have to raise it at the same batch.
"""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import attrs

from composer.checkpoint.contents import IgnoreKeys, check_ignore_keys, metric_values, reject_fsdp1
from composer.checkpoint.errors import CheckpointSaveError
from composer.checkpoint.folders import Folder, check_folder, is_remote, open_folder
from composer.checkpoint.layout import KeptMemory
from composer.checkpoint.run_folder import KeepBest, Names, RunFolder, check_keep_last
from composer.checkpoint.saving import Snapshot, checkpoint_name, saving_in_all, take_snapshot
from composer.core import Callback, Event, Interval, Logger, State, Time, Timestamp
from composer.core.background import Background
from composer.core.checks import to_path
from composer.core.evaluator import unknown_metric
from composer.core.files import FileName, fill_in_run
from composer.core.saving.model_state import optimizer_states
from composer.distributed import from_rank_zero, get_world_size
from composer.functional.checks import check_flags

_LAST_WAIT = 5.0
"""Seconds that an ending process waits for the others to write their parts."""

_NAMED = "filename (save_filename)"

SaveInterval: TypeAlias = Time | str | int | Callable[[State, Event], bool]


class CheckpointSaver(Callback):
    """Save checkpoints of a run, and keep the last and the best of them.

    Checkpoints are written in the background: training waits while its tensors are copied, not while they are written.
    A save waits for the previous one, so that there is never more than one copy. If one fails, the next batch raises
    the error, with several processes the next save, and each the end of the training, which waits for the last save;
    earlier checkpoints are unchanged. Each process writes what belongs to it and its parts of a model that is sharded
    by FSDP2, and rank 0 all else, so that the folder must be on storage that all share. All processes have to save at
    the same times.

    The end of the training always saves a checkpoint (unless the interval is 0 or a function), after everything else
    has run, including the last evaluation.

    A new run raises an error if the folder has later checkpoints of any run, or that of copies later ones of this run,
    or if another running process saves to the same local folder.

    Args:
        folder: A path or a URL (``"s3://bucket/{run_name}"``). The run's name is filled in.
        filename: The checkpoint's name in it; ``{epoch}``, ``{batch}``, ``{run_name}`` and so on are filled in. In a
            Trainer, a checkpoint whose name ends in ``.pt`` is a file that ``torch.load`` reads, unless its model is
            split over processes or it is copied to a URL.
        latest_filename: The name of a link to the newest checkpoint; none if None. It is a file with the checkpoint's
            name where links are not supported.
        save_interval: A time, a string, a number of epochs, or 0 for never; or a function ``f(state, event) -> bool``,
            which is called after each batch, epoch and iteration, and at the end.
        overwrite: Whether to replace checkpoints of other runs with the same names.
        num_checkpoints_to_keep: The number of the last checkpoints to keep; -1 keeps all. Those later than the one
            just saved, as after ``reset_time``, neither count nor are deleted.
        keep_best: The best checkpoints to keep in addition to the last ones.
        best_filename: The name of a link to the best checkpoint by ``keep_best``; none if None.
        weights_only: Whether to save only the weights that the model is evaluated with; training cannot resume from
            them.
        ignore_keys: What not to save; see :func:`~composer.checkpoint.save_checkpoint`.
        background: Whether training continues while a checkpoint is written.
        remote_file_name: The URL of a copy of each checkpoint of a local folder (also ``"file:///mnt/..."``), or its
            name at the uploaders among the loggers of a program for MosaicML Composer; None makes no copies. A copy is
            written after the checkpoint, with the same link beside it, and is never deleted.
        latest_remote_file_name: Ignored.
        num_concurrent_uploads: Ignored.
        upload_timeout_in_seconds: Ignored.

    A second save of the same batch under the same name does nothing, unless an evaluation has ended in between.

    Attributes:
        resume_data: The function by which a Trainer lets its savers save what an exact resume needs, such as the place
            in the data; called with ``weights_only``.
        open_folder: The function that opens the folder, by which a Trainer decides about the form of checkpoints.
        uploaders: Functions that return the URL of a copy for ``remote_file_name``, until the next run.
        continues: Whether the run begins with the newest undamaged checkpoint of the folder, if there is one, so that
            later ones, which are damaged, are no error.

    Raises:
        TypeError: A setting is of the wrong type.
        ValueError: A setting is out of range, or a name has an unknown field in braces.

    Example:
        >>> saver = CheckpointSaver("runs/{run_name}", save_interval="500ba", num_checkpoints_to_keep=3)
        >>> saver.saved_checkpoints
        []
    """

    saves_model = True
    """Whether ``fast_dev_run`` leaves the callback out."""

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
        del num_concurrent_uploads, upload_timeout_in_seconds
        check_folder("folder", folder)
        check_flags(overwrite=overwrite, weights_only=weights_only, background=background)
        check_keep_last("num_checkpoints_to_keep (save_num_checkpoints_to_keep)", num_checkpoints_to_keep)
        if keep_best is not None and not isinstance(keep_best, KeepBest):
            raise TypeError(
                f"keep_best must be e.g. checkpoint.KeepBest('metrics/eval/MulticlassAccuracy'), got {keep_best!r}."
            )
        check_ignore_keys(ignore_keys, "ignore_keys (save_ignore_keys)")
        self.folder, self.filename = str(folder), FileName(to_path(_NAMED, filename), str(folder))
        self.latest_filename = None if latest_filename is None else FileName(latest_filename, str(folder))
        self.best_filename, self.latest_remote_file_name = best_filename, latest_remote_file_name
        self.continues = False
        self.remote_file_name = None if remote_file_name is None else str(remote_file_name)
        self.open_folder: Callable[[str], Folder] = open_folder
        self.uploaders: list[Callable[[str], str]] = []
        self._names(State(model=None))
        if save_interval == "":
            warnings.warn("save_interval='' saves no checkpoints: write '1ep' to save some, or 0.", stacklevel=2)
        interval = 0 if save_interval == "" else save_interval
        self.save_interval = interval if callable(interval) else Interval.named("save_interval", interval)
        self.overwrite, self.weights_only, self.ignore_keys = overwrite, weights_only, ignore_keys
        self.num_checkpoints_to_keep, self.keep_best = num_checkpoints_to_keep, keep_best
        is_overridden = type(self)._save_checkpoint is not CheckpointSaver._save_checkpoint  # noqa: SLF001
        self.background = background and not is_overridden  # which may read what was written
        self.last_checkpoint_batch: Time | None = None
        self.all_saved_checkpoints_to_timestamp: dict[str, Timestamp] = {}
        self.resume_data: Callable[..., Mapping[str, Any]] | None = None
        self._run_folder = RunFolder(overwrite, weights_only, num_checkpoints_to_keep, keep_best)
        self._saving, self._memory = Background(), KeptMemory()
        self._reset()

    def _reset(self) -> None:
        """Forget what belongs to an earlier training, as the clock may have been set back."""
        self._due = DueSaves(self.save_interval, self.keep_best)
        self._moment: _Moment | None = None  # of the last save, unless it failed
        self._pending: Snapshot | None = None  # of the last save, until all processes have waited for it
        self._has_stepped = False

    @property
    def saved_checkpoints(self) -> list[str]:
        """The paths of the checkpoints that this run has saved and not deleted, the oldest first."""
        return list(self._run_folder.saved)

    @property
    def best_checkpoint(self) -> str | None:
        """The path of the best checkpoint of this run by ``keep_best``; None until one with the metric is saved."""
        return self._run_folder.best

    @property
    def monitored_metric(self) -> str | None:
        """The metric of ``keep_best``, by the name under which it is logged; None without one."""
        return self.keep_best.metric if self.keep_best else None

    def init(self, state: State, logger: Logger) -> None:
        """Forget an earlier run."""
        self.wait()
        self._reset()
        self._run_folder.forget()
        self.uploaders = []

    def fit_start(self, state: State, logger: Logger) -> None:
        """Create the folder, and check that no other process saves to it.

        Raises:
            ValueError: The metric of ``keep_best`` does not exist, and no evaluator to whose values it could be added.
            CheckpointSaveError: A process does not see the folder.
            NotSerializableError: An optimizer contains something that is neither data nor a tensor.
        """
        reject_fsdp1(state.model)
        self._check_optimizers(state)
        sets = {state.dataloader_label or "train": state.train_metrics or (), **state.eval_metrics}
        known = [f"metrics/{label}/{one}" for label, metrics in sets.items() for one in metrics]
        best = self.keep_best
        if best and not any(f"{best.metric}/".startswith(f"{one}/") for one in known):
            error = unknown_metric("save_best (keep_best; eval_dataloader adds metrics)", best.metric, known)
            if self._due.best_label not in sets:
                raise error
            warnings.warn(f"{error} No checkpoint is the best unless a callback adds its value.", stacklevel=2)
        self.wait()  # what was saved before this fit counts below
        self._reset()
        names = self._names(state)
        with saving_in_all(names.folder):
            if state.rank == 0:
                folder = self._run_folder.open(self.open_folder(names.folder), names, state, continues=self.continues)
                self._due.values = self._run_folder.best_values(folder, state)
        with saving_in_all(names.folder):
            if not (is_remote(names.folder) or Path(names.folder).is_dir()):
                raise CheckpointSaveError(names.folder, "save_folder must be one folder for all processes, or a URL.")

    def eval_end(self, state: State, logger: Logger) -> None:
        """Note that the metrics of data have been computed."""
        self._due.measured[state.dataloader_label or "train"] = int(state.timestamp.batch)

    epoch_end = eval_end  # that of this class: the training metrics of an epoch have been computed

    def _check_optimizers(self, state: State) -> None:
        """Raise an error for what cannot be saved of optimizers before a training, instead of at its first save."""
        if not self.weights_only:
            optimizer_states(state.model, state.optimizers)

    def batch_checkpoint(self, state: State, logger: Logger) -> None:
        """Save if a checkpoint is due, and raise the error of a save in the background."""
        if not self._has_stepped:
            self._check_optimizers(state)  # with what the first step has created
            self._has_stepped = True
        self._save_if_due(state, logger, Event.BATCH_CHECKPOINT)

    def epoch_checkpoint(self, state: State, logger: Logger) -> None:
        """Save if a checkpoint is due."""
        self._save_if_due(state, logger, Event.EPOCH_CHECKPOINT)

    def iteration_checkpoint(self, state: State, logger: Logger) -> None:
        """Save if a checkpoint is due."""
        self._save_if_due(state, logger, Event.ITERATION_CHECKPOINT)

    def fit_end(self, state: State, logger: Logger) -> None:
        """Save at the end of the training, and wait until the checkpoint is written."""
        self._save_if_due(state, logger, Event.FIT_END)
        self.wait()
        # Only the first process has listed them, and a program may load one of them in all.
        run_folder = self._run_folder
        run_folder.saved, run_folder.best = from_rank_zero((run_folder.saved, run_folder.best))

    def close(self, state: State, logger: Logger) -> None:
        """Wait until the last checkpoint is written, and release the folder."""
        if self._pending is not None:
            self._pending.limit_waiting(_LAST_WAIT)  # after an error, other processes may have ended
        try:
            with self._repeatable():
                self._saving.wait()
        finally:
            self._moment = self._pending = None
            self._run_folder.close()
            self._memory.clear()

    def save(self, state: State) -> None:
        """Save now, in the background unless that is disabled; a second save of the same does nothing.

        Raises:
            NotImplementedError: The model is wrapped by FSDP 1.
            NotSerializableError: A value is neither data nor a tensor; the error names its place.
            CheckpointSaveError: The checkpoint or the previous one could not be written.
        """
        names, batch = self._names(state), int(state.timestamp.batch)
        # In all processes, because it exchanges data between them.
        extra = {} if self.resume_data is None else self.resume_data(weights_only=self.weights_only)
        moment = _Moment(names.checkpoint, batch, extra.get("interrupted"), is_best=self._due.best_at == batch)
        if moment == self._moment:
            return
        # Before the copy, so that there is only one in memory. CUDA fills pinned memory at any time after the copy is
        # requested, also while a thread still writes the former contents to a file.
        self.wait()
        folder = self.open_folder(names.folder)
        snapshot = self._snapshot(state, names, extra, folder)
        snapshot.replaces_earlier = self.keep_best is None  # else it may be the best one
        self._moment, self._pending = moment, snapshot
        finish = partial(self._run_folder.finish, folder, names)
        with self._repeatable():
            self._saving.start(partial(snapshot.write, overwrite=self.overwrite, finish=finish))
        if not self.background:
            self.wait()

    def _snapshot(self, state: State, names: Names, extra: Mapping[str, Any], folder: Folder) -> Snapshot:
        """Open the folder in rank 0, and return a copy of what this process writes; it fails in all or in none."""
        with saving_in_all(folder.at(names.checkpoint)):
            if state.rank == 0:
                self._run_folder.open(folder, names, state, continues=self.continues)
        batch = int(state.timestamp.batch)
        return take_snapshot(
            state,
            folder,
            names.checkpoint,
            extra,
            weights_only=self.weights_only,
            ignore_keys=self.ignore_keys,
            memory=self._memory,
            measured=[label for label, at in self._due.measured.items() if at == batch],
            together=True,
        )

    def wait(self) -> None:
        """Wait for the last save; if it failed, raise an error in all processes."""
        # In all processes, or only some would take part in a repeated save.
        block = contextlib.nullcontext() if self._pending is None else saving_in_all(self._pending.path)
        with self._repeatable(), block:
            self._saving.wait()
        self._pending = None

    @contextlib.contextmanager
    def _repeatable(self) -> Iterator[None]:
        """Start, check or await a save within this context: if it fails, it can be repeated at the same batch."""
        try:
            yield
        except BaseException:
            self._moment = self._pending = None
            raise

    def _names(self, state: State) -> Names:
        """Return the names of a save now."""
        # All processes write to the folder of the first one.
        of_first = self.folder.replace("{rank}", "0")
        folder = fill_in_run(of_first, state, "folder (save_folder)", ["run_name", "rank"])
        name = checkpoint_name(self.filename, state, _NAMED)
        links = (self.latest_filename, "latest_filename (save_latest_filename)"), (self.best_filename, "best_filename")
        latest, best = (None if link is None else checkpoint_name(link, state, argument) for link, argument in links)
        return Names(folder, name, latest, best, self._copies(state))

    def folders_of_copies(self, state: State) -> list[str]:
        """Return the URLs of the folders that copies of the checkpoints are in."""
        return self._names(state).folders_of_copies()

    def _copies(self, state: State) -> list[str]:
        """Return the URLs of the copies of a checkpoint that is saved now."""
        if self.remote_file_name is None or is_remote(self.folder):
            return []
        remote = fill_in_run(self.remote_file_name, state, "remote_file_name")
        return [remote] if "://" in remote else [url_of(remote) for url_of in self.uploaders]

    def state_dict(self) -> dict[str, Any]:
        """Return the names and times of all checkpoints that a subclass has saved, to which it may add."""
        pairs = [(name, clock.state_dict()) for name, clock in self.all_saved_checkpoints_to_timestamp.items()]
        # A run may continue with or without a saver of this class.
        return {} if type(self) is CheckpointSaver else {"all_saved_checkpoints_to_timestamp": pairs}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load what :meth:`state_dict` returned, which also has what a subclass adds."""
        for name, clock, *_ in state.get("all_saved_checkpoints_to_timestamp", ()):
            self.all_saved_checkpoints_to_timestamp[name] = Timestamp.from_state_dict(clock)

    def _save_if_due(self, state: State, logger: Logger, event: Event) -> None:
        """Raise the error of a save in the background, and save if it is time or the weights are among the best."""
        if get_world_size() == 1:  # several processes would raise it in different batches
            with self._repeatable():
                self._saving.check()
        if self._due.is_due(state, event):
            self._save_checkpoint(state, logger)

    def _save_checkpoint(self, state: State, logger: Logger) -> None:
        """Save now; a subclass may override it, to write something else or more."""
        self.last_checkpoint_batch = state.timestamp.batch
        self.all_saved_checkpoints_to_timestamp[self.filename.format(state)] = state.timestamp
        self.save(state)


@attrs.define(eq=False)
class DueSaves:
    """Decides in a training, a call of ``fit``, when a save is due; all processes decide the same.

    Args:
        interval: The interval, or a function that decides instead.
        keep_best: By which metric the weights are among the best.

    Attributes:
        values: Only in the process of rank 0, the values of the best checkpoints, the best first.
        measured: The batch at which the metrics of each label of data were measured last.
        best_at: The last batch at which the weights were among the best.
    """

    interval: Interval | Callable[[State, Event], bool]
    keep_best: KeepBest | None
    values: list[float] = attrs.field(factory=list, init=False)
    measured: dict[str, int] = attrs.field(factory=dict, init=False)
    best_at: int | None = attrs.field(default=None, init=False)
    _compared_at: int | None = attrs.field(default=None, init=False)

    @property
    def best_label(self) -> str:
        """The label of the data whose metric chooses the best checkpoint."""
        return "" if self.keep_best is None else self.keep_best.metric.removeprefix("metrics/").partition("/")[0]

    def is_due(self, state: State, event: Event) -> bool:
        """Return whether to save at an event; all processes have to call it."""
        if not isinstance(self.interval, Interval):
            is_in_interval = self.interval(state, event)
        elif event is Event.FIT_END:
            is_in_interval = bool(self.interval.every.value)
        else:
            # The last checkpoint is saved at FIT_END, after the last evaluation.
            elapsed = state.get_elapsed_duration()
            is_in_interval = (elapsed is None or elapsed.value < 1) and self.interval.is_due(state)
        return self._record_if_best(state) or is_in_interval

    def _record_if_best(self, state: State) -> bool:
        """Record a new value of the metric if it is among the best, and return whether."""
        best, batch = self.keep_best, int(state.timestamp.batch)
        if best is None or self.measured.get(self.best_label) != batch or self._compared_at == batch:
            return False
        self._compared_at = batch
        value = metric_values(state).get(best.metric)
        is_best = from_rank_zero(value is not None and best.improves(value, self.values))  # it read the folder
        if is_best:
            self.best_at = batch
        if value is not None:
            self.values = best.best_values([*self.values, value])
        return is_best


class _Moment(NamedTuple):
    """What identifies a save; a second one of the same moment does nothing.

    An evaluation between two saves of a batch may complete what was interrupted, or show that it is among the best.
    """

    name: str
    batch: int
    interrupted: object
    is_best: bool
