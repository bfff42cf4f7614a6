"""Collectives: sums, copies and lists over all processes, which with one do nothing; and messages between threads."""

from __future__ import annotations

import contextlib
import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from composer.distributed.environment import (
    get_global_rank,
    get_local_rank,
    get_tensor_parallel_size,
    get_world_size,
    host_group,
    is_connected,
)
from composer.functional.dtensors import without_repeats

T = TypeVar("T")

_OPERATIONS = ("SUM", "AVG", "MIN", "MAX", "PRODUCT", "BAND", "BOR", "BXOR")
_BUCKET_BYTES = 64 * 2**20
_FIRST_PAUSE, _LONGEST_PAUSE = 0.001, 0.25


def all_reduce(tensor: Tensor, reduce_operation: str = "SUM", group: ProcessGroup | None = None) -> None:
    """Replace a tensor by the sum (or mean, minimum, …) over all processes, in place.

    Args:
        tensor: Has the same shape and dtype in all processes; **changed in place**.
        reduce_operation: ``"SUM"``, ``"AVG"``, ``"MIN"``, ``"MAX"``, ``"PRODUCT"``, ``"BAND"``, ``"BOR"`` or
            ``"BXOR"``.
        group: The processes; all if None.

    Raises:
        ValueError: The operation does not exist.
        RuntimeError: There are several processes that are not connected.

    Example:
        >>> tensor = torch.ones(2)
        >>> all_reduce(tensor)
        >>> tensor
        tensor([1., 1.])
    """
    name = reduce_operation.upper()
    if name not in _OPERATIONS:
        raise ValueError(f"reduce_operation must be one of {', '.join(_OPERATIONS)}, got {reduce_operation!r}.")
    if is_connected():
        # gloo does not support AVG.
        operation = getattr(torch.distributed.ReduceOp, "SUM" if name == "AVG" else name)
        torch.distributed.all_reduce(tensor, op=operation, group=group)
        if name == "AVG":
            tensor.div_(torch.distributed.get_world_size(group))


def all_gather(tensor: Tensor, group: ProcessGroup | None = None) -> list[Tensor]:
    """Return the tensors of all processes, sorted by rank.

    Args:
        tensor: Has the same shape and dtype in all processes.
        group: The processes; all if None.

    Raises:
        RuntimeError: There are several processes that are not connected.

    Example:
        >>> all_gather(torch.ones(2))
        [tensor([1., 1.])]
    """
    if not is_connected():
        return [tensor]
    # torch gathers only contiguous tensors.
    own = tensor.detach().contiguous()
    gathered = [torch.empty_like(own) for _ in range(torch.distributed.get_world_size(group))]
    torch.distributed.all_gather(gathered, own, group)
    return gathered


def all_gather_object(obj: T, group: ProcessGroup | None = None) -> list[T]:
    """Return the objects of all processes, or of those of a group, sorted by rank; they are pickled for transport.

    Raises:
        RuntimeError: There are several processes that are not connected.

    Example:
        >>> all_gather_object("mine")
        ['mine']
    """
    if not is_connected():
        return [obj]
    gathered: list[Any] = [None] * torch.distributed.get_world_size(group)
    torch.distributed.all_gather_object(gathered, obj, group)
    return gathered


def all_gather_data(obj: T) -> list[T]:
    """Return the objects of all processes with different samples, one of each group of tensor parallelism.

    They are sorted by :func:`~composer.distributed.get_data_rank`. All processes must call it.

    Raises:
        RuntimeError: There are several processes that are not connected.

    Example:
        >>> all_gather_data([0.5])
        [[0.5]]
    """
    return all_gather_object(obj)[:: get_tensor_parallel_size()]


def broadcast(tensor: Tensor, src: int = 0, group: ProcessGroup | None = None) -> None:
    """Replace a tensor by that of rank ``src``, in place, in all processes or those of a group.

    Raises:
        RuntimeError: There are several processes that are not connected.

    Example:
        >>> broadcast(torch.ones(2), src=0)
    """
    if is_connected():
        torch.distributed.broadcast(tensor, src, group)


