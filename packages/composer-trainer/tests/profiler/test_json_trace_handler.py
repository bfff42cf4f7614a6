"""Files in Chrome's trace format: names, retention and uploads."""

import pytest

from composer.core import Logger, State, Timestamp
from composer.profiler import JSONTraceHandler, Profiler, cyclic_schedule


def make_profiler(handler):
    return Profiler(cyclic_schedule(active=2, repeat=2), handler)


def write_batches(handler, state, batches=(1, 2, 3)):
    for batch in batches:
        state.timestamp = Timestamp(batch=batch)
        handler.write(lambda path, text=str(batch): path.write_text(text), state, Logger(state))
    return sorted(path.name for path in handler.existing(state))


class TestTraining:
    def test_files_of_a_training(self, train, names, tmp_path, uploads):
        """Each cycle of active batches has a file, and all are uploaded."""
        train(make_profiler(JSONTraceHandler(str(tmp_path / "{run_name}"))), loggers=uploads)

        files = ["ep0-ba3-rank0.json", "ep1-ba6-rank0.json"]
        found = [names(tmp_path / "mine" / name) for name in files]
        assert sorted(path.name for path in (tmp_path / "mine").iterdir()) == files
        steps = [[name for name in part if name.startswith("ProfilerStep")] for part in found]
        assert steps == [["ProfilerStep#1", "ProfilerStep#2"], ["ProfilerStep#4", "ProfilerStep#5"]]
        assert uploads.names == [f"mine/traces/{name}" for name in files]

    def test_no_remote_name(self, train, tmp_path, uploads):
        """Without a remote name nothing is uploaded."""
        handler = JSONTraceHandler(str(tmp_path), remote_file_name=None)
        train(make_profiler(handler), loggers=uploads)

        assert uploads.names == []

    def test_compressed(self, train, names, tmp_path):
        """A name that ends with .gz compresses the file."""
        train(make_profiler(JSONTraceHandler(str(tmp_path), "{batch}.json.gz", num_traces_to_keep=1)))

        assert "forward" in names(tmp_path / "6.json.gz")

    def test_two_ranks(self, train, watch, tmp_path):
        """Names contain the rank."""

        def be_second(state):
            state.rank = 1

        train(make_profiler(JSONTraceHandler(str(tmp_path))), callbacks=[watch("init", be_second)])
        train(make_profiler(JSONTraceHandler(str(tmp_path))))

        assert sorted(path.name for path in tmp_path.iterdir()) == [
            "ep0-ba3-rank0.json",
            "ep0-ba3-rank1.json",
            "ep1-ba6-rank0.json",
            "ep1-ba6-rank1.json",
        ]


class TestFiles:
    def test_names_are_filled_in(self, tmp_path):
        """Names contain run, epoch, batch and rank at the time of writing."""
        state = State(model=None, run_name="mine", rank=3)
        state.timestamp = Timestamp(epoch=2, batch=7)
        handler = JSONTraceHandler(tmp_path / "{run_name}", "ep{epoch}-ba{batch:03d}-{rank}.json")

        handler.write(lambda path: path.write_text("x"), state, Logger(state))

        assert handler.existing(state) == [tmp_path / "mine" / "ep2-ba007-3.json"]

    @pytest.mark.parametrize(
        ("keep", "left"), [(-1, ["1", "2", "3"]), (2, ["2", "3"]), (1, ["3"]), (0, []), (7, ["1", "2", "3"])]
    )
    def test_only_the_newest_are_kept(self, tmp_path, keep, left):
        """Older files are removed as newer ones are written."""
        handler = JSONTraceHandler(str(tmp_path), "{batch}", num_traces_to_keep=keep)

        assert write_batches(handler, State(model=None)) == left


class TestExistingTraces:
    def test_of_another_training_raise(self, tmp_path):
        """A training that starts in a folder with traces raises with the remedy."""
        state = State(model=None)
        write_batches(JSONTraceHandler(str(tmp_path)), state)
        state.timestamp = Timestamp()

        with pytest.raises(FileExistsError, match=r"'.*' already contains traces, such as 'ep0-ba1-rank0.json'"):
            JSONTraceHandler(str(tmp_path)).open(state, Logger(state))
        JSONTraceHandler(str(tmp_path), overwrite=True).open(state, Logger(state))

    def test_of_a_resumed_training_or_other_ranks_are_accepted(self, tmp_path):
        """A resumed training, and other ranks' files, are accepted."""
        state = State(model=None)
        write_batches(JSONTraceHandler(str(tmp_path)), state)
        JSONTraceHandler(str(tmp_path)).open(state, Logger(state))
        other = State(model=None, rank=1)
        handler = JSONTraceHandler(str(tmp_path))
        handler.open(other, Logger(other))

        assert handler.existing(other) == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"filename": "{step}.json"}, r"filename may have \{run_name\}, .* in it, nothing else in braces"),
        ({"filename": "ep\0.json"}, "filename must be the name of a file or folder"),
        ({"remote_file_name": "{}"}, "remote_file_name may have"),
        ({"num_traces_to_keep": -2}, "num_traces_to_keep must be at least -1, got -2"),
    ],
)
def test_bad_arguments(arguments, message):
    """Invalid arguments raise with their names."""
    with pytest.raises(ValueError, match=message):
        JSONTraceHandler(**arguments)
