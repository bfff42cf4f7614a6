"""The processes that write a checkpoint together, and how they exchange what each has written.

A snapshot has one :class:`Writers`: this process alone, or all that have a sharded model. When it is taken, in the main
thread, they agree by collectives on who writes what. While it is written, in another thread, they exchange answers
through the store of the process group, and waiting ends when another process has ended.
"""

from __future__ import annotations

import contextlib
import json
import time
from typing import TYPE_CHECKING, Any

import torch

from composer.checkpoint.errors import CheckpointSaveError
from composer.checkpoint.layout import Layout, plan_files
from composer.distributed import all_gather_object, any_rank
from composer.distributed.collectives import failing_in_all_processes
from composer.distributed.exchange import Exchange
from composer.distributed.failures import lost_processes
from composer.functional.dtensors import is_sharded

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

    from composer.checkpoint.layout import Described

__all__ = ["Writers", "failing_in_all", "writers_of"]

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

    def failing_in_all_processes(self, path: str) -> AbstractContextManager[None]:
        """Fail in all processes if one fails; see :func:`failing_in_all`."""
        return contextlib.nullcontext() if self.is_alone else failing_in_all(path)

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
    return failing_in_all_processes(
        "Saving a checkpoint", lambda reason: CheckpointSaveError(path, f"{reason.rstrip('.')}.")
    )
