"""Saving a checkpoint: copying a run into a snapshot, and writing that, by one process or several together.

:func:`save_checkpoint`, the Trainer and the saver call :func:`take_snapshot`, which copies what may change before it is
written. Values that cannot be saved raise an error in all processes, and no checkpoint is written; with several
processes, tensors among them raise it in :meth:`Snapshot.write`. :class:`Snapshot` writes the copy, also later: its
files are written to a draft, and the first process commits the draft when all have written theirs, so that a checkpoint
is complete or absent. Processes wait until a deadline, or the first one has ended.

The :class:`Writers` agree by collectives on who writes what, in the main thread. While a snapshot is written, in the
saver's thread, they send messages through a :class:`~composer.distributed.collectives.MessageStore`:
collectives of two threads could meet in another order in each process.
"""

from __future__ import annotations

import contextlib
import datetime
import functools
import json
import os
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import attrs
import torch
from torch import Tensor

from composer.checkpoint.contents import OWN_PROCESS, IgnoreKeys, contents_of, environment, metric_values, reject_fsdp1
from composer.checkpoint.errors import NOT_SAVED, CheckpointError, CheckpointSaveError, OtherReleaseError
from composer.checkpoint.folders import Folder, open_folder, split_path
from composer.checkpoint.layout import (
    Described,
    FilesOfProcess,
    KeptMemory,
    Layout,
    TensorFile,
    describe_tensors,
    pack_files,
    plan_files,
    split_process,
)
from composer.checkpoint.manifest import LAYOUT, PROCESS_FILES, STATE, Content, FileRecord, Manifest, process_file
from composer.checkpoint.reading import read_manifest
from composer.core import State, evaluation_weights
from composer.core.checks import shortened
from composer.core.files import fill_in_run
from composer.core.saving.codec import Record, plain
from composer.core.saving.records import read
from composer.distributed import all_gather_object, any_rank, get_world_size
from composer.distributed.collectives import MessageStore, failing_in_all_processes
from composer.functional.dtensors import is_sharded, reshard

ANSWER_TIMEOUT = 1800.0
"""Seconds after which a message of another process that is missing makes a save fail."""
_LONGER = 30.0
"""Seconds that the other processes wait for the first one's decision after that."""
_SECONDS_BETWEEN_CHECKS = 1.0
"""How often a waiting process checks whether others have ended."""


def save_checkpoint(
    state: State,
    path: str | os.PathLike[str],
    *,
    extra: Mapping[str, Any] | None = None,
    weights_only: bool = False,
    ignore_keys: IgnoreKeys = None,
    overwrite: bool = False,
) -> str:
    """Save a run as a checkpoint, and return its path when it is complete.

    The checkpoint is written atomically and without a lock. Do not save into a folder to which the
    :class:`~composer.callbacks.CheckpointSaver` of another process saves: it deletes unfinished checkpoints when it
    starts.

    If the model is sharded by FSDP2, all processes have to call it, and each writes its regions of the tensors.

    Args:
        state: The run.
        path: The checkpoint's folder or URL, such as ``"runs/{run_name}/ep{epoch}-ba{batch}"``.
        extra: More to save, by name: plain data and tensors. :func:`load_checkpoint` returns it.
        weights_only: Whether to save only the weights that the model is evaluated with; training cannot resume from
            them. See :func:`composer.core.evaluation_weights`.
        ignore_keys: What not to save: patterns of paths such as ``"optimizers/*"``, or a function that removes it from
            the dictionary that it is called with.
        overwrite: Whether to replace another checkpoint of the name. If False, only one of the same run and moment, or
            a damaged one, is replaced, and any other raises an error.

    Raises:
        NotImplementedError: The model is wrapped by FSDP 1.
        NotSerializableError: A value is neither data nor a tensor; the error names its place.
        CheckpointSaveError: It could not be written. Existing checkpoints are unchanged, except that one of the name at
            a URL is deleted first.

    Example:
        >>> import tempfile, torch
        >>> state = State(torch.nn.Linear(2, 2))
        >>> path = save_checkpoint(state, tempfile.mkdtemp() + "/ep{epoch}-ba{batch}")
        >>> path[-7:], sorted(os.listdir(path))
        ('ep0-ba0', ['layout.json', 'manifest.json', 'model.safetensors', 'state.json'])
    """
    return save(state, os.fspath(path), extra, weights_only=weights_only, ignore_keys=ignore_keys, overwrite=overwrite)


