"""Writing the checkpoint of a sharded model from all processes, in the background if wanted."""

from __future__ import annotations

import contextlib
import json
import time
from typing import TYPE_CHECKING, Any

import attrs
import torch

from composer.checkpoint.errors import CheckpointSaveError
from composer.checkpoint.manifest import LAYOUT, STATE, FileRecord, PartContent, write_json
from composer.checkpoint.sharded import Layout, PartFile, plan_parts
from composer.distributed import all_gather_object, any_rank
from composer.distributed.collectives import failing_together
from composer.distributed.exchange import Exchange
from composer.distributed.failures import lost_processes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping
    from contextlib import AbstractContextManager

    from composer.checkpoint.finding import Folder
    from composer.checkpoint.manifest import Manifest
    from composer.checkpoint.sharded import Described
    from composer.checkpoint.tensor_file import PackedTensors

__all__ = ["PARTS_TIMEOUT", "Meeting", "ShardedSnapshot", "meeting", "saving_together"]

PARTS_TIMEOUT = 1800.0
"""Seconds after which a part that is missing makes a save fail."""
_LONGER = 30.0
"""Seconds that the other processes wait for the first one's decision after that."""
_SECONDS_BETWEEN_LOOKS = 1.0
"""How often a process that waits looks whether others have ended."""


class Meeting:
    """What the saves of all processes share: the exchange of their threads, and the plan of the last save.

    All processes have to construct it at the same time.
    """

    def __init__(self) -> None:
        self.exchange = Exchange()
        self.saves = 0
        self._described: Described | None = None
        self._planned: tuple[Layout, list[dict[str, list[str]]]] | None = None

    def plan(self, described: Described) -> tuple[Layout, dict[str, list[str]]]:
        """Return the layout, and which tensors this process writes to which file; all processes have to call it.

        The parts of all processes are exchanged only if those of one have changed since the last save.
        """
        if any_rank(described != self._described):
            self._described, self._planned = described, plan_parts(all_gather_object(described))
        assert self._planned is not None
        layout, writes = self._planned
        return layout, writes[self.exchange.rank]


_meetings: list[tuple[object, Meeting]] = []


def meeting() -> Meeting:
    """Return the meeting of the current processes; all have to call it."""
    world = torch.distributed.group.WORLD if torch.distributed.is_initialized() else None
    if not _meetings or _meetings[0][0] is not world:
        _meetings[:] = [(world, Meeting())]
    return _meetings[0][1]


def saving_together(path: str) -> AbstractContextManager[None]:
    """Fail in all processes if one fails: with its own error there, and with one that names it in the others.

    Args:
        path: The checkpoint, for the error.
    """
    return failing_together("Saving a checkpoint", lambda reason: CheckpointSaveError(path, f"{reason.rstrip('.')}."))


