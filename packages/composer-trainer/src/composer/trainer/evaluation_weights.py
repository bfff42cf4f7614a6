"""The weights that a model is evaluated with: averages of an algorithm's or an optimizer's, where there are any."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from composer.core import Event
from composer.trainer.optimization import weights_to_evaluate

if TYPE_CHECKING:
    from collections.abc import Iterator

    from composer.core import Algorithm, Logger, State

__all__ = ["evaluation_weights"]

_OWNED = "the weights used for evaluation"


@contextlib.contextmanager
def evaluation_weights(state: State, logger: Logger) -> Iterator[None]:
    """Within the block the model has the weights that it is evaluated with; afterwards it has those it is trained with.

    An algorithm that owns ``"the weights used for evaluation"`` is run at ``PREDICT_START`` and ``PREDICT_END``;
    nobody else is. Schedule-free optimizers give their averages; as in an evaluation, an algorithm's come over these.

    Args:
        state: With the model and the algorithms.
        logger: What the algorithms log to.

    Example:
        >>> import torch
        >>> from composer.algorithms import EMA
        >>> from composer.core import Logger, State
        >>> model, ema = torch.nn.Linear(1, 1, bias=False), EMA(half_life=None, smoothing=0.5)
        >>> state = State(model, algorithms=ema)
        >>> logger = Logger(state)
        >>> for weight in (0.0, 1.0):
        ...     _ = torch.nn.init.constant_(model.weight, weight)
        ...     ema.apply(Event.BATCH_END, state, logger)
        >>> with evaluation_weights(state, logger):
        ...     model.weight.item()
        0.5
        >>> model.weight.item()
        1.0
    """
    owners = [one for one in state.algorithms if _OWNED in one.owns]
    with weights_to_evaluate(state.optimizers):
        try:
            for algorithm in owners:
                _run(algorithm, Event.PREDICT_START, state, logger)
            yield
        finally:
            for algorithm in owners:
                _run(algorithm, Event.PREDICT_END, state, logger)


def _run(algorithm: Algorithm, event: Event, state: State, logger: Logger) -> None:
    if event in algorithm.places() and algorithm.match(event, state):
        algorithm.apply(event, state, logger)
