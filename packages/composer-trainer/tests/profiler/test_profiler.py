"""Traces of real trainings."""

import importlib.util
import sys
import time

import pytest
import torch

from composer.algorithms import EMA, GradientClipping, LabelSmoothing
from composer.core import Engine, Event, Logger, State, Timestamp
from composer.core.event import STEP_EVENTS
from composer.profiler import JSONTraceHandler, Profiler, ProfilerAction, TraceHandler, cyclic_schedule
from fixtures import vector_batches

HAS_PSUTIL = importlib.util.find_spec("psutil") is not None


class Keeping(TraceHandler):
    """Stores its arguments."""

    def __init__(self):
        self.calls, self.windows = [], []

    def open(self, state, logger):
        self.calls.append("open")

    def save(self, trace, profile, state, logger):
        self.operations = [row.key for row in profile.key_averages()]
        self.calls.append("save")
        self.windows.append(sorted(trace["traceEvents"], key=lambda event: (event["ts"], -event.get("dur", 0))))

    def close(self, state, logger):
        self.calls.append("close")


def make_profiler(schedule, *handlers, **options):
    """Return a profiler that by default records no system metrics and has no handlers but the given."""
    options = {"sys_prof_cpu": False, "torch_prof_folder": None, **options}
    return Profiler(schedule, handlers, **options)


def names(events):
    return [event["name"] for event in events if event.get("cat") == "user_annotation"]


def steps(events):
    """Return the numbers of the batches."""
    return [int(name.removeprefix("ProfilerStep#")) for name in names(events) if name.startswith("ProfilerStep#")]


def run_batches(engine, batches):
    for _ in range(batches):
        for event in ("before_forward", "after_forward"):
            engine.run_event(event)
        engine.state.timestamp = engine.state.timestamp.to_next_batch()
        engine.run_event("batch_end")


