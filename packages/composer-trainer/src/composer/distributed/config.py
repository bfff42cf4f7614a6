"""The arguments by which processes share a batch and a model: ``parallelism_config`` and ``ddp_sync_strategy``.

:meth:`ParallelismConfig.from_arguments` reads each section by its own class, and raises an error for sections that
contradict each other. What depends on the model or the device is checked later, by the other methods.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Self

import attrs
from attrs.validators import instance_of
from torch.nn import SyncBatchNorm

from composer.core.checks import integer
from composer.distributed.mesh import MeshSettings, Settings, TensorParallelSettings
from composer.distributed.meta import is_on_meta
from composer.distributed.sharding import FSDPSettings

if TYPE_CHECKING:
    from torch import nn


def has_sync_batchnorm(model: nn.Module) -> bool:
    """Return whether a model has layers that compute in all processes together."""
    return any(isinstance(layer, SyncBatchNorm) for layer in model.modules())


class DDPSyncStrategy(enum.StrEnum):
    """When gradients are reduced over processes; all strategies have the same result.

    Example:
        >>> DDPSyncStrategy("forced_sync").name
        'FORCED_SYNC'
    """

    SINGLE_AUTO_SYNC = "single_auto_sync"
    """During the backward pass of the last microbatch, with the least communication. The default."""

    MULTI_AUTO_SYNC = "multi_auto_sync"
    """During the backward pass of every microbatch."""

    FORCED_SYNC = "forced_sync"
    """As ``single_auto_sync``, with ``find_unused_parameters``."""


@attrs.frozen(kw_only=True)
class DDPSettings(Settings):
    """Settings of ``torch.nn.parallel.DistributedDataParallel``; the keys of ``parallelism_config["ddp"]``.

    Args:
        find_unused_parameters: Whether a step may leave parameters without a gradient. Algorithms that do so
            (LayerFreezing, StochasticDepth) enable it.
        bucket_cap_mb: Size of a communication bucket, in MiB.
        gradient_as_bucket_view: Whether gradients are views of the communication buckets, which saves their size in
            memory.

    Raises:
        TypeError: A setting is of the wrong kind.
        ValueError: A setting does not exist.

    Example:
        >>> DDPSettings.from_config({"find_unused_parameters": True}).find_unused_parameters
        True
    """

    section: ClassVar[str] = "ddp"

    find_unused_parameters: bool = attrs.field(default=False, validator=instance_of(bool))
    bucket_cap_mb: int | None = integer(None, 1, meaning="It is in MiB.")
    gradient_as_bucket_view: bool = attrs.field(default=False, validator=instance_of(bool))


@attrs.frozen(kw_only=True)
class ParallelismConfig:
    """How processes share a batch and a model.

    Attributes:
        ddp: Settings of DDP, which trains a model that is not split.
        fsdp: Settings of FSDP2, which shards the model; None does not.
        tp: Settings of tensor parallelism, which splits layers; None does not.
        mesh: The numbers of processes that share samples and layers; None has all of them share samples.
        strategy: When gradients are reduced.
    """

    ddp: DDPSettings
    fsdp: FSDPSettings | None = None
    tp: TensorParallelSettings | None = None
    mesh: MeshSettings | None = None
    strategy: DDPSyncStrategy = DDPSyncStrategy.SINGLE_AUTO_SYNC

    @classmethod
    def from_arguments(cls, config: Mapping[str, Any] | None, strategy: DDPSyncStrategy | str | None) -> Self:
        """Return the arguments of a trainer, checked.

        Raises:
            TypeError: A setting is of the wrong kind.
            ValueError: A setting does not exist, or two contradict each other.
        """
        sections = _checked_sections(config)
        kinds: tuple[type[Settings], ...] = (DDPSettings, FSDPSettings, TensorParallelSettings, MeshSettings)
        settings: dict[str, Any] = {
            kind.section: kind.from_config(sections[kind.section]) for kind in kinds if kind.section in sections
        }
        if "tp" in sections and "tp" not in sections.get("mesh", {}):
            raise ValueError(
                "parallelism_config['tp'] requires the number of processes that share a layer: "
                "parallelism_config={'mesh': {'tp': 2}, 'tp': {...}}."
            )
        if "mesh" in sections:
            settings["fsdp"] = _checked_mesh(settings["mesh"], settings)
        return cls(
            **{"ddp": DDPSettings()} | settings,
            strategy=_checked_strategy(strategy),
        )

    @property
    def layer_size(self) -> int:
        """How many processes share a layer."""
        return 1 if self.mesh is None else self.mesh.tp

    @property
    def splits_model(self) -> bool:
        """Whether the model is split over processes, by FSDP2 or tensor parallelism."""
        return self.fsdp is not None or self.layer_size > 1

    def check_has_data(self, model: nn.Module) -> None:
        """Raise an error for a model on the meta device, unless it is sharded before it gets its data.

        Raises:
            ValueError: It has no data, and neither FSDP2 nor tensor parallelism splits it.
        """
        if not self.splits_model and is_on_meta(model):
            raise ValueError(
                "The model is on the meta device and has no weights. Build it on the CPU, or set "
                "parallelism_config={'fsdp': {}}: then each process allocates and initializes only its part."
            )

    def check_microbatch_size(self, size: int | str | None, model: nn.Module) -> None:
        """Raise an error for a microbatch size that several processes cannot determine.

        Raises:
            ValueError: It is ``"auto"``, and the model has layers that compute in all processes together, or is sharded
                by a torch that cannot continue after an error.
        """
        if size != "auto":
            return
        from torch.distributed.fsdp import FSDPModule  # noqa: PLC0415  (slow to import)

        is_stuck = self.fsdp is not None and "reset_iter_state" not in vars(FSDPModule)
        if is_stuck or self.layer_size > 1 or has_sync_batchnorm(model):
            raise ValueError(
                "device_train_microbatch_size='auto' requires trials in each process alone, which tensor parallelism, "
                "SyncBatchNorm, and FSDP2 of a torch without FSDPModule.reset_iter_state() do not support: set a "
                "number, or remove 'tp' or, with such a torch, 'fsdp' from parallelism_config."
            )


def _checked_sections(config: Mapping[str, Any] | None) -> Mapping[str, Any]:
    if config is None:
        return {}
    if not isinstance(config, Mapping):
        raise TypeError(f"parallelism_config must be None or a dictionary, got {type(config).__name__}.")
    given = {name: settings for name, settings in config.items() if settings is not None}
    if set(given) - {"fsdp", "ddp", "mesh", "tp"} or {"fsdp", "ddp"} <= set(given):
        raise ValueError(
            "parallelism_config must be None, {'ddp': {...}}, {'fsdp': {...}} or {'mesh': {...}} with 'fsdp' and 'tp', "
            f"got {', '.join(repr(name) for name in given)}."
        )
    for name, settings in given.items():
        if not isinstance(settings, Mapping):
            raise TypeError(f"parallelism_config[{name!r}] must be a dictionary, got {type(settings).__name__}.")
    return given


def _checked_mesh(mesh: MeshSettings, settings: Mapping[str, Any]) -> FSDPSettings | None:
    """Return the settings of FSDP2 with a mesh, and raise an error for those that contradict each other."""
    mesh.check_world_size()
    fsdp: FSDPSettings | None = settings.get("fsdp")
    if mesh.tp > 1 and "tp" not in settings:
        raise ValueError(
            f"parallelism_config['mesh'] has tp={mesh.tp}, but no plan of the layers to split. Pass "
            "parallelism_config['tp']={'plan': {'name of a layer': 'colwise'}}."
        )
    if fsdp is None and (mesh.shard > 1 or (mesh.tp > 1 and mesh.data_degree > 1)):
        fsdp = FSDPSettings()  # DDP does not average the gradients of layers that are split
    if fsdp is not None and settings.get("ddp", DDPSettings()) != DDPSettings():
        raise ValueError("parallelism_config contains settings of DDP, and the mesh requires FSDP2: remove 'ddp'.")
    return fsdp


def _checked_strategy(strategy: DDPSyncStrategy | str | None) -> DDPSyncStrategy:
    if strategy is None:
        return DDPSyncStrategy.SINGLE_AUTO_SYNC
    try:
        return DDPSyncStrategy(strategy.lower())
    except (AttributeError, ValueError):
        raise ValueError(f"ddp_sync_strategy must be one of {', '.join(DDPSyncStrategy)}, got {strategy!r}.") from None
