"""Metric values that may still be being computed: keep them without waiting, read many at once, show one."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, TextIO, TypeAlias

import torch
from torch import Tensor

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

__all__ = ["Stream", "check_stream", "keep", "open_stream", "read", "show"]

Stream: TypeAlias = str | TextIO
"""``"stdout"``, ``"stderr"`` or an open text file."""


def keep(value: Any) -> Any:
    """Return a value as it is now, whatever later happens to its tensor in place; this does not wait for the device.

    A number on the CPU is there to be read. One on another device is copied there, to be read later by :func:`read`.

    Example:
        >>> keep(torch.tensor(0.5)), keep(3)
        (0.5, 3)
    """
    if not isinstance(value, Tensor):
        return value
    if value.is_cpu and value.numel() == 1:
        return value.item()
    return value.detach().clone()


def read(values: Sequence[Any]) -> list[Any]:
    """Return values with tensors as numbers (or lists of numbers), waiting once for each device and type of number.

    Example:
        >>> read([torch.tensor(0.5), "as it is", torch.tensor([1, 2])])
        [0.5, 'as it is', [1, 2]]
    """
    numbers = list(values)
    together: dict[tuple[torch.device, torch.dtype], list[int]] = {}
    for place, value in enumerate(values):
        if isinstance(value, Tensor):
            if value.numel() == 1:
                together.setdefault((value.device, value.dtype), []).append(place)
            else:
                numbers[place] = value.tolist()
    for places in together.values():
        stacked = torch.stack([values[place].detach().reshape(()) for place in places])
        for place, number in zip(places, stacked.tolist(), strict=True):
            numbers[place] = number
    return numbers


def show(names_and_values: Iterable[tuple[str, Any]]) -> str:
    """Return named values on one line; this waits for their tensors.

    Example:
        >>> show([("loss", torch.tensor(0.123456)), ("batches", 7)])
        'loss=0.1235, batches=7'
    """
    pairs = list(names_and_values)
    values = read([value for _, value in pairs])
    texts = [f"{value:.4g}" if isinstance(value, float) else str(value) for value in values]
    return ", ".join(f"{name}={text}" for (name, _), text in zip(pairs, texts, strict=True))


def check_stream(stream: Stream) -> Stream:
    """Return the stream.

    Raises:
        ValueError: It is neither one of the two names nor something to write to.
    """
    if stream not in {"stdout", "stderr"} and not hasattr(stream, "write"):
        raise ValueError(f"stream must be 'stderr', 'stdout' or an open text file, got {stream!r}.")
    return stream


def open_stream(stream: Stream) -> TextIO:
    """Return what to write to: the standard stream of that name as it is now, or the file that was given."""
    if isinstance(stream, str):
        return sys.stdout if stream == "stdout" else sys.stderr
    return stream
