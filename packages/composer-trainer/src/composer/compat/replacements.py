"""Small functions of MosaicML Composer's helpers, for programs that import them under their former names."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any, TypeAlias

import torch
from torch import nn

from composer.core import Event, Interval, State, Time, TimeUnit
from composer.distributed import device_of_process
from composer.trainer.settings.compute import choose_device

__all__ = [
    "JSON",
    "DeviceCPU",
    "DeviceGPU",
    "DeviceMPS",
    "create_interval_scheduler",
    "ensure_tuple",
    "get_device",
    "is_model_ddp",
]

JSON: TypeAlias = str | float | int | list[Any] | dict[str, Any] | None
"""A value that JSON can represent."""


def ensure_tuple(x: Any) -> tuple[Any, ...]:
    """Return a tuple of the items of a sequence or of the values of a mapping; other values, and strings, are one item.

    Example:
        >>> ensure_tuple(None), ensure_tuple("ab"), ensure_tuple([1, 2]), ensure_tuple({"a": 3})
        ((), ('ab',), (1, 2), (3,))
    """
    if x is None:
        return ()
    if isinstance(x, Mapping):
        return tuple(x.values())
    return tuple(x) if isinstance(x, Sequence) and not isinstance(x, str | bytes | bytearray) else (x,)


def get_device(device: str | torch.device | None = None) -> torch.device:
    """Return the device of this process by its name, or the best available device.

    Raises:
        ValueError: The device does not exist on this machine.

    Example:
        >>> get_device("cpu")
        device(type='cpu')
    """
    return device_of_process(choose_device(device))


def DeviceCPU() -> torch.device:  # noqa: N802  (a former class)
    """Return ``torch.device("cpu")``.

    Example:
        >>> DeviceCPU()
        device(type='cpu')
    """
    return torch.device("cpu")


def DeviceGPU(device_id: int | None = None, *, allow_tf32: bool = True) -> torch.device:  # noqa: N802
    """Return the CUDA device of this process, or the one with an index.

    Args:
        device_id: The index; the local rank if None.
        allow_tf32: Whether matrix products and convolutions may use TF32.

    Raises:
        ValueError: There is no CUDA device.

    Example:
        >>> DeviceGPU()  # doctest: +SKIP
        device(type='cuda')
    """
    chosen = get_device("gpu") if device_id is None else choose_device(torch.device("cuda", device_id))
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = allow_tf32
    return chosen


def DeviceMPS() -> torch.device:  # noqa: N802
    """Return ``torch.device("mps")``.

    Raises:
        ValueError: There is no such device.

    Example:
        >>> DeviceMPS()  # doctest: +SKIP
        device(type='mps')
    """
    return get_device("mps")


def create_interval_scheduler(
    interval: str | int | Time,
    include_end_of_training: bool = True,
    checkpoint_events: bool = True,
    final_events: Set[Event | str] | None = None,
) -> Callable[[State, Event], bool]:
    """Return a function ``f(state, event)`` that is True at the end of each interval.

    Args:
        interval: How often; a whole number counts epochs.
        include_end_of_training: Whether it is also True at the end of the training.
        checkpoint_events: Whether the function is for ``BATCH_CHECKPOINT`` and ``EPOCH_CHECKPOINT`` instead of
            ``BATCH_END`` and ``EPOCH_END``.
        final_events: The events at which it is True at the end of the training; that of the unit of ``max_duration`` if
            None.

    Raises:
        ValueError: The interval is no length of time, or negative.

    Example:
        >>> from composer.core import State, Timestamp
        >>> is_due = create_interval_scheduler("2ba")
        >>> state = State(model=None)
        >>> state.previous_timestamp, state.timestamp = Timestamp(batch=1), Timestamp(batch=2)
        >>> is_due(state, Event.BATCH_CHECKPOINT), is_due(state, Event.BATCH_END)
        (True, False)
    """
    every = Interval.named("interval", interval)
    kind = "checkpoint" if checkpoint_events else "end"
    batch, epoch, iteration = (Event(f"{part}_{kind}") for part in ("batch", "epoch", "iteration"))

    def is_due(state: State, event: Event) -> bool:
        elapsed = state.get_elapsed_duration()
        if include_end_of_training and state.max_duration is not None and elapsed is not None and elapsed.value >= 1:
            usual = {TimeUnit.EPOCH: epoch, TimeUnit.ITERATION: iteration}.get(state.max_duration.unit, batch)
            return event in (final_events or {usual})
        return event in {batch, epoch, iteration} and every.is_due(state)

    return is_due


def is_model_ddp(model: nn.Module) -> bool:
    """Return whether a module is torch's ``DistributedDataParallel``.

    Example:
        >>> is_model_ddp(nn.Linear(2, 2))
        False
    """
    return isinstance(model, nn.parallel.DistributedDataParallel)
