"""Writing one checkpoint: what each process has to write, and how those that write together commit it.

A checkpoint is complete or absent: its files are written to a draft, and the first process commits the draft when all
have written theirs. Waiting ends with another process.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from typing import Any

import attrs

from composer.checkpoint.errors import CheckpointError, CheckpointSaveError
from composer.checkpoint.folder import Folder
from composer.checkpoint.layout import Layout, TensorFile
from composer.checkpoint.manifest import LAYOUT, MAX_STATE_BYTES, STATE, Content, Manifest, dictionary, write_json
from composer.checkpoint.writers import Message, Writers
from composer.core import TimeUnit

__all__ = ["Snapshot"]

ANSWER_TIMEOUT = 1800.0
"""Seconds after which a message of another process that is missing makes a save fail."""
_LONGER = 30.0
"""Seconds that the other processes wait for the first one's decision after that."""


@attrs.define(eq=False)
class Snapshot:
    """What a process writes of a checkpoint; later changes of the run do not affect it, if the tensors are copies.

    Args:
        data: The content of :data:`STATE`, which the first process writes.
        contents: The contents of the files with this process's tensors, in pieces; or why there are none.
        manifest: The manifest without ``files``, which are added when they are written.
        layout: The layout without the checksums of the files.
        writers: The processes that write.
        timeout: Seconds to wait for other processes.
    """

    data: Any
    contents: dict[str, list[memoryview]] | Exception
    manifest: Manifest
    layout: Layout
    writers: Writers
    timeout: float = attrs.field(factory=lambda: ANSWER_TIMEOUT)
    number: int = attrs.field(init=False)
    until: float = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        self.number = self.writers.saves
        self.until = time.monotonic() + self.timeout + (_LONGER if self.writers.rank else 0.0)

    def limit_waiting(self, seconds: float) -> None:
        """Wait no longer than some seconds from now for other processes, which may have ended."""
        self.until = min(self.until, time.monotonic() + seconds)

    def write(
        self,
        folder: Folder,
        name: str,
        *,
        overwrite: bool = False,
        prepare: Callable[[], object] | None = None,
        finish: Callable[[Manifest], object] | None = None,
    ) -> None:
        """Write a checkpoint, unless an undamaged one of the same run and moment exists.

        All processes that write have to call it, and until the checkpoint is complete it fails in all or in none. No
        collectives are used.

        Args:
            folder: The folder.
            name: The checkpoint's name.
            overwrite: Whether to replace another checkpoint of the name.
            prepare: Called in the first process before.
            finish: Called in the first process when the checkpoint is complete; the others do not wait for it, as it
                may take long, and only the first one raises its error.

        Raises:
            CheckpointSaveError: It could not be written, another checkpoint has the name, or a process has not written
                its files in time. Existing checkpoints are unchanged.
        """
        save = _JointSave(self, folder, name)
        if self.writers.rank == 0:
            save.lead(overwrite=overwrite, prepare=prepare, finish=finish)
        else:
            save.follow()