class TestSpans:
    def test_events_in_the_order_of_the_loop(self, train):
        """An active batch has the events from the previous batch's end to its own, in order."""
        keeping = Keeping()
        train(make_profiler(cyclic_schedule(wait=1, active=2), keeping))

        [window] = keeping.windows
        step = [f"event/{event.value}" for event in STEP_EVENTS]
        assert [name for name in names(window) if name.startswith("event/")] == [step[-1], *step, *step[:-1]]

    def test_phases_are_nested(self, train):
        """A phase starts with its first event, ends with its last one, and contains torch's operations."""
        keeping = Keeping()
        train(make_profiler(cyclic_schedule(wait=1, active=1), keeping))

        spans = {}
        for event in keeping.windows[0]:
            spans.setdefault(event["name"], event)
        for outer, inner in [
            ("ProfilerStep#2", "dataloader"),
            ("ProfilerStep#2", "batch"),
            ("dataloader", "event/before_dataloader"),
            ("dataloader", "event/after_dataloader"),
            ("batch", "event/batch_start"),
            ("batch", "train_batch"),
            ("batch", "event/batch_end"),
            ("train_batch", "forward"),
            ("forward", "event/before_forward"),
            ("forward", "aten::linear"),
            ("forward", "event/after_forward"),
            ("train_batch", "loss"),
            ("loss", "event/before_loss"),
            ("event/before_loss", "algorithm/LabelSmoothing"),
            ("train_batch", "backward"),
        ]:
            around, within = spans[outer], spans[inner]
            assert around["ts"] <= within["ts"]
            assert within["ts"] + within["dur"] <= around["ts"] + around["dur"] + 1e-3
        assert "aten::linear" in keeping.operations
        assert spans["dataloader"]["ts"] + spans["dataloader"]["dur"] <= spans["batch"]["ts"]

    def test_components_have_spans(self, train, watch, uploads):
        """Each algorithm, callback and logger has a span at each of its events."""
        keeping = Keeping()
        type(uploads).batch_end = lambda self, state, logger: None
        train(
            make_profiler(cyclic_schedule(wait=1, active=2), keeping),
            callbacks=[watch("batch_end", lambda state: None), watch("before_forward", lambda state: None)],
            algorithms=[LabelSmoothing(), GradientClipping("norm", 1.0), EMA(half_life="2ba")],
            loggers=uploads,
        )

        calls = [name for name in names(keeping.windows[0]) if name.startswith(("algorithm", "callback", "logger"))]
        in_a_batch = [
            "callback/Watch.1",
            "algorithm/LabelSmoothing",
            "algorithm/LabelSmoothing",
            "algorithm/GradientClipping",
            "algorithm/EMA",
            "callback/Watch",
            "logger/Uploads",
        ]
        assert calls == [*in_a_batch, *in_a_batch]

    def test_subscriptions_have_spans(self):
        """Functions subscribed with engine.on are recorded by name, also in the first batch."""
        keeping = Keeping()
        state = State(model=None, callbacks=make_profiler(lambda state: ProfilerAction.ACTIVE, keeping))
        engine = Engine(state)
        engine.on("fit_start", print_nothing)
        for event in ("init", "fit_start", "batch_start"):
            engine.run_event(event)
        engine.close()

        assert "subscription/print_nothing" in names(keeping.windows[0])

    def test_evaluations_have_spans(self, train):
        """An evaluation among active batches is recorded with its phases."""
        keeping = Keeping()
        profiler = make_profiler(cyclic_schedule(active=3), keeping)
        train(profiler, eval_dataloader=vector_batches(2), eval_interval="2ba", algorithms=())

        evaluation = [name for name in names(keeping.windows[0]) if name.startswith("eval")]
        assert evaluation == ["eval_all", "eval", *["eval_batch", "eval_forward"] * 2]

    def test_batch_that_runs_again(self):
        """A phase that begins a second time ends the first, as when a batch is repeated in smaller parts."""
        keeping = Keeping()
        profiler = make_profiler(lambda state: ProfilerAction.ACTIVE, keeping)
        engine = Engine(State(model=None, callbacks=profiler))
        for event in ("init", "fit_start", "before_train_batch", "before_forward", "before_forward", "after_forward"):
            engine.run_event(event)
        engine.close()

        spans = [event for event in keeping.windows[0] if event["name"] in ("train_batch", "forward")]
        assert [span["name"] for span in spans] == ["train_batch", "forward", "forward"]
        assert spans[1]["ts"] + spans[1]["dur"] <= spans[2]["ts"]

    def test_does_not_change_training(self, train):
        """The weights are bit-identical with and without the profiler."""
        plain = train(None)
        profiled = train(make_profiler(cyclic_schedule(), Keeping()))

        weights = [list(trainer.state.model.parameters()) for trainer in (plain, profiled)]
        assert all(torch.equal(a, b) for a, b in zip(*weights, strict=True))


def print_nothing(state, logger):
    """Do nothing."""


