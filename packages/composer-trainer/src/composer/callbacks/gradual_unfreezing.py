"""Train the last layers of a model first, and the others from later epochs on."""

from __future__ import annotations

from collections.abc import Sequence

import attrs
from torch import nn
from torch.optim import Optimizer

from composer.core import Callback, Logger, State
from composer.core.checks import integer, number
from composer.core.optimizers import unwrapped
from composer.core.saving.components import transient
from composer.core.saving.model_state import bare_model, bare_name, named_parameters


def _to_groups(given: Sequence[str | Sequence[str]] | None) -> list[list[str]] | None:
    if isinstance(given, str):
        raise TypeError(f"groups must be a list of names of modules, or of lists of them, got {given!r}.")
    return None if given is None else [[group] if isinstance(group, str) else [*group] for group in given]


@attrs.define(eq=False)
class GradualUnfreezing(Callback):
    """Train the last group of layers in the first epochs, and one more group every few epochs (arXiv:1801.06146).

    What is trained depends on the epoch alone. Parameters without ``requires_grad`` before the training stay frozen;
    all others have it after each call of ``fit``. Norms with running statistics, such as BatchNorm, are in evaluation
    mode as long as their weights are frozen; those without weights update their statistics in all epochs. The
    optimizers hold all parameters from the start.

    Args:
        groups: The names of modules, such as ``["fc", ["layer4", "layer3"]]``, in the order in which they are trained;
            other parameters are a further, last group. Names are those in the innermost module with several children
            that have parameters, such as the network in a ``ComposerClassifier``. None makes a group of each of these
            children, the last one first.
        epochs: After how many epochs each further group is trained.
        rates: The learning rate of each group as a multiple of that of the group before.

    Raises:
        TypeError: ``groups`` is a string, or another value is not a number.
        ValueError: A value is out of range.

    Example:
        >>> GradualUnfreezing(["fc", "layer4"], rates=0.5)
        GradualUnfreezing(groups=[['fc'], ['layer4']], epochs=1, rates=0.5)
    """

    groups: list[list[str]] | None = attrs.field(default=None, converter=_to_groups)
    epochs: int = integer(1, 1, meaning="Each further group is trained after so many epochs.")
    rates: float = number(1.0, 0, meaning="It multiplies the learning rate from group to group.")
    _always_frozen: set[str] = transient(factory=set)
    _frozen: list[nn.Parameter] = transient(factory=list)

    def init(self, state: State, logger: Logger) -> None:
        """Find the groups, and give each its own learning rate.

        Raises:
            ValueError: A module does not exist, or ``rates`` differ with a scheduler of torch.
        """
        self._always_frozen = {name for name, parameter in named_parameters(state.model) if not parameter.requires_grad}
        factors = {parameter: self.rates**group for parameter, group in self._group_of_each(state.model).items()}
        for optimizer in map(unwrapped, state.optimizers) if self.rates != 1 else ():
            _split_groups(optimizer, factors)

    def fit_start(self, state: State, logger: Logger) -> None:
        """Freeze the groups that are not trained yet."""
        current = int(state.timestamp.epoch) // self.epochs
        groups = self._group_of_each(state.model)
        for parameter, group in groups.items():
            parameter.requires_grad_(group <= current)
        self._frozen = [parameter for parameter, group in groups.items() if group > current]
        for norm, group in _norms(state.model, groups):
            if group > current:
                norm.eval()

    def epoch_start(self, state: State, logger: Logger) -> None:
        """Train the next group, if it is time."""
        current, rest = divmod(int(state.timestamp.epoch), self.epochs)
        if rest or not current:
            return
        groups = self._group_of_each(state.model)
        for parameter, group in groups.items():
            if group == current:
                parameter.requires_grad_(True)
        for norm, group in _norms(state.model, groups):
            if group == current:
                norm.train()

    def fit_end(self, state: State, logger: Logger) -> None:
        """Let another training begin with all groups."""
        while self._frozen:
            self._frozen.pop().requires_grad_(True)

    close = fit_end  # after an error

    def _group_of_each(self, model: nn.Module) -> dict[nn.Parameter, int]:
        """Return the number of the group of each parameter, the first one of tied parameters."""
        network = bare_model(model)
        while len(parts := _parts(network)) == 1 and not any(True for _ in network.parameters(recurse=False)):
            (network,) = parts.values()
        groups = [[part] for part in reversed(parts)] if self.groups is None else self.groups
        modules = {bare_name(name): module for name, module in network.named_modules(remove_duplicate=False)}
        unknown = [name for group in groups for name in group if name not in modules]
        if unknown:
            raise ValueError(
                f"groups must be names of modules in the {type(network).__name__}, got {unknown[0]!r}. Its parts are "
                f"{', '.join(parts)}; a module in one of them has a name such as '{next(iter(parts), '')}.0'."
            )
        found: dict[nn.Parameter, int] = {}
        for place, group in enumerate(groups):
            for parameter in (one for name in group for one in modules[name].parameters()):
                found.setdefault(parameter, place)
        rest = len(groups) if self.groups else len(groups) - 1
        named = named_parameters(model)
        return {one: found.get(one, rest) for name, one in named if name not in self._always_frozen}


def _parts(module: nn.Module) -> dict[str, nn.Module]:
    return {bare_name(name): one for name, one in module.named_children() if any(True for _ in one.parameters())}


def _norms(model: nn.Module, groups: dict[nn.Parameter, int]) -> list[tuple[nn.Module, int]]:
    """Return the normalization layers with running statistics, and the group of the weights of each."""
    return [
        (module, groups[weight])
        for module in model.modules()
        if getattr(module, "running_mean", None) is not None
        and (weight := getattr(module, "weight", None)) is not None
        and weight in groups
    ]


def _split_groups(optimizer: Optimizer, factors: dict[nn.Parameter, float]) -> None:
    """Split the groups of an optimizer by factors of the learning rate, in place."""
    if hasattr(optimizer.step, "_wrapped_by_lr_sched"):  # which torch's schedulers set
        raise ValueError(
            "rates must be 1 with a scheduler of torch, which has its own list of the learning rates. Give the "
            "optimizer composer.functional.parameter_groups(model, lr=..., layer_decay=...), or use a scheduler of "
            "composer.optim."
        )
    split = []
    for group in optimizer.param_groups:
        held: dict[float, list[int]] = {}
        for place, parameter in enumerate(group["params"]):
            held.setdefault(factors.get(parameter, 1.0), []).append(place)
        for factor, places in held.items():
            rates = {name: group[name] * factor for name in ("lr", "initial_lr", "scheduled_lr") if name in group}
            own = {name: [group[name][one] for one in places] for name in ("params", "param_names") if name in group}
            split.append(group | rates | own)
    optimizer.param_groups[:] = split
