"""Common behavior of experiment tracker loggers: buffering, reading, delayed writes and failures."""

import warnings

import pytest
import torch

from composer.core import Callback, Engine, Logger, State
from composer.loggers.tracker_logger import TrackerLogger


class Tracker(TrackerLogger):
    """Stores values in a list like a tracker, and fails on request."""

    product = ("json", "none")

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
        """All logged values are written in order, as plain numbers."""
        tracker = Tracker()

        make_loop(tracker).fit(evaluate=True)

        assert losses(tracker) == [(number, float(number)) for number in range(6)]
        assert (6, {"metrics/eval/Accuracy": 0.75}) in tracker.metrics()

    def test_flush_interval(self, make_loop):
        """Between two flushes values are stored."""
        tracker = Tracker(flush_interval=2)
        loop = make_loop(tracker)
        written = []

        for _ in range(5):
            loop.batch()
            written.append(len(losses(tracker)))

        assert written == [0, 2, 2, 4, 4]

    @pytest.mark.parametrize("event", ["epoch_end", "eval_after_all", "eval_standalone_end", "fit_end", "predict_end"])
    def test_flush_events(self, make_loop, event):
        """Values are flushed at ending events."""
        tracker = Tracker()
        loop = make_loop(tracker)
        loop.batch()

        loop.engine.run_event(event)

        assert losses(tracker) == [(0, 0.0)]

    def test_one_synchronization_per_flush(self, make_loop, unread):
        """Device values are read together when they are written."""
        tracker = Tracker(flush_interval=4)
        loop = make_loop(tracker)
        for number in range(3):
            loop.batch(slow=unread(number))
        before = unread.counter.reads

        loop.batch(slow=unread(3))

        assert (before, unread.counter.reads) == (0, 1)
        assert [metrics["slow"] for _, metrics in tracker.metrics()] == [0.0, 1.0, 2.0, 3.0]

    def test_values_that_are_not_numbers(self, make_loop):
        """Each of several values has a name; strings are omitted; bools are numbers."""
        tracker = Tracker()
        loop = make_loop(tracker)

        loop.logger.log_metrics({"recall": torch.tensor([0.5, 1.0]), "text": "a", "flag": True, "nested": {"x": 1}})
        tracker.flush()

        assert tracker.metrics() == [(0, {"recall/0": 0.5, "recall/1": 1.0, "flag": 1.0, "nested/x": 1})]


class TestRun:
    def test_records_before_opening(self):
        """Records before AFTER_LOAD are stored in order, as the run may continue an earlier one."""
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

    def test_rank_zero_only(self, make_loop, tmp_path):
        """By default other processes store nothing."""
        silent, loud = Tracker(), Tracker(rank_zero_only=False)
        loop = make_loop(silent, loud, rank=1)

        loop.logger.log_hyperparameters({"a": 1})
        loop.logger.log_images(torch.zeros(1, 8, 8))
        loop.fit()
        loop.engine.close()

        assert silent.stored == []
        assert losses(loud)[-1] == (5, 5.0)

    def test_other_records(self, make_loop, tmp_path):
        """Hyperparameters, tables, images and files are written immediately."""
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

    def test_error_in_training(self, make_loop):
        """After an error all records are written, and the run is closed."""
        tracker = Tracker(every="0ba")
        loop = make_loop(tracker)
        loop.batch()
        loop.batch()

        loop.engine.close()

        assert losses(tracker) == [(1, 1.0)]
        assert tracker.kinds()[-1] == "close"


class TestFailures:
    def test_failing_flush(self, make_loop):
        """A failed flush is reported once, and the run continues."""
        tracker = Tracker(flush_interval=1)
        loop = make_loop(tracker)
        tracker.failing = {"metrics"}

        with pytest.warns(RuntimeWarning, match=r"Tracker\.flush failed .* training continues.*OSError: no metrics"):
            loop.batch()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            loop.batch()
        tracker.failing = set()
        loop.batch()

        assert losses(tracker) == [(2, 2.0)]

    @pytest.mark.parametrize("kind", ["hyperparameters", "table", "images", "file"])
    def test_failing_records(self, make_loop, tmp_path, kind):
        """Failures of other records are reported too."""
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

    def test_failing_open_raises(self):
        """A run that cannot be opened raises before training, after one attempt."""
        tracker, state = Tracker(), State(model=None)
        engine = Engine(state, Logger(state, tracker))
        tracker.failing = {"open"}
        engine.logger.log_hyperparameters({})

        with pytest.raises(OSError, match="no open"):
            engine.run_event("after_load")
        tracker.failing = set()
        engine.close()

        assert tracker.stored == []


class TestSettings:
    def test_interval(self, make_loop):
        """With an interval only the latest values are written."""
        tracker = Tracker(every="3ba")

        make_loop(tracker).fit()

        assert losses(tracker) == [(2, 2.0), (5, 5.0)]


class TestWithCallback:
    def test_metrics_of_fit_end(self, make_loop):
        """Metrics that a callback logs at FIT_END are written then, not by close."""

        class LogAtFitEnd(Callback):
            def fit_end(self, state, logger):
                logger.log_metrics({"last": 1})

        tracker = Tracker(every="0ba")
        loop = make_loop(tracker, callbacks=[LogAtFitEnd()])

        loop.fit()

        assert (6, {"last": 1}) in tracker.metrics()
