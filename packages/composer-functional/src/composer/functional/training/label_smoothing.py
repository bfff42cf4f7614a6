"""Label smoothing: distribute a part of each label over all classes (Szegedy et al. 2015, arXiv:1512.00567)."""

from __future__ import annotations

import torch
from torch import Tensor

from composer.functional.checks import check_interval
from composer.functional.losses import infer_target_type, scatter_ids, smooth_probabilities


def smooth_labels(logits: Tensor, target: Tensor, smoothing: float = 0.1) -> Tensor:
    """Distribute a part of each label's mass uniformly over all classes (arXiv:1512.00567).

    ``smoothed = (1 - smoothing) * one_hot(target) + smoothing / C``

    Args:
        logits: Logits of a model, shape ``(N, C, ...)``; only shape, dtype, device and memory format are used.
        target: Class ids ``(N, ...)``, any integer dtype; or class probabilities ``(N, C, ...)``.
        smoothing: The part to distribute, in ``[0, 1]``; 0 is the identity, 1 gives the uniform distribution.

    Returns:
        Class probabilities, shape ``(N, C, ...)``, a new tensor: in the dtype of ``target`` if it holds probabilities,
        else of the logits, but at least float32. The mass of each label is preserved, so a negative class id, which is
        ignored, and a row of zeros become zeros.

    Raises:
        TypeError: ``logits`` or ``target`` is not a tensor.
        ValueError: ``smoothing`` lies outside ``[0, 1]``, ``target`` is neither class ids nor probabilities, or a class
            id is not below ``C`` (on a GPU, CUDA raises a RuntimeError later).

    Example:
        >>> smooth_labels(torch.rand(2, 4), torch.tensor([0, 3]), smoothing=0.2)
        tensor([[0.8500, 0.0500, 0.0500, 0.0500],
                [0.0500, 0.0500, 0.0500, 0.8500]])
    """
    check_interval("smoothing", smoothing, 0, 1, "It is the part of the mass to distribute.")
    if not isinstance(logits, Tensor):
        raise TypeError(f"logits must be a tensor of shape (N, C, ...), got {type(logits).__name__}.")
    if logits.ndim < 2:
        raise ValueError(f"logits must have shape (N, C, ...), got {tuple(logits.shape)}.")
    dtype = torch.promote_types(logits.dtype, torch.float32)
    if infer_target_type(logits, target) == "probabilities":
        return smooth_probabilities(target if target.is_floating_point() else target.to(dtype), smoothing)
    ids = target.long().unsqueeze(1)
    mass = (ids >= 0).to(dtype)
    share = smoothing / logits.shape[1]
    # Each element of size N x C is written once, and that of the label once more, without one-hot or product.
    smoothed = torch.empty_like(logits, dtype=dtype, requires_grad=False).copy_(mass * share)
    return scatter_ids(smoothed, ids, mass * (1 - smoothing + share), "target")
