"""Stochastic weight averaging: the mean of the weights along a training (Izmailov et al. 2018, arXiv:1803.05407)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from composer.functional.checks import check_flags, check_whole_numbers
from composer.functional.training.ema import update_averages

__all__ = ["compute_swa"]


@torch.no_grad()
def compute_swa(model: nn.Module, swa_model: nn.Module, num_averaged: int, use_buffers: bool = True) -> int:
    """Take the model into an average in which all models weigh alike, in place (arXiv:1803.05407).

    ``swa = swa + (model - swa) / (num_averaged + 1)``

    BatchNorm's running statistics are those of the weights they were measured with, not of averaged weights. After the
    last update measure them anew, with training data: ``torch.optim.swa_utils.update_bn(loader, swa_model)``.

    Args:
        model: The model that is trained; it stays as it is.
        swa_model: The average, a copy of the model's architecture, on any device; **changed in place**.
        num_averaged: How many models are in the average already. With 0 it becomes a copy of the model.
        use_buffers: Whether to average buffers of floating point; otherwise they are copied, as those of other dtypes
            always are.

    Returns:
        How many models are in the average now: ``num_averaged + 1``.

    Raises:
        TypeError: One of the two is not a module, or ``num_averaged`` is not an int.
        ValueError: ``num_averaged`` is negative, the two differ in the names or shapes of parameters and buffers, or
            they share all of these. Then nothing has been changed.

    Example:
        >>> model, average = nn.Linear(1, 1), nn.Linear(1, 1)
        >>> num_averaged = 0
        >>> for weight in (1.0, 2.0, 6.0):  # what training would do
        ...     _ = nn.init.constant_(model.weight, weight)
        ...     num_averaged = compute_swa(model, average, num_averaged)
        >>> num_averaged, average.weight.item()
        (3, 3.0)
    """
    for name, given in (("model", model), ("swa_model", swa_model)):
        if not isinstance(given, nn.Module):
            raise TypeError(f"{name} must be a torch.nn.Module, got {type(given).__name__}.")
    check_whole_numbers(num_averaged=num_averaged)
    check_flags(use_buffers=use_buffers)
    if num_averaged < 0:
        raise ValueError(f"num_averaged must be at least 0, got {num_averaged}. It is how many models are averaged.")
    averages, values = _named_tensors(swa_model), _named_tensors(model)
    if averages and all(average is values.get(name) for name, average in averages.items()):
        raise ValueError("swa_model must have tensors of its own, got those of model. Make it by copy.deepcopy(model).")
    if averages.keys() != values.keys():
        raise ValueError(_describe_difference(averages.keys() - values.keys(), values.keys() - averages.keys()))
    for name, average in averages.items():
        if average.shape != values[name].shape:
            raise ValueError(
                f"swa_model must have the shapes of model's parameters and buffers, got {tuple(average.shape)} for "
                f"{tuple(values[name].shape)} as {name}. Make it by copy.deepcopy(model), after every surgery."
            )
    copied = averages.keys() if num_averaged == 0 else () if use_buffers else dict(swa_model.named_buffers()).keys()
    _copy([averages[name] for name in copied], [values[name] for name in copied])
    moved = [name for name in averages if name not in copied]
    update_averages(
        [averages[name] for name in moved],
        [values[name].to(averages[name].device) for name in moved],
        smoothing=num_averaged / (num_averaged + 1),
    )
    return num_averaged + 1


def _named_tensors(model: nn.Module) -> dict[str, Tensor]:
    return dict((*model.named_parameters(), *model.named_buffers()))


def _copy(averages: list[Tensor], values: list[Tensor]) -> None:
    if averages:
        torch._foreach_copy_(averages, values)


def _describe_difference(only_average: set[str], only_model: set[str]) -> str:
    def some(names: set[str]) -> str:
        shown = ", ".join(sorted(names)[:3])
        return f"{shown} and {len(names) - 3} more" if len(names) > 3 else shown or "nothing"

    return (
        "swa_model must have the names of model's parameters and buffers; "
        f"only model has {some(only_model)}, only swa_model has {some(only_average)}. "
        "Make it by copy.deepcopy(model), after every surgery and before any wrapping (DDP, torch.compile)."
    )
