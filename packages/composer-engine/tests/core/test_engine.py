"""Dispatch: which components are called at an event, when the plan is built, and warnings about incomplete loops."""

import copy
import warnings

import pytest

import composer.core.engine
from composer.core import Algorithm, Callback, Engine, Event, Logger, LoggerDestination, Stage, State, Timestamp, Trace
from composer.core.event import MODEL_EVENTS, STEP_EVENTS
from composer.core.passes import sort_to_back

PREPARE = ("init", "before_load", "after_load", "fit_start")


@pytest.fixture
def plans(monkeypatch):
    """Count how often a plan is built."""
    created = []
    build_plan = composer.core.engine.build_plan
    monkeypatch.setattr(
        composer.core.engine, "build_plan", lambda *args: created.append(build_plan(*args)) or created[-1]
    )
    return created


class TestRunEvent:
    def test_calls_in_the_order_of_the_plan(self, state, make, calls):
        """Algorithms run by stage, then callbacks, then loggers."""
        label, mix = (make.algorithm(s.name, {Event.BEFORE_LOSS: s}) for s in (Stage.LABEL, Stage.MIX))
        state.callbacks = [make.callback("C", "before_loss")]
        logger = Logger(state, make.destination("L", "before_loss"))

        Engine(state, logger, algorithms=[label, mix]).run_event(Event.BEFORE_LOSS)

        assert [name for name, _ in calls] == ["MIX", "LABEL", "C", "L"]

    @pytest.mark.parametrize("event", [Event.BATCH_END, "batch_end"])
    def test_events_by_name(self, state, make, calls, event):
        """An event's member and its value are equivalent."""
        Engine(state, algorithms=make.algorithm("A", {Event.BATCH_END: Stage.WEIGHTS})).run_event(event)

        assert calls == [("A", "batch_end")]

    def test_passes_event_state_and_logger(self, state):
        """Algorithms and callbacks receive the documented arguments."""
        got = []

        class Getter(Algorithm):
            runs_at = {Event.FIT_START: Stage.WEIGHTS}

            def apply(self, event, state, logger):
                got.append((event, state, logger))

        class Watcher(Callback):
            def fit_start(self, state, logger):
                got.append((state, logger))

            def run_event(self, event, state, logger):
                super().run_event(event, state, logger)

        state.callbacks = Watcher()
        engine = Engine(state, algorithms=Getter())
        engine.run_event("fit_start")

        assert got == [(Event.FIT_START, state, engine.logger), (state, engine.logger)]

    @pytest.mark.parametrize(
        ("event", "guess"),
        [("batch_ends", "did you mean 'batch_end'"), ("BATCH_ENDS", "did you mean 'batch_end'"), (7, "The events are")],
    )
    def test_unknown_event_raises(self, state, event, guess):
        """A misspelled event raises."""
        with pytest.raises(ValueError, match=f"There is no event {event!r}; {guess}"):
            Engine(state).run_event(event)

    def test_only_overridden_hooks_are_called(self, state, make, calls):
        """A callback is not called at events that it does not override."""
        callback = make.callback("C", "epoch_end")
        state.callbacks = [callback]
        engine = Engine(state)

        for event in Event:
            engine.run_event(event)

        assert calls == [("C", "epoch_end")]

    def test_match_is_called_each_time(self, state, make, calls):
        """An overridden match is called each time."""

        def match(self, event, state):
            return event is Event.BATCH_END and state.timestamp.batch == 1

        engine = Engine(state, algorithms=make.algorithm("A", match=match))
        for _ in range(3):
            engine.run_event("batch_end")
            state.timestamp = state.timestamp.to_next_batch()

        assert calls == [("A", "batch_end")]

    def test_errors_propagate(self, state, make, calls):
        """An algorithm's error propagates, and later algorithms are not called."""

        def fail(*_):
            raise ZeroDivisionError

        broken = make.algorithm("Broken", {Event.BATCH_END: Stage.GRADIENT}, apply=fail)
        engine = Engine(state, algorithms=[make.algorithm("A", {Event.BATCH_END: Stage.WEIGHTS}), broken])

        with pytest.raises(ZeroDivisionError):
            engine.run_event("batch_end")

        assert calls == []

    def test_errors_at_fit_end(self, state, make, calls):
        """The others are called nevertheless, in their order; Ctrl-C ends at once, and so does an algorithm's error."""
        algorithm, errors = make.algorithm("A", {Event.FIT_END: Stage.WEIGHTS}), {"B": OSError("disk")}
        errors["C"] = ValueError("shape")
        state.callbacks = [make.callback(name, "fit_end") for name in "BCD"]
        for name, one in zip("BCD", state.callbacks, strict=True):
            type(one).fit_end = lambda self, state, logger, name=name: calls.append(name) or _raise(errors.get(name))
        engine = Engine(state, Logger(state, make.destination("L", "fit_end")), algorithms=algorithm)

        with pytest.raises(OSError, match="disk") as caught:
            engine.run_event("fit_end")
        assert calls == [("A", "fit_end"), "B", "C", "D", ("L", "fit_end")]
        assert caught.value.__notes__ == ["At fit_end, this failed, too: ValueError: shape"]

        errors["C"], calls[:] = KeyboardInterrupt(), []
        with pytest.raises(KeyboardInterrupt):
            engine.run_event("fit_end")
        assert calls == [("A", "fit_end"), "B", "C"]

        type(algorithm).apply = lambda *_: _raise(ZeroDivisionError())
        engine.forget_plan()
        calls[:] = []
        with pytest.raises(ZeroDivisionError):
            engine.run_event("fit_end")
        assert calls == []


