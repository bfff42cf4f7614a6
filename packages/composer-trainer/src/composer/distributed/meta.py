"""Initialization of models that are on the meta device, when they have been split over processes."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from composer.core.saving.randomness import derive_seed
from composer.functional.dtensors import local_parts, shard_like


def is_on_meta(model: nn.Module) -> bool:
    """Return whether a parameter or buffer of a model is on the meta device, and has no data yet.

    Example:
        >>> is_on_meta(nn.Linear(2, 2)), is_on_meta(nn.Linear(2, 2, device="meta"))
        (False, True)
    """
    return any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))


@torch.no_grad()
def initialize(model: nn.Module, device: torch.device, seed: int) -> None:
    """Allocate a sharded model that is on the meta device, and initialize it, one module after the other.

    Each module is initialized by its ``reset_parameters()``, with draws that depend only on the seed and the module's
    name: the weights are the same with any number of processes. During the call the module has complete tensors in
    place of this process's parts; those of the modules in it, which are initialized before, are split.

    Args:
        model: The model; **changed in place**.
        device: Where to allocate it.
        seed: The seed of the draws.

    Raises:
        TypeError: A module has tensors and no method ``reset_parameters``, or no method sets one of them.
    """
    resets = {name: _method(name, module) for name, module in model.named_modules()}
    _allocate(model, device)
    # The last ones first: parts before the module that contains them, and of modules that share a weight, the first one
    # in the model's order initializes it.
    for name, module in reversed([*model.named_modules()]):
        if (reset := resets[name]) is not None:
            with torch.random.fork_rng([device] if device.type == "cuda" else []):
                torch.manual_seed(derive_seed(seed, name))
                _initialize_module(module, reset)
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if local_parts([tensor])[0].isnan().any():
            kind = type(model.get_submodule(name.rpartition(".")[0])).__name__
            raise _error(f"no reset_parameters() sets {name}: extend that of {kind}")


def _initialize_module(module: nn.Module, reset: Callable[[], object]) -> None:
    """Initialize the tensors of a module itself as complete ones, and copy this process's parts of them."""
    shards = {**dict(module.named_parameters(recurse=False)), **dict(module.named_buffers(recurse=False))}
    _put(module, {key: _complete(tensor) for key, tensor in shards.items()})
    reset()
    results = {key: getattr(module, key).detach() for key in shards}
    _put(module, shards)
    for key, tensor in shards.items():
        local_parts([tensor])[0].copy_(local_parts([shard_like(results[key], tensor)])[0])


def _method(name: str, module: nn.Module) -> Callable[[], object] | None:
    """Return the method that initializes a module, if it has one."""
    reset: Callable[[], object] | None = getattr(module, "reset_parameters", getattr(module, "_reset_parameters", None))
    if callable(reset):
        return reset
    if [*module.parameters(recurse=False), *module.buffers(recurse=False)]:
        raise _error(
            f"its module {name!r} ({type(module).__name__}) has no method reset_parameters(), which sets its tensors: "
            "add one"
        )
    return None


def _allocate(model: nn.Module, device: torch.device) -> None:
    """Allocate a model in place, without new parameters for those that optimizers have or that modules share."""
    swaps = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        model.to_empty(device=device)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(swaps)


def _complete(tensor: Tensor) -> Tensor:
    """Return a tensor with the complete shape of another, of NaN where it can be, and a parameter for one."""
    complete = torch.zeros(tensor.shape, dtype=tensor.dtype, device=tensor.device)
    if complete.is_floating_point():
        complete.fill_(torch.nan)
    return nn.Parameter(complete, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else complete


def _put(module: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Give a module other tensors under the names of its own, in its dictionaries: a setter would register them."""
    for key, tensor in tensors.items():
        holder = "_parameters" if key in vars(module)["_parameters"] else "_buffers"
        vars(module)[holder][key] = tensor


def _error(problem: str) -> TypeError:
    return TypeError(f"The model is on the meta device, and {problem}.")
