"""Optimizers, loss scaling and number formats: how gradients are computed and used."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from composer.core import Precision, State, get_precision_context
from composer.trainer.microbatching import total_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.optim import Optimizer

__all__ = ["Optimization", "make_scaler", "wants_closure"]


def wants_closure(optimizer: Optimizer) -> bool:
    """Return whether ``optimizer.step`` cannot do without a function that computes the loss anew.

    Example:
        >>> wants_closure(torch.optim.LBFGS([torch.zeros(1)])), wants_closure(torch.optim.SGD([torch.zeros(1)], lr=1))
        (True, False)
    """
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    return closure is not None and closure.default is inspect.Parameter.empty


def make_scaler(precision: Precision, device: torch.device) -> torch.amp.GradScaler | None:
    """Return what scales the loss in 16-bit floats with a small range; None for other formats."""
    return torch.amp.GradScaler(device.type) if precision is Precision.AMP_FP16 else None


class Optimization:
    """Computes gradients in the state's precision and lets its optimizers step.

    Args:
        state: With optimizers, scaler and precision.

    Raises:
        ValueError: An optimizer wants a closure and cannot have it beside other optimizers or loss scaling.
    """

    def __init__(self, state: State) -> None:
        self._state = state
        self._wants_closure = any(map(wants_closure, state.optimizers))
        self.computes_again = self._wants_closure
        """Whether the optimizer may compute the gradients several times in a step."""
        self._create_graph = any(algorithm.backwards_create_graph for algorithm in state.algorithms)
        if self._wants_closure and (len(state.optimizers) > 1 or state.scaler is not None):
            names = ", ".join(type(optimizer).__name__ for optimizer in state.optimizers)
            raise ValueError(
                f"optimizers: one of {names} computes the loss several times a step, which goes neither with a second "
                f"optimizer nor with precision='{Precision.AMP_FP16}'. Use it alone, in 'fp32' or 'amp_bf16'."
            )
        self.precision = get_precision_context(state.precision, state.device.type)
        """In which forward pass and loss are computed; entered again and again."""

    def zero_grad(self) -> None:
        """Forget the last batch's gradients."""
        for optimizer in self._state.optimizers:
            optimizer.zero_grad()

    def backward(self, loss: Any, share: float) -> None:
        """Add the gradients of a microbatch's loss, which counts by its ``share`` of the batch."""
        total = loss if isinstance(loss, Tensor) else total_of(loss)
        if share != 1:
            total = total * share
        if self._state.scaler is not None:
            total = self._state.scaler.scale(total)
        torch.autograd.backward(total, create_graph=self._create_graph)

    def unscale(self) -> None:
        """Give the gradients their true size, so that algorithms can clip them."""
        if self._state.scaler is not None:
            for optimizer in self._state.optimizers:
                self._state.scaler.unscale_(optimizer)

    def step(self, closure: Callable[[], Tensor]) -> None:
        """Compute the gradients by ``closure`` and change the weights."""
        optimizers, scaler = self._state.optimizers, self._state.scaler
        if self._wants_closure:
            optimizers[0].step(closure)  # type: ignore[arg-type]  # torch says float where it takes and returns tensors
            return
        closure()
        for optimizer in optimizers:
            if scaler is None:
                optimizer.step()
            else:
                scaler.step(optimizer)
        if scaler is not None:
            scaler.update()
