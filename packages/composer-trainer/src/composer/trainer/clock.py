"""The clock of a training: measures its time, and advances the timestamps of its state."""

from __future__ import annotations

import contextlib
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from composer.core import State

__all__ = ["Clock"]


class Clock:
    """Advances the timestamps of a state, and measures the time between two calls of :meth:`elapsed`.

    Args:
        state: Its ``timestamp`` and ``previous_timestamp`` are set.

    Example:
        >>> from composer.core import State
        >>> clock = Clock(State(model=None))
        >>> clock.count_batch(samples=4, tokens=0, microseconds=100)
        >>> clock.state.timestamp.sample
        Time(4, TimeUnit.SAMPLE)
    """

    def __init__(self, state: State) -> None:
        self.state = state
        self._since = time.perf_counter()

    def elapsed(self) -> int:
        """Return the microseconds since the last call."""
        before, self._since = self._since, time.perf_counter()
        return int((self._since - before) * 1e6 + 0.5)

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Do not count the time within the block as training time."""
        before = time.perf_counter()
        yield
        self._since += time.perf_counter() - before

    def count_batch(self, samples: int, tokens: int, microseconds: int) -> None:
        """Advance by a batch."""
        state = self.state
        state.previous_timestamp = state.timestamp
        state.timestamp = state.timestamp.to_next_batch(samples, tokens, microseconds)

    def count_epoch(self) -> None:
        """Advance by an epoch; the time since its last batch is counted with the next batch."""
        self.state.previous_timestamp = self.state.timestamp
        self.state.timestamp = self.state.timestamp.to_next_epoch()

    def count_iteration(self) -> None:
        """Advance by an iteration; as by an epoch."""
        self.state.previous_timestamp = self.state.timestamp
        self.state.timestamp = self.state.timestamp.to_next_iteration()
