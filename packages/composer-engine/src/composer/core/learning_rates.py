"""Learning rates that a schedule sets, and those that the user changes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

__all__ = ["base_rate", "set_rate"]


def base_rate(group: dict[str, Any]) -> float | Tensor:
    """Return the learning rate of a parameter group that a schedule multiplies, its ``initial_lr``.

    A rate that :func:`set_rate` has not set was assigned by the user, and becomes the ``initial_lr``.

    Example:
        >>> group = {"lr": 0.1}
        >>> set_rate(group, 0.5 * base_rate(group))
        >>> group["lr"] = 0.04
        >>> base_rate(group)
        0.04
    """
    rate = group["lr"]
    base = group.setdefault("initial_lr", _copied(rate))
    scheduled = group.setdefault("scheduled_lr", _copied(rate))
    if isinstance(rate, Tensor):  # compared without waiting for the device
        group["initial_lr"] = torch.where(rate == scheduled, base, rate)
    elif rate != scheduled:
        group["initial_lr"] = rate
    initial: float | Tensor = group["initial_lr"]
    return initial


def set_rate(group: dict[str, Any], rate: float | Tensor) -> None:
    """Set the learning rate of a parameter group, and record it as ``scheduled_lr``.

    A tensor is changed in place, because compiled and captured optimizers refer to it.
    """
    if isinstance(group["lr"], Tensor):
        rate = group["lr"].fill_(rate).clone()
    else:
        group["lr"] = rate
    group["scheduled_lr"] = rate


def _copied(rate: float | Tensor) -> float | Tensor:
    return rate.clone() if isinstance(rate, Tensor) else rate
