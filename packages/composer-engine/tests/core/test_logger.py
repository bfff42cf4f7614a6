"""The logger and its destinations."""

import datetime as dt
import re
import warnings

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from composer.core import Callback, Engine, Interval, Logger, LoggerDestination, State, Timestamp, Trace
from composer.core.interval import to_interval
from composer.core.logger import detach_to_host


class Memory(LoggerDestination):
    """Stores everything that is logged."""

    def __init__(self):
        self.logged = []

    def log_metrics(self, metrics, step=None):
        self.logged.append(("metrics", metrics, step))

    def log_hyperparameters(self, hyperparameters):
        self.logged.append(("hyperparameters", hyperparameters))

    def log_traces(self, traces):
        self.logged.append(("traces", traces))

    def log_table(self, columns, rows, name="Table", step=None):
        self.logged.append(("table", columns, rows, name, step))

    def log_images(self, images, name="Images", channels_last=False, step=None, **details):
        self.logged.append(("images", images, name, channels_last, step, details))

    def upload_file(self, state, remote_file_name, file_path, *, overwrite=False):
        self.logged.append(("file", remote_file_name, str(file_path), overwrite))

    def can_upload_files(self):
        return True


class Broken(LoggerDestination):
    """Fails to store any record."""

    def log_metrics(self, metrics, step=None):
        raise OSError("disk full")

    def log_hyperparameters(self, hyperparameters):
        raise ValueError("no")


@pytest.fixture
def memory():
    return Memory()


@pytest.fixture
def logger(memory):
    state = State(model=None)
    state.timestamp = Timestamp(batch=7)
    return Logger(state, memory)


def test_all_records_are_passed_on(logger, memory):
    """Each kind of record is passed on unchanged, with the batch as its step."""
    logger.log_metrics({"loss": 1})
    logger.log_metrics({"loss": 2}, step=3)
    logger.log_hyperparameters({"lr": 0.1})
    logger.log_traces({"t": Trace("A")})
    logger.log_table(["a"], [[1]], name="T")
    logger.log_images("pixels", channels_last=True, use_table=False)
    logger.upload_file("there", "here", overwrite=True)

    assert memory.logged == [
        ("metrics", {"loss": 1}, 7),
        ("metrics", {"loss": 2}, 3),
        ("hyperparameters", {"lr": 0.1}),
        ("traces", {"t": Trace("A")}),
        ("table", ["a"], [[1]], "T", 7),
        ("images", "pixels", "Images", True, 7, {"use_table": False}),
        ("file", "there", "here", True),
    ]


def test_base_class_ignores_all_records(logger):
    """A destination overrides the methods it supports and ignores the rest."""
    logger.destinations = [LoggerDestination()]

    logger.log_metrics({"loss": 1})
    logger.log_table(["a"], [])
    logger.log_images(None)
    logger.upload_file("there", "here")

    assert not logger.has_file_upload_destination()


def test_failure_is_reported_once(logger, memory):
    """A failure is reported once per method, and the other destinations receive everything."""
    logger.destinations.insert(0, Broken())

    with pytest.warns(RuntimeWarning, match="Broken.log_metrics failed.*training continues.*OSError: disk full"):
        logger.log_metrics({"loss": 1})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        logger.log_metrics({"loss": 2})
    with pytest.warns(RuntimeWarning, match="Broken.log_hyperparameters failed"):
        logger.log_hyperparameters({"lr": 0.1})

    assert [entry[1] for entry in memory.logged] == [{"loss": 1}, {"loss": 2}, {"lr": 0.1}]


def test_failures_of_two_destinations_are_both_reported(logger):
    """Each destination has its own report."""
    logger.destinations = [Broken(), Broken()]

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        logger.log_metrics({"loss": 1})
        logger.log_metrics({"loss": 2})

    assert len(caught) == 2


def test_warning_points_to_the_caller(logger):
    """The warning has the line that logged."""
    logger.destinations = [Broken()]

    with pytest.warns(RuntimeWarning) as caught:
        logger.log_metrics({"loss": 1})

    assert caught[0].filename == __file__


def test_keyboard_interrupt_propagates(logger):
    """Ctrl-C ends the run, also while a record is stored."""

    class Interrupted(LoggerDestination):
        def log_metrics(self, metrics, step=None):
            raise KeyboardInterrupt

    logger.destinations.append(Interrupted())

    with pytest.raises(KeyboardInterrupt):
        logger.log_metrics({"loss": 1})


