"""The device of a run, with the methods of MosaicML Composer's devices."""

from __future__ import annotations

from typing import Any, TypeVar, cast

import torch

from composer.core.data_spec import Batch, move_batch
from composer.core.former import warn_former

__all__ = ["Device", "to_device"]

Movable = TypeVar("Movable", torch.nn.Module, torch.Tensor)


class Device(str):
    """A :class:`torch.device` that also has the methods of MosaicML Composer's devices, which give a warning.

    A subclass of :class:`torch.device` is not possible. This one of :class:`str` is accepted wherever torch takes a
    device. It equals the :class:`torch.device` and is an instance of it. torch 2.7 cannot compile a function that
    passes it on; use ``torch.device(device)`` there.

    Args:
        device: The device.

    Example:
        >>> device = Device(torch.device("cpu"))
        >>> device.type, device == torch.device("cpu"), isinstance(device, torch.device)
        ('cpu', True, True)
        >>> torch.ones(2, device=device)
        tensor([1., 1.])
    """

    _device: torch.device

    def __new__(cls, device: torch.device | str) -> Device:
        """Return the device."""
        self = super().__new__(cls, torch.device(device))
        self._device = torch.device(device)
        return self

    __class__ = property(lambda _: torch.device)  # for isinstance(device, torch.device)

    @property
    def type(self) -> str:
        """The type of the device: ``"cpu"``, ``"cuda"`` or ``"mps"``."""
        return self._device.type

    @property
    def index(self) -> int | None:  # type: ignore[override]  # torch's, not that of a string
        """The index of the device; None if it has none."""
        return self._device.index

    def __repr__(self) -> str:
        return repr(self._device)

    def __eq__(self, other: object) -> bool:
        return self._device == getattr(other, "_device", other)

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        return hash(self._device)

    def __copy__(self) -> Device:
        return self

    def __deepcopy__(self, memo: object) -> Device:
        return self

    def __reduce__(self) -> Any:
        return torch.device, (str(self),)  # which torch.load reads

    def __enter__(self) -> Any:
        return self._device.__enter__()

    def __exit__(self, *error: object) -> Any:
        return self._device.__exit__(*error)

    @property
    def name(self) -> str:
        """The name of the device in Composer: ``"cpu"``, ``"gpu"`` or ``"mps"``."""
        _warn("name", "type")
        return {"cuda": "gpu"}.get(self.type, self.type)

    def batch_to_device(self, batch: Batch) -> Batch:
        """Return a batch on the device."""
        _warn("batch_to_device", "move_batch(batch, device) of composer.core.data_spec")
        return move_batch(batch, self._device)

    def module_to_device(self, module: Movable) -> Movable:
        """Return a module or a tensor on the device."""
        _warn("module_to_device, tensor_to_device", ".to(device)")
        return module.to(self._device)

    tensor_to_device = module_to_device

    def optimizer_to_device(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        """Move the state of an optimizer to the device, in place."""
        _warn("optimizer_to_device", "nothing: the state of an optimizer moves with its parameters")
        for key, state in optimizer.state.items():
            optimizer.state[key] = move_batch(state, self._device)
        return optimizer


def to_device(device: torch.device | str) -> torch.device:
    """Return a device as :class:`Device`.

    Example:
        >>> to_device("cpu")
        device(type='cpu')
    """
    return cast("torch.device", Device(device))


def _warn(name: str, change: str) -> None:
    warn_former(f"composer.devices.Device.{name} is a former name. Use {change}.")
