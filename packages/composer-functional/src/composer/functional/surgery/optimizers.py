"""Optimizers after surgery: they hold the parameters that the model has, with the state that belongs to them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from composer.functional.checks import described

__all__ = ["update_params_in_optimizer"]

NamedParameters = Iterable[nn.Parameter] | Iterable[tuple[str, nn.Parameter]]


def update_params_in_optimizer(
    old_params: NamedParameters, new_params: NamedParameters, optimizers: Optimizer | Sequence[Optimizer]
) -> None:
    """Exchange parameters in the optimizers that hold them, in place.

    A parameter among both old and new stays where it is, with its state (momentum, Adam's moments). An old one that is
    not among the new leaves. A new one joins the group of the old one with its name, at its place, and takes over its
    state if the shapes agree. Without such a namesake it joins, with no state, the group of the first old one whose
    name ends alike (as ``bias``), or else of the first old one. So it gets that group's learning rate and weight decay.
    What no optimizer held is not trained by what replaces it: such new parameters stay out, and it stays out itself,
    under whatever name.

    Args:
        old_params: Parameters that were replaced, or pairs ``(name, parameter)`` as ``named_parameters()`` gives them.
        new_params: Those that replace them, likewise. Without names nothing takes over state.
        optimizers: One optimizer or several; **changed in place**.

    Raises:
        TypeError: ``optimizers`` is not an optimizer or a sequence of them.
        ValueError: An optimizer was made from named parameters, and ``new_params`` has no names.

    Example:
        >>> old, new = nn.Linear(2, 3), nn.Linear(2, 3)
        >>> optimizer = torch.optim.SGD(old.parameters(), lr=0.1)
        >>> update_params_in_optimizer(old.named_parameters(), new.named_parameters(), optimizer)
        >>> optimizer.param_groups[0]["params"][0] is new.weight
        True
    """
    old, new = _with_names("old_params", old_params), _with_names("new_params", new_params)
    holders = _find_holders(optimizers)
    held = [(name, parameter) for name, parameter in old if id(parameter) in holders]
    if any("param_names" in group for _, parameter in held for _, group in holders[id(parameter)]):
        _check_named(new)
    staying = {id(parameter) for _, parameter in new}
    old_names = {id(parameter): name for name, parameter in old}
    for name, parameter in new:
        if id(parameter) in holders:
            for _, group in holders[id(parameter)]:
                _rename(group, parameter, old_names.get(id(parameter)), name)
            continue
        if id(parameter) in old_names:
            continue
        found = _find_source(name, old, held)
        if found is None:
            continue
        source_name, source = found
        for optimizer, group in holders[id(source)]:
            inherits = name is not None and name == source_name and id(source) not in staying
            _insert(group, parameter, name, source, source_name, in_its_place=inherits)
            if inherits and source in optimizer.state and source.shape == parameter.shape:
                optimizer.state[parameter] = optimizer.state[source]
    for _, parameter in held:
        if id(parameter) not in staying:
            for optimizer, group in holders[id(parameter)]:
                _remove(optimizer, group, parameter)


def check_optimizers(optimizers: Optimizer | Iterable[Optimizer], model: nn.Module | None = None) -> list[Optimizer]:
    """Return the optimizers as a list, whatever they come in.

    Raises:
        TypeError: They are something else.
        ValueError: None of them holds a parameter of ``model``, which has some.
    """
    is_one = isinstance(optimizers, Optimizer | Tensor) or not isinstance(optimizers, Iterable)
    listed: list[Any] = [optimizers] if is_one else list(optimizers)  # type: ignore[arg-type]
    wrong = [type(each).__name__ for each in listed if not isinstance(each, Optimizer)]
    if wrong:
        raise TypeError(f"optimizers must be one or several torch.optim.Optimizer, got {wrong[0]} among them.")
    if model is not None and listed:
        held = {id(parameter) for each in listed for group in each.param_groups for parameter in group["params"]}
        own = {id(parameter) for parameter in model.parameters()}
        if own and own.isdisjoint(held):
            names = ", ".join(type(each).__name__ for each in listed)
            raise ValueError(
                f"optimizers must hold parameters of the model, got {names} with none of those of "
                f"{type(model).__name__}. Make them from model.parameters(), as they are now."
            )
    return listed


_Named = list[tuple[str | None, nn.Parameter]]
_Group = dict[str, Any]


def _with_names(name: str, params: NamedParameters) -> _Named:
    if isinstance(params, str | Tensor) or not isinstance(params, Iterable):
        raise TypeError(f"{name} must be parameters, or pairs (name, parameter), got {described(params)}.")
    return [each if isinstance(each, tuple) else (None, each) for each in params]


def _check_named(params: _Named) -> None:
    if any(name is None for name, _ in params):
        raise ValueError(
            "new_params must be pairs (name, parameter), got parameters without names. "
            "The optimizer was made from named parameters and keeps their names: hand in module.named_parameters()."
        )


def _find_holders(optimizers: Optimizer | Sequence[Optimizer]) -> dict[int, list[tuple[Optimizer, _Group]]]:
    """For each parameter, by identity, the groups that hold it."""
    holders: dict[int, list[tuple[Optimizer, _Group]]] = {}
    for optimizer in check_optimizers(optimizers):
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                holders.setdefault(id(parameter), []).append((optimizer, group))
    return holders


def _find_source(name: str | None, old: _Named, held: _Named) -> tuple[str | None, nn.Parameter] | None:
    """Which old parameter's group a new one joins; none if its namesake is not trained, or nothing is."""
    if name is not None:
        ending = name.rpartition(".")[2]
        same = next((pair for pair in old if pair[0] == name), None)
        if same is not None:
            return same if any(same[1] is parameter for _, parameter in held) else None
        for pair in held:
            if pair[0] is not None and pair[0].rpartition(".")[2] == ending:
                return pair
    return held[0] if held else None


def _place_of(group: _Group, parameter: nn.Parameter) -> int:
    # list.index would compare tensors by value.
    return next(place for place, each in enumerate(group["params"]) if each is parameter)


def _insert(
    group: _Group,
    parameter: nn.Parameter,
    name: str | None,
    source: nn.Parameter,
    source_name: str | None,
    *,
    in_its_place: bool,
) -> None:
    """Put a new parameter before the old one that it replaces, or at the group's end."""
    source_place = _place_of(group, source)
    place = source_place if in_its_place else len(group["params"])
    if "param_names" in group:
        group["param_names"].insert(place, _translate(group["param_names"][source_place], source_name, name))
    # In place: some optimizers, as LBFGS, hold on to this list.
    group["params"].insert(place, parameter)


def _rename(group: _Group, parameter: nn.Parameter, old_name: str | None, new_name: str | None) -> None:
    if "param_names" in group:
        place = _place_of(group, parameter)
        group["param_names"][place] = _translate(group["param_names"][place], old_name, new_name)


def _translate(held_name: str, old_name: str | None, new_name: str | None) -> str:
    """Exchange a name, and keep what the optimizer has before it (the model may be part of a larger one)."""
    if new_name is None:
        return held_name
    recognised = old_name is not None and held_name.endswith(old_name)
    return held_name.removesuffix(old_name or "") + new_name if recognised else new_name


def _remove(optimizer: Optimizer, group: _Group, parameter: nn.Parameter) -> None:
    place = _place_of(group, parameter)
    del group["params"][place]
    if "param_names" in group:
        del group["param_names"][place]
    optimizer.state.pop(parameter, None)
