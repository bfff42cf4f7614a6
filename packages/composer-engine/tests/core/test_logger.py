"""The logger and its destinations."""

import datetime as dt
import warnings

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from composer.core import Callback, Engine, Interval, Logger, LoggerDestination, State, Timestamp, Trace
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


def test_keyboard_interrupt_propagates(logger):
    """Ctrl-C ends the run, also while a record is stored."""

    class Interrupted(LoggerDestination):
        def log_metrics(self, metrics, step=None):
            raise KeyboardInterrupt

    logger.destinations.append(Interrupted())

    with pytest.raises(KeyboardInterrupt):
        logger.log_metrics({"loss": 1})


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
