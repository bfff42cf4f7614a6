"""Shard a model with FSDP2: each process stores a part of each weight, its gradient and the optimizers' state."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import warnings
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import attrs
import torch
from attrs.validators import in_, instance_of
from torch import Tensor, nn

from composer.core import Precision
from composer.distributed.mesh import Settings, split_layers
from composer.functional import update_params_in_optimizer
from composer.functional.dtensors import shard_like
from composer.functional.surgery.blocks import chosen_modules, is_one_of, repeated_blocks

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import MixedPrecisionPolicy
    from torch.optim import Optimizer

    from composer.distributed.mesh import MeshSettings, TensorParallelSettings

_LOW = {Precision.AMP_FP16: torch.float16, Precision.AMP_BF16: torch.bfloat16, Precision.AMP_FP8: torch.bfloat16}


def _to_classes(value: Any) -> Any:
    if isinstance(value, (str, type)):
        return (value,)
    return tuple(value) if isinstance(value, Sequence) else value


def _check_classes(_: object, __: object, value: Any) -> None:
    classes = value if isinstance(value, tuple) else ()
    if not isinstance(value, (bool, tuple)) or not all(isinstance(each, (str, type)) for each in classes):
        raise TypeError(f"auto_wrap must be True, False, or classes of modules or their names, got {value!r}.")


def _check_reshard(_: object, __: object, value: Any) -> None:
    if not isinstance(value, int):
        raise TypeError(f"reshard_after_forward must be True, False or a number of processes, got {value!r}.")


@attrs.frozen(eq=False, kw_only=True)
class FSDPSettings(Settings):
    """Settings of FSDP2; the keys of ``parallelism_config["fsdp"]``.

    Args:
        auto_wrap: Modules that are gathered one at a time, besides the model as a whole. ``True``: those for which the
            model's own ``fsdp_wrap_fn(module)`` returns true, or that it names in ``_no_split_modules``, as models of
            Transformers do; for other models the repeated blocks: modules with children, whose class occurs several
            times in lists and sequences of the model. ``False``: none. Or classes, or their names.
        reshard_after_forward: Whether weights are released after the forward pass and gathered again for the backward
            pass; a number reshards them to groups of that many processes.
        mixed_precision: With a 16-bit precision, ``"DEFAULT"`` gathers weights in 16 bits and reduces gradients in 32
            bits, ``"PURE"`` does both in 16 bits, ``"FULL"`` both in 32 bits.
        mp_policy: A torch policy that replaces ``mixed_precision``.
        cpu_offload: Whether weights, gradients and optimizer state are stored in host memory.

    Raises:
        TypeError: A setting is of the wrong kind.
        ValueError: A setting does not exist or is out of range.

    Example:
        >>> FSDPSettings.from_config({"reshard_after_forward": False}).reshard_after_forward
        False
    """

    section: ClassVar[str] = "fsdp"
    hint: ClassVar[str] = " Settings of FSDP version 1 do not exist in FSDP2: remove them."

    auto_wrap: bool | tuple[str | type[nn.Module], ...] = attrs.field(
        default=True, converter=_to_classes, validator=_check_classes
    )
    reshard_after_forward: bool | int = attrs.field(default=True, validator=_check_reshard)
    mixed_precision: str = attrs.field(default="DEFAULT", validator=in_(("DEFAULT", "PURE", "FULL")))
    mp_policy: MixedPrecisionPolicy | None = None
    cpu_offload: bool = attrs.field(default=False, validator=instance_of(bool))

    def policy(self, precision: Precision) -> MixedPrecisionPolicy:
        """Return the dtypes in which weights are gathered and gradients reduced."""
        from torch.distributed.fsdp import MixedPrecisionPolicy  # noqa: PLC0415

        if self.mp_policy is not None:
            return self.mp_policy
        low = _LOW.get(precision)
        if low is None or self.mixed_precision == "FULL":
            return MixedPrecisionPolicy()
        reduced = low if self.mixed_precision == "PURE" else torch.float32
        return MixedPrecisionPolicy(param_dtype=low, reduce_dtype=reduced)


def shard(
    model: nn.Module,
    optimizers: Sequence[Optimizer],
    settings: FSDPSettings | None,
    device: torch.device,
    precision: Precision = Precision.FP32,
    *,
    mesh: MeshSettings | None = None,
    tensor_parallel: TensorParallelSettings | None = None,
    compile_config: Mapping[str, Any] | None = None,
) -> list[str]:
    """Split a model over processes, in place, together with the parameters and state of its optimizers.

    First layers are split by tensor parallelism, then each block is compiled, then FSDP2 shards the blocks.

    Args:
        model: The model, equal in all processes; **changed in place**.
        optimizers: Optimizers of its parameters, with equal states; **changed in place**.
        settings: The settings of FSDP2; None without it.
        device: The device of the model.
        precision: The precision of the run.
        mesh: The arrangement of the processes; all in one dimension of FSDP2 if None.
        tensor_parallel: How layers are split over the dimension ``tp`` of the mesh.
        compile_config: Arguments of ``torch.nn.Module.compile`` for each block; None does not compile.

    Returns:
        The names of the modules that are gathered one at a time.

    Raises:
        ValueError: A layer or class that the settings name does not exist in the model.
    """
    device_mesh = None if mesh is None else mesh.to_device_mesh(device)
    # A weight that another part of the model shares, as a tied embedding, belongs to the model as a whole.
    uses = _uses(model)
    chosen = _blocks(model, True if settings is None else settings.auto_wrap)
    blocks = {name: block for name, block in chosen if _uses(block).items() <= uses.items()}
    _make_contiguous(model)
    before = list(model.named_parameters())
    if device_mesh is not None and tensor_parallel is not None:
        split_layers(model, device_mesh["tp"], tensor_parallel)
    if compile_config is not None:
        for block in blocks.values() or (model,):
            block.compile(**compile_config)
    if settings is not None:
        # Inner blocks before outer ones and the model last, because fully_shard leaves out what is sharded already.
        norms = model.modules() if settings.policy(precision).param_dtype else ()
        units = [one for one in norms if _has_statistics(one) and _uses(one).items() <= uses.items()]
        modules = [*dict.fromkeys([*units, *reversed(blocks.values()), model])]
        _shard_blocks(modules, settings, _data_mesh(device_mesh, device), precision)
    # Both ways to split a model replace its parameters by DTensors, and the optimizers have the former ones.
    update_params_in_optimizer(before, model.named_parameters(), optimizers)
    for optimizer in optimizers:
        _shard_state(optimizer)
    return list(blocks)


@contextlib.contextmanager
def sharded_alone(model: nn.Module) -> Iterator[None]:
    """Let a sharded model compute in this process without the others, as long as a context lasts.

    The parts of the other processes are replaced by copies of the own one: this takes the memory of a step, and values
    mean nothing. If the context ends by an exception, what was begun in it is discarded, with all gradients.
    """
    from torch.distributed import fsdp  # noqa: PLC0415
    from torch.distributed.fsdp._fully_shard import _fsdp_collectives  # noqa: PLC0415  (torch names the defaults here)

    modules: list[Any] = [module for module in model.modules() if isinstance(module, fsdp.FSDPModule)]
    for module in modules:
        module.set_custom_all_gather(_OwnPart())
        module.set_custom_reduce_scatter(_OwnPart())
    try:
        yield
    except BaseException:
        modules[0].reset_iter_state()
        raise
    finally:
        for module in modules:
            module.set_custom_all_gather(_fsdp_collectives.DefaultAllGather())
            module.set_custom_reduce_scatter(_fsdp_collectives.DefaultReduceScatter())


class _OwnPart:
    """In place of an all-gather or a reduce-scatter, the result for processes whose parts are all equal."""

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(math.prod(size), dtype=dtype, device=device)

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, **_: object) -> None:
        own = input_tensor[: output_tensor.numel()]
        for part in output_tensor.view(-1, len(own)):
            if part.data_ptr() != own.data_ptr():  # an all-gather has its input in the output
                part.copy_(own)


def _data_mesh(mesh: DeviceMesh | None, device: torch.device) -> DeviceMesh:
    """Return the mesh over which FSDP2 shards: one or two dimensions, without that of tensor parallelism."""
    from torch.distributed.device_mesh import init_device_mesh  # noqa: PLC0415

    if mesh is None:
        return init_device_mesh(device.type, (torch.distributed.get_world_size(),))
    return mesh["replicate", "shard"] if "replicate" in (mesh.mesh_dim_names or ()) else mesh["shard"]


def _shard_blocks(modules: Sequence[nn.Module], settings: FSDPSettings, mesh: DeviceMesh, precision: Precision) -> None:
    from torch.distributed import fsdp  # noqa: PLC0415

    policy = settings.policy(precision)
    offload = fsdp.CPUOffloadPolicy(mesh.device_type == "cuda") if settings.cpu_offload else fsdp.OffloadPolicy()
    if mesh.device_type == "cpu":
        # With torch 2.7, gloo sums float32 and bfloat16 where FSDP2 requests averages; float64 is divided by FSDP2.
        policy = dataclasses.replace(policy, reduce_dtype=torch.float64)
    for module in modules:
        fsdp.fully_shard(
            module,
            mesh=mesh,
            # Layers such as BatchNorm need weights of the dtype of their statistics, which are not gathered.
            mp_policy=dataclasses.replace(policy, param_dtype=None) if _has_statistics(module) else policy,
            offload_policy=offload,
            reshard_after_forward=settings.reshard_after_forward,
        )
    if callable(getattr(modules[-1], "generate", None)):  # it calls parts of the model, without the model's forward
        fsdp.register_fsdp_forward_method(modules[-1], "generate")


def _has_statistics(module: nn.Module) -> bool:
    """Return whether a module has parameters beside running statistics, as BatchNorm does."""
    return getattr(module, "running_mean", None) is not None and any(True for _ in module.parameters(recurse=False))


def _make_contiguous(model: nn.Module) -> None:
    others = [parameter for parameter in model.parameters() if not parameter.is_contiguous()]
    for parameter in others:
        parameter.data = parameter.data.contiguous()
    if others:
        warnings.warn(
            f"{len(others)} weights had another memory layout, such as that of ChannelsLast, and FSDP2 shards "
            "only contiguous weights: they are now contiguous.",
            stacklevel=3,
        )


def _shard_state(optimizer: Optimizer) -> None:
    """Shard optimizer state with the shape of its weight like the weight; other state is unchanged.

    State with a value for each row or column, such as the factors of a second moment, is replicated: as a DTensor, as
    the optimizer computes with it and the weight.
    """
    from torch.distributed.tensor import DTensor, Replicate  # noqa: PLC0415

    for parameter, state in optimizer.state.items():
        if not isinstance(parameter, DTensor):
            continue
        factors = [
            [*parameter.shape[:dimension], *kept, *parameter.shape[dimension + 1 :]]
            for dimension in range(parameter.ndim)
            for kept in ([], [1])
        ]
        for name, value in state.items():
            if not isinstance(value, Tensor) or isinstance(value, DTensor):
                continue
            if value.shape == parameter.shape:
                # Not by distribute_tensor, which does not support weights that tensor parallelism and FSDP2 split.
                state[name] = shard_like(value, parameter)
            elif value.numel() > 1 and [*value.shape] in factors:
                mesh = parameter.device_mesh
                state[name] = DTensor.from_local(value, mesh, [Replicate()] * mesh.ndim, run_check=False)


def _blocks(model: nn.Module, auto_wrap: bool | tuple[str | type[nn.Module], ...]) -> Iterator[tuple[str, nn.Module]]:
    if auto_wrap is False:
        return
    if isinstance(auto_wrap, tuple):
        found = dict(chosen_modules(model, is_one_of(auto_wrap)))
        missing = [each for each in auto_wrap if not any(map(is_one_of((each,)), found.values()))]
        if missing:
            raise ValueError(f"auto_wrap contains classes of which the model has no module: {missing}.")
        yield from found.items()
        return
    own_choice = getattr(model, "fsdp_wrap_fn", None)
    yield from chosen_modules(model, own_choice) if callable(own_choice) else repeated_blocks(model)


def _uses(module: nn.Module) -> Counter[nn.Parameter]:
    """Return how often a module and its parts name each parameter."""
    return Counter(parameter for _, parameter in module.named_parameters(remove_duplicate=False))
