"""The outer step of DiLoCo and local SGD (arXiv:2311.08105, arXiv:1805.09767)."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from composer.functional.checks import check_flags, check_interval


@torch.no_grad()
def compute_outer_step(
    weights: Sequence[Tensor],
    differences: Sequence[Tensor],
    momenta: Sequence[Tensor],
    lr: float = 0.7,
    momentum: float = 0.9,
    *,
    nesterov: bool = True,
) -> tuple[list[Tensor], list[Tensor]]:
    """Compute a step of SGD on weights that several processes have trained apart since they were equal.

    The gradient of this outer step is a difference ``D``, the equal weights ``W`` minus the mean of those that the
    processes have now:

    - ``M <- momentum * M + D``,
    - ``W <- W - lr * (D + momentum * M)`` with ``nesterov``, else ``W <- W - lr * M``.

    With ``lr=1`` and ``momentum=0`` the result is the mean, which is local SGD (arXiv:1805.09767). The defaults are
    those of DiLoCo (arXiv:2311.08105).

    Args:
        weights: The weights as they were equal, floating point.
        differences: Their difference to the mean over the processes, each with the shape of its weight.
        momenta: The momenta, zeros before the first step, each with the shape of its weight.
        lr: The outer learning rate, more than 0.
        momentum: The outer momentum, in ``[0, 1)``.
        nesterov: Whether to use Nesterov momentum.

    Returns:
        The new weights and momenta. No argument is changed.

    Raises:
        TypeError: A setting has another type.
        ValueError: A setting is out of range, or the numbers of tensors differ.

    Example:
        >>> weights, momenta = [torch.tensor([1.0])], [torch.zeros(1)]
        >>> weights, momenta = compute_outer_step(weights, [torch.tensor([0.5])], momenta, lr=1.0, momentum=0.5)
        >>> weights, momenta
        ([tensor([0.2500])], [tensor([0.5000])])
    """
    check_interval("lr", lr, 0, math.inf, "It is the outer learning rate.", open_low=True, open_high=True)
    check_interval("momentum", momentum, 0, 1, "It is the decay of outer gradients.", open_high=True)
    check_flags(nesterov=nesterov)
    if not len(weights) == len(differences) == len(momenta):
        raise ValueError(
            "weights, differences and momenta must be as many tensors, got "
            f"{len(weights)}, {len(differences)} and {len(momenta)}."
        )
    if not weights:
        return [], []
    new = torch._foreach_mul(list(momenta), momentum)
    torch._foreach_add_(new, list(differences))
    steps = torch._foreach_add(list(differences), new, alpha=momentum) if nesterov else new
    return list(torch._foreach_add(list(weights), steps, alpha=-lr)), list(new)
