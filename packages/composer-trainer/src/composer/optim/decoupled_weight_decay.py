"""Optimizers whose weight decay is not multiplied by the learning rate (Loshchilov & Hutter 2017, arXiv:1711.05101).

``weights <- weights - (lr / initial_lr) * weight_decay * weights`` at each step: the decay follows the schedule, and
does not change when another learning rate is tried. torch's AdamW multiplies by ``lr`` itself.
"""

from __future__ import annotations

import abc
import math
import numbers
import warnings
from collections.abc import Callable, Iterable
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.adamw import adamw
from torch.optim.sgd import sgd

from composer.core.arguments import NamesArguments
from composer.functional.checks import check_flags, check_interval, check_numbers

__all__ = ["DecoupledAdamW", "DecoupledSGDW"]

Params: TypeAlias = "Iterable[Tensor] | Iterable[dict[str, Any]] | Iterable[tuple[str, Tensor]]"
Group: TypeAlias = dict[str, Any]

# Values for torch's AdamW, such as 0.01, are above it; multiplied by a usual learning rate they are below.
_LARGE_DECAY = 1e-3


class _DecoupledOptimizer(NamesArguments, Optimizer, abc.ABC):
    """Decay the weights, and compute the rest of a step with a torch function on lists of tensors."""

    def __init__(self, params: Params, defaults: Group) -> None:
        super().__init__(params, defaults)
        large = max(group["weight_decay"] for group in self.param_groups)
        if large >= _LARGE_DECAY:
            warnings.warn(
                f"weight_decay={large} removes that fraction of the weights at each step: {type(self).__name__} does "
                "not multiply it by the learning rate. Values about 1e-5 are usual. The equivalent of weight_decay in "
                "torch.optim.AdamW is lr * weight_decay here.",
                UserWarning,
                stacklevel=3,
            )

    @abc.abstractmethod
    def _check(self, group: Group) -> None:
        """Raise an error if a setting of the group is invalid."""

    @abc.abstractmethod
    def _update(self, weights: list[Tensor], gradients: list[Tensor], group: Group) -> None:
        """Update the weights from the gradients."""

    def add_param_group(self, param_group: Group) -> None:
        """Add a parameter group; its ``initial_lr`` defaults to its learning rate."""
        group = {**self.defaults, **param_group}
        check_interval("lr", group["lr"], 0, math.inf, "It is the learning rate.", open_high=True)
        meaning = "It is the fraction of the weights that a step removes."
        check_interval("weight_decay", group["weight_decay"], 0, math.inf, meaning, open_high=True)
        self._check(group)
        super().add_param_group(param_group)
        _record_rates(self.param_groups[-1])

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        for group in self.param_groups:
            _record_rates(group)
        for values in self.state.values():
            # Fused torch optimizers keep the count on the device, where reading it would synchronize.
            if "step" in values:
                values["step"] = torch.as_tensor(values["step"], dtype=torch.float32, device="cpu")

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the parameters that have a gradient. This does not synchronize with the device.

        Args:
            closure: Function that computes the loss and the gradients, if they are not computed yet.

        Returns:
            The result of ``closure``, or None without one.

        Raises:
            ValueError: A gradient is sparse.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            weights = [parameter for parameter in group["params"] if parameter.grad is not None]
            gradients = [weight.grad for weight in weights]
            if any(gradient.is_sparse for gradient in gradients):
                raise ValueError(
                    f"{type(self).__name__} cannot use sparse gradients. Create the embedding with sparse=False, "
                    "or optimize its weights with torch.optim.SparseAdam."
                )
            if weights:
                _decay(weights, group)
                self._update(weights, gradients, group)
        return loss


class DecoupledSGDW(_DecoupledOptimizer):
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
        has_momentum = group["momentum"] != 0
        buffers = [self.state[weight].get("momentum_buffer") if has_momentum else None for weight in weights]
        sgd(
            weights,
            gradients,
            buffers,
            foreach=True,
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


class DecoupledAdamW(_DecoupledOptimizer):
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

    Raises:
        TypeError: ``lr`` or ``weight_decay`` is not a number.
        ValueError: A value is out of range.

    Example:
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
    ) -> None:
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "amsgrad": amsgrad}
        super().__init__(params, defaults)

    def _check(self, group: Group) -> None:
        check_flags(amsgrad=group["amsgrad"])
        check_interval("eps", group["eps"], 0, math.inf, "It is added to a root.", open_high=True)
        betas = group["betas"]
        is_pair = isinstance(betas, (tuple, list)) and all(isinstance(beta, numbers.Real) for beta in betas)
        if not is_pair or len(betas) != 2 or not all(0 <= beta < 1 for beta in betas):
            raise (ValueError if is_pair else TypeError)(
                f"betas must be two numbers in [0, 1), got {betas}. They are the decay rates of the two averages."
            )

    def _update(self, weights: list[Tensor], gradients: list[Tensor], group: Group) -> None:
        states = [self._state_of(weight, group["amsgrad"]) for weight in weights]
        beta_1, beta_2 = group["betas"]
        adamw(
            weights,
            gradients,
            [state["exp_avg"] for state in states],
            [state["exp_avg_sq"] for state in states],
            [state["max_exp_avg_sq"] for state in states] if group["amsgrad"] else [],
            [state["step"] for state in states],
            foreach=True,
            has_complex=any(weight.is_complex() for weight in weights),
            amsgrad=group["amsgrad"],
            beta1=beta_1,
            beta2=beta_2,
            lr=group["lr"],
            weight_decay=0.0,
            eps=group["eps"],
            maximize=False,
        )

    def _state_of(self, weight: Tensor, amsgrad: bool) -> dict[str, Any]:
        state: dict[str, Any] = self.state[weight]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32, device="cpu")
            state["exp_avg"] = torch.zeros_like(weight, memory_format=torch.preserve_format)
            state["exp_avg_sq"] = torch.zeros_like(weight, memory_format=torch.preserve_format)
        if amsgrad and "max_exp_avg_sq" not in state:
            state["max_exp_avg_sq"] = torch.zeros_like(weight, memory_format=torch.preserve_format)
        return state


def _record_rates(group: Group) -> None:
    group.setdefault("initial_lr", group["lr"])
    group.setdefault("scheduled_lr", group["lr"])  # so that a schedule uses a rate that is assigned before it begins


def _decay(weights: list[Tensor], group: Group) -> None:
    """Multiply the weights by ``1 - (lr / initial_lr) * weight_decay``."""
    rate, first, decay = group["lr"], group["initial_lr"], group["weight_decay"]
    if decay == 0 or rate == 0:
        return
    # On a GPU, a list with several dtypes would launch one kernel per tensor.
    by_kind: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for weight in weights:
        by_kind.setdefault((weight.device, weight.dtype), []).append(weight)
    for tensors in by_kind.values():
        torch._foreach_mul_(tensors, 1 - (rate / first if first else 1) * decay)
