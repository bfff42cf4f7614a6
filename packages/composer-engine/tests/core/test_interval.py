"""Intervals: a clock passes a multiple, and calls that are then due."""

import datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from composer.core import Callback, Engine, Event, Interval, State, Time, Timestamp
from composer.core.interval import checked_interval, only_when_due


def due_at(every, unit, steps, max_duration=None):
    """Return the steps of a unit after which an interval has passed."""
    interval = Interval(every)
    clocks = [Timestamp(**{unit: step}) for step in range(steps + 1)]
    return [step for step in range(1, steps + 1) if interval.passed(clocks[step - 1], clocks[step], max_duration)]


@given(st.integers(1, 20), st.integers(0, 100))
def test_is_due_at_each_multiple(every, steps):
    """An interval of three batches is due at the third, the sixth and so on."""
    assert due_at(f"{every}ba", "batch", steps) == [step for step in range(1, steps + 1) if step % every == 0]


@given(st.integers(1, 50), st.lists(st.integers(1, 100), max_size=30))
def test_is_due_when_a_multiple_is_passed(every, sizes):
    """With any batch size it is due when the number of samples passes a multiple."""
    clock, due = Timestamp(), 0
    for size in sizes:
        later = clock.to_next_batch(samples=size)
        expected = later.sample.value // every > clock.sample.value // every
        assert Interval(Time(every, "sp")).passed(clock, later) is expected
        clock, due = later, due + expected

    assert due <= sum(sizes) // every


