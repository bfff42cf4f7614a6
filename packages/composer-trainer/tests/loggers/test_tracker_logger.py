"""What all loggers of experiment trackers do: gather, read together, write later, and survive failures."""

import warnings

import pytest
import torch

from composer.core import Callback, Engine, Logger, State
from composer.loggers import FileLogger
from composer.loggers.tracker_logger import TrackerLogger


class Tracker(TrackerLogger):
    """Stores values in a list like a tracker, and fails on request."""

    def __init__(self, **options):
        super().__init__(**options)
        self.stored, self.failing = [], set()

    def store(self, kind, *content):
        if kind in self.failing:
            raise OSError(f"no {kind}")
        self.stored.append((kind, *content))

    def kinds(self):
        return [entry[0] for entry in self.stored]

    def metrics(self):
        return [(entry[1], entry[2]) for entry in self.stored if entry[0] == "metrics"]

    def open_run(self, state):
        self.store("open", state.run_name)

    def write_metrics(self, records):
        for record in records:
            self.store("metrics", record.step, dict(record.metrics))

    def write_hyperparameters(self, hyperparameters):
        self.store("hyperparameters", hyperparameters)

    def write_table(self, columns, rows, name, step):
        self.store("table", columns, rows, name, step)

    def write_images(self, images, name, step, details):
        self.store("images", [tuple(image.shape) for image in images], name, step, details)

    def write_file(self, remote_file_name, file_path, *, overwrite):
        self.store("file", remote_file_name, file_path.read_text(), overwrite)

    def can_upload_files(self):
        return True

    def close_run(self):
        self.store("close")


def losses(tracker):
    return [(step, metrics["loss/train/total"]) for step, metrics in tracker.metrics() if "loss/train/total" in metrics]


class TestNumbers:
    def test_every_loss_with_its_step(self, make_loop):
        """All that was logged is written, in order, as plain numbers."""
        tracker = Tracker()

        make_loop(tracker).fit(evaluate=True)

        assert losses(tracker) == [(number, float(number)) for number in range(6)]
        assert (6, {"metrics/eval/Accuracy": 0.75}) in tracker.metrics()

    def test_written_every_flush_interval(self, make_loop):
        """Between two writings numbers are kept."""
        tracker = Tracker(flush_interval=2)
        loop = make_loop(tracker)
        written = []

        for _ in range(5):
            loop.batch()
            written.append(len(losses(tracker)))

        assert written == [0, 2, 2, 4, 4]

    def test_written_after_some_seconds(self, make_loop):
        """With slow batches one does not wait for a hundred of them."""
        tracker = Tracker(seconds_between_flushes=0)
        loop = make_loop(tracker)

        loop.batch()

        assert len(losses(tracker)) == 1

    @pytest.mark.parametrize("event", ["epoch_end", "eval_after_all", "eval_standalone_end", "fit_end", "predict_end"])
    def test_written_at(self, make_loop, event):
        """Numbers are written when something ends."""
        tracker = Tracker()
        loop = make_loop(tracker)
        loop.batch()

        loop.engine.run_event(event)

        assert losses(tracker) == [(0, 0.0)]

    def test_device_is_waited_for_once_a_flush(self, make_loop, unread):
        """Numbers of a device are read together, when they are written."""
        tracker = Tracker(flush_interval=4)
        loop = make_loop(tracker)
        for number in range(3):
            loop.batch(slow=unread(number))
        before = unread.counter.reads

        loop.batch(slow=unread(3))

        assert (before, unread.counter.reads) == (0, 1)
        assert [metrics["slow"] for _, metrics in tracker.metrics()] == [0.0, 1.0, 2.0, 3.0]

    def test_what_is_no_number(self, make_loop):
        """Of several numbers each has a name; text is left out; truth values are numbers."""
        tracker = Tracker()
        loop = make_loop(tracker)

        loop.logger.log_metrics({"recall": torch.tensor([0.5, 1.0]), "text": "a", "flag": True, "nested": {"x": 1}})
        tracker.flush()

        assert tracker.metrics() == [(0, {"recall/0": 0.5, "recall/1": 1.0, "flag": 1.0, "nested/x": 1})]