def _raise(error):
    if error is not None:
        raise error


def test_a_deep_copy_runs_events(state, make, calls):
    """A copy has calls of its own, which it makes for the first time."""
    engine = Engine(state)
    engine.run_event("batch_end")

    copied = copy.deepcopy(engine)
    state.callbacks = [make.callback("C", "batch_end")]
    copied.run_event("batch_end")
    assert calls == []
    engine.run_event("batch_end")
    assert calls == [("C", "batch_end")]


class TestPlanCache:
    def test_plan_is_reused(self, state, make, plans):
        """Any number of events, explanations and state changes need one plan."""
        engine = Engine(state, algorithms=make.algorithm("A", {Event.BATCH_END: Stage.WEIGHTS}))

        for _ in range(3):
            for event in Event:
                engine.run_event(event)
            engine.explain()
            state.timestamp = state.timestamp.to_next_batch()
            state.batch = state.loss = None

        assert len(plans) == 1

    CHANGES = {
        "algorithm added": lambda e, make: e.state.algorithms.append(make.algorithm("B")),
        "algorithms set": lambda e, make: setattr(e.state, "algorithms", []),
        "callback removed": lambda e, make: e.state.callbacks.pop(),
        "callbacks set": lambda e, make: setattr(e.state, "callbacks", make.callback("D")),
        "logger added": lambda e, make: e.logger.destinations.append(make.destination("L")),
        "loggers set": lambda e, make: setattr(e.logger, "destinations", []),
        "pass registered": lambda e, make: e.register_pass(lambda algorithms, event: algorithms),
        "pass removed": lambda e, make: e.algorithm_passes.pop(),
        "passes set": lambda e, make: setattr(e, "algorithm_passes", []),
        "subscribed": lambda e, make: e.on("batch_end", lambda state, logger: None),
    }

    @pytest.mark.filterwarnings("ignore:B runs at no event")
    @pytest.mark.parametrize("change", CHANGES)
    def test_plan_is_rebuilt_after_a_change(self, state, make, plans, change):
        """The next event after a change builds a new plan, later ones reuse it."""
        state.callbacks = [make.callback("C", "batch_end")]
        engine = Engine(state, algorithms=make.algorithm("A", {Event.BATCH_END: Stage.WEIGHTS}))
        engine.run_event("batch_end")

        self.CHANGES[change](engine, make)
        for event in Event:
            engine.run_event(event)

        assert len(plans) == 2

    def test_changes_take_effect_at_the_next_event(self, state, make, calls):
        """An added callback is called at the next event, a removed one is not."""
        engine = Engine(state)
        engine.run_event("batch_end")
        state.callbacks.append(make.callback("C", "batch_end"))
        engine.run_event("batch_end")
        state.callbacks.clear()
        engine.run_event("batch_end")

        assert calls == [("C", "batch_end")]

    def test_callback_may_add_a_callback(self, state, make, calls):
        """Changes of the list during an event take effect at the next event."""
        adding, added = make.callback("Adding", "fit_start"), make.callback("Added", "fit_start", "fit_end")
        type(adding).fit_start = lambda self, state, logger: state.callbacks.append(added)
        state.callbacks = [adding]
        engine = Engine(state)

        engine.run_event("fit_start")
        engine.run_event("fit_end")

        assert calls == [("Added", "fit_end")]


