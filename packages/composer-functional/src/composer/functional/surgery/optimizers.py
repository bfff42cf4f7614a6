"""Optimizers after surgery: replace their parameters and transfer the state."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from composer.functional.checks import described

NamedParameters = Iterable[nn.Parameter] | Iterable[tuple[str, nn.Parameter]]


def update_params_in_optimizer(
    old_params: NamedParameters, new_params: NamedParameters, optimizers: Optimizer | Sequence[Optimizer]
) -> None:
    """Replace parameters in the optimizers that hold them, in place.

    A parameter among both old and new keeps its group and its state (momentum, Adam's moments). An old parameter that
    is not among the new ones is removed. A new parameter takes the place of the old one of the same name, in the same
    group, and its state if the shapes agree. Without an old parameter of the same name, it joins, without state, the
    group of the first old parameter whose name has the same last part (such as ``bias``), or else of the first old
    parameter, and gets the learning rate and weight decay of that group. The replacement of a parameter that no
    optimizer held is not added to any optimizer. Where the parts of a group of Muon (``fused``) do not fit a new
    parameter, it joins a group without parts and with otherwise equal settings, which is added if there is none:
    create schedulers of torch afterwards.

    Args:
        old_params: Replaced parameters, or pairs ``(name, parameter)`` as ``named_parameters()`` returns them.
        new_params: Their replacements, likewise. Without names, no state is transferred.
        optimizers: One or several optimizers; **changed in place**.

    Raises:
        TypeError: ``optimizers`` is not an optimizer or a sequence of optimizers.
        ValueError: An optimizer was created from named parameters, and ``new_params`` has no names.

    Example:
        >>> old, new = nn.Linear(2, 3), nn.Linear(2, 3)
        >>> optimizer = torch.optim.SGD(old.parameters(), lr=0.1)
        >>> update_params_in_optimizer(old.named_parameters(), new.named_parameters(), optimizer)
        >>> optimizer.param_groups[0]["params"][0] is new.weight
        True
    """
    old, new = _with_names("old_params", old_params), _with_names("new_params", new_params)
    holders = find_holders(optimizers)
    trained = [(name, parameter) for name, parameter in old if id(parameter) in holders]
    has_names = any("param_names" in group for _, parameter in trained for _, group in holders[id(parameter)])
    if has_names and any(name is None for name, _ in new):
        raise ValueError(
            "new_params must be pairs (name, parameter), got parameters without names. The optimizer was created from "
            "named parameters and keeps their names: pass module.named_parameters()."
        )
    staying = {id(parameter) for _, parameter in new}
    old_names = {id(parameter): name for name, parameter in old}
    for name, parameter in new:
        if id(parameter) in holders:
            for _, group in holders[id(parameter)]:
                _rename(group, parameter, old_names.get(id(parameter)), name)
            continue
        if id(parameter) in old_names:
            continue
        pair = _find_source(name, old, trained)
        if pair is None:
            continue
        source_name, source = pair
        for optimizer, group in holders[id(source)]:
            inherits = name is not None and name == source_name and id(source) not in staying
            source_place = _place_of(group, source)
            place = source_place if inherits else len(group["params"])
            if "param_names" in group:
                group["param_names"].insert(place, _translate(group["param_names"][source_place], source_name, name))
            # In place, because some optimizers, such as LBFGS, keep a reference to this list.
            group["params"].insert(place, parameter)
            if inherits and source in optimizer.state and source.shape == parameter.shape:
                optimizer.state[parameter] = optimizer.state[source]
            _leave_layout(optimizer, group, parameter)
    for _, parameter in trained:
        if id(parameter) not in staying:
            for optimizer, group in holders[id(parameter)]:
                _remove(optimizer, group, parameter)


def check_optimizers(optimizers: Optimizer | Iterable[Optimizer], model: nn.Module | None = None) -> list[Optimizer]:
    """Return one or several optimizers as a list.

    Raises:
        TypeError: ``optimizers`` contains another type.
        ValueError: No optimizer holds a parameter of ``model``, which has parameters.
    """
    is_one = isinstance(optimizers, Optimizer | Tensor) or not isinstance(optimizers, Iterable)
    listed: list[Any] = [optimizers] if is_one else list(optimizers)  # type: ignore[arg-type]
    wrong = [type(each).__name__ for each in listed if not isinstance(each, Optimizer)]
    if wrong:
        raise TypeError(f"optimizers must be one or several torch.optim.Optimizer, got {wrong[0]} among them.")
    if model is not None and listed:
        trained = {id(parameter) for each in listed for group in each.param_groups for parameter in group["params"]}
        own = {id(parameter) for parameter in model.parameters()}
        if own and own.isdisjoint(trained):
            names = ", ".join(type(each).__name__ for each in listed)
            raise ValueError(
                f"optimizers must hold parameters of the model, got {names} with none of those of "
                f"{type(model).__name__}. Create them from the current model.parameters()."
            )
    return listed


def join_group(
    source: tuple[str, nn.Parameter], added: tuple[str, nn.Parameter], optimizers: Optimizer | Sequence[Optimizer]
) -> None:
    """Add a parameter of another kind of layer to the groups of a source, without settings of the source's layout."""
    update_params_in_optimizer([source], [source, added], optimizers)
    for optimizer, group in find_holders(optimizers).get(id(added[1]), ()):
        _leave_layout(optimizer, group, added[1], is_of_other_kind=True)


_Named = list[tuple[str | None, nn.Parameter]]
_Group = dict[str, Any]


def _with_names(name: str, params: NamedParameters) -> _Named:
    if isinstance(params, str | Tensor) or not isinstance(params, Iterable):
        raise TypeError(f"{name} must be parameters, or pairs (name, parameter), got {described(params)}.")
    return [each if isinstance(each, tuple) else (None, each) for each in params]


def find_holders(optimizers: Optimizer | Sequence[Optimizer]) -> dict[int, list[tuple[Optimizer, _Group]]]:
    """Return the groups that hold each parameter, by identity."""
    holders: dict[int, list[tuple[Optimizer, _Group]]] = {}
    for optimizer in check_optimizers(optimizers):
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                holders.setdefault(id(parameter), []).append((optimizer, group))
    return holders


def _find_source(name: str | None, old: _Named, trained: _Named) -> tuple[str | None, nn.Parameter] | None:
    """Return the old parameter whose group a new one joins; None if the one of its name is in no optimizer."""
    if name is not None:
        ending = name.rpartition(".")[2]
        same = next((pair for pair in old if pair[0] == name), None)
        if same is not None:
            return same if any(same[1] is parameter for _, parameter in trained) else None
        for pair in trained:
            if pair[0] is not None and pair[0].rpartition(".")[2] == ending:
                return pair
    return trained[0] if trained else None


def _place_of(group: _Group, parameter: nn.Parameter) -> int:
    # list.index would compare tensors by value.
    return next(place for place, each in enumerate(group["params"]) if each is parameter)


def _rename(group: _Group, parameter: nn.Parameter, old_name: str | None, new_name: str | None) -> None:
    if "param_names" in group:
        place = _place_of(group, parameter)
        group["param_names"][place] = _translate(group["param_names"][place], old_name, new_name)


def _translate(held_name: str, old_name: str | None, new_name: str | None) -> str:
    """Replace a name and keep the optimizer's prefix (the model may be part of a larger one)."""
    if new_name is None:
        return held_name
    recognised = old_name is not None and held_name.endswith(old_name)
    return held_name.removesuffix(old_name or "") + new_name if recognised else new_name


def _leave_layout(optimizer: Optimizer, group: _Group, new: nn.Parameter, *, is_of_other_kind: bool = False) -> None:
    """Move a parameter that parts and transposition of a group of Muon do not fit to a group without them."""
    is_transposed, parts = group.get("transposed", False), group.get("fused")
    rows = sum(parts) if isinstance(parts, Sequence) else None  # in groups of AdamW it is a flag
    if new.ndim < 2 or not (rows or is_transposed):
        return
    if not is_of_other_kind and rows in {None, new.shape[-1 if is_transposed else 0]}:
        return
    plain = _settings(group) | {"fused": None, "transposed": False}
    target = next((one for one in optimizer.param_groups if _settings(one) == plain), None)
    if target is None:
        target = plain | {name: [] for name in ("params", "param_names") if name in group}
        optimizer.param_groups.append(target)
    place = _place_of(group, new)
    for name in {"params", "param_names"} & group.keys():
        target[name].append(group[name].pop(place))


def _settings(group: _Group) -> _Group:
    return {name: value for name, value in group.items() if name not in {"params", "param_names"}}


def _remove(optimizer: Optimizer, group: _Group, parameter: nn.Parameter) -> None:
    place = _place_of(group, parameter)
    del group["params"][place]
    if "param_names" in group:
        del group["param_names"][place]
    optimizer.state.pop(parameter, None)
