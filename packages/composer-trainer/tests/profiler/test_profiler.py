"""Traces of real trainings."""

import _thread
import importlib.util
import time

import pytest
import torch

from composer.algorithms import EMA, GradientClipping, LabelSmoothing
from composer.core import Engine, Event, Logger, LoggerDestination, State, Timestamp
from composer.core.event import STEP_EVENTS
from composer.profiler import (
    JSONTraceHandler,
    Profiler,
    ProfilerAction,
    TraceHandler,
    cyclic_schedule,
)

HAS_PSUTIL = importlib.util.find_spec("psutil") is not None


class Keeping(TraceHandler):
    """Stores its arguments."""

    def __init__(self):
        self.calls, self.windows = [], []

    def open(self, state, logger):
        self.calls.append("open")

    def save(self, events, state, logger):
        self.calls.append("save")
        self.windows.append(list(events))

    def close(self, state, logger):
        self.calls.append("close")


class Uploads(LoggerDestination):
    """Stores the names of uploads."""

    def __init__(self):
        self.names = []

    def upload_file(self, state, remote_file_name, file_path, *, overwrite=False):
        assert file_path.exists()
        self.names.append(remote_file_name)

    def can_upload_files(self):
        return True


def make_profiler(schedule, *handlers, **options):
    """Return a profiler that by default records neither system metrics nor torch's operations."""
    options = {"sys_prof_cpu": False, "torch_prof_folder": None, **options}
    return Profiler(schedule, handlers, **options)


def names(events, kind="span"):
    return [event.name for event in events if event.kind == kind]