class TestSchedule:
    @pytest.mark.filterwarnings("ignore:Profiler won't be using warmup:UserWarning")
    def test_each_cycle_is_saved_separately(self, train):
        """Each cycle has its own batches, also if cycles are adjacent."""
        keeping = Keeping()
        train(make_profiler(cyclic_schedule(warmup=0, active=2, repeat=3), keeping))

        assert [steps(window) for window in keeping.windows] == [[0, 1], [2, 3], [4, 5]]
        assert keeping.calls == ["open", *["save"] * 3, "close"]

    def test_last_cycle_is_saved_at_the_end(self, train):
        """A cycle cut off by the end is saved, without the time after it."""
        keeping = Keeping()
        train(make_profiler(cyclic_schedule(wait=5, active=9), keeping))

        assert names(keeping.windows[0]).count("forward") == 2
        assert names(keeping.windows[0])[-1] == "event/fit_end"
        assert keeping.calls == ["open", "save", "close"]

    @pytest.mark.filterwarnings("ignore:Profiler won't be using warmup:UserWarning")
    def test_cycle_without_a_batch_is_not_saved(self, train):
        """A cycle that begins after the last batch has no trace, which would replace that of the cycle before."""
        keeping = Keeping()
        train(make_profiler(cyclic_schedule(warmup=0, active=2, repeat=0), keeping), duration="4ba")

        assert [steps(window) for window in keeping.windows] == [[0, 1], [2, 3]]

    def test_warmup_is_not_saved(self, train):
        """A training that ends during the warm-up has no trace."""
        keeping = Keeping()
        train(make_profiler(cyclic_schedule(wait=6, warmup=3), keeping))

        assert keeping.calls == ["open", "close"]

    def test_schedule_without_save(self, train):
        """As in torch, a schedule that stops without saving discards the recording, with a warning."""
        keeping = Keeping()

        def schedule(state):
            return ProfilerAction.ACTIVE if state.timestamp.batch < 2 else ProfilerAction.SKIP

        with pytest.warns(UserWarning, match="Incorrect schedule: RECORD followed by NONE"):
            train(make_profiler(schedule, keeping))

        assert keeping.windows == []

    def test_uses_the_clock(self):
        """A run that starts in the middle records the due batches, with their numbers."""
        keeping = Keeping()
        state = State(model=None, callbacks=make_profiler(cyclic_schedule(wait=9, active=1), keeping))
        state.timestamp = Timestamp(batch=9)
        engine = Engine(state)
        engine.run_event("init")
        engine.run_event("fit_start")
        run_batches(engine, 3)

        assert [steps(window) for window in keeping.windows] == [[10]]

    def test_loop_without_init(self):
        """The error for a custom loop states what is missing."""
        engine = Engine(State(model=None, callbacks=make_profiler(cyclic_schedule(), Keeping())))

        with pytest.raises(RuntimeError, match='must run the event "init" before training'):
            engine.run_event("fit_start")


class TestMarker:
    def test_user_markers(self, train, watch):
        """A marked block and a marked function are ranges within the callback that runs them."""
        keeping = Keeping()
        profiler = make_profiler(cyclic_schedule(wait=1, active=1), keeping)

        @profiler.marker("function", categories=["mine"])
        def count_down(number):
            return number and count_down(number - 1)

        def work(state):
            with profiler.marker("outer"):
                assert count_down(1) == 0
            profiler.marker("now").instant()
            profiler.marker("heat").counter({"value": 0.5})

        train(profiler, callbacks=[watch("batch_start", work)])

        [window] = keeping.windows
        inside = names(window)[names(window).index("callback/Watch") + 1 :][:4]
        assert inside == ["outer", "mine/function", "mine/function", "now"]
        outer, inner = [event for event in window if event["name"] == "mine/function"]
        assert inner["ts"] + inner["dur"] <= outer["ts"] + outer["dur"]
        [heat] = [event for event in window if event["name"] == "heat"]
        [around] = [event for event in window if event["name"] == "callback/Watch"]
        assert (heat["ph"], heat["args"], heat["pid"]) == ("C", {"value": 0.5}, around["pid"])
        assert around["ts"] - 1e3 <= heat["ts"] <= around["ts"] + around["dur"] + 1e3

    def test_errors_propagate(self):
        """A marked block that raises is recorded, one outside active batches is not."""
        keeping = Keeping()
        profiler = make_profiler(lambda state: ProfilerAction.ACTIVE, keeping)
        with profiler.marker("before"):
            profiler.marker("count").counter({"value": 1})
        engine = Engine(State(model=None, callbacks=profiler))
        for event in ("init", "fit_start", "batch_start"):
            engine.run_event(event)
        with pytest.raises(ZeroDivisionError), profiler.marker("failing"):
            raise ZeroDivisionError
        engine.close()

        assert "failing" in names(keeping.windows[0])
        assert not {"before", "count"} & {event["name"] for event in keeping.windows[0]}


