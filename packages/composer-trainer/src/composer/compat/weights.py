"""Composer's functions for the states of models and optimizers as dictionaries."""

from __future__ import annotations

import contextlib
import fnmatch
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict as states
from torch.optim import Optimizer
from torch.utils._pytree import tree_map_only

from composer.compat.replacements import STR_TO_DTYPE, ensure_tuple
from composer.compat.stores import get_file
from composer.distributed import get_global_rank
from composer.distributed.collectives import failing_in_all_processes
from composer.functional.dtensors import is_sharded


def fsdp_state_dict_type_context(module: nn.Module, state_dict_type: str = "full") -> contextlib.nullcontext[None]:
    """Return a context without effect: ``state_dict`` of a model that FSDP2 shards has distributed tensors.

    Example:
        >>> with fsdp_state_dict_type_context(nn.Linear(2, 2)):
        ...     pass
    """
    del module, state_dict_type
    return contextlib.nullcontext()


def get_fsdp_full_optim_state_dict(model: nn.Module, optim: Optimizer, rank0_only: object = True) -> dict[str, Any]:
    """Return the state of an optimizer with complete tensors, by the names of parameters if the model is sharded.

    Args:
        model: The model.
        optim: The optimizer.
        rank0_only: Whether other processes than the first get nothing; False, ``"sharded"`` or ``"local"``: all.

    Example:
        >>> model = nn.Linear(2, 2)
        >>> sorted(get_fsdp_full_optim_state_dict(model, torch.optim.SGD(model.parameters(), lr=0.1)))
        ['param_groups', 'state']
    """
    state = get_optim_state_dict(model, optim)
    return {} if rank0_only in {True, "full"} and get_global_rank() else state


def get_model_state_dict(
    model: nn.Module,
    sharded_state_dict: bool = False,
    precision: str | torch.dtype = "fp32",
    include_keys: str | Sequence[str] | None = None,
    ignore_keys: str | Sequence[str] | None = None,
    cpu_offload: bool | None = None,
) -> dict[str, Any]:
    """Return the weights of a model.

    Args:
        model: The model.
        sharded_state_dict: Whether tensors of a sharded model remain distributed.
        precision: The dtype of all tensors.
        include_keys: Patterns of the names of the weights to return.
        ignore_keys: Patterns of those not to return.
        cpu_offload: Whether they are returned on the CPU; None if they are complete.

    Raises:
        ValueError: Both kinds of patterns are given.

    Example:
        >>> get_model_state_dict(nn.Linear(1, 1), precision="bf16", include_keys="b*")["bias"].dtype
        torch.bfloat16
    """
    if include_keys is not None and ignore_keys is not None:
        raise ValueError(f"include_keys={include_keys!r} and ignore_keys={ignore_keys!r} exclude each other: give one.")
    options = _options(sharded_state_dict=sharded_state_dict, cpu_offload=cpu_offload)
    found = states.get_model_state_dict(model, options=options) if is_sharded(model) else model.state_dict()
    patterns, is_wanted = ensure_tuple(include_keys or ignore_keys), ignore_keys is None
    matching = {name for name in found if any(fnmatch.fnmatchcase(name, one) for one in patterns)}
    weights = {name: one for name, one in found.items() if not patterns or (name in matching) is is_wanted}
    return _with_dtype(weights, precision)


def get_optim_state_dict(
    model: nn.Module,
    optimizer: Optimizer,
    sharded_state_dict: bool = False,
    precision: str | torch.dtype = "fp32",
    cpu_offload: bool | None = None,
) -> dict[str, Any]:
    """Return the state of an optimizer; the arguments are those of :func:`get_model_state_dict`.

    Example:
        >>> model = nn.Linear(1, 1)
        >>> get_optim_state_dict(model, torch.optim.SGD(model.parameters(), lr=0.1))["state"]
        {}
    """
    if not is_sharded(model):
        return _with_dtype(optimizer.state_dict(), precision)
    options = _options(sharded_state_dict=sharded_state_dict, cpu_offload=cpu_offload)
    return _with_dtype(dict(states.get_optimizer_state_dict(model, optimizer, options=options)), precision)


def _options(*, sharded_state_dict: bool, cpu_offload: bool | None) -> states.StateDictOptions:
    offload = not sharded_state_dict if cpu_offload is None else cpu_offload
    return states.StateDictOptions(full_state_dict=not sharded_state_dict, cpu_offload=offload)


def _with_dtype(state: dict[str, Any], precision: str | torch.dtype) -> dict[str, Any]:
    dtype = STR_TO_DTYPE[precision] if isinstance(precision, str) else precision
    converted: dict[str, Any] = tree_map_only(Tensor, lambda tensor: tensor.to(dtype), dict(state))
    return converted


def download_monolithic_checkpoint(source_uri: str, destination_path: str, global_rank_zero_only: bool = True) -> None:
    """Download a file, in the first process or in all.

    Example:
        >>> download_monolithic_checkpoint("no/such/file", "weights.pt")
        Traceback (most recent call last):
        FileNotFoundError: no/such/file does not exist.
    """
    with failing_in_all_processes("Downloading a checkpoint"):
        if not (global_rank_zero_only and get_global_rank()):
            get_file(source_uri, destination_path)


def glob_filter(exclude_globs: Sequence[str]) -> Callable[[dict[str, Any]], None]:
    """Return a function that removes from nested dictionaries and lists what matches one of the patterns.

    Example:
        >>> saved = {"state": {"model": {"a.weight": 1, "a.bias": 2}, "list": [3, 4]}}
        >>> glob_filter(["state/model/*.bias", "state/list/0"])(saved)
        >>> saved
        {'state': {'model': {'a.weight': 1}, 'list': [4]}}
    """

    def remove(items: Any, path: str = "") -> None:
        is_list = isinstance(items, list)
        for key in reversed(range(len(items)) if is_list else list(items)):
            inner = f"{path}{key}"
            if any(fnmatch.fnmatchcase(inner, pattern) for pattern in exclude_globs):
                del items[key]
            elif isinstance(items[key], dict | list):
                remove(items[key], f"{inner}/")

    return remove
