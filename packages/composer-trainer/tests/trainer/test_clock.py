"""The clock of a training."""

import itertools
import time

import pytest

from composer.core import State
from composer.trainer.clock import Clock


@pytest.fixture
def clock(monkeypatch):
    """A clock that advances by a second with each reading."""
    monkeypatch.setattr(time, "perf_counter", itertools.count(0.0).__next__)
    return Clock(State(model=None))


def test_elapsed_since_the_last_call(clock):
    """Each call returns the microseconds since the last one."""
    assert [clock.elapsed(), clock.elapsed()] == [1_000_000, 1_000_000]


def test_paused_time_is_excluded(clock):
    """The time within a paused block is excluded."""
    with clock.paused():
        time.perf_counter()

    assert clock.elapsed() == 2_000_000  # of 4 seconds


def test_count_batch(clock):
    """A batch advances the timestamp by its samples, tokens and time, and keeps the previous one."""
    before = clock.state.timestamp

    clock.count_batch(4, 8, 5_000_000)

    now = clock.state.timestamp
    assert (now.batch, now.sample, now.token) == (1, 4, 8)
    assert now.total_wct.total_seconds() == 5
    assert clock.state.previous_timestamp is before
