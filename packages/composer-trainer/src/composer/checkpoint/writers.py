"""The processes that write a checkpoint together: they agree on who writes what, and exchange messages.

They agree by collectives, in the main thread. While a checkpoint is written, in the saver's thread, they send messages
through the store of an :class:`~composer.distributed.exchange.Exchange`: collectives of two threads could meet in
another order in each process. :mod:`~composer.checkpoint.snapshot` has the protocol of these messages.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import attrs
import torch

from composer.checkpoint.errors import NOT_SAVED, CheckpointSaveError
from composer.checkpoint.layout import Layout, TensorFile
from composer.checkpoint.manifest import FileRecord
from composer.checkpoint.planning import Described, Writes, plan_files
from composer.core.serialization import from_data, to_data
from composer.distributed import all_gather_object, any_rank
from composer.distributed.collectives import failing_in_all_processes
from composer.distributed.exchange import Exchange
from composer.distributed.failures import lost_processes
from composer.functional.dtensors import is_sharded

__all__ = ["Message", "Writers", "failing_in_all", "writers_of"]

_SECONDS_BETWEEN_CHECKS = 1.0
"""How often a waiting process checks whether others have ended."""


@attrs.frozen
class Message:
    """What a process sends to another one during a save; an empty one states that nothing is left to do.

    Args:
        draft: Where to write files.
        files: The files that the sender has written.
        tensors: Of those with tensors, what the layout has of them.
        error: Why the save has failed.
        outcome: What is wrong then; see :class:`CheckpointSaveError`.
        is_lost: Whether the sender has ended, as the receiver states in its place.
    """

    draft: str | None = None
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
        return cls(error=f"process {rank} failed: {type(error).__name__}: {error}".rstrip(".") + ".")


class Writers:
    """The processes that write a checkpoint together: all, of a sharded model, or this one alone.

    All processes have to construct it at the same time, unless it is for one.

    Args:
        is_alone: Whether this process writes alone.

    Attributes:
        saves: The number of saves so far.
    """

    def __init__(self, *, is_alone: bool) -> None:
        self.is_alone = is_alone
        self._exchange = None if is_alone else Exchange()
        self.rank = 0 if self._exchange is None else self._exchange.rank
        self.world_size = 1 if self._exchange is None else self._exchange.world_size
        self.saves = 0
        self._described: Described | None = None
        self._planned: tuple[Layout, list[Writes]] = (Layout({}, {}), [])

    def failing_in_all(self, path: str) -> AbstractContextManager[None]:
        """Fail in all of these processes if one fails; see :func:`failing_in_all`."""
        return contextlib.nullcontext() if self.is_alone else failing_in_all(path)

    def plan(self, described: Described) -> tuple[Layout, Writes]:
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

    def send(self, key: str, message: Message) -> None:
        """Send a message to the process that waits for the key."""
        assert self._exchange is not None
        self._exchange.put(key, json.dumps(to_data(message, Message)))

    def receive(self, key: str, until: Callable[[], float]) -> Message | None:
        """Return the message of a key; None if it does not come until a time, which may be changed meanwhile.

        If processes have ended, it is a message with that error.
        """
        assert self._exchange is not None
        text, lost = None, ""
        try:
            while text is None and not lost and time.monotonic() < until():
                lost = lost_processes()  # what they have sent before is still there
                latest = 0.0 if lost else min(until(), time.monotonic() + _SECONDS_BETWEEN_CHECKS)
                text = self._exchange.take(key, latest)
        except RuntimeError as error:  # as torch's errors of stores are
            return Message(error=f"process 0 cannot be reached: {error}", is_lost=True)
        if text is None:
            return Message(error=f"{lost}.", is_lost=True) if lost else None
        message: Message = from_data(json.loads(text), Message)
        return message


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
