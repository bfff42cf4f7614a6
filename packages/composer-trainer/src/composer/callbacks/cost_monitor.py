"""What each algorithm, callback and logger costs."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import attrs
import torch

from composer.core import Callback, Event, Logger, State
from composer.core.serialization import reset_fields

if TYPE_CHECKING:
    from collections.abc import Callable

    from composer.core.frequency import Call
    from composer.core.plan import Entry

__all__ = ["Cost", "CostMonitor"]

_WEIGHED_CALLS = 5
_COLUMNS = ("component", "event", "calls", "total ms", "µs a call", "% of run")
_MEMORY_COLUMN = "KiB kept a call"
_BEFORE_THE_RUN = (Event.INIT, Event.BEFORE_LOAD, Event.AFTER_LOAD)


@attrs.frozen
class Cost:
    """What one component costs at one event.

    Args:
        component: Its name in the run, as in the plan.
        event: Where it is called.
        calls: How often it was called.
        seconds: The time of all calls.
        share: That time in the run's, from 0 to 1; None for what is called before the run begins.
        memory: Bytes on the GPU that a call leaves allocated, on average over its first five; None without a GPU.

    Example:
        >>> Cost("EMA", Event.BATCH_END, calls=4, seconds=0.002, share=0.01).seconds_a_call
        0.0005
    """

    component: str
    event: Event
    calls: int
    seconds: float
    share: float | None = None
    memory: float | None = None

    @property
    def seconds_a_call(self) -> float:
        """The time of one call, on average."""
        return self.seconds / self.calls


@attrs.define
class _Tally:
    calls: int = 0
    seconds: float = 0.0
    weighed: int = 0
    memory: int = 0


@attrs.define(eq=False)
class CostMonitor(Callback):
    """Say what each algorithm, callback, logger and subscribed function costs, at each event that it is called at.

    At the end of each fit a table named ``cost`` is logged, the dearest first; ``print(monitor)`` shows it at any time
    and :meth:`table` returns it. It costs some 0.2 µs a call, so it can be left on. The run's time, of which shares are
    given, is that within fit, evaluations and predictions; several fits of one Trainer are one run.

    It sees the time that the program spends in a call, so:

    - A GPU computes while the program goes on. What a call starts there is not in its time, but one that waits for the
      GPU (by ``.item()``, say) waits for all that was started before, and that is. For the GPU's own time, take
      :class:`~composer.profiler.Profiler`.
    - What a component changes in the model or the batch is paid for in the forward and backward pass, not here.
    - When something is logged, the loggers' storing of it counts for who logged it; loggers' own rows are what they do
      at events, such as writing files. What the trainer itself logs counts for nobody.

    On CUDA it also says how much memory a call leaves allocated, which is looked up around its first five calls,
    without waiting for the GPU.

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

    _tallies: dict[tuple[str, Event], _Tally] = attrs.field(factory=dict, init=False, repr=False)
    _seconds: float = attrs.field(default=0.0, init=False, repr=False)
    _began: float | None = attrs.field(default=None, init=False, repr=False)
    _is_closed: bool = attrs.field(default=False, init=False, repr=False)

    def wrap_call(self, event: Event, entry: Entry, call: Call) -> Call:
        """Take the time of a call."""
        self._forget_earlier_run()  # here, too: the calls of INIT are wrapped before that event runs
        tally = self._tallies.setdefault((entry.key, event), _Tally())
        allocated = _allocated_memory()
        return _timed(call, tally) if allocated is None else _timed_and_weighed(call, tally, allocated)

    def init(self, state: State, logger: Logger) -> None:
        """Forget an earlier run."""
        del state, logger
        self._forget_earlier_run()

    def fit_start(self, state: State, logger: Logger) -> None:
        """Begin to count the run's time."""
        del state, logger
        self._begin()

    def fit_end(self, state: State, logger: Logger) -> None:
        """Log the table."""
        del state
        self._end()
        if costs := self.table():
            columns, rows = _shown(costs)
            logger.log_table(columns, rows, name="cost")

    def eval_standalone_start(self, state: State, logger: Logger) -> None:
        """Count an evaluation outside of training as a part of the run."""
        del state, logger
        self._begin()

    def eval_standalone_end(self, state: State, logger: Logger) -> None:
        """Count no further."""
        del state, logger
        self._end()

    def predict_start(self, state: State, logger: Logger) -> None:
        """Count a prediction as a part of the run."""
        del state, logger
        self._begin()

    def predict_end(self, state: State, logger: Logger) -> None:
        """Count no further."""
        del state, logger
        self._end()

    def close(self, state: State, logger: Logger) -> None:
        """Count no further, also where a run was broken off."""
        del state, logger
        self._end()
        self._is_closed = True

    def table(self) -> list[Cost]:
        """Return what has been called so far costs, the dearest first."""
        run = self._run_seconds()
        costs = [_cost(component, event, tally, run) for (component, event), tally in self._tallies.items()]
        return sorted((cost for cost in costs if cost.calls), key=lambda cost: -cost.seconds)

    def __str__(self) -> str:
        costs, run = self.table(), self._run_seconds()
        columns, rows = _shown(costs)
        cells = [columns, *([_text(cell) for cell in row] for row in rows)]
        widths = [max(len(row[place]) for row in cells) for place in range(len(columns))]
        lines = [
            "  ".join(
                cell.ljust(width) if place < 2 else cell.rjust(width)
                for place, (cell, width) in enumerate(zip(row, widths, strict=True))
            ).rstrip()
            for row in cells
        ]
        within = sum(cost.seconds for cost in costs if cost.share is not None)
        share = f", {100 * within / run:.2f} % of it in these calls" if run else ""
        return "\n".join([*lines, f"The run took {run:.3f} s{share}."])

    def _forget_earlier_run(self) -> None:
        if self._is_closed:
            reset_fields(self)

    def _begin(self) -> None:
        self._end()
        self._began = time.perf_counter()

    def _end(self) -> None:
        self._seconds, self._began = self._run_seconds(), None

    def _run_seconds(self) -> float:
        return self._seconds + (0.0 if self._began is None else time.perf_counter() - self._began)