def save(
    state: State,
    path: str,
    extra: Mapping[str, Any] | None,
    *,
    overwrite: bool = False,
    open_folder: Callable[[str], Folder] = open_folder,
    together: bool = False,
    **options: Any,
) -> str:
    """Save a checkpoint as :func:`save_checkpoint`.

    Args:
        state: The run.
        path: As there.
        extra: As there.
        overwrite: As there.
        open_folder: Opens the folder that contains it.
        together: Whether all processes call it, also if no model is sharded.
        options: Those of :func:`take_snapshot`.
    """
    path = path.replace("{rank}", "0") if together else path  # all write to the folder of the first one
    parent, name = split_path(fill_in_run(path, state, "A checkpoint's path"))
    folder, name = open_folder(parent), _valid_name(name)
    snapshot = take_snapshot(state, folder, name, extra, copy=False, together=together, **options)
    snapshot.write(overwrite=overwrite, makes_folder=True)
    return snapshot.path


def checkpoint_name(pattern: str, state: State, parameter: str) -> str:
    """Return the name of a checkpoint at the current time of a run.

    Args:
        pattern: A name with ``{run_name}``, ``{epoch}``, ``{batch}``, ``{batch_in_epoch}`` and so on in it.
        state: The run.
        parameter: The parameter with the pattern, for the error.

    Raises:
        ValueError: Another name is in braces, or the result cannot be the name of a folder.

    Example:
        >>> checkpoint_name("ep{epoch}-ba{batch}", State(model=None), "filename")
        'ep0-ba0'
    """
    return _valid_name(fill_in_run(pattern, state, parameter), parameter)


def _valid_name(name: str, parameter: str = "A checkpoint's name") -> str:
    """Return a name, and raise a ValueError if a checkpoint cannot have it."""
    if not name or name.startswith(".") or "/" in name or "\\" in name:
        raise ValueError(
            f"{parameter} must be the name of a folder, without '/' and not beginning with '.', got {shortened(name)}."
        )
    return name


def take_snapshot(
    state: State,
    folder: Folder,
    name: str,
    extra: Mapping[str, Any] | None = None,
    *,
    weights_only: bool = False,
    ignore_keys: IgnoreKeys = None,
    copy: bool = True,
    memory: KeptMemory | None = None,
    measured: Collection[str] | None = None,
    together: bool = False,
) -> Snapshot:
    """Return what this process writes of a checkpoint; if the model is sharded, all processes have to call it.

    Args:
        state: The run.
        folder: Where it will be written.
        name: The checkpoint's name there.
        extra: More to save, by name: plain data and tensors, such as the position in the data. What belongs to the
            first process is named :data:`~composer.checkpoint.contents.FIRST_PROCESS`, and to another ``OWN_PROCESS``.
        weights_only: Whether to save only the weights that the model is evaluated with, and what describes them.
        ignore_keys: What not to save.
        copy: Whether the run may change before the snapshot is written.
        memory: The copies of an earlier snapshot that has been written, to be filled again.
        measured: Labels of the data sets whose metrics were measured on these weights, and are listed; all if None.
        together: Whether all processes call it, also if the model is not sharded.

    Raises:
        NotImplementedError: The model is wrapped by FSDP 1.
        NotSerializableError: A value is neither data nor a tensor; the error names its place.
        CheckpointSaveError: In the other processes, if it fails in one.
    """
    reject_fsdp1(state.model)
    are_shards = is_sharded(state.model)
    writers = _writers(torch.distributed.group.WORLD if are_shards or (together and get_world_size() > 1) else None)
    is_first = writers.rank == 0
    if are_shards:
        reshard(state.model)  # it may have its complete weights since an evaluation
    block = evaluation_weights(state) if weights_only else contextlib.nullcontext(enter_result=False)
    with block as has_other_weights:
        with contextlib.nullcontext() if writers.is_alone else saving_in_all(folder.at(name)):
            data: dict[str, Any] = {}
            tensors: dict[str, dict[str, Tensor]] = {}
            metadata: dict[str, dict[str, str]] = {}
            own_files: FilesOfProcess = {}
            if is_first or are_shards:
                data, tensors = contents_of(state, extra if is_first else None, ignore_keys, weights_only=weights_only)
            described = describe_tensors(tensors, is_first=is_first)
            if not is_first and extra and OWN_PROCESS in extra:
                file = process_file(writers.rank, writers.world_size)
                metadata[file], tensors[PROCESS_FILES] = split_process(extra[OWN_PROCESS])
                own_files = {file: [*tensors[PROCESS_FILES]]}
        layout, files = writers.plan(described, are_shards=are_shards)
        files = files | own_files
        contents: dict[str, list[memoryview]] | Exception
        try:
            # Evaluation weights are in the model only within the block, and are copied in any case.
            is_copied = copy or has_other_weights
            contents = pack_files(
                tensors, files, copy=is_copied, memory=memory, metadata=metadata, headers=writers.headers
            )
        except Exception as error:
            if writers.is_alone:
                raise
            contents = error  # raised in all processes when the checkpoint is written
    versions = environment(state.device)
    manifest = Manifest(
        files={},
        timestamp=state.timestamp.copy(),  # see Timestamp.load_state_dict
        run_name=state.run_name,
        created=datetime.datetime.now(tz=datetime.UTC).isoformat(timespec="microseconds"),
        weights_only=weights_only,
        versions={name: versions[name] for name in ("python", "torch", "composer-trainer")},
        metrics=metric_values(state, measured),
    )
    return Snapshot(folder, name, data, contents, manifest, layout, writers)


