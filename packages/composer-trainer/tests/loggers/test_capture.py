"""Printed lines are shown and captured."""

import contextlib
import io
import sys

import pytest
import tqdm

from composer.loggers.capture import CapturedStream


@pytest.fixture
def screen():
    """Return a replacement of the terminal."""
    return io.StringIO()


@pytest.fixture
def lines():
    return []


@pytest.fixture
def capture(screen, lines):
    """Return a function that replaces the standard stream, which pytest has replaced before."""

    def begin():
        stack.enter_context(contextlib.redirect_stdout(screen))
        stream = CapturedStream("stdout", lines.append)
        stream.install()
        return stream

    with contextlib.ExitStack() as stack:
        yield begin


def test_lines_are_shown_and_captured(capture, screen, lines):
    """Complete lines are captured, and everything is shown."""
    capture()

    print("one", end="")
    before = list(lines)
    print(" line\n\ntwo")

    assert before == []
    assert lines == ["one line", "two"]
    assert screen.getvalue() == "one line\n\ntwo\n"


def test_removal_restores_the_stream(capture, screen, lines):
    """The stream is restored; an incomplete line is captured."""
    captured = capture()

    print("half", end="")
    captured.remove()
    print("later")

    assert sys.stdout is screen
    assert lines == ["half"]


def test_progress_bar(capture, lines):
    """A progress bar is not captured, the lines that it leaves above it are."""
    capture()

    for number in tqdm.tqdm(range(200), file=sys.stdout, mininterval=0):
        for _ in tqdm.tqdm(range(3), file=sys.stdout, mininterval=0, leave=False):
            pass
        if number == 100:
            tqdm.tqdm.write("half", file=sys.stdout)
    print("done")

    assert lines == ["half", "done"]


def test_memory_does_not_grow_with_a_bar(capture):
    """Only the last state of a redrawn line is stored."""
    captured = capture()

    for number in range(1000):
        sys.stdout.write(f"\r{number}%")

    assert captured._line == "\r999%"


def test_replaced_stream_is_preserved(capture):
    """A stream that other code has set is not replaced."""
    captured = capture()
    other = io.StringIO()
    with contextlib.redirect_stdout(other):
        captured.remove()

        assert sys.stdout is other


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_two_captures(screen, order):
    """Two captures can be removed in any order."""
    received = [[], []]
    both = [CapturedStream("stdout", received[number].append) for number in range(2)]
    with contextlib.redirect_stdout(screen):
        for one in both:
            one.install()
        print("both")

        both[order[0]].remove()
        print("one")
        both[order[1]].remove()

        assert sys.stdout is screen
    assert received[order[0]] == ["both"]
    assert received[order[1]] == ["both", "one"]
    assert screen.getvalue() == "both\none\n"


def test_attributes_of_the_stream(capture, screen):
    """Attributes and flush are passed to the stream."""
    capture()

    sys.stdout.flush()

    assert sys.stdout.isatty() is screen.isatty()
    with pytest.raises(io.UnsupportedOperation):
        sys.stdout.fileno()


def test_missing_stream(lines):
    """Without a stream none is set."""
    stream = CapturedStream("stdout", lines.append)
    with contextlib.redirect_stdout(None):
        stream.install()
        assert sys.stdout is None
        stream.remove()

        assert sys.stdout is None
