"""What the optimizers have in common: closures, the settings of groups, and weight decay on lists of tensors."""

from __future__ import annotations

import abc
import math
import numbers
from collections.abc import Callable, Iterable, MutableMapping
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.adamw import adamw

from composer.core.arguments import NamesArguments
from composer.functional.checks import check_interval

Params: TypeAlias = "Iterable[Tensor] | Iterable[dict[str, Any]] | Iterable[tuple[str, Tensor]]"
Group: TypeAlias = dict[str, Any]


class SteppingOptimizer(NamesArguments, Optimizer, abc.ABC):
    """Compute a step of each group with functions on lists of tensors."""

    @abc.abstractmethod
    def _check(self, group: Group) -> None:
        """Raise an error if a setting of the group is invalid."""

    @abc.abstractmethod
    def _update(self, weights: list[Tensor], gradients: list[Tensor], group: Group) -> None:
        """Decay the weights, and update them from the gradients."""

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
            # The states of torch's optimizers lack some settings; torch adds "differentiable" to the defaults only.
            for name in self.defaults.keys() - {"differentiable"}:
                group.setdefault(name, self.defaults[name])
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
                self._update(weights, gradients, group)
        return loss


def decay(weights: list[Tensor], fraction: float) -> None:
    """Remove a fraction of the weights."""
    if fraction == 0:
        return
    # On a GPU, a list with several dtypes would launch one kernel per tensor.
    by_kind: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for weight in weights:
        by_kind.setdefault((weight.device, weight.dtype), []).append(weight)
    for tensors in by_kind.values():
        if takes_lists(tensors):
            torch._foreach_mul_(tensors, 1 - fraction)
        else:
            for tensor in tensors:
                tensor.mul_(1 - fraction)


def takes_lists(weights: list[Tensor]) -> bool:
    """Return whether operations on lists of tensors are exact: on a CPU they round numbers to 16-bit precision.

    ``torch._foreach_mul_`` of bfloat16 tensors on a CPU multiplies by 0.9961 instead of 0.998.
    """
    return not any(weight.device.type == "cpu" and weight.dtype.itemsize == 2 for weight in weights)


def check_adamw(betas: Any, eps_name: str, eps: float) -> None:
    """Raise an error for invalid settings of AdamW."""
    check_interval(eps_name, eps, 0, math.inf, "It is added to a root.", open_high=True)
    is_pair = isinstance(betas, (tuple, list)) and all(isinstance(beta, numbers.Real) for beta in betas)
    if not is_pair or len(betas) != 2 or not all(0 <= beta < 1 for beta in betas):
        raise (ValueError if is_pair else TypeError)(
            f"betas must be two numbers in [0, 1), got {betas}. They are the decay rates of the two averages."
        )


def adamw_step(
    states: MutableMapping[Tensor, Any],
    weights: list[Tensor],
    gradients: list[Tensor],
    group: Group,
    *,
    eps: float,
    amsgrad: bool = False,
) -> None:
    """Update the weights as Adam does; the states have the names and the contents of torch's."""
    own = [_adamw_state(states[weight], weight, amsgrad) for weight in weights]
    beta_1, beta_2 = group["betas"]
    adamw(
        weights,
        gradients,
        [state["exp_avg"] for state in own],
        [state["exp_avg_sq"] for state in own],
        [state["max_exp_avg_sq"] for state in own] if amsgrad else [],
        [state["step"] for state in own],
        foreach=takes_lists(weights),
        has_complex=any(weight.is_complex() for weight in weights),
        amsgrad=amsgrad,
        beta1=beta_1,
        beta2=beta_2,
        lr=group["lr"],
        weight_decay=0.0,
        eps=eps,
        maximize=False,
    )


def _adamw_state(state: dict[str, Any], weight: Tensor, amsgrad: bool) -> dict[str, Any]:
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
