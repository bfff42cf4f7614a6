"""Process groups: of all processes, for numbers in host memory, and of those with other samples."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch

from composer.distributed.environment import get_tensor_parallel_size, get_world_size, is_initialized

__all__ = ["data_group", "host_group", "is_connected", "with_timeout"]


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
    return with_timeout(torch.distributed.new_group(backend="gloo"))


def with_timeout(group: Any) -> Any:
    """Return a process group that waits as long as the default group: torch lets new ones wait 30 minutes, NCCL's 10.

    With NCCL, a collective returns before it is complete, and raises no error if another process never joins: a thread
    of torch ends the process after the timeout of the group. A backend without a timeout, as "fake", is left as it is.
    """
    world, of_new = _backends(torch.distributed.group.WORLD), _backends(group)
    timeouts = [one.options._timeout for one in world if getattr(one, "options", None) is not None]  # noqa: SLF001
    for backend in of_new if timeouts else ():
        # Torch 2.7 has only the private method, and the newest class for NCCL only the public one.
        set_timeout = getattr(backend, "set_timeout", None) or getattr(backend, "_set_default_timeout", None)
        if set_timeout is not None:
            set_timeout(min(timeouts))
    return group


def _backends(group: Any) -> list[Any]:
    return [group._get_backend(device) for device in group._device_types]  # noqa: SLF001


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
    return with_timeout(torch.distributed.new_subgroups_by_enumeration(ranks)[0])
