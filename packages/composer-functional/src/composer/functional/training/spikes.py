"""Spikes of the loss and of gradients: values far above those before them (ZClip, arXiv:2504.02507)."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from composer.functional.checks import check_float_tensors, check_interval, check_whole


def detect_spikes(
    values: Tensor, history: Tensor, threshold: float = 6.0, min_values: int = 2
) -> tuple[Tensor, Tensor]:
    """Return which values are far above those before them; does not wait for the device (arXiv:2504.02507).

    ``limit = mean(history) + threshold * std(history)``; a value is a spike if it is above the limit or not finite. The
    standard deviation is the unbiased one. Store a spike as its limit (``values.minimum(limits)``): a single one then
    has a bounded influence on later limits, and these adapt to values that stay at a higher level.

    Args:
        values: Current values, shape ``(...)``, floating point, such as the loss and the norm of the gradients.
        history: For each of them the values before, shape ``(..., N)``, in any order; NaN where there is none.
        threshold: The number of standard deviations, above 0.
        min_values: The number of values in a history from which on finite values are compared, at least 2.

    Returns:
        Whether each value is a spike, ``(...)``, and the limits, ``(...)``; infinite for histories that are too short.

    Raises:
        TypeError: ``values`` or ``history`` is not a floating point tensor, or a number has another type.
        ValueError: The shapes do not fit, or a number is out of range.

    Example:
        >>> history = torch.tensor([[1.0, 2.0, 3.0], [1.0, 2.0, torch.nan]])
        >>> detect_spikes(torch.tensor([5.5, 9.0]), history, threshold=3.0, min_values=3)
        (tensor([ True, False]), tensor([5., inf]))
    """
    check_float_tensors(values=values, history=history)
    check_interval("threshold", threshold, 0, math.inf, "It counts deviations.", open_low=True, open_high=True)
    check_whole("min_values", min_values, 2, "A standard deviation is that of several values.")
    if history.shape[:-1] != values.shape or not history.ndim:
        raise ValueError(
            f"history must have the shape of values and a last dimension for the values before, got "
            f"{tuple(history.shape)} for {tuple(values.shape)}."
        )
    count = history.isfinite().sum(-1)
    mean = history.nanmean(-1)
    deviation = ((history - mean.unsqueeze(-1)).square().nansum(-1) / (count - 1)).sqrt()
    limits = torch.where(count >= min_values, mean + threshold * deviation, math.inf)
    return ~(values.isfinite() & (values <= limits)), limits
