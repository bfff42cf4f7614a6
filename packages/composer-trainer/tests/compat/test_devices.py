"""Composer's devices under their former names."""

import pytest
import torch

from composer.compat.devices import DeviceCPU, DeviceGPU, DeviceMPS, get_device


def test_devices_are_torch_devices():
    """The device of the CPU is torch's, and devices that do not exist here raise an error."""
    assert get_device("cpu") == DeviceCPU() == torch.device("cpu")
    assert isinstance(get_device(), torch.device)
    if not torch.cuda.is_available():
        with pytest.raises(ValueError, match="cannot be used here"):
            DeviceGPU()
    if not torch.backends.mps.is_available():
        with pytest.raises(ValueError, match="cannot be used here"):
            DeviceMPS()