@pytest.mark.parametrize("wrong", [print, Memory, "file.txt"])
def test_non_destinations_raise(wrong):
    """A function or a class is not a destination."""
    with pytest.raises(TypeError, match="loggers must be LoggerDestination objects"):
        Logger(State(model=None), [wrong])


def test_non_state_raises():
    """A state of another type raises at construction."""
    with pytest.raises(TypeError, match=r"^state must be a State, such as State\(model=model\), got int"):
        Logger(5)


def test_single_non_destination_raises():
    """A single object that is not a destination raises."""
    with pytest.raises(TypeError, match=r"^loggers must be LoggerDestination objects, got 5"):
        Logger(State(model=None), destinations=5)


def test_download_without_file_support_raises():
    """A destination without files raises."""
    with pytest.raises(NotImplementedError, match="LoggerDestination stores no files and cannot fetch 'a'"):
        LoggerDestination().download_file("a", "b")


class Every(Memory):
    """Stores metrics once per interval."""

    def __init__(self, every):
        super().__init__()
        self.every = every

    @property
    def steps(self):
        return [(metrics, step) for _, metrics, step in self.logged]


def run_batches(state, logger, count, **options):
    """Log each batch's number like a trainer: the loss before the clock advances, a speed after."""
    for _ in range(count):
        number = int(state.timestamp.batch)
        logger.log_metrics({"loss": number})
        state.previous_timestamp = state.timestamp
        state.timestamp = state.timestamp.to_next_batch(**options)
        logger.log_metrics({"speed": number + 1})


