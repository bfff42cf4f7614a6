"""A model's weights and its optimizers' state by the parameter names of the unwrapped model.

A save calls :func:`weights` and :func:`optimizer_states` through :class:`State`. In a load,
:mod:`composer.core.saving.saved_state` calls first the functions that compare and change nothing, and then those that
load what fits. Saved tensors are complete or DTensors, and are sharded as the run's.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import attrs
import torch
from torch import Tensor, nn
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.optim import Optimizer

from composer.core.checks import nearest, shortened
from composer.core.optimizers import held_parameters, unwrapped
from composer.core.saving.codec import NotSerializableError, Record, plain
from composer.core.saving.components import by_key
from composer.core.saving.records import read
from composer.functional.checks import few
from composer.functional.dtensors import is_dtensor, shard_like, without_repeats

# torch.compile, activation checkpointing and FSDP 1 put these into the names of weights.
_WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.", "_fsdp_wrapped_module.")
_HINTS = 10
"""The number of names for which a similar one is searched: for thousands among thousands it would take minutes."""


def bare_model(model: nn.Module) -> nn.Module:
    """Return a model without ``DistributedDataParallel`` or ``DataParallel`` around it."""
    return bare_model(model.module) if isinstance(model, (DistributedDataParallel, DataParallel)) else model


def bare_name(name: str) -> str:
    """Return the name of a weight in the unwrapped model.

    Example:
        >>> bare_name("_orig_mod.0.weight")
        '0.weight'
    """
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name


def weights(model: nn.Module) -> dict[str, Any]:
    """Return a model's weights by their names in the unwrapped model; they are not copied.

    Example:
        >>> list(weights(nn.Linear(2, 2)))
        ['weight', 'bias']
    """
    return {
        # Module.state_dict has detached its tensors, and detaching a DTensor again takes as long as the first time.
        bare_name(name): (value.detach() if value.requires_grad else value)
        if isinstance(value, Tensor)
        else plain(value, f"model.{name}")
        for name, value in bare_model(model).state_dict().items()
    }


def named_parameters(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """Return a model's parameters with their names in the unwrapped model.

    Example:
        >>> [name for name, _ in named_parameters(torch.nn.DataParallel(nn.Linear(2, 2)))]
        ['weight', 'bias']
    """
    return [(bare_name(name), parameter) for name, parameter in bare_model(model).named_parameters()]


def first_names(model: nn.Module) -> dict[str, str]:
    """Return for the name of each parameter the first name of the same parameter; tied ones have several.

    Example:
        >>> tied = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, bias=False))
        >>> tied[1].weight = tied[0].weight
        >>> first_names(tied)
        {'0.weight': '0.weight', '0.bias': '0.bias', '1.weight': '0.weight'}
    """
    first: dict[int, str] = {}
    named = bare_model(model).named_parameters(remove_duplicate=False)
    bare_named = ((bare_name(name), parameter) for name, parameter in named)
    return {name: first.setdefault(id(parameter), name) for name, parameter in bare_named}


def check_weights(own: Mapping[str, Any], saved: Mapping[str, Any]) -> tuple[list[str], list[str], list[str]]:
    """Compare saved weights with a model's :func:`weights`.

    Returns:
        Three lists of sentences: weights that cannot be loaded, because of their shape or type; weights that only the
        model has; weights that only the saved state has.
    """
    wrong = [
        f"model.{name}: must be {_describe_shape(own[name])}, got {_describe_shape(value)}; "
        f"load_ignore_keys='model/{name}' of a Trainer keeps its own."
        for name, value in saved.items()
        if name in own and _describe_shape(value) != _describe_shape(own[name])
    ]
    return wrong, *name_differences(own, saved, "model", "is not saved", "is saved, and the model has no such weight")


def name_differences(
    own: Iterable[str], saved: Iterable[str], path: str, if_missing: str, if_unexpected: str
) -> tuple[list[str], list[str]]:
    """Return a sentence for each name that only the run has, and for each that only the saved state has.

    It begins with the path and the name, and ends with a similar one of the other names, if there is one.

    Example:
        >>> name_differences(["weight", "bias"], ["bias", "weigth"], "model", "is not saved", "is unknown")
        (["model.weight is not saved; did you mean 'weigth'?"], ["model.weigth is unknown; did you mean 'weight'?"])
    """
    own, saved = dict.fromkeys(own), dict.fromkeys(saved)
    missing, unexpected = [name for name in own if name not in saved], [name for name in saved if name not in own]

    def sentences(names: list[str], words: str, others: list[str]) -> list[str]:
        return [f"{path}.{one} {words}{nearest(one, others) if at < _HINTS else '.'}" for at, one in enumerate(names)]

    return sentences(missing, if_missing, unexpected), sentences(unexpected, if_unexpected, missing)


def changed_dtypes(own: Mapping[str, Any], saved: Mapping[str, Any]) -> list[str]:
    """Return a sentence for each weight whose saved dtype differs from the model's, to which it is converted."""
    return [
        f"model.{name}: {value.dtype} was saved, {own[name].dtype} is set."
        for name, value in saved.items()
        if isinstance(value, Tensor) and isinstance(own.get(name), Tensor) and value.dtype != own[name].dtype
    ]


