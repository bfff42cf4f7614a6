"""Exponential moving average of weights (Polyak and Juditsky 1992; for networks, arXiv:1703.01780)."""

from __future__ import annotations

import operator

import torch
from torch import Tensor, nn

from composer.functional.checks import check_interval, check_modules, described, few

_CONVERTED_AT_ONCE = 16

_Tensors = list[Tensor] | tuple[Tensor, ...]
_Pairs = tuple[list[Tensor], list[Tensor]]


def compute_ema(model: nn.Module, ema_model: nn.Module, smoothing: float = 0.99) -> None:
    """Update the averaged model with the weights of the model, in place.

    ``ema = smoothing * ema + (1 - smoothing) * model`` for parameters, and for the buffers ``running_mean`` and
    ``running_var``, the statistics of norms. All other buffers are copied: averages of the unit vectors of a spectral
    norm, of codebooks or of counts have no meaning.

    Weights in float16 or bfloat16 could not follow small changes: their averages become float32 at the first update.
    Create the average by ``copy.deepcopy(model).float()``, also before you load a saved one, which a copy in 16 bits
    would round. To evaluate in the model's dtype, convert a copy: ``copy.deepcopy(ema_model).to(torch.bfloat16)``.

    Args:
        model: The trained model; not changed.
        ema_model: The average, a copy of the model's architecture, on any device; **changed in place**.
        smoothing: The weight of the old average, in ``[0, 1]``. For a half-life of ``n`` steps use ``2 ** (-1 / n)``.

    Raises:
        TypeError: One of the two is not a module.
        ValueError: ``smoothing`` lies outside ``[0, 1]``, the two differ in the names of parameters and buffers or in
            the shapes of parameters, or they share all of them; nothing has been changed then.

    Example:
        >>> model, average = nn.Linear(2, 2), nn.Linear(2, 2)
        >>> expected = 0.9 * average.weight + 0.1 * model.weight
        >>> compute_ema(model, average, smoothing=0.9)
        >>> torch.allclose(average.weight, expected)
        True
    """
    _check_smoothing(smoothing)
    pairs, copied = pair_tensors(model, ema_model, "ema_model")
    update_averages(*pairs, smoothing)
    update_averages(*copied, smoothing=0)


@torch.no_grad()
def update_averages(averaged: _Tensors, current: _Tensors, smoothing: float = 0.99) -> None:
    """Update averages with current values, in place: the kernel of :func:`compute_ema` for lists of tensors.

    Args:
        averaged: The averages; **changed in place**, those in float16 and bfloat16 also to float32. A tensor must not
            occur twice.
        current: The current values, dense tensors with the same shapes, in the same order. Those on another device are
            moved to that of their averages.
        smoothing: The weight of the old average, in ``[0, 1]``. With 0, and if they are integers or of 8 bits, current
            values are copied.

    Raises:
        ValueError: ``smoothing`` lies outside ``[0, 1]``, the lists differ in length, two tensors differ in shape, or
            both lists hold the same tensors; nothing has been changed then.

    Example:
        >>> average = torch.tensor([0.0, 1.0])
        >>> update_averages([average], [torch.tensor([1.0, 1.0])], smoothing=0.75)
        >>> average
        tensor([0.2500, 1.0000])
    """
    _check_smoothing(smoothing)
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
    left: set[torch.device] = set()
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
        if new.device == old.device:
            new_tensors.append(new)
        else:
            new_tensors.append(new.to(old.device, non_blocking=True))
            if "cpu" in (old.device.type, new.device.type):
                left.add(old.device if new.device.type == "cpu" else new.device)
    for device in left:
        # Once for all tensors: with CUDA, a copy to or from pinned memory may be incomplete when it returns. The host
        # may read its result, or change its source, only after it has waited.
        torch.accelerator.synchronize(device)
    for (dtype, other), (old_tensors, new_tensors) in groups.items():
        _update_group(old_tensors, new_tensors, dtype, other, smoothing)


def _update_group(
    averages: list[Tensor], values: list[Tensor], dtype: torch.dtype, other: torch.dtype, smoothing: float
) -> None:
    """Update averages of one dtype with values of one, ``other``."""
    wide = average_dtype(dtype)
    if wide is not dtype and wide is not None:
        for average in averages:  # once: then they have the other dtype
            average.data = average.to(wide)
    if wide is None or smoothing == 0:
        torch._foreach_copy_(averages, values)
    elif wide is other:
        torch._foreach_lerp_(averages, values, 1 - smoothing)
    else:
        # torch has no lerp for two dtypes. All converted values at a time would take the memory of another model.
        for start in range(0, len(averages), _CONVERTED_AT_ONCE):
            part = averages[start : start + _CONVERTED_AT_ONCE]
            converted = [torch.empty_like(average) for average in part]
            torch._foreach_copy_(converted, values[start : start + _CONVERTED_AT_ONCE])
            torch._foreach_lerp_(part, converted, 1 - smoothing)


