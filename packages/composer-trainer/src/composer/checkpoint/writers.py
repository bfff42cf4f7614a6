"""Writing one checkpoint: the processes that do it together, and the snapshot that each of them writes.

When it is taken, in the main thread, they agree by collectives on who writes what (:meth:`Writers.plan`). While it is
written (:meth:`Snapshot.write`), in the saver's thread, they exchange answers through the store of the process group:
collectives of two threads could meet in another order in each process. The first process begins a draft, collects what
the others have written, and commits it, so that a checkpoint is complete or absent. Waiting ends with another process.
"""

from __future__ import annotations

import contextlib
import json
import time
from functools import partial
from typing import TYPE_CHECKING, Any

import attrs
import torch

from composer.checkpoint.base import (
    LAYOUT,
    MAX_STATE_BYTES,
    STATE,
    Content,
    FileRecord,
    Manifest,
    dictionary,
    write_json,
)
from composer.checkpoint.errors import NOT_SAVED, CheckpointError, CheckpointSaveError
from composer.checkpoint.layout import Layout, TensorFile, plan_files
from composer.core import TimeUnit
from composer.distributed import all_gather_object, any_rank
from composer.distributed.collectives import failing_in_all_processes
from composer.distributed.exchange import Exchange
from composer.distributed.failures import lost_processes
from composer.functional.dtensors import is_sharded

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

    from composer.checkpoint.base import Folder
    from composer.checkpoint.layout import Described

__all__ = ["Snapshot", "Writers", "failing_in_all", "writers_of"]

ANSWER_TIMEOUT = 1800.0
"""Seconds after which an answer of another process that is missing makes a save fail."""
_LONGER = 30.0
"""Seconds that the other processes wait for the first one's decision after that."""
_SECONDS_BETWEEN_CHECKS = 1.0
"""How often a waiting process checks whether others have ended."""


class Writers:
    """The processes that write a checkpoint together: all, of a sharded model, or this one alone.

    All processes have to construct it at the same time, unless it is for one.

    Args:
        is_alone: Whether this process writes alone.
    """

    def __init__(self, *, is_alone: bool) -> None:
        self.is_alone = is_alone
        self._exchange = None if is_alone else Exchange()
        self.rank = 0 if self._exchange is None else self._exchange.rank
        self.world_size = 1 if self._exchange is None else self._exchange.world_size
        self.saves = 0
        self._described: Described | None = None
        self._planned: tuple[Layout, list[dict[str, list[str]]]] = (Layout({}, {}), [])

    def plan(self, described: Described) -> tuple[Layout, dict[str, list[str]]]:
        """Return the layout, and which tensors this process writes to which file; all processes have to call it.

        The regions of all processes are exchanged only if those of one have changed since the last save.
        """
        has_changed = described != self._described
        if has_changed if self.is_alone else any_rank(has_changed):
            gathered = [described] if self.is_alone else all_gather_object(described)
            self._described, self._planned = described, plan_files(gathered)
        layout, writes = self._planned
        self.saves += 1
        return layout, writes[self.rank]

    def send(self, key: str, answer: dict[str, Any]) -> None:
        """Send an answer to the process that waits for the key."""
        assert self._exchange is not None
        self._exchange.put(key, json.dumps(answer))

    def receive(self, key: str, until: Callable[[], float]) -> dict[str, Any] | None:
        """Return the answer of a key; None if it does not come until a time, which may be changed meanwhile.

        An answer with ``unreachable`` states which processes have ended.
        """
        assert self._exchange is not None
        text, lost = None, ""
        try:
            while text is None and not lost and time.monotonic() < until():
                lost = lost_processes()  # what they have answered before is still there
                latest = 0.0 if lost else min(until(), time.monotonic() + _SECONDS_BETWEEN_CHECKS)
                text = self._exchange.take(key, latest)
        except RuntimeError as error:  # as torch's errors of stores are
            return {"unreachable": f"process 0 cannot be reached: {error}"}
        if text is None:
            return {"unreachable": f"{lost}."} if lost else None
        answer: dict[str, Any] = json.loads(text)
        return answer


_all_writers: list[tuple[object, Writers]] = []
"""The process group, and the writers of sharded models in it."""