@attrs.define(eq=False)
class ShardedSnapshot:
    """What a process writes of a checkpoint; later changes of the run do not affect it, if the tensors are copies.

    Args:
        data: The content of :data:`STATE`.
        tensors: The contents of the files with this process's parts; or why there are none.
        manifest: The manifest without ``files``, which are added when they are written.
        layout: The layout without the checksums of the files.
        exchange: The exchange of the processes' threads.
        number: The number of the save, the same in all processes.
        timeout: Seconds to wait for other processes.
    """

    data: Any
    tensors: dict[str, PackedTensors] | Exception
    manifest: Manifest
    layout: Layout
    exchange: Exchange
    number: int
    timeout: float
    _until: float = attrs.field(init=False, default=0.0)
    _place: str | None = attrs.field(init=False, default=None)

    def __attrs_post_init__(self) -> None:
        self._until = time.monotonic() + self.timeout + (_LONGER if self.exchange.rank else 0.0)

    def write(
        self,
        folder: Folder,
        name: str,
        prepare: Callable[[], Manifest | None],
        finish: Callable[[Manifest], object] | None = None,
    ) -> Manifest | None:
        """Write a checkpoint; all processes have to call it, and it fails in all or in none. No collectives are used.

        Args:
            folder: The folder.
            name: The checkpoint's name.
            prepare: Called in the first process before anything is written; a manifest that it returns is that of a
                checkpoint to keep in place of a new one.
            finish: Called in the first process when the checkpoint is complete.

        Returns:
            The manifest, in the first process.

        Raises:
            CheckpointSaveError: It could not be written, or a process has not written its parts in time. Existing
                checkpoints are unchanged.
        """
        rank = self.exchange.rank
        if rank == 0:
            return self._lead(folder, name, prepare, finish)
        begun = self._answer(f"place for {rank}")
        if begun.get("place") is not None:
            try:
                answer = self._write_parts(folder, name, begun["place"], {})
            except Exception as error:
                failed, text = _failed(rank, error), None
                with contextlib.suppress(RuntimeError):  # the first process has ended: this error is the one to raise
                    self._put(f"written by {rank}", failed)
                    text = self.exchange.take(f"{self.number}: outcome for {rank}", until=0.0)
                if text is None or json.loads(text) == failed:
                    raise
                # The first process had failed before, and has deleted the place.
                raise CheckpointSaveError(folder.at(name), json.loads(text)["error"]) from None
            with contextlib.suppress(RuntimeError):  # the first process has ended, as the next line finds as well
                self._put(f"written by {rank}", answer)
            begun = self._answer(f"outcome for {rank}")
        if "error" in begun:
            raise CheckpointSaveError(folder.at(name), begun["error"])
        return None

    def clean_up(self, folder: Folder) -> None:
        """Delete the checkpoint that was replaced, for which no process has to wait; call it after :meth:`write`."""
        if self._place is not None:
            folder.abandon(self._place)

    def hurry(self, seconds: float) -> None:
        """Wait no longer than some seconds from now for other processes, which may have ended."""
        self._until = min(self._until, time.monotonic() + seconds)

    def _lead(
        self,
        folder: Folder,
        name: str,
        prepare: Callable[[], Manifest | None],
        finish: Callable[[Manifest], object] | None,
    ) -> Manifest:
        """Write the first process's part, wait for the others, and commit the checkpoint."""
        place: str | None = None
        key, others_failed = "place", ""
        try:
            manifest = prepare()
            if manifest is None:
                place = folder.begin(name)
                self._put_for_all("place", {"place": place})
                key = "outcome"
                answers = [self._write_parts(folder, name, place, {STATE: write_json(self.data, sort=False)})]
                answers += [self._answer(f"written by {rank}", rank) for rank in range(1, self.exchange.world_size)]
                others_failed = next((answer["error"] for answer in answers if "error" in answer), "")
                if others_failed:
                    raise CheckpointSaveError(folder.at(name), others_failed)  # noqa: TRY301  (as any other failure)
                manifest = self._commit(folder, name, place, answers)
            if finish is not None:
                finish(manifest)
            self._put_for_all(key, {})
        except BaseException as error:
            with contextlib.suppress(Exception):  # this error is the one to raise
                self._put_for_all(key, {"error": others_failed} if others_failed else _failed(0, error))
            if place is not None:
                folder.abandon(place)
            raise
        self._place = place
        return manifest

    def _write_parts(self, folder: Folder, name: str, place: str, others: Mapping[str, bytes]) -> dict[str, Any]:
        """Write this process's files to a place, and return their records, and headers and blocks of the parts."""
        if isinstance(self.tensors, Exception):
            raise self.tensors
        parts = {file: PartContent(packed.pieces) for file, packed in self.tensors.items()}
        contents = {file: (memoryview(content),) for file, content in others.items()}
        files: dict[str, Iterable[memoryview]] = {**parts, **contents}
        for file, pieces in files.items():
            folder.put(name, place, file, pieces)
        records = {file: part.record for file, part in parts.items()}
        records |= {file: FileRecord.of(content) for file, content in contents.items()}
        return {
            "files": {file: attrs.asdict(record) for file, record in records.items()},
            "parts": {file: [len(part.pieces[0]), part.blocks] for file, part in parts.items()},
        }

    def _commit(self, folder: Folder, name: str, place: str, answers: list[dict[str, Any]]) -> Manifest:
        parts = {file: part for answer in answers for file, part in answer["parts"].items()}
        layout = attrs.evolve(self.layout, files={file: PartFile(*parts[file]) for file in self.layout.files})
        content = memoryview(layout.to_bytes())
        folder.put(name, place, LAYOUT, (content,))
        files = {file: FileRecord(**record) for answer in answers for file, record in answer["files"].items()}
        manifest = attrs.evolve(self.manifest, files=files | {LAYOUT: FileRecord.of([content])})
        folder.commit(name, place, manifest)
        return manifest

    def _put(self, key: str, answer: dict[str, Any]) -> None:
        self.exchange.put(f"{self.number}: {key}", json.dumps(answer))

    def _put_for_all(self, key: str, answer: dict[str, Any]) -> None:
        for rank in range(1, self.exchange.world_size):
            self._put(f"{key} for {rank}", answer)

    def _answer(self, key: str, rank: int = 0) -> dict[str, Any]:
        """Return the answer of a process, in which ``error`` is why there is none."""
        text, lost = None, ""
        try:
            while text is None and not lost and time.monotonic() < self._until:  # hurry() may change it
                lost = lost_processes()  # what they have answered before is still there
                until = 0.0 if lost else min(self._until, time.monotonic() + _SECONDS_BETWEEN_LOOKS)
                text = self.exchange.take(f"{self.number}: {key}", until)
        except RuntimeError as error:  # as torch's errors of stores are
            return {"error": f"process 0 cannot be reached: {error}"}
        if text is None and lost:
            return {"error": f"{lost}."}
        if text is None:
            return {"error": f"process {rank} has not answered in {self.timeout:g} seconds; is it still running?"}
        answer: dict[str, Any] = json.loads(text)
        return answer


def _failed(rank: int, error: BaseException) -> dict[str, Any]:
    reason = error.reason if isinstance(error, CheckpointSaveError) else f"{type(error).__name__}: {error}"
    return {"error": f"process {rank} failed: {reason.rstrip('.')}."}
