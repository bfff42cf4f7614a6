"""Create and destroy the process group of the processes that torchrun has started.

A program creates a group at most once: :func:`initialize_dist` uses an existing group, or joins the group. At the end
of the program, ``_close_at_exit`` destroys the group that was created here, or, after an error, writes that for
torchrun.
"""

from __future__ import annotations

import atexit
import contextlib
import datetime
import math
import os
import sys
import time
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from composer.distributed.environment import (
    get_local_rank,
    get_local_world_size,
    get_world_size,
    is_initialized,
)

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

_BACKENDS = {"cpu": "gloo", "cuda": "cpu:gloo,cuda:nccl"}
"""With a GPU, numbers in host memory are still exchanged by gloo, without synchronizing with the device."""

_RELEASE_SECONDS = 0.05
_CLOSED = ("connection closed", "connection reset", "connection was likely", "broken pipe", "remote process exited")
_created_here: list[ProcessGroup] = []
"""The group that this module has created, to destroy it; groups from elsewhere stay."""
_closed: list[bool] = []
"""Not empty after a group of several processes was destroyed, as these cannot be connected a second time."""


def initialize_dist(device: str | torch.device | None = None, timeout: float = 300.0) -> None:
    """Create the process group of the processes that torchrun has started; with one process, do nothing.

    The backend is gloo on the CPU and NCCL on CUDA devices, where each process uses the device of its local rank. An
    existing process group is used unchanged. A group created here exists until the program ends or :func:`close_dist`.
    All processes must call it.

    A program that ends with its own error writes it to the file that torchrun names (``error_file``), and torchrun
    reports the first one.

    Args:
        device: ``"cpu"``, ``"gpu"`` (which is ``"cuda"``) or a :class:`torch.device`; if None, a GPU if there is one.
        timeout: Seconds that a process waits for the others before it raises an error.

    Raises:
        ValueError: The variables that torchrun sets are incomplete, the device does not support several processes, or
            the timeout is not above 0.
        RuntimeError: The group was closed before.

    Example:
        >>> initialize_dist("cpu")
        >>> is_initialized(), get_world_size()
        (False, 1)
    """
    check_timeout(timeout)
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    kind = torch.device("cuda" if device == "gpu" else device).type
    if kind not in _BACKENDS and get_world_size() > 1:
        raise ValueError(f"Several processes train on 'cpu' or 'gpu', got device={str(device)!r}. Start one process.")
    _watch_end()
    if is_initialized() or get_world_size() == 1:
        return
    if _closed:
        raise RuntimeError(
            "The process group was closed by close_dist() and cannot be created a second time. "
            "Close it once, at the end of the program."
        )
    if kind == "cuda" and not torch.cuda.is_available():
        raise ValueError("device='gpu' cannot be used here: there is no CUDA device. Use device='cpu'.")
    if kind == "cuda":  # before the group is created, because NCCL uses the current device of the process
        torch.cuda.set_device(device_of_process(device))
    waiting = datetime.timedelta(seconds=timeout)
    # The timeout is that of the backends of both devices. After it, a thread of NCCL ends the process.
    torch.distributed.init_process_group(_BACKENDS[kind], timeout=waiting, **_store_of_this_start(waiting))
    _remember()


def initialize_alone(device: torch.device) -> None:
    """Create a process group of this process only, for features that require one."""
    store = torch.distributed.HashStore()  # type: ignore[attr-defined]  # public, but not in torch's list
    torch.distributed.init_process_group(_BACKENDS[device.type], store=store, rank=0, world_size=1)
    _remember()


def close_dist() -> None:
    """Destroy the process group that :func:`initialize_dist` created; other groups stay.

    Processes cannot be connected a second time. Without this call the group is destroyed when the program ends, except
    after an error: then no process waits for another.

    Example:
        >>> close_dist()
    """
    if _created_here and is_initialized() and torch.distributed.group.WORLD is _created_here[-1]:
        if get_world_size() > 1:
            _closed.append(True)
        # Also in a group of one process; during the shutdown of the interpreter, C++ aborts the program.
        let_tensors_go()
        torch.distributed.destroy_process_group()
    _created_here.clear()


