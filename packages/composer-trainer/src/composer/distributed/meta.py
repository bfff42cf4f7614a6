"""Initialization of models that are on the meta device, when they have been split over processes."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from composer.distributed.collectives import all_gather_object
from composer.functional.dtensors import is_dtensor, local_parts, shard_like

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping

__all__ = ["initialize", "is_on_meta"]

# Their results share the memory of the tensor, which replaces them, so that what is written into them is sharded.
_ALIASES = (Tensor.data.__get__, Tensor.detach)  # type: ignore[attr-defined]
# What they return or set is the same for a shard, whose values they do not need.
_PROPERTIES = [Tensor.shape, Tensor.dtype, Tensor.device, Tensor.ndim, Tensor.is_meta, Tensor.requires_grad]
_OF_SHARDS = {
    *(one.__get__ for one in _PROPERTIES),  # type: ignore[attr-defined]
    Tensor.requires_grad.__set__,  # type: ignore[attr-defined]
    *(Tensor.requires_grad_, Tensor.size, Tensor.dim, Tensor.numel, Tensor.__len__, Tensor.is_floating_point),
}
_PLAIN = (bool, int, float, complex, str, torch.dtype, torch.device, type(None))


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
    name: the weights are the same with any number of processes. A method may set tensors of the module's parts, too,
    which have been initialized before. No process has more than its part of the model, the complete tensors of one
    module, and one of its parts, or those of which the method uses views such as ``weight[0]``.

    Args:
        model: The model; **changed in place**.
        device: Where to allocate it.
        seed: The seed of the draws.

    Raises:
        TypeError: A module has tensors and no method ``reset_parameters``, or one that does not set all of them, gives
            one another shape, or replaces a parameter of a part.
    """
    resets = _methods(model)
    _allocate(model, device)
    # Of modules that share a weight, the first in the model's order initializes it.
    order = {name: [*_own_tensors(model.get_submodule(name)).values()] for name in resets}
    owned = {id(tensor): name for name, tensors in reversed(order.items()) for tensor in tensors}
    unset: dict[str, Tensor] = {}
    known = {id(parameter): parameter for parameter in model.parameters()}
    for name in _inner_first(model, resets, owned):
        module = model.get_submodule(name)
        own = {key: tensor for key, tensor in _own_tensors(module).items() if owned[id(tensor)] == name}
        complete = _reset(module, resets[name], f"{seed} {name}", device, 0)
        unclear = [key for key in own if _is_filled(complete[key])]
        again = _reset(module, resets[name], f"{seed} {name}", device, 1) if unclear else {}
        for key, tensor in own.items():
            _assign(tensor, complete[key])
            tensor.requires_grad_(complete[key].requires_grad)
        for key in unclear:
            if not torch.equal(complete[key].nan_to_num(), again[key].nan_to_num()):
                unset[f"{name}.{key}"] = own[key]
        replaced = [key for key, parameter in module.named_parameters() if id(parameter) not in known]
        if replaced:
            raise TypeError(
                f"The model is on the meta device, and reset_parameters() of {name!r} ({type(module).__name__}) "
                f"replaces the parameter {replaced[0]!r} of a part. Set its values instead, as torch.nn.init does."
            )
    # An outer module may have set what an inner one left as it was.
    left = [key for key, tensor in unset.items() if _is_filled(local_parts([tensor])[0])]
    left = sorted({key for of_rank in all_gather_object(left) for key in of_rank})
    if left:
        kind = type(model.get_submodule(left[0].rpartition(".")[0])).__name__
        raise TypeError(
            f"The model is on the meta device, and no reset_parameters() sets {', '.join(left)}: extend that of {kind}."
        )


def _methods(model: nn.Module) -> dict[str, Callable[[nn.Module], object]]:
    """Return the methods that initialize modules, by the modules' names."""
    resets: dict[str, Callable[[nn.Module], object]] = {}
    for name, module in model.named_modules():
        reset = getattr(type(module), "reset_parameters", getattr(type(module), "_reset_parameters", None))
        if callable(reset):
            resets[name] = reset
        elif _own_tensors(module):
            raise TypeError(
                f"The model is on the meta device, and its module {name!r} ({type(module).__name__}) has no method "
                "reset_parameters(), which sets its parameters and buffers. Add one."
            )
    return resets


def _inner_first(model: nn.Module, names: Iterable[str], owned: Mapping[int, str]) -> list[str]:
    """Return names of modules so that each comes after its parts, and after those that initialize its parts' tensors.

    Of modules that depend on each other, as with a weight of their own that a part shares, the outer one is the last.

    Args:
        model: The model.
        names: The names.
        owned: The name of the module that initializes a tensor, by the tensor's id.
    """
    name_of = {id(model.get_submodule(name)): name for name in names}
    ordered: dict[str, None] = {}
    visited: set[str] = set()

    def visit(name: str) -> None:
        if name in visited:
            return
        visited.add(name)
        module = model.get_submodule(name)
        for part in reversed([*module.modules()][1:]):
            if id(part) in name_of:
                visit(name_of[id(part)])
        for tensor in (*module.parameters(), *module.buffers()):
            visit(owned[id(tensor)])
        ordered[name] = None

    for name in reversed([*names]):
        visit(name)
    return [*ordered]


