"""Optimizers, loss scaling and precision: the step of the optimizers, with the gradients of a closure."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from composer.core import Precision, State, get_precision_context
from composer.core.checks import caller_level, shortened
from composer.core.evaluator import has_modes
from composer.core.optimizers import unwrapped, wants_closure
from composer.optim import DecoupledSGDW
from composer.optim.stepping import warn_of_lost_updates


def move_state(optimizer: Optimizer) -> None:
    """Move the state that an optimizer made in its constructor, as Adagrad does, to the devices of its parameters."""
    for parameter, values in optimizer.state.items():
        for name, value in values.items():
            if isinstance(value, Tensor) and value.shape == parameter.shape and name != "step":
                values[name] = value.to(parameter.device)


def make_scaler(precision: Precision, device: torch.device) -> torch.amp.GradScaler | None:
    """Return the loss scaler of ``amp_fp16``; None for other precisions."""
    return torch.amp.GradScaler(device.type) if precision is Precision.AMP_FP16 else None


def change_precision(state: State, precision: Precision) -> None:
    """Compute with another precision from now on, with a new loss scale; the same precision keeps it."""
    if precision is not state.precision:
        state.precision, state.scaler = precision, make_scaler(precision, state.device)


def check_precision(state: State, precision: Precision) -> None:
    """Raise an error if a run cannot continue in a precision.

    Raises:
        ValueError: The layers for ``amp_fp8`` would have to be created or removed; an optimizer requires a closure,
            and there are other optimizers or loss scaling; or a fused SGD has momentum, and there is loss scaling.
    """
    if precision is not state.precision and Precision.AMP_FP8 in (precision, state.precision):
        raise ValueError(
            f"fit(precision='{precision}') cannot change '{state.precision}': the layers for 'amp_fp8' are created by "
            "the constructor. Give precision to the Trainer."
        )
    optimizers = state.optimizers
    if precision is Precision.AMP_FP16 and any(map(_is_fused_momentum, optimizers)):
        raise ValueError(
            f"optimizers: SGD with momentum and fused=True does not support precision='{Precision.AMP_FP16}': if the "
            "gradients of the first step overflow, torch continues with momentum from uninitialized memory. Create "
            "it without fused=True, or use 'amp_bf16'."
        )
    if not any(map(wants_closure, optimizers)):
        return
    if len(optimizers) > 1 or (precision is Precision.AMP_FP16 and not takes_scaler(optimizers[0])):
        names = ", ".join(type(optimizer).__name__ for optimizer in optimizers)
        raise ValueError(
            f"optimizers: one of {names} computes the loss several times a step, which goes neither with a second "
            f"optimizer nor with precision='{Precision.AMP_FP16}'. Use it alone, in 'fp32' or 'amp_bf16'."
        )


class Optimization:
    """Steps the state's optimizers, and computes in its precision.

    Args:
        state: With optimizers, scaler and precision.
        skipped_steps: The number of steps skipped because the loss scale was too large; updated in place.

    Raises:
        ValueError: See :func:`check_precision`.
    """

    def __init__(self, state: State, skipped_steps: Tensor) -> None:
        self._state, self._skipped_steps = state, skipped_steps
        for optimizer in state.optimizers:
            # torch's schedulers warn if they step before an optimizer of this process has, as after an overflow.
            setattr(optimizer, "_opt_called", True)  # noqa: B010
        self._wants_closure = any(map(wants_closure, state.optimizers))
        check_precision(state, state.precision)

    def in_precision(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that computes in the state's precision; the same one if that needs no autocast."""
        state = self._state
        if state.precision.autocast_dtype is None:
            return function
        return get_precision_context(state.precision, state.device.type)(function)  # type: ignore[operator,no-any-return]

    def train_mode(self) -> None:
        """Switch optimizers with a train and an evaluation mode to the training weights."""
        for optimizer in map(unwrapped, self._state.optimizers):
            if has_modes(optimizer):
                optimizer.train()  # type: ignore[attr-defined]  # has_modes has looked

    def unscale(self) -> None:
        """Unscale the gradients, so that algorithms can clip them."""
        if self._state.scaler is not None:
            for optimizer in filter(_has_gradients, self._state.optimizers):
                self._state.scaler.unscale_(optimizer)

    def step(self, closure: Callable[[], Tensor]) -> None:
        """Compute the gradients with ``closure`` and update the weights."""
        # The stored field, because a property would be a further call in each step.
        optimizers, scaler = self._state._optimizers, self._state.scaler  # noqa: SLF001
        if self._wants_closure:
            if scaler is None:
                optimizers[0].step(closure)  # type: ignore[arg-type]  # annotated as float, takes tensors
            else:
                optimizers[0].step(closure, scaler)  # type: ignore[call-overload]  # takes_scaler has looked
        else:
            closure()
            for optimizer in optimizers:
                # The scaler raises an error for an optimizer without gradients, as of frozen layers.
                if scaler is None or not _has_gradients(optimizer):
                    optimizer.step()
                else:
                    scaler.step(optimizer)
        # Of a batch without gradients, update() raises an error.
        if scaler is not None and any(one["found_inf_per_device"] for one in scaler._per_optimizer_states.values()):  # noqa: SLF001
            # Once for all optimizers, after their steps: the scale is the one of their gradients until then.
            before = _scale(scaler)
            scaler.update()
            after = _scale(scaler)
            if before is not None and after is not None:
                # The scale decreases exactly if an optimizer skipped the step. This does not wait for the device.
                self._skipped_steps += after < before

    def figures(self) -> dict[str, Tensor]:
        """Return the values to log: none without loss scaling."""
        if self._state.scaler is None:
            return {}
        scale = _scale(self._state.scaler)
        counted = {"trainer/skipped_steps": self._skipped_steps.clone()}
        return counted if scale is None else counted | {"trainer/loss_scale": scale}