class TestPasses:
    def test_user_pass_runs_after_default_passes(self, state, make, calls):
        """The corrected example of the specification: the algorithm runs last, independent of its stage."""
        first, second = (make.algorithm(s.name, {Event.BEFORE_LOSS: s}) for s in (Stage.MIX, Stage.LABEL))

        def run_last(algorithms, event):
            return sorted(algorithms, key=lambda x: isinstance(x, type(first)))

        Engine(state, algorithms=[first, second], algorithm_passes=run_last).run_event("before_loss")

        assert [name for name, _ in calls] == ["LABEL", "MIX"]

    @pytest.mark.parametrize("index", [lambda p: (p, 0), lambda p: [(p, 0)]])
    def test_pass_index(self, state, index):
        """A pass registered at an early index can be overruled by the stages."""

        def early(algorithms, event):
            return algorithms

        engine = Engine(state, algorithm_passes=index(early))
        engine.register_pass(sort_to_back)

        assert engine.algorithm_passes[0] is early
        assert engine.algorithm_passes[-1] is sort_to_back


class Wrapping(Callback):
    """Records the start and end of each call that it wraps; it has its own hook at one event."""

    def __init__(self, name, written):
        self.name, self.written = name, written

    def batch_end(self, state, logger):
        self.written.append(self.name)

    def wrap_call(self, event, key, kind, call):
        def wrapped():
            self.written.append(f"{self.name}<{key}@{event.value}")
            call()
            self.written.append(f">{self.name}")

        return wrapped


class TestWrapping:
    def test_wraps_all_calls_except_its_own(self, state, make):
        """Calls of algorithms, other callbacks, functions and loggers are wrapped; a wrapper's own are not."""
        written = []
        state.callbacks = Wrapping("W", written), make.callback("C", "batch_end")
        logger = Logger(state, make.destination("L", "batch_end"))
        engine = Engine(state, logger, algorithms=make.algorithm("A", {Event.BATCH_END: Stage.WEIGHTS}))
        engine.on("batch_end", lambda state, logger: written.append("f"))

        engine.run_event("batch_end")

        assert [word for word in written if word.startswith("W<")][:2] == ["W<A@batch_end", "W<C@batch_end"]
        assert written[:5] == ["W<A@batch_end", ">W", "W", "W<C@batch_end", ">W"]
        assert written[6:] == ["f", ">W", "W<L@batch_end", ">W"]

    def test_skipped_calls_are_not_wrapped(self, state, make):
        """Skipped calls are not wrapped; an algorithm before training is wrapped with its draws."""
        written = []
        state.callbacks = Wrapping("W", written)
        engine = Engine(state, algorithms=make.algorithm("A", {Event.INIT: Stage.LAYOUT}))
        engine.on("batch_start", lambda state, logger: written.append("f"), every="2ba")
        for event in MODEL_EVENTS:
            engine.run_event(event)
        for _ in range(3):
            engine.run_event("batch_start")
            state.timestamp = state.timestamp.to_next_batch()

        assert written[:2] == ["W<A@init", ">W"]
        assert [word[:2] for word in written[2:]] == ["W<", "f", ">W"]

    def test_wraps_events(self, state, make, calls):
        """Events are wrapped, also those without listeners, and errors propagate."""

        class Spans(Callback):
            def wrap_event(self, event, call):
                def wrapped():
                    calls.append(f"<{event.value}")
                    call()
                    calls.append(">")

                return wrapped

        state.callbacks = Spans(), make.callback("C", "batch_end")
        engine = Engine(state)
        engine.run_event("batch_end")
        engine.run_event("batch_start")

        assert calls == ["<batch_end", ("C", "batch_end"), ">", "<batch_start", ">"]