def _allocate(model: nn.Module, device: torch.device) -> None:
    """Allocate a model in place, without new parameters for those that optimizers have or that modules share."""
    swaps = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        model.to_empty(device=device)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(swaps)


def _reset(
    module: nn.Module, reset: Callable[[nn.Module], object], seed: str, device: torch.device, fill: int
) -> dict[str, Tensor]:
    """Return the complete tensors of a module as its method sets them, with draws that depend only on the seed.

    What it does not set differs between the values 0 and 1 of ``fill``. Its parts get what it sets in them with 0 only.
    """
    complete = object.__new__(type(module))  # copy() would call __init__ (FSDPModule)
    vars(complete).update(vars(module))
    for holder in ("_parameters", "_buffers"):
        vars(complete)[holder] = {key: _complete(tensor, fill) for key, tensor in vars(module)[holder].items()}
    own = _own_tensors(complete)
    given = {id(tensor): own[key] for key, tensor in _own_tensors(module).items()}
    parts = _CompleteParts(module, given, writes=fill == 0)
    digest = hashlib.sha256(seed.encode()).digest()
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.manual_seed(int.from_bytes(digest[:7], "little"))
        with parts:
            reset(complete)
        parts.release(given)
    if fill == 0:
        changed = {key: value for key, value in vars(complete).items() if not isinstance(value, Tensor)}
        vars(module).update(changed | {key: vars(module)[key] for key in ("_parameters", "_buffers")})
    return _own_tensors(complete)


class _CompleteParts(TorchFunctionMode):
    """Passes complete tensors to functions of torch instead of the shards of a module, and shards what they write.

    Draws into a shard would depend on the number of processes. A complete tensor is released when a function gets
    another one, unless there may be views of it.

    Args:
        module: The module whose tensors are replaced, with those of its parts.
        given: Complete tensors by the ids of the tensors that they replace, which are not written.
        writes: Whether the other tensors get their new values.
    """

    def __init__(self, module: nn.Module, given: Mapping[int, Tensor], *, writes: bool) -> None:
        super().__init__()
        self._tensors = {id(tensor): tensor for tensor in (*module.parameters(), *module.buffers())}
        self._complete, self._viewed, self._writes = dict(given), set(given), writes

    def __torch_function__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        leaves, spec = tree_flatten((args, kwargs or {}))
        used = [id(leaf) for leaf in leaves if id(leaf) in self._tensors]
        if not used or func in _OF_SHARDS:
            return func(*args, **(kwargs or {}))
        if func in _ALIASES:
            return leaves[0]
        self.release({*self._viewed, *used})
        for key in used:
            if key not in self._complete:
                tensor = self._tensors[key]
                complete = tensor.full_tensor() if is_dtensor(tensor) else tensor
                self._complete[key] = complete.detach().clone().requires_grad_(tensor.requires_grad)
        args, kwargs = tree_unflatten([self._complete[id(one)] if id(one) in used else one for one in leaves], spec)
        return tree_map(lambda result: self._returned(result, used), func(*args, **kwargs))

    def _returned(self, result: Any, used: list[int]) -> Any:
        for key in used:
            complete = self._complete[key]
            if result is complete:
                return self._tensors[key]
            if isinstance(result, Tensor):
                may_be_view = result.untyped_storage().data_ptr() == complete.untyped_storage().data_ptr()
            else:
                may_be_view = not isinstance(result, _PLAIN)  # such as an array of numpy
            if may_be_view:
                self._viewed.add(key)
        return result

    def release(self, keep: Collection[int]) -> None:
        """Write and release the complete tensors except some."""
        for key in [key for key in self._complete if key not in keep]:
            complete = self._complete.pop(key)
            if self._writes:
                _assign(self._tensors[key], complete)


def _assign(tensor: Tensor, complete: Tensor) -> None:
    """Copy a complete tensor, or this process's part of it, into a tensor.

    Raises:
        TypeError: It has another shape.
    """
    if complete.shape != tensor.shape:
        raise TypeError(
            f"The model is on the meta device, and a reset_parameters() replaces the data of a tensor of shape "
            f"{tuple(tensor.shape)} by data of shape {tuple(complete.shape)}."
        )
    if is_dtensor(complete) and not is_dtensor(tensor):
        complete = complete.full_tensor()
    source = shard_like(complete.detach(), tensor)
    local_parts([tensor])[0].copy_(local_parts([source])[0])


def _complete(tensor: Tensor | None, fill: int) -> Tensor | None:
    """Return a tensor with the complete shape of another, filled with one of two values, and a parameter for one."""
    if tensor is None:
        return None
    complete = torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device).fill_(_fills(tensor.dtype)[fill])
    return nn.Parameter(complete, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else complete


def _fills(dtype: torch.dtype) -> tuple[Any, Any]:
    if dtype is torch.bool:
        return False, True
    if dtype.is_floating_point or dtype.is_complex:
        return torch.nan, 1.0
    return torch.iinfo(dtype).max, 0


def _is_filled(tensor: Tensor) -> bool:
    """Return whether a part of a tensor has the first of the two values, which waits for its device."""
    fill = _fills(tensor.dtype)[0]
    return bool((tensor != tensor if fill != fill else tensor == fill).any())  # noqa: PLR0124  (NaN)


def _own_tensors(module: nn.Module) -> dict[str, Tensor]:
    return {**dict(module.named_parameters(recurse=False)), **dict(module.named_buffers(recurse=False))}
