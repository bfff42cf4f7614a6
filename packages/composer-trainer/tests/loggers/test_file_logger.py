"""Metrics in a file, with complete lines at any time."""

import contextlib
import hashlib
import io
import json
import math
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch

from composer.core import Callback, Event, Timestamp, Trace
from composer.loggers import CSVLogger, FileLogger, ProgressBarLogger


def lines(path):
    """Return the logged lines of a file, without the first, which has the run's name."""
    first, *logged = [json.loads(line) for line in Path(path).read_text(encoding="utf-8").splitlines()]
    assert first.keys() == {"epoch", "batch", "seconds", "run_name"}
    return logged


def losses(path):
    """Return the batches whose loss a file has."""
    return [line["batch"] for line in lines(path) if "loss/train/total" in line.get("metrics", {})]


def resume(make_loop, destination, *, state=None, batch=0, run_name="a", **options):
    """Return a loop that continues at a batch with the saved state of its loggers."""

    class Resume(Callback):
        def before_load(self, state, logger):
            state.timestamp = Timestamp(batch=batch)
            logger.load_state_dict(saved)

    saved = {} if state is None else {type(destination).__name__: state}
    return make_loop(destination, run_name=run_name, callbacks=[Resume()], **options)


class Writes:
    """Records unbuffered writes, until the disk is full."""

    def __init__(self):
        self.contents, self.buffering, self.room = [], [], 10**9

    def watch(self, file):
        watched = mock.MagicMock(wraps=file)
        watched.__enter__.return_value = watched
        watched.__exit__.side_effect = lambda *error: file.close()
        watched.write.side_effect = lambda content: self.write(file, content)
        return watched

    def write(self, file, content):
        self.contents.append(content)
        written = file.write(content[: self.room])
        self.room -= written
        return written


@pytest.fixture
def writes(monkeypatch):
    """Return the writes to appended files."""
    watched, opened = Writes(), Path.open

    def watch(path, mode="r", buffering=-1, **options):
        file = opened(path, mode, buffering, **options)
        if mode != "ab":
            return file
        watched.buffering.append(buffering)
        return watched.watch(file)

    monkeypatch.setattr(Path, "open", watch)
    return watched


