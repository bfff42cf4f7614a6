"""How often."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from composer.core import Interval, Time, Timestamp


def due_at(every, unit, steps, max_duration=None):
    """Return after which of so many steps of a unit an interval has passed."""
    interval = Interval(every)
    clocks = [Timestamp(**{unit: step}) for step in range(steps + 1)]
    return [step for step in range(1, steps + 1) if interval.passed(clocks[step - 1], clocks[step], max_duration)]


@given(st.integers(1, 20), st.integers(0, 100))
def test_is_due_at_each_multiple(every, steps):
    """Every third batch is the third, the sixth and so on."""
    assert due_at(f"{every}ba", "batch", steps) == [step for step in range(1, steps + 1) if step % every == 0]


@given(st.integers(1, 50), st.lists(st.integers(1, 100), max_size=30))
def test_is_due_once_for_each_multiple_that_is_stepped_over(every, sizes):
    """Batches of any size: due whenever the count of samples has passed a multiple."""
    clock, due = Timestamp(), 0
    for size in sizes:
        later = clock.to_next_batch(samples=size)
        expected = later.sample.value // every > clock.sample.value // every
        assert Interval(Time(every, "sp")).passed(clock, later) is expected
        clock, due = later, due + expected

    assert due <= sum(sizes) // every


def test_numbers_count_epochs():
    """An interval of 2 is two epochs."""
    assert due_at(2, "epoch", 5) == [2, 4]


def test_zero_is_never():
    """Nothing is due every 0 batches."""
    assert due_at("0ba", "batch", 5) == []
    assert due_at("0.0dur", "batch", 5) == []


@pytest.mark.parametrize("epochs", [7, 10, 30, 100])
@pytest.mark.parametrize("parts", [1, 2, 5, 10])
def test_fractions_of_the_training(epochs, parts):
    """A tenth of thirty epochs comes ten times, the last time at the end, whatever floats make of 0.1 * 30."""
    due = due_at(Time(1 / parts, "dur"), "epoch", epochs, Time(epochs, "ep"))

    assert due == sorted({-(-epochs * part // parts) for part in range(1, parts + 1)})


def test_fraction_needs_a_length():
    """A tenth of a training without end is nothing."""
    with pytest.raises(ValueError, match=r"An interval of 0\.1dur needs a training with a max_duration"):
        Interval("0.1dur").passed(Timestamp(), Timestamp())


def test_fraction_of_nothing_is_never():
    """A training that was stopped before its first batch has no tenth."""
    assert not Interval("0.1dur").passed(Timestamp(), Timestamp(), Time(0, "ba"))


def test_large_counts_are_exact():
    """One sample less than the interval is not enough, also beyond what a float's margin would forgive."""
    assert not Interval(Time(10**10 + 1, "sp")).passed(Timestamp(), Timestamp(sample=10**10))


def test_negative_intervals_are_refused():
    """Every minus one epochs is a mistake."""
    with pytest.raises(ValueError, match=r"An interval must be 0 \(never\) or more, got -1ep"):
        Interval(-1)


@pytest.mark.parametrize("every", ["often", "1.5ep", "-1ba", None, 1.5, True])
def test_an_error_begins_with_the_parameters_name(every):
    """Whatever is wrong with an interval, the parameter that it was given for is named."""
    with pytest.raises((TypeError, ValueError), match=r"^save_interval"):
        Interval.named("save_interval", every)
