"""What loggers have in common that gather what is logged: when they open what they write to, and when they write."""

from __future__ import annotations

import math
import time
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

from composer.core import LoggerDestination
from composer.core.interval import to_interval
from composer.functional.checks import check_whole_numbers

if TYPE_CHECKING:
    from composer.core import Interval, Logger, State, Time

__all__ = ["GatheringLogger"]


class GatheringLogger(LoggerDestination, ABC):
    """A logger that gathers what is logged, and writes it together. A subclass says how it is opened and written to.

    It is opened at ``AFTER_LOAD`` or, in a loop without this event, when training, an evaluation or a prediction
    begins. It writes every ``flush_interval`` batches, and at the end of each epoch, of evaluations, of predictions and
    of training.

    Args:
        every: How often metrics are logged: a time, a text or a number of epochs; each time if None.
        flush_interval: Batches between two writings.

    Raises:
        ValueError: ``flush_interval`` is less than 1, or ``every`` no length of time.
    """

    def __init__(self, *, every: Interval | Time | str | int | None, flush_interval: int) -> None:
        check_whole_numbers(flush_interval=flush_interval)
        if flush_interval < 1:
            raise ValueError(f"flush_interval must be at least 1 batch, got {flush_interval}.")
        self.every = to_interval(every)
        self.flush_interval = flush_interval
        self._batches = 0
        self._next_flush = math.inf  # by time.monotonic(); a subclass may want to write then, too
        self._logger: Logger | None = None

    @property
    def is_resumed(self) -> bool:
        """Whether the run continues an earlier one, from a checkpoint or from its beginning."""
        return self._logger is not None and self._logger.is_resumed

    @abstractmethod
    def open(self, state: State) -> None:
        """Open what is written to, if it is not open."""

    @abstractmethod
    def flush(self) -> None:
        """Write what was logged, if there is something open to write to, and count batches anew."""

    def refuse_if_in_use(self, logger: Logger) -> None:
        """Refuse a second run while the first has not been closed.

        Raises:
            RuntimeError: The logger is used by another run.
        """
        if self._logger is not None and self._logger is not logger:
            raise RuntimeError(
                f"{type(self).__name__} is used by another run, which is not closed: call that Trainer's close() "
                "first, or make a new logger."
            )

    def after_load(self, state: State, logger: Logger) -> None:
        """Open what is written to."""
        del logger
        self.open(state)

    def fit_start(self, state: State, logger: Logger) -> None:
        """Open what is written to, if it is not open."""
        del logger
        self.open(state)

    def eval_before_all(self, state: State, logger: Logger) -> None:
        """Open what is written to, if it is not open."""
        del logger
        self.open(state)

    def predict_start(self, state: State, logger: Logger) -> None:
        """Open what is written to, if it is not open."""
        del logger
        self.open(state)

    def batch_end(self, state: State, logger: Logger) -> None:
        """Write what was logged, when it is time."""
        del state, logger
        self._batches += 1
        if self._batches >= self.flush_interval or time.monotonic() >= self._next_flush:
            self.flush()

    def epoch_end(self, state: State, logger: Logger) -> None:
        """Write what was logged."""
        del state, logger
        self.flush()

    def fit_end(self, state: State, logger: Logger) -> None:
        """Write what was logged."""
        del state, logger
        self.flush()

    def eval_after_all(self, state: State, logger: Logger) -> None:
        """Write what was logged."""
        del state, logger
        self.flush()

    def eval_standalone_end(self, state: State, logger: Logger) -> None:
        """Write what was logged."""
        del state, logger
        self.flush()

    def predict_end(self, state: State, logger: Logger) -> None:
        """Write what was logged."""
        del state, logger
        self.flush()
