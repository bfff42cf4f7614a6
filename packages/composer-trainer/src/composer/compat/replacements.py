"""Small functions of MosaicML Composer's helpers, for programs that import them under their former names."""

from __future__ import annotations

import contextlib
import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import nn

from composer.core import Event, Interval, State, Time, TimeUnit, randomness
from composer.distributed import (
    all_gather_object,
    device_of_process,
    from_rank_zero,
    get_global_rank,
    get_local_rank,
    get_node_rank,
)
from composer.optim.clock import convert_time
from composer.trainer.settings.compute import choose_device

__all__ = [
    "JSON",
    "DeviceCPU",
    "DeviceGPU",
    "DeviceMPS",
    "MissingConditionalImportError",
    "check_max_duration",
    "create_interval_scheduler",
    "ensure_tuple",
    "get_device",
    "get_node_signal_file_name",
    "get_rng_state",
    "is_model_ddp",
    "load_rng_state",
    "local_rank_zero_download_and_wait",
    "write_signal_file",
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


class MissingConditionalImportError(ImportError):
    """An optional package is not installed.

    Args:
        extra_deps_group: The extra that contains it.
        conda_package: Its name; for conda, and here also for pip.
        conda_channel: Its channel for conda.

    Example:
        >>> print(MissingConditionalImportError("nlp", "transformers"))
        transformers, of the extra 'nlp', is not installed: pip install transformers
    """

    def __init__(self, extra_deps_group: str, conda_package: str, conda_channel: str | None = "conda-forge") -> None:
        self.conda_channel = conda_channel
        super().__init__(
            f"{conda_package}, of the extra {extra_deps_group!r}, is not installed: pip install {conda_package}"
        )


def check_max_duration(t_max: Time | str, state: State) -> None:
    """Raise an error if the training is longer than a schedule.

    Raises:
        ValueError: It is.

    Example:
        >>> check_max_duration("4ba", State(model=None, max_duration="2ep", dataloader_len=2))
    """
    if state.max_duration is None:
        return
    whole, end = convert_time(state.max_duration, state), convert_time(t_max, state)
    if whole.unit is end.unit and whole > end:
        raise ValueError(f"t_max must be at least max_duration, {state.max_duration}, got {t_max}. Raise it.")


def get_rng_state() -> list[dict[str, Any]]:
    """Return the states of the global generators of all processes, for :func:`load_rng_state`.

    Example:
        >>> sorted(get_rng_state()[0])
        ['numpy', 'python', 'torch']
    """
    return all_gather_object(randomness.rng_state(get_device()))


def load_rng_state(rng_state_dicts: Sequence[dict[str, Any]]) -> None:
    """Restore the generators of this process; nothing changes if there were fewer processes.

    Example:
        >>> states = get_rng_state()
        >>> first = torch.rand(2)
        >>> load_rng_state(states)
        >>> torch.equal(first, torch.rand(2))
        True
    """
    for states in rng_state_dicts[get_global_rank() :][:1]:
        randomness.load_rng_state(states, get_device())


def get_node_signal_file_name(rng: object = None) -> str:
    """Return a new file name, the same in all processes of a machine.

    Args:
        rng: Ignored: the name does not depend on a seed.

    Example:
        >>> get_node_signal_file_name().startswith("._signal_file_node0_")
        True
    """
    del rng
    return f"._signal_file_node{get_node_rank()}_{from_rank_zero(secrets.token_hex(4))}"


def write_signal_file(signal_file_name: str, dir_path: str | None = None) -> str:
    """Write an empty file in the first process of each machine, and return its path.

    Example:
        >>> import tempfile
        >>> Path(write_signal_file("done", tempfile.mkdtemp())).exists()
        True
    """
    path = Path(dir_path or Path.cwd(), signal_file_name)
    if get_local_rank() == 0:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    return str(path)


@contextlib.contextmanager
def local_rank_zero_download_and_wait(expected_file_path: str) -> Iterator[None]:
    """Run a block as soon as the first process of the machine has written a file; that process runs it at once.

    It waits without a time limit and without a collective.

    Example:
        >>> with local_rank_zero_download_and_wait("weights.bin"):
        ...     pass
    """
    while get_local_rank() != 0 and not Path(expected_file_path).exists():
        time.sleep(0.1)
    yield
