"""When a saver saves: at its interval, and when the weights are among the best by a metric."""

from __future__ import annotations

from collections.abc import Callable

import attrs

from composer.checkpoint.contents import metric_values
from composer.checkpoint.retention import KeepBest
from composer.core import Event, Interval, State
from composer.distributed import from_rank_zero

__all__ = ["DueSaves"]


@attrs.define(eq=False)
class DueSaves:
    """Decides in a training, a call of ``fit``, when a save is due; all processes decide the same.

    Args:
        interval: The interval, or a function that decides instead.
        keep_best: By which metric the weights are among the best.

    Attributes:
        values: Only in the process of rank 0, the values of the best checkpoints, the best first.
        measured: The batch at which the metrics of each label of data were measured last.
        best_at: The last batch at which the weights were among the best.
    """

    interval: Interval | Callable[[State, Event], bool]
    keep_best: KeepBest | None
    values: list[float] = attrs.field(factory=list, init=False)
    measured: dict[str, int] = attrs.field(factory=dict, init=False)
    best_at: int | None = attrs.field(default=None, init=False)
    _compared_at: int | None = attrs.field(default=None, init=False)

    @property
    def best_label(self) -> str:
        """The label of the data whose metric chooses the best checkpoint."""
        return "" if self.keep_best is None else self.keep_best.metric.removeprefix("metrics/").partition("/")[0]

    def is_due(self, state: State, event: Event) -> bool:
        """Return whether to save at an event; all processes have to call it."""
        is_in_interval = self._is_in_interval(state, event)
        return self._record_if_best(state) or is_in_interval

    def _is_in_interval(self, state: State, event: Event) -> bool:
        if not isinstance(self.interval, Interval):
            return self.interval(state, event)
        if event is Event.FIT_END:
            return bool(self.interval.every.value)
        # The last checkpoint is saved at FIT_END, after the last evaluation.
        elapsed = state.get_elapsed_duration()
        return (elapsed is None or elapsed.value < 1) and self.interval.is_due(state)

    def _record_if_best(self, state: State) -> bool:
        """Record a new value of the metric if it is among the best, and return whether."""
        best, batch = self.keep_best, int(state.timestamp.batch)
        if best is None or self.measured.get(self.best_label) != batch or self._compared_at == batch:
            return False
        self._compared_at = batch
        value = metric_values(state).get(best.metric)
        is_best = from_rank_zero(value is not None and best.improves(value, self.values))  # it read the folder
        if is_best:
            self.best_at = batch
        return is_best