@attrs.define(eq=False)
class Snapshot:
    """What a process writes of a checkpoint; later changes of the run do not affect it, if the tensors are copies.

    The first process leads a save, and the others follow; alone, it leads nobody::

        first process                       each other process

        begin a draft        -- draft -->   write its files to it
        write its own files
                            <-- written --  which files, or why it failed
        commit the draft    -- outcome -->  return, or raise why the save failed
        finish

    If the first process fails or is interrupted, the outcome follows at once, also to processes that have no draft. All
    raise the error of the lowest rank, or their own if that is it. A first process that fails to write waits for the
    others before it removes the draft, to which they write.

    Args:
        folder: Where to write it.
        name: The checkpoint's name there.
        data: The content of :data:`STATE`, which the first process writes.
        contents: The contents of the files with this process's tensors, in pieces; or why there are none.
        manifest: The manifest without ``files``, which are added when they are written.
        layout: The layout without the checksums of the files.
        writers: The processes that write.
        timeout: Seconds to wait for other processes.

    Attributes:
        replaces_earlier: Whether an earlier checkpoint of the run is replaced, if it has the name.
        number: The number of the save, by which its messages differ from those of one that has failed.
        until: The time until which to wait for other processes.
    """

    folder: Folder
    name: str
    data: Any
    contents: dict[str, list[memoryview]] | Exception
    manifest: Manifest
    layout: Layout
    writers: Writers
    timeout: float = attrs.field(factory=lambda: ANSWER_TIMEOUT)
    replaces_earlier: bool = attrs.field(default=False, init=False)
    number: int = attrs.field(init=False)
    until: float = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        self.number = self.writers.saves
        self.until = time.monotonic() + self.timeout + (_LONGER if self.writers.rank else 0.0)

    @property
    def path(self) -> str:
        """The path or URL of the checkpoint."""
        return self.folder.at(self.name)

    def limit_waiting(self, seconds: float) -> None:
        """Wait no longer than some seconds from now for other processes, which may have ended."""
        self.until = min(self.until, time.monotonic() + seconds)

    def write(
        self,
        *,
        overwrite: bool = False,
        makes_folder: bool = False,
        finish: Callable[[Manifest], object] = lambda _: None,
    ) -> None:
        """Write a checkpoint; one of the same run and moment is replaced.

        All processes that write have to call it, and until the checkpoint is complete it fails in all or in none. No
        collectives are used.

        Args:
            overwrite: Whether to replace another checkpoint of the name.
            makes_folder: Whether the folder may have to be created.
            finish: Called in the first process when the checkpoint is complete; the others do not wait for it, as it
                may take long, and only the first one raises its error.

        Raises:
            CheckpointSaveError: It could not be written, another checkpoint has the name, or a process has not written
                its files in time. Existing checkpoints are unchanged, except at a URL; see :func:`save_checkpoint`.
        """
        if self.writers.rank == 0:
            self._lead(finish, overwrite=overwrite, makes_folder=makes_folder)
        else:
            self._follow()

    def _lead(self, finish: Callable[[Manifest], object], *, overwrite: bool, makes_folder: bool) -> None:
        """Write the first process's files, wait for the others, and commit the checkpoint."""
        draft, own_error = "", None
        try:
            if makes_folder:
                self.folder.make()
            self._check_replaced(overwrite=overwrite)
            draft = self.folder.begin(self.name)
            self._send_all("draft", Message(draft=draft))
            # The first process writes while the others do, and waits for them afterwards.
            own, own_error = self._try_to_write(draft)
            others = range(1, self.writers.world_size)
            written = [own, *(self._receive(f"written by {rank}", rank=rank) for rank in others)]
            outcome = next((message for message in written if message.error is not None), Message())
            if outcome.error is None:
                manifest = self._commit(draft, written)
            self._send_all("outcome", outcome)
        except BaseException as error:  # also an interrupt, as the others wait
            with contextlib.suppress(Exception):  # this error is the one to raise
                self._send_all("outcome", Message.of(error, 0))
            raise
        finally:
            if draft:
                self.folder.abandon(draft)  # unfinished files, or a replaced checkpoint, for which no process waits
        if outcome.error is not None:
            raise own_error or self._error_of(outcome)
        finish(manifest)

    def _follow(self) -> None:
        """Write this process's files to the draft that the first process has begun, and wait for the outcome."""
        rank, error = self.writers.rank, None
        message = self._receive(f"draft for {rank}", f"outcome for {rank}")
        if message.draft:
            written, error = self._try_to_write(message.draft)
            with contextlib.suppress(RuntimeError):  # the first process has ended, as the next line finds as well
                self._send(f"written by {rank}", written)
            message = self._receive(f"outcome for {rank}")
            if error is not None and (message == written or message.is_lost):
                raise error
        if message.error is not None:
            raise self._error_of(message) from error

    def _error_of(self, message: Message) -> CheckpointSaveError:
        """Return the error of a process that has failed."""
        return CheckpointSaveError(self.path, str(message.error), outcome=message.outcome)

    def _try_to_write(self, draft: str) -> tuple[Message, Exception | None]:
        """Write this process's files, and return what to send to the first process, with the error if it failed."""
        try:
            return self._write_files(draft), None
        except Exception as error:  # noqa: BLE001  (raised when all know of it)
            return Message.of(error, self.writers.rank), error

    def _check_replaced(self, *, overwrite: bool) -> None:
        """Raise a CheckpointSaveError if what has the name must not be replaced: a checkpoint of another moment.

        One of another release is never replaced.
        """
        folder, name = self.folder, self.name
        if not folder.exists(name):
            return
        try:
            existing = read_manifest(folder, name, folder.sizes(name))
        except OtherReleaseError as error:
            raise CheckpointSaveError(folder.at(name), f"one of another release has its name: {error}") from None
        except CheckpointError:
            return
        (run, then), (own_run, now) = _identity(existing), _identity(self.manifest)
        is_replaced = run == own_run and (then == now or (self.replaces_earlier and then < now))
        if not overwrite and not is_replaced:
            raise CheckpointSaveError(
                folder.at(name),
                f"there is one already, of run {existing.run_name!r} at batch {then[0]}. Set overwrite "
                "(save_overwrite=True of a Trainer) to replace it, or choose another folder or run_name; names with "
                "{batch} differ within a run.",
            )

    def _write_files(self, draft: str) -> Message:
        """Write this process's files, and return what the first process needs of them."""
        contents = self.contents
        if isinstance(contents, Exception):
            raise contents
        files = {file: Content(pieces) for file, pieces in contents.items()}
        if self.writers.rank == 0:
            # Without spaces, which json adds in Python code that takes longer than all else for thousands of tensors.
            data = json.dumps(self.data, separators=(",", ":"), allow_nan=False).encode()
            files[STATE] = Content([memoryview(data)])
        for file, content in files.items():
            self.folder.put(self.name, draft, file, content)
        return Message(
            files={file: content.record for file, content in files.items()},
            tensors={file: TensorFile(len(pieces[0]), files[file].blocks) for file, pieces in contents.items()},
        )

    def _commit(self, draft: str, written: Sequence[Message]) -> Manifest:
        """Write the layout, and the manifest, which completes the checkpoint."""
        tensors = {file: one for message in written for file, one in message.tensors.items()}
        content = Content([memoryview(self.layout.to_bytes(tensors))])
        self.folder.put(self.name, draft, LAYOUT, content)
        files = {file: record for message in written for file, record in message.files.items()}
        manifest = attrs.evolve(self.manifest, files=files | {LAYOUT: content.record})
        self.folder.commit(self.name, draft, manifest)
        return manifest

    def _send_all(self, key: str, message: Message) -> None:
        for rank in range(1, self.writers.world_size):
            self._send(f"{key} for {rank}", message)

    def _send(self, key: str, message: Message) -> None:
        self.writers.send(f"{self.number}: {key}", message)

    def _receive(self, *keys: str, rank: int = 0) -> Message:
        """Return the message of a process under the first key that has one; its ``error`` is why none has, if so."""
        numbered = [f"{self.number}: {key}" for key in keys]
        message = self.writers.receive(numbered, lambda: self.until)
        silent = f"process {rank} has not answered in {self.timeout:g} seconds; is it still running?"
        return message or Message(error=silent)


