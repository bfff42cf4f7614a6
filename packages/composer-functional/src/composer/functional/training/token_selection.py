"""Token selection: train on the tokens that a reference model predicts better (Lin et al. 2024, arXiv:2404.07965)."""

from __future__ import annotations

import torch
from torch import Tensor

from composer.functional.checks import check_float_tensors, check_interval


def select_tokens(losses: Tensor, reference_losses: Tensor, mask: Tensor, keep: float = 0.6) -> Tensor:
    """Return weights for the losses of tokens: 1 for those with the highest excess in each row (arXiv:2404.07965).

    ``excess = losses - reference_losses``. Of the ``n`` tokens of a row that count, the first ``keep * n`` by excess
    are selected. The last of them has the weight that completes this number. So the weights of each row sum up to
    ``keep * n``, and ``(weights * losses).sum() / weights.sum()``, the mean over the selected tokens, does not depend
    on how rows are split into microbatches and processes. The paper ranks the tokens of a batch instead.

    Args:
        losses: The loss of each token, shape ``(N, L)``, floating point; no gradients are computed for them here.
        reference_losses: Those of the reference model, the same shape.
        mask: Which tokens count, boolean, the same shape.
        keep: The share of the tokens to select, in ``(0, 1]``.

    Returns:
        The weights, in ``[0, 1]``, with the shape and dtype of ``losses``; 0 where ``mask`` is false. Of tokens with
        equal excess, the first come first.

    Raises:
        TypeError: ``losses`` or ``reference_losses`` is not a floating-point tensor, or ``keep`` is not a number.
        ValueError: The shapes differ or are not ``(N, L)``, ``mask`` is not boolean, or ``keep`` is out of range.

    Example:
        >>> losses, reference = torch.tensor([[3.0, 3.0, 1.0, 2.0]]), torch.tensor([[2.9, 1.0, 0.5, 2.0]])
        >>> select_tokens(losses, reference, torch.ones(1, 4).bool(), keep=0.4)
        tensor([[0.0000, 1.0000, 0.6000, 0.0000]])
    """
    check_float_tensors(losses=losses, reference_losses=reference_losses)
    check_interval("keep", keep, 0, 1, "It is the share of the tokens to select.", open_low=True)
    is_mask = isinstance(mask, Tensor) and mask.dtype is torch.bool
    if losses.ndim != 2 or not is_mask or not losses.shape == reference_losses.shape == mask.shape:
        shapes = [getattr(one, "shape", None) for one in (losses, reference_losses, mask)]
        raise ValueError(
            "losses, reference_losses and a boolean mask must have the same shape (N, L), a number for each token, got "
            f"{', '.join(str(shape and tuple(shape)) for shape in shapes)} and mask of {getattr(mask, 'dtype', mask)}."
        )
    excess = (losses.detach() - reference_losses).masked_fill(~mask, -torch.inf)
    ranks = torch.arange(losses.shape[1], device=losses.device)
    counts = mask.sum(1, keepdim=True).to(torch.promote_types(losses.dtype, torch.float32))
    weights = (keep * counts - ranks).clamp(0, 1).to(losses.dtype)
    return torch.zeros_like(weights).scatter(1, excess.argsort(dim=1, descending=True, stable=True), weights)
