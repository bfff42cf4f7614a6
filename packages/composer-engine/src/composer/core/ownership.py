"""Whether the optimizers hold the parameters that the model has, after algorithms have changed the model."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import nn

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from composer.core.state import State

__all__ = ["Ownership"]

_REMEDY = "Pass optimizers=state.optimizers to the surgery, so that it moves them over."


class Ownership:
    """Sees to it that what changes the model takes the optimizers along.

    Call :meth:`begin`, let one after the other change the model, and :meth:`check` after each.

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

    def __init__(self, state: State) -> None:
        self._state = state
        self._before: Mapping[str, nn.Parameter] = {}
        self._owned_before: set[str] = set()

    def begin(self) -> None:
        """Remember which parameters the model has and which of them the optimizers hold."""
        self._before = self._parameters()
        self._owned_before = {name for name, parameter in self._before.items() if id(parameter) in self._owned()}

    def check(self, who: str) -> None:
        """Compare with the last look, and remember the present.

        What no optimizer has ever held is the user's choice: new parameters only have to be in an optimizer if what
        they replace was, or if everything that could be trained was.

        Raises:
            RuntimeError: An optimizer holds a parameter that is no longer in the model, or none holds one that is new.
        """
        now, owned = self._parameters(), self._owned()
        if owned:
            present, former = _ids(now), _ids(self._before)
            stale = [n for n, old in self._before.items() if id(old) in owned and id(old) not in present]
            if stale:
                raise RuntimeError(
                    f"{who} replaced parameters of the model, but an optimizer still holds the former {_names(stale)}, "
                    f"so the new ones would never learn. {_REMEDY}"
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
                    f"{who} gave the model new parameters that no optimizer holds, {_names(missing)}, "
                    f"so they would never learn. {_REMEDY}"
                )
        self.begin()

    def end(self) -> None:
        """Let go of what was remembered."""
        self._before, self._owned_before = {}, set()

    def _parameters(self) -> Mapping[str, nn.Parameter]:
        model = self._state.model
        return dict(model.named_parameters()) if isinstance(model, nn.Module) else {}

    def _owned(self) -> set[int]:
        groups = (group for optimizer in self._state.optimizers for group in optimizer.param_groups)
        return {id(parameter) for group in groups for parameter in group["params"]}


def _ids(parameters: Mapping[str, nn.Parameter]) -> set[int]:
    return {id(parameter) for parameter in parameters.values()}


def _names(names: Sequence[str]) -> str:
    shown = ", ".join(map(repr, names[:3]))
    return shown if len(names) <= 3 else f"{shown} and {len(names) - 3} more"
