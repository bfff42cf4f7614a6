"""What the optimizers have in common: settings of groups, and steps on lists of tensors.

A step decays the weights and adds a direction to them: cautiously, and without losing small updates of 16-bit weights,
if the group is configured so.
"""

from __future__ import annotations

import abc
import math
import numbers
import warnings
from collections.abc import Callable, Iterable, Iterator, MutableMapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.adamw import adamw

from composer.core.checks import NamesArguments, caller_level
from composer.core.saving.randomness import derive_seed
from composer.distributed.collectives import from_rank_zero
from composer.functional.checks import check_choice, check_flags, check_interval
from composer.functional.dtensors import is_dtensor, local_parts, own_region

Params: TypeAlias = "Iterable[Tensor] | Iterable[dict[str, Any]] | Iterable[tuple[str, Tensor]]"
Group: TypeAlias = dict[str, Any]

_SIMPLE: dict[str, Any] = {"cautious_weight_decay": False, "cautious_update": False, "rounding": "nearest"}

_MOST_ELEMENTS = 2**25
"""The most elements for which temporary tensors of 32 bits exist at once."""


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
        check_interval("lr", self.defaults["lr"], 0, math.inf, "It is the learning rate.", open_high=True)
        check_interval(
            "lr", group["lr"], -math.inf, math.inf, "It is the learning rate.", open_low=True, open_high=True
        )
        if group["lr"] < 0:
            warnings.warn(f"lr={group['lr']} of a group is negative: its parameters ascend the gradient.", stacklevel=3)
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
        for number, group in enumerate(self.param_groups):
            weights = [parameter for parameter in group["params"] if parameter.grad is not None]
            gradients = [weight.grad for weight in weights]
            if any(gradient.is_sparse for gradient in gradients):
                raise ValueError(
                    f"{type(self).__name__} cannot use sparse gradients. Create the embedding with sparse=False, "
                    "or optimize its weights with torch.optim.SparseAdam."
                )
            if group.get("rounding") == "stochastic":
                self._count_rounding(number, group)
            if weights:
                self._update(weights, gradients, group)
        return loss

    def _count_rounding(self, number: int, group: Group) -> None:
        """Count the steps of a group with stochastic rounding, whose first determines its seed for all others."""
        if "rounding_seed" not in group:
            # That of rank 0, so that replicas remain equal; shapes, because a run may have several optimizers.
            shapes = [tuple(weight.shape) for each in self.param_groups for weight in each["params"]]
            group["rounding_seed"] = derive_seed(from_rank_zero(torch.initial_seed()), shapes, number)
        group["rounded_steps"] = group.get("rounded_steps", 0) + 1


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
            number=number,
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


def check_applying(group: Group) -> None:
    """Raise an error for an invalid setting."""
    check_flags(**{name: group[name] for name in ("cautious_weight_decay", "cautious_update")})
    check_choice("rounding", group["rounding"], "nearest", "stochastic", "kahan")


def check_dtypes(weights: list[Tensor], group: Group) -> None:
    """Raise an error for weights that cannot be rounded stochastically."""
    if group["rounding"] == "stochastic" and any(weight.dtype is torch.float16 for weight in weights):
        raise ValueError(
            "rounding='stochastic' requires weights in bfloat16, or in 32 bits, which need no rounding, got float16. "
            "Use rounding='kahan', or model.to(torch.bfloat16)."
        )


def is_applied_simply(group: Group) -> bool:
    """Return whether all settings of this module have their defaults."""
    return all(group[name] == default for name, default in _SIMPLE.items())


def batches_of(weights: list[Tensor], most: int = _MOST_ELEMENTS, *, by_shape: bool = False) -> Iterator[list[int]]:
    """Yield the indices of weights that are processed together: of one dtype, device and sharding."""
    kinds: dict[object, list[int]] = {}
    for place, weight in enumerate(weights):
        spread = (weight.device_mesh, weight.placements) if is_dtensor(weight) else None
        key = (weight.dtype, weight.device, spread, weight.shape if by_shape else None)
        kinds.setdefault(key, []).append(place)
    for places in kinds.values():
        batch, elements = [places[0]], weights[places[0]].numel()
        for place in places[1:]:
            elements += weights[place].numel()
            if elements > most:
                yield batch
                batch, elements = [], weights[place].numel()
            batch.append(place)
        yield batch