def writers_of(model: Any) -> Writers:
    """Return the processes that write checkpoints of a model; if it is sharded, all processes have to call it."""
    if not is_sharded(model):
        return Writers(is_alone=True)
    world = torch.distributed.group.WORLD if torch.distributed.is_initialized() else None
    if not _all_writers or _all_writers[0][0] is not world:
        _all_writers[:] = [(world, Writers(is_alone=False))]
    return _all_writers[0][1]


def failing_in_all(path: str) -> AbstractContextManager[None]:
    """Fail in all processes if one fails: with its own error there, and with one that names it in the others.

    Args:
        path: The checkpoint, for the error.
    """
    return failing_in_all_processes("Saving a checkpoint", partial(CheckpointSaveError, path))


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
    _number: int = attrs.field(init=False)
    _until: float = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        # In each key, so that an answer of a save that has failed is not taken for one of the next.
        self._number = self.writers.saves
        self._until = time.monotonic() + self.timeout + (_LONGER if self.writers.rank else 0.0)

    def limit_waiting(self, seconds: float) -> None:
        """Wait no longer than some seconds from now for other processes, which may have ended."""
        self._until = min(self._until, time.monotonic() + seconds)

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

        All processes that write have to call it, and it fails in all or in none. No collectives are used.

        Args:
            folder: The folder.
            name: The checkpoint's name.
            overwrite: Whether to replace another checkpoint of the name.
            prepare: Called in the first process before.
            finish: Called in the first process when the checkpoint is complete.

        Raises:
            CheckpointSaveError: It could not be written, another checkpoint has the name, or a process has not written
                its files in time. Existing checkpoints are unchanged.
        """
        if self.writers.rank == 0:
            self._lead(folder, name, overwrite=overwrite, prepare=prepare, finish=finish)
        else:
            self._follow(folder, name)

    def _lead(
        self,
        folder: Folder,
        name: str,
        *,
        overwrite: bool,
        prepare: Callable[[], object] | None,
        finish: Callable[[Manifest], object] | None,
    ) -> None:
        """Write the first process's files, wait for the others, and commit the checkpoint."""
        draft, key, failed = None, "draft", None
        try:
            if prepare is not None:
                prepare()
            manifest = None if overwrite else self._existing(folder, name)
            if manifest is None:
                draft = folder.begin(name)
                self._send_all("draft", {"draft": draft})
                key = "outcome"
                # The first process writes while the others do, and waits for them afterwards.
                answers = [self._write_files(folder, name, draft)]
                answers += [self._receive(f"written by {rank}", rank) for rank in range(1, self.writers.world_size)]
                failed = next((answer for answer in answers if "error" in answer), None)
                if failed is not None:
                    raise CheckpointSaveError(folder.at(name), failed["error"])  # noqa: TRY301  (as any other failure)
                manifest = self._commit(folder, name, draft, answers)
            if finish is not None:
                finish(manifest)
            # If an equal checkpoint exists, this answers where the others expect a draft: they have nothing to write.
            self._send_all(key, {})
        except BaseException as error:
            with contextlib.suppress(Exception):  # this error is the one to raise
                self._send_all(key, failed or _failure(0, error))
            raise
        finally:
            if draft is not None:
                folder.abandon(draft)  # unfinished files, or a replaced checkpoint, for which no process has to wait

    def _follow(self, folder: Folder, name: str) -> None:
        """Write this process's files to the draft that the first process has begun, and wait for its decision."""
        rank, failed = self.writers.rank, None
        decision = self._receive(f"draft for {rank}")
        if "draft" in decision:
            try:
                answer = self._write_files(folder, name, decision["draft"])
            except Exception as error:  # noqa: BLE001  (raised below)
                answer, failed = _failure(rank, error), error
            with contextlib.suppress(RuntimeError):  # the first process has ended, as the next line finds as well
                self._send(f"written by {rank}", answer)
            decision = self._receive(f"outcome for {rank}")
            if failed is not None and (decision == answer or "unreachable" in decision):
                raise failed
        if "error" in decision:
            outcome = decision.get("outcome", NOT_SAVED)
            raise CheckpointSaveError(folder.at(name), decision["error"], outcome=outcome) from failed

    def _existing(self, folder: Folder, name: str) -> Manifest | None:
        """Return the manifest of an undamaged checkpoint of the same run and moment; None if nothing has to be kept.

        Raises:
            CheckpointSaveError: Another checkpoint has the name.
        """
        if not folder.exists(name):
            return None
        try:
            existing = folder.manifest(name)
            folder.check(name, existing)
            saved = folder.data(name, existing)
        except CheckpointError:
            return None
        if _moment(existing) == _moment(self.manifest):
            # Since then an interrupted evaluation may have been completed, and the iteration that it belongs to.
            was_interrupted = bool(dictionary(saved.get("extra")).get("interrupted"))
            is_complete = existing.timestamp.counts[:2] == self.manifest.timestamp.counts[:2] and not was_interrupted
            is_measured = self.manifest.metrics.items() <= existing.metrics.items()
            return existing if is_complete and is_measured else None
        raise CheckpointSaveError(
            folder.at(name),
            f"there is one already, of run {existing.run_name!r} at batch {existing.timestamp.count(TimeUnit.BATCH)}. "
            "Set overwrite (save_overwrite=True of a Trainer) to replace it, or choose another folder or run_name.",
        )

    def _write_files(self, folder: Folder, name: str, draft: str) -> dict[str, Any]:
        """Write this process's files to a draft, and return their records, and headers and blocks of the tensors."""
        if isinstance(self.contents, Exception):
            raise self.contents
        files = {file: Content(pieces) for file, pieces in self.contents.items()}
        if self.writers.rank == 0:
            data = write_json(self.data, sort=False)
            if len(data) > MAX_STATE_BYTES:
                reason = f"its {STATE} would have {len(data)} bytes, and none of more than {MAX_STATE_BYTES} is read. "
                raise CheckpointSaveError(folder.at(name), f"{reason}Let large data in state_dict() be tensors.")
            files[STATE] = Content([memoryview(data)])
        for file, content in files.items():
            folder.put(name, draft, file, content)
        return {
            "files": {file: attrs.asdict(content.record) for file, content in files.items()},
            "tensors": {file: [len(pieces[0]), files[file].blocks] for file, pieces in self.contents.items()},
        }

    def _commit(self, folder: Folder, name: str, draft: str, answers: list[dict[str, Any]]) -> Manifest:
        tensors = {file: one for answer in answers for file, one in answer["tensors"].items()}
        layout = attrs.evolve(self.layout, files={file: TensorFile(*tensors[file]) for file in self.layout.files})
        content = Content([memoryview(layout.to_bytes())])
        folder.put(name, draft, LAYOUT, content)
        files = {file: FileRecord(**record) for answer in answers for file, record in answer["files"].items()}
        manifest = attrs.evolve(self.manifest, files=files | {LAYOUT: content.record})
        folder.commit(name, draft, manifest)
        return manifest

    def _send(self, key: str, answer: dict[str, Any]) -> None:
        self.writers.send(f"{self._number}: {key}", answer)

    def _send_all(self, key: str, answer: dict[str, Any]) -> None:
        for rank in range(1, self.writers.world_size):
            self._send(f"{key} for {rank}", answer)

    def _receive(self, key: str, rank: int = 0) -> dict[str, Any]:
        """Return the answer of a process, in which ``error`` is why there is none."""
        answer = self.writers.receive(f"{self._number}: {key}", lambda: self._until)
        if answer is None:
            return {"error": f"process {rank} has not answered in {self.timeout:g} seconds; is it still running?"}
        return answer | {"error": answer["unreachable"]} if "unreachable" in answer else answer


def _failure(rank: int, error: BaseException) -> dict[str, Any]:
    if isinstance(error, CheckpointSaveError):
        return {"error": f"process {rank} failed: {error.reason.rstrip('.')}.", "outcome": error.outcome}
    return {"error": f"process {rank} failed: {type(error).__name__}: {error}".rstrip(".") + "."}


def _moment(manifest: Manifest) -> tuple[Any, ...]:
    now = manifest.timestamp.counts
    return manifest.run_name, manifest.weights_only, now.batch, now.sample, now.token
