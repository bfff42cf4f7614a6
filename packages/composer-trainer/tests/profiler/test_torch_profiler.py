"""Files of torch's profiler."""

import json
import re

import pytest

from composer.profiler import Profiler, TorchProfiler, cyclic_schedule


def make_profiler(folder, schedule=None, **options):
    return Profiler(
        schedule or cyclic_schedule(wait=1, warmup=1, active=2),
        [],
        sys_prof_cpu=False,
        torch_prof_folder=str(folder),
        **{f"torch_prof_{name}": value for name, value in options.items()},
    )


def test_trace_of_a_training(train, names, tmp_path, uploads):
    """It has the batches with their numbers, and is uploaded."""
    train(make_profiler(tmp_path), loggers=uploads)

    [path] = tmp_path.iterdir()
    assert path.name == "rank0.4.pt.trace.json"
    assert [name for name in names(path) if name.startswith("ProfilerStep")] == ["ProfilerStep#2", "ProfilerStep#3"]
    assert {"forward", "algorithm/LabelSmoothing"} <= set(names(path))
    assert uploads.names == ["mine/torch_traces/rank0.4.pt.trace.json"]


def test_each_cycle_has_a_file(train, names, tmp_path):
    """Each cycle is written separately; the newest are kept."""
    train(make_profiler(tmp_path, cyclic_schedule(active=1, repeat=3), num_traces_to_keep=2), duration="7ba")

    steps = {path.name: [name for name in names(path) if "Step" in name] for path in tmp_path.iterdir()}
    assert steps == {"rank0.4.pt.trace.json": ["ProfilerStep#3"], "rank0.6.pt.trace.json": ["ProfilerStep#5"]}


@pytest.mark.filterwarnings("ignore:Profiler clears events:UserWarning")
def test_options(train, read, tmp_path, uploads):
    """Compression, shapes and stack traces; a memory timeline in its own file."""
    pytest.importorskip("numpy")
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
    events = read(paths[1])
    linear = next(event for event in events if event["name"] == "aten::linear")
    assert linear["args"]["Input Dims"][0] == [4, 4]
    assert any(re.search(r"loop\.py\(\d+\)", event["name"]) for event in events)
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

    def test_gzip_suffix(self):
        """With gzip, the suffix is added if it is missing."""
        assert TorchProfiler(filename="a.json.gz", use_gzip=True).filename == "a.json.gz"
        assert TorchProfiler(remote_file_name=None, use_gzip=True).remote_file_name is None