def apply_directions(
    states: MutableMapping[Tensor, Any],
    weights: list[Tensor],
    gradients: list[Tensor],
    directions: list[Tensor],
    group: Group,
    *,
    rate: float,
    fraction: float,
    number: int,
) -> None:
    """Compute ``weights <- weights - fraction * weights - rate * directions`` with the settings of a group.

    Args:
        states: The states of the optimizer; those of ``"kahan"`` get a ``compensation``.
        weights: The weights, all of one dtype, device and sharding; **changed in place**.
        gradients: Their gradients: this process's parts.
        directions: The directions: this process's parts; **changed in place**.
        group: The settings.
        rate: The factor of the directions.
        fraction: The fraction of the weights to remove.
        number: That of this list of weights in the step of the group, which gives each its own random numbers.
    """
    check_dtypes(weights, group)
    if group["cautious_update"]:
        _mask(directions, real_parts(gradients), weights)
    parts = real_parts(weights)
    is_low = parts[0].dtype.itemsize < 4
    wide = [part.float() for part in parts] if is_low else parts
    steps = list(torch._foreach_mul([one.float() for one in directions] if is_low else directions, rate))
    if fraction:
        decayed: Any = wide
        if group["cautious_weight_decay"]:
            agrees = torch._foreach_mul(steps, wide)  # the rate does not change the sign, unless it is 0
            torch._foreach_sign_(agrees)
            torch._foreach_add_(agrees, 1)
            torch._foreach_clamp_max_(agrees, 1)  # 1 where the product is at least 0
            decayed = torch._foreach_mul(agrees, wide)
        torch._foreach_add_(steps, decayed, alpha=fraction)
    if is_low and group["rounding"] == "kahan":
        _step_with_compensation(states, weights, parts, wide, steps)
        return
    torch._foreach_sub_(wide, steps)
    if is_low:
        if group["rounding"] == "stochastic":
            words = group["rounding_seed"], group["rounded_steps"], number
            for place, (values, weight) in enumerate(zip(wide, weights, strict=True)):
                region = own_region(weight) if is_dtensor(weight) else None  # replicas remain equal
                _round_stochastically(values, derive_seed(*words, place, region))
        torch._foreach_copy_(parts, wide)


def _mask(directions: list[Tensor], gradients: list[Tensor], weights: list[Tensor]) -> None:
    """Remove what opposes the gradients, and scale the rest by ``elements / (remaining elements + 1)``."""
    # Products of signs, because those of small numbers may be 0 in float16.
    masks = torch._foreach_sign(directions)  # noqa: SLF001
    torch._foreach_mul_(masks, torch._foreach_sign(gradients))  # noqa: SLF001
    torch._foreach_clamp_min_(masks, 0)
    remaining = torch.stack([mask.sum(dtype=torch.float32) for mask in masks])
    first = weights[0]
    for dimension, placement in enumerate(first.placements) if is_dtensor(first) else ():
        if not placement.is_replicate():
            assert is_dtensor(first)
            torch.distributed.all_reduce(remaining, group=first.device_mesh.get_group(dimension))
    counts = torch.tensor([weight.numel() * (1 + weight.is_complex()) for weight in weights], dtype=torch.float32)
    factors = counts.to(remaining.device, non_blocking=True) / (remaining + 1)
    torch._foreach_mul_(directions, masks)
    torch._foreach_mul_(directions, [factor.to(directions[0].dtype) for factor in factors.unbind()])


def _step_with_compensation(
    states: MutableMapping[Tensor, Any],
    weights: list[Tensor],
    parts: list[Tensor],
    wide: list[Tensor],
    steps: list[Tensor],
) -> None:
    """Subtract steps, and keep what rounding removes for the next step (Kahan summation)."""
    for weight in weights:
        if "compensation" not in states[weight]:
            states[weight]["compensation"] = torch.zeros_like(weight, memory_format=torch.preserve_format)
    kept = real_parts([states[weight]["compensation"] for weight in weights])
    due = torch._foreach_sub([one.float() for one in kept], steps)
    torch._foreach_copy_(parts, list(torch._foreach_add(wide, due)))
    changes = torch._foreach_sub([part.float() for part in parts], wide)
    torch._foreach_copy_(kept, list(torch._foreach_sub(due, changes)))


def _round_stochastically(values: Tensor, seed: int) -> None:
    """Round float32 to one of the two neighbours in bfloat16, in place, with probabilities that keep the mean.

    bfloat16 is the upper half of float32: a random number is added to the lower half, which is then removed. Infinite
    values remain what they are, because their lower half is 0, and so does NaN, of which any bit may be set.
    """
    generator = torch.Generator(values.device).manual_seed(seed)
    bits = values.view(torch.int32)
    noise = torch.randint(0, 2**16, bits.shape, dtype=torch.int32, device=values.device, generator=generator)
    bits.copy_(torch.where(values.isnan(), bits, noise.add_(bits).bitwise_and_(-(2**16))))


def placed_like(gradient: Tensor, weight: Tensor) -> Tensor:
    """Return a gradient with the placements of its weight: of partial sums this process's part of the sum."""
    if is_dtensor(gradient) and is_dtensor(weight) and gradient.placements != weight.placements:
        return gradient.redistribute(placements=weight.placements)
    return gradient


def real_parts(tensors: list[Tensor]) -> list[Tensor]:
    """Return this process's parts, complex ones as pairs of real numbers; all share their memory."""
    return [torch.view_as_real(part) if part.is_complex() else part for part in local_parts(tensors)]


def warn_of_lost_updates(optimizers: Sequence[Optimizer]) -> None:
    """Warn of optimizers of torch, or of this project without ``rounding``, that update weights in bfloat16."""
    for optimizer in optimizers:
        groups = [one["params"] for one in optimizer.param_groups if one.get("rounding", "nearest") == "nearest"]
        lossy = sum(one.dtype is torch.bfloat16 and one.requires_grad for group in groups for one in group)
        if lossy and type(optimizer).__module__.startswith(("torch.optim", "composer.optim")):
            warnings.warn(
                f"{type(optimizer).__name__} updates {lossy} parameters in bfloat16, where changes of less than 0.2 % "
                "are lost. Load them with dtype=torch.float32 and compute with precision='amp_bf16', or use "
                "DecoupledAdamW(..., rounding='stochastic').",
                stacklevel=caller_level(),
            )
