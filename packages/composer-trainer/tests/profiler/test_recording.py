"""Spans are nested or disjoint for any order of calls."""

import threading
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from composer.profiler.recording import PHASES, Recording


def nests(spans):
    """Return whether any two spans are nested or disjoint."""
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
    """Phases that start and end in any order, or never, give nested or disjoint spans."""
    recording = Recording()
    for begins, name in steps:
        (recording.begin_phase if begins else recording.end_phase)(name)
        recording.run(f"event/{name}", ("event",), lambda: None)

    events = recording.finished()

    assert nests(events)
    assert len([event for event in events if event.name in PHASES]) == sum(begins for begins, _ in steps)
    assert all(event.duration >= 0 for event in events)


def test_nesting_check_detects_overlaps():
    """Two overlapping spans are detected."""
    recording = Recording()
    first, second = recording.span("first", ()), recording.span("second", ())
    first.__enter__()
    second.__enter__()
    time.sleep(0.001)
    first.__exit__(None, None, None)
    second.__exit__(None, None, None)

    assert not nests(recording.finished())


def test_calls_that_raise_are_recorded():
    """The span ends when the error is raised."""
    recording = Recording()

    with pytest.raises(ZeroDivisionError):
        recording.run("outer", (), lambda: recording.run("inner", (), lambda: 1 / 0))

    assert [event.name for event in recording.finished()] == ["outer", "inner"]


def test_times_are_unix_times():
    """A span starts at the time since 1970 and has the call's duration."""
    recording, before = Recording(), time.time_ns()

    recording.run("sleep", (), lambda: time.sleep(0.02))

    [span] = recording.finished()
    assert before - 1e6 <= span.begin <= time.time_ns()
    assert 20e6 <= span.duration <= time.time_ns() - before + 1e6


def test_records_have_their_thread():
    """Records of different threads are distinguished."""
    recording = Recording()
    thread = threading.Thread(target=recording.run, args=("other", (), lambda: None))
    recording.run("outer", (), lambda: (thread.start(), thread.join()))

    outer, other = recording.finished()

    assert (outer.name, other.name) == ("outer", "other")
    assert outer.thread == threading.get_ident() != other.thread


def test_instants_and_counters():
    """They have no duration; a counter has values, an instant the clock."""
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