def average_dtype(dtype: torch.dtype) -> torch.dtype | None:
    """Return the dtype of averages of values of a dtype, at least float32; None if these are only copied.

    Example:
        >>> average_dtype(torch.bfloat16), average_dtype(torch.int64)
        (torch.float32, None)
    """
    # Numbers of 8 bits are quantized: they are meaningless without the scales that belong to them.
    is_averaged = (dtype.is_floating_point or dtype.is_complex) and dtype.itemsize > 1
    return torch.promote_types(dtype, torch.float32) if is_averaged else None


def is_statistic(name: str) -> bool:
    """Return whether a buffer is a running mean or variance of a norm, which is averaged with the weights.

    Example:
        >>> is_statistic("layers.1.running_var"), is_statistic("layers.1.rates")
        (True, False)
    """
    return name.rpartition(".")[2] in {"running_mean", "running_var"}


def is_dense(tensor: Tensor) -> bool:
    """Return whether a tensor is neither sparse nor nested, and can be averaged.

    Example:
        >>> is_dense(torch.ones(2)), is_dense(torch.ones(2).to_sparse())
        (True, False)
    """
    return tensor.layout is torch.strided and not tensor.is_nested


def _check_smoothing(smoothing: float) -> None:
    check_interval("smoothing", smoothing, 0, 1, "It is the weight of the old average.")


@torch.no_grad()
def pair_tensors(model: nn.Module, average: nn.Module, name: str, *, use_buffers: bool = True) -> tuple[_Pairs, _Pairs]:
    """Return the tensors of an averaged model, the argument ``name``, and those of the model, in the same order.

    The first pair of lists is averaged, the second copied. Tensors that are not dense or have another shape are copied
    here and not returned.

    Raises:
        TypeError: One of the two is not a module.
        ValueError: The names of their parameters and buffers or the shapes of parameters differ, or they share all
            tensors; nothing has been changed then.
    """
    check_modules(model=model, **{name: average})
    own, others = tensor_slots(average), tensor_slots(model)
    remedy = "Create it by copy.deepcopy(model), after every surgery and before any wrapping (DDP, torch.compile)."
    if own.keys() != others.keys():
        only_model, only_average = sorted(others.keys() - own.keys()), sorted(own.keys() - others.keys())
        raise ValueError(
            f"{name} must have the names of model's parameters and buffers; only model has {few(only_model)}, "
            f"only {name} has {few(only_average)}. {remedy}"
        )
    pairs: dict[int, tuple[Tensor, Tensor, bool]] = {}  # tied weights, one tensor under two names, are updated once
    replaced: list[tuple[dict[str, Tensor], str, Tensor]] = []
    for where, (holder, key) in own.items():
        old, new = holder[key], others[where][0][key]
        is_parameter = isinstance(old, nn.Parameter)
        if is_dense(old) and is_dense(new) and old.shape == new.shape:
            pairs.setdefault(id(old), (old, new, is_parameter or (use_buffers and is_statistic(key))))
        elif is_parameter and is_dense(old) and is_dense(new):
            raise ValueError(
                f"{name} must have the shapes of model's parameters, got {tuple(old.shape)} for {tuple(new.shape)} as "
                f"{where}. {remedy}"
            )
        else:
            replaced.append((holder, key, new))
    if pairs and all(old is new for old, new, _ in pairs.values()):
        raise ValueError(f"{name} must have tensors of its own, got those of model. Create it by copy.deepcopy(model).")
    for old, _, _ in pairs.values():
        if 0 in old.stride():  # an expanded buffer, whose elements share memory
            old.data = old.clone()
    for holder, key, new in replaced:
        value = new.detach().clone().to(holder[key].device)
        if isinstance(holder[key], nn.Parameter):
            holder[key].data = value
        else:
            holder[key] = value  # assigned data would keep the shape of a nested tensor
    kinds = [[(old, new) for old, new, kind in pairs.values() if kind is chosen] for chosen in (True, False)]
    averaged, copied = (([old for old, _ in kind], [new for _, new in kind]) for kind in kinds)
    return averaged, copied


def tensor_slots(module: nn.Module, *, empty: bool = False) -> dict[str, tuple[dict[str, Tensor], str]]:
    """Return, by its name, the dictionary of a module, and the key, of each parameter and buffer; shared ones too.

    With ``empty``, of those that are None.
    """
    return {
        f"{path}.{key}" if path else key: (holder, key)
        for path, child in module.named_modules(remove_duplicate=False)
        for holder in (vars(child)["_parameters"], vars(child)["_buffers"])
        for key, tensor in holder.items()
        if (tensor is None) is empty
    }