class TestFileLogger:
    def test_one_line_per_logged_dictionary(self, make_loop, tmp_path):
        """Each line has the clock and the values."""
        make_loop(FileLogger(str(tmp_path / "log.txt"))).fit(evaluate=True)

        written = lines(tmp_path / "log.txt")

        assert written[1] == {
            "epoch": 0,
            "batch": 1,
            "seconds": 0.5,
            "metrics": {"loss/train/total": 1.0, "time/batch": 1},
        }
        assert written[-1] == {"epoch": 2, "batch": 6, "seconds": 3.0, "metrics": {"metrics/eval/Accuracy": 0.75}}
        assert [line["metrics"]["loss/train/total"] for line in written if len(line["metrics"]) == 2] == [*range(6)]

    def test_name_is_filled_in(self, make_loop, tmp_path, monkeypatch):
        """By default the file name has run and rank, in a folder that is created."""
        monkeypatch.chdir(tmp_path)

        make_loop(FileLogger(), run_name="blur")

        assert lines(tmp_path / "blur" / "logs-rank0.txt") == []

    def test_an_existing_file_is_appended_to(self, make_loop, tmp_path):
        """Nothing that was measured is written over by accident: lines are added, with a warning."""
        path = tmp_path / "log.txt"
        path.write_text("precious")

        with pytest.warns(UserWarning, match=r"log\.txt.*overwrite=True"):
            make_loop(FileLogger(str(path)), run_name="second").fit().engine.close()

        first, second, *_ = path.read_text().splitlines()
        assert first == "precious"
        assert json.loads(second)["run_name"] == "second"

    def test_a_link_raises(self, make_loop, tmp_path):
        """A link to a file is not followed, which may be a file of somebody else."""
        (tmp_path / "other").write_text("precious")
        (tmp_path / "log.txt").symlink_to(tmp_path / "other")

        with pytest.raises(FileExistsError, match=r"must not be a link to a file, got .*log\.txt"):
            make_loop(FileLogger(str(tmp_path / "log.txt"), overwrite=True)).fit()

        assert (tmp_path / "other").read_text() == "precious"

    def test_overwrite(self, make_loop, tmp_path):
        """With overwrite the file is replaced."""
        (tmp_path / "log.txt").write_text("old\n")

        make_loop(FileLogger(str(tmp_path / "log.txt"), overwrite=True)).fit()

        assert len(lines(tmp_path / "log.txt")) == 6

    def test_flush_interval(self, make_loop, tmp_path):
        """Lines are written after every flush_interval batches."""
        loop = make_loop(FileLogger(str(tmp_path / "log.txt"), flush_interval=2))
        written = []

        for _ in range(5):
            loop.batch()
            written.append(len(lines(tmp_path / "log.txt")))

        assert written == [0, 2, 2, 4, 4]

    @pytest.mark.parametrize("event", ["epoch_end", "eval_after_all", "fit_end", "predict_end"])
    def test_flush_events(self, make_loop, tmp_path, event):
        """Lines are written at the end of an epoch, evaluation, prediction or training."""
        loop = make_loop(FileLogger(str(tmp_path / "log.txt")))
        loop.batch()

        loop.engine.run_event(event)

        assert len(lines(tmp_path / "log.txt")) == 1

    def test_written_on_close(self, make_loop, tmp_path):
        """Remaining lines are written by close."""
        loop = make_loop(FileLogger(str(tmp_path / "log.txt")))
        loop.batch()

        loop.engine.close()

        assert len(lines(tmp_path / "log.txt")) == 1

    def test_one_synchronization_per_flush(self, make_loop, tmp_path, unread):
        """Device values are read together when they are written."""
        loop = make_loop(FileLogger(str(tmp_path / "log.txt"), flush_interval=4))
        for number in range(3):
            loop.batch(slow=unread(number))
        before = unread.counter.reads

        loop.batch(slow=unread(3))

        assert (before, unread.counter.reads) == (0, 1)
        assert [line["metrics"]["slow"] for line in lines(tmp_path / "log.txt")] == [0.0, 1.0, 2.0, 3.0]

    def test_special_floats(self, make_loop, tmp_path):
        """The file is strict JSON, with strings that float() accepts."""
        loop = make_loop(FileLogger(str(tmp_path / "log.txt")))
        loop.logger.log_metrics({"a": torch.tensor(math.nan), "b": math.inf, "c": [-math.inf]})
        loop.engine.close()

        def reject(name):
            raise AssertionError(name)

        last = (tmp_path / "log.txt").read_text().splitlines()[-1]
        values = json.loads(last, parse_constant=reject)["metrics"]
        assert values == {"a": "NaN", "b": "Infinity", "c": ["-Infinity"]}
        assert math.isnan(float(values["a"]))
        assert float(values["c"][0]) == -math.inf

    def test_hyperparameters(self, make_loop, tmp_path):
        """Hyperparameters are a line; unserializable values become strings."""
        loop = make_loop(FileLogger(str(tmp_path / "log.txt")))
        settings = {
            "lr": 0.1,
            "sizes": (1, 2),
            "device": torch.device("cpu"),
            "weights": torch.ones(2),
            3: {None: True},
        }
        loop.logger.log_hyperparameters(settings)
        loop.engine.close()

        assert lines(tmp_path / "log.txt")[0]["hyperparameters"] == {
            "lr": 0.1,
            "sizes": [1, 2],
            "device": "cpu",
            "weights": [1.0, 1.0],
            "3": {"None": True},
        }

    def test_traces_and_tables(self, make_loop, tmp_path):
        """Traces and tables have their own lines."""
        loop = make_loop(FileLogger(str(tmp_path / "log.txt")))
        loop.logger.log_traces(
            {"algorithm_traces/MixUp/after_loss": Trace("MixUp", Event.AFTER_LOSS, order=0, run=True)}
        )
        loop.logger.log_table(["id"], [[7]], name="best")
        loop.engine.close()

        trace, table = lines(tmp_path / "log.txt")
        assert trace["traces"]["algorithm_traces/MixUp/after_loss"] == {
            "name": "MixUp",
            "event": "after_loss",
            "exit_code": None,
            "order": 0,
            "run": True,
        }
        assert (table["table"], table["columns"], table["rows"]) == ("best", ["id"], [[7]])

    def test_full_disk_does_not_end_the_run(self, make_loop, tmp_path):
        """A write failure is reported once; the run continues, and the file if possible."""
        loop = make_loop(FileLogger(str(tmp_path / "log.txt"), flush_interval=1))
        loop.batch()
        (tmp_path / "log.txt").rename(tmp_path / "kept.txt")
        (tmp_path / "log.txt").mkdir()

        with pytest.warns(
            RuntimeWarning, match=r"FileLogger\.flush failed .* training continues\. The cause: IsADirectoryError"
        ) as caught:
            [loop.batch() for _ in range(2)]
        (tmp_path / "log.txt").rmdir()
        loop.batch()

        assert len(caught) == 1
        assert [json.loads(line)["batch"] for line in (tmp_path / "log.txt").read_text().splitlines()] == [3]

    def test_every(self, make_loop, tmp_path):
        """With an interval the latest values are written with their batch, also after an error."""
        loop = make_loop(FileLogger(str(tmp_path / "log.txt"), every="4ba"))
        loop.fit()
        loop.engine.close()

        assert [line["batch"] for line in lines(tmp_path / "log.txt")] == [3, 5]

    def test_delayed_values_have_their_epoch(self, make_loop, tmp_path):
        """The epoch is that of the batch; the time is that of the delivery, and is not written."""
        loop = make_loop(
            FileLogger(str(tmp_path / "log.txt"), every="3ba"), CSVLogger(str(tmp_path / "log.csv"), every="3ba")
        )
        loop.fit()
        loop.engine.close()

        found = [{name: line[name] for name in line if name != "metrics"} for line in lines(tmp_path / "log.txt")]
        assert found == [{"epoch": 0, "batch": 2}, {"epoch": 1, "batch": 5}]
        rows = [line.split(",")[:2] for line in (tmp_path / "log.csv").read_text().splitlines()[1:]]
        assert rows == [["0", "2"], ["1", "5"]]