def _identity(manifest: Manifest) -> tuple[tuple[str, bool], tuple[int, int, int]]:
    """Return what two checkpoints of the same run have in common, and its moment."""
    now = manifest.timestamp.counts
    return (manifest.run_name, manifest.weights_only), (now.batch, now.sample, now.token)


@attrs.frozen
class Message(Record):
    """What a process sends to another one during a save; after an empty one, the receiver returns without an error.

    Args:
        draft: Where to write files; empty if nowhere.
        files: The files that the sender has written.
        tensors: Of those with tensors, what the layout has of them.
        error: Why the save has failed.
        outcome: What is wrong then; see :class:`CheckpointSaveError`.
        is_lost: Whether the sender has ended, as the receiver states in its place.
    """

    draft: str = ""
    files: dict[str, FileRecord] = attrs.field(factory=dict)
    tensors: dict[str, TensorFile] = attrs.field(factory=dict)
    error: str | None = None
    outcome: str = NOT_SAVED
    is_lost: bool = False

    @classmethod
    def of(cls, error: BaseException, rank: int) -> Message:
        """Return the message of a process that has failed."""
        if isinstance(error, CheckpointSaveError):
            return cls(error=f"process {rank} failed: {error.reason.rstrip('.')}.", outcome=error.outcome)
        reason = f"{type(error).__name__}: {error}".removesuffix(": ").rstrip(".")
        return cls(error=f"process {rank} failed: {reason}.")


