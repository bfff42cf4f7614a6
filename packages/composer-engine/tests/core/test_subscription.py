"""Functions that are called at an event until their subscription is removed."""

import functools

import pytest

from composer.core import Engine, Event, Logger, Stage, Subscription, Time


def report(state, logger):
    """Do nothing."""


class Reporter:
    def __call__(self, state, logger):
        """Do nothing."""


class TestOn:
    def test_called_between_callbacks_and_loggers(self, state, make, calls):
        """It runs after algorithms and callbacks, and before loggers."""
        state.callbacks = make.callback("C", "batch_end")
        logger = Logger(state, make.destination("L", "batch_end"))
        engine = Engine(state, logger, algorithms=make.algorithm("A", {Event.BATCH_END: Stage.WEIGHTS}))

        engine.on("batch_end", lambda *args: calls.append(("function", *args)))
        engine.run_event("batch_end")

        assert [call[0] for call in calls] == ["A", "C", "function", "L"]
        assert calls[2][1:] == (state, logger)

    def test_every(self, state):
        """It is called when the interval is passed."""
        due = []
        engine = Engine(state)
        engine.on(Event.BATCH_END, lambda state, logger: due.append(int(state.timestamp.batch)), every="3ba")
        for _ in range(7):
            state.timestamp = state.timestamp.to_next_batch()
            engine.run_event("batch_end")

        assert due == [3, 6]

    def test_removed(self, state, calls):
        """It is not called from the next event on; others are. Removing it again does nothing."""
        engine = Engine(state)
        first, second = (
            engine.on("fit_end", functools.partial(lambda n, s, logger: calls.append(n), n)) for n in (1, 2)
        )
        engine.run_event("fit_end")
        first.remove()
        first.remove()
        engine.run_event("fit_end")
        second.remove()
        engine.run_event("fit_end")

        assert calls == [1, 2, 2]

    def test_may_remove_itself(self, state, calls):
        """A function may end its own subscription."""
        engine = Engine(state)

        def once(state, logger):
            calls.append("once")
            subscription.remove()

        subscription = engine.on("batch_end", once)
        engine.run_event("batch_end")
        engine.run_event("batch_end")

        assert calls == ["once"]

    def test_attributes(self, state):
        """Event, function and interval are attributes, with the event as a member and the interval as a Time."""
        subscription = Engine(state).on("epoch_end", report, every=2)

        assert isinstance(subscription, Subscription)
        assert (subscription.event, subscription.function, subscription.every) == (
            Event.EPOCH_END,
            report,
            Time(2, "ep"),
        )

    def test_errors_propagate(self, state):
        """An error of the function propagates."""
        engine = Engine(state)
        engine.on("batch_end", lambda state, logger: 1 / 0)

        with pytest.raises(ZeroDivisionError):
            engine.run_event("batch_end")


class TestPlan:
    def test_name_and_interval_are_in_the_plan(self, state):
        """The text and the data have the qualified name and the interval."""
        engine = Engine(state)
        engine.on("batch_end", report, every="10ba")
        engine.on("epoch_end", Reporter.__call__.__get__(Reporter()))

        lines = str(engine.explain()).splitlines()
        entry = engine.explain().to_dict()["events"]["batch_end"][0]

        assert any(line.split() == ["batch_end", "report", "subscription", "every", "10ba"] for line in lines)
        assert any(line.split() == ["epoch_end", "Reporter.__call__", "subscription"] for line in lines)
        assert (entry["name"], entry["kind"], entry["every"]) == ("report", "subscription", "10ba")
        assert "report (subscription, every 10ba)" in engine.explain().to_mermaid()

    def test_names(self, state):
        """A partial has its function's name, an object its class's; repeated names are numbered."""
        engine = Engine(state)
        for function in (report, functools.partial(functools.partial(report)), Reporter()):
            engine.on("batch_end", function)

        assert [entry.key for entry in engine.explain().entries[Event.BATCH_END]] == ["report", "report.1", "Reporter"]

    def test_reason(self, state, make):
        """After a callback it has a reason for its position."""
        state.callbacks = make.callback("C", "batch_end")
        engine = Engine(state)
        engine.on("batch_end", report)

        assert engine.explain().entries[Event.BATCH_END][1].why == "after callbacks"


class TestErrors:
    @pytest.mark.parametrize(
        ("function", "message"),
        [
            ("report", r"function must be a function f\(state, logger\), got 'report'"),
            (lambda state: None, r"function must take \(state, logger\), but .*<lambda> takes \(state\)"),
            (lambda a, b, c: None, r"function must take \(state, logger\)"),
        ],
    )
    def test_non_callable_raises(self, state, function, message):
        """A value that cannot be called with state and logger raises."""
        with pytest.raises(TypeError, match=message):
            Engine(state).on("batch_end", function)

    def test_functions_without_signature(self, state):
        """Functions written in C without a signature are accepted."""
        engine = Engine(state)

        engine.on("batch_end", dict)

        assert [entry.kind for entry in engine.explain().entries["batch_end"]] == ["subscription"]

    def test_invalid_event_or_interval_raises(self, state):
        """A misspelled event and an interval that is never due raise."""
        engine = Engine(state)

        with pytest.raises(ValueError, match="There is no event 'batch_ends'; did you mean 'batch_end'"):
            engine.on("batch_ends", report)
        with pytest.raises(ValueError, match=r"Engine.on: every='1ep' would never be due at 'batch_end'"):
            engine.on("batch_end", report, every=1)
        assert engine.explain().entries == {}

    def test_closed_engine_raises(self, state):
        """Subscribing after close raises."""
        engine = Engine(state)
        engine.close()

        with pytest.raises(RuntimeError, match="The engine is closed"):
            engine.on("batch_end", report)
