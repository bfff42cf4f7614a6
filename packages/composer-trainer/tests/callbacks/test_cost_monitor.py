"""What components cost, by a clock that the tests hold in their hands and in real trainings."""

import pytest
import torch

from composer import Trainer
from composer.algorithms import EMA, LabelSmoothing
from composer.callbacks import CostMonitor, cost_monitor
from composer.core import Algorithm, Callback, Engine, Event, Logger, LoggerDestination, Stage, State
from composer.loggers import InMemoryLogger
from composer.models import ComposerClassifier


@pytest.fixture
def clock(monkeypatch):
    """Return a clock that is advanced manually: ``clock.now += 2.0``."""

    class Clock:
        now = 100.0

        def perf_counter(self):
            return self.now

    held = Clock()
    monkeypatch.setattr(cost_monitor, "time", held)
    return held


@pytest.fixture
def taking(clock):
    """Return a maker of components that take so many seconds at each of some events."""

    def make(base, **seconds):
        def hook(took):
            def run(self, state, logger):
                clock.now += took

            return run

        return type("Watch", (base,), {event: hook(took) for event, took in seconds.items()})()

    return make


def engine_of(*callbacks, loggers=(), algorithms=()):
    state = State(model=None, callbacks=callbacks)
    return Engine(state, Logger(state, loggers), algorithms=algorithms)


def as_tuples(monitor):
    return [(cost.component, cost.event.value, cost.calls, cost.seconds) for cost in monitor.table()]


class TestTable:
    def test_time_of_each_component_at_each_event(self, clock, taking):
        """Calls and their seconds are added up for each component and event, the dearest first."""
        monitor = CostMonitor()
        watch, logger = taking(Callback, batch_end=0.5, epoch_end=4.0), taking(LoggerDestination, batch_end=0.25)

        class Work(Algorithm):
            runs_at = {Event.BATCH_END: Stage.WEIGHTS}

            def apply(self, event, state, logger):
                clock.now += 1.0

        engine = engine_of(watch, monitor, loggers=logger, algorithms=Work())
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

    def test_not_its_own(self, clock):
        """The monitor does not measure itself."""
        monitor = CostMonitor()
        engine = engine_of(monitor)
        for event in ("fit_start", "fit_end"):
            engine.run_event(event)

        assert monitor.table() == []

    def test_shares_are_of_the_run(self, clock, taking):
        """Time between two fits is not the run's, evaluations and predictions outside of fit are."""
        monitor = CostMonitor()
        watch = taking(Callback, init=3.0, batch_end=1.0)
        engine = engine_of(watch, monitor)
        engine.run_event("init")
        for begin, end in [
            *(("fit_start", "fit_end"), ("eval_standalone_start", "eval_standalone_end")),
            *(("predict_start", "predict_end"), ("fit_start", "fit_end")),
        ]:
            clock.now += 1000.0
            engine.run_event(begin)
            clock.now += 9.0
            if begin == "fit_start":
                engine.run_event("batch_end")
            engine.run_event(end)

        assert {cost.event.value: cost.share for cost in monitor.table()} == {
            "init": None,
            "batch_end": pytest.approx(2 / 38),
        }

    def test_while_it_runs(self, clock, taking):
        """The table can be looked at in the middle of a training."""
        monitor = CostMonitor()
        engine = engine_of(taking(Callback, batch_end=1.0), monitor)
        engine.run_event("fit_start")
        engine.run_event("batch_end")
        clock.now += 1.0

        assert monitor.table()[0].share == 0.5

    def test_a_prediction_within_a_fit(self, clock, taking):
        """What a callback lets run in between does not take away what was counted before it."""
        monitor = CostMonitor()
        engine = engine_of(taking(Callback, batch_end=1.0), monitor)
        engine.run_event("fit_start")
        engine.run_event("batch_end")
        engine.run_event("predict_start")
        clock.now += 3.0
        engine.run_event("predict_end")

        assert monitor.table()[0].share == 0.25

    def test_goes_on_after_a_change(self, clock, taking):
        """A new plan does not make it forget."""
        monitor, watch = CostMonitor(), taking(Callback, batch_end=1.0)
        engine = engine_of(watch, monitor)
        engine.run_event("batch_end")
        engine.state.callbacks.append(taking(Callback, fit_end=1.0))
        engine.run_event("batch_end")

        assert as_tuples(monitor) == [("Watch", "batch_end", 2, 2.0)]

    def test_what_fails_is_not_counted(self, clock):
        """A call that raises has no end; those before it stay."""

        class Failing(Callback):
            def batch_end(self, state, logger):
                raise ZeroDivisionError

        monitor = CostMonitor()
        engine = engine_of(Failing(), monitor)
        with pytest.raises(ZeroDivisionError):
            engine.run_event("batch_end")

        assert monitor.table() == []

    def test_a_broken_off_run_ends_when_it_is_closed(self, clock, taking):
        """After close the clock of the run stands still."""
        monitor = CostMonitor()
        engine = engine_of(taking(Callback, batch_end=1.0), monitor)
        engine.run_event("fit_start")
        engine.run_event("batch_end")
        clock.now += 3.0
        engine.close()
        clock.now += 1000.0

        assert monitor.table()[0].share == 0.25