def broadcast_object_list(object_list: list[Any], src: int = 0, group: ProcessGroup | None = None) -> None:
    """Replace the objects of a list by those of rank ``src``, in place; they are pickled for transport.

    Args:
        object_list: Has the same length in all processes; **changed in place**.
        src: The source rank.
        group: The processes; all if None.

    Raises:
        RuntimeError: There are several processes that are not connected.

    Example:
        >>> names = ["run 1"]
        >>> broadcast_object_list(names)
        >>> names
        ['run 1']
    """
    if is_connected():
        torch.distributed.broadcast_object_list(object_list, src, group)


def barrier(group: ProcessGroup | None = None) -> None:
    """Wait until every process, or every one of a group, has called this function.

    Raises:
        RuntimeError: There are several processes that are not connected.

    Example:
        >>> barrier()
    """
    if group is not None and is_connected():
        torch.distributed.barrier(group)
    else:  # not the barrier of torch, which NCCL runs on the device
        any_rank(flag=False)


def from_rank_zero(value: T) -> T:
    """Return the value of rank 0, such as the generated name or seed of a run.

    Raises:
        RuntimeError: There are several processes that are not connected.

    Example:
        >>> from_rank_zero("run 1")
        'run 1'
    """
    values = [value]
    broadcast_object_list(values)
    return values[0]


def all_agree(value: object) -> bool:
    """Return whether the value is equal in all processes; that of rank 0 is pickled for transport.

    Raises:
        RuntimeError: There are several processes that are not connected.

    Example:
        >>> all_agree(("linear", 3))
        True
    """
    return not any_rank(flag=value != from_rank_zero(value))


def any_rank(flag: bool) -> bool:
    """Return whether the flag is set in any process; does not use the device.

    Raises:
        RuntimeError: There are several processes that are not connected.

    Example:
        >>> any_rank(True), any_rank(False)
        (True, False)
    """
    return -all_reduce_min(-int(flag)) > 0


def all_reduce_min(value: int) -> int:
    """Return the minimum of an integer over all processes; does not use the device.

    Raises:
        RuntimeError: There are several processes that are not connected.

    Example:
        >>> all_reduce_min(16)
        16
    """
    if not is_connected():
        return value
    number = torch.tensor([value], dtype=torch.int64, device="cpu")
    torch.distributed.all_reduce(number, op=torch.distributed.ReduceOp.MIN, group=host_group())
    return int(number)


def broadcast_model(model: nn.Module) -> None:
    """Broadcast the weights and buffers of rank 0 to all processes.

    Raises:
        ValueError: The models differ in the names, shapes or dtypes of their parameters and buffers.

    Example:
        >>> broadcast_model(nn.Linear(2, 2))
    """
    if not is_connected():
        return
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    descriptions = [(name, tuple(tensor.shape), str(tensor.dtype)) for name, tensor in tensors.items()]
    if not all_agree(descriptions):
        raise ValueError(
            "The processes have different models: names, shapes or dtypes of parameters or buffers are not the same. "
            "Build and change the model the same way in every process, whatever its rank."
        )
    _broadcast(tensors.values())


def broadcast_buffers(model: nn.Module) -> None:
    """Broadcast the buffers of rank 0 to all processes, such as the running means of BatchNorm.

    Each process computes its own buffers from its part of the batches, and evaluation and checkpoints require equal
    ones.

    Example:
        >>> broadcast_buffers(nn.BatchNorm1d(2))
    """
    if is_connected():
        _broadcast(model.buffers())


@torch.no_grad()
def _broadcast(tensors: Iterable[Tensor]) -> None:
    """Broadcast many tensors in place with few calls, as DDP does; a bucket of them is copied at a time."""
    distributed: Any = torch.distributed
    if distinct := [without_repeats(tensor) for tensor in tensors]:
        distributed._broadcast_coalesced(distributed.group.WORLD, distinct, _BUCKET_BYTES, 0)  # noqa: SLF001