def _describe_shape(value: Any) -> str:
    return f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else "no tensor"


def load_weights(model: nn.Module, saved: Mapping[str, Any]) -> None:
    """Copy those saved weights into a model that it has."""
    bare = bare_model(model)
    for module in bare.modules():
        for name, buffer in module.named_buffers(recurse=False):
            # Of an expanded buffer several elements share their memory, and torch cannot copy into it.
            if without_repeats(buffer) is not buffer:
                setattr(module, name, buffer.contiguous())
    named = [(name, bare_name(name), own) for name, own in bare.state_dict().items()]
    loaded = {name: shard_like(saved[key], own) for name, key, own in named if key in saved}
    bare.load_state_dict(loaded, strict=False)


def _parameters_by_name(model: Any, optimizer: Optimizer) -> dict[str, Any]:
    """Return the parameters of an optimizer by the names of :func:`_parameter_names`."""
    names = itertools.chain.from_iterable(_parameter_names(model, optimizer))
    return dict(zip(names, held_parameters(optimizer.param_groups), strict=True))


def _parameter_names(model: Any, optimizer: Optimizer) -> list[list[str]]:
    """Return the parameters' names by group; a parameter that the model does not have is named by its index."""
    names = {id(parameter): name for name, parameter in (() if model is None else named_parameters(model))}
    return [
        [names.get(id(one), f"group {index} parameter {place}") for place, one in enumerate(group["params"])]
        for index, group in enumerate(optimizer.param_groups)
    ]


def optimizer_states(model: Any, optimizers: Sequence[Optimizer]) -> dict[str, Any]:
    """Return the state of each optimizer by its key, with the names of parameters in place of their indices.

    Raises:
        NotSerializableError: An optimizer contains something that is neither data nor a tensor, or of a sharded
            parameter a plain tensor of the shape of this process's part.

    Example:
        >>> model = nn.Linear(2, 2)
        >>> state = optimizer_states(model, [torch.optim.SGD(model.parameters(), lr=0.1)])
        >>> state["SGD"]["param_groups"][0]["params"], state["SGD"]["param_groups"][0]["lr"]
        (['weight', 'bias'], 0.1)
    """
    return {key: _named_state(model, key, optimizer) for key, optimizer in by_key(map(unwrapped, optimizers)).items()}


def _named_state(model: Any, key: str, optimizer: Optimizer) -> dict[str, Any]:
    by_group, numbered = _parameter_names(model, optimizer), optimizer.state_dict()
    own = held_parameters(optimizer.param_groups)
    parameters = dict(zip(itertools.chain.from_iterable(by_group), own, strict=True))
    name_of = dict(zip(held_parameters(numbered["param_groups"]), parameters, strict=True))
    groups = zip(numbered["param_groups"], by_group, strict=True)
    state = {
        "state": {name_of[number]: held for number, held in numbered["state"].items()},
        "param_groups": [group | {"params": group_names} for group, group_names in groups],
    }
    named: dict[str, Any] = plain(state, f"optimizers.{key}")
    for name, held in named["state"].items():
        _check_sharded(f"optimizers.{key}.state.{name}", held, parameters[name])
    return named


