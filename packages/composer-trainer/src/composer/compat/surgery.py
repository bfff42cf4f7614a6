"""Functions of MosaicML Composer that change models, for programs that import them under their former names."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib.util import find_spec
from operator import attrgetter
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from composer.compat.devices import get_device
from composer.compat.replacements import ensure_tuple
from composer.core import Precision
from composer.distributed import FSDPSettings, MeshSettings, TensorParallelSettings, get_world_size
from composer.distributed.sharding import shard
from composer.foreign.fsdp1 import from_fsdp1
from composer.functional import BlurMaxPool2d, alibi_slopes

AlibiReplacementFunction: TypeAlias = Callable[[nn.Module, int, int], nn.Module | None]
"""A function ``f(module, index, max_sequence_length)`` that changes a module for ALiBi."""

PEFT_INSTALLED = find_spec("peft") is not None
"""Whether PEFT is installed."""


def register_alibi(module: nn.Module, n_heads: int, max_token_length: int, causal: bool) -> nn.Module:
    """Add the biases of ALiBi to an attention as its buffer ``alibi``, and return the attention.

    Args:
        module: The attention; **changed in place**.
        n_heads: The number of heads.
        max_token_length: The length of the sequences.
        causal: Whether the attention masks later tokens. The buffer then has the shape ``(heads, 1, length)``, as the
            softmax ignores what all keys of a query have in common; otherwise ``(1, heads, length, length)``.

    Example:
        >>> register_alibi(torch.nn.Linear(2, 2), n_heads=2, max_token_length=3, causal=True).alibi[0]
        tensor([[0.0000, 0.0625, 0.1250]])
    """
    slopes, places = alibi_slopes(n_heads)[:, None, None], torch.arange(max_token_length)
    bias = slopes * places if causal else (slopes * -(places - places[:, None]).abs())[None]
    module.register_buffer("alibi", bias.to(next(module.parameters()).device))
    return module


def zero_and_freeze_expand_position_embeddings(
    module: nn.Module, max_sequence_length: int, position_embedding_attribute: str
) -> None:
    """Replace the weights of a position embedding by zeros that are not trained.

    Args:
        module: The model; **changed in place**.
        max_sequence_length: The new number of positions.
        position_embedding_attribute: The path of the embedding.

    Raises:
        AttributeError: There is no such embedding.

    Example:
        >>> model = torch.nn.Sequential(torch.nn.Embedding(2, 3))
        >>> zero_and_freeze_expand_position_embeddings(model, 8, "0")
        >>> model[0].weight.shape, model[0].weight.requires_grad
        (torch.Size([8, 3]), False)
    """
    embedding = attrgetter(position_embedding_attribute)(module)
    weight = embedding.weight.new_zeros(max_sequence_length, embedding.weight.shape[1])
    embedding.weight = nn.Parameter(weight, requires_grad=False)


def blurmax_pool2d(
    input: Tensor,
    kernel_size: int | tuple[int, ...] | None = None,
    stride: int | tuple[int, ...] = 2,
    padding: int | tuple[int, ...] = 0,
    dilation: int | tuple[int, ...] = 1,
    ceil_mode: bool = False,
    filter: Tensor | None = None,
) -> Tensor:
    """Return what :class:`composer.functional.BlurMaxPool2d` returns for images of shape ``(N, C, H, W)``.

    Raises:
        ValueError: ``filter`` is given.

    Example:
        >>> blurmax_pool2d(torch.ones(1, 2, 8, 8), 3, 2, 1).shape
        torch.Size([1, 2, 4, 4])
    """
    if filter is not None:
        raise ValueError("filter must be None: other filters than the usual one of 3x3 pixels are not available.")
    layer = BlurMaxPool2d(2 if kernel_size is None else kernel_size, stride, padding, dilation, ceil_mode)
    pooled: Tensor = layer.to(input.device, input.dtype)(input)
    return pooled


def prepare_ddp_module(module: nn.Module, find_unused_parameters: bool) -> nn.Module:
    """Return a module in ``DistributedDataParallel`` if there are several processes; otherwise the module.

    Example:
        >>> prepare_ddp_module(torch.nn.Linear(2, 2), find_unused_parameters=False)
        Linear(in_features=2, out_features=2, bias=True)
    """
    if get_world_size() == 1 or not any(parameter.requires_grad for parameter in module.parameters()):
        return module
    return nn.parallel.DistributedDataParallel(module, find_unused_parameters=find_unused_parameters)


def prepare_fsdp_module(
    model: nn.Module,
    optimizers: Optimizer | tuple[Optimizer, ...] | list[Optimizer] | None,
    fsdp_config: Mapping[str, Any],
    precision: Precision | str | None = None,
    device: torch.device | str | None = None,
    auto_microbatching: bool = False,
    te_rng_seed: int = 1234,
) -> tuple[list[Any], dict[str, Any]]:
    """Shard a model with FSDP2, together with its optimizers; the process group must exist.

    Args:
        model: The model; **changed in place**.
        optimizers: Optimizers of the model; **changed in place**.
        fsdp_config: The settings, such as :class:`~composer.compat.replacements.FSDPConfig`.
        precision: The precision of the computation.
        device: The device of the model; the best one if None.
        auto_microbatching: Ignored.
        te_rng_seed: Ignored.

    Returns:
        An empty list and dictionary, in place of Composer's hooks.

    Example:
        >>> from composer.compat.replacements import FSDPConfig
        >>> prepare_fsdp_module(model, None, FSDPConfig())  # doctest: +SKIP
        ([], {})
    """
    del auto_microbatching, te_rng_seed
    settings, mesh = from_fsdp1(fsdp_config)
    chosen = Precision(precision or Precision.FP32)
    made = MeshSettings.from_config(mesh) if mesh else None
    shard(model, ensure_tuple(optimizers), FSDPSettings.from_config(settings), get_device(device), chosen, mesh=made)
    return [], {}


def prepare_tp_module(
    model: nn.Module, optimizers: Optimizer | tuple[Optimizer, ...] | list[Optimizer] | None, tp_config: Any
) -> None:
    """Split the layers of a model over processes, together with its optimizers; the process group must exist.

    Args:
        model: The model; **changed in place**.
        optimizers: Optimizers of the model; **changed in place**.
        tp_config: A :class:`~composer.compat.replacements.TPConfig`.

    Example:
        >>> from composer.compat.replacements import TPConfig
        >>> prepare_tp_module(model, None, TPConfig(None, 2, {"*.in": "colwise"}))  # doctest: +SKIP
    """
    degree = tp_config["tensor_parallel_degree"]
    mesh = MeshSettings(tp=degree, replicate=max(get_world_size() // degree, 1))
    plan = TensorParallelSettings.from_config({"plan": tp_config["layer_plan"]})
    shard(model, ensure_tuple(optimizers), None, get_device(), mesh=mesh, tensor_parallel=plan)
