"""Optimizers whose weight decay is not multiplied by the learning rate (Loshchilov & Hutter 2017, arXiv:1711.05101).

``weights <- weights - (lr / initial_lr) * weight_decay * weights`` at each step: the decay follows the schedule, and
does not change when another learning rate is tried. torch's AdamW multiplies by ``lr`` itself.
"""

from __future__ import annotations

import math
import warnings

from torch import Tensor
from torch.optim.sgd import sgd

from composer.functional.checks import check_flags, check_interval, check_numbers
from composer.optim.stepping import Group, Params, SteppingOptimizer, adamw_step, check_adamw, decay, takes_lists

# Values for torch's AdamW, such as 0.01, are above it; multiplied by a usual learning rate they are below.
_LARGE_DECAY = 1e-3


class DecoupledSGDW(SteppingOptimizer):
    """SGD with momentum and decoupled weight decay.

    With the first momentum ``v_1 = gradient_1``, a step is

    - ``weights <- weights - (lr / initial_lr) * weight_decay * weights``,
    - ``v_t = momentum * v_(t-1) + (1 - dampening) * gradient_t``,
    - ``weights <- weights - lr * v_t``, or with ``nesterov``, ``weights - lr * (gradient_t + momentum * v_t)``.

    Without weight decay it is :class:`torch.optim.SGD`, and their states are interchangeable. ``initial_lr`` is the
    learning rate that a group was created with; schedules start from it. ``OneCycleLR`` overwrites it, and so does a
    schedule of :mod:`composer.optim` if another rate has been assigned.

    Args:
        params: Parameters, ``(name, parameter)`` pairs, or parameter groups with their own settings.
        lr: The learning rate, at least 0.
        momentum: Fraction of the previous step that is kept, at least 0.
        dampening: Fraction of the gradient that is left out of the momentum.
        weight_decay: Fraction of the weights removed at each step at the initial learning rate, at least 0.
        nesterov: Whether to use Nesterov momentum; requires momentum, and no dampening.

    Raises:
        TypeError: ``lr`` or ``weight_decay`` is not a number.
        ValueError: A value is out of range.

    Example:
        >>> import torch
        >>> weight = torch.nn.Parameter(torch.tensor([1.0]))
        >>> optimizer = DecoupledSGDW([weight], lr=0.1, weight_decay=1e-4)
        >>> weight.grad = torch.tensor([2.0])
        >>> optimizer.step()
        >>> weight
        Parameter containing:
        tensor([0.7999], requires_grad=True)
    """

    def __init__(
        self,
        params: Params,
        lr: float,
        momentum: float = 0,
        dampening: float = 0,
        weight_decay: float = 0,
        nesterov: bool = False,
    ) -> None:
        defaults = {
            "lr": lr,
            "momentum": momentum,
            "dampening": dampening,
            "weight_decay": weight_decay,
            "nesterov": nesterov,
        }
        super().__init__(params, defaults)
        _warn_of_large_decay(self)

    def _check(self, group: Group) -> None:
        check_flags(nesterov=group["nesterov"])
        check_numbers(dampening=group["dampening"])
        check_interval("momentum", group["momentum"], 0, math.inf, "It is the decay of gradients.", open_high=True)
        if group["nesterov"] and (group["momentum"] <= 0 or group["dampening"] != 0):
            raise ValueError(
                f"nesterov requires momentum above 0 and dampening=0, got momentum={group['momentum']} and "
                f"dampening={group['dampening']}. Set momentum=0.9, or omit nesterov."
            )

    def _update(self, weights: list[Tensor], gradients: list[Tensor], group: Group) -> None:
        decay(weights, _fraction(group))
        has_momentum = group["momentum"] != 0
        buffers = [self.state[weight].get("momentum_buffer") if has_momentum else None for weight in weights]
        sgd(
            weights,
            gradients,
            buffers,
            foreach=takes_lists(weights),
            weight_decay=0.0,
            momentum=group["momentum"],
            lr=group["lr"],
            dampening=group["dampening"],
            nesterov=group["nesterov"],
            maximize=False,
        )
        if has_momentum:
            for weight, buffer in zip(weights, buffers, strict=True):
                self.state[weight]["momentum_buffer"] = buffer


