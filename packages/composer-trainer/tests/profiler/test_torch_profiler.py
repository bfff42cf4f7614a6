"""Traces of torch's own profiler."""

import gzip
import json
import re

import pytest

from composer.core import LoggerDestination
from composer.profiler import Profiler, TorchProfiler, cyclic_schedule


def make_profiler(folder, schedule=None, **options):
    return Profiler(
        schedule or cyclic_schedule(wait=1, warmup=1, active=2),
        [],
        sys_prof_cpu=False,
        torch_prof_folder=str(folder),
        **{f"torch_prof_{name}": value for name, value in options.items()},
    )


def spans_in(path):
    opened = gzip.open if path.suffix == ".gz" else open
    with opened(path, "rt") as file:
        return [event for event in json.load(file)["traceEvents"] if event.get("ph") == "X"]


class Uploads(LoggerDestination):
    """Stores the names of uploads."""

    def __init__(self):
        self.names = []

    def upload_file(self, state, remote_file_name, file_path, *, overwrite=False):
        assert file_path.stat().st_size > 1000
        self.names.append(remote_file_name)

    def can_upload_files(self):
        return True


def test_trace_of_a_training(train, watch, tmp_path):
    """It has torch's operations and the spans of active batches, with batch numbers; it is uploaded."""
    uploads = Uploads()
    profiler = make_profiler(tmp_path)

    def work(state):
        with profiler.marker("my part"):
            pass

    train(profiler, callbacks=[watch("batch_start", work)], loggers=uploads)

    [path] = tmp_path.iterdir()
    spans = spans_in(path)
    names = [span["name"] for span in spans]
    assert path.name == "rank0.4.pt.trace.json"
    assert sorted(name for name in names if name.startswith("ProfilerStep")) == ["ProfilerStep#2", "ProfilerStep#3"]
    assert {"aten::linear", "event/before_loss", "forward", "algorithm/LabelSmoothing", "my part"} <= set(names)
    assert names.count("forward") == names.count("backward") == names.count("my part") == 2
    forward = next(span for span in spans if span["name"] == "forward")
    linear = next(span for span in spans if span["name"] == "aten::linear" and span["ts"] > forward["ts"])
    assert linear["ts"] + linear["dur"] <= forward["ts"] + forward["dur"]
    assert uploads.names == ["mine/torch_traces/rank0.4.pt.trace.json"]


def test_each_cycle_has_a_file(train, tmp_path):
    """Adjacent cycles are written separately; the newest are kept."""
    schedule = cyclic_schedule(warmup=0, active=2, repeat=3)
    train(make_profiler(tmp_path, schedule, num_traces_to_keep=2), duration="7ba")

    steps = {
        path.name: sorted({span["name"] for span in spans_in(path) if span["name"].startswith("ProfilerStep")})
        for path in tmp_path.iterdir()
    }
    assert steps == {
        "rank0.4.pt.trace.json": ["ProfilerStep#2", "ProfilerStep#3"],
        "rank0.6.pt.trace.json": ["ProfilerStep#4", "ProfilerStep#5"],
    }


def test_after_an_error(train, watch, tmp_path):
    """Recorded events are written, and torch's profiler is stopped, so that another can start."""

    def fail(state):
        if state.timestamp.batch == 3:
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        train(make_profiler(tmp_path), callbacks=[watch("after_forward", fail)])

    [path] = tmp_path.iterdir()
    names = [span["name"] for span in spans_in(path)]
    assert names.count("forward") == 2
    assert names.count("backward") == 1
    train(make_profiler(tmp_path, overwrite=True))


def test_cycle_without_active_batches(train, tmp_path):
    """A training that ends during the warm-up writes nothing."""
    train(make_profiler(tmp_path, cyclic_schedule(wait=6, warmup=3)))

    assert [*tmp_path.iterdir()] == []


@pytest.mark.filterwarnings("ignore:Profiler clears events:UserWarning")
def test_options(train, tmp_path):
    """Compression, shapes and stack traces; a memory timeline in its own file."""
    pytest.importorskip("numpy")
    uploads = Uploads()
    profiler = make_profiler(
        tmp_path,
        use_gzip=True,
        record_shapes=True,
        with_stack=True,
        memory_filename="rank{rank}.{batch}.memory.json",
        memory_remote_file_name=None,
    )
    train(profiler, loggers=uploads)

    paths = sorted(tmp_path.iterdir())
    assert [path.name for path in paths] == ["rank0.4.memory.json", "rank0.4.pt.trace.json.gz"]
    spans = spans_in(paths[1])
    linear = next(span for span in spans if span["name"] == "aten::linear")
    assert linear["args"]["Input Dims"][0] == [4, 3]
    assert any(re.search(r"loop\.py\(\d+\)", span["name"]) for span in spans)
    times, _sizes = json.loads(paths[0].read_text())
    assert times == sorted(times)
    assert uploads.names == ["mine/torch_traces/rank0.4.pt.trace.json.gz"]


class TestErrors:
    def test_memory_timeline_requirements(self):
        """A memory timeline requires other settings."""
        with pytest.raises(ValueError, match=r"memory_filename requires record_shapes=True.*got record_shapes=True"):
            TorchProfiler(memory_filename="memory.html", record_shapes=True)

    def test_traces_of_another_training(self, train, tmp_path):
        """They are not overwritten."""
        (tmp_path / "rank0.4.pt.trace.json").write_text("{}")

        with pytest.raises(FileExistsError, match="Set overwrite=True"):
            train(make_profiler(tmp_path))

    def test_reused_profiler(self, train, tmp_path):
        """A reused profiler raises for the same folder, like a new one."""
        profiler = make_profiler(tmp_path)
        train(profiler)

        with pytest.raises(FileExistsError, match="Set overwrite=True"):
            train(profiler)

    def test_gzip_suffix(self):
        """With gzip, the suffix is added if it is missing."""
        assert TorchProfiler(filename="a.json.gz", use_gzip=True).files.filename == "a.json.gz"
        assert TorchProfiler(remote_file_name=None, use_gzip=True).files.remote_file_name is None