class TestSpans:
    def test_events_in_the_order_of_the_loop(self, train):
        """An active batch has the events from the previous batch's end to its own, in order."""
        keeping = Keeping()
        train(make_profiler(cyclic_schedule(wait=1, warmup=0, active=2), keeping))

        [window] = keeping.windows
        step = [f"event/{event.value}" for event in STEP_EVENTS]
        assert [name for name in names(window) if name.startswith("event/")] == [step[-1], *step, *step[:-1]]

    def test_phases_are_nested(self, train):
        """A phase starts with its first event and ends with its last one."""
        keeping = Keeping()
        train(make_profiler(cyclic_schedule(wait=1, warmup=0, active=1), keeping))

        spans = {}
        for event in keeping.windows[0]:
            spans.setdefault(event.name, event)
        for outer, inner in [
            ("dataloader", "event/before_dataloader"),
            ("dataloader", "event/after_dataloader"),
            ("batch", "event/batch_start"),
            ("batch", "train_batch"),
            ("batch", "event/batch_end"),
            ("train_batch", "forward"),
            ("forward", "event/before_forward"),
            ("forward", "event/after_forward"),
            ("train_batch", "loss"),
            ("loss", "event/before_loss"),
            ("event/before_loss", "algorithm/LabelSmoothing"),
            ("train_batch", "backward"),
        ]:
            around, within = spans[outer], spans[inner]
            assert around.begin <= within.begin
            assert within.begin + within.duration <= around.begin + around.duration
        assert spans["dataloader"].begin + spans["dataloader"].duration <= spans["batch"].begin

    def test_components_have_spans(self, train, watch):
        """Each algorithm, callback, subscription and logger has a span at each of its events."""
        keeping, uploads = Keeping(), Uploads()
        type(uploads).batch_end = lambda self, state, logger: None
        callbacks = [watch("batch_end", lambda state: None), watch("before_forward", lambda state: None)]
        train(
            make_profiler(cyclic_schedule(warmup=0, active=2), keeping),
            callbacks=callbacks,
            algorithms=[LabelSmoothing(), GradientClipping("norm", 1.0), EMA(half_life="2ba")],
            loggers=uploads,
        )
        del type(uploads).batch_end

        calls = [
            (event.name, event.categories[1])
            for event in keeping.windows[0]
            if event.categories[0] in ("algorithm", "callback", "logger")
        ]
        in_a_batch = [
            ("callback/Watch.1", "before_forward"),
            ("algorithm/LabelSmoothing", "before_loss"),
            ("algorithm/LabelSmoothing", "after_loss"),
            ("algorithm/GradientClipping", "after_train_batch"),
            ("algorithm/EMA", "batch_end"),
            ("callback/Watch", "batch_end"),
            ("logger/Uploads", "batch_end"),
        ]
        assert calls == [("algorithm/EMA", "fit_start"), *in_a_batch, *in_a_batch]

    def test_subscriptions_have_spans(self):
        """Functions subscribed with engine.on are recorded by name."""
        keeping = Keeping()
        state = State(model=None, callbacks=make_profiler(cyclic_schedule(warmup=0, active=1), keeping))
        engine = Engine(state)
        engine.on("batch_start", print_nothing)
        for event in ("init", "fit_start", "batch_start"):
            engine.run_event(event)
        engine.close()

        assert "subscription/print_nothing" in names(keeping.windows[0])

    def test_spans_have_batch_and_epoch(self, train):
        """Batches and epochs are counted from 0; a new epoch starts where the previous one was counted."""
        keeping = Keeping()
        train(make_profiler(cyclic_schedule(wait=3, warmup=0, active=3), keeping))

        where = [(event.args["epoch"], event.args["batch"]) for event in keeping.windows[0] if event.name == "forward"]
        assert where == [(0, 3), (0, 4), (1, 5)]

    def test_evaluations_have_spans(self, train):
        """An evaluation among active batches is recorded with its phases."""
        keeping = Keeping()
        data = [(torch.rand(4, 3), torch.tensor([0, 1, 0, 1]))] * 2
        train(
            make_profiler(cyclic_schedule(warmup=0, active=4), keeping),
            eval_dataloader=data,
            eval_interval="2ba",
            algorithms=(),
        )

        evaluation = [name for name in names(keeping.windows[0]) if name.startswith("eval")]
        assert evaluation == ["eval_all", "eval", *["eval_batch", "eval_forward"] * 2]

    def test_complete_training(self, train):
        """With all batches active there is a span of the fit and of each epoch."""
        keeping = Keeping()
        train(make_profiler(lambda state: ProfilerAction.ACTIVE, keeping), duration="2ep")

        [window] = keeping.windows
        assert names(window)[0] == "fit"
        assert names(window).count("epoch") == 2
        assert names(window)[-1] == "event/fit_end"

    def test_does_not_change_training(self, train):
        """The weights are bit-identical with and without the profiler."""
        plain = train(None)
        profiled = train(make_profiler(cyclic_schedule(), Keeping()))

        weights = [list(trainer.state.model.parameters()) for trainer in (plain, profiled)]
        assert all(torch.equal(a, b) for a, b in zip(*weights, strict=True))


def print_nothing(state, logger):
    """Do nothing."""


