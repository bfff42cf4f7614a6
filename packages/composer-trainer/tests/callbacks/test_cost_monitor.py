"""Costs of components, with a manual clock and in real trainings."""

import pytest
import torch

from composer.algorithms import EMA, LabelSmoothing
from composer.callbacks import CostMonitor
from composer.core import Algorithm, Callback, Engine, Event, Logger, LoggerDestination, Stage, State
from composer.loggers import InMemoryLogger
from fixtures import make_loader, trained, weights


@pytest.fixture
def timed(clock):
    """Return a function that creates components with a duration at each of some events."""

    def make(base, **seconds):
        def hook(took):
            def run(self, state, logger):
                clock.now += took

            return run

        return type("Watch", (base,), {event: hook(took) for event, took in seconds.items()})()

    return make


def make_engine(*callbacks, loggers=(), algorithms=()):
    state = State(model=None, callbacks=callbacks)
    return Engine(state, Logger(state, loggers), algorithms=algorithms)


def as_tuples(monitor):
    return [(cost.component, cost.event.value, cost.calls, cost.seconds) for cost in monitor.table()]


class TestTable:
    def test_time_of_each_component_at_each_event(self, clock, timed):
        """Calls and seconds are summed per component and event, the most expensive first."""
        monitor = CostMonitor()
        watch, logger = (
            timed(Callback, batch_end=0.5, epoch_end=4.0),
            timed(LoggerDestination, batch_end=0.25),
        )

        class Work(Algorithm):
            runs_at = {Event.BATCH_END: Stage.WEIGHTS}

            def apply(self, event, state, logger):
                clock.now += 1.0

        engine = make_engine(watch, monitor, loggers=logger, algorithms=Work())
        engine.on("batch_end", lambda state, logger: None)
        for event in ("init", "before_load", "after_load", "fit_start", "batch_end", "batch_end", "batch_end"):
            engine.run_event(event)
        engine.run_event("epoch_end")

        assert as_tuples(monitor) == [
            ("Watch", "epoch_end", 1, 4.0),
            ("Work", "batch_end", 3, 3.0),
            ("Watch", "batch_end", 3, 1.5),
            ("Watch.1", "batch_end", 3, 0.75),
            ("TestTable.test_time_of_each_component_at_each_event.<locals>.<lambda>", "batch_end", 3, 0.0),
        ]
        assert monitor.table()[2].seconds_a_call == 0.5


class TestText:
    def test_text(self, clock, timed):
        """The table has the run's time below."""
        monitor = CostMonitor()
        engine = make_engine(timed(Callback, batch_end=0.5), monitor)
        engine.run_event("fit_start")
        engine.run_event("batch_end")
        clock.now += 1.5
        engine.run_event("fit_end")

        assert str(monitor).splitlines() == [
            "component  event      calls  total ms  µs a call  % of run",
            "Watch      batch_end      1     500.0   500000.0      25.0",
            "The run took 2.000 s, 25.00 % of it in these calls.",
        ]


class TestRealTraining:
    def train(self, **options):
        algorithms = [LabelSmoothing(), EMA(half_life="2ba")]
        return trained(max_duration="2ep", eval_dataloader=make_loader(), algorithms=algorithms, **options)

    def test_table_is_logged_at_fit_end(self):
        """It has each algorithm with its number of calls, and the documented columns."""
        history = InMemoryLogger()
        self.train(callbacks=CostMonitor(), loggers=history)

        columns, rows = history.tables["cost"]["columns"], history.tables["cost"]["rows"]
        calls = {(row[0], row[1]): row[2] for row in rows}
        assert list(columns) == ["component", "event", "calls", "total ms", "µs a call", "% of run"]
        assert calls["LabelSmoothing", "before_loss"] == calls["LabelSmoothing", "after_loss"] == 10
        assert calls["EMA", "batch_end"] == 10
        assert calls["EMA", "eval_start"] == 2
        assert all(0 <= row[5] <= 100 for row in rows if row[5] is not None)

    def test_does_not_change_training(self):
        """The weights are bit-identical with and without the monitor."""
        plain, watched = self.train(), self.train(callbacks=CostMonitor())

        assert torch.equal(weights(plain), weights(watched))
