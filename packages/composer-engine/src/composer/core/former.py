"""What programs for MosaicML Composer read from a run: its device, clock and attributes, and names in any case."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from enum import StrEnum
from importlib.metadata import version
from typing import Any, TypeVar, cast

import torch
from torch.nn.parallel import DistributedDataParallel

from composer.core.checks import caller_level
from composer.core.data.batches import Batch, move_batch
from composer.core.time import Time, TimeUnit
from composer.functional.dtensors import is_sharded, rank_and_processes

Movable = TypeVar("Movable", torch.nn.Module, torch.Tensor)


def warn_former(text: str) -> None:
    """Give a :class:`DeprecationWarning` at the line outside of this library that is being run."""
    warnings.warn(text, DeprecationWarning, stacklevel=caller_level())


class StringEnum(StrEnum):
    """Names that are found and compared in upper or lower case.

    Example:
        >>> class Kind(StringEnum):
        ...     FIRST = "first"
        >>> Kind("First") is Kind.FIRST, Kind.FIRST == "FIRST"
        (True, True)
    """

    @classmethod
    def _missing_(cls, value: object) -> StringEnum | None:
        return cls.__members__.get(str(value).upper())

    def __eq__(self, other: object) -> bool:
        return str.__eq__(self, other.lower() if isinstance(other, str) else other)

    __ne__ = object.__ne__  # follows __eq__, unlike that of str
    __hash__ = str.__hash__


class Batches(int):
    """A number of batches with the attributes of a :class:`Time`.

    Example:
        >>> Batches(5).value, Batches(5).unit, Batches(5) * 2
        (5, <TimeUnit.BATCH: 'ba'>, 10)
    """

    __slots__ = ()
    unit = TimeUnit.BATCH

    @property
    def value(self) -> int:
        """The number."""
        return int(self)

    def to_timestring(self) -> str:
        """Return ``"5ba"``."""
        return Time(int(self), self.unit).to_timestring()


def to_batches(number: int | Time | None) -> int | None:
    """Return a number of batches; None if it is unknown."""
    return None if number is None else Batches(number)


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
    type: str
    index: int | None  # type: ignore[assignment]  # torch's, not that of a string

    def __new__(cls, device: torch.device | str) -> Device:
        """Return the device."""
        device = torch.device(device)
        self = super().__new__(cls, device)
        self._device, self.type, self.index = device, device.type, device.index
        return self

    __class__ = property(lambda _: torch.device)  # for isinstance(device, torch.device)

    def __repr__(self) -> str:
        return repr(self._device)

    def __eq__(self, other: object) -> bool:
        return self._device == getattr(other, "_device", other)

    __ne__ = object.__ne__  # follows __eq__, unlike that of str

    def __hash__(self) -> int:
        return hash(self._device)

    def __copy__(self, memo: object = None) -> Device:
        return self

    __deepcopy__ = __copy__

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
        _warn("batch_to_device", "move_batch(batch, device) of composer.core.data.batches")
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


def with_former(data: dict[str, Any], state: Any) -> dict[str, Any]:
    """Return a saved state with what programs for MosaicML Composer find in it.

    Args:
        data: The saved state.
        state: The run. One without a model has no weights.

    Returns:
        The state with ``model``, ``optimizers`` and ``metadata``, and the clock also under ``timestamp/Timestamp``.

    Example:
        >>> from composer.core import State
        >>> saved = with_former({"timestamp": {"batch": 3}}, State(torch.nn.Linear(2, 2)))
        >>> saved["timestamp"]["Timestamp"]["batch"], list(saved["model"]), saved["metadata"]["device"]
        (3, ['weight', 'bias'], 'cpu')
    """
    metadata = {
        "composer_env_info": {"composer_version": version("composer-engine")},
        "torch_version": str(torch.__version__),
        "device": {"cuda": "gpu"}.get(state.device.type, state.device.type),
        "precision": state.precision.value,
        "world_size": rank_and_processes()[1],
        "device_train_microbatch_size": state.device_train_microbatch_size,
        "train_dataloader_batch_size": getattr(state.train_dataloader, "batch_size", None),
    }
    has_model = isinstance(state.model, torch.nn.Module)
    tensors = {"model": state.get_model_state_dict(), "optimizers": state.get_optim_state_dict()} if has_model else {}
    return {**data, **tensors, "metadata": metadata, "timestamp": {**data["timestamp"], "Timestamp": data["timestamp"]}}


def _no_config(state: Any) -> None:
    if is_sharded(state.model):
        raise AttributeError(f"The configuration of a sharded model is not in its state: {_CONFIG}.")


_NOT_WRAPPED = "remove it; the model of the state is never wrapped, except by FSDP2"
_CONFIG = "read what you pass as parallelism_config"
_IN_CHECKPOINT = "a checkpoint contains the place in the data"
_FORMER: Mapping[str, tuple[str, Callable[[Any], Any]]] = {
    "is_model_ddp": (_NOT_WRAPPED, lambda state: isinstance(state.model, DistributedDataParallel)),
    "fsdp_enabled": (_NOT_WRAPPED, lambda state: is_sharded(state.model)),
    "fsdp_sharded_state_dict_enabled": ("checkpoints are always sharded", lambda state: is_sharded(state.model)),
    **dict.fromkeys(("fsdp_config", "tp_config", "device_mesh", "fsdp_state_dict_type"), (_CONFIG, _no_config)),
    "fsdp_config_version": (_CONFIG, lambda state: 2 if is_sharded(state.model) else 0),
    **dict.fromkeys(("load_path", "precision_config"), ("read what you pass to the Trainer", lambda _: None)),
    "load_monolith_rank0_only": ("each process reads its part", lambda _: False),
    "deepspeed_enabled": ("DeepSpeed is not supported", lambda _: False),
    "deepspeed_config": ("DeepSpeed is not supported", lambda _: None),
    "_train_dataloader": ("read state.train_dataloader", lambda state: state.train_dataloader),
    "save_metrics": ("metrics are always saved", lambda _: True),
    "dataset_state": (_IN_CHECKPOINT, lambda _: None),
    **dict.fromkeys(("dataset_resumption", "_dataset_state_dict"), (_IN_CHECKPOINT, lambda _: {})),
}
"""For each attribute, what to use instead, and its value."""


def _former(name: str, advice: str, value: Callable[[Any], Any]) -> property:
    def read(state: Any) -> Any:
        warn_former(f"state.{name} is a former name: {advice}.")
        return value(state)

    def write(_: Any, value: Any) -> None:
        warn_former(f"state.{name} = {value!r} has no effect: {advice}.")

    return property(read, write, doc=f"A former name: {advice}.")


class FormerState:
    """Attributes of Composer's state that a state does not have by itself."""

    __slots__ = ()
    __dict__ = property(lambda _: {}, doc="An empty dictionary; programs delete what it has.")

    def __dir__(self) -> list[str]:
        """Return the names of the attributes without these, so that tools which read all of them get no warnings."""
        return [name for name in super().__dir__() if name not in _FORMER]


# Without annotations, as type checkers name what does not exist. A __getattr__ would be shorter, but with one Python
# reads every attribute of a state several times as slowly, in each step.
for _name, (_advice, _value) in _FORMER.items():
    setattr(FormerState, _name, _former(_name, _advice, _value))