class TestTraces:
    def test_traces_of_algorithms(self, state, make):
        """Each trace has the algorithm's position, whether it ran and its return value."""
        traces = {}

        class Keeper(LoggerDestination):
            def log_traces(self, index):
                traces.update(index)

        runs = make.algorithm("A", {Event.BATCH_END: Stage.WEIGHTS}, apply=lambda *_: 3)
        declines = type(runs)()
        declines.match = lambda event, state: False

        Engine(state, Logger(state, Keeper()), algorithms=[runs, declines], log_traces=True).run_event("batch_end")

        assert traces == {
            "algorithm_traces/A/batch_end": Trace("A", Event.BATCH_END, exit_code=3, order=0, run=True),
            "algorithm_traces/A.1/batch_end": Trace("A.1", Event.BATCH_END, exit_code=None, order=1, run=False),
        }


class TestRestoreAndClose:
    def test_restore_calls_all_algorithms(self, state, make):
        """After a failed evaluation each algorithm restores what it replaced."""
        restored = []
        algorithms = [
            make.algorithm(n, {Event.EVAL_START: Stage.WEIGHTS}, restore=lambda self, state: restored.append(self))
            for n in "AB"
        ]

        Engine(state, algorithms=algorithms).restore()

        assert restored == algorithms

    def test_close_is_idempotent(self, state, make, calls):
        """All components are closed, then post-closed; a second close does nothing."""
        state.callbacks, destination = make.callback("C", "close"), make.destination("L", "close")
        type(state.callbacks[0]).post_close = lambda self: calls.append(("C", "post_close"))
        engine = Engine(state, Logger(state, destination))

        engine.close()
        engine.close()

        assert calls == [("C", "close"), ("L", "close"), ("C", "post_close")]

    @pytest.mark.parametrize("interruption", [KeyboardInterrupt, SystemExit])
    def test_an_interrupted_close_closes_all(self, state, make, calls, interruption):
        """Ctrl-C while one is closed is raised when all are closed and post-closed, before an earlier error."""
        state.callbacks = [make.callback("C", "close"), make.callback("D", "close")]
        destination = make.destination("L", "close")

        def fail(one, *_):
            calls.append(one)
            raise OSError("full") if one == "C" else interruption

        type(state.callbacks[0]).close = lambda self, *_: fail("C")
        type(state.callbacks[1]).close = lambda self, *_: fail("D")
        type(destination).post_close = lambda self: calls.append("L, post")
        engine = Engine(state, Logger(state, destination))

        with pytest.raises(interruption) as raised:
            engine.close()

        assert calls == ["C", "D", ("L", "close"), "L, post"]
        assert raised.value.__notes__ == ["While closing, this failed, too: OSError: full"]

    def test_loggers_among_the_callbacks_are_closed_last(self, state, make, calls):
        """A logger that is passed as a callback stores what the others log at their end."""
        state.callbacks = [make.destination("L", "close"), make.callback("C", "close")]
        engine = Engine(state, Logger(state, make.destination("M", "close")))

        engine.close()

        assert calls == [("C", "close"), ("L", "close"), ("M", "close")]

    def test_close_continues_after_an_error(self, state, make, calls):
        """The first error is raised after all components were closed, with a note on the second."""

        def fail(self, state, logger):
            raise OSError(type(self).__name__)

        broken = [make.callback(n) for n in ("First", "Second")]
        for callback in broken:
            type(callback).close = fail
        state.callbacks = [*broken, make.callback("C", "close")]

        with pytest.raises(OSError, match="First") as caught:
            Engine(state).close()

        assert calls == [("C", "close")]
        assert "OSError: Second" in caught.value.__notes__[0]

    def test_closed_engine_raises(self, state, make):
        """An event after close raises an error with the remedy, also after a change."""
        engine = Engine(state)
        engine.close()
        state.callbacks.append(make.callback("C", "batch_end"))

        with pytest.raises(RuntimeError, match=r"The engine is closed and runs no further event.*Make a new"):
            engine.run_event("batch_end")