class TestEvery:
    @pytest.fixture
    def state(self):
        return State(model=None, max_duration="4ep")

    def test_latest_values_at_each_multiple(self, state):
        """The latest value of each name is delivered with its own step, in ascending order of steps."""
        store = Every(Interval("3ba"))

        run_batches(state, Logger(state, store), 7)

        assert store.steps == [({"speed": 2, "loss": 2}, 2), ({"speed": 5, "loss": 5}, 5)]

    def test_steps_are_ascending(self, state):
        """A rarely logged name is delivered first, with its own, lower step."""
        store = Every("4ba")
        logger = Logger(state, store)
        logger.log_metrics({"loss": 0.0, "rare": 0.5})

        run_batches(state, logger, 4)
        logger.deliver()

        assert [step for _, step in store.steps] == [0, 3, 4]
        assert store.steps[0][0] == {"rare": 0.5}
        assert store.steps[1][0] == {"loss": 3, "speed": 3}

    def test_metrics_are_delivered_once(self, state):
        """Delivered metrics are not delivered again."""
        store = Every("2ba")
        logger = Logger(state, store)
        logger.log_metrics({"once": 1})
        run_batches(state, logger, 5)
        logger.deliver()
        logger.deliver()

        assert sum("once" in metrics for metrics, _ in store.steps) == 1
        assert [metrics["loss"] for metrics, _ in store.steps if "loss" in metrics] == [1, 3, 4]

    def test_interval_restarts_after_a_delivery(self, state):
        """A delivery at the end of one training does not cause an early one in the next."""
        store = Every("3ba")
        logger = Logger(state, store)
        logger.log_metrics({"loss": 0})
        state.timestamp = state.timestamp.copy(batch=3)
        logger.deliver()
        store.logged.clear()

        run_batches(state, logger, 2)

        assert store.logged == []

    def test_remaining_metrics_at_the_end(self, state):
        """With an interval of 0, metrics are stored until deliver() is called."""
        store = Every("0ba")
        logger = Logger(state, store)
        run_batches(state, logger, 5)
        before = list(store.logged)

        logger.deliver()

        assert before == []
        assert store.steps == [({"loss": 4}, 4), ({"speed": 5}, 5)]

    @pytest.mark.parametrize(
        ("every", "batches_between"), [("8sp", 2), ("0.25dur", 5), ("0.1dur", 2), (1, 5), ("2ep", 10), ("6sec", 3)]
    )
    def test_units(self, state, every, batches_between):
        """Samples, fractions of the training, epochs and seconds are supported; 4 epochs have 20 batches."""
        store = Every(Interval(every))
        logger = Logger(state, store)
        state.set_dataloader(None, "train", 5)

        for _ in range(4):
            run_batches(state, logger, 5, samples=4, duration=dt.timedelta(seconds=2))
            state.timestamp = state.timestamp.to_next_epoch()
        logger.log_metrics({"end": 1})

        losses = [metrics["loss"] for metrics, _ in store.steps if "loss" in metrics]
        assert losses == list(range(batches_between - 1, 20, batches_between))[: len(losses)]
        assert len(losses) == 20 // batches_between

    def test_evaluation_does_not_change_the_interval(self, state):
        """While another loader is in use, a fraction of an epoch is not computed from its length."""
        training, evaluation = [1] * 10, [1]
        store = Every("0.125dur")
        logger = Logger(state, store)
        state.train_dataloader = training
        state.set_dataloader(training, "train", 10)
        run_batches(state, logger, 3)
        state.timestamp = state.timestamp.copy()
        state.set_dataloader(evaluation, "eval", 1)
        logger.log_metrics({"metrics/eval/x": 1})
        state.set_dataloader(training, "train", 10)

        run_batches(state, logger, 2)
        logger.log_metrics({"more": 1})

        assert [metrics.get("loss") for metrics, _ in store.steps if "loss" in metrics] == [4]

    def test_tensors_are_copied(self, state):
        """A tensor that is changed in place before delivery is delivered with its logged value."""
        store = Every("0ba")
        logger = Logger(state, store)
        vector, number = torch.ones(2), torch.tensor(1.0)
        logger.log_metrics({"vector": vector, "number": number})

        vector.zero_(), number.zero_()
        logger.deliver()

        assert store.steps[0][0]["vector"].tolist() == [1.0, 1.0]
        assert float(store.steps[0][0]["number"]) == 1.0

    def test_only_metrics_are_delayed(self, state):
        """Settings, tables, images, traces and files are passed on immediately."""
        store = Every("0ba")
        logger = Logger(state, store)

        logger.log_hyperparameters({"lr": 0.1})
        logger.log_table(["a"], [[1]])
        logger.log_images("pixels")
        logger.log_traces({"t": Trace("A")})
        logger.upload_file("there", "here")

        assert [entry[0] for entry in store.logged] == ["hyperparameters", "table", "images", "traces", "file"]

    def test_other_destinations_are_not_delayed(self, state):
        """A destination without an interval receives each call."""
        plain, store = Memory(), Every("10ba")

        run_batches(state, Logger(state, [store, plain]), 5)

        assert len(plain.logged) == 10
        assert store.logged == []

    def test_failure_is_reported_once(self, state):
        """A failure of a delayed delivery is reported, and the other destinations receive their metrics."""

        class BrokenEvery(Broken):
            every = Interval("1ba")

        store = Every("1ba")
        logger = Logger(state, [BrokenEvery(), store])

        logger.log_metrics({"first": 1})
        with pytest.warns(RuntimeWarning, match="BrokenEvery.log_metrics failed.*disk full") as caught:
            run_batches(state, logger, 3)
        logger.deliver()

        assert len(caught) == 1
        assert len(store.logged) > 2

    def test_removed_destination_receives_pending_metrics(self, state):
        """Metrics that were logged before a destination was removed are delivered."""
        store = Every("0ba")
        logger = Logger(state, store)
        logger.log_metrics({"loss": 1})

        logger.destinations = []
        logger.log_metrics({"loss": 2})
        logger.deliver()

        assert store.steps == [({"loss": 1}, 0)]

    @pytest.mark.parametrize(
        ("wrong", "message"),
        [
            ("10", "every must be a number followed by a unit, such as '10ep'; got '10'"),
            ("-1ba", "every must be 0 (never) or more, got -1ba."),
            ("10apples", "every must be a number followed by a unit, such as '10ep'; got '10apples'"),
            (-1, "every must be 0 (never) or more, got -1ep."),
        ],
    )
    def test_invalid_interval_raises(self, wrong, message):
        """Invalid intervals raise at conversion."""
        with pytest.raises(ValueError, match=re.escape(message)):
            to_interval(wrong)

    def test_interval_of_wrong_type_raises(self):
        """A value of another type is a TypeError."""
        with pytest.raises(TypeError, match=r"every must be .* got 1\.5"):
            to_interval(1.5)

    @given(
        every=st.integers(1, 9),
        logged=st.lists(st.tuples(st.sampled_from("abc"), st.booleans()), max_size=60),
    )
    @settings(deadline=None)
    def test_delivery_property(self, every, logged):
        """The last value of each name is delivered, steps ascend within a delivery, and no value is invented."""
        state, store = State(model=None), Every(Interval(f"{every}ba"))
        logger = Logger(state, store)
        sent = []
        for number, (name, moves_on) in enumerate(logged):
            sent.append((name, number, int(state.timestamp.batch)))
            logger.log_metrics({name: number})
            if moves_on:
                state.timestamp = state.timestamp.to_next_batch()
        logger.deliver()

        received = [(name, value, step) for metrics, step in store.steps for name, value in metrics.items()]
        last = {name: (name, value, step) for name, value, step in sent}
        assert set(received) <= set(sent)
        assert len(set(received)) == len(received)
        assert set(last.values()) <= set(received)
        for name in last:
            values = [value for one, value, _ in received if one == name]
            assert values == sorted(values)


