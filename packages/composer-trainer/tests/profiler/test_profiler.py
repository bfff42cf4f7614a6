"""Traces of real trainings."""

import json
import tempfile
from pathlib import Path

import pytest
import torch
from torch.profiler import record_function

from composer.core import Engine, State, Timestamp
from composer.core.event import STEP_EVENTS
from composer.profiler import JSONTraceHandler, Profiler, TraceHandler, cyclic_schedule
from fixtures import vector_batches


class Keeping(TraceHandler):
    """Stores its arguments."""

    def __init__(self):
        self.calls, self.windows = [], []

    def open(self, state, logger):
        self.calls.append("open")

    def save(self, profile, state, logger):
        self.operations = [row.key for row in profile.key_averages()]
        self.calls.append("save")
        with tempfile.TemporaryDirectory() as folder:
            profile.export_chrome_trace(f"{folder}/trace.json")
            events = json.loads(Path(folder, "trace.json").read_text())["traceEvents"]
        self.windows.append(sorted(events, key=lambda event: (event["ts"], -event.get("dur", 0))))


def make_profiler(schedule, *handlers):
    """Return a profiler with these handlers."""
    return Profiler(schedule, handlers)


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

    def test_evaluations_have_spans(self, train):
        """An evaluation among active batches is recorded with its phases."""
        keeping = Keeping()
        profiler = make_profiler(cyclic_schedule(active=3), keeping)
        train(profiler, eval_dataloader=vector_batches(2), eval_interval="2ba", algorithms=())

        evaluation = [name for name in names(keeping.windows[0]) if name.startswith("eval")]
        assert evaluation == ["eval_all", "eval", *["eval_batch", "eval_forward"] * 2]

    def test_does_not_change_training(self, train):
        """The weights are bit-identical with and without the profiler."""
        plain = train(None)
        profiled = train(make_profiler(cyclic_schedule(), Keeping()))

        weights = [list(trainer.state.model.parameters()) for trainer in (plain, profiled)]
        assert all(torch.equal(a, b) for a, b in zip(*weights, strict=True))


class TestSchedule:
    @pytest.mark.filterwarnings("ignore:Profiler won't be using warmup:UserWarning")
    def test_each_cycle_is_saved_separately(self, train):
        """Each cycle has its own batches, also if cycles are adjacent."""
        keeping = Keeping()
        train(make_profiler(cyclic_schedule(warmup=0, active=2, repeat=3), keeping))

        assert [steps(window) for window in keeping.windows] == [[0, 1], [2, 3], [4, 5]]
        assert keeping.calls == ["open", *["save"] * 3]

    def test_last_cycle_is_saved_at_the_end(self, train):
        """A cycle cut off by the end is saved, without the time after it."""
        keeping = Keeping()
        train(make_profiler(cyclic_schedule(wait=5, active=9), keeping))

        assert names(keeping.windows[0]).count("forward") == 2
        assert names(keeping.windows[0])[-1] == "event/fit_end"
        assert keeping.calls == ["open", "save"]

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


class TestOwnRanges:
    def test_ranges_of_torch(self, train, watch):
        """A block and a function that are recorded are within the callback that runs them."""
        keeping = Keeping()

        @record_function("function")
        def count_down(number):
            return number and count_down(number - 1)

        def work(state):
            with state.profiler.marker("outer"):
                assert count_down(1) == 0

        train(make_profiler(cyclic_schedule(wait=1, active=1), keeping), callbacks=[watch("batch_start", work)])

        [window] = keeping.windows
        inside = names(window)[names(window).index("callback/Watch") + 1 :][:3]
        assert inside == ["outer", "function", "function"]


class TestAborted:
    @pytest.mark.parametrize("error", [ZeroDivisionError, KeyboardInterrupt])
    def test_recording_is_valid_after_an_error(self, train, watch, names, tmp_path, error):
        """After an error or Ctrl-C within a batch the file is valid and has the ranges before it."""

        def fail(state):
            if state.timestamp.batch == 3:
                raise error

        profiler = make_profiler(cyclic_schedule(active=5), JSONTraceHandler(str(tmp_path)))
        with pytest.raises(error):
            train(profiler, callbacks=[watch("after_forward", fail)])

        found = names(tmp_path / "ep0-ba3-rank0.json")
        assert found.count("forward") == 3
        assert found.count("backward") == 2
        assert found[-1] == "callback/Watch"


@pytest.mark.gpu
def test_on_a_gpu(train):
    """The trace has the kernels of the GPU."""
    keeping = Keeping()
    train(make_profiler(cyclic_schedule(active=2), keeping), device="gpu")

    assert any(event.get("cat") == "kernel" for event in keeping.windows[0])
