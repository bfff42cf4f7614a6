"""Spans lie within one another or apart, whatever is called in which order."""

import threading
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from composer.profiler.recording import PHASES, Recording


def nests(spans):
    """Return whether of any two spans one lies within the other, or they are apart."""
    stack = []
    for span in spans:
        while stack and stack[-1] <= span.begin:
            stack.pop()
        if stack and span.begin + span.duration > stack[-1]:
            return False
        stack.append(span.begin + span.duration)
    return True


@given(st.lists(st.tuples(st.booleans(), st.sampled_from(sorted(PHASES))), max_size=30))
def test_phases_nest(steps):
    """Phases that begin and end in any order, or never, are spans within one another or apart."""
    recording = Recording()
    for begins, name in steps:
        (recording.begin_phase if begins else recording.end_phase)(name)
        recording.run(f"event/{name}", ("event",), lambda: None)

    events = recording.finished()

    assert nests(events)
    assert len([event for event in events if event.name in PHASES]) == sum(begins for begins, _ in steps)
    assert all(event.duration >= 0 for event in events)


def test_the_check_above_sees_what_does_not_nest():
    """Two spans that overlap are found."""
    recording = Recording()
    first, second = recording.begin("first", ()), recording.begin("second", ())
    time.sleep(0.001)
    recording.end(first)
    recording.end(second)

    assert not nests(recording.finished())


def test_calls_that_raise_are_recorded():
    """The span ends where the error passed."""
    recording = Recording()

    with pytest.raises(ZeroDivisionError):
        recording.run("outer", (), lambda: recording.run("inner", (), lambda: 1 / 0))

    assert [event.name for event in recording.finished()] == ["outer", "inner"]


def test_times_are_those_of_the_clock():
    """A span begins at the time since 1970 and takes as long as the call."""
    recording, before = Recording(), time.time_ns()

    recording.run("sleep", (), lambda: time.sleep(0.02))

    [span] = recording.finished()
    assert before - 1e6 <= span.begin <= time.time_ns()
    assert 20e6 <= span.duration <= time.time_ns() - before + 1e6


def test_each_thread_has_its_own():
    """Records of another thread are distinguished by their thread."""
    recording = Recording()
    thread = threading.Thread(target=recording.run, args=("other", (), lambda: None))
    recording.run("outer", (), lambda: (thread.start(), thread.join()))

    outer, other = recording.finished()

    assert (outer.name, other.name) == ("outer", "other")
    assert outer.thread == threading.get_ident() != other.thread


def test_instants_and_counters():
    """They have no duration; a counter has its values, an instant where the training stood."""
    recording = Recording()
    recording.args = {"batch": 3}
    recording.add_instant("now", ("a", "b"))
    recording.add_counter("memory", (), {"used": 2.0})

    instant, counter = recording.finished()

    assert (instant.kind, instant.categories, instant.args, instant.duration) == (
        "instant",
        ("a", "b"),
        {"batch": 3},
        0,
    )
    assert (counter.kind, counter.args) == ("counter", {"used": 2.0})
