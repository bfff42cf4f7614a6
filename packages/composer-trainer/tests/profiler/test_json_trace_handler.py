"""Files in Chrome's trace format from real trainings."""

import json
import threading

import pytest

from composer.core import Logger, LoggerDestination, State, Timestamp
from composer.profiler import JSONTraceHandler, Profiler, TraceEvent, cyclic_schedule
from composer.profiler.json_trace_handler import chrome_trace, merged_traces


def make_profiler(handler, **options):
    options = {"sys_prof_cpu": False, **options}
    return Profiler(cyclic_schedule(wait=1, warmup=0, active=2, repeat=2), handler, torch_prof_folder=None, **options)


class Uploads(LoggerDestination):
    """Stores the names of uploads."""

    def __init__(self):
        self.names = []

    def upload_file(self, state, remote_file_name, file_path, *, overwrite=False):
        json.loads(file_path.read_text())
        self.names.append(remote_file_name)

    def can_upload_files(self):
        return True


def span(name, begin, duration=1000, thread=1):
    return TraceEvent("span", name, (), begin, duration, thread, {})


class TestTraining:
    def test_files_of_a_training(self, train, read, tmp_path):
        """Each cycle of active batches has a file with nested, ordered spans, and a merged file has all."""
        train(make_profiler(JSONTraceHandler(str(tmp_path / "{run_name}"))))

        folder = tmp_path / "mine"
        assert sorted(path.name for path in folder.iterdir()) == [
            "ep0-ba3-rank0.json",
            "ep1-ba6-rank0.json",
            "merged_trace.json",
        ]
        parts = [read(folder / name) for name in ("ep0-ba3-rank0.json", "ep1-ba6-rank0.json")]
        merged = read(folder / "merged_trace.json")
        batches = [[e["args"]["batch"] for e in events if e["name"] == "forward"] for events in (*parts, merged)]
        assert batches == [[1, 2], [4, 5], [1, 2, 4, 5]]
        counts = [sum(event["ph"] != "M" for event in events) for events in (*parts, merged)]
        assert counts[0] + counts[1] == counts[2]

    def test_required_fields(self, train, read, tmp_path):
        """Every event has phase, process and thread; spans have microseconds, counters values."""
        pytest.importorskip("psutil", reason="the extra is not installed")
        train(make_profiler(JSONTraceHandler(str(tmp_path)), sys_prof_memory=True))

        events = read(tmp_path / "ep0-ba3-rank0.json")
        assert {event["ph"] for event in events} == {"M", "X", "C"}
        assert all({"name", "ph", "ts", "pid", "tid", "args"} <= event.keys() for event in events)
        assert all("dur" in event for event in events if event["ph"] == "X")
        [batch, second] = [event for event in events if event["name"] == "batch"]
        assert 10 < batch["dur"] < 60e6
        assert batch["ts"] + batch["dur"] <= second["ts"]

    def test_files_are_uploaded(self, train, tmp_path):
        """Each file and the merged one are uploaded under their remote names."""
        uploads = Uploads()
        train(make_profiler(JSONTraceHandler(str(tmp_path))), loggers=uploads)

        assert uploads.names == [
            "mine/traces/ep0-ba3-rank0.json",
            "mine/traces/ep1-ba6-rank0.json",
            "mine/traces/merged_trace.json",
        ]

    def test_no_remote_names(self, train, tmp_path):
        """Without remote names nothing is uploaded."""
        uploads = Uploads()
        handler = JSONTraceHandler(str(tmp_path), remote_file_name=None, merged_trace_remote_file_name=None)
        train(make_profiler(handler), loggers=uploads)

        assert uploads.names == []

    def test_no_merged_file(self, train, tmp_path):
        """Without a name it is not written; only the newest of the others may be kept."""
        train(make_profiler(JSONTraceHandler(str(tmp_path), merged_trace_filename=None, num_traces_to_keep=1)))

        assert [path.name for path in tmp_path.iterdir()] == ["ep1-ba6-rank0.json"]

    def test_traces_of_another_training(self, train, tmp_path):
        """A second training raises before its first batch, unless overwrite=True."""
        train(make_profiler(JSONTraceHandler(str(tmp_path))))

        with pytest.raises(FileExistsError, match="Set overwrite=True to overwrite them"):
            train(make_profiler(JSONTraceHandler(str(tmp_path))))
        train(make_profiler(JSONTraceHandler(str(tmp_path), overwrite=True)))

    def test_reused_handler(self, train, tmp_path):
        """A reused handler raises for the same folder, like a new one, and deletes nothing."""
        profiler = make_profiler(JSONTraceHandler(str(tmp_path), merged_trace_filename=None, num_traces_to_keep=1))
        train(profiler)

        with pytest.raises(FileExistsError, match="Set overwrite=True to overwrite them"):
            train(profiler)
        assert [path.name for path in tmp_path.iterdir()] == ["ep1-ba6-rank0.json"]

    def test_two_fits_of_a_training(self, train, tmp_path):
        """A continued training appends to its own traces."""
        import torch

        from composer import Trainer
        from composer.models import ComposerClassifier

        network = torch.nn.Linear(3, 2)
        trainer = Trainer(
            model=ComposerClassifier(network, num_classes=2),
            train_dataloader=[(torch.rand(4, 3), torch.tensor([0, 1, 0, 1]))] * 5,
            optimizers=torch.optim.SGD(network.parameters(), lr=0.1),
            callbacks=make_profiler(JSONTraceHandler(str(tmp_path))),
            progress_bar=False,
            device="cpu",
            precision="fp32",
        )
        for _ in range(2):
            trainer.fit(duration="3ba")
        trainer.fit(duration="2ba", reset_time=True)
        trainer.close()

        names = sorted(path.name for path in tmp_path.iterdir())
        assert names == ["ep0-ba2-rank0.json", "ep0-ba3-rank0.json", "ep1-ba6-rank0.json", "merged_trace.json"]


