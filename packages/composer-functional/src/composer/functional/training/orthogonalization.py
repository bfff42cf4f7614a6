"""Orthogonalization of matrices by Newton-Schulz iterations, as Muon needs it (arXiv:2502.16982, arXiv:2505.16932)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TypeAlias

import torch
from torch import Tensor
from torch.backends.cpu import get_cpu_capability

from composer.functional.checks import check_choice, check_float_tensors, check_interval, check_whole, described
from composer.functional.modes import without_autocast

Coefficients: TypeAlias = "str | Sequence[float] | Sequence[Sequence[float]]"
Triple: TypeAlias = tuple[float, float, float]

_SAFETY = 1.01
"""Rounding to 16 bits may raise a singular value above 1, where the polynomials of Polar Express diverge."""
# Algorithm 1 of arXiv:2505.16932: optimal for singular values from 0.001 to 1. The last one is repeated.
_POLAR_EXPRESS: list[Triple] = [
    *(
        (a / _SAFETY, b / _SAFETY**3, c / _SAFETY**5)
        for a, b, c in (
            (8.28721201814563, -23.595886519098837, 17.300387312530933),
            (4.107059111542203, -2.9478499167379106, 0.5448431082926601),
            (3.9486908534822946, -2.908902115962949, 0.5518191394370137),
            (3.3184196573706015, -2.488488024314874, 0.51004894012372),
            (2.300652019954817, -1.6689039845747493, 0.4188073119525673),
            (1.891301407787398, -1.2679958271945868, 0.37680408948524835),
            (1.8750014808534479, -1.2500016453999487, 0.3750001645474248),
        )
    ),
    (1.875, -1.25, 0.375),
]
# Without AVX-512, torch multiplies matrices in bfloat16 by loops without vector instructions.
_IS_SLOW_ON_CPU = get_cpu_capability() == "AVX2"
_NAMED = {"quintic": [(3.4445, -4.7750, 2.0315)], "polar_express": _POLAR_EXPRESS}


def orthogonalize(
    matrices: Tensor,
    coefficients: Coefficients = "quintic",
    steps: int = 5,
    eps: float = 1e-7,
    *,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Replace the singular values of matrices by values near 1.

    With the Frobenius norm, ``X = matrices / norm(matrices)``, and each step is the polynomial
    ``X <- a X + b (X X^T) X + c (X X^T)^2 X``, which maps each singular value ``s`` to ``a s + b s^3 + c s^5`` and does
    not change the singular vectors.

    - ``"quintic"``: the coefficients of ``torch.optim.Muon``, the same in each step. Five steps map singular
      values from 0.01 to 1 into the interval from 0.68 to 1.14, and do not converge to 1.
    - ``"polar_express"``: the optimal polynomial of each step (arXiv:2505.16932), which converges. It divides by 1.01
      times the norm, as the paper does.

    Args:
        matrices: Shape ``(..., m, n)``, floating point. All are computed in one batch.
        coefficients: One of the two, or ``(a, b, c)``, or a sequence of these for the steps, whose last is repeated.
        steps: The number of steps, at least 1.
        eps: The least norm to divide by, more than 0.
        dtype: The precision of the computation, and of the result; by default bfloat16, and float32 on a CPU without
            AVX-512, where products in bfloat16 take a hundred times as long.

    Returns:
        Tensor of the shape of ``matrices``. A matrix of zeros remains zero.

    Raises:
        TypeError: ``matrices`` is not a floating-point tensor, or ``coefficients``, ``steps`` or ``dtype`` have the
            wrong type.
        ValueError: ``matrices`` has fewer than two dimensions, or another argument is out of range.

    Example:
        >>> orthogonalize(torch.tensor([[3.0, 0.0], [0.0, 0.1]]), "polar_express", steps=8, dtype=torch.float32)
        tensor([[1., 0.],
                [0., 1.]])
    """
    check_float_tensors(matrices=matrices)
    if matrices.ndim < 2:
        raise ValueError(
            f"matrices must have the shape (..., m, n), got {tuple(matrices.shape)}. Vectors have no singular values."
        )
    check_orthogonalization(coefficients, steps, eps)
    dtype = product_dtype(matrices.device) if dtype is None else dtype
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise TypeError(f"dtype must be a floating-point dtype, got {described(dtype)}.")
    x = matrices.to(dtype).reshape(-1, *matrices.shape[-2:])
    is_tall = x.shape[-2] > x.shape[-1]
    if is_tall:  # the product with the transpose is then the smaller matrix
        x = x.mT
    norms = torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True)
    x = x / (norms * _SAFETY if coefficients == "polar_express" else norms).clamp(min=eps)
    schedule = _schedule(coefficients)
    with without_autocast(x):
        for step in range(steps):
            a, b, c = schedule[min(step, len(schedule) - 1)]
            gram = torch.bmm(x, x.mT)
            x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return (x.mT if is_tall else x).reshape(matrices.shape)


def product_dtype(device: torch.device) -> torch.dtype:
    """Return bfloat16 if products of matrices are fast in it on the device, otherwise float32."""
    return torch.float32 if device.type == "cpu" and _IS_SLOW_ON_CPU else torch.bfloat16


def check_orthogonalization(coefficients: Coefficients, steps: int, eps: float, prefix: str = "") -> None:
    """Raise an error for invalid settings, which have the prefix in their names."""
    if isinstance(coefficients, str):
        check_choice(f"{prefix}coefficients", coefficients, *_NAMED)
    else:
        rows = _schedule(coefficients) if isinstance(coefficients, (tuple, list)) else []
        if not rows or not all(isinstance(row, (tuple, list)) and len(row) == 3 for row in rows):
            raise TypeError(
                f"{prefix}coefficients must be 'quintic', 'polar_express', three numbers, or a sequence of three "
                f"numbers for each step, got {described(coefficients)}."
            )
        for number in (number for row in rows for number in row):
            _check_finite(f"{prefix}coefficients", number, -math.inf, "They belong to X, X^3 and X^5.")
    check_whole(f"{prefix}steps", steps, 1, "It is the number of Newton-Schulz steps.")
    _check_finite("eps", eps, 0, "It is the least norm to divide by.")


def _check_finite(name: str, number: float, low: float, meaning: str) -> None:
    check_interval(name, number, low, math.inf, meaning, open_low=True, open_high=True)


def _schedule(coefficients: Coefficients) -> Sequence[Sequence[float]]:
    if isinstance(coefficients, str):
        return _NAMED[coefficients]
    is_one = not any(isinstance(one, (tuple, list)) for one in coefficients)
    return [coefficients] if is_one else coefficients  # type: ignore[list-item,return-value]  # see is_one