class TestRun:
    def test_what_comes_early_is_written_when_the_run_is_open(self):
        """What is logged before AFTER_LOAD waits, in order: the run may go on with an earlier one."""
        tracker, state = Tracker(), State(model=None, run_name="early")
        logger = Logger(state, tracker)
        engine = Engine(state, logger)
        engine.run_event("init")
        logger.log_hyperparameters({"seed": 1})
        logger.log_table(["a"], [[1]], name="t", step=3)
        logger.log_metrics({"x": 1})
        before = list(tracker.stored)

        engine.run_event("after_load")
        engine.close()

        assert before == []
        assert tracker.stored == [
            ("open", "early"),
            ("hyperparameters", {"seed": 1}),
            ("table", ["a"], [[1]], "t", 3),
            ("metrics", 0, {"x": 1}),
            ("close",),
        ]

    @pytest.mark.parametrize("event", ["fit_start", "eval_before_all", "predict_start"])
    def test_a_loop_without_loading(self, event):
        """In a loop of one's own the run is opened, once, when something begins."""
        tracker, state = Tracker(), State(model=None)
        engine = Engine(state, Logger(state, tracker))

        for one in ("init", event, event):
            engine.run_event(one)

        assert tracker.kinds() == ["open"]

    def test_only_closed(self):
        """What was logged in a loop that ran no event is written when it is closed; nothing makes no run."""
        tracker, idle, state = Tracker(), Tracker(), State(model=None)
        engine = Engine(state, Logger(state, [tracker]))
        engine.logger.log_metrics({"x": 1})
        engine.logger.destinations.append(idle)

        engine.close()

        assert tracker.kinds() == ["open", "metrics", "close"]
        assert idle.kinds() == []

    def test_rank_zero_only(self, make_loop, tmp_path):
        """Other processes store nothing, unless they are asked to."""
        silent, loud = Tracker(), Tracker(rank_zero_only=False)
        loop = make_loop(silent, loud, rank=1)

        loop.logger.log_hyperparameters({"a": 1})
        loop.logger.log_images(torch.zeros(1, 8, 8))
        loop.fit()
        loop.engine.close()

        assert silent.stored == []
        assert losses(loud)[-1] == (5, 5.0)

    def test_everything_reaches_the_store(self, make_loop, tmp_path):
        """Settings, tables, images and files are written at once."""
        tracker = Tracker()
        loop = make_loop(tracker)
        (tmp_path / "file").write_text("content")
        loop.batch()

        loop.logger.log_images(torch.rand(2, 3, 4, 5), name="pictures", use_table=False)
        loop.logger.upload_file("there", tmp_path / "file", overwrite=True)

        assert tracker.stored[1:] == [
            (
                "images",
                [(4, 5, 3), (4, 5, 3)],
                "pictures",
                1,
                {"masks": None, "mask_class_labels": None, "use_table": False},
            ),
            ("file", "there", "content", True),
        ]

    def test_a_file_uploaded_while_others_are_closed(self, make_loop, tmp_path):
        """The run stays open until all are closed, whatever their order."""
        tracker = Tracker()
        path = tmp_path / "log.txt"
        loop = make_loop(tracker, FileLogger(str(path), remote_file_name="{run_name}.txt"), run_name="a")
        loop.batch()

        loop.engine.close()

        assert tracker.kinds() == ["open", "metrics", "file", "close"]
        assert tracker.stored[2][1:] == ("a.txt", path.read_text(), True)

    def test_error_in_training(self, make_loop):
        """After an error all that was logged is there, and the run is closed."""
        tracker = Tracker(every="0ba")
        loop = make_loop(tracker)
        loop.batch()
        loop.batch()

        loop.engine.close()

        assert losses(tracker) == [(1, 1.0)]
        assert tracker.kinds()[-1] == "close"


