"""Log the learning rates of a run."""

from __future__ import annotations

from composer.core import Callback, Logger, State
from composer.core.optimizers import unwrapped
from composer.core.saving.components import by_key


class LRMonitor(Callback):
    """Log the learning rates of every batch, one for each parameter group.

    Their names are ``lr-<class>/group<index>``, as in ``lr-SGD/group0``; a second optimizer of the same class has the
    name ``lr-SGD.1/group0``. An optimizer wrapped by an algorithm keeps its name. A batch's learning rates and its loss
    are logged for the same step.

    Example:
        >>> import torch
        >>> from composer.core import Engine
        >>> from composer.loggers import InMemoryLogger
        >>> optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
        >>> state = State(model=None, optimizers=optimizer, callbacks=LRMonitor())
        >>> history = InMemoryLogger()
        >>> Engine(state, Logger(state, history)).run_event("batch_start")
        >>> history.most_recent_values
        {'lr-SGD/group0': 0.1}
    """

    def batch_start(self, state: State, logger: Logger) -> None:
        """Log the learning rates, after the schedulers have stepped."""
        if not logger.destinations:
            return
        names = by_key(unwrapped(optimizer) for optimizer in state.optimizers)
        logger.log_metrics(
            {
                f"lr-{name}/group{number}": group["lr"]
                for name, optimizer in zip(names, state.optimizers, strict=True)
                for number, group in enumerate(optimizer.param_groups)
            }
        )
