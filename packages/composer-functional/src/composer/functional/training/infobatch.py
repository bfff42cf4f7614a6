"""InfoBatch: prune samples with low losses without bias (Qin et al. 2023, arXiv:2303.04947)."""

from __future__ import annotations

import torch
from torch import Tensor

from composer.functional.checks import check_float_tensors, check_interval


def draw_infobatch_weights(scores: Tensor, ratio: float = 0.5, *, generator: torch.Generator | None = None) -> Tensor:
    """Draw the weights of the samples of an epoch; pruned samples have the weight 0 (arXiv:2303.04947).

    A sample whose score is below the mean of the scores is pruned with the probability ``ratio``, and otherwise has the
    weight ``1 / (1 - ratio)``. All other samples have the weight 1. The expectation of each weight is 1, so the sum of
    the weighted gradients has the expectation of the sum over all samples.

    Args:
        scores: The last known loss of each sample, shape ``(N,)``, floating point; NaN where there is none. The mean is
            that of the known ones, computed in float64; a sample without a score is not pruned.
        ratio: The probability, in ``[0, 1)``.
        generator: The source of the draws, on the device of the scores.

    Returns:
        The weights, shape ``(N,)``, with the dtype of the scores.

    Raises:
        TypeError: ``scores`` is not a floating point tensor, or ``ratio`` is not a number.
        ValueError: ``scores`` does not have one dimension, or ``ratio`` is out of range.

    Example:
        >>> scores = torch.tensor([0.1, 0.2, 3.0, torch.nan, 0.3, 0.1])
        >>> draw_infobatch_weights(scores, 0.5, generator=torch.Generator().manual_seed(1))
        tensor([0., 0., 1., 1., 2., 0.])
    """
    check_float_tensors(scores=scores)
    check_interval("ratio", ratio, 0, 1, "It is the probability to prune a sample.", open_high=True)
    if scores.ndim != 1:
        raise ValueError(f"scores must have the shape (N,), got {tuple(scores.shape)}.")
    is_low = scores < scores.double().nanmean()
    is_kept = torch.rand(scores.shape, generator=generator, dtype=torch.float64, device=scores.device) >= ratio
    return torch.where(is_low, is_kept / (1 - ratio), 1.0).to(scores.dtype)