class TestFailures:
    def test_flush(self, make_loop):
        """Numbers that cannot be written are reported once, and the run goes on."""
        tracker = Tracker(flush_interval=1)
        loop = make_loop(tracker)
        tracker.failing = {"metrics"}

        with pytest.warns(RuntimeWarning, match=r"Tracker\.flush failed .* training goes on.*OSError: no metrics"):
            loop.batch()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            loop.batch()
        tracker.failing = set()
        loop.batch()

        assert losses(tracker) == [(2, 2.0)]

    @pytest.mark.parametrize("kind", ["hyperparameters", "table", "images", "file"])
    def test_other_things(self, make_loop, tmp_path, kind):
        """So is anything else that cannot be stored."""
        tracker = Tracker()
        loop = make_loop(tracker)
        tracker.failing = {kind}
        (tmp_path / "f").write_text("")
        log = {
            "hyperparameters": lambda: loop.logger.log_hyperparameters({}),
            "table": lambda: loop.logger.log_table([], []),
            "images": lambda: loop.logger.log_images(torch.zeros(8, 8)),
            "file": lambda: loop.logger.upload_file("f", tmp_path / "f"),
        }[kind]

        with pytest.warns(RuntimeWarning, match=f"no {kind}"):
            log()
        log()

        loop.fit()
        assert len(losses(tracker)) == 6

    def test_what_comes_early(self):
        """Settings that were logged before the run was open do not end it when they cannot be stored."""
        tracker, state = Tracker(), State(model=None)
        engine = Engine(state, Logger(state, tracker))
        engine.run_event("init")
        engine.logger.log_hyperparameters({})
        tracker.failing = {"hyperparameters"}

        with pytest.warns(RuntimeWarning, match=r"Tracker\.log_hyperparameters failed"):
            engine.run_event("after_load")

        assert tracker.kinds() == ["open"]

    def test_close(self, make_loop):
        """A run that cannot be closed is reported, and the others are closed."""
        broken, whole = Tracker(), Tracker()
        loop = make_loop(broken, whole)
        broken.failing = {"close"}

        with pytest.warns(RuntimeWarning, match=r"Tracker\.close failed"):
            loop.engine.close()

        assert whole.kinds()[-1] == "close"

    def test_a_run_that_cannot_be_opened_ends_it(self):
        """Whoever asks for a tracker and does not get one shall know before training; it is tried once."""
        tracker, state = Tracker(), State(model=None)
        engine = Engine(state, Logger(state, tracker))
        tracker.failing = {"open"}
        engine.logger.log_hyperparameters({})

        with pytest.raises(OSError, match="no open"):
            engine.run_event("after_load")
        tracker.failing = set()
        engine.close()

        assert tracker.stored == []

    def test_an_error_in_a_hook_ends_the_run(self, make_loop):
        """What is wrong in a logger's own hook is no failure to store."""

        class Wrong(Tracker):
            def batch_start(self, state, logger):
                raise KeyError("wrong")

        loop = make_loop(Wrong())

        with pytest.raises(KeyError, match="wrong"):
            loop.batch()


class TestSettings:
    def test_flush_interval_of_nothing(self):
        """An interval is at least one batch."""
        with pytest.raises(ValueError, match=r"flush_interval must be at least 1, got 0\. It counts batches"):
            Tracker(flush_interval=0)

    def test_every(self):
        """What is no length of time is refused."""
        with pytest.raises(ValueError, match="every must be a number followed by a unit, such as '10ep'; got 'soon'"):
            Tracker(every="soon")

    def test_every_so_often(self, make_loop):
        """With an interval only the newest numbers are written."""
        tracker = Tracker(every="3ba")

        make_loop(tracker).fit()

        assert losses(tracker) == [(2, 2.0), (5, 5.0)]


class TestBesideACallback:
    def test_last_words_of_a_callback(self, make_loop):
        """What a callback logs at the end of the fit is written then, and not only when the run is closed."""

        class LastWords(Callback):
            def fit_end(self, state, logger):
                logger.log_metrics({"last": 1})

        tracker = Tracker(every="0ba")
        loop = make_loop(tracker, callbacks=[LastWords()])

        loop.fit()

        assert (6, {"last": 1}) in tracker.metrics()