class Writers:
    """The processes that write a checkpoint together: all, or this one alone.

    All processes have to construct it at the same time, unless it is for one.

    Args:
        is_alone: Whether this process writes alone.

    Attributes:
        saves: The number of saves so far.
        headers: The headers of this process's files in the plan, which :func:`pack_files` adds; a new plan has none.
    """

    def __init__(self, *, is_alone: bool) -> None:
        self.is_alone = is_alone
        self._messages = None if is_alone else MessageStore()
        self.rank = 0 if self._messages is None else self._messages.rank
        self.world_size = 1 if self._messages is None else self._messages.world_size
        self.saves = 0
        self.headers: dict[str, bytes] = {}
        self._described: Described | None = None
        self._planned: tuple[Layout, FilesOfProcess] = (Layout({}, {}), {})

    def plan(self, described: Described, *, are_shards: bool) -> tuple[Layout, FilesOfProcess]:
        """Return the layout, and which tensors this process writes to which file; all processes have to call it.

        The plan is made once for a run. A new one is made, from the regions of all processes, only if those of one have
        changed since the last save; without shards, each process plans alone, and only the first has tensors.
        """
        self.saves += 1
        has_changed = described != self._described
        if any_rank(has_changed) if are_shards else has_changed:
            layout, files_of = plan_files(all_gather_object(described) if are_shards else [described])
            self.headers = {}
            self._described, self._planned = described, (layout, files_of[self.rank if are_shards else 0])
        return self._planned

    def send(self, key: str, message: Message) -> None:
        """Send a message to the process that waits for the key."""
        assert self._messages is not None
        self._messages.put(key, json.dumps(plain(message)))

    def receive(self, keys: Sequence[str], until: Callable[[], float]) -> Message | None:
        """Return the message of the first key that has one, or None at a deadline.

        ``until`` returns the deadline, in seconds of ``time.monotonic``, and is called repeatedly, as it may move.
        A message that is sent later stays in the store: the keys of each save are its own.
        """
        assert self._messages is not None
        text = None
        try:
            while text is None and time.monotonic() < until():
                text = self._messages.take(keys, min(until(), time.monotonic() + _SECONDS_BETWEEN_CHECKS))
        except RuntimeError as error:  # as torch's errors of stores are
            return Message(error=f"process 0 cannot be reached: {error}", is_lost=True)
        message: Message | None = None if text is None else read(json.loads(text), Message)
        return message


@functools.lru_cache(maxsize=2)
def _writers(world: object) -> Writers:
    """Return the writers in a process group, or this process alone; the same until another group is used."""
    return Writers(is_alone=world is None)


def saving_in_all(path: str) -> AbstractContextManager[None]:
    """Fail in all processes if one fails: with its own error there, and with one that names it in the others.

    Args:
        path: The checkpoint, for the error.
    """
    return failing_in_all_processes("Saving a checkpoint", functools.partial(CheckpointSaveError, path))
