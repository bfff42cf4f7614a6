"""Averages of weights whose width is chosen after the training (Karras et al. 2023, arXiv:2312.02696)."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor

from composer.functional.checks import check_interval, check_whole

_WIDEST = 12**-0.5  # of the mean of all weights
_LARGEST_ERROR = 0.1


def power_ema_smoothing(num_updates: int, sigma_rel: float = 0.05) -> float:
    """Return the weight of the old average in an update of a power-function average (arXiv:2312.02696).

    ``average = s * average + (1 - s) * weights`` with ``s = (1 - 1 / num_updates) ** (gamma + 1)`` gives update ``k`` a
    weight in proportion to ``k ** (gamma + 1) - (k - 1) ** (gamma + 1)``. This profile has the same form at each length
    of the training, and its standard deviation is a fixed fraction of it,
    ``sigma_rel ** 2 = (gamma + 1) / ((gamma + 2) ** 2 * (gamma + 3))``.

    Args:
        num_updates: The number of updates including this one, at least 1. The first one copies the weights.
        sigma_rel: The standard deviation of the profile as a fraction of the training, above 0 and at most
            ``12 ** -0.5``, about 0.289, the mean of all weights.

    Raises:
        TypeError: ``num_updates`` is not an int, or ``sigma_rel`` not a number.
        ValueError: A value is out of range.

    Example:
        >>> power_ema_smoothing(1), round(power_ema_smoothing(1000, sigma_rel=0.05), 4)
        (0.0, 0.9822)
    """
    check_whole("num_updates", num_updates, 1, "It includes this update.")
    power = _exponent(sigma_rel) + 1
    return float((1 - 1 / num_updates) ** power)


def post_hoc_weights(
    num_updates: Sequence[int], sigma_rels: Sequence[float], sigma_rel: float, at: int | None = None
) -> Tensor:
    """Return the weights with which a sum of snapshots is an average of another width (arXiv:2312.02696).

    The profiles ``p_i`` of the snapshots are combined to the one with the least square distance from the profile ``p``
    of ``sigma_rel``: ``A x = b`` with the inner products ``A_ij = <p_i, p_j>`` and ``b_i = <p_i, p>``. In addition to
    the paper, the weights sum to 1, so that parts of the weights that do not change are exact.

    Args:
        num_updates: For each snapshot the number of updates of :func:`power_ema_smoothing` before it.
        sigma_rels: For each snapshot its ``sigma_rel``. Two different ones determine others well.
        sigma_rel: The width to reconstruct, above 0 and at most ``12 ** -0.5``.
        at: The number of updates of the average to reconstruct, that of a snapshot; of the last one if None.

    Returns:
        The weights, float64, one for each snapshot.

    Raises:
        TypeError: A value is of another type.
        ValueError: A value is out of range, there is no snapshot, or the snapshots do not determine the average: the
            distance of the profiles is more than a tenth of the norm of ``p``.

    Example:
        >>> updates = [each for each in range(100, 1100, 100) for _ in range(2)]
        >>> weights = post_hoc_weights(updates, [0.05, 0.1] * 10, sigma_rel=0.08)
        >>> weights.shape, round(weights.sum().item(), 6)
        (torch.Size([20]), 1.0)
    """
    if len(num_updates) != len(sigma_rels) or not len(num_updates):
        raise ValueError(
            f"num_updates and sigma_rels must have a value for each snapshot, at least one, got {len(num_updates)} and "
            f"{len(sigma_rels)}."
        )
    for updates in (*num_updates, 1 if at is None else at):
        check_whole("num_updates", updates, 1)
    at = max(num_updates) if at is None else at
    if at not in num_updates:  # no sum of other profiles ends there
        near = sorted({*num_updates}, key=lambda updates: abs(updates - at))[:2]
        raise ValueError(f"at must be the number of updates of a snapshot, such as {near}, got {at}.")
    # Times as fractions of the training, with the average to reconstruct at the end.
    times = torch.tensor([*num_updates, at], dtype=torch.float64) / at
    exponents = torch.tensor([*map(_exponent, sigma_rels), _exponent(sigma_rel)], dtype=torch.float64)
    products = _inner_products(times, exponents)
    count = len(times) - 1
    system, target = torch.ones_like(products), torch.ones_like(times)
    system[:-1, :-1], system[-1, -1], target[:-1] = products[:-1, :-1], 0, products[:-1, -1]
    # Profiles may be nearly equal, and the driver of the smallest solution exists on the CPU only.
    weights: Tensor = torch.linalg.lstsq(system, target.unsqueeze(1), driver="gelsd").solution[:count, 0]
    difference = torch.cat([weights, -torch.ones(1, dtype=torch.float64)])
    error = ((difference @ products @ difference) / products[-1, -1]).clamp(min=0).sqrt().item()
    if error > _LARGEST_ERROR:
        raise ValueError(
            f"sigma_rel={sigma_rel} at {at} updates cannot be reconstructed from these {count} snapshots: its profile "
            f"differs by {error:.0%}. Choose a value between those of the snapshots, or save snapshots more often."
        )
    return weights


def _inner_products(times: Tensor, exponents: Tensor) -> Tensor:
    """Return the integrals of ``p_i * p_j`` for ``p_i(t) = (gamma_i + 1) * t ** gamma_i / t_i ** (gamma_i + 1)``."""
    row, column = times.unsqueeze(1), times.unsqueeze(0)
    first, second = exponents.unsqueeze(1), exponents.unsqueeze(0)
    longer = torch.maximum(row, column)
    ratio = torch.minimum(row, column) / longer
    power = ratio ** torch.where(row < column, second, first)  # that of the longer one
    return (first + 1) * (second + 1) / (first + second + 1) * power / longer


@cache
def _exponent(sigma_rel: float) -> float:
    """Return the exponent ``gamma`` of the profile, the largest root of the definition of ``sigma_rel``."""
    meaning = "It is a fraction of the training; the mean of all weights has 12 ** -0.5."
    check_interval("sigma_rel", sigma_rel, 0, _WIDEST, meaning, open_low=True)
    inverse = sigma_rel**-2
    # The eigenvalues of this matrix are the roots of g^3 + 7 g^2 + (16 - inverse) g + 12 - inverse.
    companion = torch.tensor([[-7, inverse - 16, inverse - 12], [1, 0, 0], [0, 1, 0]], dtype=torch.float64)
    return max(0.0, float(torch.linalg.eigvals(companion).real.max()))