def takes_scaler(optimizer: Optimizer) -> bool:
    """Return whether an optimizer with a closure supports loss scaling."""
    return "scaler" in inspect.signature(optimizer.step).parameters


def _is_fused_momentum(optimizer: Optimizer) -> bool:
    inner = unwrapped(optimizer)
    return isinstance(inner, torch.optim.SGD) and any(
        one.get("fused") and one.get("momentum") for one in inner.param_groups
    )


def _has_gradients(optimizer: Optimizer) -> bool:
    return any(one.grad is not None for group in optimizer.param_groups for one in group["params"])


def _scale(scaler: torch.amp.GradScaler) -> Tensor | None:
    # get_scale() waits for the device.
    scale: Tensor | None = scaler._scale  # noqa: SLF001
    return None if scale is None else scale.clone()


def check_optimizers(model: nn.Module, optimizers: Sequence[Optimizer]) -> None:
    """Raise a TypeError or ValueError if the optimizers cannot train a model.

    Sequences in their ``param_groups`` that are not lists, tuples or strings are replaced by tuples.
    """
    if not optimizers:
        raise ValueError("optimizers is empty, so nothing would be trained: give one, or None for the default.")
    owned = {id(parameter) for parameter in model.parameters()}
    owners: dict[int, Optimizer] = {}
    for optimizer in optimizers:
        if not isinstance(optimizer, Optimizer):
            raise TypeError(
                "optimizers must be torch.optim.Optimizer objects, such as AdamW(model.parameters()), got "
                f"{shortened(optimizer)}."
            )
        if getattr(optimizer, "is_second_order", False):  # timm's name for it
            raise ValueError(
                f"optimizers: {type(optimizer).__name__} needs second derivatives, for which no step of the Trainer "
                "keeps the graph. Use an optimizer of first derivatives, such as AdamW."
            )
        for group in optimizer.param_groups:  # a checkpoint has plain data only, and OmegaConf's lists are none
            others = {name: value for name, value in group.items() if not isinstance(value, (list, tuple, str))}
            group |= {name: tuple(value) for name, value in others.items() if isinstance(value, Sequence)}
        held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        if strangers := sum(id(parameter) not in owned for parameter in held):
            raise ValueError(
                f"{type(optimizer).__name__} holds {strangers} parameters of {len(held)} that are not the model's, "
                "so they would be trained in vain: was the model changed after the optimizer was made? "
                "Create it again from model.parameters()."
            )
        if shared := sum(id(parameter) in owners for parameter in held):
            other = owners[next(id(parameter) for parameter in held if id(parameter) in owners)]
            raise ValueError(
                f"optimizers: {type(optimizer).__name__} holds {shared} parameters that {type(other).__name__} holds, "
                "too, so they would be changed twice in a step. Give each parameter to one optimizer."
            )
        owners |= dict.fromkeys(map(id, held), optimizer)
    warn_of_lost_updates(optimizers)
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    forgotten = [name for name, parameter in trained.items() if id(parameter) not in owners]
    if trained and len(forgotten) == len(trained):
        raise ValueError(
            f"optimizers hold none of the {len(trained)} parameters of {type(model).__name__} that are trained "
            "(requires_grad=True), so nothing would change. Make the optimizer from those parameters."
        )
    if forgotten:
        warnings.warn(
            f"optimizers do not hold {len(forgotten)} of the {len(trained)} parameters of {type(model).__name__} with "
            f"requires_grad=True, such as {forgotten[0]!r}, so they would not be trained. Give them to an optimizer, "
            "or set their requires_grad to False.",
            stacklevel=caller_level(),
        )


def default_optimizer(model: nn.Module) -> Optimizer:
    """Return the default optimizer."""
    return DecoupledSGDW(model.parameters(), lr=0.1)


def warn_of_default_optimizer() -> None:
    """Warn, from the method ``fit`` of a trainer, that it trains with the default optimizer."""
    warnings.warn(
        "No optimizer was specified: training with DecoupledSGDW(model.parameters(), lr=0.1). "
        "Pass the one that suits the model as optimizers.",
        stacklevel=4,  # the caller of fit, which is wrapped
    )
