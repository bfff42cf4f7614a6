"""Which device to train on."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from composer.core import Precision

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["choose_device", "choose_precision"]

_AVAILABLE: dict[str, Callable[[], bool]] = {
    "cpu": lambda: True,
    "cuda": torch.cuda.is_available,
    "mps": torch.backends.mps.is_available,
}


def choose_device(device: str | torch.device | None = None) -> torch.device:
    """Return the device: the one asked for (``"gpu"`` is a CUDA device), or the best there is.

    Raises:
        ValueError: The device does not exist on this machine, or is of a kind that cannot be trained on.

    Example:
        >>> choose_device("cpu")
        device(type='cpu')
    """
    if device is None:
        return torch.device(next(kind for kind in ("cuda", "mps", "cpu") if _AVAILABLE[kind]()))
    try:
        chosen = torch.device("cuda" if device == "gpu" else device)
    except RuntimeError:
        raise ValueError(f"device must be 'cpu', 'gpu', 'mps' or a torch.device, got {device!r}.") from None
    if chosen.type not in _AVAILABLE or not _AVAILABLE[chosen.type]():
        usable = [kind for kind, is_available in _AVAILABLE.items() if is_available()]
        raise ValueError(f"device={str(device)!r} cannot be used here; this machine has {', '.join(usable)}.")
    return chosen


def choose_precision(precision: Precision | str | None, device: torch.device) -> Precision:
    """Return the precision: the one asked for, or ``amp_fp16`` on a CUDA device and ``fp32`` elsewhere.

    Raises:
        ValueError: There is no such precision.
    """
    if precision is None:
        return Precision.AMP_FP16 if device.type == "cuda" else Precision.FP32
    return Precision(precision)