@pytest.mark.parametrize("epochs", [7, 10, 30, 100])
@pytest.mark.parametrize("parts", [1, 2, 5, 10])
def test_fractions_of_the_training(epochs, parts):
    """A tenth of thirty epochs is due ten times, the last time at the end, despite rounding of 0.1 * 30."""
    due = due_at(Time(1 / parts, "dur"), "epoch", epochs, Time(epochs, "ep"))

    assert due == sorted({-(-epochs * part // parts) for part in range(1, parts + 1)})


def test_fraction_without_max_duration_raises():
    """A fraction of a training without a length raises."""
    with pytest.raises(ValueError, match=r"An interval of 0\.1dur needs a training with a max_duration"):
        Interval("0.1dur").passed(Timestamp(), Timestamp())


@pytest.mark.parametrize("every", ["often", "1.5ep", "-1ba", None, 1.5, True])
def test_errors_begin_with_the_parameter_name(every):
    """Every error of an interval begins with the parameter's name."""
    with pytest.raises((TypeError, ValueError), match=r"^save_interval"):
        Interval.named("save_interval", every)


class Run:
    """A training that records the batches at which an event's call was due."""

    def __init__(self, every, event, max_duration=None, epoch=5, known_length=True):
        self.event, self.epoch, self.due = event, epoch, []
        self.state = State(model=None, max_duration=max_duration)
        self.state.set_dataloader([], "train", epoch if known_length else None)
        interval = checked_interval(every, event, "it")
        self.call = only_when_due(lambda: self.due.append(int(self.state.timestamp.batch)), interval, event, self.state)

    def at(self, event):
        if event is self.event:
            self.call()

    def batch(self, samples=4):
        state = self.state
        if int(state.timestamp.batch_in_epoch) == 0:
            self.at(Event.EPOCH_START)
        self.at(Event.BEFORE_FORWARD)
        self.moves(state.timestamp.to_next_batch(samples, 10 * samples, datetime.timedelta(seconds=0.5)))
        self.at(Event.BATCH_END)
        if int(state.timestamp.batch_in_epoch) == self.epoch:
            self.moves(state.timestamp.to_next_epoch())
            self.at(Event.EPOCH_END)
            self.moves(state.timestamp.to_next_iteration())
            self.at(Event.ITERATION_END)

    def moves(self, later):
        self.state.previous_timestamp, self.state.timestamp = self.state.timestamp, later


def due_in(every, event, batches, **options):
    run = Run(every, event, **options)
    for _ in range(batches):
        run.batch()
    return run.due


@pytest.mark.parametrize(
    ("every", "event", "due"),
    [
        ("3ba", Event.BATCH_END, [3, 6, 9, 12]),
        ("1ba", Event.BATCH_END, [*range(1, 13)]),
        ("0ba", Event.BATCH_END, []),
        ("10sp", Event.BATCH_END, [3, 5, 8, 10]),
        ("100tok", Event.BATCH_END, [3, 5, 8, 10]),
        ("2sec", Event.BATCH_END, [4, 8, 12]),
        ("3ba", Event.BEFORE_FORWARD, [3, 6, 9]),
        ("5ba", Event.BEFORE_FORWARD, [5, 10]),
        ("1ba", Event.BEFORE_FORWARD, [*range(12)]),
        (1, Event.BEFORE_FORWARD, [5, 10]),
        ("2ep", Event.BEFORE_FORWARD, [10]),
        (1, Event.EPOCH_START, [0, 5, 10]),
        ("2ep", Event.EPOCH_START, [10]),
        (1, Event.EPOCH_END, [5, 10]),
        ("2ep", Event.EPOCH_END, [10]),
        ("1iter", Event.ITERATION_END, [5, 10]),
        ("2iter", Event.ITERATION_END, [10]),
    ],
)
def test_due_batches(every, event, due):
    """Twelve batches of 4 samples, 40 tokens and half a second, with five batches per epoch and iteration."""
    assert due_in(every, event, 12) == due


@pytest.mark.parametrize(
    ("max_duration", "event", "due"),
    [
        ("20ba", Event.BATCH_END, [5, 10, 15]),
        ("20ba", Event.BEFORE_FORWARD, [5, 10, 15]),
        ("2ep", Event.BATCH_END, [3, 5, 8, 10, 13, 15, 18]),
        ("8ep", Event.EPOCH_END, [10]),
        ("8ep", Event.EPOCH_START, [10]),
        ("80sp", Event.BATCH_END, [5, 10, 15]),
        ("8sec", Event.BATCH_END, [4, 8, 12, 16]),
    ],
)
def test_fraction_in_any_unit(max_duration, event, due):
    """A quarter of the training, in any unit."""
    assert due_in("0.25dur", event, 18, max_duration=max_duration) == due


def test_epochs_of_unknown_length():
    """With epochs of unknown length, a fraction is due in an epoch's first batch, never at its end."""
    assert due_in("0.5dur", Event.BEFORE_FORWARD, 12, max_duration="4ep", known_length=False) == [10]
    with pytest.raises(ValueError, match=r"every='0.5dur' of a training of 4ep would never be due at 'batch_end'"):
        due_in("0.5dur", Event.BATCH_END, 1, max_duration="4ep", known_length=False)


@given(st.integers(1, 9), st.integers(1, 9), st.integers(1, 30))
def test_batches_do_not_depend_on_epochs(every, epoch, batches):
    """Multiples of batches are due independent of where epochs end."""
    due = due_in(f"{every}ba", Event.BATCH_END, batches, epoch=epoch)

    assert due == [*range(every, batches + 1, every)]


@given(st.integers(1, 50), st.lists(st.integers(0, 20), max_size=20))
def test_samples_with_any_batch_size(every, sizes):
    """It is due at a batch's end if the batch passes a multiple; only totals are used."""
    run = Run(f"{every}sp", Event.BATCH_END)
    for size in sizes:
        run.batch(size)

    sums = [sum(sizes[:count]) for count in range(len(sizes) + 1)]
    crossed = [any(total % every == 0 for total in range(sums[n] + 1, sums[n + 1] + 1)) for n in range(len(sizes))]
    assert run.due == [n + 1 for n, is_crossed in enumerate(crossed) if is_crossed]


@given(st.sampled_from(["3ba", "10sp", "2sec", "0.3dur"]), st.integers(1, 14))
def test_is_resumable(every, stop):
    """A resumed run is due at the same batches."""
    complete, first, second = (Run(every, Event.BATCH_END, max_duration="15ba") for _ in range(3))
    for number in range(15):
        complete.batch()
        if number < stop:
            first.batch()
    second.state.timestamp = first.state.timestamp
    for _ in range(15 - stop):
        second.batch()

    assert first.due + second.due == complete.due


class TestErrors:
    @pytest.mark.parametrize(
        "event", [Event.FIT_START, Event.FIT_END, Event.INIT, Event.EVAL_START, Event.EVAL_BATCH_END]
    )
    def test_events_outside_of_training_raise(self, event):
        """Intervals at events that run once, or in an evaluation, raise."""
        with pytest.raises(ValueError, match=rf"Mine: every='10ba' cannot be used at '{event.value}'"):
            checked_interval("10ba", event, "Mine")

    @pytest.mark.parametrize(
        ("every", "event", "allowed"),
        [
            ("1ep", Event.BATCH_END, "batches, samples, tokens, seconds or durations"),
            ("10sp", Event.BEFORE_FORWARD, "batches, epochs or durations"),
            ("10ba", Event.EPOCH_START, "epochs or durations"),
            ("1ep", Event.ITERATION_END, "in iterations, or"),
            ("10sp", Event.EPOCH_END, "in epochs or durations"),
        ],
    )
    def test_never_due_raises(self, every, event, allowed):
        """An interval that would never be due raises; others do not."""
        with pytest.raises(ValueError, match=rf"every='{every}' would never be due at '{event.value}'.*{allowed}"):
            checked_interval(every, event, "it")


def test_intervals_of_a_callback(make, calls):
    """Hooks with an interval are called when it is due; other hooks are called each time."""
    state = State(model=None)
    watch = make.callback("Watch", "batch_end", "batch_start", "fit_end")
    watch.intervals = lambda: {"batch_end": "2ba", Event.BATCH_START: Time(1, "ba")}
    state.callbacks = watch
    engine = Engine(state)
    for _ in range(4):
        engine.run_event("batch_start")
        state.previous_timestamp, state.timestamp = state.timestamp, state.timestamp.to_next_batch()
        engine.run_event("batch_end")
    engine.run_event("fit_end")

    assert [event for _, event in calls] == [
        *(["batch_start"] * 2 + ["batch_end"]) * 2,
        "fit_end",
    ]


@pytest.mark.parametrize(
    ("intervals", "error", "message"),
    [
        ({"batch_ends": "2ba"}, ValueError, "'batch_ends' is not a valid Event"),
        ({"fit_end": "2ba"}, ValueError, "Watch: every='2ba' cannot be used at 'fit_end'"),
        ({"batch_end": None}, TypeError, "Watch: every must be a Time or a string"),
    ],
)
def test_invalid_intervals_of_a_callback_raise(intervals, error, message):
    """Invalid intervals of a callback raise when the plan is built."""

    class Watch(Callback):
        def intervals(self):
            return intervals

    with pytest.raises(error, match=message):
        Engine(State(model=None, callbacks=Watch()))