@torch.no_grad()  # a DTensor returns its local tensor much faster without a graph
def _check_sharded(path: str, held: Mapping[Any, Any], parameter: Any) -> None:
    """Raise an error if state of a sharded parameter is a plain tensor of its part: only the first process's is saved.

    Raises:
        NotSerializableError: It is.
    """
    if not is_dtensor(parameter):
        return
    shape = parameter.to_local().shape
    for item, value in held.items() if shape != parameter.shape and shape.numel() != 1 else ():
        if isinstance(value, Tensor) and not is_dtensor(value) and value.shape == shape:
            raise NotSerializableError(
                f"{path}.{item}",
                f"a tensor of shape {list(value.shape)} is the part of this process, and no DTensor, so that those of "
                "other processes would be lost. Create it by torch.zeros_like(parameter) in the optimizer.",
            )


def _check_params(_: object, __: object, groups: list[dict[str, Any]]) -> None:
    for group in groups:
        params = group.get("params")
        if not isinstance(params, list) or any(not isinstance(name, str) for name in params):
            raise ValueError(f"each group must have 'params', a list of names, got {shortened(params)}")


@attrs.frozen
class OptimizerRecord(Record):
    """The saved state of an optimizer."""

    state: dict[str, dict[Any, Any]]
    param_groups: list[dict[str, Any]] = attrs.field(validator=_check_params)


def check_optimizers(
    model: Any, own: Mapping[str, Optimizer], saved: Mapping[str, Any]
) -> tuple[list[str], list[str], list[str]]:
    """Compare saved optimizer states with optimizers by key; returns the same three lists as :func:`check_weights`."""
    wrong: list[str] = []
    absent = "is saved, and the run has no such optimizer"
    missing, unexpected = name_differences(own, saved, "optimizers", "is not saved", absent)
    for key, optimizer in own.items():
        if key not in saved:
            continue
        try:
            record = read(saved[key], OptimizerRecord, f"optimizers.{key}")
        except ValueError as error:
            wrong.append(str(error))
            continue
        groups = record.param_groups
        own_names, added = _parameter_names(model, optimizer), _added_groups(model, optimizer, groups)
        known = first_names(model) if added and model is not None else {}
        if unknown := [name for group in added for name in group["params"] if name not in known]:
            wrong.append(
                f"optimizers.{key}.param_groups[{len(own_names)}] was added in training, and the model has no "
                f"{few(unknown)} of its parameters: add the group before the state is loaded."
            )
        own_names += [group["params"] for group in added]
        differences = _compare_groups(f"optimizers.{key}", own_names, groups)
        missing += differences[0]
        unexpected += differences[1]
    return wrong, missing, unexpected


def _added_groups(model: Any, optimizer: Optimizer, saved: Sequence[dict[str, Any]]) -> Sequence[dict[str, Any]]:
    """Return those saved groups that were added in training: behind an optimizer's own, and with other parameters."""
    added = saved[len(optimizer.param_groups) :]
    own = _parameters_by_name(model, optimizer) if added else {}
    return () if any(name in own for name in held_parameters(added)) else added


def _compare_groups(path: str, own: list[list[str]], saved: list[dict[str, Any]]) -> tuple[list[str], list[str]]:
    """Return sentences about the parameters that only an optimizer has, and about those that its groups lack."""
    group_of = {name: index for index, group in enumerate(own) for name in group}
    saved_group_of = {name: index for index, group in enumerate(saved) for name in group["params"]}
    absent = "is saved, and the optimizer does not hold it"
    missing, unexpected = name_differences(group_of, saved_group_of, path, "is not saved", absent)
    unexpected += [
        f"{path}.{name} was saved in group {saved_group_of[name]}, and is in group {index}."
        for name, index in group_of.items()
        if saved_group_of.get(name, index) != index
    ]
    if len(own) != len(saved):
        unexpected.append(f"{path}.param_groups: {len(saved)} groups are saved, and the optimizer has {len(own)}.")
    return missing, unexpected


