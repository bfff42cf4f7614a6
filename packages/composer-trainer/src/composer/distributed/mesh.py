"""Arrange processes in a mesh of data parallelism and tensor parallelism, and split layers over processes."""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping
from functools import lru_cache
from typing import TYPE_CHECKING, Any, ClassVar, Self

import attrs
import torch
from attrs.validators import instance_of
from torch import nn

from composer.core.checks import whole_number_from
from composer.distributed.environment import get_world_size

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor.parallel import ParallelStyle

_STYLES = {"colwise": "ColwiseParallel", "rowwise": "RowwiseParallel"}
_DEGREE = whole_number_from(1, meaning="It is a number of processes.")


class Settings:
    """Settings in one section of ``parallelism_config``."""

    section: ClassVar[str]
    hint: ClassVar[str] = ""

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Self:
        """Return the settings of a dictionary.

        Raises:
            ValueError: The dictionary contains a key that is not a setting.
        """
        known = [field.name for field in attrs.fields(cls)]  # type: ignore[arg-type]  # subclasses are attrs classes
        unknown = sorted(set(config) - set(known))
        if unknown:
            raise ValueError(
                f"parallelism_config[{cls.section!r}] takes {', '.join(known)}, got {', '.join(map(repr, unknown))}."
                f"{cls.hint}"
            )
        return cls(**config)


@attrs.frozen(kw_only=True)
class MeshSettings(Settings):
    """The numbers of processes in each dimension of the mesh; the keys of ``parallelism_config["mesh"]``.

    Their product is the number of processes. Processes with consecutive ranks are in one group of tensor parallelism.

    Args:
        replicate: The number of replicas of the complete model.
        shard: The number of processes over which FSDP2 shards each replica.
        tp: The number of processes that compute the layers of ``parallelism_config["tp"]`` together. They get the same
            samples and random numbers.

    Raises:
        TypeError: A value is no whole number.
        ValueError: A value is below 1, or a setting does not exist.

    Example:
        >>> MeshSettings.from_config({"shard": 2, "tp": 4}).data_degree
        2
    """

    section: ClassVar[str] = "mesh"

    replicate: int = attrs.field(default=1, validator=_DEGREE)
    shard: int = attrs.field(default=1, validator=_DEGREE)
    tp: int = attrs.field(default=1, validator=_DEGREE)

    @property
    def data_degree(self) -> int:
        """The number of processes, or groups of them, that train on different samples."""
        return self.replicate * self.shard

    def check_world_size(self) -> None:
        """Raise a ValueError if the product of the degrees is not the number of processes."""
        degrees = f"replicate={self.replicate}, shard={self.shard} and tp={self.tp}"
        if self.data_degree * self.tp != get_world_size():
            raise ValueError(
                f"parallelism_config['mesh'] with {degrees} is for {self.data_degree * self.tp} processes, and there "
                f"{'is' if get_world_size() == 1 else 'are'} {get_world_size()}: start as many with torchrun, or "
                "change a degree."
            )

    def to_device_mesh(self, device: torch.device) -> DeviceMesh:
        """Return the mesh with the dimensions ``replicate`` (if above 1), ``shard`` and ``tp``."""
        # Tensor parallelism last: its processes, which communicate in each layer, then have consecutive ranks.
        sizes = {"replicate": self.replicate, "shard": self.shard, "tp": self.tp}
        if self.replicate == 1:
            del sizes["replicate"]
        return _new_mesh(torch.distributed.group.WORLD, device.type, tuple(sizes.values()), tuple(sizes))


# The threads of each group of gloo wake up a hundred times a second, so the trainings of a program share their groups.
@lru_cache(maxsize=8)
def _new_mesh(world: object, device: str, sizes: tuple[int, ...], names: tuple[str, ...]) -> DeviceMesh:
    from torch.distributed.device_mesh import init_device_mesh  # noqa: PLC0415

    del world  # a program may replace the default group, to which the others belong
    return init_device_mesh(device, sizes, mesh_dim_names=names)


@attrs.frozen(kw_only=True)
class TensorParallelSettings(Settings):
    """Settings of tensor parallelism; the keys of ``parallelism_config["tp"]``.

    Args:
        plan: How layers are split, by their names as in ``model.named_modules()``, with ``*`` for any characters:
            ``"colwise"`` by outputs, ``"rowwise"`` by inputs, or a style of ``torch.distributed.tensor.parallel``.

    Raises:
        TypeError: The plan is no dictionary.
        ValueError: A setting does not exist.

    Example:
        >>> TensorParallelSettings.from_config({"plan": {"blocks.*.in": "colwise", "blocks.*.out": "rowwise"}}).plan
        {'blocks.*.in': 'colwise', 'blocks.*.out': 'rowwise'}
    """

    section: ClassVar[str] = "tp"

    plan: Mapping[str, ParallelStyle | str] = attrs.field(validator=instance_of(Mapping))  # type: ignore[type-abstract]


def split_layers(model: nn.Module, mesh: DeviceMesh, settings: TensorParallelSettings) -> None:
    """Split layers over the processes of a one-dimensional mesh, in place; their parameters become DTensors.

    Raises:
        ValueError: As from :func:`layer_styles`.
    """
    from torch.distributed.tensor import parallel  # noqa: PLC0415

    # One layer at a time: with a plan for nested modules of equal names ("0.0"), torch 2.7 also splits others.
    for name, style in layer_styles(model, settings).items():
        parallel.parallelize_module(model.get_submodule(name), mesh, style)


def layer_styles(model: nn.Module, settings: TensorParallelSettings) -> dict[str, ParallelStyle]:
    """Return the styles of torch by which the layers that a plan names are split.

    Raises:
        ValueError: A name of the plan is that of no module, or a style does not exist.
    """
    from torch.distributed.tensor import parallel  # noqa: PLC0415

    names = [name for name, _ in model.named_modules() if name]
    plan: dict[str, ParallelStyle] = {}
    for pattern, style in settings.plan.items():
        chosen = fnmatch.filter(names, pattern)
        if not chosen:
            raise ValueError(
                f"parallelism_config['tp']['plan'] contains {pattern!r}, and no module of the model has such a name. "
                f"Its modules are {', '.join(names[:8])}{', …' if len(names) > 8 else ''}."
            )
        if isinstance(style, str) and style not in _STYLES:
            raise ValueError(
                f"parallelism_config['tp']['plan'][{pattern!r}] must be {' or '.join(map(repr, _STYLES))} or a "
                f"ParallelStyle of torch, got {style!r}."
            )
        plan |= {name: getattr(parallel, _STYLES[style])() if isinstance(style, str) else style for name in chosen}
    return plan