@attrs.frozen
class _JointSave:
    """One save, which the first process leads and the others follow; alone, a process leads nobody.

    ::

        first process                       each other process

        begin a draft        -- draft -->   write its files to it
        write its own files
                            <-- written --  which files, or why it failed
        commit the draft    -- outcome -->  return, or raise why the save failed
        finish

    If an equal checkpoint exists, or the first process fails before the draft, the outcome takes the place of the
    draft. All raise the error that came first: one that finds no draft any more may have failed after another.
    """

    snapshot: Snapshot
    folder: Folder
    name: str

    def lead(
        self, *, overwrite: bool, prepare: Callable[[], object] | None, finish: Callable[[Manifest], object] | None
    ) -> None:
        """Write the first process's files, wait for the others, and commit the checkpoint."""
        draft, awaited, failed = None, "draft", None
        try:
            if prepare is not None:
                prepare()
            manifest = None if overwrite else self._existing()
            if manifest is None:
                draft = self.folder.begin(self.name)
                self._send_all("draft", Message(draft=draft))
                awaited = "outcome"
                # The first process writes while the others do, and waits for them afterwards.
                written = [self._write_files(draft)]
                written += [
                    self._receive(f"written by {rank}", rank) for rank in range(1, self.snapshot.writers.world_size)
                ]
                failed = next((message for message in written if message.error is not None), None)
                if failed is not None:
                    raise CheckpointSaveError(self.folder.at(self.name), str(failed.error))  # noqa: TRY301
                manifest = self._commit(draft, written)
            self._send_all(awaited, Message())
        except BaseException as error:
            with contextlib.suppress(Exception):  # this error is the one to raise
                self._send_all(awaited, failed or Message.of(error, 0))
            raise
        finally:
            if draft is not None:
                self.folder.abandon(draft)  # unfinished files, or a replaced checkpoint, for which no process waits
        if finish is not None:
            finish(manifest)

    def follow(self) -> None:
        """Write this process's files to the draft that the first process has begun, and wait for the outcome."""
        rank, failed = self.snapshot.writers.rank, None
        message = self._receive(f"draft for {rank}")
        if message.draft is not None:
            try:
                written = self._write_files(message.draft)
            except Exception as error:  # noqa: BLE001  (raised below)
                written, failed = Message.of(error, rank), error
            with contextlib.suppress(RuntimeError):  # the first process has ended, as the next line finds as well
                self._send(f"written by {rank}", written)
            message = self._receive(f"outcome for {rank}")
            if failed is not None and (message == written or message.is_lost):
                raise failed
        if message.error is not None:
            raise CheckpointSaveError(self.folder.at(self.name), message.error, outcome=message.outcome) from failed

    def _existing(self) -> Manifest | None:
        """Return the manifest of an undamaged checkpoint of the same run and moment; None if nothing has to be kept.

        Raises:
            CheckpointSaveError: Another checkpoint has the name.
        """
        folder, name, manifest = self.folder, self.name, self.snapshot.manifest
        if not folder.exists(name):
            return None
        try:
            existing = folder.manifest(name)
            folder.check(name, existing)
            saved = folder.data(name, existing)
        except CheckpointError:
            return None
        if _moment(existing) == _moment(manifest):
            # Since then an interrupted evaluation may have been completed, and the iteration that it belongs to.
            was_interrupted = bool(dictionary(saved.get("extra")).get("interrupted"))
            is_complete = existing.timestamp.counts[:2] == manifest.timestamp.counts[:2] and not was_interrupted
            is_measured = manifest.metrics.items() <= existing.metrics.items()
            return existing if is_complete and is_measured else None
        raise CheckpointSaveError(
            folder.at(name),
            f"there is one already, of run {existing.run_name!r} at batch {existing.timestamp.count(TimeUnit.BATCH)}. "
            "Set overwrite (save_overwrite=True of a Trainer) to replace it, or choose another folder or run_name.",
        )

    def _write_files(self, draft: str) -> Message:
        """Write this process's files, and return what the first process needs of them."""
        contents = self.snapshot.contents
        if isinstance(contents, Exception):
            raise contents
        files = {file: Content(pieces) for file, pieces in contents.items()}
        if self.snapshot.writers.rank == 0:
            data = write_json(self.snapshot.data, sort=False)
            if len(data) > MAX_STATE_BYTES:
                reason = f"its {STATE} would have {len(data)} bytes, and none of more than {MAX_STATE_BYTES} is read. "
                raise CheckpointSaveError(
                    self.folder.at(self.name), f"{reason}Let large data in state_dict() be tensors."
                )
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
        layout = attrs.evolve(self.snapshot.layout, files={file: tensors[file] for file in self.snapshot.layout.files})
        content = Content([memoryview(layout.to_bytes())])
        self.folder.put(self.name, draft, LAYOUT, content)
        files = {file: record for message in written for file, record in message.files.items()}
        manifest = attrs.evolve(self.snapshot.manifest, files=files | {LAYOUT: content.record})
        self.folder.commit(self.name, draft, manifest)
        return manifest

    def _send_all(self, key: str, message: Message) -> None:
        for rank in range(1, self.snapshot.writers.world_size):
            self._send(f"{key} for {rank}", message)

    def _send(self, key: str, message: Message) -> None:
        self.snapshot.writers.send(self._numbered(key), message)

    def _receive(self, key: str, rank: int = 0) -> Message:
        """Return the message of a process, in which ``error`` is why there is none."""
        message = self.snapshot.writers.receive(self._numbered(key), lambda: self.snapshot.until)
        silent = f"process {rank} has not answered in {self.snapshot.timeout:g} seconds; is it still running?"
        return message or Message(error=silent)

    def _numbered(self, key: str) -> str:
        """Return a key of this save, so that a message of one that has failed is not taken for one of the next."""
        return f"{self.snapshot.number}: {key}"


def _moment(manifest: Manifest) -> tuple[Any, ...]:
    now = manifest.timestamp.counts
    return manifest.run_name, manifest.weights_only, now.batch, now.sample, now.token