def load_optimizers(model: Any, optimizers: Sequence[Optimizer], saved: Mapping[str, Any]) -> None:
    """Load saved states into optimizers, for the parameters that both have; tensors are not copied.

    Groups that were added in training are added again. The settings of the groups, such as learning rates, are loaded
    if the number of groups is that of the saved ones.

    Raises:
        ValueError: An optimizer cannot load its state, as its own method finds out. All get their former ``state`` and
            ``param_groups`` back, in place of which ``load_state_dict`` has set new ones.
    """
    former: list[tuple[Optimizer, Any, Any]] = []
    for key, optimizer in by_key(map(unwrapped, optimizers)).items():
        if key in saved:
            former.append((optimizer, optimizer.state, [*optimizer.param_groups]))
            try:
                _add_groups(model, optimizer, saved[key]["param_groups"])
                _load_named_state(_parameters_by_name(model, optimizer), optimizer, saved[key])
            except Exception as error:
                for changed, state, groups in former:
                    changed.state, changed.param_groups = state, groups
                # This is a limit of the machine, and not an error in the saved state.
                if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
                    raise
                reason = f"{type(error).__name__}: {error}"
                raise ValueError(f"optimizers.{key} cannot load its saved state ({reason}).") from error


def _add_groups(model: Any, optimizer: Optimizer, saved: Sequence[dict[str, Any]]) -> None:
    if added := _added_groups(model, optimizer, saved):
        parameters = dict(named_parameters(model))
        for group in added:
            optimizer.add_param_group({**group, "params": [parameters[name] for name in group["params"]]})


def _load_named_state(parameters: Mapping[str, Tensor], optimizer: Optimizer, saved: Mapping[str, Any]) -> None:
    """Load a saved state into an optimizer, whose parameters are passed by name."""
    loaded = {
        name: {key: shard_like(value, parameters[name]) for key, value in values.items()}
        for name, values in saved["state"].items()
        if name in parameters
    }
    optimizer.load_state_dict(_merge_states([*parameters], optimizer.state_dict(), loaded, saved["param_groups"]))
    for name, values in loaded.items():
        _restore_dtypes(optimizer.state[parameters[name]], values)


def _merge_states(
    names: list[str], own: dict[str, Any], loaded: Mapping[str, Any], groups: list[dict[str, Any]]
) -> dict[str, Any]:
    """Return an optimizer's own state dict with the states and settings that were saved, by numbers of parameters."""
    numbers = dict(zip(names, held_parameters(own["param_groups"]), strict=True))
    # Optimizer.load_state_dict replaces the states of all parameters: those without a saved one keep their own.
    not_saved = {numbers[name] for name in numbers.keys() - {*held_parameters(groups)}}
    state = {number: held for number, held in own["state"].items() if number in not_saved}
    merged = []
    has_same_groups = len(groups) == len(own["param_groups"])
    for group, settings in zip(own["param_groups"], groups if has_same_groups else itertools.repeat({}), strict=False):
        if "lr" in settings:
            group.pop("scheduled_lr", None)  # of its own rate; states from elsewhere have none of the loaded one
        merged.append({**group, **settings, "params": group["params"]})
    return {"state": state | {numbers[name]: values for name, values in loaded.items()}, "param_groups": merged}


def _restore_dtypes(held: dict[Any, Any], values: Mapping[Any, Any]) -> None:
    """Replace state that torch has converted to the parameter's dtype, as a 32-bit average of 16-bit weights."""
    # bitsandbytes saves its tensors in a dictionary within that of the parameter, and holds them without.
    nested = [inner.items() for inner in values.values() if isinstance(inner, dict)]
    for field, value in itertools.chain(values.items(), *nested):
        if field in held:
            held[field] = _restored(held[field], value)


def _restored(own: Any, value: Any) -> Any:
    """Return loaded state with the dtype of the saved tensors, and with the strings, which torch also converts."""
    if isinstance(own, Tensor) and isinstance(value, Tensor):
        return own if own.dtype == value.dtype else value.to(own.device)
    if isinstance(own, dict) and isinstance(value, dict) and own.keys() == value.keys():
        return {key: _restored(own[key], item) for key, item in value.items()}
    if type(own) is type(value) and type(value) in {list, tuple} and len(own) == len(value):
        return type(value)(map(_restored, own, value))
    return value if isinstance(own, str) and isinstance(value, str) else own