class DecoupledAdamW(SteppingOptimizer):
    """Adam with decoupled weight decay (arXiv:1412.6980, arXiv:1711.05101).

    With averages that start at 0, a step is

    - ``weights <- weights - (lr / initial_lr) * weight_decay * weights``,
    - ``m_t = beta_1 * m_(t-1) + (1 - beta_1) * gradient_t``, ``v_t = beta_2 * v_(t-1) + (1 - beta_2) * gradient_t**2``,
    - ``weights <- weights - lr * (m_t / (1 - beta_1**t)) / (sqrt(v_t / (1 - beta_2**t)) + eps)``.

    At a constant rate it is :class:`torch.optim.AdamW` with ``weight_decay / lr``, and their states are
    interchangeable. ``initial_lr`` is the learning rate that a group was created with; schedules start from it.
    ``OneCycleLR`` replaces it with its own first rate, and a schedule of :mod:`composer.optim` with a rate that has
    been assigned.

    Args:
        params: Parameters, ``(name, parameter)`` pairs, or parameter groups with their own settings.
        lr: The learning rate, at least 0.
        betas: Decay rates of the two averages, in ``[0, 1)``.
        eps: Added to the denominator, at least 0.
        weight_decay: Fraction of the weights removed at each step at the initial learning rate, at least 0.
        amsgrad: Whether to divide by the largest ``v_t`` so far (Reddi et al. 2018, arXiv:1904.09237).
        cautious_weight_decay: Whether to decay only the elements that the step moves towards zero or not at all:
            with the direction ``u`` of the step, those with ``u * weights >= 0`` (arXiv:2510.12402).
        cautious_update: Whether to apply only the elements of the direction whose sign is that of the gradient,
            multiplied by ``elements / (applied elements + 1)`` (arXiv:2411.16085).
        rounding: What happens to updates of 16-bit weights of less than half the distance to the next number.
            ``"nearest"`` loses them. ``"stochastic"`` rounds up or down at random, so that the mean is exact (bfloat16
            only). ``"kahan"`` adds them later, and needs 16 bits of memory for each weight (arXiv:2010.06192).

    Raises:
        TypeError: ``lr`` or ``weight_decay`` is not a number.
        ValueError: A value is out of range.

    Example:
        >>> import torch
        >>> weight = torch.nn.Parameter(torch.tensor([1.0]))
        >>> optimizer = DecoupledAdamW([weight], lr=0.1, weight_decay=1e-4)
        >>> weight.grad = torch.tensor([2.0])
        >>> optimizer.step()
        >>> weight
        Parameter containing:
        tensor([0.8999], requires_grad=True)
    """

    def __init__(
        self,
        params: Params,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        weight_decay: float = 1e-5,
        amsgrad: bool = False,
        *,
        cautious_weight_decay: bool = False,
        cautious_update: bool = False,
        rounding: str = "nearest",
    ) -> None:
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "amsgrad": amsgrad,
            "cautious_weight_decay": cautious_weight_decay,
            "cautious_update": cautious_update,
            "rounding": rounding,
        }
        super().__init__(params, defaults)
        _warn_of_large_decay(self)

    def _check(self, group: Group) -> None:
        check_flags(amsgrad=group["amsgrad"])
        check_adamw(group["betas"], "eps", group["eps"])

    def _update(self, weights: list[Tensor], gradients: list[Tensor], group: Group) -> None:
        options = {"fraction": _fraction(group), "eps": group["eps"], "amsgrad": group["amsgrad"]}
        adamw_step(self.state, weights, gradients, group, **options)


def _fraction(group: Group) -> float:
    """Return the fraction of the weights that a step removes: ``(lr / initial_lr) * weight_decay``."""
    rate, first = group["lr"], group["initial_lr"]
    return float(group["weight_decay"] * (rate / first if first else rate != 0))


def _warn_of_large_decay(optimizer: SteppingOptimizer) -> None:
    """Warn, from the constructor of an optimizer, of a decay that is probably one of torch's AdamW."""
    large = max(group["weight_decay"] for group in optimizer.param_groups)
    if large >= _LARGE_DECAY:
        warnings.warn(
            f"weight_decay={large} removes that fraction of the weights at each step: {type(optimizer).__name__} does "
            "not multiply it by the learning rate. Values about 1e-5 are usual. The equivalent of weight_decay in "
            "torch.optim.AdamW is lr * weight_decay here.",
            stacklevel=3,
        )
