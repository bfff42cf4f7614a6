"""The one walk over a model that replaces modules, and what goes with it: optimizers, hooks, a report."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from composer.functional.checks import check_flags, described
from composer.functional.surgery.optimizers import check_optimizers, update_params_in_optimizer

if TYPE_CHECKING:
    from torch.optim import Optimizer

__all__ = [
    "Replacement",
    "ReplacementFunction",
    "SurgeryReport",
    "count_module_instances",
    "replace_module_classes",
]

ReplacementFunction = Callable[[Any, int], nn.Module | None]
"""Takes a module and its index among those of its policy's class; returns what to put in its place.

``None`` leaves the module and looks inside it; the module itself leaves it as a whole.
"""

_HOOKS = (
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_backward_pre_hooks",
    "_backward_hooks",
    "_state_dict_hooks",
    "_state_dict_pre_hooks",
    "_load_state_dict_pre_hooks",
    "_load_state_dict_post_hooks",
)


@dataclass(frozen=True, slots=True)
class Replacement:
    """One module that surgery changed.

    Attributes:
        paths: Where it is in the model; several if it is shared.
        old: The class name that it had.
        new: The class name that it has.

    Example:
        >>> print(Replacement(("layer1.0", "layer2.0"), "ReLU", "GELU"))
        layer1.0, layer2.0: ReLU -> GELU
    """

    paths: tuple[str, ...]
    old: str
    new: str

    def __str__(self) -> str:
        return f"{', '.join(self.paths)}: {self.old} -> {self.new}"


@dataclass(frozen=True, slots=True)
class SurgeryReport:
    """What surgery did to a model; falsy if it did nothing.

    Attributes:
        replacements: The changed modules, in the model's order.

    Example:
        >>> report = SurgeryReport((Replacement(("0",), "ReLU", "GELU"),))
        >>> print(report)
        1 module replaced
          0: ReLU -> GELU
        >>> report.to_dict()
        {'replacements': [{'paths': ['0'], 'old': 'ReLU', 'new': 'GELU'}]}
        >>> bool(SurgeryReport())
        False
    """

    replacements: tuple[Replacement, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.replacements)

    def __len__(self) -> int:
        return len(self.replacements)

    def __iter__(self) -> Iterator[Replacement]:
        return iter(self.replacements)

    def __str__(self) -> str:
        count = len(self.replacements)
        headline = f"{count or 'no'} module{'' if count == 1 else 's'} replaced"
        return "\n  ".join([headline, *map(str, self.replacements)])

    def to_dict(self) -> dict[str, Any]:
        """Give the report as data that JSON can hold."""
        return {
            "replacements": [
                {"paths": list(entry.paths), "old": entry.old, "new": entry.new} for entry in self.replacements
            ]
        }


def replace_module_classes(
    module: nn.Module,
    policies: Mapping[type[nn.Module], ReplacementFunction],
    optimizers: Optimizer | Sequence[Optimizer] | None = None,
    recurse_on_replacements: bool = False,
    indices: MutableMapping[type[nn.Module], int] | None = None,
) -> SurgeryReport:
    """Replace the modules inside a model by what functions make of them, in place.

    A module is given to the policy of the first of its classes, from the most special on, that has one. A module in
    several places is replaced once and stays shared. The root is never asked: nothing inside holds it.

    The replacement gets the training mode, dtype and device of what it replaces; of several dtypes, that of the first
    parameter. A parameter or buffer that it takes over stays as it is. A new parameter requires a gradient if that of
    the same name did, or else any whose name ends alike (as ``weight``), or without such, any. Hooks, those of the
    state dict too, stay with the old module if that lives on inside the replacement, and move to the replacement
    otherwise; their handles go on working. Modules are found as children only: an attribute that hides one in a plain
    list still has the old.

    Args:
        module: The model; **changed in place**.
        policies: For a class, a function ``(module, index) -> replacement``. ``None`` leaves the module and looks
            inside it; the module itself leaves it as a whole.
        optimizers: Optimizers whose parameters and state move along, as :func:`update_params_in_optimizer` says.
        recurse_on_replacements: Whether to look inside replacements too; a function that puts its own class into its
            replacement then never ends.
        indices: For each class of ``policies``, how many were seen before, for a model that is walked in parts;
            **counted on in place**.

    Returns:
        A report of what was replaced; empty if nothing was.

    Raises:
        TypeError: ``module`` is not a module, ``optimizers`` are none, or a function returned something else.
        ValueError: The optimizers hold no parameter of the model; nothing has been changed.

    Example:
        >>> model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
        >>> print(replace_module_classes(model, {nn.ReLU: lambda module, index: nn.GELU()}))
        1 module replaced
          1: ReLU -> GELU
    """
    if not isinstance(module, nn.Module):
        raise TypeError(f"The model must be a torch.nn.Module, got {type(module).__name__}.")
    check_flags(recurse_on_replacements=recurse_on_replacements)
    for name, given in (("policies", policies), ("indices", {} if indices is None else indices)):
        if not isinstance(given, Mapping):
            raise TypeError(f"{name} must be a dictionary whose keys are classes of modules, got {described(given)}.")
    listed = None if optimizers is None else check_optimizers(optimizers, module)
    seen = {} if indices is None else indices
    walk = _Walk(policies, recurse_on_replacements, seen, next(_tensors(module), None))
    walk.visit(module, "", frozenset({id(module)}))
    if listed is not None:
        _tell_optimizers(module, walk.swaps, listed)
    return SurgeryReport(tuple(swap.report() for swap in walk.swaps))


def count_module_instances(module: nn.Module, cls: type[nn.Module] | tuple[type[nn.Module], ...]) -> int:
    """Count the modules of a class, the root and instances of subclasses included, shared ones once.

    Args:
        module: The model.
        cls: A class, or a tuple of classes.

    Returns:
        Their number.

    Raises:
        TypeError: ``module`` is not a module, or ``cls`` is neither a class nor a tuple of them.

    Example:
        >>> count_module_instances(nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2)), nn.Linear)
        2
    """
    if not isinstance(module, nn.Module):
        raise TypeError(f"The model must be a torch.nn.Module, got {type(module).__name__}.")
    if not all(isinstance(each, type) for each in (cls if isinstance(cls, tuple) else (cls,))):
        raise TypeError(f"cls must be a class of modules or a tuple of classes, such as torch.nn.Linear, got {cls!r}.")
    return sum(isinstance(each, cls) for each in module.modules())


def is_untouched(layer: nn.Module) -> bool:
    """Whether a layer's ``weight`` and ``bias`` are what it holds, and its ``forward`` is its class's.

    Pruning and the old weight and spectral normalisation compute the weight from other parameters, by hooks that hang
    on this very layer.
    """
    return set(vars(layer)["_parameters"]) == {"weight", "bias"} and "forward" not in vars(layer)


@dataclass(eq=False, slots=True)
class _Swap:
    """One replacement on its way: the modules, where they are, and the parameters of the old one before it."""

    old: nn.Module
    new: nn.Module
    parameters: dict[str, nn.Parameter]
    paths: list[str] = field(default_factory=list)

    def report(self) -> Replacement:
        return Replacement(tuple(self.paths), type(self.old).__name__, type(self.new).__name__)


class _Walk:
    """Visits children depth first and remembers by identity what it decided."""

    def __init__(
        self,
        policies: Mapping[type[nn.Module], ReplacementFunction],
        recurse: bool,
        seen: MutableMapping[type[nn.Module], int],
        example: Tensor | None,
    ) -> None:
        self.policies = policies
        self.recurse = recurse
        self.seen = seen
        self.example = example
        self.swaps: list[_Swap] = []
        self._by_old: dict[int, _Swap] = {}
        self._by_new: dict[int, _Swap] = {}
        self._left_alone: dict[int, nn.Module | None] = {}

    def visit(self, parent: nn.Module, prefix: str, ancestors: frozenset[int]) -> None:
        # named_children would leave out the second place of a module within one parent.
        for name, child in list(vars(parent)["_modules"].items()):
            if child is None or id(child) in ancestors:
                continue
            path = f"{prefix}{name}"
            if id(child) in self._by_new:  # inside a shared parent that was visited before
                self._by_new[id(child)].paths.append(path)
                continue
            swap = self._decide(child)
            if swap is not None and id(swap.new) not in ancestors:
                parent.register_module(name, swap.new)
                swap.paths.append(path)
                if self.recurse and len(swap.paths) == 1:
                    self.visit(swap.new, f"{path}.", ancestors | {id(swap.new)})
            elif self._left_alone.get(id(child)) is None:
                self.visit(child, f"{path}.", ancestors | {id(child)})

    def _decide(self, module: nn.Module) -> _Swap | None:
        """Ask the policy once for each module."""
        key = id(module)
        if key in self._by_old or key in self._left_alone:
            return self._by_old.get(key)
        cls = next((cls for cls in type(module).__mro__ if cls in self.policies), None)
        if cls is None:
            return None
        index = self.seen.get(cls, 0)
        self.seen[cls] = index + 1
        parameters = dict(module.named_parameters())
        replacement = self.policies[cls](module, index)
        if replacement is None or replacement is module:
            self._left_alone[key] = replacement
            return None
        if not isinstance(replacement, nn.Module):
            raise TypeError(
                f"The policy of {cls.__name__} must return a torch.nn.Module or None, got {type(replacement).__name__}."
            )
        swap = _Swap(module, replacement, parameters)
        _carry_over(swap, self.example)
        self.swaps.append(swap)
        self._by_old[key] = self._by_new[id(replacement)] = swap
        return swap


def _tensors(module: nn.Module) -> Iterator[Tensor]:
    """Yield the floating point parameters and buffers."""
    for tensors in (module.parameters(), module.buffers()):
        yield from (tensor for tensor in tensors if tensor.is_floating_point())


def _carry_over(swap: _Swap, example: Tensor | None) -> None:
    """Give the new module what the old one had: mode, dtype, device, requires_grad, hooks."""
    old_modules = {id(each) for each in swap.old.modules()}
    for each in swap.new.modules():
        if id(each) not in old_modules:
            each.training = swap.old.training
    tensors = list(_tensors(swap.old)) or ([] if example is None else [example])
    if tensors:
        _convert(swap, tensors)
    _carry_over_requires_grad(swap)
    if all(each is not swap.old for each in swap.new.modules()):
        _move_hooks(swap.old, swap.new)


def _convert(swap: _Swap, like: list[Tensor]) -> None:
    """Move the new tensors to the device and dtype of others; the old module's own stay as they are."""
    survivors = {id(tensor) for tensors in (swap.old.parameters(), swap.old.buffers()) for tensor in tensors}
    survivors |= {id(parameter) for parameter in swap.parameters.values()}
    devices = {tensor.device for tensor in like}
    # What lies on several devices is made on purpose, and left to the policy.
    device, dtype = devices.pop() if len(devices) == 1 else None, like[0].dtype

    def convert(tensor: Tensor) -> Tensor:
        if id(tensor) in survivors:
            return tensor
        return tensor.to(device=device, dtype=dtype if tensor.is_floating_point() else None)

    swap.new._apply(convert)  # type: ignore[no-untyped-call]  # noqa: SLF001