class TestSchedule:
    def test_each_cycle_is_saved_separately(self, train):
        """Each cycle has its own batches, also if cycles are adjacent."""
        keeping = Keeping()
        train(make_profiler(cyclic_schedule(warmup=0, active=2, repeat=3), keeping))

        forwards = [[e.args["batch"] for e in window if e.name == "forward"] for window in keeping.windows]
        assert forwards == [[0, 1], [2, 3], [4, 5]]
        assert keeping.calls == ["open", *["save"] * 3, "close"]

    def test_last_cycle_is_saved_at_the_end(self, train):
        """A cycle cut off by the end is saved, without the time after it."""
        keeping = Keeping()
        train(make_profiler(cyclic_schedule(wait=6, warmup=0, active=9), keeping))

        assert [e.args["batch"] for e in keeping.windows[0] if e.name == "forward"] == [6, 7]
        assert keeping.calls == ["open", "save", "close"]

    def test_schedule_without_save(self, train):
        """Recorded events are saved when the schedule returns skip."""
        keeping = Keeping()

        def schedule(state):
            return ProfilerAction.ACTIVE if state.timestamp.batch < 2 else ProfilerAction.SKIP

        train(make_profiler(schedule, keeping))

        assert len(keeping.windows) == 1

    def test_uses_the_clock(self):
        """A run that starts in the middle records the due batches."""
        keeping = Keeping()
        state = State(model=None, callbacks=make_profiler(cyclic_schedule(wait=8, warmup=1, active=2), keeping))
        engine = Engine(state)
        engine.run_event("init")
        state.timestamp = Timestamp(batch=10)
        engine.run_event("fit_start")
        for _ in range(3):
            engine.run_event("before_forward")
            engine.run_event("after_forward")
            state.timestamp = state.timestamp.to_next_batch()
            engine.run_event("batch_end")

        assert [e.args["batch"] for e in keeping.windows[0] if e.name == "forward"] == [10]

    def test_skipped_batches_are_not_wrapped(self, train, watch):
        """Outside active batches the events' calls are those without a profiler."""
        calls = {}

        def look(state):
            calls[int(state.timestamp.batch)] = trainer_of[0]._table.get("before_forward")

        trainer_of = []
        keeping = Keeping()
        profiler = make_profiler(cyclic_schedule(wait=2, warmup=0, active=1), keeping)
        catch = watch("init", lambda state: None)
        type(catch).wrap_event = lambda self, event, call: call
        engine = Engine(State(model=None, callbacks=[catch, profiler, watch("before_loss", look)]))
        trainer_of.append(engine)
        engine.run_event("init")
        engine.run_event("fit_start")
        for _ in range(5):
            engine.run_event("before_forward")
            engine.run_event("before_loss")
            engine.state.timestamp = engine.state.timestamp.to_next_batch()
            engine.run_event("batch_end")

        assert {batch: len(table) for batch, table in calls.items()} == {0: 0, 1: 0, 2: 1, 3: 0, 4: 0}
        assert len(keeping.windows) == 1

    def test_loop_without_init(self):
        """The error for a custom loop states what is missing."""
        engine = Engine(State(model=None, callbacks=make_profiler(cyclic_schedule(), Keeping())))

        with pytest.raises(RuntimeError, match='must run the event "init" before training'):
            engine.run_event("fit_start")


class TestMarker:
    def test_user_markers(self, train, watch):
        """A marked block and a marked function are spans within the callback that runs them."""
        keeping = Keeping()
        profiler = make_profiler(cyclic_schedule(wait=1, warmup=0, active=1), keeping)

        @profiler.marker("function", ["mine"])
        def add(a, b):
            return a + b

        def work(state):
            with profiler.marker("outer"):
                assert add(1, b=2) == 3
            profiler.marker("now").instant()
            profiler.marker("heat").counter({"value": 0.5})

        train(profiler, callbacks=[watch("batch_start", work)])

        [window] = keeping.windows
        spans = {event.name: event for event in window}
        inside = names(window)[names(window).index("callback/Watch") + 1 :][:2]
        assert inside == ["outer", "function"]
        assert spans["function"].categories == ("marker", "mine")
        assert (spans["now"].kind, spans["heat"].kind) == ("instant", "counter")
        assert spans["heat"].args == {"value": 0.5}

    def test_errors_propagate(self):
        """A marked block that raises is recorded, one outside active batches is not."""
        keeping = Keeping()
        profiler = make_profiler(cyclic_schedule(warmup=0, active=1), keeping)
        with profiler.marker("before"):
            pass
        engine = Engine(State(model=None, callbacks=profiler))
        engine.run_event("init")
        engine.run_event("fit_start")
        with pytest.raises(ZeroDivisionError), profiler.marker("failing"):
            raise ZeroDivisionError
        engine.close()

        assert "failing" in names(keeping.windows[0])
        assert "before" not in names(keeping.windows[0])