class TestRanks:
    def test_rank_zero_merges_all(self, tmp_path):
        """The merged file has the traces of other processes with their process ids."""
        for rank in (1, 0):
            state = State(model=None, rank=rank)
            state.timestamp = Timestamp(batch=4)
            handler = JSONTraceHandler(str(tmp_path))
            handler.save([span("forward", 1_000_000 * (2 - rank))], state, Logger(state))
            handler.close(state, Logger(state))

        events = json.loads((tmp_path / "merged_trace.json").read_text())["traceEvents"]
        assert [(e["pid"], e["ts"]) for e in events if e["name"] == "forward"] == [(1, 0.0), (0, 1000.0)]
        assert {e["args"]["name"] for e in events if e["name"] == "process_name"} == {"rank 0", "rank 1"}

    def test_nothing_to_merge(self, tmp_path):
        """Without a trace there is no merged file."""
        state = State(model=None)
        JSONTraceHandler(str(tmp_path)).close(state, Logger(state))

        assert [*tmp_path.iterdir()] == []


class TestFormat:
    def test_worked_example(self):
        """Each kind of event has the form of the format: times relative to the first, in microseconds."""
        events = [
            TraceEvent("span", "a", ("x", "y"), 5_000_000, 2_500, 70, {"batch": 3}),
            TraceEvent("instant", "b", (), 5_001_000, 0, 80, {}),
            TraceEvent("counter", "c", (), 5_001_500, 0, 70, {"v": 1.5}),
        ]

        trace = chrome_trace(events, rank=2)

        assert trace["baseTimeNanoseconds"] == 5_000_000
        assert [event for event in trace["traceEvents"] if event["ph"] != "M"] == [
            {
                "ph": "X",
                "name": "a",
                "cat": "x,y",
                "ts": 0.0,
                "pid": 2,
                "tid": 0,
                "args": {"batch": 3},
                "dur": 2.5,
            },
            {"ph": "i", "name": "b", "cat": "", "ts": 1.0, "pid": 2, "tid": 1, "args": {}, "s": "t"},
            {"ph": "C", "name": "c", "cat": "", "ts": 1.5, "pid": 2, "tid": 0, "args": {"v": 1.5}},
        ]

    def test_empty_trace(self):
        """An empty cycle is a valid trace."""
        assert [event["ph"] for event in chrome_trace([], rank=0)["traceEvents"]] == ["M", "M"]
        assert merged_traces([])["traceEvents"] == []

    def test_merged_traces_keep_their_times(self):
        """Traces with different start times keep their offset, to the nanosecond."""
        now = 1_790_000_000_123_456_789
        traces = [chrome_trace([span("a", now), span("b", now + 7)], 0), chrome_trace([span("c", now + 1_000_003)], 0)]

        events = merged_traces(traces)["traceEvents"]

        assert [(e["name"], e["ts"]) for e in events if e["ph"] == "X"] == [("a", 0.0), ("b", 0.007), ("c", 1000.003)]

    def test_bad_names(self):
        """An unknown placeholder raises with its name."""
        with pytest.raises(ValueError, match="merged_trace_filename may have"):
            JSONTraceHandler(merged_trace_filename="{step}")

    def test_files_are_written_atomically(self, tmp_path):
        """A concurrent reader only finds valid files."""
        state, handler = State(model=None), JSONTraceHandler(str(tmp_path), overwrite=True)
        events = [span(f"span {number}", number) for number in range(2000)]
        recorded = []

        def look():
            while not done.is_set():
                recorded.extend(json.loads(path.read_text()) for path in handler.files.existing(state))

        done, watcher = threading.Event(), threading.Thread(target=look)
        watcher.start()
        for _ in range(10):
            handler.save(events, state, Logger(state))
        done.set()
        watcher.join()

        assert all(len(trace["traceEvents"]) == 2002 for trace in recorded)
        assert len(handler.files.existing(state)) == 1