class TestPrintedLines:
    def test_both_streams(self, make_loop, tmp_path, capsys):
        """Printed lines are in the file with the clock, and on the screen."""
        loop = make_loop(FileLogger(str(tmp_path / "log.txt")))
        loop.batch()

        print("to stdout")
        print("to stderr", file=sys.stderr)
        loop.engine.close()
        print("afterwards")

        assert lines(tmp_path / "log.txt")[1:] == [
            {"epoch": 0, "batch": 1, "seconds": 0.5, "stdout": "to stdout"},
            {"epoch": 0, "batch": 1, "seconds": 0.5, "stderr": "to stderr"},
        ]
        output = capsys.readouterr()
        assert (output.out, output.err) == ("to stdout\nafterwards\n", "to stderr\n")

    def test_error_in_training(self, make_loop, tmp_path):
        """After an error the lines before it are in the file."""
        loop = make_loop(FileLogger(str(tmp_path / "log.txt")))
        print("before the error")

        loop.engine.close()

        assert lines(tmp_path / "log.txt")[0]["stdout"] == "before the error"

    def test_progress_bar(self, make_loop, tmp_path):
        """No state of a progress bar is in the file, only the lines that it leaves for the epochs."""
        terminal = io.StringIO()
        terminal.isatty = lambda: True
        with contextlib.redirect_stderr(terminal):
            loop = make_loop(FileLogger(str(tmp_path / "log.txt")), ProgressBarLogger("stderr"))
            loop.fit()
            loop.engine.close()

        drawn = [line["stderr"] for line in lines(tmp_path / "log.txt") if "stderr" in line]
        assert [line.split()[:2] for line in drawn] == [["epoch", "1/2,"], ["epoch", "2/2,"]]


class TestResuming:
    def test_resume(self, make_loop, tmp_path):
        """A run resumed from its own checkpoint appends to its file."""
        first = FileLogger(str(tmp_path / "a"))
        make_loop(first, run_name="a").fit().engine.close()
        later = FileLogger(str(tmp_path / "a"))

        resume(make_loop, later, state=first.state_dict(), batch=6).fit().engine.close()

        assert losses(tmp_path / "a") == [*range(12)]

    def test_a_checkpoint_does_not_choose_the_file(self, make_loop, tmp_path):
        """A path in a checkpoint that is not the logger's is neither written nor read."""
        precious = tmp_path / "precious"
        precious.write_text("export A=1\n")
        state = {"path": str(precious), "size": 0, "first_line": ""}

        resume(make_loop, FileLogger(str(tmp_path / "own")), state=state, batch=6).fit().engine.close()

        assert precious.read_text() == "export A=1\n"
        assert losses(tmp_path / "own") == [*range(6, 12)]

    def test_checkpoint_of_another_run(self, make_loop, tmp_path):
        """A run that starts from another run's checkpoint has its own file and does not change the other's."""
        first = FileLogger(str(tmp_path / "{run_name}"))
        make_loop(first, run_name="a").fit().engine.close()
        before = (tmp_path / "a").read_bytes()
        later = FileLogger(str(tmp_path / "{run_name}"))

        resume(make_loop, later, state=first.state_dict(), batch=6, run_name="b").fit().engine.close()

        assert (tmp_path / "a").read_bytes() == before
        assert losses(tmp_path / "b") == [*range(6, 12)]

    def test_lines_after_the_checkpoint_are_removed(self, make_loop, tmp_path):
        """No batch is logged twice after a kill; lines of the checkpoint's batch are preserved."""
        first = FileLogger(str(tmp_path / "a"), flush_interval=1)
        loop = make_loop(first, run_name="a")
        loop.fit(epochs=1, evaluate=True)
        saved = first.state_dict()
        [loop.batch() for _ in range(2)]
        with (tmp_path / "a").open("a") as file:
            file.write('{"epoch": 1, "ba')  # as a kill may leave it

        resume(make_loop, FileLogger(str(tmp_path / "a")), state=saved, batch=3).fit(epochs=1).engine.close()

        assert losses(tmp_path / "a") == [*range(6)]
        assert [line["batch"] for line in lines(tmp_path / "a") if "metrics/eval/Accuracy" in line["metrics"]] == [3]

    def test_saving_flushes(self, make_loop, tmp_path):
        """Lines before a checkpoint are written when it is saved."""
        logger = FileLogger(str(tmp_path / "a"), flush_interval=100)
        loop = make_loop(logger, run_name="a")
        [loop.batch() for _ in range(3)]

        saved = logger.state_dict()

        assert losses(tmp_path / "a") == [0, 1, 2]
        first_line = (tmp_path / "a").read_bytes().partition(b"\n")[0] + b"\n"
        assert saved == {
            "path": str(tmp_path / "a"),
            "size": (tmp_path / "a").stat().st_size,
            "first_line": hashlib.sha256(first_line).hexdigest(),
        }
