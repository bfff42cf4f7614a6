"""Optimizers: parameters, learning rates, wrappers and closures; :class:`Ownership` checks what they hold."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from composer.functional.checks import few

_REMEDY = "Pass optimizers=state.optimizers to the surgery, so that it moves them over."


def wants_closure(optimizer: Optimizer) -> bool:
    """Return whether ``optimizer.step`` requires a closure that computes the loss again.

    Example:
        >>> wants_closure(torch.optim.LBFGS([torch.zeros(1)])), wants_closure(torch.optim.SGD([torch.zeros(1)], lr=1))
        (True, False)
    """
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    return closure is not None and closure.default is inspect.Parameter.empty


def unwrapped(optimizer: Optimizer) -> Optimizer:
    """Return the innermost optimizer, without wrappers that have a ``base_optimizer``, such as SAM's.

    Example:
        >>> from composer.functional import SAMOptimizer
        >>> unwrapped(SAMOptimizer(torch.optim.SGD([torch.zeros(1)]))).__class__.__name__
        'SGD'
    """
    inner = getattr(optimizer, "base_optimizer", None)
    return unwrapped(inner) if isinstance(inner, torch.optim.Optimizer) else optimizer


def held_parameters(groups: Iterable[Mapping[str, Any]]) -> list[Any]:
    """Return the parameters of an optimizer's groups; of saved groups their numbers or names."""
    return [one for group in groups for one in group["params"]]


class HasOptimizers(Protocol):
    """What is used here of a :class:`State`, whose module imports this one."""

    model: Any
    optimizers: Any
    algorithms: Any


class Ownership:
    """Checks that the optimizers hold the parameters of the model after each change to the model.

    Call :meth:`begin` first, and :meth:`check` after each component that may change the model.

    Example:
        >>> import torch
        >>> from composer.core import State
        >>> model = nn.Linear(2, 2)
        >>> state = State(model=model, optimizers=torch.optim.SGD(model.parameters(), lr=0.1))
        >>> ownership = Ownership(state)
        >>> ownership.begin()
        >>> model.bias = nn.Parameter(torch.zeros(2))
        >>> ownership.check("MyAlgorithm")
        Traceback (most recent call last):
        RuntimeError: MyAlgorithm replaced parameters of the model, but an optimizer still holds the former 'bias', ...
    """

    def __init__(self, state: HasOptimizers) -> None:
        self._state = state
        self._before: Mapping[str, nn.Parameter] = {}
        self._owned_before: set[str] = set()

    def begin(self) -> None:
        """Store which parameters the model has and which of them the optimizers hold."""
        self._before = self._parameters()
        self._owned_before = {name for name, parameter in self._before.items() if id(parameter) in self._owned()}

    def check(self, component: str) -> None:
        """Compare with the stored parameters, and store the present ones.

        Parameters that no optimizer held before are the user's choice: new parameters must be in an optimizer only if
        those that they replace were, or if all trainable parameters were.

        Raises:
            RuntimeError: An optimizer holds a parameter that has left the model, or no optimizer holds a new one.
        """
        now, owned = self._parameters(), self._owned()
        if owned:
            present, former = _ids(now), _ids(self._before)
            stale = [n for n, old in self._before.items() if id(old) in owned and id(old) not in present]
            if stale:
                raise RuntimeError(
                    f"{component} replaced parameters of the model, but an optimizer still holds the former "
                    f"{few([*map(repr, stale)])}, so the new ones would never learn. {_REMEDY}"
                )
            owned_all = all(name in self._owned_before for name, old in self._before.items() if old.requires_grad)
            expected = now if owned_all else self._owned_before
            missing = [
                name
                for name, parameter in now.items()
                if parameter.requires_grad and id(parameter) not in owned | former and name in expected
            ]
            if missing:
                raise RuntimeError(
                    f"{component} added parameters to the model that no optimizer holds, {few([*map(repr, missing)])}, "
                    f"so they would never learn. {_REMEDY}"
                )
        self.begin()

    def end(self) -> None:
        """Release the stored parameters."""
        self._before, self._owned_before = {}, set()

    def _parameters(self) -> Mapping[str, nn.Parameter]:
        model = self._state.model
        return dict(model.named_parameters()) if isinstance(model, nn.Module) else {}

    def _owned(self) -> set[int]:
        return {id(one) for optimizer in self._state.optimizers for one in held_parameters(optimizer.param_groups)}


def _ids(parameters: Mapping[str, nn.Parameter]) -> set[int]:
    return {id(parameter) for parameter in parameters.values()}


def base_rate(group: dict[str, Any]) -> float | Tensor:
    """Return the learning rate of a parameter group that a schedule multiplies, its ``initial_lr``.

    A rate that :func:`set_rate` has not set was assigned by the user, and becomes the ``initial_lr``.

    Example:
        >>> group = {"lr": 0.1}
        >>> set_rate(group, 0.5 * base_rate(group))
        >>> group["lr"] = 0.04
        >>> base_rate(group)
        0.04
    """
    rate = group["lr"]
    base = group.setdefault("initial_lr", _copied(rate))
    scheduled = group.setdefault("scheduled_lr", _copied(rate))
    if isinstance(rate, Tensor):  # compared without waiting for the device
        group["initial_lr"] = torch.where(rate == scheduled, base, rate)
    elif rate != scheduled:
        group["initial_lr"] = rate
    initial: float | Tensor = group["initial_lr"]
    return initial


def set_rate(group: dict[str, Any], rate: float | Tensor) -> None:
    """Set the learning rate of a parameter group, and record it as ``scheduled_lr``.

    A tensor is changed in place, because compiled and captured optimizers refer to it.
    """
    if isinstance(group["lr"], Tensor):
        rate = group["lr"].fill_(rate).clone()
    else:
        group["lr"] = rate
    group["scheduled_lr"] = rate


def _copied(rate: float | Tensor) -> float | Tensor:
    return rate.clone() if isinstance(rate, Tensor) else rate