def _timed(call: Call, tally: _Tally) -> Call:
    clock = time.perf_counter

    def run() -> None:
        began = clock()
        call()
        tally.seconds += clock() - began
        tally.calls += 1

    return run


def _timed_and_weighed(call: Call, tally: _Tally, allocated: Callable[[], int]) -> Call:
    timed = _timed(call, tally)

    def run() -> None:
        # Asking for the memory takes longer than most calls.
        if tally.calls >= _WEIGHED_CALLS:
            timed()
            return
        before = allocated()
        timed()
        tally.memory += allocated() - before
        tally.weighed += 1

    return run


def _allocated_memory() -> Callable[[], int] | None:
    """Return what says how many bytes of the GPU are allocated; None if none is in use."""
    return torch.cuda.memory_allocated if torch.cuda.is_initialized() else None  # type: ignore[no-untyped-call]


def _cost(component: str, event: Event, tally: _Tally, run: float) -> Cost:
    share = tally.seconds / run if run and event not in _BEFORE_THE_RUN else None
    memory = tally.memory / tally.weighed if tally.weighed else None
    return Cost(component, event, tally.calls, tally.seconds, share, memory)


def _shown(costs: list[Cost]) -> tuple[list[str], list[list[Any]]]:
    """Return the columns and rows that people read."""
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
    if all(cost.memory is None for cost in costs):
        return [*_COLUMNS], rows
    kept = [None if cost.memory is None else round(cost.memory / 1024, 2) for cost in costs]
    return [*_COLUMNS, _MEMORY_COLUMN], [[*row, memory] for row, memory in zip(rows, kept, strict=True)]


def _text(cell: Any) -> str:
    return "" if cell is None else str(cell)
