"""Exponential moving average of weights (Polyak and Juditsky 1992; for networks, arXiv:1703.01780)."""

from __future__ import annotations

import operator

import torch
from torch import Tensor, nn

from composer.functional.checks import check_interval, check_modules, described

__all__ = ["compute_ema", "update_averages"]

_Tensors = list[Tensor] | tuple[Tensor, ...]


def compute_ema(model: nn.Module, ema_model: nn.Module, smoothing: float = 0.99) -> None:
    """Update the averaged model with the weights of the model, in place.

    ``ema = smoothing * ema + (1 - smoothing) * model`` for parameters and buffers; integer tensors, such as the number
    of batches of BatchNorm, are copied.

    Args:
        model: The trained model; not changed.
        ema_model: The average, a copy of the model's architecture; **changed in place**. For weights of 16 bits keep it
            in float32, ``copy.deepcopy(model).float()``: in 16 bits most updates are smaller than half a step between
            two numbers, and are lost.
        smoothing: The weight of the old average, in ``[0, 1]``. For a half-life of ``n`` steps use ``2 ** (-1 / n)``.

    Raises:
        TypeError: One of the two is not a module.
        ValueError: ``smoothing`` lies outside ``[0, 1]``, the two differ in the names or shapes of parameters and
            buffers, or they share all of them; nothing has been changed then.

    Example:
        >>> model, average = nn.Linear(2, 2), nn.Linear(2, 2)
        >>> expected = 0.9 * average.weight + 0.1 * model.weight
        >>> compute_ema(model, average, smoothing=0.9)
        >>> torch.allclose(average.weight, expected)
        True
    """
    averaged, current = pair_tensors(model, ema_model, "ema_model")
    update_averages(averaged, current, smoothing)


@torch.no_grad()
def update_averages(averaged: _Tensors, current: _Tensors, smoothing: float = 0.99) -> None:
    """Update averages with current values, in place: the kernel of :func:`compute_ema` for lists of tensors.

    Args:
        averaged: The averages; **changed in place**. A tensor must not occur twice.
        current: The current values, with the same shapes and devices, in the same order.
        smoothing: The weight of the old average, in ``[0, 1]``. Integer tensors are copied.

    Raises:
        ValueError: ``smoothing`` lies outside ``[0, 1]``, the lists differ in length, two tensors differ in shape, or
            both lists hold the same tensors; nothing has been changed then.
        RuntimeError: Two tensors differ in device (raised by torch).

    Example:
        >>> average = torch.tensor([0.0, 1.0])
        >>> update_averages([average], [torch.tensor([1.0, 1.0])], smoothing=0.75)
        >>> average
        tensor([0.2500, 1.0000])
    """
    check_interval("smoothing", smoothing, 0, 1, "It is the weight of the old average.")
    for name, tensors in (("averaged", averaged), ("current", current)):
        if not isinstance(tensors, (list, tuple)):
            raise TypeError(f"{name} must be a list of tensors, got {described(tensors)}.")
    if len(averaged) != len(current):
        raise ValueError(f"averaged and current must be as long, got {len(averaged)} and {len(current)} tensors.")
    if averaged and all(map(operator.is_, averaged, current)):
        raise ValueError(
            "averaged must be tensors of their own, got current itself. Create averages by copying the model."
        )
    # One call for mixed dtypes would be correct, but on a GPU it would launch a kernel for each tensor.
    groups: dict[tuple[torch.dtype, torch.dtype], tuple[list[Tensor], list[Tensor]]] = {}
    for old, new in zip(averaged, current, strict=True):
        if old.shape != new.shape:
            raise ValueError(
                f"Each average must have the shape of its current value, got {tuple(old.shape)} for "
                f"{tuple(new.shape)}. Create averages by copying the model, after every surgery."
            )
        dtypes = old.dtype, new.dtype
        if dtypes not in groups:
            groups[dtypes] = ([], [])
        old_tensors, new_tensors = groups[dtypes]
        old_tensors.append(old)
        new_tensors.append(new)
    for (dtype, other), (old_tensors, new_tensors) in groups.items():
        if not (dtype.is_floating_point or dtype.is_complex):
            torch._foreach_copy_(old_tensors, new_tensors)
        elif dtype == other:
            torch._foreach_lerp_(old_tensors, new_tensors, 1 - smoothing)
        else:  # lerp takes one dtype; the difference has the larger of the two
            torch._foreach_add_(old_tensors, torch._foreach_sub(new_tensors, old_tensors), alpha=1 - smoothing)


def pair_tensors(model: nn.Module, average: nn.Module, name: str) -> tuple[list[Tensor], list[Tensor]]:
    """Return the tensors of an averaged model, the argument ``name``, and those of the model, in the same order.

    Raises:
        TypeError: One of the two is not a module.
        ValueError: The names of their parameters and buffers differ, or they share all tensors.
    """
    check_modules(model=model, **{name: average})
    averaged: list[Tensor] = []
    current: list[Tensor] = []
    if not _collect_pairs(average, model, averaged, current, set()):
        raise ValueError(_describe_difference(average, model, name))
    if averaged and all(map(operator.is_, averaged, current)):
        raise ValueError(f"{name} must have tensors of its own, got those of model. Create it by copy.deepcopy(model).")
    return averaged, current


def _collect_pairs(
    averaged: nn.Module, current: nn.Module, old_tensors: list[Tensor], new_tensors: list[Tensor], seen: set[int]
) -> bool:
    """List tensors of equal names, faster than named_parameters and named_buffers; return False if names differ."""
    own, others = vars(averaged), vars(current)
    for kind in ("_parameters", "_buffers"):
        if own[kind].keys() != others[kind].keys():
            return False
        for name, old in own[kind].items():
            new = others[kind][name]
            if (old is None) != (new is None):
                return False
            # Tied weights are one tensor under two names, which must be updated once.
            if old is not None and id(old) not in seen:
                seen.add(id(old))
                old_tensors.append(old)
                new_tensors.append(new)
    children, counterparts = own["_modules"], others["_modules"]
    if children.keys() != counterparts.keys():
        return False
    for name, child in children.items():
        counterpart = counterparts[name]
        if child is None or counterpart is None:
            if child is not counterpart:
                return False
        elif not _collect_pairs(child, counterpart, old_tensors, new_tensors, seen):
            return False
    return True


def _describe_difference(average: nn.Module, model: nn.Module, name: str) -> str:
    def names(module: nn.Module) -> set[str]:
        return {name for name, _ in (*module.named_parameters(), *module.named_buffers())}

    def some(names: set[str]) -> str:
        shown = ", ".join(sorted(names)[:3])
        return f"{shown} and {len(names) - 3} more" if len(names) > 3 else shown or "nothing"

    averaged, current = names(average), names(model)
    return (
        f"{name} must have the names of model's parameters and buffers; "
        f"only model has {some(current - averaged)}, only {name} has {some(averaged - current)}. "
        "Create it by copy.deepcopy(model), after every surgery and before any wrapping (DDP, torch.compile)."
    )
