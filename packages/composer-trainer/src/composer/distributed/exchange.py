"""Exchange strings between threads of all processes, without the process groups of the training."""

from __future__ import annotations

import os
import socket
import time
from typing import Any

import torch

from composer.distributed.collectives import failing_in_all_processes, from_rank_zero
from composer.distributed.environment import get_global_rank, get_world_size, namespace_here
from composer.distributed.groups import is_connected

__all__ = ["Exchange"]

_LOCAL = "127.0.0.1"
_FIRST_PAUSE, _LONGEST_PAUSE = 0.001, 0.25


class Exchange:
    """Strings by key from one process to another, through a connection of each process to the first one.

    A thread that waits for another process through a process group would disturb, and could block, the collectives of
    the training. The store is a server of its own in the first process, on a free port. All processes have to construct
    it at the same time. A string has one reader, which removes it: nothing accumulates, and no other save deletes it.

    Raises:
        RuntimeError: In every process, if one cannot be connected.

    Example:
        >>> exchange = Exchange()
        >>> exchange.put("written", "yes")
        >>> exchange.take("written", time.monotonic() + 10), exchange.take("written", time.monotonic())
        ('yes', None)
    """

    def __init__(self) -> None:
        distributed: Any = torch.distributed  # its stores are public, and not in its list
        self.rank, self.world_size = get_global_rank(), get_world_size()
        if not is_connected():
            self.rank, self.world_size = 0, 1
            self._store: Any = distributed.HashStore()
            return
        doing = "Connecting the processes for checkpoints"
        with failing_in_all_processes(doing):
            if self.rank == 0:
                self._store = distributed.TCPStore(_LOCAL, 0, None, is_master=True, wait_for_workers=False)
        here = namespace_here("net") or socket.gethostname()
        host, network, port = from_rank_zero((socket.gethostname(), here, self._store.port if self.rank == 0 else 0))
        with failing_in_all_processes(doing):
            if self.rank > 0:
                # The address at which torchrun's processes find the first one.
                address = _LOCAL if network == here else os.environ.get("MASTER_ADDR", host)
                self._store = distributed.TCPStore(address, port, None, is_master=False, wait_for_workers=False)

    def put(self, key: str, value: str) -> None:
        """Set the string of a key."""
        self._store.set(key, value)

    def take(self, key: str, until: float) -> str | None:
        """Remove and return the string of a key; None if there is none by the time ``until`` of the monotonic clock."""
        began = time.monotonic()
        while not self._store.check([key]):
            now = time.monotonic()
            if now >= until:
                return None
            # A tenth of the time waited so far, so that a pause makes no wait much longer.
            time.sleep(min(max(0.1 * (now - began), _FIRST_PAUSE), _LONGEST_PAUSE))
        value: bytes = self._store.get(key)
        self._store.delete_key(key)
        return value.decode()
