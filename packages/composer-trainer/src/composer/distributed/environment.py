"""Ranks and numbers of processes, and the process groups besides the default one.

- Ranks and numbers are those of the process group, and those of torchrun's environment variables before it exists.
- ``data`` in a name counts each group of tensor parallelism once: its processes train on the same samples. The size of
  these groups is set by :meth:`~composer.distributed.Parallelism.activate`; all other functions only read.
- :func:`is_connected` states whether there is anything to exchange. It raises an error if there are several processes
  and no process group, so that no collective returns silently without the others.
- :func:`host_group` and :func:`data_group` create a group at their first call, which all processes must make.
"""

from __future__ import annotations

import multiprocessing
import os
from functools import lru_cache
from typing import Any

import torch

_TENSOR_PARALLEL = "COMPOSER_TENSOR_PARALLEL"
"""The environment variable of a degree and of the process that has set it, which workers of a DataLoader inherit."""


def is_available() -> bool:
    """Return whether this build of torch supports distributed training.

    Example:
        >>> is_available()
        True
    """
    return torch.distributed.is_available()


def is_initialized() -> bool:
    """Return whether there is a process group, created here or elsewhere.

    Example:
        >>> is_initialized()
        False
    """
    return is_available() and torch.distributed.is_initialized()


def get_world_size() -> int:
    """Return the number of processes; 1 by default.

    Raises:
        ValueError: The variable ``WORLD_SIZE`` is not a whole number.

    Example:
        >>> get_world_size()
        1
    """
    return torch.distributed.get_world_size() if is_initialized() else read_number("WORLD_SIZE", 1)


def get_global_rank() -> int:
    """Return the rank of this process among all, from 0.

    Raises:
        ValueError: The variable ``RANK`` is not a whole number.

    Example:
        >>> get_global_rank()
        0
    """
    return torch.distributed.get_rank() if is_initialized() else read_number("RANK", 0)


def get_data_world_size() -> int:
    """Return the number of processes that train on different samples; each group of tensor parallelism counts as one.

    Without tensor parallelism, this is :func:`get_world_size`.

    Example:
        >>> get_data_world_size()
        1
    """
    return get_world_size() // get_tensor_parallel_size()


def get_data_rank() -> int:
    """Return which part of the samples this process trains on, from 0; equal in a group of tensor parallelism.

    Without tensor parallelism, this is :func:`get_global_rank`.

    Example:
        >>> get_data_rank()
        0
    """
    return get_global_rank() // get_tensor_parallel_size()


def get_tensor_parallel_size() -> int:
    """Return the number of processes in a group of tensor parallelism.

    It is available in the process that has set it and in its workers, forked or spawned, but not in programs that it
    runs, and not in a worker of a fork server that was started before.
    """
    # Programs inherit the variable, too; the id of the process that has set it distinguishes them from workers.
    size, _, owner = os.environ.get(_TENSOR_PARALLEL, "1").partition(" ")
    parent = multiprocessing.parent_process()
    return int(size) if owner in {str(os.getpid()), str(parent and parent.pid)} else 1


def set_tensor_parallel_size(size: int) -> None:
    """Set the number of processes in a group of tensor parallelism, for the run that is in use."""
    os.environ[_TENSOR_PARALLEL] = f"{size} {os.getpid()}"


def get_local_world_size() -> int:
    """Return the number of processes on this machine: ``LOCAL_WORLD_SIZE``, or all processes by default.

    Raises:
        ValueError: The variable is not a whole number.

    Example:
        >>> get_local_world_size()
        1
    """
    return read_number("LOCAL_WORLD_SIZE", get_world_size())


def get_local_rank() -> int:
    """Return the rank of this process on its machine; computed from consecutive ranks without ``LOCAL_RANK``.

    Raises:
        ValueError: The variable is not a whole number.

    Example:
        >>> get_local_rank()
        0
    """
    return read_number("LOCAL_RANK", get_global_rank() % max(get_local_world_size(), 1))


def get_node_rank() -> int:
    """Return the rank of this machine: torchrun's ``GROUP_RANK``, ``NODE_RANK``, or computed from consecutive ranks.

    Raises:
        ValueError: The variable is not a whole number.

    Example:
        >>> get_node_rank()
        0
    """
    counted = get_global_rank() // max(get_local_world_size(), 1)
    return read_number("GROUP_RANK", read_number("NODE_RANK", counted))


def is_connected() -> bool:
    """Return whether there are other processes.

    Raises:
        RuntimeError: There are several processes, but no process group.
    """
    if is_initialized():
        return torch.distributed.get_world_size() > 1
    if get_world_size() > 1:
        raise RuntimeError(
            f"WORLD_SIZE is {get_world_size()}, but the processes are not connected yet: call "
            "composer.distributed.initialize_dist(device) first."
        )
    return False


def host_group() -> Any:
    """Return a process group for numbers in host memory; None is the default group."""
    if "cpu" in torch.distributed.get_backend_config():
        return None
    return _new_host_group(torch.distributed.group.WORLD)


# Of the default group, as a program may replace that.
@lru_cache(maxsize=1)
def _new_host_group(world: Any) -> Any:
    del world  # it was created elsewhere, for devices only
    return torch.distributed.new_group(backend="gloo")


def data_group() -> Any:
    """Return the process group of this process and those with other samples; None is the default group.

    All processes must call it.
    """
    size = get_tensor_parallel_size()
    if size == 1 or not is_connected():
        return None
    return _new_data_group(torch.distributed.group.WORLD, size)


@lru_cache(maxsize=1)
def _new_data_group(world: Any, size: int) -> Any:
    del world
    ranks = [list(range(first, get_world_size(), size)) for first in range(size)]
    return torch.distributed.new_subgroups_by_enumeration(ranks)[0]


def read_number(variable: str, default: int) -> int:
    """Return an environment variable as a whole number, ``default`` if it is not set.

    Raises:
        ValueError: It is not a whole number, or negative.
    """
    value = os.environ.get(variable)
    if value is None:
        return default
    if not value.strip().isdecimal():
        raise ValueError(
            f"The environment variable {variable} must be a whole number, got {value!r}. "
            "torchrun sets it; unset it to train in one process."
        )
    return int(value)
