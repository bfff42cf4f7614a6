"""Composer's devices, which are :class:`torch.device` here, with the former methods."""

from __future__ import annotations

import torch

from composer.core.former import Device, to_device
from composer.distributed import device_of_process
from composer.trainer.settings.compute import choose_device


def get_device(device: str | torch.device | None = None) -> torch.device:
    """Return the device of this process by its name, or the best available device.

    Raises:
        ValueError: The device does not exist on this machine.

    Example:
        >>> get_device("cpu")
        device(type='cpu')
    """
    return to_device(device_of_process(choose_device(device)))


class _OfType(type):
    kind: str

    def __instancecheck__(cls, one: object) -> bool:
        return isinstance(one, torch.device) and one.type == cls.kind


class _ByName(Device, metaclass=_OfType):
    def __new__(cls) -> torch.device:  # type: ignore[misc]
        """Return the device."""
        return get_device(cls.kind)


class DeviceCPU(_ByName):
    """``DeviceCPU()`` returns the CPU; the devices of this type are its instances.

    Example:
        >>> DeviceCPU(), isinstance(torch.device("cpu"), DeviceCPU)
        (device(type='cpu'), True)
    """

    kind = "cpu"


class DeviceGPU(Device, metaclass=_OfType):
    """``DeviceGPU()`` returns the CUDA device of this process; the CUDA devices are its instances.

    Args:
        device_id: The index; the local rank if None.
        allow_tf32: Whether matrix products and convolutions may use TF32.

    Raises:
        ValueError: There is no CUDA device.

    Example:
        >>> DeviceGPU()  # doctest: +SKIP
        device(type='cuda')
    """

    kind = "cuda"

    def __new__(cls, device_id: int | None = None, *, allow_tf32: bool = True) -> torch.device:  # type: ignore[misc]
        """Return the device."""
        chosen = get_device("gpu") if device_id is None else to_device(choose_device(torch.device("cuda", device_id)))
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = allow_tf32
        return chosen


class DeviceMPS(_ByName):
    """``DeviceMPS()`` returns the MPS device; it is its only instance.

    Raises:
        ValueError: There is no such device.

    Example:
        >>> DeviceMPS()  # doctest: +SKIP
        device(type='mps')
    """

    kind = "mps"