class TestText:
    def test_as_text(self, clock, taking):
        """It prints as a table with the run's time below."""
        monitor = CostMonitor()
        engine = engine_of(taking(Callback, batch_end=0.5), monitor)
        engine.run_event("fit_start")
        engine.run_event("batch_end")
        clock.now += 1.5
        engine.run_event("fit_end")

        assert str(monitor).splitlines() == [
            "component  event      calls  total ms  µs a call  % of run",
            "Watch      batch_end      1     500.0   500000.0      25.0",
            "The run took 2.000 s, 25.00 % of it in these calls.",
        ]

    def test_before_anything_ran(self):
        """There is nothing to divide by."""
        assert str(CostMonitor()).splitlines()[1:] == ["The run took 0.000 s."]
        assert repr(CostMonitor()) == "CostMonitor()"


class TestMemory:
    def test_what_a_call_leaves_allocated(self, clock, monkeypatch):
        """On a GPU, the mean memory growth over the first calls is reported; later calls are not measured."""
        allocated = [1000]
        monkeypatch.setattr(cost_monitor, "_allocated_memory", lambda: lambda: allocated[0])
        monitor = CostMonitor()

        class Hoarding(Callback):
            def batch_end(self, state, logger):
                allocated[0] += 2048 if state.timestamp.batch < 5 else 10**9
                state.timestamp = state.timestamp.to_next_batch()

        engine = engine_of(Hoarding(), monitor)
        for _ in range(8):
            engine.run_event("batch_end")

        cost = monitor.table()[0]
        assert (cost.calls, cost.memory) == (8, 2048.0)
        assert "KiB kept a call" in str(monitor)

    @pytest.mark.skipif(torch.cuda.is_available(), reason="says what is so without a GPU")
    def test_none_without_a_gpu(self, clock, taking):
        """There is no column for it."""
        monitor = CostMonitor()
        engine = engine_of(taking(Callback, batch_end=1.0), monitor)
        engine.run_event("batch_end")

        assert monitor.table()[0].memory is None
        assert "KiB" not in str(monitor)


class TestRealTraining:
    def train(self, seed=17, **options):
        torch.manual_seed(0)
        network = torch.nn.Linear(3, 2)
        data = [(torch.rand(4, 3), torch.tensor([0, 1, 0, 1]))] * 4
        trainer = Trainer(
            model=ComposerClassifier(network, num_classes=2),
            train_dataloader=data,
            eval_dataloader=data,
            optimizers=torch.optim.SGD(network.parameters(), lr=0.1),
            max_duration="2ep",
            algorithms=[LabelSmoothing(), EMA(half_life="2ba")],
            progress_bar=False,
            device="cpu",
            precision="fp32",
            seed=seed,
            **options,
        )
        trainer.fit()
        trainer.close()
        return trainer

    def test_the_table_is_logged_at_the_end_of_fit(self):
        """Each algorithm is in it, as often as it was called; it has the columns that people read."""
        history = InMemoryLogger()
        self.train(callbacks=CostMonitor(), loggers=history)

        columns, rows = history.tables["cost"]["columns"], history.tables["cost"]["rows"]
        calls = {(row[0], row[1]): row[2] for row in rows}
        assert list(columns) == ["component", "event", "calls", "total ms", "µs a call", "% of run"]
        assert calls["LabelSmoothing", "before_loss"] == calls["LabelSmoothing", "after_loss"] == 8
        assert calls["EMA", "batch_end"] == 8
        assert calls["EMA", "eval_start"] == 2
        assert all(0 <= row[5] <= 100 for row in rows if row[5] is not None)

    def test_it_changes_no_bit(self):
        """The weights are those of a training without it."""
        plain, watched = self.train(), self.train(callbacks=CostMonitor())

        assert all(
            torch.equal(a, b)
            for a, b in zip(plain.state.model.parameters(), watched.state.model.parameters(), strict=True)
        )
