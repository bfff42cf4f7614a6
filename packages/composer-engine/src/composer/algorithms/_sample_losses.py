"""Checks of algorithms that use the loss of each sample."""

from __future__ import annotations

import inspect

from composer.core import State
from composer.functional.dtensors import rank_and_processes


def check_processes(name: str, remedy: str, state: State) -> None:
    """Raise a ValueError if a loop with several processes does not weigh them by their numbers of samples."""
    if state.gather is None and rank_and_processes()[1] > 1:
        raise ValueError(
            f"{name} leaves the processes different numbers of samples, and this training loop counts all processes "
            f"the same: {remedy}."
        )


def check_reduction(name: str, state: State) -> None:
    """Raise a TypeError if the loss cannot be computed with ``reduction="none"``, as an algorithm needs it."""
    loss = state.model.loss if state.loss_function is None else state.loss_function
    parameters = inspect.signature(loss).parameters.values()
    if not any(each.name == "reduction" or each.kind is each.VAR_KEYWORD for each in parameters):
        own = f"{type(state.model).__name__}.loss"
        loss_name = own if state.loss_function is None else getattr(loss, "__name__", "the loss")
        raise TypeError(
            f"{name} needs the loss of each sample, which {loss_name} cannot return. Add "
            "the argument reduction='none', def loss(self, outputs, batch, reduction='mean')."
        )