class TestSpecification:
    def test_user_algorithm_with_match_and_apply(self, state):
        """A plain class with __init__, match and apply works without declarations."""

        class Doubling(Algorithm):
            def __init__(self, factor):
                super().__init__()
                self.factor = factor

            def match(self, event: Event, state: State) -> bool:
                return event in [Event.AFTER_LOSS]

            def apply(self, event: Event, state: State, logger: Logger) -> None:
                state.loss *= self.factor

        engine = Engine(state=state, algorithms=[Doubling(2)])
        state.loss = 3
        for event in Event:
            engine.run_event(event)

        assert state.loss == 6


@pytest.fixture
def run_events():
    """Return a function that runs events and returns the texts of the warnings."""

    def run(engine, *events):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for event in events:
                engine.run_event(event)
        assert all(one.category is UserWarning and one.filename == __file__ for one in caught)
        return [str(one.message) for one in caught]

    return run


@pytest.fixture
def engine_for(state, make):
    """Return a function that creates an engine with one algorithm that runs at some events."""
    return lambda *events, **more: Engine(
        state, algorithms=make.algorithm("A", dict.fromkeys(events, Stage.WEIGHTS), **more)
    )


class TestEpoch:
    @pytest.mark.parametrize("event", [*map(Event, PREPARE), *STEP_EVENTS])
    def test_missing_event_warns_at_the_end_of_the_epoch(self, engine_for, run_events, event):
        """The warning states the algorithm, the event and its position in the loop."""
        engine = engine_for(event)
        epoch = [one for one in (*PREPARE, "epoch_start", *STEP_EVENTS) if one != event]

        assert run_events(engine, *epoch) == []
        (text,) = run_events(engine, "epoch_end")
        assert text == (
            f"A runs at {event.value!r}, but a whole epoch passed without that event, so nothing is done there. "
            f'Add engine.run_event("{event.value}") to the loop: {event.place}.'
        )

    def test_complete_loop_does_not_warn(self, engine_for, run_events):
        """A loop with all events gives no warning."""
        engine = engine_for(*Event)

        assert (
            run_events(engine, *PREPARE, "epoch_start", *STEP_EVENTS, "epoch_end", "epoch_checkpoint", "fit_end") == []
        )

    @pytest.mark.parametrize(
        "event",
        [event for event in Event if event not in {*PREPARE, Event.EPOCH_START, *STEP_EVENTS}],
    )
    def test_optional_events_do_not_warn(self, engine_for, run_events, event):
        """Evaluations, predictions, iterations and the end are optional in an epoch."""
        engine = engine_for(event)

        assert run_events(engine, *PREPARE, "batch_end", "epoch_end") == []

    def test_end_of_a_loader_is_no_batch(self, engine_for, run_events):
        """An epoch that is resumed after its last batch runs only the event before the loader shows its end."""
        engine = engine_for(*STEP_EVENTS)

        assert run_events(engine, "before_dataloader", "epoch_end") == []
        assert len(run_events(engine, "before_dataloader", "after_dataloader", "epoch_end")) == len(STEP_EVENTS) - 2

    def test_resumed_epoch_has_begun(self, state, engine_for, run_events):
        """An epoch that is resumed in its middle does not begin again."""
        engine = engine_for(Event.EPOCH_START)
        state.timestamp = Timestamp(batch=3, batch_in_epoch=3)

        assert run_events(engine, *STEP_EVENTS, "epoch_end", "fit_end") == []

    def test_algorithm_added_later_is_checked(self, state, make, run_events):
        """An algorithm that is added later is checked at the end of its first epoch."""
        engine = Engine(state)
        run_events(engine, "batch_end", "epoch_end")

        state.algorithms.append(make.algorithm("A", {Event.BEFORE_LOSS: Stage.LABEL, Event.BATCH_END: Stage.LABEL}))

        assert [text[:24] for text in run_events(engine, "after_loss", "epoch_end")] == ["A runs at 'before_loss',"]
