"""Measure the cost of each algorithm, callback and logger."""

from __future__ import annotations

import time
from typing import Any

import attrs

from composer.core import Callback, Event, Logger, State
from composer.core.interval import Call
from composer.core.saving.components import reset_fields, transient
from composer.loggers.values import aligned

_COLUMNS = ("component", "event", "calls", "total ms", "µs a call", "% of run")
_BEFORE_THE_RUN = (Event.INIT, Event.BEFORE_LOAD, Event.AFTER_LOAD)


@attrs.frozen
class Cost:
    """The cost of one component at one event.

    Args:
        component: Its name in the run, as in the plan.
        event: The event at which it is called.
        calls: Number of calls.
        seconds: Total time of the calls.
        share: Fraction of the run's time, from 0 to 1; None for calls before the run starts.

    Example:
        >>> Cost("EMA", Event.BATCH_END, calls=4, seconds=0.002, share=0.01).seconds_a_call
        0.0005
    """

    component: str
    event: Event
    calls: int
    seconds: float
    share: float | None = None

    @property
    def seconds_a_call(self) -> float:
        """The mean time of a call."""
        return self.seconds / self.calls


@attrs.define
class _Tally:
    calls: int = 0
    seconds: float = 0.0


@attrs.define(eq=False)
class CostMonitor(Callback):
    """Measure the cost of each algorithm, callback, logger and subscribed function at each event.

    At the end of each fit a table named ``cost`` is logged, the most expensive first; ``print(monitor)`` shows it at
    any time and :meth:`table` returns it. Measuring takes about 0.2 µs per call. Shares refer to the time within fits,
    evaluations and predictions; several fits of one Trainer are one run.

    The monitor measures the host time of a call:

    - GPU work runs asynchronously. The work that a call launches is not part of its time, but a call that synchronizes
      (with ``.item()``, for example) also waits for all earlier work. For GPU times, use
      :class:`~composer.profiler.Profiler`.
    - The cost of changes to the model or the batch appears in the forward and backward pass, not here.
    - The time in which loggers store a value counts for the component that logs it. The rows of loggers contain their
      work at events, such as writing files. Values that the trainer logs are not counted.

    Example:
        >>> from composer.core import Engine, State
        >>> class Slow(Callback):
        ...     def batch_end(self, state, logger):
        ...         time.sleep(0.01)
        >>> monitor = CostMonitor()
        >>> engine = Engine(State(model=None, callbacks=[Slow(), monitor]))
        >>> for event in ("fit_start", "batch_end", "fit_end"):
        ...     engine.run_event(event)
        >>> [(cost.component, cost.event.value, cost.calls) for cost in monitor.table()]
        [('Slow', 'batch_end', 1)]
    """

    _tallies: dict[tuple[str, Event], _Tally] = transient(factory=dict)
    _seconds: float = transient(default=0.0)
    _began: float | None = transient(default=None)
    _is_closed: bool = transient(default=False)

    def wrap_call(self, event: Event, key: str, kind: str, call: Call) -> Call:
        """Measure the time of a call."""
        self._forget_earlier_run()  # also here: the calls of INIT are wrapped before that event runs
        tally = self._tallies.setdefault((key, event), _Tally())
        return _measured(call, tally)

    def init(self, state: State, logger: Logger) -> None:
        """Reset the state of an earlier run."""
        self._forget_earlier_run()

    def fit_start(self, state: State, logger: Logger) -> None:
        """Start counting the run's time; also for evaluations outside of training and predictions."""
        self._end()
        self._began = time.perf_counter()

    def fit_end(self, state: State, logger: Logger) -> None:
        """Log the table."""
        self._end()
        if costs := self.table():
            columns, rows = _shown(costs)
            logger.log_table(columns, rows, name="cost")

    def eval_standalone_end(self, state: State, logger: Logger) -> None:
        """Stop counting the run's time."""
        self._end()

    eval_standalone_start = predict_start = fit_start
    predict_end = eval_standalone_end

    def close(self, state: State, logger: Logger) -> None:
        """Stop counting, also after an error."""
        self._end()
        self._is_closed = True

    def table(self) -> list[Cost]:
        """Return the costs of all calls so far, the most expensive first."""
        run, costs = self._run_seconds(), []
        for (component, event), tally in self._tallies.items():
            if tally.calls:
                # The run's time begins with the fit: calls before it are not a part of it.
                share = tally.seconds / run if run and event not in _BEFORE_THE_RUN else None
                costs.append(Cost(component, event, tally.calls, tally.seconds, share))
        return sorted(costs, key=lambda cost: -cost.seconds)

    def __str__(self) -> str:
        costs, run = self.table(), self._run_seconds()
        columns, rows = _shown(costs)
        cells = [["" if cell is None else str(cell) for cell in row] for row in (columns, *rows)]
        within = sum(cost.seconds for cost in costs if cost.share is not None)
        share = f", {100 * within / run:.2f} % of it in these calls" if run else ""
        return "\n".join([*aligned(cells, left=2), f"The run took {run:.3f} s{share}."])

    def _forget_earlier_run(self) -> None:
        if self._is_closed:
            reset_fields(self)

    def _end(self) -> None:
        self._seconds, self._began = self._run_seconds(), None

    def _run_seconds(self) -> float:
        return self._seconds + (0.0 if self._began is None else time.perf_counter() - self._began)


def _measured(call: Call, tally: _Tally) -> Call:
    clock = time.perf_counter

    def run() -> None:
        began = clock()
        call()
        tally.seconds += clock() - began
        tally.calls += 1

    return run


def _shown(costs: list[Cost]) -> tuple[list[str], list[list[Any]]]:
    """Return the columns and rows of the table for display."""
    rows: list[list[Any]] = [
        [
            cost.component,
            cost.event.value,
            cost.calls,
            round(cost.seconds * 1e3, 3),
            round(cost.seconds_a_call * 1e6, 2),
            None if cost.share is None else round(cost.share * 100, 3),
        ]
        for cost in costs
    ]
    return [*_COLUMNS], rows
