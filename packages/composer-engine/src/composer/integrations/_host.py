"""What the objects have in common that run algorithms in a loop of the user."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

from torch.optim import Optimizer

from composer.core import Adapter, Batch, LoadReport, Plan, State
from composer.core.optimizers import wants_closure

__all__ = ["HostAlgorithms", "call_model", "check_closure"]


class HostAlgorithms:
    """Algorithms in a loop of the user: their state, their plan, and the weights for evaluation.

    Attributes:
        adapter: Runs the algorithms.
    """

    def __init__(self, adapter: Adapter) -> None:
        self.adapter, self._is_loaded = adapter, False

    @property
    def state(self) -> State:
        """The state of the training: the clock, the algorithms and, within a step, the outputs."""
        return self.adapter.state

    def evaluation(self) -> AbstractContextManager[None]:
        """Return a context for evaluations, in which the model has its averaged weights, if there are any.

        The training weights are restored at the end, also after an error.

        Example::

            with algorithms.evaluation():
                accuracy = evaluate(model, eval_loader)
        """
        return self.adapter.evaluation()

    def explain(self, *, verbose: bool = False) -> Plan:
        """Return the plan: what runs at which event, in which order and why; ``verbose`` shows callbacks, too."""
        return self.adapter.explain(verbose=verbose)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the algorithms and the clock, as plain data and tensors, for the host's checkpoint."""
        return self.adapter.state_dict()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> LoadReport:
        """Load what ``state_dict`` returned; the host calls it when it loads a checkpoint.

        Raises:
            StateMismatchError: The state does not fit, and nothing has been loaded.
        """
        report = self.adapter.load_state_dict(state_dict)
        self._is_loaded = True  # until the training begins, which then continues and does not start
        return report

    def _end_backward_before_step(self) -> None:
        """End the backward pass before a step of the optimizer; raise an error if there was no loss to compute."""
        if not self.adapter.is_in_step:
            raise RuntimeError(
                "optimizer.step() was called without a loss by algorithms.compute_loss(batch), so that the algorithms "
                "had no effect. Compute the loss of each batch with it."
            )
        self.adapter.end_backward()


def call_model(model: Callable[..., Any], batch: Batch) -> Any:
    """Call a model with a batch: with keyword arguments, with the first item of a tuple or list, or with all of it.

    Example:
        >>> call_model(abs, (-1, "label"))
        1
    """
    if isinstance(batch, Mapping):
        return model(**batch)
    return model(batch[0] if isinstance(batch, (tuple, list)) else batch)


def check_closure(optimizer: Optimizer, reason: str | None) -> None:
    """Raise an error for an optimizer that needs a closure, if a reason is given why none can be passed."""
    if reason is not None and wants_closure(optimizer):
        raise ValueError(f"{type(optimizer).__name__} needs a closure, which cannot be passed with {reason}.")
