"""Initialization of models that are on the meta device, when they have been split over processes.

:func:`initialize` allocates this process's part of each tensor, and calls ``reset_parameters()`` of each module, inner
modules first. During the call the module has complete tensors in place of the parts, filled with NaN; the parts are
copied from them afterwards. A ``reset_parameters()`` that draws elsewhere raises an error at once, and tensors that
none has set raise one at the end.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from composer.core.saving.randomness import derive_seed
from composer.functional.dtensors import is_dtensor, local_parts, shard_like


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
    name: the weights are the same with any number of processes. No process has more than its part of the model and the
    complete tensors of one module. A module comes after its parts, whose tensors it may change, but not draw.

    Args:
        model: The model; **changed in place**.
        device: Where to allocate it.
        seed: The seed of the draws.

    Raises:
        TypeError: A module has tensors and no method ``reset_parameters``, or one that does not set all of them, gives
            one another shape, replaces a parameter of a part, draws for a part, or writes to a view of its tensors.
    """
    resets = {name: _method(name, module) for name, module in model.named_modules()}
    _allocate(model, device)
    shapes = {id(parameter): parameter.shape for parameter in model.parameters()}
    unset: dict[str, tuple[Tensor, int]] = {}
    # The last ones first: parts before the module that contains them, and of modules that share a weight, the first one
    # in the model's order initializes it.
    for name, module in reversed([*model.named_modules()]):
        if (reset := resets[name]) is not None:
            with torch.random.fork_rng([device] if device.type == "cuda" else []):
                torch.manual_seed(derive_seed(seed, name))
                unset |= _initialize_module(name, module, reset)
    replaced = [name for name, parameter in model.named_parameters() if shapes.get(id(parameter)) != parameter.shape]
    if replaced:
        raise _error(
            f"a reset_parameters() replaces the parameter {replaced[0]!r} of a part: set its values instead, as "
            "torch.nn.init does"
        )
    # An outer module may have set what an inner one left as it was.
    left = [name for name, (tensor, version) in unset.items() if _version(tensor) == version]
    if left:
        kind = type(model.get_submodule(left[0].rpartition(".")[0])).__name__
        raise _error(f"no reset_parameters() sets {', '.join(left)}: extend that of {kind}")


def _initialize_module(name: str, module: nn.Module, reset: Callable[[], object]) -> dict[str, tuple[Tensor, int]]:
    """Initialize the tensors of a module itself as complete ones; return those that were not set, by name."""
    shards = {**dict(module.named_parameters(recurse=False)), **dict(module.named_buffers(recurse=False))}
    complete = {key: _complete(tensor) for key, tensor in shards.items()}
    versions = {key: _version(tensor) for key, tensor in complete.items()}
    unset = {}
    _put(module, complete)
    try:
        with _OnlyOwnDraws(name, module, complete):
            reset()
        results = {key: getattr(module, key) for key in shards}
    finally:
        _put(module, shards)
    for key, result in results.items():
        tensor = shards[key]
        if result.shape != tensor.shape:
            raise _error(f"reset_parameters() of {name!r} gives {key!r} the shape {tuple(result.shape)}")
        local_parts([tensor])[0].copy_(local_parts([shard_like(result.detach(), tensor)])[0])
        tensor.requires_grad_(result.requires_grad)
        # A change of tensor.data has no version, but leaves no NaN.
        if _version(result) == versions[key] and (not result.is_floating_point() or bool(result.isnan().all())):
            unset[f"{name}.{key}" if name else key] = tensor, _version(tensor)
    return unset


class _OnlyOwnDraws(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Rejects draws into tensors of a module's parts: they would depend on the number of processes.

    Writing to a view of a sharded tensor is rejected, too, as it may change a copy.
    """

    def __init__(self, name: str, module: nn.Module, own: Mapping[str, Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        tensors = (*module.parameters(), *module.buffers())
        self._of_parts = {id(tensor) for tensor in tensors} - {id(tensor) for tensor in own.values()}
        self._sentence = (
            f"reset_parameters() of {name!r} ({type(module).__name__}) draws into tensors of the modules in it, or "
            "writes to views of them: do this in the reset_parameters() of these modules"
        )

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        del types
        written = args[0] if args and func._schema.is_mutable else None  # noqa: SLF001  (in place or not)
        is_of_part = id(written) in self._of_parts
        is_draw = torch.Tag.nondeterministic_seeded in func.tags
        # A DTensor that belongs to no module, as the module's own tensors are complete, is a view.
        if (is_of_part and is_draw) or (is_dtensor(written) and not is_of_part):
            raise _error(self._sentence)
        return func(*args, **(kwargs or {}))


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


def _version(tensor: Tensor) -> int:
    """Return how often a tensor was changed in place; torch has no public name for it."""
    return tensor._version  # noqa: SLF001


def _error(problem: str) -> TypeError:
    return TypeError(f"The model is on the meta device, and {problem}.")