class TestAborted:
    @pytest.mark.parametrize("error", [ZeroDivisionError, KeyboardInterrupt])
    def test_recording_is_valid_after_an_error(self, train, watch, read, tmp_path, error):
        """After an error or Ctrl-C within a batch the file is valid and has the events before it."""

        def fail(state):
            if state.timestamp.batch == 2:
                raise error

        profiler = make_profiler(
            cyclic_schedule(warmup=0, active=5), JSONTraceHandler(str(tmp_path)), sys_prof_memory=HAS_PSUTIL
        )
        before = _thread._count()
        with pytest.raises(error):
            train(profiler, callbacks=[watch("after_forward", fail)])

        events = read(tmp_path / "ep0-ba2-rank0.json")
        spans = [event["name"] for event in events if event["ph"] == "X"]
        assert spans.count("forward") == 3
        assert spans.count("backward") == 2
        assert spans[-1] == "callback/Watch"
        deadline = time.monotonic() + 5
        while _thread._count() > before and time.monotonic() < deadline:  # it may be about to end
            time.sleep(0.001)
        assert _thread._count() == before

    def test_error_before_training(self, tmp_path):
        """A run that ends before its first batch writes nothing."""
        keeping = Keeping()
        engine = Engine(State(model=None, callbacks=make_profiler(cyclic_schedule(), keeping)))
        engine.run_event("init")
        engine.close()

        assert keeping.calls == []


class TestMachine:
    @pytest.mark.skipif(not HAS_PSUTIL, reason="the extra is not installed")
    def test_counters(self, train, watch):
        """Requested counters are recorded at least at the start and end of recording, with plausible values."""
        keeping = Keeping()
        profiler = make_profiler(
            cyclic_schedule(warmup=0, active=2),
            keeping,
            sys_prof_cpu=True,
            sys_prof_memory=True,
            sys_prof_net=True,
            sys_prof_stats_thread_interval_seconds=0.005,
        )
        train(profiler, callbacks=[watch("batch_start", lambda state: time.sleep(0.03))])

        counters = {}
        for event in keeping.windows[0]:
            if event.kind == "counter":
                counters.setdefault(event.name, []).append(event.args)
        assert set(counters) == {"system/CPU, %", "system/memory, MiB", "system/net, MiB per second"}
        assert len(counters["system/memory, MiB"]) >= 3
        assert all(10 < used["process"] < used["machine"] * 100 for used in counters["system/memory, MiB"])
        assert all(used["process"] >= 0 for used in counters["system/CPU, %"])
        assert all(rate >= 0 for rates in counters["system/net, MiB per second"] for rate in rates.values())

    @pytest.mark.skipif(not HAS_PSUTIL, reason="the extra is not installed")
    def test_thread_ends_with_the_active_batches(self, train, watch):
        """While batches are skipped, there is no thread."""
        there = {}

        def look(state):
            task = profiler.system_metrics._task
            there[int(state.timestamp.batch)] = task is not None and not task.is_over

        profiler = make_profiler(cyclic_schedule(wait=1, warmup=1, active=2), Keeping(), sys_prof_cpu=True)
        train(
            profiler,
            callbacks=[watch("batch_start", look)],
            duration="6ba",
        )

        assert [batch for batch, was in there.items() if was] == [2, 3]


class TestErrors:
    @pytest.mark.parametrize(
        ("schedule", "handlers", "message"),
        [
            ("cyclic", [], "schedule must be a function"),
            (cyclic_schedule(), ["json"], "trace_handlers must be TraceHandler objects"),
        ],
    )
    def test_wrong_types(self, schedule, handlers, message):
        """A value that is not a schedule or handler raises at construction."""
        with pytest.raises(TypeError, match=message):
            make_profiler(schedule, *handlers)

    def test_single_handler(self):
        """A single handler is accepted."""
        handler = Keeping()

        assert Profiler(cyclic_schedule(), handler, sys_prof_cpu=False).trace_handlers == (handler,)


def test_plan_shows_the_profiler_only_at_init():
    """The profiler wraps calls, so that a step's plan has no additional entries."""
    engine = Engine(State(model=None, callbacks=make_profiler(cyclic_schedule(), Keeping())), Logger(State(model=None)))

    assert [*engine.explain().entries] == [Event.INIT]
