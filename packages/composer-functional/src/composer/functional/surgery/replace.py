"""Replacement of modules inside a model, with their optimizers and hooks, and the report of it."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from composer.functional.checks import check_flags, check_modules, described
from composer.functional.surgery.optimizers import check_optimizers, update_params_in_optimizer

ReplacementFunction = Callable[[Any, int], nn.Module | None]
"""Takes a module and its index among the modules of its policy's class, and returns the replacement.

``None`` keeps the module and visits its children; returning the module itself keeps it and skips its children.
"""

# Every dictionary of hooks that a module has, of whatever kind.
_HOOKS = tuple(name for name in vars(nn.Module()) if "_hooks" in name)


@dataclass(frozen=True, slots=True)
class Replacement:
    """One module that surgery changed.

    Attributes:
        paths: The module's paths in the model; several if it is shared.
        old: The class name before, or of a new module what it copies.
        new: The class name after.

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
    """The modules that surgery replaced in a model; falsy if there are none.

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

    def __len__(self) -> int:
        return len(self.replacements)

    def __iter__(self) -> Iterator[Replacement]:
        return iter(self.replacements)

    def __str__(self) -> str:
        count = len(self.replacements)
        headline = f"{count or 'no'} module{'' if count == 1 else 's'} replaced"
        return "\n  ".join([headline, *map(str, self.replacements)])

    def to_dict(self) -> dict[str, Any]:
        """Return the report as data that JSON can represent."""
        return {"replacements": [asdict(entry) | {"paths": list(entry.paths)} for entry in self.replacements]}


def replace_module_classes(
    module: nn.Module,
    policies: Mapping[type[nn.Module], ReplacementFunction],
    optimizers: Optimizer | Sequence[Optimizer] | None = None,
    recurse_on_replacements: bool = False,
    indices: MutableMapping[type[nn.Module], int] | None = None,
) -> SurgeryReport:
    """Replace modules inside a model by the results of functions, in place.

    Each module is passed to the policy of the first class in its method resolution order that has one. A module that
    occurs several times is replaced once and stays shared. The root module itself is never replaced.

    The replacement gets the training mode, dtype and device of the module that it replaces (with several dtypes, that
    of the first parameter). Parameters and buffers that it takes over do not change. A new parameter requires a
    gradient if the old parameter of the same name did; without one, if any old parameter whose name has the same last
    part (such as ``weight``) did; without such, if any did. Hooks, including those of the state dict, stay with the
    old module if it is part of the replacement, and otherwise move to the replacement; their handles remain valid.
    Only registered children are replaced, not modules in a plain list.

    Args:
        module: The model; **changed in place**.
        policies: For each class, a function ``(module, index) -> replacement``. ``None`` keeps the module and visits
            its children; returning the module itself keeps it and skips its children.
        optimizers: Optimizers whose parameters and state are updated by :func:`update_params_in_optimizer`.
        recurse_on_replacements: Whether to visit the children of replacements too. This never terminates if a
            replacement contains its own class.
        indices: For each class of ``policies`` the number of modules seen before, for a model that is processed in
            parts; **updated in place**.

    Returns:
        A report of the replaced modules; empty if there are none.

    Raises:
        TypeError: ``module`` is not a module, ``optimizers`` are not optimizers, or a function returned another type.
        ValueError: The optimizers hold no parameter of the model; nothing has been changed.

    Example:
        >>> model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
        >>> print(replace_module_classes(model, {nn.ReLU: lambda module, index: nn.GELU()}))
        1 module replaced
          1: ReLU -> GELU
    """
    check_modules(module=module)
    check_flags(recurse_on_replacements=recurse_on_replacements)
    for name, value in (("policies", policies), ("indices", {} if indices is None else indices)):
        if not isinstance(value, Mapping):
            raise TypeError(f"{name} must be a dictionary whose keys are classes of modules, got {described(value)}.")
    listed = None if optimizers is None else check_optimizers(optimizers, module)
    seen = {} if indices is None else indices
    walk = _Walk(policies, recurse_on_replacements, seen, next(_tensors(module), None))
    walk.visit(module, "", frozenset({id(module)}))
    if listed is not None:
        _update_optimizers(module, walk.swaps, listed)
    return SurgeryReport(
        tuple(Replacement(tuple(swap.paths), type(swap.old).__name__, type(swap.new).__name__) for swap in walk.swaps)
    )


def replace_layers(
    model: nn.Module,
    replacements: Mapping[type[nn.Module], ReplacementFunction],
    is_wanted: Callable[[nn.Module], bool],
    optimizers: Optimizer | Sequence[Optimizer] | None = None,
    *,
    skipped: tuple[type[nn.Module], ...] = (),
) -> SurgeryReport:
    """Replace the layers of some classes for which ``is_wanted`` returns True; ``skipped`` classes are not entered.

    Raises:
        TypeError: ``model`` is not a module.
        ValueError: ``model`` itself would be replaced.
    """
    check_modules(model=model)
    if isinstance(model, skipped):
        return SurgeryReport()
    if is_wanted(model):
        raise ValueError(
            f"model must hold the layers to be replaced, got a {type(model).__name__} that is one itself. "
            "Wrap it: torch.nn.Sequential(model)."
        )

    def replace_wanted(function: ReplacementFunction) -> ReplacementFunction:
        return lambda layer, index: function(layer, index) if is_wanted(layer) else None

    def keep(layer: nn.Module, _: int) -> nn.Module:
        return layer

    policies = {cls: replace_wanted(function) for cls, function in replacements.items()}
    return replace_module_classes(model, policies | dict.fromkeys(skipped, keep), optimizers)


def count_module_instances(module: nn.Module, module_class: type[nn.Module] | tuple[type[nn.Module], ...]) -> int:
    """Count the modules of a class, including the root and instances of subclasses; shared modules count once.

    Args:
        module: The model.
        module_class: A class or a tuple of classes.

    Returns:
        Their number.

    Raises:
        TypeError: ``module`` is not a module, or ``module_class`` is neither a class nor a tuple of classes.

    Example:
        >>> count_module_instances(nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2)), nn.Linear)
        2
    """
    check_modules(module=module)
    if not all(
        isinstance(each, type) for each in (module_class if isinstance(module_class, tuple) else (module_class,))
    ):
        raise TypeError(
            f"module_class must be a class of modules or a tuple, such as torch.nn.Linear, got {module_class!r}."
        )
    return sum(isinstance(each, module_class) for each in module.modules())


def is_untouched(layer: nn.Module) -> bool:
    """Return whether a layer's parameters are exactly ``weight`` and ``bias``, and its ``forward`` is its class's.

    Pruning and the old weight and spectral normalisation compute the weight from other parameters in hooks that are
    registered on this layer.
    """
    return set(vars(layer)["_parameters"]) == {"weight", "bias"} and "forward" not in vars(layer)


def as_class(cls: type[nn.Module], layer: nn.Module, **attributes: Any) -> nn.Module:
    """Return a layer as one of another class, without its ``__init__``, which would allocate parameters."""
    new: nn.Module = cls.__new__(cls)
    vars(new).update(vars(layer), **attributes)
    for kind in ("_parameters", "_buffers"):
        vars(new)[kind] = vars(layer)[kind].copy()
    return new


@dataclass(eq=False, slots=True)
class _Swap:
    """A replacement in progress: both modules, their paths, and the old module's parameters before it."""

    old: nn.Module
    new: nn.Module
    parameters: dict[str, nn.Parameter]
    paths: list[str] = field(default_factory=list)


