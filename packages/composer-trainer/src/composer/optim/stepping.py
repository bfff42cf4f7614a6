"""What the optimizers have in common: closures, the settings of groups, and weight decay on lists of tensors."""

from __future__ import annotations

import abc
import math
import numbers
from collections.abc import Callable, Iterable, MutableMapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.adamw import adamw

from composer.core.checks import NamesArguments
from composer.functional.checks import check_interval
from composer.functional.dtensors import local_parts
from composer.optim.applying import (
    apply_directions,
    batches_of,
    check_applying,
    check_dtypes,
    is_applied_simply,
    placed_like,
    real_parts,
)

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
        if "rounding" in group:
            check_applying(group)
        self._check(group)
        super().add_param_group(param_group)
        _record_rates(self.param_groups[-1])
        try:
            self._check_parameters(self.param_groups[-1])
        except ValueError:
            del self.param_groups[-1]
            raise

    def _check_parameters(self, group: Group) -> None:
        """Raise a ValueError if the optimizer cannot update a parameter of a group with its settings."""
        if "rounding" in group:
            check_dtypes(group["params"], group)

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
            if group.get("rounding") == "stochastic":
                group["rounded_steps"] = group.get("rounded_steps", 0) + 1
            if weights:
                self._update(weights, gradients, group)
        return loss


def decay(weights: list[Tensor], fraction: float) -> None:
    """Remove a fraction of the weights."""
    if fraction == 0:
        return
    # On a GPU, a list with several dtypes would launch one kernel per tensor.
    for places in batches_of(weights):
        tensors = [weights[place] for place in places]
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
    is_pair = isinstance(betas, Sequence) and all(isinstance(beta, numbers.Real) for beta in betas)
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
    fraction: float,
    eps: float,
    amsgrad: bool = False,
) -> None:
    """Decay the weights, and update them as AdamW does; the states have the names and the contents of torch's."""
    if is_applied_simply(group):
        decay(weights, fraction)
        _adam(states, weights, gradients, weights, group, group["lr"], eps, amsgrad)
        return
    for number, places in enumerate(batches_of(weights)):
        some = [weights[place] for place in places]
        of_some = [placed_like(gradients[place], weights[place]) for place in places]
        # A step of Adam from zero, with a rate of 1, is its direction.
        steps = [torch.zeros_like(weight, memory_format=torch.preserve_format) for weight in some]
        _adam(states, some, of_some, steps, group, 1.0, eps, amsgrad)
        directions = torch._foreach_neg(real_parts(steps))  # noqa: SLF001
        apply_directions(
            states,
            some,
            local_parts(of_some),
            list(directions),
            group,
            rate=group["lr"],
            fraction=fraction,
            seed=(group.get("rounded_steps"), number),
        )


def _adam(
    states: MutableMapping[Tensor, Any],
    weights: list[Tensor],
    gradients: list[Tensor],
    targets: list[Tensor],
    group: Group,
    rate: float,
    eps: float,
    amsgrad: bool,
) -> None:
    """Add the steps of Adam to targets."""
    own = [_adamw_state(states[weight], weight, amsgrad) for weight in weights]
    beta_1, beta_2 = group["betas"]
    adamw(
        targets,
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
        lr=rate,
        weight_decay=0.0,
        eps=eps,
        maximize=False,
    )


def _adamw_state(state: dict[str, Any], weight: Tensor, amsgrad: bool) -> dict[str, Any]:
    if "step" not in state:
        state["step"] = torch.zeros((), dtype=torch.float32, device="cpu")
        state["exp_avg"] = torch.zeros_like(weight, memory_format=torch.preserve_format)
        state["exp_avg_sq"] = torch.zeros_like(weight, memory_format=torch.preserve_format)
    if amsgrad and "max_exp_avg_sq" not in state:
        state["max_exp_avg_sq"] = torch.zeros_like(weight, memory_format=torch.preserve_format)
    return state


def _record_rates(group: Group) -> None:
    group.setdefault("initial_lr", group["lr"])
    group.setdefault("scheduled_lr", group["lr"])  # so that a schedule uses a rate that is assigned before it begins
