"""Trace files: names, atomic writes and retention."""

import pytest

from composer.core import Logger, LoggerDestination, State, Timestamp
from composer.profiler.files import TraceFiles


class Keeping(LoggerDestination):
    """Stores names and contents of uploads."""

    def __init__(self):
        self.kept = {}

    def upload_file(self, state, remote_file_name, file_path, *, overwrite=False):
        self.kept[remote_file_name] = (file_path.read_text(), overwrite)

    def can_upload_files(self):
        return True


def files_in(folder, filename="ep{epoch}-ba{batch}-rank{rank}.json", remote=None, overwrite=False, keep=-1):
    return TraceFiles(str(folder), filename, remote, overwrite=overwrite, num_traces_to_keep=keep)


def written(files, state, logger=None, batches=(1, 2, 3)):
    for batch in batches:
        state.timestamp = Timestamp(batch=batch)
        files.write(lambda path, text=str(batch): path.write_text(text), state, logger or Logger(state))
    return sorted(path.name for path in files.folder_of(state).iterdir())


def test_names_are_filled_in(tmp_path):
    """Names contain run, epoch, batch and rank at the time of writing."""
    state = State(model=None, run_name="mine", rank=3)
    state.timestamp = Timestamp(epoch=2, batch=7)
    files = TraceFiles(
        str(tmp_path / "{run_name}"),
        "ep{epoch}-ba{batch:03d}-{rank}.json",
        None,
        overwrite=False,
        num_traces_to_keep=-1,
    )

    path = files.write(lambda path: path.write_text("x"), state, Logger(state))

    assert path == tmp_path / "mine" / "ep2-ba007-3.json"
    assert files.existing(state) == [path]


@pytest.mark.parametrize(
    ("keep", "left"), [(-1, ["1", "2", "3"]), (2, ["2", "3"]), (1, ["3"]), (0, []), (7, ["1", "2", "3"])]
)
def test_only_the_newest_are_kept(tmp_path, keep, left):
    """Older files are removed as newer ones are written."""
    files = files_in(tmp_path, "{batch}", keep=keep)

    assert written(files, State(model=None)) == left
    assert [path.name for path in files.paths] == left


def test_failed_write_leaves_no_file(tmp_path):
    """A failed write leaves no partial file and preserves existing ones."""
    path = tmp_path / "trace.json"
    path.write_text("former")

    def fail(unfinished):
        unfinished.write_text("half")
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        files_in(tmp_path, "trace.json", overwrite=True).write(fail, State(model=None), Logger(State(model=None)))

    assert [(each.name, each.read_text()) for each in tmp_path.iterdir()] == [("trace.json", "former")]


def test_files_are_uploaded(tmp_path):
    """Files with a remote name are uploaded, also if they are not kept locally."""
    state, keeping = State(model=None, run_name="mine"), Keeping()
    logger = Logger(state, keeping)
    written(files_in(tmp_path, remote="{run_name}/{batch}", keep=0, overwrite=True), state, logger, [4])
    written(files_in(tmp_path, keep=0), state, logger, [5])

    assert keeping.kept == {"mine/4": ("4", True)}


class TestExistingTraces:
    def test_of_another_training_raise(self, tmp_path):
        """A training that starts in a folder with traces raises with the remedy."""
        state = State(model=None)
        written(files_in(tmp_path), state)
        state.timestamp = Timestamp()

        with pytest.raises(FileExistsError, match=r"'.*' already contains traces, such as 'ep0-ba1-rank0.json'"):
            files_in(tmp_path).check_folder(state)
        files_in(tmp_path, overwrite=True).check_folder(state)

    def test_of_the_same_training_are_accepted(self, tmp_path):
        """A resumed training, another fit and other ranks' files are accepted."""
        state, files = State(model=None), files_in(tmp_path)
        written(files, state)
        files_in(tmp_path).check_folder(state)
        state.timestamp = Timestamp()
        files.check_folder(state)
        other = State(model=None, rank=1)
        files_in(tmp_path).check_folder(other)

        assert files_in(tmp_path).existing(other) == []
        assert len(files_in(tmp_path).existing(other, of_all_ranks=True)) == 3

    def test_unfinished_files_are_ignored(self, tmp_path):
        """A file that another process is writing is not a trace."""
        (tmp_path / ".unfinished-1").write_text("half")

        assert files_in(tmp_path, "{batch}").existing(State(model=None)) == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"filename": "{step}.json"}, r"filename may have \{run_name\}, .* in it, nothing else in braces"),
        ({"filename": "{epoch.__class__}.json"}, r"filename may have .* in it, nothing else in braces"),
        ({"filename": "ep\0.json"}, "filename must be the name of a file or folder"),
        ({"remote": "{}"}, "remote_file_name may have"),
        ({"keep": -2}, "num_traces_to_keep must be a number of traces, or -1 for all, got -2"),
    ],
)
def test_bad_arguments(arguments, message):
    """Invalid arguments raise with their names."""
    with pytest.raises(ValueError, match=message):
        files_in("folder", **arguments)