def let_tensors_go() -> None:
    """Wait until gloo's threads have released the tensors of the last collectives, for which they need Python's lock.

    A process that is forked meanwhile waits for ever, as CPython's own lock of its threads is held in it.

    Example:
        >>> let_tensors_go()
    """
    if is_initialized():
        time.sleep(_RELEASE_SECONDS)


def device_of_process(device: str | torch.device) -> torch.device:
    """Return the device of this process: with several processes, the CUDA device of its local rank.

    Raises:
        ValueError: Another CUDA device was requested by index, or there are fewer devices than processes.

    Example:
        >>> device_of_process("cpu")
        device(type='cpu')
    """
    given = torch.device("cuda" if device == "gpu" else device)
    if given.type != "cuda" or get_world_size() == 1:
        return given
    local_rank, count = get_local_rank(), torch.cuda.device_count()
    if given.index not in {None, local_rank}:
        raise ValueError(
            f"device={str(given)!r} cannot be the device of every process: this one has local rank {local_rank}. "
            "Use device='gpu'."
        )
    if local_rank >= count:
        raise ValueError(
            f"This process has local rank {local_rank}, and the machine has {count} CUDA devices. "
            "Start at most as many processes as there are devices: torchrun --nproc-per-node=gpu program.py"
        )
    return torch.device("cuda", local_rank)


def check_timeout(timeout: float) -> None:
    """Check a timeout in seconds.

    Raises:
        ValueError: It is not above 0, or not finite.

    Example:
        >>> check_timeout(300.0)
    """
    is_number = isinstance(timeout, int | float) and not isinstance(timeout, bool)
    if not is_number or not math.isfinite(timeout) or timeout <= 0:
        raise ValueError(f"timeout (dist_timeout) must be a number of seconds above 0, got {timeout!r}.")


def _remember() -> None:
    assert torch.distributed.group.WORLD is not None
    _watch_end()
    _created_here.append(torch.distributed.group.WORLD)


@cache  # a second registration would close and report a second time
def _watch_end() -> None:
    atexit.register(_close_at_exit)


def _close_at_exit() -> None:
    # After an error the other processes may be inside a collective, so do not wait for them.
    error = getattr(sys, "last_value", None)
    if error is None:
        close_dist()
    else:
        _report(error)


def _report(error: BaseException) -> None:
    """Write the error that ends this program to the file of torchrun, unless another process has ended first."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    # Torchrun reports the earliest error as the cause, which an error of a lost connection is not.
    has_lost_another = isinstance(error, RuntimeError) and any(words in str(error).lower() for words in _CLOSED)
    if has_lost_another or not path or Path(path).exists() or not isinstance(error, Exception):
        return
    from torch.distributed.elastic.multiprocessing.errors import ErrorHandler  # noqa: PLC0415  (only here)

    try:
        raise error  # noqa: TRY301  (the handler writes the traceback of the error that is being handled)
    except Exception:  # noqa: BLE001
        with contextlib.suppress(OSError):
            ErrorHandler().record_exception(error)


def _store_of_this_start(timeout: datetime.timedelta) -> dict[str, Any]:
    """Return the arguments for a store without the addresses of processes that torchrun has restarted."""
    # Torchrun's own store is the same in all starts, so that a restarted process may read the address of one that has
    # ended, and cannot connect. Hosts may count restarts differently, so that this requires a single host.
    start = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    is_kept = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    if start == "0" or not is_kept or get_local_world_size() != get_world_size():
        return {}
    from torch.distributed.distributed_c10d import PrefixStore  # noqa: PLC0415  (not in every build of torch)
    from torch.distributed.rendezvous import rendezvous  # noqa: PLC0415

    store, rank, world_size = next(rendezvous("env://", timeout=timeout))
    return {"store": PrefixStore(f"start {start}", store), "rank": rank, "world_size": world_size}
