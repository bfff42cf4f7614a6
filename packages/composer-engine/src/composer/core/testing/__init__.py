"""The contract suite: tests of what every algorithm must fulfil, for their authors.

:func:`check_algorithm` runs all checks of an algorithm. They need no test framework: a violation is an
``AssertionError`` with one sentence. :class:`Training` is their loop, with which an adapter of a host can be compared.

Example:
    >>> import attrs
    >>> import torch
    >>> from composer.core import Algorithm, Event, Stage, State
    >>> @attrs.define(eq=False)
    ... class Halve(Algorithm):
    ...     runs_at = {Event.AFTER_LOSS: Stage.LOSS}
    ...     reads = writes = {"loss"}
    ...     def apply(self, event, state, logger):
    ...         state.loss = state.loss / 2
    >>> class Mean(torch.nn.Linear):
    ...     def loss(self, outputs, batch):
    ...         return outputs.mean()
    >>> def make_state():
    ...     model = Mean(2, 1)
    ...     optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ...     return State(model, optimizers=optimizer, max_duration="2ep", train_dataloader=[torch.ones(4, 2)] * 3)
    >>> check_algorithm(Case(Halve, make_state))
"""

from composer.core.testing.contract import (
    CHECKS,
    Case,
    check_acts,
    check_algorithm,
    check_declarations,
    check_effects,
    check_events,
    check_no_effect,
    check_order,
    check_randomness,
    check_refusals,
    check_repr,
    check_resume,
    check_reuse,
    check_settings,
    effects_of,
)
from composer.core.testing.effects import Effects, RecordingState, Watch, observe
from composer.core.testing.loop import Training, seeded
from composer.functional.signatures import unquote_annotations

__all__ = [
    "CHECKS",
    "Case",
    "Effects",
    "RecordingState",
    "Training",
    "Watch",
    "check_acts",
    "check_algorithm",
    "check_declarations",
    "check_effects",
    "check_events",
    "check_no_effect",
    "check_order",
    "check_randomness",
    "check_refusals",
    "check_repr",
    "check_resume",
    "check_reuse",
    "check_settings",
    "effects_of",
    "observe",
    "seeded",
]

unquote_annotations(globals())
