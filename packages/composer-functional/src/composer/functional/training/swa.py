"""Stochastic weight averaging: the mean of weights during training (Izmailov et al. 2018, arXiv:1803.05407)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from composer.functional.checks import check_flags, check_whole
from composer.functional.training.ema import pair_tensors, update_averages

__all__ = ["compute_swa"]


@torch.no_grad()
def compute_swa(model: nn.Module, swa_model: nn.Module, num_averaged: int, use_buffers: bool = True) -> int:
    """Add the weights of the model to an average with equal weights, in place (arXiv:1803.05407).

    ``swa = swa + (model - swa) / (num_averaged + 1)``

    The running statistics of BatchNorm are not those of the averaged weights. After the last update, recompute them
    with training data: ``torch.optim.swa_utils.update_bn(loader, swa_model)``.

    Args:
        model: The trained model; not changed.
        swa_model: The average, a copy of the model's architecture, on any device; **changed in place**.
        num_averaged: The number of models in the average. With 0 the average becomes a copy of the model.
        use_buffers: Whether to average floating-point buffers; otherwise they are copied, like those of other dtypes.

    Returns:
        The new number of models in the average: ``num_averaged + 1``.

    Raises:
        TypeError: One of the two is not a module, or ``num_averaged`` is not an int.
        ValueError: ``num_averaged`` is negative, the two differ in the names or shapes of parameters and buffers, or
            they share all of them; nothing has been changed then.

    Example:
        >>> model, average = nn.Linear(1, 1), nn.Linear(1, 1)
        >>> num_averaged = 0
        >>> for weight in (1.0, 2.0, 6.0):  # in place of training
        ...     _ = nn.init.constant_(model.weight, weight)
        ...     num_averaged = compute_swa(model, average, num_averaged)
        >>> num_averaged, average.weight.item()
        (3, 3.0)
    """
    check_whole("num_averaged", num_averaged, 0, "It is the number of models in the average.")
    check_flags(use_buffers=use_buffers)
    averages, values = pair_tensors(model, swa_model, "swa_model")
    # All shapes are compared before the first tensor changes, also of those that are only copied.
    for average, value in zip(averages, values, strict=True):
        if average.shape != value.shape:
            names = {id(tensor): name for name, tensor in (*swa_model.named_parameters(), *swa_model.named_buffers())}
            raise ValueError(
                f"swa_model must have the shapes of model's parameters and buffers, got {tuple(average.shape)} for "
                f"{tuple(value.shape)} as {names[id(average)]}. Create it by copy.deepcopy(model), after every surgery."
            )
    buffers = set() if use_buffers else {id(buffer) for buffer in swa_model.buffers()}
    copied: list[tuple[Tensor, Tensor]] = []
    updated: list[tuple[Tensor, Tensor]] = []
    for average, value in zip(averages, values, strict=True):
        # The first model is copied: as an average with weight 1 it would be NaN where the initial value is not finite.
        pairs = copied if num_averaged == 0 or id(average) in buffers else updated
        pairs.append((average, value.to(average.device)))
    if copied:
        torch._foreach_copy_([average for average, _ in copied], [value for _, value in copied])
    update_averages(
        [average for average, _ in updated],
        [value for _, value in updated],
        smoothing=num_averaged / (num_averaged + 1),
    )
    return num_averaged + 1