def _carry_over_requires_grad(swap: _Swap) -> None:
    if not swap.parameters:
        return
    survivors = {id(parameter) for parameter in swap.parameters.values()}
    for name, parameter in swap.new.named_parameters():
        if id(parameter) in survivors:
            continue
        if name in swap.parameters:
            models = [swap.parameters[name]]
        else:
            ending = name.rpartition(".")[2]
            models = [old for old_name, old in swap.parameters.items() if old_name.rpartition(".")[2] == ending]
        parameter.requires_grad_(any(each.requires_grad for each in models or swap.parameters.values()))


def _move_hooks(old: nn.Module, new: nn.Module) -> None:
    """Move the dictionaries themselves: the handles that remove hooks refer to them."""
    for name in _HOOKS:
        hooks = vars(old).get(name)
        if hooks:
            hooks.update(vars(new)[name])
            vars(new)[name] = hooks
            vars(old)[name] = type(hooks)()
            for hook in hooks.values():
                if getattr(hook, "with_module", False):  # torch's wrapper of a hook that is called with its module
                    hook.module = weakref.ref(new)
    if vars(new)["_is_full_backward_hook"] is None:
        vars(new)["_is_full_backward_hook"] = vars(old)["_is_full_backward_hook"]


def _tell_optimizers(root: nn.Module, swaps: list[_Swap], optimizers: Sequence[Optimizer]) -> None:
    kept = list(root.named_parameters())
    kept_ids = {id(parameter) for _, parameter in kept}
    for swap in swaps:
        prefix = f"{swap.paths[0]}."
        old = [(prefix + name, parameter) for name, parameter in swap.parameters.items()]
        new = [(prefix + name, parameter) for name, parameter in swap.new.named_parameters()]
        new_ids = {id(parameter) for _, parameter in new}
        if not old and new:  # nothing says which group; the rest of the model does
            old = [pair for pair in kept if id(pair[1]) not in new_ids]
        # A parameter of the old module that another part of the model uses too stays with the optimizer.
        shared = [pair for pair in old if id(pair[1]) in kept_ids and id(pair[1]) not in new_ids]
        update_params_in_optimizer(old, new + shared, optimizers)