class Recorder(Every):
    """Records what it has received at some events."""

    def __init__(self):
        super().__init__("0ba")
        self.had = {}

    def fit_end(self, state, logger):
        self.had["fit_end"] = self.steps

    def eval_after_all(self, state, logger):
        self.had["eval_after_all"] = self.steps

    def eval_standalone_end(self, state, logger):
        self.had["eval_standalone_end"] = self.steps

    def close(self, state, logger):
        self.had["close"] = self.steps


class TestDeliveryByTheEngine:
    @pytest.fixture
    def recorder(self):
        return Recorder()

    @pytest.fixture
    def engine(self, state, recorder):
        class LogsAtTheEnd(Callback):
            def fit_end(self, state, logger):
                logger.log_metrics({"last": 1})

            def close(self, state, logger):
                logger.log_metrics({"very last": 1})

        state.callbacks = LogsAtTheEnd()
        return Engine(state, Logger(state, recorder))

    @pytest.fixture
    def state(self):
        return State(model=None)

    @pytest.mark.parametrize("event", ["fit_end", "eval_standalone_end"])
    def test_before_the_destinations_hook(self, engine, recorder, event):
        """Delayed metrics are delivered before the destination's own hook, which can store them."""
        engine.logger.log_metrics({"loss": 1})

        engine.run_event(event)

        assert ({"loss": 1} | ({"last": 1} if event == "fit_end" else {}), 0) in recorder.had[event]

    def test_destination_without_hooks(self, state):
        """Delayed metrics are also delivered to a destination without hooks."""
        store = Every("0ba")
        engine = Engine(state, Logger(state, store))
        engine.logger.log_metrics({"loss": 1})

        engine.run_event("fit_end")

        assert store.steps == [({"loss": 1}, 0)]

    def test_not_after_an_evaluation_within_fit(self, engine, recorder):
        """An evaluation in a training does not deliver delayed metrics."""
        engine.logger.log_metrics({"loss": 1})

        engine.run_event("eval_after_all")

        assert recorder.had["eval_after_all"] == []

    def test_when_the_engine_is_closed(self, engine, recorder):
        """Metrics that callbacks log in close arrive before the destination is closed."""
        engine.logger.log_metrics({"loss": 1})

        engine.close()

        assert recorder.had["close"] == [({"loss": 1, "very last": 1}, 0)]


class Resumable(LoggerDestination):
    """A destination with state."""

    def __init__(self, run_id=None):
        self.run_id = run_id

    def state_dict(self):
        return {} if self.run_id is None else {"run_id": self.run_id}

    def load_state_dict(self, state):
        self.run_id = state["run_id"]


class TestStateOfDestinations:
    def test_state_by_class_name(self):
        """Each destination loads its own state; those of one class are distinguished by position."""
        saved = Logger(State(model=None), [Resumable("a"), Memory(), Resumable("b")]).state_dict()
        later = Logger(State(model=None), [Memory(), Resumable(), Resumable()])

        later.load_state_dict(saved)

        assert saved == {"Resumable": {"run_id": "a"}, "Resumable.1": {"run_id": "b"}}
        assert [one.run_id for one in later.destinations[1:]] == ["a", "b"]

    def test_destinations_may_differ_on_resume(self):
        """A later run may use other destinations."""
        later = Logger(State(model=None), [Memory()])

        later.load_state_dict({"Resumable": {"run_id": "a"}})

        assert later.state_dict() == {}


def test_report_failure_warns_once_per_method(logger, memory):
    """A destination with delayed storage reports failures itself; the warning points to its own line."""
    with pytest.warns(RuntimeWarning, match="Memory.flush failed.*OSError: full") as caught:
        logger.report_failure(memory, "flush", OSError("full"))
    logger.report_failure(memory, "flush", OSError("full"))
    with pytest.warns(RuntimeWarning, match="Memory.close failed"):
        logger.report_failure(memory, "close", OSError("full"))

    assert caught[0].filename == __file__


def test_detach_does_not_synchronize():
    """A number on the CPU is read; other tensors are copied, without their graph."""
    vector = torch.ones(2, requires_grad=True)

    preserved = detach_to_host(vector)

    assert detach_to_host(torch.tensor(3)) == 3
    assert type(detach_to_host(torch.tensor(3))) is int
    assert not preserved.requires_grad
    assert preserved.data_ptr() != vector.data_ptr()
    assert detach_to_host("text") == "text"
