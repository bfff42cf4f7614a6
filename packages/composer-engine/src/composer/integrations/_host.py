"""What the objects have in common that run algorithms in a loop of the user."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import attrs

from composer.core import Adapter, Batch, Event, LoadReport, Plan, ServedFields, State
from composer.functional.signatures import unquote_annotations

__all__ = ["HostAlgorithms", "call_model", "not_writable_at"]


class HostAlgorithms:
    """Algorithms in a loop of the user: their state, their plan, and the weights for evaluation.

    Attributes:
        adapter: Runs the algorithms.
    """

    def __init__(self, adapter: Adapter) -> None:
        self.adapter = adapter

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
            StateMismatchError: The state does not fit, and nothing has been changed.
        """
        return self.adapter.load_state_dict(state_dict)


def call_model(model: Callable[..., Any], batch: Batch) -> Any:
    """Call a model with a batch: with keyword arguments, with the first item of a tuple or list, or with all of it.

    Example:
        >>> call_model(abs, (-1, "label"))
        1
    """
    if isinstance(batch, Mapping):
        return model(**batch)
    return model(batch[0] if isinstance(batch, (tuple, list)) else batch)


def not_writable_at(served: ServedFields, fields: Mapping[Event, set[str]]) -> ServedFields:
    """Return what is served without some writable fields at some events."""
    writable = {event: names - fields.get(event, set()) for event, names in served.writable.items()}
    return attrs.evolve(served, writable=writable)


unquote_annotations(globals())
