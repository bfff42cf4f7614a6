"""Stochastic weight averaging: the mean of weights during training (Izmailov et al. 2018, arXiv:1803.05407)."""

from __future__ import annotations

import torch
from torch import nn

from composer.functional.checks import check_flags, check_whole
from composer.functional.training.ema import pair_tensors, update_averages


@torch.no_grad()
def compute_swa(model: nn.Module, swa_model: nn.Module, num_averaged: int, use_buffers: bool = True) -> int:
    """Add the weights of the model to an average with equal weights, in place (arXiv:1803.05407).

    ``swa = swa + (model - swa) / (num_averaged + 1)``

    Averages of weights in float16 or bfloat16 become float32 at the first update, and buffers other than running means
    and variances are copied, as by :func:`compute_ema`.

    The running statistics of BatchNorm are not those of the averaged weights. After the last update, recompute them
    with training data: ``torch.optim.swa_utils.update_bn(loader, swa_model)``.

    Args:
        model: The trained model; not changed.
        swa_model: The average, a copy of the model's architecture, on any device; **changed in place**.
        num_averaged: The number of models in the average. With 0 the average becomes a copy of the model.
        use_buffers: Whether to average running means and variances; otherwise they are copied, like other buffers.

    Returns:
        The new number of models in the average: ``num_averaged + 1``.

    Raises:
        TypeError: One of the two is not a module, or ``num_averaged`` is not an int.
        ValueError: ``num_averaged`` is negative, the two differ in the names of parameters and buffers or in the shapes
            of parameters, or they share all of them; nothing has been changed then.

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
    averaged, copied = pair_tensors(model, swa_model, "swa_model", use_buffers=use_buffers)
    # The first model is copied: as an average with weight 1 it would be NaN where the initial value is not finite.
    update_averages(*averaged, num_averaged / (num_averaged + 1))
    update_averages(*copied, smoothing=0)
    return num_averaged + 1