@contextlib.contextmanager
def run_local_rank_zero_first() -> Iterator[None]:
    """Run a block in the first process of each machine before the others, for example to download data once.

    The others wait up to the timeout of :func:`initialize_dist`. All processes must call this.

    Raises:
        RuntimeError: In the waiting processes, if the block failed in a process that ran first.

    Example:
        >>> with run_local_rank_zero_first():
        ...     data = "downloaded"
    """
    if get_local_rank() != 0 and is_connected():
        # Waits for the first processes, which call it after the block, and learns whether one of them failed.
        if any_rank(flag=False):
            raise RuntimeError("A process that ran first failed in the block that this one waited for; see its error.")
        yield
        return
    try:
        yield
    except BaseException:  # also after Ctrl-C, as the others wait in this call
        any_rank(flag=True)
        raise
    any_rank(flag=False)


@contextlib.contextmanager
def failing_in_all_processes(doing: str, to_error: Callable[[str], Exception] = RuntimeError) -> Iterator[None]:
    """Run a block in all processes; if it fails in one, it fails in all, so that none waits for another.

    The block must not call collectives. All processes must call this.

    Args:
        doing: Describes the block; the subject of the error's sentence.
        to_error: Returns the error to raise in the processes where the block succeeded, from that sentence.

    Raises:
        Exception: In the processes where the block succeeded, if it failed in another or was interrupted there.

    Example:
        >>> with failing_in_all_processes("Reading the settings"):
        ...     settings = {}
    """
    try:
        yield
    except BaseException as error:  # also after Ctrl-C, as the others wait
        any_rank(flag=True)
        all_gather_object(f"{type(error).__name__}: {error}".removesuffix(": "))
        raise
    if any_rank(flag=False):
        failures = enumerate(all_gather_object(""))
        rank, failure = next(of_rank for of_rank in failures if of_rank[1])
        raise to_error(f"{doing} failed in process {rank}: {failure.rstrip('.')}.")


class MessageStore:
    """Strings by key from one process to another, through the store by which the process group was created.

    A thread that waits for another process through a process group would disturb, and could block, the collectives of
    the training. All processes have to construct it at the same time. A string has one reader, which removes it.

    Example:
        >>> messages = MessageStore()
        >>> messages.put("written", "yes")
        >>> messages.take(["written"], time.monotonic() + 10), messages.take(["written"], time.monotonic())
        ('yes', None)
    """

    def __init__(self) -> None:
        self.rank, self.world_size = (get_global_rank(), get_world_size()) if is_connected() else (0, 1)
        self._store: Any = torch.distributed.HashStore()  # type: ignore[attr-defined]  # public, but not in torch's list
        if self.world_size > 1:
            from torch.distributed.distributed_c10d import PrefixStore, _get_default_store  # noqa: PLC0415

            # Torchrun's store may have messages of processes that were restarted.
            self._store = PrefixStore(f"messages of {from_rank_zero(secrets.token_hex(8))}", _get_default_store())

    def put(self, key: str, value: str) -> None:
        """Set the string of a key."""
        self._store.set(key, value)

    def take(self, keys: Sequence[str], until: float) -> str | None:
        """Remove and return the string of the first key that has one; None if there is none at a deadline.

        Args:
            keys: The keys to wait for.
            until: The deadline, in seconds of ``time.monotonic``.
        """
        began = time.monotonic()
        while (key := next((one for one in keys if self._store.check([one])), None)) is None:
            now = time.monotonic()
            if now >= until:
                return None
            # A tenth of the time waited so far, so that a pause makes no wait much longer.
            time.sleep(min(max(0.1 * (now - began), _FIRST_PAUSE), _LONGEST_PAUSE))
        value: bytes = self._store.get(key)
        self._store.delete_key(key)
        return value.decode()