@dataclass(eq=False, slots=True)
class _Walk:
    """A depth-first traversal of children that decides once for each module, by identity."""

    policies: Mapping[type[nn.Module], ReplacementFunction]
    recurse: bool
    seen: MutableMapping[type[nn.Module], int]
    example: Tensor | None
    swaps: list[_Swap] = field(default_factory=list)
    _by_old: dict[int, _Swap] = field(default_factory=dict)
    _by_new: dict[int, _Swap] = field(default_factory=dict)
    # What the policy returned for modules that are not replaced: None, or the module itself.
    _not_replaced: dict[int, nn.Module | None] = field(default_factory=dict)

    def visit(self, parent: nn.Module, prefix: str, ancestors: frozenset[int]) -> None:
        # named_children would skip the second occurrence of a module within one parent.
        for name, child in list(vars(parent)["_modules"].items()):
            if child is None or id(child) in ancestors:  # a module may contain itself
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
            elif self._not_replaced.get(id(child)) is None:
                self.visit(child, f"{path}.", ancestors | {id(child)})

    def _decide(self, module: nn.Module) -> _Swap | None:
        """Return the replacement of a module, or None; the policy is called once for each module."""
        key = id(module)
        if key in self._by_old or key in self._not_replaced:
            return self._by_old.get(key)
        cls = next((cls for cls in type(module).__mro__ if cls in self.policies), None)
        if cls is None:
            return None
        index = self.seen.get(cls, 0)
        self.seen[cls] = index + 1
        # Recorded before the policy is called, because it may take parameters away from the old module.
        parameters = dict(module.named_parameters())
        replacement = self.policies[cls](module, index)
        if replacement is None or replacement is module:
            self._not_replaced[key] = replacement
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
    """Copy training mode, dtype, device, requires_grad and hooks from the old module to the new one."""
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
    """Move the new tensors to the device and dtype of ``like``; the old module's own tensors do not change."""
    survivors = {id(tensor) for tensors in (swap.old.parameters(), swap.old.buffers()) for tensor in tensors}
    survivors |= {id(parameter) for parameter in swap.parameters.values()}
    devices = {tensor.device for tensor in like}
    # A module on several devices is left to the policy.
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
    """Move the dictionaries themselves, because the handles that remove hooks refer to them."""
    for name in _HOOKS:
        hooks = vars(old).get(name)
        if hooks:
            hooks.update(vars(new)[name])
            vars(new)[name] = hooks
            vars(old)[name] = type(hooks)()
            for hook in hooks.values():
                if getattr(hook, "with_module", False):  # torch's wrapper of a hook that takes its module
                    hook.module = weakref.ref(new)
    if vars(new)["_is_full_backward_hook"] is None:
        vars(new)["_is_full_backward_hook"] = vars(old)["_is_full_backward_hook"]


def _update_optimizers(root: nn.Module, swaps: list[_Swap], optimizers: Sequence[Optimizer]) -> None:
    remaining = list(root.named_parameters())
    remaining_ids = {id(parameter) for _, parameter in remaining}
    for swap in swaps:
        prefix = f"{swap.paths[0]}."
        old = [(prefix + name, parameter) for name, parameter in swap.parameters.items()]
        new = [(prefix + name, parameter) for name, parameter in swap.new.named_parameters()]
        new_ids = {id(parameter) for _, parameter in new}
        if not old and new:  # the old module does not determine the group, the rest of the model does
            old = [pair for pair in remaining if id(pair[1]) not in new_ids]
        # A parameter of the old module that another part of the model uses too stays in the optimizer.
        shared = [pair for pair in old if id(pair[1]) in remaining_ids and id(pair[1]) not in new_ids]
        update_params_in_optimizer(old, new + shared, optimizers)