class TestAborted:
    @pytest.mark.parametrize("error", [ZeroDivisionError, KeyboardInterrupt])
    def test_recording_is_valid_after_an_error(self, train, watch, names, tmp_path, error):
        """After an error or Ctrl-C within a batch the file is valid and has the ranges before it."""

        def fail(state):
            if state.timestamp.batch == 3:
                raise error

        profiler = make_profiler(cyclic_schedule(active=5), JSONTraceHandler(str(tmp_path)), sys_prof_memory=HAS_PSUTIL)
        with pytest.raises(error):
            train(profiler, callbacks=[watch("after_forward", fail)])

        found = names(tmp_path / "ep0-ba3-rank0.json")
        assert found.count("forward") == 3
        assert found.count("backward") == 2
        assert found[-1] == "callback/Watch"
        assert profiler._sampler is None

    def test_error_before_training(self):
        """A run that ends before its first batch writes nothing."""
        keeping = Keeping()
        engine = Engine(State(model=None, callbacks=make_profiler(cyclic_schedule(), keeping)))
        engine.run_event("init")
        engine.close()

        assert keeping.calls == []


@pytest.mark.skipif(not HAS_PSUTIL, reason="the extra is not installed")
class TestMachine:
    def test_counters(self, train, watch):
        """Requested counters are recorded at least at the start and end of recording, with plausible values."""
        keeping = Keeping()
        profiler = make_profiler(
            cyclic_schedule(active=2),
            keeping,
            sys_prof_cpu=True,
            sys_prof_memory=True,
            sys_prof_net=True,
            sys_prof_stats_thread_interval_seconds=0.005,
        )
        train(profiler, callbacks=[watch("batch_start", lambda state: time.sleep(0.1))])

        counters = {}
        for event in keeping.windows[0]:
            if event["ph"] == "C":
                counters.setdefault(event["name"].removeprefix("system/"), []).append(event["args"]["value"])
        assert {name.split("_")[0] for name in counters} == {"cpu", "process", "network"}
        assert len(counters["process_memory_rss"]) >= 2
        assert all(10e6 < used < counters["cpu_memory_total"][0] for used in counters["process_memory_rss"])
        assert all(0 <= used <= 100 for used in counters["cpu_percentage"])
        assert counters["network_bytes_sent"] == sorted(counters["network_bytes_sent"])

    def test_thread_ends_with_the_active_batches(self, train, watch):
        """While batches are skipped, there is no thread."""
        running = []

        def look(state):
            if profiler._sampler is not None:
                running.append(int(state.timestamp.batch))

        profiler = make_profiler(cyclic_schedule(wait=1, warmup=1, active=2), Keeping(), sys_prof_cpu=True)
        train(profiler, callbacks=[watch("batch_start", look)], duration="6ba")

        assert running == [2, 3]

    def test_failing_counters(self, train, monkeypatch):
        """An error of the machine's drivers is a warning, and the trace is written."""

        def fail():
            raise OSError("driver is gone")

        monkeypatch.setattr("composer.profiler.profiler.read_machine", fail)
        keeping = Keeping()

        with pytest.warns(RuntimeWarning, match="OSError: driver is gone"):
            train(make_profiler(cyclic_schedule(), keeping, sys_prof_disk=True))

        assert len(keeping.windows) == 1

    def test_psutil_missing(self, monkeypatch):
        """Without psutil the error states how to install it."""
        monkeypatch.setitem(sys.modules, "psutil", None)

        with pytest.raises(ModuleNotFoundError, match=r'psutil is not installed.*pip install "composer-trainer\['):
            Profiler(cyclic_schedule(), [])


def test_plan_shows_the_profiler_only_at_init():
    """The profiler wraps calls, so that a step's plan has no additional entries."""
    engine = Engine(State(model=None, callbacks=make_profiler(cyclic_schedule(), Keeping())), Logger(State(model=None)))

    assert [*engine.explain().entries] == [Event.INIT]


@pytest.mark.gpu
def test_on_a_gpu(train):
    """The trace has the kernels of the GPU."""
    keeping = Keeping()
    train(make_profiler(cyclic_schedule(active=2), keeping), device="gpu")

    assert any(event.get("cat") == "kernel" for event in keeping.windows[0])
